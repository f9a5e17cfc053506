"""Linear layers with FP8 or NVFP4 weights: y = epilogue(scale * (x V^T) + bias).

    V      the weight's stored values without its fp32 scale: e4m3, or e2m1 * block scale. Both are
           exact in 16 bits, so tensor cores multiply them as x's dtype and sum in fp32.
    scale  the weight's scale, applied to the fp32 sum before bias, epilogue and the one rounding,
           so that fp16 outputs do not overflow before it

From WIDEN_TOKENS tokens on V of an FP8 weight is written out in 16 bits first (`widen`), and the
product is that of `gemm_square`, on Hopper of `gemm_roles`.

Activations stay as they are (w8a16, w4a16) unless `input_scale` is given: then x is quantised with
it, to e4m3 (w8a8) or in blocks of 16 to NVFP4 (w4a4), and its scale joins the weight's. The values
that x's codes stand for are exact in x's dtype; they take x's place.

On Hopper a few tokens take the direct form (`gemm_direct`), some more the wide one (`gemm_wide`),
and w8a8 that of codes (`gemm_codes`) for both; elsewhere, and for what those cannot read, there are
the streaming and the plain form.

x [T, K] with a free row stride; FP8 weight e4m3 [N, K]; NVFP4 codes uint8 [N, K/2] and scales e4m3
[N, K/16]; bias, epilogue, residual and out_dtype as in `gemm.matmul`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels import fixed_order
from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fp4 import (
    GROUP,
    fp8_codes_ref,
    load_nvfp4,
    nvfp4_round_ref,
    nvfp4_values_ref,
    random_fp8,
    random_nvfp4,
)
from nemotriton.kernels.gemm import _sum_splits, check_rows, sum_splits
from nemotriton.kernels.gemm_codes import _codes, codes
from nemotriton.kernels.gemm_direct import _direct, direct, is_direct
from nemotriton.kernels.gemm_fixed import fixed_fp8, fixed_nvfp4, product_order
from nemotriton.kernels.gemm_quant_tiles import (
    WIDEN_TOKENS,
    WIDENED,
    fp8_default,
    fp8_tiles,
    generic_tile,
    quant_suits,
    quant_tiles,
)
from nemotriton.kernels.gemm_roles import _roles, multiply_many
from nemotriton.kernels.gemm_square import _square, describable
from nemotriton.kernels.gemm_stream import (
    STREAM_TOKENS,
    _stream,
    e4m3_to,
    finish,
    stream,
    stream_tile,
)
from nemotriton.kernels.gemm_wide import _order, _wide, is_wide, wide
from nemotriton.kernels.numerics import relu2_ref
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    acc_dtype,
    cdiv,
    launch,
    op,
)
from nemotriton.kernels.quantize import check_scale, quantised_sizes, quantize_fp8, round_rows
from nemotriton.kernels.widen import widen_fp8

X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# ------------------------------------------------------------------------------------------- twins
def fp8_matmul_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `fp8_matmul`."""
    values = weight.to(acc_dtype(x))
    scales = (weight_scale, input_scale)
    quantise = _as_codes if x.dtype == torch.float8_e4m3fn else fp8_codes_ref
    return _linear_ref(x, values, scales, quantise, bias, epilogue, residual, out_dtype)


def _as_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x


def nvfp4_matmul_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `nvfp4_matmul`."""
    values = nvfp4_values_ref(codes, scales, acc_dtype(x))
    both = (global_scale, input_scale)
    return _linear_ref(x, values, both, nvfp4_round_ref, bias, epilogue, residual, out_dtype)


def _linear_ref(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor | None],
    quantise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None,
    epilogue: str,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    f = acc_dtype(x)
    scale, rows = scales[0].to(f).reshape(()), x
    if scales[1] is not None:
        rows = quantise(x, scales[1].reshape(()))
        scale = scale * scales[1].to(f).reshape(())
    y = (rows.to(f) @ values.T) * scale
    if bias is not None:
        y = y + bias.to(f)
    if epilogue == "relu2":
        y = relu2_ref(y)
    if residual is not None:
        y = y + residual.to(f)
    return y if f == torch.float64 else y.to(out_dtype or x.dtype)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["T"])
def _matmul_quant(
    x_ptr, w_ptr, s_ptr, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, y_ptr,
    x_stride, w_stride, s_stride, r_stride, T, N, K, steps,
    RELU2: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
    SPLITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of outputs over one of SPLITS parts of K, `steps` blocks long; s_ptr: NVFP4.

    x is the left operand, so that on Hopper decoded weights pass through shared memory: wgmma
    never reads them from registers that the next step overwrites (triton issue 9433)."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_t = tl.cdiv(T, BLOCK_T)
    split = pid // (tiles_n * tiles_t)
    pid = pid % (tiles_n * tiles_t)
    first = pid // (GROUP * tiles_n) * GROUP  # GROUP rows of tiles at a time, column by column
    rows = tl.minimum(tiles_t - first, GROUP)
    t = (first + pid % rows) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = pid % (GROUP * tiles_n) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end repeat the last one; their sums are not stored
    x_rows = x_ptr + tl.minimum(t, T - 1)[:, None] * x_stride
    w_rows = tl.minimum(n, N - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for step in range(steps):
        k0 = (split * steps + step) * BLOCK_K
        k = k0 + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(x_rows + k[None, :])
        else:
            x = tl.load(x_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        if s_ptr is not None:
            w = load_nvfp4(w_ptr, s_ptr, w_rows, k0, K, w_stride, s_stride, EVEN_K, BLOCK_K)
        else:
            w_at = w_ptr + w_rows[:, None] * w_stride + k[None, :]
            if EVEN_K:
                byte = tl.load(w_at)
            else:
                byte = tl.load(w_at, mask=(k < K)[None, :], other=0)
            w = e4m3_to(byte, x.dtype, ASM)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision="ieee")

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(weight_scale_ptr)
    if input_scale_ptr is not None:
        scale *= tl.load(input_scale_ptr)
    y_ptr += split * T * N  # one plane of partial sums a split
    finish(acc * scale, b_ptr, r_ptr, y_ptr, t[:, None], n[None, :], T, N, r_stride, RELU2)


# -------------------------------------------------------------------------------------------- ops
@op(ref=fp8_matmul_ref)
def fp8_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """epilogue(weight_scale * (x weight^T) + bias) for x [T, K], weight e4m3 [N, K]: [T, N].

    With `input_scale` x is quantised to e4m3 first (w8a8), saturating; else it stays (w8a16). Such
    codes may be given as x, with an `out_dtype`: the bits are those of x quantised here."""
    coded = x.dtype == torch.float8_e4m3fn
    require(
        not coded or (input_scale is not None and out_dtype is not None),
        "x as e4m3 codes needs the input_scale that they were made with, and an out_dtype",
    )
    require(
        weight.ndim == 2 and weight.dtype == torch.float8_e4m3fn and weight.stride(1) == 1,
        f"weight must be float8_e4m3fn [N, K] with unit stride along K, got {weight.dtype}",
    )
    N, K = weight.shape
    args = (weight.view(torch.uint8), None, weight_scale, input_scale)
    return _run(FP8_MATMUL, x, N, K, args, bias, epilogue, residual, out_dtype)


@op(ref=nvfp4_matmul_ref)
def nvfp4_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """epilogue(global_scale * (x w^T) + bias) for x [T, K], NVFP4 w [N, K]: [T, N].

    With `input_scale` x is quantised in blocks of 16 first (w4a4); else it stays (w4a16)."""
    require(
        codes.ndim == 2 and codes.dtype == torch.uint8 and codes.stride(1) == 1,
        f"codes must be uint8 [N, K/2] with unit stride along K, got {codes.dtype}",
    )
    N, K = codes.shape[0], codes.shape[1] * 2
    require(
        scales.shape == (N, K // GROUP) and K % GROUP == 0 and scales.stride(1) == 1,
        f"scales of shape {tuple(scales.shape)} do not match codes of [{N}, {K}/2]",
    )
    require(scales.dtype == torch.float8_e4m3fn, f"scales must be e4m3, got {scales.dtype}")
    args = (codes, scales.view(torch.uint8), global_scale, input_scale)
    return _run(NVFP4_MATMUL, x, N, K, args, bias, epilogue, residual, out_dtype)


Weight = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]


def _run(
    spec: KernelSpec,
    x: torch.Tensor,
    N: int,
    K: int,
    weight: Weight,
    bias: torch.Tensor | None,
    epilogue: str,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Launch; weight: bytes, block scale bytes or None, scale, input scale or None."""
    require(
        x.ndim == 2 and x.shape[1] == K > 0,
        f"x of shape {tuple(x.shape)} does not match a weight of [{N}, {K}]",
    )
    values, scales, scale, input_scale = weight
    coded = x.dtype == torch.float8_e4m3fn and scales is None
    require(coded or x.dtype in X_DTYPES, f"x must be bf16, fp16 or fp32, got {x.dtype}")
    check_rows(x, N, bias, epilogue, residual)
    check_scale(scale, "the weight's scale")
    T = x.shape[0]
    y = torch.empty((T, N), dtype=out_dtype or x.dtype, device=x.device)
    tile = spec.tile(T, y if coded else x, N=N, K=K, Q=int(input_scale is not None))
    squared = epilogue == "relu2"
    ends = (bias, squared, residual, y, tile)
    if input_scale is not None:
        check_scale(input_scale, "input_scale")
        # of e4m3 products Hopper keeps 14 bits of a sum: enough for 16-bit results only
        form = _form_of_codes(tile, x, values)
        if form is not None:
            rows = x if coded else quantize_fp8.triton(x, input_scale)
            form(rows, values.view(rows.dtype), (scale, input_scale), *ends)
            return y
        if coded:
            x = widen_fp8.triton(x, torch.bfloat16 if y.dtype == torch.float32 else y.dtype)
        else:
            x = round_rows(x, input_scale, scales is not None)
    elif "TMA" in tile and T >= WIDEN_TOKENS and x.dtype != torch.float32 and describable(x):
        widened = widen_fp8.triton(values.view(torch.float8_e4m3fn), x.dtype)
        if describable(widened):
            multiply_many(x, widened, (scale, None), *ends)
            return y
    if "GROUPS" in tile and not is_direct(tile, x, K, values):
        tile = stream_tile(N, min(T, STREAM_TOKENS), 1)
    form = _form_of_few(tile, x, values)
    if form is not None:
        form(x, values, (scale, input_scale), *ends[:-1], tile)
        return y
    if not {"TMA", "STREAM", "WIDE", "CODES"}.isdisjoint(tile):
        # one tile for all tokens of a phase; that of many tokens sums as a widened weight's does
        few = 16 if fixed_order.phase() else T
        tile = generic_tile(Case(N=N, K=K), max(T, WIDEN_TOKENS) if tile in WIDENED else few)
    if x.dtype == torch.float32:  # exact fp32 products have no tensor core: larger tiles spill
        tile = tile.but(BLOCK_T=16, BLOCK_N=64, BLOCK_K=32, num_warps=4)
    _run_generic(x, N, weight, bias, squared, residual, y, tile)
    return y


def _form_of_codes(tile: Tile, x: torch.Tensor, values: torch.Tensor) -> Callable[..., None] | None:
    """What multiplies e4m3 codes of x; None where the tile does not ask for it, or it cannot be."""
    coded = x.dtype == torch.float8_e4m3fn
    if x.dtype == torch.float32 or 0 in x.shape or x.shape[1] % 16 or not describable(values):
        return None
    if coded and not describable(x):
        return None
    return multiply_many if "TMA" in tile else codes if "CODES" in tile else None


def _form_of_few(tile: Tile, x: torch.Tensor, values: torch.Tensor) -> Callable[..., None] | None:
    """What launches one of the forms for a few tokens; None where it is not one, or cannot be."""
    if x.dtype == torch.float32:
        return None
    if "GROUPS" in tile:
        return direct
    if "STREAM" in tile:
        return stream
    return wide if is_wide(tile, x, values) else None


def _run_generic(
    x: torch.Tensor,
    N: int,
    weight: Weight,
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    (T, K), (values, scales, *_), block_k = x.shape, weight, int(tile["BLOCK_K"])
    splits = min(int(tile["SPLITS"]), cdiv(K, block_k))
    steps = cdiv(K, block_k * splits)
    more = {"EVEN_K": block_k * splits * steps == K, "ASM": decodes_by_assembly(x)}
    tile = tile.but(SPLITS=splits, **more, **as_dependent(x))
    grid = (cdiv(T, int(tile["BLOCK_T"])) * cdiv(N, int(tile["BLOCK_N"])) * splits,)
    s_stride = 0 if scales is None else scales.stride(0)
    r_stride = 0 if residual is None else residual.stride(0)
    shape = (x.stride(0), values.stride(0), s_stride, r_stride, T, N, K, steps)
    if splits == 1:
        args = (x, *weight, bias, residual, y, *shape)
        launch(_matmul_quant, grid, *args, RELU2=squared, **tile)
        return
    parts = torch.empty((splits, T, N), dtype=torch.float32, device=x.device)
    args = (x, *weight, None, None, parts, *shape)
    launch(_matmul_quant, grid, *args, RELU2=False, **tile)
    sum_splits(parts, bias, squared, residual, y)


# ------------------------------------------------------------------------------------------- specs
def _make_fp8(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    return {
        "x": torch.randn(T, case.K, generator=rng, device=dev).to(dtype),
        "weight": random_fp8((case.N, case.K), dev, rng),
        "weight_scale": torch.full((), 2 * case.K**-0.5, device=dev),
        "input_scale": torch.full((), 4 / 448, device=dev) if case.get("Q") else None,
    }


def _make_nvfp4(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    codes, scales = random_nvfp4((case.N, case.K), dev, rng)
    return {
        "x": torch.randn(T, case.K, generator=rng, device=dev).to(dtype),
        "codes": codes,
        "scales": scales,
        "global_scale": torch.full((), 0.3 * case.K**-0.5, device=dev),
        "input_scale": torch.full((), 4 / 2688, device=dev) if case.get("Q") else None,
    }


KERNELS = (_matmul_quant, _sum_splits, _stream, _direct, _order, _wide, _square, _roles, _codes)


def _spec(
    wrapper: Any,
    make: Callable[..., Args],
    strided: tuple[str, ...],
    stored: float,
    default: Callable[[Case, int], Tile],
    tiles: Callable[[Case], list[Tile]],
) -> Any:
    inputs = (0, 1) if wrapper is fp8_matmul else (0,)
    fixed = fixed_fp8 if wrapper is fp8_matmul else fixed_nvfp4
    twin = fixed_order.ByRow(wrapper.ref, fixed_order.LINEAR_ROWS)

    def cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
        moved = stored * case.N * case.K + T * (case.K + case.N) * dtype.itemsize
        return Cost(2 * T * case.N * case.K, int(moved))

    return KernelSpec(
        terms=lambda case: case.K,
        op=wrapper,
        kernels=KERNELS,
        cases=lambda config: [
            Case(N=n, K=k, Q=q) for n, k in quantised_sizes(config) for q in inputs
        ],
        small=[
            Case(N=80, K=336, Q=0),
            Case(N=37, K=80, Q=1),
            Case(N=33, K=1040, Q=0),
            Case(N=24, K=1024, Q=0),
        ],
        tokens=(1, 4, 8, 16, 32, 64, 128, 256, 1024, 2048, 8192),
        make=make,
        tiles=tiles,
        suits=quant_suits,
        default=default,
        fixed=fixed_order.FixedOrder(product_order, fixed, twin=twin),
        cost=cost,
        small_tokens=(0, 1, 17),
        per_token=("x",),
        strided=strided,
    )


FP8_MATMUL = _spec(fp8_matmul, _make_fp8, ("x", "weight"), 1.0, fp8_default, fp8_tiles)
_64 = functools.partial(generic_tile, widest=64)  # decoding FP4 for more columns spills
NVFP4_MATMUL = _spec(nvfp4_matmul, _make_nvfp4, ("x", "codes", "scales"), 0.5625, _64, quant_tiles)
