"""RMS norms whose result is quantised before it is stored: NVFP4 or FP8 codes.

    add_rms_norm_*     r' = r + x (rounded to r's dtype); y = rms_norm(r'); codes of y
    gated_rms_norm_*   y = rms_norm of each group of x * silu(z); codes of y

y is rounded to x's dtype before the quantiser sees it: the bytes are those of `add_rms_norm` or
`gated_rms_norm` followed by `quantize_nvfp4` or `quantize_fp8`. Shapes as in `rms_norm`; the
global scale (NVFP4) or scale (FP8) is fp32, one number. For that the tiles are those of the plain
norm, tuned ones too: a tile decides in which order squares are added. Dependent launches, as there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fp4 import GROUP, store_codes
from nemotriton.kernels.op import Args, Case, Cost, Exact, KernelSpec, Tile, launch, op
from nemotriton.kernels.quantize import (
    check_columns,
    check_scale,
    new_codes,
    quantize_fp8_ref,
    quantize_nvfp4_ref,
    row_maker,
)
from nemotriton.kernels.rms_norm import (
    ADD_RMS_NORM,
    FEW,
    GATED_RMS_NORM,
    add_rms_norm_ref,
    check_rows,
    gated_rms_norm_ref,
    row_default,
    row_tiles,
)

E4M3 = torch.float8_e4m3fn


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _add_rms_norm_quant(
    x_ptr, r_ptr, w_ptr, scale_ptr, codes_ptr, scales_ptr, s_ptr, x_stride, r_stride, D, eps,
    FP4: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
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
    tl.store(s_ptr + t * D + d, s, mask=mask)
    u = s.to(tl.float32)
    y = u * tl.rsqrt(tl.sum(u * u, 0) / D + eps) * w
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    store_codes(y, tl.load(scale_ptr), codes_ptr, scales_ptr, t * D, D, FP4, BLOCK_D)


@triton.jit
def _gated_rms_norm_quant(
    x_ptr, z_ptr, w_ptr, scale_ptr, codes_ptr, scales_ptr, x_stride, z_stride, D, eps, groups,
    FP4: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
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
    y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    first = (t * groups + g) * D
    store_codes(y, tl.load(scale_ptr), codes_ptr, scales_ptr, first, D, FP4, BLOCK_D)


def _add(
    spec: KernelSpec,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    fp4: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    T, D = check_rows(x, weight)
    check_columns(x, fp4)
    check_scale(scale, "the scale")
    require(
        residual.shape == x.shape and residual.stride(1) == 1,
        f"residual must be [{T}, {D}] with unit stride along its width",
    )
    codes, scales = new_codes(T, D, fp4, x.device)
    total = torch.empty((T, D), dtype=residual.dtype, device=x.device)
    args = (x, residual, weight, scale, codes, scales, total, x.stride(0), residual.stride(0))
    constants = {"FP4": fp4, "EARLY": T <= FEW, **as_dependent(x), **spec.tile(T, x, D=D)}
    launch(_add_rms_norm_quant, (T,), *args, D, eps, **constants)
    return codes, scales, total


def _gated(
    spec: KernelSpec,
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    groups: int,
    fp4: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    T, D = check_rows(x, weight)
    check_columns(x, fp4)
    check_scale(scale, "the scale")
    require(
        z.shape == x.shape and z.stride(1) == 1,
        f"the gate must be [{T}, {D}] with unit stride along its width",
    )
    require(groups > 0 and D % groups == 0, f"width {D} is not divisible by {groups} groups")
    width = D // groups
    require(
        not fp4 or width % GROUP == 0,
        f"norm groups of {width} columns are not whole blocks of {GROUP}; norm, then quantise",
    )
    codes, scales = new_codes(T, D, fp4, x.device)
    args = (x, z, weight, scale, codes, scales, x.stride(0), z.stride(0), width, eps, groups)
    tile = spec.tile(T, x, D=width, G=groups)
    constants = {"FP4": fp4, "EARLY": T * groups <= FEW, **as_dependent(x), **tile}
    launch(_gated_rms_norm_quant, (T, groups), *args, **constants)
    return codes, scales


# ----------------------------------------------------------------------------------- add_rms_norm_*
def add_rms_norm_nvfp4_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twin of `add_rms_norm_nvfp4`."""
    y, total = add_rms_norm_ref(x, residual, weight, eps)
    return *quantize_nvfp4_ref(y, global_scale), total


def add_rms_norm_fp8_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `add_rms_norm_fp8`."""
    y, total = add_rms_norm_ref(x, residual, weight, eps)
    return quantize_fp8_ref(y, scale), total


@op(ref=add_rms_norm_nvfp4_ref)
def add_rms_norm_nvfp4(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual add, RMS norm, NVFP4.

    x, residual [T, D], weight [D]. Returns codes uint8 [T, D/2], block scales e4m3 [T, D/16], and
    the new residual in residual's dtype."""
    spec = ADD_RMS_NORM_NVFP4
    codes, scales, total = _add(spec, x, residual, weight, global_scale, eps, True)
    assert scales is not None
    return codes, scales.view(E4M3), total


@op(ref=add_rms_norm_fp8_ref)
def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add, RMS norm, FP8: e4m3 [T, D] and the new residual in residual's dtype."""
    codes, _, total = _add(ADD_RMS_NORM_FP8, x, residual, weight, scale, eps, False)
    return codes.view(E4M3), total


# --------------------------------------------------------------------------------- gated_rms_norm_*
def gated_rms_norm_nvfp4_ref(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor,
    eps: float = 1e-5,
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `gated_rms_norm_nvfp4`."""
    return quantize_nvfp4_ref(gated_rms_norm_ref(x, z, weight, eps, groups), global_scale)


def gated_rms_norm_fp8_ref(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float = 1e-5,
    groups: int = 1,
) -> torch.Tensor:
    """Twin of `gated_rms_norm_fp8`."""
    return quantize_fp8_ref(gated_rms_norm_ref(x, z, weight, eps, groups), scale)


@op(ref=gated_rms_norm_nvfp4_ref)
def gated_rms_norm_nvfp4(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor,
    eps: float = 1e-5,
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate with silu(z), RMS norm each group, NVFP4: codes uint8 [T, D/2], scales e4m3 [T, D/16].

    The width of a group must be a multiple of 16."""
    spec = GATED_RMS_NORM_NVFP4
    codes, scales = _gated(spec, x, z, weight, global_scale, eps, groups, True)
    assert scales is not None
    return codes, scales.view(E4M3)


@op(ref=gated_rms_norm_fp8_ref)
def gated_rms_norm_fp8(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float = 1e-5,
    groups: int = 1,
) -> torch.Tensor:
    """Gate with silu(z), RMS norm each group, FP8: e4m3 [T, D]."""
    return _gated(GATED_RMS_NORM_FP8, x, z, weight, scale, eps, groups, False)[0].view(E4M3)


# ------------------------------------------------------------------------------------------- specs
# Kernel and twin add the squares in different orders: a norm that lies beside a rounding boundary
# may then be rounded to x's dtype, and seldom further to its code, the other way.
TOLERANCE = Exact(share=1e-4, reason="a norm beside a rounding boundary may take the next code")


@dataclass(frozen=True)
class _Fused(KernelSpec):
    """A spec whose op takes the tiles of another one, `plain`."""

    plain: KernelSpec = ADD_RMS_NORM

    def _choose(self, tokens: int, where: torch.Tensor, axes: Mapping[str, Any]) -> Tile:
        return self.plain.tile(tokens, where, **axes)


def _maker(scale_name: str, second: str) -> Callable[..., Args]:
    rows = row_maker(scale_name)

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        groups = case.get("G", 1)
        width = Case(D=case.D * groups)
        args = rows(width, T, dev, dtype, rng)
        args["weight"] = torch.rand(width.D, device=dev, generator=rng).to(dtype) + 0.5
        args[second] = torch.randn(T, width.D, device=dev, generator=rng).to(dtype)
        return args | ({"groups": groups} if "G" in case else {})

    return make


def _gated_cases(config: Any) -> list[Case]:
    m = config.mamba
    return [Case(D=m.inner // m.groups, G=m.groups)] if m else []


def _spec(wrapper: Any, scale_name: str, second: str, fp4: bool) -> KernelSpec:
    stored = 0.5625 if fp4 else 1.0  # bytes an element
    gated = second == "z"
    read = 2 if gated else 3  # x and z; or x, the residual and its sum
    odd = 48 if fp4 else 37

    def cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
        width = case.D * case.get("G", 1)
        return Cost(16 * T * width, int(T * width * (read * dtype.itemsize + stored)))

    return _Fused(
        plain=GATED_RMS_NORM if gated else ADD_RMS_NORM,
        terms=lambda case: case.D,
        op=wrapper,
        kernels=(_gated_rms_norm_quant if gated else _add_rms_norm_quant,),
        cases=_gated_cases if gated else lambda config: [Case(D=config.width)],
        small=[Case(D=32, G=2), Case(D=odd, G=3)] if gated else [Case(D=304), Case(D=odd)],
        tokens=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536),
        make=_maker(scale_name, second),
        tiles=row_tiles,
        default=row_default,
        cost=cost,
        tolerance=TOLERANCE,
        small_tokens=(0, 1, 5),
        per_token=("x", second),
        strided=("x", second),
    )


ADD_RMS_NORM_NVFP4 = _spec(add_rms_norm_nvfp4, "global_scale", "residual", True)
ADD_RMS_NORM_FP8 = _spec(add_rms_norm_fp8, "scale", "residual", False)
GATED_RMS_NORM_NVFP4 = _spec(gated_rms_norm_nvfp4, "global_scale", "z", True)
GATED_RMS_NORM_FP8 = _spec(gated_rms_norm_fp8, "scale", "z", False)
