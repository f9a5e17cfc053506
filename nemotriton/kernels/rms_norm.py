"""Root-mean-square norms of the residual stream and of the Mamba mixer's output.

    rms_norm        y = x * rsqrt(mean(x^2) + eps) * weight            (Zhang & Sennrich 2019)
    add_rms_norm    r' = r + x (rounded to r's dtype), y = rms_norm(r')
    gated_rms_norm  u = x * silu(z), y = rms_norm of each of `groups` equal slices of u * weight
                    (Mamba-2, norm_before_gate = False)

x, z, y [T, D] with free row strides; weight [D]; everything is computed in fp32, the weight is
applied before the one rounding to x's dtype. Rows are independent of each other to the bit.

All are dependent launches. While they are few programs (FEW rows) they let the next kernel come at
once: it brings its weights near beside them.
"""

import torch
import triton
import triton.language as tl
from einops import rearrange

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.numerics import silu_ref
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    acc_dtype,
    launch,
    next_pow2,
    op,
)

FEW = 128  # programs that leave room for the next kernel's


# --------------------------------------------------------------------------------------- rms_norm
def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Twin of `rms_norm`."""
    f = acc_dtype(x)
    u = x.to(f)
    y = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) * weight.to(f)
    return y.to(x.dtype)


@triton.jit
def _rms_norm(
    x_ptr, w_ptr, y_ptr, x_stride, y_stride, D, eps,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    w = tl.load(w_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + t * x_stride + d, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_D]
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * w
    tl.store(y_ptr + t * y_stride + d, y.to(y_ptr.dtype.element_ty), mask=mask)


@op(ref=rms_norm_ref)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """RMS norm of x [T, D] with weight [D]; returns [T, D] in x's dtype."""
    T, D = check_rows(x, weight)
    y = torch.empty((T, D), dtype=x.dtype, device=x.device)
    tile = RMS_NORM.tile(T, x, D=D)
    args = (x, weight, y, x.stride(0), y.stride(0), D, eps)
    launch(_rms_norm, (T,), *args, EARLY=T <= FEW, **as_dependent(x), **tile)
    return y


def check_rows(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    T, D = x.shape
    require(weight.shape == (D,), f"weight of shape {tuple(weight.shape)} does not match width {D}")
    require(x.stride(1) == 1, "x must have unit stride along its width; call .contiguous()")
    return T, D


def row_tiles(case: Case) -> list[Tile]:
    block = next_pow2(case.D)
    return [Tile(BLOCK_D=block, num_warps=w, num_stages=1) for w in (1, 2, 4, 8, 16)]


def row_default(case: Case, tokens: int) -> Tile:
    block = next_pow2(case.D)
    return Tile(BLOCK_D=block, num_warps=min(8, max(1, block // 512)), num_stages=1)


def _make_rms_norm(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    return {
        "x": torch.randn(T, case.D, device=dev, generator=rng).to(dtype),
        "weight": torch.rand(case.D, device=dev, generator=rng).to(dtype) + 0.5,
        "eps": 1e-5,
    }


_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

RMS_NORM = KernelSpec(
    terms=lambda case: case.D,
    op=rms_norm,
    kernels=(_rms_norm,),
    cases=lambda config: [Case(D=config.width)],
    small=[Case(D=64), Case(D=37), Case(D=300)],
    tokens=_TOKENS,
    make=_make_rms_norm,
    tiles=row_tiles,
    default=row_default,
    cost=lambda case, T, dtype: Cost(4 * T * case.D, (2 * T + 1) * case.D * dtype.itemsize),
    per_token=("x",),
    strided=("x",),
)


# ----------------------------------------------------------------------------------- add_rms_norm
def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `add_rms_norm`."""
    f = acc_dtype(x)
    total = (residual.to(f) + x.to(f)).to(residual.dtype)
    return rms_norm_ref(total, weight, eps).to(x.dtype), total


@triton.jit
def _add_rms_norm(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, x_stride, r_stride, y_stride, D, eps,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    w = tl.load(w_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + t * x_stride + d, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_D]
    r = tl.load(r_ptr + t * r_stride + d, mask=mask, other=0.0).to(tl.float32)
    s = (r + x).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + t * y_stride + d, s, mask=mask)
    u = s.to(tl.float32)
    y = u * tl.rsqrt(tl.sum(u * u, 0) / D + eps) * w
    tl.store(y_ptr + t * y_stride + d, y.to(y_ptr.dtype.element_ty), mask=mask)


@op(ref=add_rms_norm_ref)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add and RMS norm in one pass.

    x [T, D]; residual [T, D], fp32 or x's dtype; weight [D]. Returns (the norm of the new residual
    in x's dtype, the new residual in residual's dtype); the norm sees the rounded sum."""
    T, D = check_rows(x, weight)
    require(
        residual.shape == x.shape,
        f"residual of shape {tuple(residual.shape)} does not match x {tuple(x.shape)}",
    )
    require(residual.stride(1) == 1, "residual must have unit stride along its width")
    y = torch.empty((T, D), dtype=x.dtype, device=x.device)
    total = torch.empty((T, D), dtype=residual.dtype, device=x.device)
    tile = ADD_RMS_NORM.tile(T, x, D=D)
    strides = (x.stride(0), residual.stride(0), y.stride(0))
    args = (x, residual, weight, y, total, *strides, D, eps)
    launch(_add_rms_norm, (T,), *args, EARLY=T <= FEW, **as_dependent(x), **tile)
    return y, total


def _make_add_rms_norm(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    args = _make_rms_norm(case, T, dev, dtype, rng)
    args["residual"] = torch.randn(T, case.D, device=dev, generator=rng).to(dtype)
    return args


ADD_RMS_NORM = KernelSpec(
    terms=lambda case: case.D,
    op=add_rms_norm,
    kernels=(_add_rms_norm,),
    cases=lambda config: [Case(D=config.width)],
    small=[Case(D=64), Case(D=37), Case(D=300)],
    tokens=_TOKENS,
    make=_make_add_rms_norm,
    tiles=row_tiles,
    default=row_default,
    cost=lambda case, T, dtype: Cost(5 * T * case.D, (4 * T + 1) * case.D * dtype.itemsize),
    per_token=("x", "residual"),
    strided=("x", "residual"),
)


# --------------------------------------------------------------------------------- gated_rms_norm
def gated_rms_norm_ref(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, groups: int = 1
) -> torch.Tensor:
    """Twin of `gated_rms_norm`."""
    f = acc_dtype(x)
    u = x.to(f) * silu_ref(z.to(f))
    u = rearrange(u, "t (g d) -> t g d", g=groups)
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    return (rearrange(u, "t g d -> t (g d)") * weight.to(f)).to(x.dtype)


@triton.jit
def _gated_rms_norm(
    x_ptr, z_ptr, w_ptr, y_ptr, x_stride, z_stride, y_stride, D, eps,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)  # within the group; D is the group's width
    mask = d < D
    w = tl.load(w_ptr + g * D + d, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + t * x_stride + g * D + d, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + t * z_stride + g * D + d, mask=mask, other=0.0).to(tl.float32)
    u = x * z * tl.sigmoid(z)
    y = u * tl.rsqrt(tl.sum(u * u, 0) / D + eps) * w
    tl.store(y_ptr + t * y_stride + g * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)


@op(ref=gated_rms_norm_ref)
def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, groups: int = 1
) -> torch.Tensor:
    """Gate x with silu(z), then RMS norm each of `groups` slices of the width on its own.

    x, z [T, D], weight [D], D divisible by groups; returns [T, D] in x's dtype."""
    T, D = check_rows(x, weight)
    require(z.shape == x.shape, f"gate of shape {tuple(z.shape)} does not match {tuple(x.shape)}")
    require(z.stride(1) == 1, "the gate must have unit stride along its width")
    require(groups > 0 and D % groups == 0, f"width {D} is not divisible by {groups} groups")
    y = torch.empty((T, D), dtype=x.dtype, device=x.device)
    tile = GATED_RMS_NORM.tile(T, x, D=D // groups, G=groups)
    args = (x, z, weight, y, x.stride(0), z.stride(0), y.stride(0), D // groups, eps)
    late = as_dependent(x)
    launch(_gated_rms_norm, (T, groups), *args, EARLY=T * groups <= FEW, **late, **tile)
    return y


def _make_gated_rms_norm(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    width = case.D * case.G
    args = _make_rms_norm(Case(D=width), T, dev, dtype, rng)
    args["z"] = torch.randn(T, width, device=dev, generator=rng).to(dtype)
    return args | {"groups": case.G}


GATED_RMS_NORM = KernelSpec(
    terms=lambda case: case.D,
    op=gated_rms_norm,
    kernels=(_gated_rms_norm,),
    cases=lambda config: (
        [Case(D=config.mamba.inner // config.mamba.groups, G=config.mamba.groups)]
        if config.mamba
        else []
    ),
    small=[Case(D=32, G=2), Case(D=37, G=3), Case(D=300, G=1)],
    tokens=_TOKENS,
    make=_make_gated_rms_norm,
    tiles=row_tiles,
    default=row_default,
    cost=lambda case, T, dtype: Cost(
        8 * T * case.D * case.G, (3 * T + 1) * case.D * case.G * dtype.itemsize
    ),
    per_token=("x", "z"),
    strided=("x", "z"),
)
