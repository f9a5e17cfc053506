"""Kernels of the routed NVFP4 experts on packed words; `moe_experts_packed` is their op.

Weights are the left operand of the products, so a tile of BLOCK_N of an expert's rows meets as few
as eight tokens; they are decoded in registers, straight into the fragments that the tensor cores
read. h is stored in the order of columns that the second product wants.

Blocks are expert-major but for a few tokens: `_prepare` writes their experts and pairs out of the
router's offsets or, where nobody sorted the pairs, out of the ids alone, and x in the products'
column order, which the gathering loads then read; gathered rows are nowhere stored. At a few tokens
the router may have written the tables itself (`moe_few.share_expert`), else a block is a pair.
Grids are as large as any routing of the tokens can need, and programs without a block leave at
once: the host never waits, and a CUDA graph serves every routing. Nothing depends on the order of
programs, so equal inputs give equal bits.

All are dependent launches (see `dependent`); the products let the next kernel come when they have
left their loops. Which weights a program reads is known from the routing only: the up product has
it from the launch before, and can prefetch nothing.
"""

import triton
import triton.language as tl

from nemotriton.kernels.hopper_pack import (
    WEIGHT_UNIT,
    WORDS,
    packed_product,
    position_column,
    to_position_order,
)
from nemotriton.kernels.numerics import relu2


@triton.jit
def _write_tables(
    pid, offsets_idx, order_idx, experts_ptr, rows_ptr, blocks,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The expert (-1: none) and the pairs (-1: none) of BLOCK_B blocks."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_idx + e, mask=e < E, other=0).to(tl.int64)
    end = tl.load(offsets_idx + e + 1, mask=e < E, other=0).to(tl.int64)
    until = tl.cumsum((end - start + BLOCK_M - 1) // BLOCK_M, 0)  # blocks of experts 0..e
    b = pid * BLOCK_B + tl.arange(0, BLOCK_B)
    past = until[None, :] <= b[:, None]
    expert = tl.sum(past.to(tl.int64), 1)
    before = tl.max(tl.where(past, until[None, :], 0), 1)
    live = expert < E
    first = tl.load(offsets_idx + expert, mask=live, other=0).to(tl.int64)
    last = tl.load(offsets_idx + expert + 1, mask=live, other=0).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    i = (first + (b - before) * BLOCK_M)[:, None] + m[None, :]
    pair = tl.load(order_idx + i, mask=i < last[:, None], other=-1).to(tl.int64)
    inside = b < blocks
    tl.store(experts_ptr + b, tl.where(live, expert, -1).to(tl.int32), mask=inside)
    at = rows_ptr + b[:, None] * BLOCK_M + m[None, :]
    tl.store(at, pair.to(tl.int32), mask=inside[:, None])


@triton.jit
def _tables_of_ids(
    pid, ids_idx, experts_ptr, rows_ptr, pairs, blocks,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The same tables from pairs that are not sorted: BLOCK_B of them find their blocks, by the
    pairs of every expert and by the earlier ones of their own."""
    e = tl.arange(0, BLOCK_E)
    p = pid * BLOCK_B + tl.arange(0, BLOCK_B)
    live = p < pairs
    mine = tl.load(ids_idx + p, mask=live, other=-1).to(tl.int64).to(tl.int32)
    counts = tl.zeros([BLOCK_E], tl.int32)
    rank = tl.zeros([BLOCK_B], tl.int32)
    for q0 in range(0, pairs, BLOCK_P):
        q = q0 + tl.arange(0, BLOCK_P)
        there = q < pairs
        ids = tl.load(ids_idx + q, mask=there, other=E).to(tl.int64).to(tl.int32)
        counts += tl.histogram(tl.where(there, ids, 0), BLOCK_E, mask=there)
        earlier = (ids[None, :] == mine[:, None]) & (q[None, :] < p[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    needed = tl.where(e < E, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(e[None, :] < mine[:, None], needed[None, :], 0), 1)
    count = tl.sum(tl.where(e[None, :] == mine[:, None], counts[None, :], 0), 1)
    block, m = first + rank // BLOCK_M, rank % BLOCK_M
    row = rows_ptr + block * BLOCK_M + m
    tl.store(row, p.to(tl.int32), mask=live)
    tl.store(experts_ptr + block, mine, mask=live & (m == 0))
    last = live & (rank == count - 1)  # what remains of its block is nobody's
    for i in tl.static_range(1, BLOCK_M):
        tl.store(row + i, -1, mask=last & (m + i < BLOCK_M))
    b = pid * BLOCK_B + tl.arange(0, BLOCK_B)
    tl.store(experts_ptr + b, -1, mask=(b >= tl.sum(needed, 0)) & (b < blocks))


@triton.jit
def _write_ordered(
    pid, x_ptr, ordered_ptr, x_stride, L, W,
    MMA: tl.constexpr, FROM_MMA: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """BLOCK_L columns of a row of x in `k_order`, with zeros up to W; FROM_MMA: x has mma's."""
    tiles = tl.cdiv(W, BLOCK_L)
    t = pid // tiles
    position = (pid % tiles * BLOCK_L).to(tl.int32) + tl.arange(0, BLOCK_L)
    if FROM_MMA:  # where mma.sync's order keeps the column of this one's
        p = position % 64
        column = p // 32 * 32 + p // 8 % 2 * 16 + p // 2 % 4 * 4 + p // 16 % 2 * 2 + p % 2
        column = tl.max_contiguous(tl.multiple_of(position // 64 * 64 + column, 2), 2)
    else:
        column = position_column(position, MMA)
    x = tl.load(x_ptr + t * x_stride + column, mask=column < L, other=0.0)
    tl.store(ordered_ptr + t * W + position, x, mask=position < W)


@triton.jit(do_not_specialize=["table_programs", "pairs", "blocks"])
def _prepare(
    offsets_idx, order_idx, ids_idx, experts_ptr, rows_ptr, table_programs, pairs, blocks,
    x_ptr, ordered_ptr, x_stride, L, W,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr, SORTED: tl.constexpr,
    MMA: tl.constexpr, FROM_MMA: tl.constexpr, BLOCK_L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tables by the first programs, x in order by the others."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # small programs, which leave room at once
    if pid < table_programs:
        if SORTED:
            _write_tables(
                pid, offsets_idx, order_idx, experts_ptr, rows_ptr, blocks,
                E, BLOCK_M, BLOCK_E, BLOCK_B,
            )  # fmt: skip
        else:
            _tables_of_ids(
                pid, ids_idx, experts_ptr, rows_ptr, pairs, blocks,
                E, BLOCK_M, BLOCK_E, BLOCK_B, BLOCK_P,
            )  # fmt: skip
    else:
        _write_ordered(
            pid - table_programs, x_ptr, ordered_ptr, x_stride, L, W, MMA, FROM_MMA, BLOCK_L
        )


@triton.jit
def _find_rows(
    rows_idx, experts_idx, block, pairs,
    K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """(expert or -1, int32 [BLOCK_M] its pairs, each or -1) of a block.

    BLOCKS 0: block is a pair, experts are by pair. 1: the same, and the first pair of an expert
    stands for all of them, of which a token has one at most: row m is that of token m < BLOCK_M.
    2: rows and experts are tables."""
    m = tl.arange(0, BLOCK_M)
    # past L1, for the down product reads them before it waits
    expert = tl.load(experts_idx + block, cache_modifier=".cg").to(tl.int64)
    if BLOCKS == 0:
        rows = tl.where(m == 0, block, -1)
    elif BLOCKS == 1:
        j = tl.arange(0, BLOCK_J)
        pair = m[:, None] * K + j[None, :]
        there = (j < K)[None, :] & (pair < pairs)
        ids = tl.load(experts_idx + pair, mask=there, other=-1, cache_modifier=".cg").to(tl.int64)
        same = ids == expert
        rows = tl.max(tl.where(same, pair, -1), 1).to(tl.int64)
        first = tl.min(tl.where(rows < 0, block, rows), 0)
        expert = tl.where(first < block, -1, expert)
    else:
        rows = tl.load(rows_idx + block * BLOCK_M + m, cache_modifier=".cg").to(tl.int64)
    return expert, rows.to(tl.int32)  # half the registers while the product runs


@triton.jit(do_not_specialize=["pairs"])
def _packed_up(
    x_ptr, words_ptr, global_ptr, h_ptr, table_ptr, experts_ptr, pairs, x_stride, x_width,
    K: tl.constexpr, BLOCK_J: tl.constexpr, H: tl.constexpr, N_TILES: tl.constexpr,
    K_TILES: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr, NATURAL: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, MMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [T*K, H] by pair, columns in `k_order`, those of padding zero."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    block = pid // (H // BLOCK_N)
    tile_n = pid % (H // BLOCK_N)
    expert, rows = _find_rows(table_ptr, experts_ptr, block, pairs, K, BLOCKS, BLOCK_M, BLOCK_J)
    if expert >= 0:
        scale = tl.load(global_ptr + expert) * WEIGHT_UNIT
        live = rows >= 0
        x_rows = x_ptr + tl.where(live, rows // K, 0).to(tl.int64) * x_stride
        matrix = words_ptr + expert * (N_TILES * K_TILES * WORDS)
        acc = packed_product(
            x_rows, live, matrix, tile_n.to(tl.int32), 0, x_width, STEPS, K_TILES, NATURAL, EVEN,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ASM, MMA,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        h = to_position_order(relu2(acc * scale).to(h_ptr.dtype.element_ty), MMA)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(h_ptr + rows[None, :].to(tl.int64) * H + n[:, None], h, mask=live[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _packed_down(
    h_ptr, words_ptr, global_ptr, weights_ptr, out_ptr, table_ptr, experts_ptr, pairs,
    K: tl.constexpr, BLOCK_J: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    N_TILES: tl.constexpr, K_TILES: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr, ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, MMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weighted rows [T*K, SPLIT, L] by pair, each the sum over STEPS blocks of columns; ATOMIC: all
    of a token's added to its row of [T, L], in any order.

    Which expert a program has was written two launches ago: it is known before h is there."""
    TILES: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    block = pid // (TILES * SPLIT)
    tile_n = pid % TILES
    split = pid // TILES % SPLIT
    step_0 = split.to(tl.int32) * STEPS
    expert, rows = _find_rows(table_ptr, experts_ptr, block, pairs, K, BLOCKS, BLOCK_M, BLOCK_J)
    live = (rows >= 0) & (expert >= 0)
    weights = tl.load(weights_ptr + rows, mask=live, other=0.0, cache_modifier=".cg")
    scale = tl.load(global_ptr + tl.maximum(expert, 0)) * WEIGHT_UNIT * weights
    matrix = words_ptr + expert * (N_TILES * K_TILES * WORDS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if expert >= 0:
        h_rows = h_ptr + tl.where(live, rows, 0).to(tl.int64) * H
        acc = packed_product(
            h_rows, live, matrix, tile_n.to(tl.int32), step_0, H, STEPS, K_TILES, False, EVEN,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ASM, MMA,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = live[None, :] & (n < L)[:, None]
        if ATOMIC:
            at = out_ptr + (rows // K).to(tl.int64)[None, :] * L + n[:, None]
            tl.atomic_add(at, acc * scale[None, :], mask=mask, sem="relaxed")
        else:
            at = out_ptr + (rows.to(tl.int64) * SPLIT + split)[None, :] * L + n[:, None]
            tl.store(at, (acc * scale[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _packed_combine(
    rows_ptr, y_ptr, L,
    COUNT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [T, L]: the sum of a token's COUNT rows; EVEN: BLOCK_L divides L. BLOCK_R = 1: one row
    after the other, without a sum across warps."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(L, BLOCK_L)
    t = pid // tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # small programs, which leave room at once
    n = pid % tiles * BLOCK_L + tl.arange(0, BLOCK_L)
    at = rows_ptr + t * COUNT * L + n
    if BLOCK_R == 1:
        y = tl.zeros((BLOCK_L,), tl.float32)
        for j in tl.static_range(COUNT):
            if EVEN:
                row = tl.load(at + j * L)
            else:
                row = tl.load(at + j * L, mask=n < L, other=0.0)
            y += row.to(tl.float32)
    else:
        j = tl.arange(0, BLOCK_R)
        mask = (j < COUNT)[:, None] & (n < L)[None, :]
        rows = tl.load(at[None, :] + (j * L)[:, None], mask=mask, other=0.0)
        y = tl.sum(rows.to(tl.float32), 0)
    tl.store(y_ptr + t * L + n, y.to(y_ptr.dtype.element_ty), mask=n < L)
