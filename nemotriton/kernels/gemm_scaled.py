"""Linear layers in NVFP4 throughout (w4a4) on Blackwell's block-scaled tensor cores.

    y = epilogue(global * input_scale * (x' V^T) + bias)

x' are the numbers e2m1 * block scale that x's NVFP4 codes under input_scale stand for, V those of
the weight; `tl.dot_scaled` multiplies codes and scales natively (`tcgen05.mma`, `kind::mxf4nvf4`)
and sums in fp32. Numbers and rounding are those of `gemm_quant.nvfp4_matmul` with an input scale.

The weight is the left operand, of which the instruction takes 128 rows: so few tokens fill the
other side as far as they go, 16 at least. Both sides are e2m1 with e4m3 scales: Triton turns other
formats with such scales into another instruction, without a word (fp8 x e2m1), or does not compile.

x [T, K] with a free row stride, bf16 or fp16; codes uint8 [N, K/2]; the weight's scales in tiles
(`scale_tiles`), e4m3 [tiles * 512].
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.fp4 import GROUP, random_nvfp4
from nemotriton.kernels.gemm import _sum_splits, check_rows
from nemotriton.kernels.gemm_quant import NVFP4_MATMUL, nvfp4_matmul_ref, quantised_sizes
from nemotriton.kernels.gemm_stream import finish
from nemotriton.kernels.op import Args, Case, KernelSpec, Tile, cdiv, launch, next_pow2, op
from nemotriton.kernels.quantize import check_scale
from nemotriton.kernels.scale_tiles import (
    _quantize_for_tiles,
    load_scale_tiles,
    quantize_for_tiles,
    swizzle_scales,
    tile_bytes,
    tiles_of,
    unswizzle_scales,
)

X_DTYPES = (torch.bfloat16, torch.float16)
ROWS = 128  # of the weight, that one instruction multiplies
NATIVE = "kind::mxf4nvf4.block_scale"


def scaled_matmul_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    tiles: torch.Tensor,
    global_scale: torch.Tensor,
    input_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `scaled_matmul`."""
    scales = unswizzle_scales(tiles, codes.shape[0], x.shape[1] // GROUP)
    stored = (codes, scales, global_scale, input_scale)
    return nvfp4_matmul_ref(x, *stored, bias, epilogue, residual, out_dtype)


# ----------------------------------------------------------------------------------------- kernel
@triton.jit
def load_codes(ptr, rows, step, K, stride, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bytes [rows, BLOCK_K / 2] of a matrix of codes; zeros past K."""
    pair = step * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    at = ptr + rows[:, None] * stride + pair[None, :]
    if EVEN_K:
        return tl.load(at)
    else:
        return tl.load(at, mask=(pair * 2 < K)[None, :], other=0)


@triton.jit
def load_scale_rows(ptr, rows, step, K, stride, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scales [rows, BLOCK_K / 16] that lie in rows; zeros past K."""
    block = step * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)
    at = ptr + rows[:, None] * stride + block[None, :]
    if EVEN_K:
        return tl.load(at)
    else:
        return tl.load(at, mask=(block * 16 < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["T"])
def _scaled(
    x_ptr, xs_ptr, w_ptr, ws_ptr, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, y_ptr,
    code_stride, scale_stride, r_stride, T, N, K, COLUMNS, steps,
    RELU2: tl.constexpr, EVEN_K: tl.constexpr, TILED: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] sums over one of SPLITS parts of K, `steps` blocks long.

    TILED: the scales of x lie in tiles too."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_t = tl.cdiv(T, BLOCK_T)
    split = pid // (tiles_n * tiles_t)
    pid = pid % (tiles_n * tiles_t)
    first = pid // (GROUP * tiles_n) * GROUP  # GROUP rows of tiles at a time, column by column
    height = tl.minimum(tiles_t - first, GROUP)
    tile_t = first + pid % height
    tile_n = pid % (GROUP * tiles_n) // height
    t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one; their sums are not stored
    t_in, n_in = tl.minimum(t, T - 1), tl.minimum(n, N - 1)

    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for i in range(steps):
        step = split * steps + i
        w = load_codes(w_ptr, n_in, step, K, code_stride, EVEN_K, BLOCK_K)
        ws = load_scale_tiles(ws_ptr, tile_n, step, COLUMNS, BLOCK_N, BLOCK_K)
        x = load_codes(x_ptr, t_in, step, K, code_stride, EVEN_K, BLOCK_K)
        if TILED:
            xs = load_scale_tiles(xs_ptr, tile_t, step, COLUMNS, BLOCK_T, BLOCK_K)
        else:
            xs = load_scale_rows(xs_ptr, t_in, step, K, scale_stride, EVEN_K, BLOCK_K)
        acc = tl.dot_scaled(w, ws, "e2m1", tl.trans(x), xs, "e2m1", acc)

    acc *= tl.load(weight_scale_ptr) * tl.load(input_scale_ptr)
    y_ptr += split * T * N  # one plane of partial sums a split
    finish(acc, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


def fitting(tile: Tile, depth: int) -> Tile:
    """The tile with the widest steps that leave no rest of depth, and as many more stages.

    Loads with masks along K do not run ahead. Where 64 columns leave a rest too it stays."""
    most = int(tile["BLOCK_K"])
    k = next((k for k in (256, 128, 64) if k <= most and depth % k == 0), most)
    return tile.but(BLOCK_K=k, num_stages=min(8, int(tile["num_stages"]) * most // k))


@op(ref=scaled_matmul_ref)
def scaled_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    tiles: torch.Tensor,
    global_scale: torch.Tensor,
    input_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """epilogue(global_scale * input_scale * (x' w^T) + bias) for x [T, K], NVFP4 w [N, K]: [T, N].

    x is quantised first, in blocks of 16 under `input_scale`; `tiles` are w's scales in tiles."""
    N, K = codes.shape[0], codes.shape[1] * 2
    require(
        codes.ndim == 2 and codes.dtype == torch.uint8 and codes.is_contiguous() and K % GROUP == 0,
        f"codes must be contiguous uint8 [N, K/2], got {codes.dtype} {tuple(codes.shape)}",
    )
    require(
        tiles.dtype == torch.float8_e4m3fn and tiles.shape == (tile_bytes(N, K),),
        f"scales of shape {tuple(tiles.shape)} are not the tiles of a matrix [{N}, {K}]",
    )
    require(
        x.ndim == 2 and x.shape[1] == K and x.dtype in X_DTYPES,
        f"x must be bf16 or fp16 [T, {K}], got {x.dtype} {tuple(x.shape)}",
    )
    check_rows(x, N, bias, epilogue, residual)
    for scale in (global_scale, input_scale):
        check_scale(scale, "the scales of weight and input")
    T = x.shape[0]
    tile = fitting(SCALED_MATMUL.tile(T, x, N=N, K=K), K)
    block_t, block_k = int(tile["BLOCK_T"]), int(tile["BLOCK_K"])
    tiled = block_t >= ROWS
    x_codes, x_scales = quantize_for_tiles(x, input_scale, tiled)
    splits = min(int(tile["SPLITS"]), cdiv(K, block_k))
    steps = cdiv(K, block_k * splits)
    squared = epilogue == "relu2"
    y = torch.empty((T, N), dtype=out_dtype or x.dtype, device=x.device)
    even = block_k * splits * steps == K
    constants = tile.but(SPLITS=splits, EVEN_K=even, TILED=tiled)
    grid = (cdiv(T, block_t) * cdiv(N, int(tile["BLOCK_N"])) * splits,)
    operands = (x_codes, x_scales, codes, tiles, global_scale, input_scale)
    r_stride = 0 if residual is None else residual.stride(0)
    shape = (K // 2, K // GROUP, r_stride, T, N, K, tiles_of(N, K)[1], steps)
    if splits == 1:
        args = (*operands, bias, residual, y, *shape)
        launch(_scaled, grid, *args, RELU2=squared, **constants)
        return y
    parts = torch.empty((splits, T, N), dtype=torch.float32, device=x.device)
    launch(_scaled, grid, *operands, None, None, parts, *shape, RELU2=False, **constants)
    block = min(512, next_pow2(N))
    rest = {"RELU2": squared, "SPLITS": splits, "BLOCK_N": block, "num_warps": 4, "PDL": False}
    sums = (parts, bias, residual, y, r_stride, T, N)
    launch(_sum_splits, (T * cdiv(N, block),), *sums, **rest)
    return y


# ------------------------------------------------------------------------------------------- spec
def _shape(case: Case, t: int, k: int, warps: int, stages: int, programs: int = 148) -> Tile:
    """A tile, K split until there are about as many programs, each with 1,024 columns or more."""
    splits = 1
    while splits < 8 and cdiv(case.N, ROWS) * splits * 2 < 1.5 * programs:
        if 2048 * splits > case.K:
            break
        splits *= 2
    tile = Tile(BLOCK_T=t, BLOCK_N=ROWS, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return tile.but(SPLITS=splits if t < ROWS else 1, GROUP=8)


_FEW = tuple((t, k, 4, s) for t in (16, 32, 64) for k, s in ((128, 6), (256, 4), (256, 3)))
_MANY = ((128, 256, 4, 3), (128, 256, 8, 4), (256, 256, 8, 3), (256, 128, 8, 4))


def _tiles(case: Case) -> list[Tile]:
    return [_shape(case, *shape) for shape in (*_FEW, *_MANY)]


def _suits(tile: Tile, tokens: int) -> bool:
    """Whether the sweep measures a tile at this many tokens."""
    if tile["BLOCK_T"] < ROWS:
        return tile["BLOCK_T"] == max(16, min(64, next_pow2(tokens)))
    return tokens > 64


def _default(case: Case, tokens: int) -> Tile:
    """As it compiles for sm_100: nobody has measured it."""
    if tokens <= 64:
        return _shape(case, max(16, next_pow2(tokens)), 256, 4, 4)
    return _shape(case, *(_MANY[0] if tokens <= 1024 else _MANY[2]))


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    codes, scales = random_nvfp4((case.N, case.K), dev, rng)
    return {
        "x": torch.randn(T, case.K, generator=rng, device=dev).to(dtype),
        "codes": codes,
        "tiles": swizzle_scales(scales),
        "global_scale": torch.full((), 0.3 * case.K**-0.5, device=dev),
        "input_scale": torch.full((), 4 / 2688, device=dev),
    }


def _cases(config: Any) -> list[Case]:
    return [Case(N=n, K=k) for n, k in quantised_sizes(config)]


SCALED_MATMUL = KernelSpec(
    terms=lambda case: case.K,
    op=scaled_matmul,
    kernels=(_scaled, _quantize_for_tiles, _sum_splits),
    cases=_cases,
    small=[Case(N=37, K=80), Case(N=136, K=320)],
    tokens=NVFP4_MATMUL.tokens,
    make=_make,
    tiles=_tiles,
    suits=_suits,
    default=_default,
    cost=NVFP4_MATMUL.cost,
    dtypes=("bf16", "fp16"),
    small_tokens=(0, 17),
    per_token=("x",),
    strided=("x",),
    arches=(100, 103),
    native={"_scaled": NATIVE},
)
