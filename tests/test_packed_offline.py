"""Quantised products compiled for Hopper: their loops stay within what its issue slots allow.

At 4.3 TB/s an H200 gets 7.6e12 NVFP4 weights a second and can issue 3.9 instructions for each.
"""

import collections
import re
from typing import Any

import pytest
import torch

from nemotriton.autotune import sass
from nemotriton.autotune.offline import SHARED_LIMIT
from nemotriton.autotune.parity import generator
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.moe_few import SHARE_EXPERT
from nemotriton.kernels.moe_packed_tiles import M64W, M128W, packed_default, packed_tile
from nemotriton.kernels.op import SPECS, Case, Compiled, Tile, compile_only, targeting, use_tile
from nemotriton.model.config import ModelConfig

CASE = RUN_EXPERTS_PACKED.cases(ModelConfig.preset("super-120b"))[0]
CPU, META = torch.device("cpu"), torch.device("meta")
MMA, WGMMA = packed_default(CASE, 128), packed_default(CASE, 256)


def compiled(tile: Tile, tokens: int) -> list[Compiled]:
    """Kernels of a call at Super's widths."""
    few = Case(**{**CASE, "E": 8, "K": 2})  # the products' code does not depend on how many
    args = RUN_EXPERTS_PACKED.make(few, tokens, META, torch.bfloat16, generator(0, CPU))
    with use_tile("run_experts_packed", tile), compile_only(90) as done:
        RUN_EXPERTS_PACKED.op.triton(**args)
    return done


def products(kernel: Any) -> list[list[str]]:
    """Loops with tensor-core instructions; what they decode never passes through shared memory."""
    found = [b for b in sass.loops(sass.disassembly(kernel)) if any("MMA" in i for i in b)]
    assert not any(i.split()[0].startswith("STS") or " STS" in i for body in found for i in body)
    return found


def by_mma(body: list[str]) -> float:
    """Instructions a weight where an mma.sync of 16 x 16 weights has eight tokens."""
    return len(body) * 32 / (256 * sum("HMMA.16816" in i for i in body))


def test_the_tiles_are_those_that_are_meant() -> None:
    assert [MMA[k] for k in ("UP_M", "UP_N", "UP_WARPS")] == [8, 128, 2]
    assert [WGMMA[k] for k in ("UP_M", "UP_N", "UP_WARPS")] == [16, 128, 4]


@pytest.mark.parametrize(
    "tile,limit",
    [(MMA, 2.5), (MMA.but(ASM=False), 2.8), (WGMMA, 2.7)],
    ids=["mma asm", "mma tl", "wgmma asm"],
)
def test_instructions_a_weight(tile: Tile, limit: float) -> None:
    """And nothing decoded passes through shared memory, nothing spills, no wgmma is at risk."""
    done = compiled(tile, 128)
    for name, side in (("_packed_up", "UP"), ("_packed_down", "DOWN")):
        (kernel,) = (c.kernel for c in done if c.name == name)
        found = sass.resources(kernel)
        assert (found.hazards, found.spills) == (0, 0)
        (body,) = products(kernel)
        weights = int(tile[f"{side}_N"]) * int(tile[f"{side}_K"])
        threads = 32 * int(tile[f"{side}_WARPS"])
        assert len(body) * threads / weights <= limit


@pytest.mark.parametrize("tokens,limit", [(1, 2.8), (8, 2.6)])
def test_instructions_a_weight_of_the_one_launch(tokens: int, limit: float) -> None:
    (kernel,) = (c.kernel for c in compiled(packed_default(CASE, tokens), tokens))
    assert sass.resources(kernel).spills == 0
    up, down = products(kernel)
    assert max(by_mma(up), by_mma(down)) <= limit


@pytest.mark.parametrize("size,programs", [(M64W, 3), (M128W, 2)], ids=["64", "128"])
def test_a_step_ahead_of_every_height(size: tuple[int, int, int, int, int], programs: int) -> None:
    """A loop for each number of quarters of a block, two steps a turn, whose waits leave the
    products of one step under way. As many programs as are meant fit on a multiprocessor."""
    done = compiled(packed_tile(size, size, narrow=True, ahead=True), 128)
    q = size[0] // 4
    want = [{q: 16}, {2 * q: 16}, {2 * q: 16, q: 16}, {4 * q: 16}]
    for name in ("_async_up", "_async_down"):
        (kernel,) = (c.kernel for c in done if c.name == name)
        found = sass.resources(kernel)
        assert (found.hazards, found.spills, found.stack) == (0, 0, 0)
        assert programs * (found.shared + 1024) <= SHARED_LIMIT[90] + 1024
        assert programs * 128 * found.registers <= 65536
        widths = []
        for body in products(kernel):
            wide = [int(n) for i in body for n in re.findall(r"HGMMA\.64x(\d+)x16", i)]
            widths.append(dict(collections.Counter(wide)))
            left = [int(i.split()[-1], 0) for i in body if "WARPGROUP.DEPBAR" in i]
            assert left == [len(widths[-1])] * 2
            assert not any(re.search(r"\b(STL|LDL|LDG)\b", i) for i in body)
            assert len(body) * 128 / (128 * 128) <= 3.5
        assert sorted(widths, key=str) == sorted(want, key=str)


@pytest.mark.parametrize("name,limit", [("fp8_matmul", 2.8), ("packed_matmul", 2.5)])
def test_instructions_a_weight_of_a_linear(name: str, limit: float) -> None:
    """One token times the in-projection. An FP8 weight is 1.8 times the bytes: 6.9 would do."""
    spec = SPECS[name]
    case = next(c for c in spec.cases(ModelConfig.preset("super-120b")) if not c.get("Q"))
    args = spec.make(case, 1, META, torch.bfloat16, generator(0, CPU))
    with targeting(90):
        tile = spec.default(case, 1)
    with use_tile(name, tile), compile_only(90) as done:
        spec.op.triton(**args)
    (kernel,) = (c.kernel for c in done)
    (body,) = products(kernel)
    assert by_mma(body) <= limit


def test_blocks_of_pairs_cost_the_stream_beside_the_router_no_room() -> None:
    """One token's launch has no blocks; as many programs fit beside each other with them."""
    case = SHARE_EXPERT.cases(ModelConfig.preset("super-120b"))[0]
    found = []
    for T in (1, 8):
        args = SHARE_EXPERT.make(case, T, META, torch.bfloat16, generator(0, CPU))
        with compile_only(90) as done:
            SHARE_EXPERT.op.triton(**args)
        found.append((sass.resources(done[0].kernel), done[0].kernel.metadata.shared))
    (plain, shared), (blocks, more) = found
    assert more == shared
    assert blocks.spills == 0
    assert blocks.registers <= plain.registers + 8
