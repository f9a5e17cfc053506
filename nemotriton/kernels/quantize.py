"""Activations to NVFP4 or FP8, alone or behind relu^2.

    quantize_nvfp4   codes, block scales of x with a given global scale     (see fp4 for the order)
    quantize_fp8     e4m3(x / scale)
    relu2_*          h = max(x, 0)^2 rounded to x's dtype, then quantised: the bytes of relu2 in
                     x's dtype followed by quantize_*

x [T, D] with a free row stride, in bf16, fp16 or fp32; scales fp32, one number. Everything in fp32.
"""

import torch

from nemotriton.kernels.fp4 import fp8_codes_ref, nvfp4_codes_ref
from nemotriton.kernels.numerics import relu2_ref
from nemotriton.kernels.op import acc_dtype, op


# --------------------------------------------------------------------------------- plain quantisers
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


@op(ref=quantize_nvfp4_ref)
def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 of x [T, D]: codes uint8 [T, D/2] and block scales e4m3 [T, D/16]."""
    return quantize_nvfp4_ref(x, global_scale)


@op(ref=quantize_fp8_ref)
def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3(x / scale) of x [T, D]."""
    return quantize_fp8_ref(x, scale)


@op(ref=relu2_nvfp4_ref)
def relu2_nvfp4(x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 of max(x, 0)^2, for x [T, D]: codes uint8 [T, D/2], block scales e4m3 [T, D/16]."""
    return relu2_nvfp4_ref(x, global_scale)


@op(ref=relu2_fp8_ref)
def relu2_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3(max(x, 0)^2 / scale) of x [T, D]."""
    return relu2_fp8_ref(x, scale)
