"""Packed experts compiled for Hopper: the decode loop stays within what its issue slots allow.

At 4.3 TB/s an H200 gets 7.6e12 NVFP4 weights a second and can issue 3.9 instructions for each.
"""

import pytest
import torch

from nemotriton.autotune import sass
from nemotriton.autotune.parity import generator
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.moe_few import SHARE_EXPERT
from nemotriton.kernels.moe_packed_tiles import packed_default
from nemotriton.kernels.op import Case, Tile, compile_only, use_tile
from nemotriton.model.config import ModelConfig

CASE = RUN_EXPERTS_PACKED.cases(ModelConfig.preset("super-120b"))[0]
CPU = torch.device("cpu")
MMA, WGMMA = packed_default(CASE, 128), packed_default(CASE, 256)


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
    where = torch.device("meta")
    few = Case(**{**CASE, "E": 8, "K": 2})  # the products' code does not depend on how many
    args = RUN_EXPERTS_PACKED.make(few, 128, where, torch.bfloat16, generator(0, CPU))
    with use_tile("run_experts_packed", tile), compile_only(90) as done:
        RUN_EXPERTS_PACKED.op.triton(**args)
    for name, side in (("_packed_up", "UP"), ("_packed_down", "DOWN")):
        (kernel,) = (c.kernel for c in done if c.name == name)
        found = sass.resources(kernel)
        assert (found.hazards, found.spills) == (0, 0)
        (body,) = (b for b in sass.loops(sass.disassembly(kernel)) if any("MMA" in i for i in b))
        assert not any(i.split()[0].startswith("STS") or " STS" in i for i in body)
        weights = int(tile[f"{side}_N"]) * int(tile[f"{side}_K"])
        threads = 32 * int(tile[f"{side}_WARPS"])
        assert len(body) * threads / weights <= limit


def test_blocks_of_pairs_cost_the_stream_beside_the_router_no_room() -> None:
    """One token's launch has no blocks; as many programs fit beside each other with them."""
    case = SHARE_EXPERT.cases(ModelConfig.preset("super-120b"))[0]
    found = []
    for T in (1, 8):
        args = SHARE_EXPERT.make(case, T, torch.device("meta"), torch.bfloat16, generator(0, CPU))
        with compile_only(90) as done:
            SHARE_EXPERT.op.triton(**args)
        found.append((sass.resources(done[0].kernel), done[0].kernel.metadata.shared))
    (plain, shared), (blocks, more) = found
    assert more == shared
    assert blocks.spills == 0
    assert blocks.registers <= plain.registers + 8
