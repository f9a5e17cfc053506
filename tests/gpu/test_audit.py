"""The audits on a GPU: kernels at real widths are within their bounds, and a fault is named."""

from typing import Any

import pytest
from torch import Tensor

from nemotriton.audit import parity
from nemotriton.audit.divergence import Audit, Culprit
from nemotriton.audit.walk import TWINS, Walk
from nemotriton.engine.caches import MambaStates
from nemotriton.engine.llm import LLM
from nemotriton.kernels.op import OPS
from tests.audit.command import invoke_json

IDS = [(37 * i + i * i) % 256 for i in range(72)]


def made(preset: str, quant: str, dtype: str = "bfloat16", graphs: bool = False) -> LLM:
    return LLM.synthetic(
        preset,
        layers=8,
        quant=quant,
        dtype=dtype,
        device="cuda",
        max_context=128,
        max_requests=1,
        graphs=graphs,
        memory=0.5,
    )


def culprit_of(llm: LLM) -> Culprit | None:
    walk = Walk.of(llm, IDS, 8)
    audit = Audit(walk, {}, list(walk.chain(TWINS)))
    layers = audit.run()
    worst = max(layers, key=lambda layer: layer.worst.excess)
    print(f"worst: layer {worst.index} ({worst.kind}) {worst.worst}")
    return audit.culprit(layers)


@pytest.mark.parametrize(
    "preset,quant,dtype",
    [
        ("tiny", "bf16", "float32"),
        ("nano-30b", "bf16", "bfloat16"),
        ("nano-30b", "fp8", "bfloat16"),
        ("nano-30b", "nvfp4", "bfloat16"),
        ("super-120b", "super-mixed", "bfloat16"),
    ],
)
def test_kernels_are_within_their_bounds(preset: str, quant: str, dtype: str) -> None:
    with made(preset, quant, dtype) as llm:
        assert culprit_of(llm) is None


def test_a_fault_among_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = OPS["gated_rms_norm"].triton

    def wrong(x: Any, z: Any, weight: Any, eps: float, groups: int) -> Any:
        return honest(x, z, weight, eps, 1)

    monkeypatch.setattr(OPS["gated_rms_norm"], "triton", wrong)
    with made("nano-30b", "bf16") as llm:
        culprit = culprit_of(llm)
    assert culprit is not None
    assert culprit.ops == ["gated_rms_norm"]


@pytest.mark.parametrize("rollback", ["lanes", "replay"])
def test_all_ways_agree(rollback: str) -> None:
    """Prefill, decode, verify passes and CUDA graphs, teacher-forced."""
    with made("nano-30b", "bf16", graphs=True) as llm:
        sequences = [IDS[i : i + 40] for i in range(0, 32, 8)]
        found = parity.compare(parity.Ways(llm, {}, 3, rollback), sequences)
    assert {row["way"] for row in found["worst"]} == {"decode", "drafts", "graphs"}
    assert (found["wrong"], found["wrong_ways"]) == (0, 0), found


def test_drafts_change_no_token_but_for_ties() -> None:
    code, found = invoke_json("mtp", "--device", "cuda", "-n", "48", "--memory", "0.5")
    assert code == 0, found


RANDOM = ("mtp", "preset:lightning-30b", "--synthetic", "0", "--layers", "8", "-n", "32")


def test_random_weights_at_full_width_pass_and_a_wrong_commit_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neighbours among random logits are near, so that rounding parts texts; a state with one
    rejected draft in it is told from that."""
    args = (*RANDOM, "--rollback", "lanes", "--device", "cuda", "--memory", "0.5")
    code, found = invoke_json(*args)
    assert code == 0, found
    honest = MambaStates.commit

    def wrong(self: MambaStates, slots: Tensor, lane: Tensor, *rest: Any) -> None:
        honest(self, slots, (lane + 1).clamp(max=self.lanes - 1), *rest)

    monkeypatch.setattr(MambaStates, "commit", wrong)
    code, found = invoke_json(*args)
    assert (code, found["faults"]) == (1, len(found["prompts"])), found
