"""Routed experts of a few tokens in one launch: up products, down products and the sum of rows.

What is computed is `_packed_up`, `_packed_down` and `_packed_combine` in turn (`moe_packed`), to
the same bits where rows are summed one after the other. Between launches the memory idles: the last
tiles drain, the next programs come up and ask for their first words. Here the first programs of the
grid are up tiles and the others down tiles, so that these take the place of those one by one.

    up program     stores its tile of h, then adds one to the counts of its block, of which every
                   tile of the down product has one
    down program   waits until its count says that all of h is there, multiplies, stores its rows,
                   and adds one to the count of its tile for each of its tokens
    the last one   of a token and tile adds up that token's rows, in one fixed order whoever is
                   last, and sets back the counts which that tile of that token's pairs had

Nobody waits for ever: programs start in the order of their numbers, those that are waited for have
the lower ones and wait for nothing in the grid. So few programs should fit at once that the up
product is through with a block when its first down programs start, and enough that they decode as
fast as words come: shared memory, as much of it as a tile's stages take, sees to that.

Counts int32: [pairs, tiles] of the blocks, each by the first of its pairs, then [tokens, tiles];
zeros, and zeros again afterwards. Calls that run at the same time must not share them. Every pair
of a token must have an expert, and both products the same blocks.
"""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.hopper_pack import (
    WEIGHT_UNIT,
    WORDS,
    packed_product,
    tiles_of,
    to_position_order,
)
from nemotriton.kernels.moe_packed import _find_rows
from nemotriton.kernels.moe_route import OwnRouting, Routing
from nemotriton.kernels.numerics import relu2
from nemotriton.kernels.op import cdiv, launch, next_pow2

if TYPE_CHECKING:
    from nemotriton.kernels.moe_experts_packed import _Plan, _Table

NARROWEST = 64  # columns of a down tile


def count_arrivals(tokens: int, top_k: int, width: int) -> int:
    """How many counts up to so many tokens with top_k experts each need; width: L."""
    return tokens * (top_k + 1) * cdiv(width, NARROWEST)


def check_arrivals(arrivals: torch.Tensor | None) -> None:
    """UnsupportedError where these are no counts."""
    require(
        arrivals is None or (arrivals.ndim == 1 and arrivals.dtype == torch.int32),
        "arrivals must be int32 of one axis",
    )


def counts_fit(arrivals: torch.Tensor | None, routing: Routing, width: int) -> bool:
    """Whether there are as many as the routing needs; one over some of the experts has none."""
    if arrivals is None or isinstance(routing, OwnRouting):
        return False
    tokens, top_k = routing.ids.shape
    return arrivals.numel() >= count_arrivals(tokens, top_k, width)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _wait_for(count_ptr, wanted):
    """Until the count is what is wanted; what its raisers wrote may then be read, past L1."""
    seen = tl.atomic_add(count_ptr, 0, sem="acquire")
    while seen < wanted:
        seen = tl.atomic_add(count_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _close_token(
    parts_ptr, y_ptr, counts_ptr, token_counts_ptr, t, tile_n,
    L: tl.constexpr, TILES: tl.constexpr, K: tl.constexpr, BLOCK_J: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of y, the sum of the token's COUNT rows; all who count for it have been here."""
    j = tl.arange(0, BLOCK_J)
    tl.store(token_counts_ptr + t * TILES + tile_n, 0)
    tl.store(counts_ptr + (t * K + j) * TILES + tile_n, tl.zeros_like(j), mask=j < K)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = parts_ptr + t * (COUNT * L) + n
    y = tl.zeros((BLOCK_N,), tl.float32)
    for j in tl.static_range(COUNT):
        y += tl.load(at + j * L, mask=n < L, other=0.0, cache_modifier=".cg")
    tl.store(y_ptr + t * L + n, y.to(y_ptr.dtype.element_ty), mask=n < L)


@triton.jit
def _arrive(
    parts_ptr, y_ptr, counts_ptr, token_counts_ptr, block, rows, live, tile_n,
    L: tl.constexpr, TILES: tl.constexpr, K: tl.constexpr, BLOCK_J: tl.constexpr,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Count a down program that has stored its rows, and close what it is the last one of."""
    tl.debug_barrier()  # all threads have stored their part
    if BLOCKS == 0:
        t = block // K
        if tl.atomic_add(token_counts_ptr + t * TILES + tile_n, 1, sem="acq_rel") == COUNT - 1:
            _close_token(
                parts_ptr, y_ptr, counts_ptr, token_counts_ptr, t, tile_n,
                L, TILES, K, BLOCK_J, COUNT, BLOCK_N,
            )  # fmt: skip
    else:
        tokens = tl.where(live, rows // K, 0)
        at = token_counts_ptr + tokens * TILES + tile_n
        before = tl.atomic_add(at, 1, mask=live, sem="acq_rel")
        closes = (live & (before == COUNT - 1)).to(tl.int32)
        tl.debug_barrier()
        if tl.max(closes, 0) > 0:
            m = tl.arange(0, BLOCK_M)
            for i in range(BLOCK_M):
                if tl.sum(tl.where(m == i, closes, 0), 0) > 0:
                    t = tl.sum(tl.where(m == i, tokens, 0), 0).to(tl.int64)
                    _close_token(
                        parts_ptr, y_ptr, counts_ptr, token_counts_ptr, t, tile_n,
                        L, TILES, K, BLOCK_J, COUNT, BLOCK_N,
                    )  # fmt: skip


@triton.jit
def _up_tile(
    x_ptr, words_ptr, global_ptr, h_ptr, counts_ptr, x_stride, x_width, expert, rows, live, tile_n,
    K: tl.constexpr, H: tl.constexpr, N_TILES: tl.constexpr, K_TILES: tl.constexpr,
    STEPS: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    TILES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of h, then one more in each of the TILES counts of its block; BLOCK_D >= TILES."""
    scale = tl.load(global_ptr + expert) * WEIGHT_UNIT
    x_rows = x_ptr + tl.where(live, rows // K, 0).to(tl.int64) * x_stride
    matrix = words_ptr + expert * (N_TILES * K_TILES * WORDS)
    acc = packed_product(
        x_rows, live, matrix, tile_n.to(tl.int32), 0, x_width, STEPS, K_TILES, NATURAL, EVEN,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ASM, True,
    )  # fmt: skip
    h = to_position_order(relu2(acc * scale).to(h_ptr.dtype.element_ty), True)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(h_ptr + rows[None, :].to(tl.int64) * H + n[:, None], h, mask=live[None, :])
    tl.debug_barrier()  # all threads have stored their part
    tile = tl.arange(0, BLOCK_D)
    tl.atomic_add(counts_ptr + tile, 1, mask=tile < TILES, sem="release")


@triton.jit
def _down_tile(
    h_ptr, words_ptr, global_ptr, weights_ptr, parts_ptr, count_ptr, wanted, expert, rows, live,
    tile_n, split,
    L: tl.constexpr, H: tl.constexpr, N_TILES: tl.constexpr, K_TILES: tl.constexpr,
    STEPS: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    LET_GO: tl.constexpr,
):  # fmt: skip
    """A tile of a part of the rows, once `wanted` tiles of h are there."""
    step_0 = split.to(tl.int32) * STEPS
    matrix = words_ptr + expert * (N_TILES * K_TILES * WORDS)
    weights = tl.load(weights_ptr + rows, mask=live, other=0.0)
    scale = tl.load(global_ptr + expert) * WEIGHT_UNIT * weights
    _wait_for(count_ptr, wanted)
    h_rows = h_ptr + tl.where(live, rows, 0).to(tl.int64) * H
    acc = packed_product(
        h_rows, live, matrix, tile_n.to(tl.int32), step_0, H, STEPS, K_TILES, False, EVEN,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ASM, True,
    )  # fmt: skip
    if LET_GO:
        tl.extra.cuda.gdc_launch_dependents()
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = parts_ptr + (rows.to(tl.int64) * SPLIT + split)[None, :] * L + n[:, None]
    tl.store(at, acc * scale[None, :], mask=live[None, :] & (n < L)[:, None])


@triton.jit(do_not_specialize=["pairs", "ups"])
def _packed_experts(
    x_ptr, up_ptr, up_global_ptr, h_ptr, down_ptr, down_global_ptr, weights_ptr, parts_ptr, y_ptr,
    counts_ptr, table_ptr, experts_ptr, pairs, ups, x_stride, x_width,
    K: tl.constexpr, BLOCK_J: tl.constexpr, H: tl.constexpr, L: tl.constexpr,
    F_TILES: tl.constexpr, L_TILES: tl.constexpr, BLOCKS: tl.constexpr, NATURAL: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    UP_N: tl.constexpr, UP_K: tl.constexpr, UP_STEPS: tl.constexpr, UP_STAGES: tl.constexpr,
    UP_EVEN: tl.constexpr, DOWN_N: tl.constexpr, DOWN_K: tl.constexpr, DOWN_STEPS: tl.constexpr,
    DOWN_STAGES: tl.constexpr, DOWN_EVEN: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, L], by way of h [T*K, H] and rows [T*K, SPLIT, L]; `ups` programs are up's."""
    UP_TILES: tl.constexpr = H // UP_N
    TILES: tl.constexpr = (L + DOWN_N - 1) // DOWN_N
    pid = tl.program_id(0).to(tl.int64)
    down = pid - ups
    if PDL:
        tl.extra.cuda.gdc_wait()
    block = tl.where(down < 0, pid // UP_TILES, down // (TILES * SPLIT))
    expert, rows = _find_rows(table_ptr, experts_ptr, block, pairs, K, BLOCKS, BLOCK_M, BLOCK_J)
    live = rows >= 0
    first = block  # of its pairs
    if BLOCKS > 0:
        first = tl.min(tl.where(live & (expert >= 0), rows, pairs), 0).to(tl.int64)
    block_counts = counts_ptr + first * TILES
    if expert >= 0:
        if down < 0:
            _up_tile(
                x_ptr, up_ptr, up_global_ptr, h_ptr, block_counts, x_stride, x_width, expert, rows,
                live, pid % UP_TILES, K, H, F_TILES, L_TILES, UP_STEPS, NATURAL, UP_EVEN, BLOCK_M,
                UP_N, UP_K, UP_STAGES, ASM, TILES, BLOCK_D,
            )  # fmt: skip
        else:
            tile_n = down % TILES
            _down_tile(
                h_ptr, down_ptr, down_global_ptr, weights_ptr, parts_ptr, block_counts + tile_n,
                UP_TILES, expert, rows, live, tile_n, down // TILES % SPLIT, L, H, L_TILES,
                F_TILES, DOWN_STEPS, SPLIT, DOWN_EVEN, BLOCK_M, DOWN_N, DOWN_K, DOWN_STAGES,
                ASM, PDL,
            )  # fmt: skip
            _arrive(
                parts_ptr, y_ptr, counts_ptr, counts_ptr + pairs.to(tl.int64) * TILES, block, rows,
                live, tile_n, L, TILES, K, BLOCK_J, K * SPLIT, BLOCKS, BLOCK_M, DOWN_N,
            )  # fmt: skip


# ------------------------------------------------------------------------------------------ launch
def multiply_at_once(
    x: torch.Tensor,
    x_width: int,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    routing: Routing,
    table: "_Table",
    scratch: tuple[torch.Tensor, torch.Tensor],
    y: torch.Tensor,
    counts: torch.Tensor,
    plan: "_Plan",
    natural: bool,
) -> None:
    """Launch. x_width: columns that x has; matrices: words and globals of up, then of down;
    scratch: h and the pairs' rows; natural: whether x's columns stand as they are."""
    (T, K), L = routing.ids.shape, y.shape[1]
    up_words, up_global, down_words, down_global = matrices
    tile, pairs, down_tiles = plan.tile, T * K, plan.down_tiles
    ups = table.blocks * plan.up_tiles
    sizes: dict[str, Any] = {
        f"{name}_{key}": tile[f"{name}_{key}"]
        for name in ("UP", "DOWN")
        for key in ("N", "K", "STAGES")
    }
    launch(
        _packed_experts, (ups + table.blocks * down_tiles * plan.split,), x, up_words, up_global,
        scratch[0], down_words, down_global, routing.weights, scratch[1], y, counts,
        *table.tensors, pairs, ups, x.stride(0), x_width, **sizes, K=K, BLOCK_J=next_pow2(K),
        H=plan.h_width, L=L, F_TILES=tiles_of(plan.width), L_TILES=tiles_of(L),
        BLOCKS=plan.blocks, NATURAL=natural, SPLIT=plan.split, BLOCK_M=tile["UP_M"],
        BLOCK_D=next_pow2(down_tiles), UP_STEPS=cdiv(x_width, int(tile["UP_K"])),
        UP_EVEN=x_width % tile["UP_K"] == 0, DOWN_STEPS=plan.down_steps // plan.split,
        DOWN_EVEN=plan.h_width % tile["DOWN_K"] == 0, ASM=plan.asm,
        PDL=plan.pdl, launch_pdl=plan.pdl, num_warps=tile["UP_WARPS"],
    )  # fmt: skip
