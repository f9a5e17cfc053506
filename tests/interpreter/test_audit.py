"""The audit on kernels in the interpreter: they pass, and a fault among them is named."""

from typing import Any

import pytest

from nemotriton.audit.divergence import Audit, Culprit
from nemotriton.audit.walk import TWINS, Walk
from nemotriton.engine.llm import LLM
from nemotriton.kernels.op import OPS
from tests.audit.command import commands, invoke, invoke_json

IDS = [(37 * i + i * i) % 256 for i in range(11)]


def culprit_of(dtype: str, layers: int, tokens: int) -> Culprit | None:
    with LLM.synthetic(
        "tiny",
        layers=layers,
        width_scale=0.25,
        dtype=dtype,
        device="cpu",
        max_context=64,
        max_requests=1,
    ) as llm:
        walk = Walk.of(llm, IDS[:tokens], 2)
        audit = Audit(walk, {}, list(walk.chain(TWINS)))
        return audit.culprit(audit.run())


def test_the_kernels_are_within_their_bounds() -> None:
    """Every kind of layer in bf16; fp32 is in the command's test."""
    assert culprit_of("bfloat16", 4, 6) is None


def test_a_fault_among_real_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = OPS["gated_rms_norm"].triton

    def wrong(x: Any, z: Any, weight: Any, eps: float, groups: int) -> Any:
        return honest(x, z, weight, eps, 1)

    monkeypatch.setattr(OPS["gated_rms_norm"], "triton", wrong)
    culprit = culprit_of("float32", 1, 5)
    assert culprit is not None
    assert (culprit.layer, culprit.kind, culprit.boundary) == (0, "mamba", "mixer")
    assert culprit.ops == ["gated_rms_norm"]


def test_the_page_s_command() -> None:
    """The one of docs/audit.md that wants the interpreter."""
    (args,) = (c for c in commands() if c[0] == "TRITON_INTERPRET=1")
    code, found = invoke_json(*args[1:])
    assert code == 0
    assert found["culprit"] is None
    assert [layer["kind"] for layer in found["layers"]] == ["mamba", "attention", "head"]
    code, _, err = invoke(*args[1:], "--dtype", "bfloat16")
    assert code == 2
    assert "--dtype bfloat16 under TRITON_INTERPRET=1" in err
