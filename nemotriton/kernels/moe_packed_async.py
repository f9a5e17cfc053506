"""The routed NVFP4 experts' products of many tokens, in Triton's Gluon dialect for Hopper.

`moe_packed`'s products must wait for a step's wgmma before the next step's weights are decoded
into the registers that it reads, so that the tensor cores stand still while a program decodes. Here
two sets of registers take turns, and a product is waited for only when the next one is under way:

    product of step i | the one of i - 1 is over: copies for i + 4, decode i + 1 | product of i + 1

Four warps have 128 rows of an expert's matrix and BLOCK_M pairs; two (BLOCK_M 128), three (64) or
four such programs share a multiprocessor. Sums run in the same order as in `moe_packed`'s wgmma
form, so the bits are the same. A block of 64 or 128 is multiplied by the quarters that have pairs:
those are its first ones, and three are a half and a quarter, for Triton's sizes are powers of two.

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
PROGRAM = gl.constexpr("mov.u32 $0, %ctaid.x;")
X_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # as x is copied
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))  # as sums are stored
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
def _copy_rows(x_ptr, x_rows, tile):
    """Rows that nobody has become zeros: read from one address, they would queue up there."""
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, X_ROWS))
    x_at = x_ptr + (x_rows.to(gl.int64) * 8)[:, None] + k[None, :]
    async_copy.async_copy_global_to_shared(tile, x_at, mask=(x_rows >= 0)[:, None])


@gluon.jit
def _copy(
    step, slot, turn, half: gl.constexpr, x_ptr, x_rows, codes_at, scales_at, x_tiles, codes,
    scales, STEPS: gl.constexpr,
):  # fmt: skip
    """Ask for the tiles of a step, past the last one for none."""
    if step < STEPS:
        first, second = x_rows
        x_tile = x_tiles.index(slot)
        _copy_rows(x_ptr + step * STEP, first, x_tile.slice(0, first.shape[0]))
        if second is not None:
            _copy_rows(x_ptr + step * STEP, second, x_tile.slice(first.shape[0], second.shape[0]))
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
def _zeros(WIDTH: gl.constexpr, REST: gl.constexpr):
    FIRST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SECOND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    first = gl.zeros((BLOCK_N, WIDTH), gl.float32, FIRST)
    if REST == 0:
        return (first,)
    else:
        return first, gl.zeros((BLOCK_N, REST), gl.float32, SECOND)


@gluon.jit
def _begin(weights, x_tile, sums, WIDTH: gl.constexpr, REST: gl.constexpr):
    """Products of a step on their way."""
    if REST == 0:
        return (warpgroup_mma(weights, x_tile.permute((1, 0)), sums[0], is_async=True),)
    else:
        x = x_tile.slice(0, WIDTH).permute((1, 0))
        more = x_tile.slice(WIDTH, REST).permute((1, 0))
        first = warpgroup_mma(weights, x, sums[0], is_async=True)
        return first, warpgroup_mma(weights, more, sums[1], is_async=True)


@gluon.jit
def _end(steps: gl.constexpr, sums, weights, REST: gl.constexpr):
    """Wait until no more than the products of so many steps are on their way. Operands in
    registers stay named until their product is over, or they may be overwritten."""
    if REST == 0:
        first, weights = warpgroup_mma_wait(steps, deps=(sums[0], weights))
        return (first,), weights
    else:
        first, second, weights = warpgroup_mma_wait(2 * steps, deps=(sums[0], sums[1], weights))
        return (first, second), weights


@gluon.jit
def _product(
    x_ptr, x_rows, words_ptr, STEPS: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr
):
    """fp32 [128, WIDTH] and, unless REST is 0, [128, REST]: a row of packed tiles times rows of x,
    over UNIT.

    x_rows [WIDTH] and [REST]: eighths of the rows' first elements, or -1; STEPS even."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HEIGHT: gl.constexpr = WIDTH if REST == 0 else 2 * WIDTH
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, STEP], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [AHEAD + 1, HEIGHT, STEP], layout)
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
    sums = _zeros(WIDTH, REST)
    odd = gl.zeros((BLOCK_N, STEP), gl.bfloat16, LEFT)
    async_copy.wait_group(AHEAD - 1)
    even = _fragments(codes_0.index(0), scales_0.index(0), 0, LEFT)
    slot, free, turn = 0, AHEAD, 0
    for step in range(0, STEPS, 2):
        last = gl.where(turn == 0, TURNS - 1, turn - 1)
        sums = _begin(even, x_tiles.index(slot), sums, WIDTH, REST)
        sums, odd = _end(1, sums, odd, REST)
        async_copy.wait_group(AHEAD - 2)
        _copy(step + AHEAD, free, last, 0, *source, codes_0, scales_0, STEPS)
        slot, free = _next(slot, AHEAD + 1), _next(free, AHEAD + 1)
        odd = _fragments(codes_1.index(turn), scales_1.index(turn), 1, LEFT)
        sums = _begin(odd, x_tiles.index(slot), sums, WIDTH, REST)
        sums, even = _end(1, sums, even, REST)
        async_copy.wait_group(AHEAD - 2)
        _copy(step + AHEAD + 1, free, last, 1, *source, codes_1, scales_1, STEPS)
        slot, free, turn = _next(slot, AHEAD + 1), _next(free, AHEAD + 1), _next(turn, TURNS)
        even = _fragments(codes_0.index(turn), scales_0.index(turn), 0, LEFT)  # at the end: of any
    sums, even = _end(0, sums, even, REST)
    sums, odd = _end(0, sums, odd, REST)
    async_copy.wait_group(0)
    return sums


@gluon.jit
def _turned(y, ORDERED: gl.constexpr):
    """y [128, M] as it is stored; ORDERED: its rows in `k_order`. Through shared memory at once:
    `convert_layout` would put two barriers round every eight numbers of a thread."""
    M: gl.constexpr = y.shape[1]
    layout: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    tile = gl.allocate_shared_memory(y.dtype, [M, BLOCK_N], layout).permute((1, 0))
    tile.store(y)
    if ORDERED:
        FIRST: gl.constexpr = [[1, 0], [16, 0], [32, 0], [64, 0]]  # registers
        MORE: gl.constexpr = [[0, 16], [0, 32], [0, 64]][: (M > 16) + (M > 32) + (M > 64)]
        BY_LANE: gl.constexpr = [[2, 0], [4, 0], [8, 0], [0, 1], [0, 2]]
        FROM: gl.constexpr = gl.DistributedLinearLayout(
            FIRST + MORE, BY_LANE, [[0, 4], [0, 8]], [], [BLOCK_N, M]
        )
        y = tile.load(FROM).reshape((2, 4, 4, 2, 2, M)).permute((0, 2, 3, 1, 4, 5))
        return gl.convert_layout(y.reshape((BLOCK_N, M)), OUT, assert_trivial=True)
    else:
        return tile.load(OUT)


@gluon.jit
def _store(y, out_ptr, rows_idx, stride, n0):
    """Columns n0.. of the rows of a block's pairs; y [128, M]."""
    rows = _rows(rows_idx, 0, y.shape[1], gl.SliceLayout(0, OUT)).to(gl.int64)
    n = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    gl.store(out_ptr + (rows * stride)[None, :] + n[:, None], y, mask=(rows >= 0)[None, :])


@gluon.jit
def _quarters(rows_idx, BLOCK_M: gl.constexpr):
    """How many quarters of a block have pairs, which are its first ones."""
    quarters = 0
    for i in gl.static_range(4):
        quarters += (gl.load(rows_idx + i * (BLOCK_M // 4)) >= 0).to(gl.int32)
    return quarters


@gluon.jit
def _place(rows_idx, N_TILES: gl.constexpr, BLOCK_M: gl.constexpr):
    """A program's pairs and first column, asked for anew: no register holds them so long."""
    pid = gl.inline_asm_elementwise(PROGRAM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return rows_idx + (pid // N_TILES).to(gl.int64) * BLOCK_M, pid % N_TILES * BLOCK_N


@gluon.jit
def _rows(rows_idx, FIRST: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.load(rows_idx + FIRST + gl.arange(0, N, layout=LAYOUT))


@gluon.jit
def _store_up(acc, scale, h_ptr, rows_idx, stride, n0):
    h = relu2(acc * scale).to(gl.bfloat16)
    _store(_turned(h, True), h_ptr, rows_idx, stride, n0)


@gluon.jit
def _up(
    x_ptr, matrix, scale, h_ptr, table_idx, block, x_stride, K: gl.constexpr,
    N_TILES: gl.constexpr, K_TILES: gl.constexpr, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """The up product of a block's first WIDTH + REST pairs."""
    rows_idx = table_idx + block * BLOCK_M
    rows = _rows(rows_idx, 0, WIDTH, gl.SliceLayout(1, X_ROWS))
    first, second = gl.where(rows < 0, -1, rows // K * (x_stride // 8)), None
    if REST > 0:
        rows = _rows(rows_idx, WIDTH, REST, gl.SliceLayout(1, X_ROWS))
        second = gl.where(rows < 0, -1, rows // K * (x_stride // 8))
    sums = _product(x_ptr, (first, second), matrix, 2 * K_TILES, WIDTH, REST)
    rows_idx, n0 = _place(table_idx, N_TILES, BLOCK_M)
    _store_up(sums[0], scale, h_ptr, rows_idx, N_TILES * BLOCK_N, n0)
    if REST > 0:
        _store_up(sums[1], scale, h_ptr, rows_idx + WIDTH, N_TILES * BLOCK_N, n0)


@gluon.jit
def _async_up(
    x_ptr, words_ptr, global_ptr, h_ptr, rows_idx, experts_idx, x_stride,
    K: gl.constexpr, N_TILES: gl.constexpr, K_TILES: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """h [T*K, 128 N_TILES] by pair, columns in `k_order`; x [T, 128 K_TILES] in `k_order`."""
    PARTED: gl.constexpr = BLOCK_M >= 64
    PART: gl.constexpr = BLOCK_M // 4
    pid = gl.program_id(0).to(gl.int64)
    block, tile_n = pid // N_TILES, (pid % N_TILES).to(gl.int32)
    expert = gl.load(experts_idx + block).to(gl.int64)
    if PARTED:
        quarters = _quarters(rows_idx + block * BLOCK_M, BLOCK_M)
    if expert >= 0:
        scale = gl.load(global_ptr + expert) * UNIT
        matrix = words_ptr + (expert * N_TILES + tile_n) * (K_TILES * TILE_WORDS)
        rest = (x_ptr, matrix, scale, h_ptr, rows_idx, block, x_stride)
        if not PARTED:
            _up(*rest, K, N_TILES, K_TILES, BLOCK_M, BLOCK_M, 0)
        else:
            if quarters == 4:
                _up(*rest, K, N_TILES, K_TILES, BLOCK_M, BLOCK_M, 0)
            elif quarters == 3:
                _up(*rest, K, N_TILES, K_TILES, BLOCK_M, 2 * PART, PART)
            elif quarters == 2:
                _up(*rest, K, N_TILES, K_TILES, BLOCK_M, 2 * PART, 0)
            else:
                _up(*rest, K, N_TILES, K_TILES, BLOCK_M, PART, 0)


@gluon.jit
def _store_down(acc, scale, weights_ptr, out_ptr, rows_idx, stride, n0):
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, acc.shape[1], 16])
    rows = _rows(rows_idx, 0, acc.shape[1], gl.SliceLayout(0, SUMS))
    weights = gl.load(weights_ptr + rows, mask=rows >= 0, other=0.0)
    y = (acc * (scale * weights)[None, :]).to(out_ptr.dtype.element_ty)
    _store(_turned(y, False), out_ptr, rows_idx, stride, n0)


@gluon.jit
def _down(
    h_ptr, matrix, scale, weights_ptr, out_ptr, table_idx, block, N_TILES: gl.constexpr,
    K_TILES: gl.constexpr, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """The down product of a block's first WIDTH + REST pairs."""
    rows_idx = table_idx + block * BLOCK_M
    rows = _rows(rows_idx, 0, WIDTH, gl.SliceLayout(1, X_ROWS))
    first, second = gl.where(rows < 0, -1, rows * (K_TILES * BLOCK_N // 8)), None
    if REST > 0:
        rows = _rows(rows_idx, WIDTH, REST, gl.SliceLayout(1, X_ROWS))
        second = gl.where(rows < 0, -1, rows * (K_TILES * BLOCK_N // 8))
    sums = _product(h_ptr, (first, second), matrix, 2 * K_TILES, WIDTH, REST)
    rows_idx, n0 = _place(table_idx, N_TILES, BLOCK_M)
    _store_down(sums[0], scale, weights_ptr, out_ptr, rows_idx, N_TILES * BLOCK_N, n0)
    if REST > 0:
        rows_idx += WIDTH
        _store_down(sums[1], scale, weights_ptr, out_ptr, rows_idx, N_TILES * BLOCK_N, n0)


@gluon.jit
def _async_down(
    h_ptr, words_ptr, global_ptr, weights_ptr, out_ptr, rows_idx, experts_idx,
    N_TILES: gl.constexpr, K_TILES: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Weighted rows [T*K, 128 N_TILES] by pair; h [T*K, 128 K_TILES] in `k_order`."""
    PARTED: gl.constexpr = BLOCK_M >= 64
    PART: gl.constexpr = BLOCK_M // 4
    pid = gl.program_id(0).to(gl.int64)
    block, tile_n = pid // N_TILES, (pid % N_TILES).to(gl.int32)
    expert = gl.load(experts_idx + block).to(gl.int64)
    if PARTED:
        quarters = _quarters(rows_idx + block * BLOCK_M, BLOCK_M)
    if expert >= 0:
        scale = gl.load(global_ptr + expert) * UNIT
        matrix = words_ptr + (expert * N_TILES + tile_n) * (K_TILES * TILE_WORDS)
        rest = (h_ptr, matrix, scale, weights_ptr, out_ptr, rows_idx, block)
        if not PARTED:
            _down(*rest, N_TILES, K_TILES, BLOCK_M, BLOCK_M, 0)
        else:
            if quarters == 4:
                _down(*rest, N_TILES, K_TILES, BLOCK_M, BLOCK_M, 0)
            elif quarters == 3:
                _down(*rest, N_TILES, K_TILES, BLOCK_M, 2 * PART, PART)
            elif quarters == 2:
                _down(*rest, N_TILES, K_TILES, BLOCK_M, 2 * PART, 0)
            else:
                _down(*rest, N_TILES, K_TILES, BLOCK_M, PART, 0)


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
