"""RMS norms whose result is quantised before it is stored: NVFP4 or FP8 codes.

    add_rms_norm_*     r' = r + x (rounded to r's dtype); y = rms_norm(r'); codes of y
    gated_rms_norm_*   y = rms_norm of each group of x * silu(z); codes of y

y is rounded to x's dtype before the quantiser sees it: the bytes are those of `add_rms_norm` or
`gated_rms_norm` followed by `quantize_nvfp4` or `quantize_fp8`. Shapes as in `rms_norm`; the
global scale (NVFP4) or scale (FP8) is fp32, one number.
"""

import torch

from nemotriton.kernels.op import op
from nemotriton.kernels.quantize import quantize_fp8_ref, quantize_nvfp4_ref
from nemotriton.kernels.rms_norm import add_rms_norm_ref, gated_rms_norm_ref


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
    return add_rms_norm_nvfp4_ref(x, residual, weight, global_scale, eps)


@op(ref=add_rms_norm_fp8_ref)
def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add, RMS norm, FP8: e4m3 [T, D] and the new residual in residual's dtype."""
    return add_rms_norm_fp8_ref(x, residual, weight, scale, eps)


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
    return gated_rms_norm_nvfp4_ref(x, z, weight, global_scale, eps, groups)


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
    return gated_rms_norm_fp8_ref(x, z, weight, scale, eps, groups)
