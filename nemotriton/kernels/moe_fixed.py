"""Routed experts in the invariant mode: which tiles sum alike, and the ones that are taken.

As in `gemm_fixed`: generated tokens by mma.sync, which a block of a few pairs suits, prompts by
wgmma. Blocks of pairs may be of any size; how K is stepped through and split may not change.
"""

from typing import Any

import torch

from nemotriton.kernels.fixed_order import DECODE, ByRow, row_of
from nemotriton.kernels.gemm_fixed import is_asynchronous
from nemotriton.kernels.moe_route import Routing
from nemotriton.kernels.op import Case, Tile


def routing_row(routing: Routing, t: int) -> Routing:
    """The routing of token t alone."""
    ids, weights = row_of(routing.ids, t), row_of(routing.weights, t)
    pairs, order = ids.flatten().sort(stable=True)
    experts = torch.arange(routing.offsets.shape[0], dtype=pairs.dtype, device=pairs.device)
    offsets = torch.searchsorted(pairs, experts)
    return Routing(ids, weights, order.to(routing.order.dtype), offsets.to(routing.offsets.dtype))


def by_token(twin: Any) -> ByRow:
    """A twin of routed experts, called for one token at a time."""
    return ByRow(twin, {"x": row_of, "routing": routing_row})


def experts_order(tile: Tile) -> Any:
    """What decides the order along both products' columns: `moe_experts`, `moe_experts_quant`."""
    tall = int(tile["BLOCK_M"])
    return tall == 1, is_asynchronous(tall, tile), tile["BLOCK_K"]


def fixed_experts(case: Case, tokens: int, phase: str) -> Tile:
    """Of `moe_experts.run_experts`."""
    if phase == DECODE:
        return Tile(BLOCK_M=16, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4)
    if tokens * case.K / case.E <= 96:
        return Tile(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3)
    return Tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3)


def fixed_quantised(case: Case, tokens: int, phase: str) -> Tile:
    """Of `moe_experts_quant`'s experts."""
    if phase == DECODE:
        return Tile(BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3)
    if tokens * case.K / case.E <= 64:
        return Tile(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3)
    return Tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=8, num_stages=3)
