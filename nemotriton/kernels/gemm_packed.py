"""Linear layers with NVFP4 weights repacked for Hopper: y = epilogue(scale * (x V^T) + bias).

V are the stored values e2m1 * block scale, decoded in registers from `hopper_pack`'s words; x stays
in 16 bits (w4a16). Numbers and rounding are those of `gemm_quant.nvfp4_matmul`.

Few tokens take the direct form of `gemm_direct` where there are many rows, else the streaming one
(see `gemm_stream`): each warp of a program multiplies a tile of its own by mma.sync. x's columns
are brought into the words' order in registers, which is free: it needs neither a copy of x nor
gathering loads. ROTATE, AHEAD and EARLY are `gemm_stream`'s. More tokens take wgmma, whose right
operand comes from shared memory: there x is copied into the words' order first (`gemm_wide`). For
thousands of them V is written out in 16 bits first (`widen`).

x [T, K] with a free row stride, bf16 or fp16; words int32 [N/128, K/128, 2304], rounded up.
"""

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.dependent import as_dependent, prefetch
from nemotriton.kernels.fixed_order import DECODE, LINEAR_ROWS, ByRow, FixedOrder
from nemotriton.kernels.fp4 import random_nvfp4
from nemotriton.kernels.gemm import _sum_splits, check_rows, sum_splits
from nemotriton.kernels.gemm_direct import _direct_packed, direct_packed, direct_tile, is_direct
from nemotriton.kernels.gemm_quant import nvfp4_matmul_ref
from nemotriton.kernels.gemm_quant_tiles import WIDENED, widened_tile
from nemotriton.kernels.gemm_roles import _roles, multiply_many
from nemotriton.kernels.gemm_square import _square, describable
from nemotriton.kernels.gemm_stream import FIRST, finish
from nemotriton.kernels.gemm_wide import _order, order_columns
from nemotriton.kernels.hopper_pack import (
    TILE,
    WEIGHT_UNIT,
    WORDS,
    fragments,
    pack_hopper,
    packed_product,
    tiles_of,
    unpack_hopper,
)
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    cdiv,
    launch,
    next_pow2,
    on_hopper,
    op,
)
from nemotriton.kernels.quantize import check_scale, quantised_sizes
from nemotriton.kernels.widen import widen_packed

X_DTYPES = (torch.bfloat16, torch.float16)


def packed_matmul_ref(
    x: torch.Tensor,
    words: torch.Tensor,
    rows: int,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `packed_matmul`."""
    stored = unpack_hopper(words, rows, x.shape[1])
    return nvfp4_matmul_ref(x, *stored, global_scale, None, bias, epilogue, residual, out_dtype)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _to_words_order(x, SLICES: tl.constexpr, BLOCK_T: tl.constexpr):
    """x [SLICES, 128, BLOCK_T] with its columns in mma.sync's `k_order`."""
    # 64 | lane, kt's upper bit, kt's lower bit, column pair, column -> 64 | 1, 3, 0, 2, 4
    x = x.reshape(SLICES, 2, 4, 2, 2, 2, 2, BLOCK_T)
    return x.trans(0, 1, 3, 5, 2, 4, 6, 7).reshape(SLICES, 128, BLOCK_T)


@triton.jit
def _fetch(pid, at, block):
    """Ask for the words and scales of blocks [R] of 16 rows of the tiles that start at [R]."""
    if pid < FIRST:
        prefetch((at + block % 8 * 256)[:, None] + tl.arange(0, 8)[None, :] * 32)
        prefetch(at + 2048 + block % 8 * 32)


@triton.jit(do_not_specialize=["T"])
def _stream_packed(
    x_ptr, words_ptr, scale_ptr, b_ptr, r_ptr, y_ptr,
    x_stride, r_stride, T, N, K,
    RELU2: tl.constexpr, EVEN_K: tl.constexpr, K_TILES: tl.constexpr, ASM: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    ROTATE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of BLOCK_T tokens; a tile's 128 columns for each of SLICES warps a step."""
    NB: tl.constexpr = BLOCK_N // 16
    STEPS: tl.constexpr = (K_TILES + SLICES - 1) // SLICES
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_n = pid % tiles_n
    t = pid // tiles_n * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.arange(0, SLICES * NB)  # slice, block of 16 rows
    ahead = row // NB
    block = tile_n * NB + row % NB
    at = words_ptr + block // 8 * (K_TILES * WORDS) + ahead * WORDS
    w_at = (at + block % 8 * 256)[:, None] + tl.arange(0, 256)[None, :]
    s_at = (at + 2048 + block % 8 * 32)[:, None] + tl.arange(0, 32)[None, :]
    k = tl.arange(0, SLICES)[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = (t < T)[None, None, :]
    x_at = x_ptr + t[None, None, :] * x_stride + k[:, :, None]
    first = 0
    if ROTATE:
        first = (tile_n % STEPS).to(tl.int32)
    if PDL:
        if EVEN_K:
            for turn in tl.static_range(AHEAD if AHEAD < STEPS else STEPS):
                _fetch(pid, at + (first + turn) % STEPS * (SLICES * WORDS), block)
        tl.extra.cuda.gdc_wait()
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_T), tl.float32)
    for turn in range(STEPS):
        step = first + turn
        step = tl.where(step < STEPS, step, step - STEPS) * SLICES
        if EVEN_K:
            words = tl.load(w_at + step * WORDS).to(tl.uint32, bitcast=True)
            scales = tl.load(s_at + step * WORDS).to(tl.uint32, bitcast=True)
            x = tl.load(x_at + step * 128, mask=live, other=0.0)
        else:
            there = (ahead + step < K_TILES)[:, None]
            words = tl.load(w_at + step * WORDS, mask=there, other=0).to(tl.uint32, bitcast=True)
            scales = tl.load(s_at + step * WORDS, mask=there, other=0).to(tl.uint32, bitcast=True)
            left = k + step * 128 < K
            x = tl.load(x_at + step * 128, mask=live & left[:, :, None], other=0.0)
        w = fragments(words, scales, SLICES * NB, 2, ASM, True).to(x.dtype)
        w = w.reshape(SLICES, BLOCK_N, 128)
        x = _to_words_order(x, SLICES, BLOCK_T)
        acc = tl.dot(w, x, acc, input_precision="ieee")

    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.sum(acc, 0) * (tl.load(scale_ptr) * WEIGHT_UNIT)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    finish(y, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


@triton.jit(do_not_specialize=["T"])
def _packed(
    x_ptr, words_ptr, scale_ptr, b_ptr, r_ptr, y_ptr, r_stride, T, N,
    RELU2: tl.constexpr, K_TILES: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of outputs over one of SPLITS parts of K; x [T, 128 K_TILES] in `k_order`."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_t = tl.cdiv(T, BLOCK_T)
    split = pid // (tiles_n * tiles_t)
    pid = pid % (tiles_n * tiles_t)
    first = pid // (GROUP * tiles_n) * GROUP  # GROUP rows of tiles at a time, column by column
    rows = tl.minimum(tiles_t - first, GROUP)
    t = (first + pid % rows) * BLOCK_T + tl.arange(0, BLOCK_T)
    tile_n = pid % (GROUP * tiles_n) // rows
    x_rows = x_ptr + tl.minimum(t, T - 1) * (128 * K_TILES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = packed_product(
        x_rows, t < T, words_ptr, tile_n, split * STEPS, 128 * K_TILES,
        STEPS, K_TILES, False, True, BLOCK_T, BLOCK_N, BLOCK_K, STAGES, ASM, False,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    acc *= tl.load(scale_ptr) * WEIGHT_UNIT
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    y_ptr += split * T * N  # one plane of partial sums a split
    finish(acc, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


# --------------------------------------------------------------------------------------------- op
@op(ref=packed_matmul_ref)
def packed_matmul(
    x: torch.Tensor,
    words: torch.Tensor,
    rows: int,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """epilogue(global_scale * (x w^T) + bias) for x [T, K], packed NVFP4 w [rows, K]: [T, rows].

    UnsupportedError for x in fp32: `gemm_quant.nvfp4_matmul` takes that, on unpacked weights."""
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    T, K = x.shape
    shape = (tiles_of(rows), tiles_of(K), WORDS.value)
    require(
        words.shape == shape and words.dtype == torch.int32 and words.is_contiguous(),
        f"words of shape {tuple(words.shape)} are not a packed matrix [{rows}, {K}]",
    )
    require(x.dtype in X_DTYPES, f"x must be bf16 or fp16, got {x.dtype}")
    check_rows(x, rows, bias, epilogue, residual)
    check_scale(global_scale, "the weight's scale")
    y = torch.empty((T, rows), dtype=out_dtype or x.dtype, device=x.device)
    tile = PACKED_MATMUL.tile(T, x, N=rows, K=K)
    if "TMA" in tile:
        wide = widen_packed.triton(words, rows, K, x.dtype) if describable(x) else None
        if wide is not None and describable(wide):
            squared = epilogue == "relu2"
            multiply_many(x, wide, (global_scale, None), bias, squared, residual, y, tile)
            return y
        tile = _many_tile(Case(N=rows, K=K), _MANY[2], T)
    if "GROUPS" in tile and not is_direct(tile, x, K):
        tile = _stream_tile(_STREAM[0] if T <= 8 else _STREAM[6])
    run = direct_packed if "GROUPS" in tile else _run_stream if "STREAM" in tile else _run_tiles
    run(x, words, global_scale, bias, epilogue == "relu2", residual, y, tile)
    return y


def _run_stream(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    (T, K), N = x.shape, y.shape[1]
    slices, k_tiles = int(tile["num_warps"]), words.shape[1]
    even = K % (slices * TILE) == 0
    grid = (cdiv(N, int(tile["BLOCK_N"])) * cdiv(T, int(tile["BLOCK_T"])),)
    r_stride = 0 if residual is None else residual.stride(0)
    args = (x, words, scale, bias, residual, y, x.stride(0), r_stride, T, N, K)
    constants = {"EVEN_K": even, "K_TILES": k_tiles, "SLICES": slices}
    blocks = tile.without("STREAM", "ASM")
    asm = decodes_by_assembly(x, bool(tile["ASM"]))
    constants |= {"RELU2": squared, "ASM": asm, **as_dependent(x)}
    launch(_stream_packed, grid, *args, **constants, **blocks)


def _run_tiles(
    x: torch.Tensor,
    words: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    T, N = y.shape
    k_tiles = words.shape[1]
    width = k_tiles * TILE
    ordered, late = order_columns(x, width), as_dependent(x)
    steps = width // int(tile["BLOCK_K"])
    splits = next(s for s in range(int(tile["SPLITS"]), 0, -1) if k_tiles % s == 0)
    asm = decodes_by_assembly(x, bool(tile["ASM"]))
    blocks = tile.but(SPLITS=splits, STAGES=tile["num_stages"], ASM=asm)
    constants = {"K_TILES": k_tiles, "STEPS": steps // splits}
    r_stride = 0 if residual is None else residual.stride(0)
    grid = (cdiv(T, int(tile["BLOCK_T"])) * cdiv(N, int(tile["BLOCK_N"])) * splits,)
    if splits == 1:
        args = (ordered, words, scale, bias, residual, y, r_stride, T, N)
        launch(_packed, grid, *args, RELU2=squared, **constants, **blocks, **late)
        return
    parts = torch.empty((splits, T, N), dtype=torch.float32, device=x.device)
    args = (ordered, words, scale, None, None, parts, r_stride, T, N)
    launch(_packed, grid, *args, RELU2=False, **constants, **blocks, **late)
    sum_splits(parts, bias, squared, residual, y)


# ------------------------------------------------------------------------------------------- spec
def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    stored = random_nvfp4((case.N, case.K), dev, rng)
    return {
        "x": torch.randn(T, case.K, generator=rng, device=dev).to(dtype),
        "words": pack_hopper(*stored),
        "rows": case.N,
        "global_scale": torch.full((), 0.3 * case.K**-0.5, device=dev),
    }


_STREAM = (  # (BLOCK_T, BLOCK_N, num_warps, num_stages)
    (8, 32, 4, 3),
    (8, 64, 4, 3),
    (8, 32, 2, 3),
    (8, 32, 2, 4),
    (8, 64, 2, 3),
    (8, 16, 8, 3),
    (16, 64, 4, 3),
    (16, 64, 2, 3),
    (16, 64, 2, 4),
    (16, 128, 2, 3),
    (16, 32, 8, 3),
)
_MANY = (  # (BLOCK_T, BLOCK_N, BLOCK_K, num_warps, num_stages)
    (32, 128, 128, 4, 3),
    (64, 128, 128, 4, 3),
    (64, 128, 128, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 64, 64, 4, 4),
)
DIRECT = (
    direct_tile(8, 32, 2, 4).but(EARLY=True),
    direct_tile(16, 32, 2, 2),
    direct_tile(8, 32, 2, 4),
    direct_tile(8, 32, 2, 4, asm=False),
    direct_tile(8, 16, 4, 2, registers=112).but(EARLY=True),
    direct_tile(16, 32, 2, 4),
)
STREAM_TOKENS = 16
WIDEN_BEYOND = 1024  # tokens: 4.6 bytes a weight moved, for 1.3 to 1.5 times the rate of `_packed`


def _stream_tile(shape: tuple[int, int, int, int], asm: bool = True) -> Tile:
    t, n, warps, stages = shape
    tile = Tile(STREAM=True, BLOCK_T=t, BLOCK_N=n, num_warps=warps, num_stages=stages)
    tile = tile.but(ASM=asm, ROTATE=False, AHEAD=0, EARLY=False)
    # left to itself, ptxas spills some registers to fit one more block than shared memory does
    return tile.but(maxnreg=168) if (t, warps) == (16, 4) else tile


def _many_tile(case: Case, shape: tuple[int, int, int, int, int], tokens: int) -> Tile:
    """K in as many parts as keep a large GPU's processors busy."""
    t, n, k, warps, stages = shape
    tile = Tile(BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages, ASM=True)
    splits, programs = 1, cdiv(case.N, n) * cdiv(tokens, t)
    while splits < 8 and programs * splits * 2 <= 264 and 512 * splits <= case.K:
        splits *= 2
    return tile.but(SPLITS=splits, GROUP=8)


def _default(case: Case, tokens: int) -> Tile:
    """As many programs as a large GPU holds at once, where there are so many rows."""
    if tokens <= STREAM_TOKENS:
        t = 8 if tokens <= 8 else 16
        if case.N >= 8192 and case.K % 512 == 0 and on_hopper():
            return DIRECT[4 if tokens == 1 else 0 if t == 8 else 1]
        if case.N >= 8192:
            return _stream_tile((t, 32 if tokens <= 4 else 64, 4, 3))
        return _stream_tile((t, 16 if t == 8 else 32, 8, 3))
    if tokens > WIDEN_BEYOND:
        return widened_tile()
    shape = _MANY[0] if tokens <= 32 else _MANY[1] if tokens <= 64 else _MANY[2]
    return _many_tile(case, shape, tokens)


def _tiles(case: Case) -> list[Tile]:
    plain = [_stream_tile(_STREAM[0], asm=False), _stream_tile(_STREAM[6], asm=False)]
    many = [_many_tile(case, shape, t) for shape in _MANY for t in (shape[0], 8192)]
    return [*map(_stream_tile, _STREAM), *DIRECT, *plain, *dict.fromkeys(many), *WIDENED]


def _suits(tile: Tile, tokens: int) -> bool:
    """Whether the sweep measures a tile at this many tokens."""
    if "STREAM" in tile or "GROUPS" in tile:
        return tokens <= STREAM_TOKENS and tile["BLOCK_T"] == max(8, next_pow2(tokens))
    if "TMA" in tile:
        return tokens > 512
    fits = tokens > STREAM_TOKENS and tile["BLOCK_T"] <= next_pow2(tokens)
    return fits and (tile["SPLITS"] == 1 or tokens <= 128)


def _sum_order(tile: Tile) -> tuple[int | bool | str, ...]:
    """What decides the order along K."""
    if "GROUPS" in tile:
        return "direct", tile["num_warps"], tile["GROUPS"]
    if "STREAM" in tile:  # a rotated start depends on which outputs a program has
        return True, tile["num_warps"], tile["BLOCK_N"] if tile.get("ROTATE", False) else 0
    if "TMA" in tile:  # columns in their own order, not in that of the words
        return "widened", tile["BLOCK_K"]
    return False, tile["BLOCK_K"], tile["SPLITS"]


def _fixed(case: Case, tokens: int, phase: str) -> Tile:
    """Generated tokens by the streaming form whatever their number, prompts by wgmma."""
    if phase == DECODE:
        t = 8 if tokens <= 8 else 16
        wide = case.N >= 8192
        tile = _stream_tile((t, 64 if wide else 2 * t, 4 if wide else 8, 3))
        return tile.but(ROTATE=False) if "ROTATE" in tile else tile
    shape = _MANY[0] if tokens <= 32 else _MANY[1] if tokens <= 64 else _MANY[2]
    return _many_tile(case, shape, tokens).but(SPLITS=1)


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    moved = 0.5625 * case.N * case.K + T * (case.K + case.N) * dtype.itemsize
    return Cost(2 * T * case.N * case.K, int(moved))


PACKED_MATMUL = KernelSpec(
    terms=lambda case: case.K,
    op=packed_matmul,
    kernels=(
        _stream_packed,
        _direct_packed,
        _order,
        _packed,
        _sum_splits,
        packed_product,
        _square,
        _roles,
    ),
    cases=lambda config: [Case(N=n, K=k) for n, k in quantised_sizes(config)],
    small=[Case(N=80, K=336), Case(N=37, K=80), Case(N=160, K=1040), Case(N=40, K=1024)],
    tokens=(4, 8, 16, 32, 64, 128, 256, 1024, 2048, 8192),
    make=_make,
    tiles=_tiles,
    suits=_suits,
    default=_default,
    fixed=FixedOrder(_sum_order, _fixed, twin=ByRow(packed_matmul_ref, LINEAR_ROWS)),
    cost=_cost,
    dtypes=("bf16", "fp16"),
    small_tokens=(0, 1, 17),
    per_token=("x",),
    strided=("x",),
    arches=(90,),
)
