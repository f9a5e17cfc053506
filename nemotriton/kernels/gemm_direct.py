"""The direct form of y = epilogue(scale * (x W^T) + bias): a few tokens, quantised weights that go
from memory to the tensor cores' registers without a stop.

As in the streaming form (`gemm_stream`) a program takes BLOCK_N rows of W over all of K, and each
of its warps (SLICES) multiplies columns of its own, as one matrix of a batched product. But
nothing passes through shared memory and no warp waits for another before the end: a lane's loads
of 16 bytes are its fragments of `mma.sync` once the columns of both operands are taken in the
order in which they lie, and the next step's loads are under way while this step's numbers are
decoded. It takes two thirds of the streaming form's instructions for a weight, and far more warps,
whose x is in L1.

It is a dependent launch, whose first weights are on their way before it waits. With EARLY it lets
the next kernel come as soon as all its programs have waited: they have their places then.

Of 64 columns a lane has 16 neighbours, as four words q of pairs p of columns e: column 16 t + 4 q +
2 p + e of lane 4 g + t. FP8 words are four e4m3 numbers of a row g; words of packed NVFP4
(`hopper_pack`) four e2m1 numbers of row g and four of row g + 8.

x [T, K] with a free row stride, bf16 or fp16, rows from 16-byte boundaries on; FP8 W [N, K] as
int32 [N, K/4]; K a multiple of a program's step, SLICES * 64 * GROUPS columns. A row's sum depends
on SLICES and GROUPS, never on the number of rows.
"""

import torch
import triton
import triton.language as tl

from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.gemm_stream import finish
from nemotriton.kernels.hopper_pack import WEIGHT_UNIT, WORDS, _decode_asm, _decode_tl
from nemotriton.kernels.op import Tile, cdiv, launch

COLUMNS = 64  # that a warp's lanes share, a vector of 16 each


# ------------------------------------------------------------------------------------------ decode
@triton.jit
def _bf16_asm(words):
    """A byte with its sign before it, moved up by four, is a bf16 that is 2^120 too small."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 wide, unit, first, second;
        mov.b32 unit, 0x7b807b80;
        prmt.b32 wide, $4, 0, 0x9180;
        shl.b32 wide, wide, 4;
        and.b32 wide, wide, 0x87f087f0;
        mul.rn.bf16x2 first, wide, unit;
        prmt.b32 wide, $4, 0, 0xB3A2;
        shl.b32 wide, wide, 4;
        and.b32 wide, wide, 0x87f087f0;
        mul.rn.bf16x2 second, wide, unit;
        mov.b32 {$0, $1}, first;
        mov.b32 {$2, $3}, second;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _fp16_asm(words):
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 first, second;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 second, high;
        mov.b32 {$0, $1}, first;
        mov.b32 {$2, $3}, second;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _low_byte(words, dtype: tl.constexpr):
    """The number that the lowest byte is, by its bits as the head of a 16-bit number."""
    if dtype == tl.bfloat16:
        bits = ((words & 0x7F) << 4) | ((words & 0x80) << 8)
        unit = tl.full(words.shape, 0x7B80, tl.uint16)  # 2^120
    else:
        bits = ((words & 0x7F) << 7) | ((words & 0x80) << 8)
        unit = tl.full(words.shape, 0x5C00, tl.uint16)  # 2^8
    return bits.to(tl.uint16).to(dtype, bitcast=True) * unit.to(dtype, bitcast=True)


@triton.jit
def e4m3_words(words, dtype: tl.constexpr, ASM: tl.constexpr):
    """The four numbers of int32 words of e4m3 bytes in bf16 or fp16, lowest byte first; exact.

    NaN codes, which no quantiser leaves in a weight, become 480 but for fp16's assembly."""
    if ASM and dtype == tl.bfloat16:
        a, b, c, d = _bf16_asm(words)
    elif ASM:
        a, b, c, d = _fp16_asm(words)
    else:
        a, b = _low_byte(words, dtype), _low_byte(words >> 8, dtype)
        c, d = _low_byte(words >> 16, dtype), _low_byte(words >> 24, dtype)
    return a, b, c, d


# ---------------------------------------------------------------------------------------- operands
@triton.jit
def _fp8_rows(
    words, dtype: tl.constexpr, ASM: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """[SLICES, BLOCK_N, 64 GROUPS] of words [block, row half, group; SLICES, lane, q]."""
    a, b, c, d = e4m3_words(words, dtype, ASM)
    w = tl.join(tl.join(a, b), tl.join(c, d))  # ..., e, p
    w = w.reshape(BLOCK_N // 16, 2, GROUPS, SLICES, 8, 4, 4, 2, 2)
    return w.trans(3, 0, 1, 4, 2, 6, 5, 8, 7).reshape(SLICES, BLOCK_N, GROUPS * 64)


@triton.jit
def _packed_rows(
    words, scales, dtype: tl.constexpr, ASM: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The same of packed words [block, group; SLICES, lane, q], scales [block, tile; SLICES, lane].

    Values are over WEIGHT_UNIT."""
    BLOCKS: tl.constexpr = BLOCK_N // 16 * (GROUPS // 2)
    STEP: tl.constexpr = 0x00100010
    BASE: tl.constexpr = 0x70007000
    s = scales.reshape(BLOCKS, SLICES, 32).to(tl.uint32, bitcast=True)
    low = tl.join(s & 0xFF, (s >> 16) & 0xFF) * STEP + BASE  # of row g, by group of a tile
    high = tl.join((s >> 8) & 0xFF, s >> 24) * STEP + BASE
    low = low.trans(0, 3, 1, 2).reshape(BLOCKS * 2, SLICES, 32, 1)
    high = high.trans(0, 3, 1, 2).reshape(BLOCKS * 2, SLICES, 32, 1)
    low = tl.broadcast_to(low, (BLOCKS * 2, SLICES, 32, 4))
    high = tl.broadcast_to(high, (BLOCKS * 2, SLICES, 32, 4))
    w = words.to(tl.uint32, bitcast=True)
    if ASM:
        a0, a1, b0, b1, c0, c1, d0, d1 = _decode_asm(w, low, high)
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = _decode_tl(w, low, high)
    left = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    right = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    w = tl.join(left, right).to(dtype)  # ..., e, row half, p
    w = w.reshape(BLOCK_N // 16, GROUPS, SLICES, 8, 4, 4, 2, 2, 2)
    return w.trans(2, 0, 7, 3, 1, 5, 4, 8, 6).reshape(SLICES, BLOCK_N, GROUPS * 64)


@triton.jit
def _tokens(x, SLICES: tl.constexpr, BLOCK_T: tl.constexpr, GROUPS: tl.constexpr):
    """[SLICES, 64 GROUPS, BLOCK_T] of x [block of 8 tokens, group, q / 2; SLICES, lane, 8]."""
    x = x.reshape(BLOCK_T // 8, GROUPS, 2, SLICES, 8, 4, 2, 4)
    return x.trans(3, 1, 2, 6, 5, 7, 0, 4).reshape(SLICES, GROUPS * 64, BLOCK_T)


@triton.jit
def _tokens_at(
    x_ptr, first, T, x_stride,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Where the vectors of 8 columns of tokens from `first` on lie, as `_tokens` wants them.

    Tokens past the end repeat the last one; their sums are not stored."""
    r, lane = tl.arange(0, BLOCK_T // 4 * GROUPS), tl.arange(0, 32)
    t = first + (r // (2 * GROUPS) * 8)[:, None] + (lane // 4)[None, :]
    row = tl.minimum(t, T - 1) * x_stride
    column = (r % (2 * GROUPS) // 2 * 64 + r % 2 * 8)[:, None] + (lane % 4 * 16)[None, :]
    part = tl.arange(0, SLICES) * (GROUPS * 64)
    at = (row + column)[:, None, :] + part[None, :, None]
    return x_ptr + (at[:, :, :, None] + tl.arange(0, 8)[None, None, None, :])


# ----------------------------------------------------------------------------------------- kernels
# Hints to every load: 16 bytes of a vector, then the lanes, then the warps, then the registers.
@triton.jit(do_not_specialize=["T"])
def _direct(
    x_ptr, w_ptr, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, y_ptr,
    x_stride, w_stride, r_stride, T, N,
    RELU2: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_T tokens, over STEPS steps; w_stride in words."""
    STEP: tl.constexpr = SLICES * GROUPS * 64
    pid = tl.program_id(0).to(tl.int64)
    tiles_t = tl.cdiv(T, BLOCK_T)  # neighbours: those of the same weights
    first_n, first_t = pid // tiles_t * BLOCK_N, pid % tiles_t * BLOCK_T
    lane, r = tl.arange(0, 32), tl.arange(0, BLOCK_N // 8 * GROUPS)
    row = first_n + (r // GROUPS * 8)[:, None] + (lane // 4)[None, :]
    word = tl.minimum(row, N - 1) * w_stride
    word += (r % GROUPS * 16)[:, None] + (lane % 4 * 4)[None, :]
    word = word[:, None, :] + (tl.arange(0, SLICES) * (GROUPS * 16))[None, :, None]
    w_at = w_ptr + (word[:, :, :, None] + tl.arange(0, 4)[None, None, None, :])
    w_at = tl.max_contiguous(tl.multiple_of(w_at, [1, 1, 1, 16]), [1, 2, 4, 16])
    x_at = _tokens_at(x_ptr, first_t, T, x_stride, SLICES, BLOCK_T, GROUPS)
    words = tl.load(w_at, cache_modifier=".cg")
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_T), tl.float32)
    for step in tl.range(STEPS - 1, num_stages=1, loop_unroll_factor=2):
        ahead = w_at + (step + 1) * (STEP // 4)
        ahead = tl.max_contiguous(tl.multiple_of(ahead, [1, 1, 1, 16]), [1, 2, 4, 16])
        coming = tl.load(ahead, cache_modifier=".cg")
        at = x_at + step * STEP
        x = tl.load(tl.max_contiguous(tl.multiple_of(at, [1, 1, 1, 16]), [1, 2, 4, 16]))
        w = _fp8_rows(words, x.dtype, ASM, SLICES, BLOCK_N, GROUPS)
        acc = tl.dot(w, _tokens(x, SLICES, BLOCK_T, GROUPS), acc, input_precision="ieee")
        words = coming
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    at = x_at + (STEPS - 1) * STEP
    x = tl.load(tl.max_contiguous(tl.multiple_of(at, [1, 1, 1, 16]), [1, 2, 4, 16]))
    w = _fp8_rows(words, x.dtype, ASM, SLICES, BLOCK_N, GROUPS)
    acc = tl.dot(w, _tokens(x, SLICES, BLOCK_T, GROUPS), acc, input_precision="ieee")

    scale = tl.load(weight_scale_ptr)
    if input_scale_ptr is not None:
        scale *= tl.load(input_scale_ptr)
    t, n = first_t + tl.arange(0, BLOCK_T), first_n + tl.arange(0, BLOCK_N)
    y = tl.sum(acc, 0) * scale
    finish(y, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


@triton.jit(do_not_specialize=["T"])
def _direct_packed(
    x_ptr, words_ptr, scale_ptr, b_ptr, r_ptr, y_ptr, x_stride, r_stride, T, N,
    RELU2: tl.constexpr, K_TILES: tl.constexpr, ASM: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_T tokens; GROUPS // 2 tiles for each of SLICES warps a step."""
    NB: tl.constexpr = BLOCK_N // 16
    AT_ONCE: tl.constexpr = GROUPS // 2
    STEPS: tl.constexpr = K_TILES // (SLICES * AT_ONCE)
    STEP: tl.constexpr = SLICES * AT_ONCE * WORDS
    pid = tl.program_id(0).to(tl.int64)
    tiles_t = tl.cdiv(T, BLOCK_T)  # neighbours: those of the same weights
    first_n, first_t = pid // tiles_t * BLOCK_N, pid % tiles_t * BLOCK_T
    lane, part = tl.arange(0, 32), tl.arange(0, SLICES) * (AT_ONCE * WORDS)
    r = tl.arange(0, NB * GROUPS)
    block = first_n // 16 + r // GROUPS
    begin = block // 8 * (K_TILES * WORDS) + r % GROUPS // 2 * WORDS
    word = (begin + block % 8 * 256 + r % 2 * 128)[:, None] + (lane * 4)[None, :]
    word = word[:, None, :] + part[None, :, None]
    w_at = words_ptr + (word[:, :, :, None] + tl.arange(0, 4)[None, None, None, :])
    w_at = tl.max_contiguous(tl.multiple_of(w_at, [1, 1, 1, 16]), [1, 2, 4, 16])
    r = tl.arange(0, NB * AT_ONCE)
    block = first_n // 16 + r // AT_ONCE
    begin = block // 8 * (K_TILES * WORDS) + r % AT_ONCE * WORDS + block % 8 * 32 + 2048
    word_4 = begin[:, None, None] + part[None, :, None] + lane[None, None, :]
    s_at = words_ptr + word_4[:, :, :, None]
    s_at = tl.max_contiguous(s_at, [1, 2, 4, 8])
    x_at = _tokens_at(x_ptr, first_t, T, x_stride, SLICES, BLOCK_T, GROUPS)
    words, scales = tl.load(w_at, cache_modifier=".cg"), tl.load(s_at)
    if PDL:
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_T), tl.float32)
    for step in tl.range(STEPS - 1, num_stages=1, loop_unroll_factor=2):
        ahead = w_at + (step + 1) * STEP
        ahead = tl.max_contiguous(tl.multiple_of(ahead, [1, 1, 1, 16]), [1, 2, 4, 16])
        coming = tl.load(ahead, cache_modifier=".cg")
        coming_scales = tl.load(tl.max_contiguous(s_at + (step + 1) * STEP, [1, 2, 4, 8]))
        at = x_at + step * (SLICES * GROUPS * 64)
        x = tl.load(tl.max_contiguous(tl.multiple_of(at, [1, 1, 1, 16]), [1, 2, 4, 16]))
        w = _packed_rows(words, scales, x.dtype, ASM, SLICES, BLOCK_N, GROUPS)
        acc = tl.dot(w, _tokens(x, SLICES, BLOCK_T, GROUPS), acc, input_precision="ieee")
        words, scales = coming, coming_scales
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    at = x_at + (STEPS - 1) * (SLICES * GROUPS * 64)
    x = tl.load(tl.max_contiguous(tl.multiple_of(at, [1, 1, 1, 16]), [1, 2, 4, 16]))
    w = _packed_rows(words, scales, x.dtype, ASM, SLICES, BLOCK_N, GROUPS)
    acc = tl.dot(w, _tokens(x, SLICES, BLOCK_T, GROUPS), acc, input_precision="ieee")

    t, n = first_t + tl.arange(0, BLOCK_T), first_n + tl.arange(0, BLOCK_N)
    y = tl.sum(acc, 0) * (tl.load(scale_ptr) * WEIGHT_UNIT)
    finish(y, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


# ---------------------------------------------------------------------------------------- launches
def is_direct(tile: Tile, x: torch.Tensor, K: int, weight: torch.Tensor | None = None) -> bool:
    """Whether a tile asks for this form and x, and FP8 weights [N, K] as bytes, allow it."""
    if "GROUPS" not in tile or x.dtype == torch.float32:
        return False
    whole = K % (int(tile["GROUPS"]) * int(tile["num_warps"]) * COLUMNS) == 0
    return whole and aligned(x) and (weight is None or aligned(weight))


def aligned(rows: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes; a meta tensor's storage does."""
    first = rows.storage_offset() * rows.element_size()
    first = first if rows.device.type == "meta" else rows.data_ptr()
    return first % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0


def direct(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor | None],
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch for FP8 weights as bytes [N, K]; scales: the weight's and the input's."""
    (T, K), N = x.shape, weight.shape[0]
    words = weight.view(torch.int32)
    strides = (x.stride(0), words.stride(0), 0 if residual is None else residual.stride(0))
    step = int(tile["GROUPS"]) * int(tile["num_warps"]) * COLUMNS
    args = (x, words, *scales, bias, residual, y, *strides, T, N)
    launch(_direct, _grid(T, N, tile), *args, STEPS=K // step, **_constants(x, squared, tile))


def direct_packed(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch for words of packed NVFP4."""
    T, N = y.shape
    strides = (x.stride(0), 0 if residual is None else residual.stride(0))
    args = (x, words, scale, bias, residual, y, *strides, T, N)
    constants = {"K_TILES": words.shape[1], **_constants(x, squared, tile)}
    launch(_direct_packed, _grid(T, N, tile), *args, **constants)


def _grid(T: int, N: int, tile: Tile) -> tuple[int]:
    return (cdiv(N, int(tile["BLOCK_N"])) * cdiv(T, int(tile["BLOCK_T"])),)


def _constants(x: torch.Tensor, squared: bool, tile: Tile) -> dict[str, int | bool]:
    asm = decodes_by_assembly(x, bool(tile["ASM"]))
    more = {"RELU2": squared, "SLICES": int(tile["num_warps"]), **as_dependent(x)}
    return {**tile, **more, "ASM": asm}


def direct_tile(
    t: int, n: int, groups: int, warps: int, asm: bool = True, registers: int = 0
) -> Tile:
    """BLOCK_T, BLOCK_N and the groups of 64 columns that a warp takes a step.

    `registers`: as many as a lane has where all programs are on the GPU at once; left to itself,
    ptxas asks for the loads of a step one after the other, or spills, to save some."""
    tile = Tile(BLOCK_T=t, BLOCK_N=n, GROUPS=groups, num_warps=warps, num_stages=1)
    tile = tile.but(ASM=asm, EARLY=False)
    return tile.but(maxnreg=registers) if registers else tile
