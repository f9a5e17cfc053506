"""The product of many tokens by warp roles, in Triton's Gluon dialect for Hopper.

What `gemm_square` computes, to the same bits. There all warps of a program multiply in step, and
the tensor cores stand still while it begins, adds or ends. Here a persistent program has roles that
meet at mbarriers only:

    products   4 warps, twice: 64 x 256 or 128 x 128 sums each, half of the program's tile
    loads      1 warp: TMA of x and W, some steps ahead, on into the program's next tile

Both roles of products read the same stages and share nothing else, so they fall out of step by
themselves, and one ends a tile (scale, bias, epilogue, rounding, a store by TMA) while the other
still multiplies.

16-bit operands are summed in the tensor cores from the first column to the last. Of e4m3 codes 128
columns are multiplied from zero, and their sum, of about 14 bits, is added in fp32, for two parts
of 64 x 128 sums in turn; while one role adds, the tensor cores have the other's product.

x [T, K] and W [N, K] both bf16, both fp16 or both e4m3, y [T, N] bf16 or fp16; rows of all three
start at multiples of 16 bytes. TMA pads with zeros past every edge, and stores nothing there.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nemotriton import device
from nemotriton.kernels.described import Described, described
from nemotriton.kernels.gemm_square import describable, square, square_tile
from nemotriton.kernels.numerics import relu2
from nemotriton.kernels.op import Tile, cdiv, launch, target

ROWS = gl.constexpr(64)  # of a part: those of one wgmma
COLUMNS = gl.constexpr(128)
STEP = gl.constexpr(128)  # bytes of a row of x and W that a stage holds
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
SUMS_8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
WIDE_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def _tiles(sizes, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr):
    T, N, _ = sizes
    return gl.cdiv(T, BLOCK_T) * gl.cdiv(N, BLOCK_N)


@gluon.jit
def _place(tile, sizes, GROUP: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr):
    """First token and output of a tile; GROUP rows of tiles at a time, column by column."""
    T, N, _ = sizes
    tiles_n = gl.cdiv(N, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    rows = gl.minimum(gl.cdiv(T, BLOCK_T) - first, GROUP)
    inner = tile % (GROUP * tiles_n)
    return (first + inner % rows) * BLOCK_T, inner // rows * BLOCK_N


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The stage behind `stage`, and the parity of its turn."""
    over = stage == STAGES - 1
    return gl.where(over, 0, stage + 1), gl.where(over, phase ^ 1, phase)


@gluon.jit
def _load_role(x_desc, w_desc, x_tiles, w_tiles, bars, sizes, GROUP: gl.constexpr):
    STAGES: gl.constexpr = x_tiles.shape[0]
    BLOCK_T: gl.constexpr = x_tiles.shape[1]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    full, free = bars
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), _tiles(sizes, BLOCK_T, BLOCK_N), gl.num_programs(0)):
        t, n = _place(tile, sizes, GROUP, BLOCK_T, BLOCK_N)
        for k in range(0, sizes[2], x_tiles.shape[2]):
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, (BLOCK_T + BLOCK_N) * STEP)
            tma.async_copy_global_to_shared(x_desc, [t, k], bar, x_tiles.index(stage))
            tma.async_copy_global_to_shared(w_desc, [n, k], bar, w_tiles.index(stage))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _scale(ends):
    scale = 1.0
    if ends[1] is not None:
        scale = gl.load(ends[1])
        if ends[2] is not None:
            scale *= gl.load(ends[2])
    return scale


@gluon.jit
def _store_part(acc, scale, ends, y_tile, t, n, sizes, RELU2: gl.constexpr, LAYOUT: gl.constexpr):
    """Epilogue of a part's sums, and the copy to y, which TMA cuts off at its edges."""
    y_desc, _, _, b_ptr, r_ptr, r_stride = ends
    T, N, _ = sizes
    acc *= scale
    columns = n + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    if b_ptr is not None:
        acc += gl.load(b_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
    if RELU2:
        acc = relu2(acc)
    if r_ptr is not None:
        rows = t + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        at = r_ptr + (rows.to(gl.int64) * r_stride)[:, None] + columns[None, :]
        mask = (rows < T)[:, None] & (columns < N)[None, :]
        acc += gl.load(at, mask=mask, other=0.0).to(gl.float32)
    y = acc.to(y_desc.dtype)
    tma.store_wait(0)  # the tile's previous store has been read
    y_tile.store(y)
    fence_async_shared()
    tma.async_copy_shared_to_global(y_desc, [t, n], y_tile)


@gluon.jit
def _product(x, w):
    """Sums over STEP columns of codes, fp32 [ROWS, COLUMNS]."""
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS_8)
    part = warpgroup_mma(x, w.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(part,))


@gluon.jit
def _code_role(
    me: gl.constexpr, x_tiles, w_tiles, y_tile, bars, ends, sizes,
    RELU2: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Half of the tile's tokens, e4m3; two parts: of tokens if the tile is tall, or of outputs."""
    STAGES: gl.constexpr = x_tiles.shape[0]
    BLOCK_T: gl.constexpr = x_tiles.shape[1]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    t_me: gl.constexpr = me * (BLOCK_T // 2)
    t_part: gl.constexpr = BLOCK_T // 2 - ROWS
    n_part: gl.constexpr = BLOCK_N - COLUMNS
    full, free = bars
    scale = _scale(ends)
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), _tiles(sizes, BLOCK_T, BLOCK_N), gl.num_programs(0)):
        t, n = _place(tile, sizes, GROUP, BLOCK_T, BLOCK_N)
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS_8)
        more = gl.zeros((ROWS, COLUMNS), gl.float32, SUMS_8)
        for _ in range(0, sizes[2], STEP):
            x, w = x_tiles.index(stage), w_tiles.index(stage)
            mbarrier.wait(full.index(stage), phase)
            acc += _product(x.slice(t_me, ROWS), w.slice(0, COLUMNS))
            part = _product(x.slice(t_me + t_part, ROWS), w.slice(n_part, COLUMNS))
            mbarrier.arrive(free.index(stage))
            more += part
            stage, phase = _next(stage, phase, STAGES)
        t += t_me
        _store_part(acc, scale, ends, y_tile, t, n, sizes, RELU2, SUMS_8)
        _store_part(more, scale, ends, y_tile, t + t_part, n + n_part, sizes, RELU2, SUMS_8)
    tma.store_wait(0)


@gluon.jit
def _number_role(
    me: gl.constexpr, x_tiles, w_tiles, y_tile, bars, ends, sizes,
    RELU2: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Half of a flat tile's tokens of 16-bit numbers; a stage is free when the next step's product
    is under way."""
    STAGES: gl.constexpr = x_tiles.shape[0]
    BLOCK_T: gl.constexpr = x_tiles.shape[1]
    BLOCK_N: gl.constexpr = w_tiles.shape[1]
    t_me: gl.constexpr = me * ROWS
    full, free = bars
    scale = _scale(ends)
    stage, phase, before = 0, 0, STAGES - 1
    for tile in range(gl.program_id(0), _tiles(sizes, BLOCK_T, BLOCK_N), gl.num_programs(0)):
        t, n = _place(tile, sizes, GROUP, BLOCK_T, BLOCK_N)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, WIDE_SUMS)
        for k in range(0, sizes[2], x_tiles.shape[2]):
            x, w = x_tiles.index(stage), w_tiles.index(stage)
            mbarrier.wait(full.index(stage), phase)
            acc = warpgroup_mma(x.slice(t_me, ROWS), w.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(free.index(before), pred=k > 0)
            before = stage
            stage, phase = _next(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(before))
        t += t_me
        acc, more = gl.split(acc.reshape((ROWS, 2, COLUMNS)).permute((0, 2, 1)))
        acc = gl.convert_layout(acc, SUMS, assert_trivial=True)
        more = gl.convert_layout(more, SUMS, assert_trivial=True)
        _store_part(acc, scale, ends, y_tile, t, n, sizes, RELU2, SUMS)
        _store_part(more, scale, ends, y_tile, t, n + COLUMNS, sizes, RELU2, SUMS)
    tma.store_wait(0)


@gluon.jit
def _product_role(
    me: gl.constexpr, x_tiles, w_tiles, y_tile, bars, ends, sizes,
    RELU2: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    if x_tiles.shape[2] == STEP:
        _code_role(me, x_tiles, w_tiles, y_tile, bars, ends, sizes, RELU2, GROUP)
    else:
        _number_role(me, x_tiles, w_tiles, y_tile, bars, ends, sizes, RELU2, GROUP)


@gluon.jit
def _barriers(slots: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(slots):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(do_not_specialize=["T"])
def _roles(
    x_desc, w_desc, y_desc, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, r_stride, T, N, K,
    RELU2: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    y0 = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    y1 = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_shape, y_desc.layout)
    bars = (_barriers(STAGES, 1), _barriers(STAGES, 2))
    fence_async_shared()
    ends = (y_desc, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, r_stride)
    sizes = (T, N, K)
    gl.warp_specialize(
        [
            (_product_role, (0, x_tiles, w_tiles, y0, bars, ends, sizes, RELU2, GROUP)),
            (_product_role, (1, x_tiles, w_tiles, y1, bars, ends, sizes, RELU2, GROUP)),
            (_load_role, (x_desc, w_desc, x_tiles, w_tiles, bars, sizes, GROUP)),
        ],
        [4, 1],
        [REGISTERS, LOAD_REGISTERS],
    )


# ------------------------------------------------------------------------------------------ launch
Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def roles(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch; operands as `gemm_square.square` has them, of which `has_roles` holds."""
    (T, K), N = x.shape, weight.shape[0]
    t, n, k = int(tile["BLOCK_T"]), int(tile["BLOCK_N"]), STEP.value // x.element_size()
    programs = min(cdiv(T, t) * cdiv(N, n), device.info(x.device).sms)
    launch(
        _roles, (programs,), _rows(x, t, k), _rows(weight, n, k),
        _rows(y, ROWS.value, COLUMNS.value), *scales, bias, residual,
        0 if residual is None else residual.stride(0), T, N, K, RELU2=squared,
        GROUP=tile["GROUP"], STAGES=tile["num_stages"], REGISTERS=240, LOAD_REGISTERS=24,
        num_warps=4, maxnreg=168,
    )  # fmt: skip


def _rows(v: torch.Tensor, rows: int, columns: int) -> Described:
    return described(v, v.shape, (v.stride(0), 1), (rows, columns))


def has_roles(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether this form takes the operands: compute capability 9.0, a 16-bit y, and rows of all
    three that TMA can move."""
    on_hopper = target(x.device) == 90
    return on_hopper and y.dtype in (torch.bfloat16, torch.float16) and describable(x, weight, y)


def multiply_many(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch this form where the tile asks for it and the operands allow it, or else `square`."""
    ends = (scales, bias, squared, residual, y)
    if "ROLES" not in tile:
        square(x, weight, *ends, tile)
    elif has_roles(x, weight, y):
        roles(x, weight, *ends, tile)
    else:
        square(x, weight, *ends, square_tile((128, 128, int(tile["BLOCK_K"]), 8, 3)))


def roles_tile(block_t: int, block_n: int, block_k: int, stages: int = 4, group: int = 16) -> Tile:
    """Blocks of 128 x 256 outputs, or of 256 x 128 for codes; block_k: 128 codes, or 64 numbers."""
    tile = Tile(TMA=True, ROLES=True, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k)
    return tile.but(GROUP=group, num_warps=4, num_stages=stages)


CODES = roles_tile(128, 256, 128)  # the best of e4m3, and
NUMBERS = roles_tile(128, 256, 64)  # of 16-bit operands, on an H200
