"""NEMOTRITON_ASM: one switch for all kernels that decode, to forms that do so without assembly."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton.autotune import sass
from nemotriton.autotune.parity import generator
from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.op import (
    DTYPES,
    SPECS,
    Case,
    Tile,
    compile_only,
    targeting,
    use_tile,
)
from nemotriton.model.config import ModelConfig

META, CPU = torch.device("meta"), torch.device("cpu")
SUPER = ModelConfig.preset("super-120b")
DECODING = sorted(n for n, s in SPECS.items() if any("ASM" in k.arg_names for k in s.kernels))
Launched = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Tile, int], Launched]:
    """Kernels and constants of a call at Super's widths; nothing is compiled."""
    seen: Launched = []

    def warmup(kernel: Any, *args: Any, grid: Any, **meta: Any) -> Any:
        seen.append((kernel.__name__, meta))
        return SimpleNamespace()

    monkeypatch.setattr(JITFunction, "warmup", warmup)

    def launches(name: str, tile: Tile, tokens: int) -> Launched:
        spec = SPECS[name]
        case = spec.cases(SUPER)[0]
        few = Case(**{**case, "E": 32}) if "E" in case and "F" in case else case
        args = spec.make(few, tokens, META, DTYPES[spec.dtypes[0]], generator(0, CPU))
        seen.clear()
        with compile_only(90), use_tile(name, tile):
            spec.op.triton(**args)
        return list(seen)

    return launches


def test_who_decodes() -> None:
    linears = {"fp8_matmul", "nvfp4_matmul", "packed_matmul", "widen_fp8", "widen_packed"}
    assert {*linears, "run_experts_packed", "enter_moe", "share_expert"} < set(DECODING)


@pytest.mark.parametrize("name", DECODING)
def test_one_switch_for_all(
    name: str, launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every number of tokens that has a tile of its own, which the switch overrules."""
    spec = SPECS[name]
    case = spec.cases(SUPER)[0]
    with targeting(90):
        tiles = {spec.default(case, t): t for t in reversed(spec.tokens) if t <= 16384}
    for value, wanted in (("1", True), ("0", False)):
        monkeypatch.setenv("NEMOTRITON_ASM", value)
        calls = [call for tile, tokens in tiles.items() for call in launched(name, tile, tokens)]
        assert {meta["ASM"] for _, meta in calls if "ASM" in meta} == {wanted}
        assert wanted or not any("async" in kernel for kernel, _ in calls)


def test_experts_of_a_prompt_are_not_multiplied_ahead(
    launched: Callable[..., Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = RUN_EXPERTS_PACKED.default(RUN_EXPERTS_PACKED.cases(SUPER)[0], 8192)
    assert tile["ASYNC"]
    for value, ahead in (("0", False), ("", True), (None, True), ("1", True)):
        monkeypatch.delenv("NEMOTRITON_ASM", raising=False)
        if value is not None:
            monkeypatch.setenv("NEMOTRITON_ASM", value)
        kernels = [name for name, _ in launched("run_experts_packed", tile, 512)]
        assert ("_async_up" in kernels) is ahead
        assert ("_packed_up" in kernels) is not ahead
        without = [name for name, _ in launched("run_experts_packed", tile.but(ASM=False), 512)]
        assert "_async_up" not in without


def test_a_tile_without_stays_without(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(1, device=META)
    monkeypatch.delenv("NEMOTRITON_ASM", raising=False)
    with targeting(90):
        assert decodes_by_assembly(x)
        assert not decodes_by_assembly(x, False)
        monkeypatch.setenv("NEMOTRITON_ASM", "0")
        assert not decodes_by_assembly(x)
    assert not decodes_by_assembly(x)


@pytest.mark.parametrize("tokens", [1, 8192])
def test_the_plain_form_compiles_for_hopper(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one launch and of what takes the place of the ahead form: no decoding assembly, no
    spill, no wgmma at risk."""
    monkeypatch.setenv("NEMOTRITON_ASM", "0")
    case = RUN_EXPERTS_PACKED.cases(SUPER)[0]
    tile = RUN_EXPERTS_PACKED.default(case, tokens)
    few = Case(**{**case, "E": 8, "K": 2})
    args = RUN_EXPERTS_PACKED.make(few, min(tokens, 128), META, torch.bfloat16, generator(0, CPU))
    with use_tile("run_experts_packed", tile), compile_only(90) as done:
        RUN_EXPERTS_PACKED.op.triton(**args)
    for compiled in done:
        assert "shf.l.wrap" not in compiled.kernel.asm["ttir"]
        found = sass.resources(compiled.kernel)
        assert (found.hazards, found.spills) == (0, 0), compiled.name
