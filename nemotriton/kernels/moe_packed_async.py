"""The routed NVFP4 experts' products of many tokens, in Triton's Gluon dialect for Hopper.

`moe_packed`'s products must wait for a step's wgmma before the next step's weights are decoded
into the registers that it reads, so that the tensor cores stand still while a program decodes. Here
two sets of registers take turns, and a product is waited for only when the next one is under way:

    product of step i | the one of i - 1 is over: copies for i + 4, decode i + 1 | product of i + 1

Four warps have 128 rows of an expert's matrix and BLOCK_M pairs; two (BLOCK_M 128), three (64) or
four such programs share a multiprocessor. Sums run in the same order as in `moe_packed`'s wgmma
form, so the bits are the same.

Tiles in shared memory are kept apart by the parity of their step: what is being written and what
is being read are then different allocations, and no barrier is put between them.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from nemotriton.kernels.hopper_pack import DECODE, DECODE_CONSTRAINTS, TILE, WEIGHT_UNIT, WORDS
from nemotriton.kernels.numerics import relu2
from nemotriton.kernels.op import launch

REGISTERS = {16: 128, 32: 128, 64: 168, 128: 255}  # of a thread, by BLOCK_M
BLOCK_N = gl.constexpr(TILE)
BLOCKS = gl.constexpr(TILE // 16)  # of 16 rows
STEP = gl.constexpr(64)  # columns
AHEAD = gl.constexpr(4)  # steps that are on their way
TURNS = gl.constexpr(3)  # AHEAD / 2 + 1 tiles of each parity
UNIT = gl.constexpr(WEIGHT_UNIT.value)
TILE_WORDS = gl.constexpr(WORDS.value)
ASSEMBLY = gl.constexpr(DECODE)
CONSTRAINTS = gl.constexpr(DECODE_CONSTRAINTS)
X_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # as x is copied
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1]))  # as sums are stored
CODES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0]))
LANES = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 32, 1], [4, 1, 1], [2, 1, 0]))  # block, lane


@gluon.jit
def _fragments(codes, scales, half: gl.constexpr, LEFT: gl.constexpr):
    """bf16 [128, 64] of a step's words, as `hopper_pack.fragments`; half: of the scale words."""
    words = gl.convert_layout(
        codes.load(CODES).reshape((BLOCKS, 32, 4)), LANES, assert_trivial=True
    )
    s = scales.load(gl.SliceLayout(2, LANES)) >> (16 * half)
    words, low = gl.broadcast(words, ((s & 0xFF) * 0x00100010 + 0x70007000)[:, :, None])
    words, high = gl.broadcast(words, (((s >> 8) & 0xFF) * 0x00100010 + 0x70007000)[:, :, None])
    a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
        ASSEMBLY,
        CONSTRAINTS,
        [words, low, high],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip
    left = gl.join(gl.join(a0, a1), gl.join(b0, b1))
    right = gl.join(gl.join(c0, c1), gl.join(d0, d1))
    v = gl.join(left, right).reshape((BLOCKS, 8, 4, 4, 2, 2, 2))
    v = v.permute((0, 5, 1, 3, 6, 2, 4)).reshape((BLOCK_N, STEP))
    return gl.convert_layout(v, LEFT, assert_trivial=True)  # renames registers


@gluon.jit
def _copy(
    step, slot, turn, half: gl.constexpr, x_ptr, x_rows, codes_at, scales_at, x_tiles, codes,
    scales, STEPS: gl.constexpr,
):  # fmt: skip
    """Ask for the tiles of a step, past the last one for none."""
    k = step * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, X_ROWS))
    if step < STEPS:
        # rows that nobody has are zeros: read from one address, they would queue up there
        x_at = x_ptr + (x_rows.to(gl.int64) * 8)[:, None] + k[None, :]
        live = (x_rows >= 0)[:, None]
        async_copy.async_copy_global_to_shared(x_tiles.index(slot), x_at, mask=live)
        tile = step // 2 * TILE_WORDS
        async_copy.async_copy_global_to_shared(codes.index(turn), codes_at + (tile + 128 * half))
        async_copy.async_copy_global_to_shared(scales.index(turn), scales_at + tile)
    async_copy.commit_group()


@gluon.jit
def _next(i, n: gl.constexpr):
    return gl.where(i == n - 1, 0, i + 1)


@gluon.jit
def _tiles(width: gl.constexpr):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.int32, [TURNS, BLOCKS, width], flat)


@gluon.jit
def _product(
    x_ptr, x_rows, words_ptr, STEPS: gl.constexpr, BLOCK_M: gl.constexpr, ACC: gl.constexpr
):
    """fp32 [128, BLOCK_M]: a row of packed tiles times rows of x, over UNIT.

    x_rows [BLOCK_M]: eighths of the rows' first elements, or -1; STEPS even."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, STEP], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [AHEAD + 1, BLOCK_M, STEP], layout)
    codes_0, codes_1, scales_0, scales_1 = _tiles(128), _tiles(128), _tiles(32), _tiles(32)
    b = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, CODES)) * 256
    codes_at = words_ptr + (
        b[:, None] + gl.arange(0, 128, layout=gl.SliceLayout(0, CODES))[None, :]
    )
    b = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, SCALES)) * 32 + 2048
    scales_at = words_ptr + (
        b[:, None] + gl.arange(0, 32, layout=gl.SliceLayout(0, SCALES))[None, :]
    )
    source = (x_ptr, x_rows, codes_at, scales_at, x_tiles)
    for i in gl.static_range(0, AHEAD, 2):
        _copy(i, i, i // 2, 0, *source, codes_0, scales_0, STEPS)
        _copy(i + 1, i + 1, i // 2, 1, *source, codes_1, scales_1, STEPS)
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, ACC)
    odd = gl.zeros((BLOCK_N, STEP), gl.bfloat16, LEFT)
    async_copy.wait_group(AHEAD - 1)
    even = _fragments(codes_0.index(0), scales_0.index(0), 0, LEFT)
    slot, free, turn = 0, AHEAD, 0
    for step in range(0, STEPS, 2):
        last = gl.where(turn == 0, TURNS - 1, turn - 1)
        acc = warpgroup_mma(even, x_tiles.index(slot).permute((1, 0)), acc, is_async=True)
        # operands in registers stay named until their product is over, or they may be overwritten
        acc, odd = warpgroup_mma_wait(1, deps=(acc, odd))
        async_copy.wait_group(AHEAD - 2)
        _copy(step + AHEAD, free, last, 0, *source, codes_0, scales_0, STEPS)
        slot, free = _next(slot, AHEAD + 1), _next(free, AHEAD + 1)
        odd = _fragments(codes_1.index(turn), scales_1.index(turn), 1, LEFT)
        acc = warpgroup_mma(odd, x_tiles.index(slot).permute((1, 0)), acc, is_async=True)
        acc, even = warpgroup_mma_wait(1, deps=(acc, even))
        async_copy.wait_group(AHEAD - 2)
        _copy(step + AHEAD + 1, free, last, 1, *source, codes_1, scales_1, STEPS)
        slot, free, turn = _next(slot, AHEAD + 1), _next(free, AHEAD + 1), _next(turn, TURNS)
        even = _fragments(codes_0.index(turn), scales_0.index(turn), 0, LEFT)  # at the end: of any
    acc, even, odd = warpgroup_mma_wait(0, deps=(acc, even, odd))
    async_copy.wait_group(0)
    return acc


@gluon.jit
def _store(y, out_ptr, rows_idx, stride, n0):
    """Columns n0.. of the rows of a block's pairs; y [128, BLOCK_M]."""
    y = gl.convert_layout(y, OUT)
    rows = gl.load(rows_idx + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, OUT))).to(gl.int64)
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    gl.store(out_ptr + (rows * stride)[None, :] + n[:, None], y, mask=(rows >= 0)[None, :])


@gluon.jit
def _async_up(
    x_ptr, words_ptr, global_ptr, h_ptr, rows_idx, experts_idx, x_stride,
    K: gl.constexpr, N_TILES: gl.constexpr, K_TILES: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """h [T*K, 128 N_TILES] by pair, columns in `k_order`; x [T, 128 K_TILES] in `k_order`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    pid = gl.program_id(0).to(gl.int64)
    block, tile_n = pid // N_TILES, (pid % N_TILES).to(gl.int32)
    expert = gl.load(experts_idx + block).to(gl.int64)
    if expert >= 0:
        scale = gl.load(global_ptr + expert) * UNIT
        rows_idx += block * BLOCK_M
        rows = gl.load(rows_idx + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, X_ROWS)))
        x_rows = gl.where(rows < 0, -1, rows // K * (x_stride // 8))
        matrix = words_ptr + (expert * N_TILES + tile_n) * (K_TILES * TILE_WORDS)
        acc = _product(x_ptr, x_rows, matrix, 2 * K_TILES, BLOCK_M, ACC)
        h = relu2(acc * scale).to(gl.bfloat16).reshape((2, 4, 4, 2, 2, BLOCK_M))
        h = h.permute((0, 2, 3, 1, 4, 5)).reshape((BLOCK_N, BLOCK_M))
        _store(h, h_ptr, rows_idx, N_TILES * BLOCK_N, tile_n * BLOCK_N)


@gluon.jit
def _async_down(
    h_ptr, words_ptr, global_ptr, weights_ptr, out_ptr, rows_idx, experts_idx,
    N_TILES: gl.constexpr, K_TILES: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Weighted rows [T*K, 128 N_TILES] by pair; h [T*K, 128 K_TILES] in `k_order`."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    pid = gl.program_id(0).to(gl.int64)
    block, tile_n = pid // N_TILES, (pid % N_TILES).to(gl.int32)
    expert = gl.load(experts_idx + block).to(gl.int64)
    if expert >= 0:
        rows_idx += block * BLOCK_M
        rows = gl.load(rows_idx + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, X_ROWS)))
        h_rows = gl.where(rows < 0, -1, rows * (K_TILES * BLOCK_N // 8))
        matrix = words_ptr + (expert * N_TILES + tile_n) * (K_TILES * TILE_WORDS)
        acc = _product(h_ptr, h_rows, matrix, 2 * K_TILES, BLOCK_M, ACC)
        rows = gl.load(rows_idx + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, ACC)))
        weights = gl.load(weights_ptr + rows, mask=rows >= 0, other=0.0)
        scale = gl.load(global_ptr + expert) * UNIT * weights
        y = (acc * scale[None, :]).to(out_ptr.dtype.element_ty)
        _store(y, out_ptr, rows_idx, N_TILES * BLOCK_N, tile_n * BLOCK_N)


def multiply_ahead(
    x: torch.Tensor,
    up_words: torch.Tensor,
    up_global: torch.Tensor,
    down_words: torch.Tensor,
    down_global: torch.Tensor,
    weights: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
    tables: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Both products: x [T, L] in `k_order` and contiguous, weights [T, K]; out: h [T*K, F] and the
    weighted rows [T*K, L]; tables: pairs [blocks, UP_M or DOWN_M] and experts [blocks] of each."""
    (n, k), (up_rows, up_experts), (down_rows, down_experts) = up_words.shape[1:3], *tables
    up_m, down_m = up_rows.shape[1], down_rows.shape[1]
    launch(
        _async_up, (up_rows.shape[0] * n,), x, up_words, up_global, out[0], up_rows, up_experts,
        x.stride(0), weights.shape[1], N_TILES=n, K_TILES=k, BLOCK_M=up_m, num_warps=4,
        maxnreg=REGISTERS[up_m],
    )  # fmt: skip
    launch(
        _async_down, (down_rows.shape[0] * k,), out[0], down_words, down_global, weights, out[1],
        down_rows, down_experts, N_TILES=k, K_TILES=n, BLOCK_M=down_m, num_warps=4,
        maxnreg=REGISTERS[down_m],
    )  # fmt: skip
