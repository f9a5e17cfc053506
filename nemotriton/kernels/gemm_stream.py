"""The streaming form of y = epilogue(scale * (x W^T) + bias): a few tokens, the weight read once.

Such a product costs what reading W costs. A program takes BLOCK_N rows of W over all of K; each of
its warps (SLICES of them) multiplies its own BLOCK_K columns of every step, as one matrix of a
batched product, and the warps' sums are added at the end in a fixed order. So there are enough
programs and warps to keep the memory busy without parts of K in other programs, whose sums would
need a second kernel. W is the tensor core's long side, tokens the short one; mma.sync takes both
operands from registers, so that e4m3 numbers become 16-bit ones on the way.

With ROTATE neighbours start at different columns and go round, so that they do not ask for the same
part of x at once; it pays for wide bf16 matrices only.

It is a dependent launch: while the kernel before it finishes, the programs that start with it bring
their first AHEAD steps of W into L2 (those behind them would only queue the same bytes twice). With
EARLY it lets the next kernel come when it starts, else behind its loop. Programs of a dependent
launch go where there is room first. Where one wave takes them all, a tile has shared memory for as
many stages as leave each processor room for its even share (`_even`): else some get twice as many.

x [T, K] with a free row stride, bf16 or fp16; W [N, K] in x's dtype, or e4m3 as bytes, or fp32
beside bf16 x (`dot_parts`). A row's sum depends on the tile, never on the number of rows.
"""

import torch
import triton
import triton.language as tl

from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.dependent import as_dependent, prefetch
from nemotriton.kernels.fp4 import e4m3_decode
from nemotriton.kernels.numerics import relu2
from nemotriton.kernels.op import Tile, cdiv, launch, next_pow2
from nemotriton.kernels.shared_memory import most_shared


@triton.jit
def finish(acc, b_ptr, r_ptr, y_ptr, t, n, T, N, r_stride, RELU2: tl.constexpr):
    """Epilogue and store of sums for tokens t and outputs n, of shapes that broadcast to acc's."""
    mask = (t < T) & (n < N)
    if b_ptr is not None:
        acc += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if RELU2:
        acc = relu2(acc)
    if r_ptr is not None:
        acc += tl.load(r_ptr + t * r_stride + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + t * N + n, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _e4m3_to_bf16(byte):
    """bf16 of e4m3 bytes, four to a register: 5 instructions for two. They do not interact, so it
    is all the same which four the compiler packs together."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 wide, low, unit;
        mov.b32 unit, 0x7b807b80;
        prmt.b32 wide, $2, 0, 0x1404;
        shr.b32 low, wide, 4;
        and.b32 low, low, 0x07f007f0;
        lop3.b32 low, wide, 0x80008000, low, 0xEA;
        mul.rn.bf16x2 $0, low, unit;
        prmt.b32 wide, $2, 0, 0x3424;
        shr.b32 low, wide, 4;
        and.b32 low, low, 0x07f007f0;
        lop3.b32 low, wide, 0x80008000, low, 0xEA;
        mul.rn.bf16x2 $1, low, unit;
        }""",
        "=r,=r,r",
        [byte],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_to(byte, dtype: tl.constexpr, ASM: tl.constexpr):
    """e4m3 bytes as numbers of a 16-bit or 32-bit dtype; ASM: by what sm_90 and later do best."""
    if ASM and dtype == tl.bfloat16:
        return _e4m3_to_bf16(byte)
    elif ASM:
        return byte.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return e4m3_decode(byte.to(tl.int32)).to(dtype)


@triton.jit
def dot_parts(w, x, acc, SWAP: tl.constexpr):
    """acc + w x (SWAP), or x w, for fp32 w and bf16 x on the 16-bit tensor cores.

    24 bits of w are three bf16 numbers of 8 bits, each what the ones before it leave, so products
    are exact and only their fp32 sum rounds. An infinite w leaves NaN, as inf - inf."""
    for _ in tl.static_range(3):
        part = w.to(tl.bfloat16)
        w -= part.to(tl.float32)
        if SWAP:
            acc = tl.dot(part, x, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, part, acc, input_precision="ieee")
    return acc


LINE = tl.constexpr(128)  # bytes that one prefetch brings
FIRST = tl.constexpr(528)  # programs that start at once on a large GPU


@triton.jit
def _fetch_ahead(pid, rows, start, row, BYTES: tl.constexpr, AHEAD: tl.constexpr):
    """Ask for AHEAD bytes of each of `rows` [R], elements of BYTES, from element `start` on; behind
    `row` elements it goes on with the first."""
    if pid < FIRST:
        at = start + tl.arange(0, AHEAD // LINE) * (LINE // BYTES)
        prefetch(rows[:, None] + tl.where(at < row, at, at - row)[None, :])


@triton.jit(do_not_specialize=["T"])
def _stream(
    x_ptr, w_ptr, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, y_ptr,
    x_stride, w_stride, r_stride, T, N, K,
    RELU2: tl.constexpr, EVEN_K: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ROTATE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_T tokens, over STEPS steps of STEP = SLICES * BLOCK_K columns."""
    STEP: tl.constexpr = SLICES * BLOCK_K
    BYTES: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_n = pid % tiles_n
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    t = pid // tiles_n * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    # rows of x past the end are not read; rows of W past the end repeat the last one
    live = (t < T)[None, None, :]
    x_at = x_ptr + t[None, None, :] * x_stride + k[:, :, None]  # [SLICES, BLOCK_K, BLOCK_T]
    w_rows = w_ptr + tl.minimum(n, N - 1) * w_stride
    w_at = w_rows[None, :, None] + k[:, None, :]  # [SLICES, BLOCK_N, BLOCK_K]
    first = 0
    if ROTATE:
        first = (tile_n % STEPS).to(tl.int32)
    if PDL:
        if AHEAD > 0:
            _fetch_ahead(pid, w_rows, first * STEP, K, BYTES, AHEAD * STEP * BYTES)
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_T), tl.float32)
    for turn in range(STEPS):
        step = first + turn
        step = tl.where(step < STEPS, step, step - STEPS) * STEP
        if EVEN_K:
            w = tl.load(w_at + step)
            x = tl.load(x_at + step, mask=live, other=0.0)
        else:
            left = k + step < K
            w = tl.load(w_at + step, mask=left[:, None, :], other=0)
            x = tl.load(x_at + step, mask=live & left[:, :, None], other=0.0)
        if w_ptr.dtype.element_ty == tl.uint8:
            w = e4m3_to(w, x_ptr.dtype.element_ty, ASM)
        if w_ptr.dtype.element_ty == tl.float32:
            acc = dot_parts(w, x, acc, True)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")

    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_T]
    if weight_scale_ptr is not None:
        scale = tl.load(weight_scale_ptr)
        if input_scale_ptr is not None:
            scale *= tl.load(input_scale_ptr)
        y *= scale
    finish(y, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


def stream(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch; scales: the weight's and the input's, for e4m3 bytes."""
    T, K = x.shape
    N = weight.shape[0]
    slices = int(tile["num_warps"])
    block = int(tile["BLOCK_K"]) * slices
    grid = (cdiv(N, int(tile["BLOCK_N"])) * cdiv(T, int(tile["BLOCK_T"])),)
    r_stride = 0 if residual is None else residual.stride(0)
    shape = (x.stride(0), weight.stride(0), r_stride, T, N, K)
    constants = {"EVEN_K": K % block == 0, "STEPS": cdiv(K, block), "SLICES": slices}
    asm = decodes_by_assembly(x)
    args = (x, weight, *scales, bias, residual, y, *shape)
    blocks = dict(tile.without("STREAM"))
    if int(tile["AHEAD"]) * block > K or block * weight.element_size() % LINE.value:
        blocks["AHEAD"] = 0  # only whole lines of whole steps are asked for
    launch(_stream, grid, *args, RELU2=squared, ASM=asm, **constants, **blocks, **as_dependent(x))


# (BLOCK_T, BLOCK_N, columns of a step in bytes of W, num_warps, num_stages): alternatives
_SHAPES = (
    (8, 16, 512, 4, 4),
    (8, 16, 512, 4, 5),
    (8, 16, 512, 4, 6),
    (8, 16, 256, 2, 4),
    (8, 32, 256, 2, 4),
    (8, 32, 256, 2, 5),
    (8, 32, 512, 4, 3),
    (16, 16, 512, 4, 4),
    (16, 16, 512, 4, 5),
    (16, 32, 256, 2, 4),
    (16, 32, 512, 4, 3),
    (16, 64, 256, 2, 4),
    (32, 64, 256, 4, 4),
    (32, 32, 512, 8, 3),
)
WIDE = 12800  # outputs from which x, read again by every program, costs more than W brings
STREAM_TOKENS = 32  # at most; more are better off with the tensor core's asynchronous form
PROCESSORS = 132
SHARED = 233472  # bytes of a Hopper multiprocessor, of which every program takes 1,024 for itself


def stream_tile(N: int, tokens: int, itemsize: int) -> Tile:
    """A good tile for up to STREAM_TOKENS tokens: as measured for few on an H200; else all programs
    of a middling matrix run at once, each processor with 16 warps or so and tens of kilobytes of W
    on their way to it, and few enough programs that reading x in each of them does not count."""
    if tokens <= 8 and itemsize <= 2:
        if itemsize == 2 and N >= 5 * WIDE:
            return _shape((8, 32, 512, 4, 3), itemsize, rotate=True)
        if itemsize == 2 and N >= WIDE and tokens == 1:
            return _shape((8, 32, 256, 2, 4), itemsize, rotate=True)
        if itemsize == 2:
            return _shape((8, 16, 512, 4, 5 if N <= 4096 else 4), itemsize)
        tile = _shape((8, 16, 512, 4, 4), itemsize, ahead=2 if N >= WIDE else 0)
        return _even(tile, N, itemsize)
    if tokens <= 16 and itemsize <= 2:
        shape = (16, 32, 512, 4, 3) if N >= WIDE else (16, 16, 512, 4, 4)
        return _even(_shape(shape, itemsize), N, itemsize)
    t = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
    fewest = 264 if t == 8 else 128  # programs
    n = next((b for b in (64, 32) if b * fewest <= N and b <= 4 * t), 16)
    few = cdiv(N, n) < 512
    step = 16384 if n == 64 or (n == 32 and few) else 8192  # bytes of W
    warps = 8 if few and (t, n) != (32, 64) else 4
    return _even(_shape((t, n, step // n, warps, 3 if n == 64 else 4), itemsize), 0, itemsize)


def stream_tiles(itemsize: int) -> list[Tile]:
    """What else the sweep tries."""
    found = [_shape(shape, itemsize) for shape in _SHAPES]
    for shape in (_SHAPES[0], _SHAPES[6], _SHAPES[4]):
        found += [
            _shape(shape, itemsize, rotate=True),
            _shape(shape, itemsize, ahead=2),
            _shape(shape, itemsize, ahead=2).but(EARLY=True),
        ]
    return found


def stream_suits(tile: Tile, tokens: int) -> bool:
    """Whether a tile is worth measuring at a number of tokens."""
    return tokens <= STREAM_TOKENS and tile["BLOCK_T"] == max(8, next_pow2(tokens))


def _shape(
    shape: tuple[int, int, int, int, int], itemsize: int, rotate: bool = False, ahead: int = 0
) -> Tile:
    t, n, row, warps, stages = shape
    tile = Tile(STREAM=True, BLOCK_T=t, BLOCK_N=n, BLOCK_K=row // itemsize // warps)
    return tile.but(num_warps=warps, num_stages=stages, ROTATE=rotate, AHEAD=ahead, EARLY=False)


def _even(tile: Tile, N: int, itemsize: int) -> Tile:
    """The tile with stages for as much shared memory as keeps a processor from taking more than its
    share of the programs that N outputs make, where that is one or two; and no more than a GPU
    with little of it has. Of the stages one is not kept."""
    columns = int(tile["BLOCK_K"]) * int(tile["num_warps"])
    one = columns * (int(tile["BLOCK_N"]) * itemsize + int(tile["BLOCK_T"]) * 2)
    stages = int(tile["num_stages"])
    share = cdiv(cdiv(N, int(tile["BLOCK_N"])), PROCESSORS)
    if 1 <= share <= 2:
        least = SHARED // (share + 1) - 1024
        wanted = max(stages, least // one + 2)
        stages = wanted if (wanted - 1) * one + 1024 <= SHARED // share and wanted <= 8 else stages
    while stages > 2 and (stages - 1) * one > most_shared():
        stages -= 1
    return tile.but(num_stages=stages)
