"""Activations to NVFP4 or FP8, alone or behind relu^2.

    quantize_nvfp4   codes, block scales of x with a given global scale     (see fp4 for the order)
    quantize_fp8     e4m3(x / scale)
    relu2_*          h = max(x, 0)^2 rounded to x's dtype, then quantised: the bytes of relu2 in
                     x's dtype followed by quantize_*

x [T, D] with a free row stride, in bf16, fp16 or fp32; scales fp32, one number. Everything in fp32.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.fp4 import (
    GROUP,
    fp8_codes_ref,
    fp8_round,
    nvfp4_codes_ref,
    nvfp4_round,
    store_codes,
)
from nemotriton.kernels.moe_route import Routing
from nemotriton.kernels.numerics import relu2, relu2_ref
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    Exact,
    KernelSpec,
    Tile,
    acc_dtype,
    cdiv,
    launch,
    next_pow2,
    op,
)


# ------------------------------------------------------------------------------------------- twins
def quantize_nvfp4_ref(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `quantize_nvfp4`."""
    return nvfp4_codes_ref(x, global_scale.reshape(()))


def quantize_fp8_ref(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Twin of `quantize_fp8`."""
    return fp8_codes_ref(x, scale.reshape(()))


def relu2_nvfp4_ref(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `relu2_nvfp4`."""
    return quantize_nvfp4_ref(relu2_ref(x.to(acc_dtype(x))).to(x.dtype), global_scale)


def relu2_fp8_ref(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Twin of `relu2_fp8`."""
    return quantize_fp8_ref(relu2_ref(x.to(acc_dtype(x))).to(x.dtype), scale)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _quantize(
    x_ptr, scale_ptr, codes_ptr, scales_ptr, x_stride, D,
    RELU2: tl.constexpr, FP4: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_D columns of a row to bytes."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(D, BLOCK_D)
    t, first = pid // blocks, pid % blocks * BLOCK_D
    d = first + tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + t * x_stride + d, mask=d < D, other=0.0).to(tl.float32)  # [BLOCK_D]
    if RELU2:
        x = relu2(x).to(x_ptr.dtype.element_ty).to(tl.float32)
    scale = tl.load(scale_ptr)
    store_codes(x, scale, codes_ptr, scales_ptr, t * D + first, D - first, FP4, BLOCK_D)


@triton.jit
def _round_rows(
    x_ptr, scale_ptr, y_ptr, order_idx, ids_idx, x_stride, D, K,
    FP4: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """y [rows, D]: what the codes of x stand for. With an order, row i is that of pair order[i],
    quantised with the scale of the pair's expert."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(D, BLOCK_D)
    i = pid // blocks
    d = pid % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    if order_idx is not None:
        pair = tl.load(order_idx + i).to(tl.int64)
        expert = tl.load(ids_idx + pair).to(tl.int64)
        scale = tl.load(scale_ptr + tl.maximum(expert, 0))  # -1: a row that nobody reads
        x_ptr += pair // K * x_stride
    else:
        scale = tl.load(scale_ptr)
        x_ptr += i * x_stride
    x = tl.load(x_ptr + d, mask=d < D, other=0.0).to(tl.float32)  # [BLOCK_D]
    if FP4:
        y = tl.reshape(nvfp4_round(tl.reshape(x, [1, BLOCK_D]), scale), [BLOCK_D])
    else:
        y = fp8_round(x, scale)
    tl.store(y_ptr + i * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def round_rows(
    x: torch.Tensor, scale: torch.Tensor, fp4: bool, routing: Routing | None = None
) -> torch.Tensor:
    """The numbers that the codes of x [T, D] under `scale` stand for, [T, D], exact in x's dtype.

    With a routing scale is [E] and the rows are those of the sorted pairs, [T*K, D], each quantised
    with its expert's scale."""
    T, D = x.shape
    order, ids, K = None, None, 1
    rows = T
    if routing is not None:
        order, ids, K = routing.order, routing.ids, routing.ids.shape[1]
        rows = T * K
    y = torch.empty((rows, D), dtype=x.dtype, device=x.device)
    block = max(GROUP, min(1024, next_pow2(D)))
    args = (x, scale, y, order, ids, x.stride(0), D, K)
    launch(_round_rows, (rows * cdiv(D, block),), *args, FP4=fp4, BLOCK_D=block, num_warps=4)
    return y


def check_scale(scale: torch.Tensor, name: str, shape: tuple[int, ...] = ()) -> None:
    """Scales are fp32: one number ([] or [1]), or of the shape given."""
    ok = scale.numel() == 1 if shape == () else scale.shape == shape and scale.is_contiguous()
    require(
        scale.dtype == torch.float32 and ok,
        f"{name} must be float32 {list(shape)}, got {scale.dtype} {list(scale.shape)}",
    )


def check_columns(x: torch.Tensor, fp4: bool) -> None:
    """x is [T, D] with unit stride along D, and NVFP4 has whole groups."""
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    require(x.stride(1) == 1, "x must have unit stride along its width; call .contiguous()")
    require(
        not fp4 or x.shape[1] % GROUP == 0,
        f"{x.shape[1]} columns are not whole groups of {GROUP}; keep this tensor unquantised",
    )


def new_codes(
    rows: int, columns: int, fp4: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Empty bytes for codes and block scales (NVFP4), or for codes alone (FP8)."""
    codes = torch.empty((rows, columns // 2 if fp4 else columns), dtype=torch.uint8, device=device)
    if not fp4:
        return codes, None
    return codes, torch.empty((rows, columns // GROUP), dtype=torch.uint8, device=device)


def _run(
    spec: KernelSpec, x: torch.Tensor, scale: torch.Tensor, fp4: bool, squared: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_columns(x, fp4)
    check_scale(scale, "the scale")
    T, D = x.shape
    codes, scales = new_codes(T, D, fp4, x.device)
    tile = spec.tile(T, x, D=D)
    grid = (T * cdiv(D, int(tile["BLOCK_D"])),)
    args = (x, scale, codes, scales, x.stride(0), D)
    launch(_quantize, grid, *args, RELU2=squared, FP4=fp4, **as_dependent(x), **tile)
    return codes, scales


# --------------------------------------------------------------------------------------------- ops
@op(ref=quantize_nvfp4_ref)
def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 of x [T, D]: codes uint8 [T, D/2] and block scales e4m3 [T, D/16]."""
    codes, scales = _run(QUANTIZE_NVFP4, x, global_scale, True, False)
    assert scales is not None
    return codes, scales.view(torch.float8_e4m3fn)


@op(ref=quantize_fp8_ref)
def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3(x / scale) of x [T, D]."""
    return _run(QUANTIZE_FP8, x, scale, False, False)[0].view(torch.float8_e4m3fn)


@op(ref=relu2_nvfp4_ref)
def relu2_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 of max(x, 0)^2, for x [T, D]: codes uint8 [T, D/2], block scales e4m3 [T, D/16]."""
    codes, scales = _run(RELU2_NVFP4, x, global_scale, True, True)
    assert scales is not None
    return codes, scales.view(torch.float8_e4m3fn)


@op(ref=relu2_fp8_ref)
def relu2_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3(max(x, 0)^2 / scale) of x [T, D]."""
    return _run(RELU2_FP8, x, scale, False, True)[0].view(torch.float8_e4m3fn)


# ------------------------------------------------------------------------------------------- specs
def row_maker(scale_name: str) -> Callable[..., Args]:
    """Inputs whose blocks of 16 differ in size: from scales of zero up to saturated ones."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        size = torch.exp(3 * torch.randn(T, cdiv(case.D, GROUP), device=dev, generator=rng))
        x = torch.randn(T, case.D, device=dev, generator=rng)
        x = x * size.repeat_interleave(GROUP, 1)[:, : case.D]
        return {"x": x.to(dtype), scale_name: torch.full((), 3e-3, device=dev)}

    return make


def inner_widths(config: Any) -> Iterator[int]:
    """Widths behind relu^2: of shared experts and MLPs."""
    shared = (m.shared_width for m in (*config.moes, config.mtp_moe) if m is not None)
    yield from dict.fromkeys(w for w in (*config.mlp_widths, config.mtp_mlp_width, *shared) if w)


def quantised_sizes(config: Any) -> list[tuple[int, int]]:
    """Mamba's, the shared experts' and the MLPs' matrices: what releases quantise by the layer."""
    width, m = config.width, config.mamba
    sizes = [(m.in_rows, width), (width, m.inner)] if m else []
    for inner in inner_widths(config):
        sizes += [(inner, width), (width, inner)]
    return list(dict.fromkeys(sizes))


def _tiles(case: Case) -> list[Tile]:
    return [
        Tile(BLOCK_D=b, num_warps=w, num_stages=1)
        for b in (256, 512, 1024, 2048)
        for w in (1, 2, 4)
    ]


def _default(case: Case, tokens: int) -> Tile:
    return Tile(BLOCK_D=max(GROUP, min(1024, next_pow2(case.D))), num_warps=4, num_stages=1)


def _spec(wrapper: Any, scale_name: str, inner: bool, fp4: bool) -> KernelSpec:
    stored = 0.5625 if fp4 else 1.0  # bytes an element
    return KernelSpec(
        op=wrapper,
        kernels=(_quantize,),
        cases=lambda config: [
            Case(D=w) for w in (inner_widths(config) if inner else (config.width,))
        ],
        small=[Case(D=1040), Case(D=96 if fp4 else 37)],
        small_tokens=(0, 1, 5),
        tokens=(1, 16, 256, 4096, 65536),
        make=row_maker(scale_name),
        tiles=_tiles,
        default=_default,
        fixed=UNORDERED,
        cost=lambda case, T, dtype: Cost(
            10 * T * case.D, int(T * case.D * (dtype.itemsize + stored))
        ),
        tolerance=Exact(),
        per_token=("x",),
        strided=("x",),
    )


QUANTIZE_NVFP4 = _spec(quantize_nvfp4, "global_scale", inner=False, fp4=True)
QUANTIZE_FP8 = _spec(quantize_fp8, "scale", inner=False, fp4=False)
RELU2_NVFP4 = _spec(relu2_nvfp4, "global_scale", inner=True, fp4=True)
RELU2_FP8 = _spec(relu2_fp8, "scale", inner=True, fp4=False)
