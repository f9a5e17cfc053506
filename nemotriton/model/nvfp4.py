"""Whole matrices in NVFP4 and FP8: quantised, dequantised, and the layouts of block scales.

The codes, the order of operations and every special case are those of `kernels.fp4`, whose torch
functions these are; here each leading matrix of [..., N, K] has a global scale of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nemotriton.kernels.fp4 import (
    E2M1_MAX,
    E4M3_MAX,
    fp8_codes_ref,
    nvfp4_codes_ref,
    pack,
    unpack,
)
from nemotriton.kernels.fp4 import e2m1_decode_ref as e2m1_decode
from nemotriton.kernels.fp4 import e2m1_encode_ref as e2m1_encode
from nemotriton.kernels.fp4 import e4m3_decode_ref as e4m3_decode
from nemotriton.kernels.fp4 import e4m3_encode_ref as e4m3_encode
from nemotriton.kernels.fp4 import nvfp4_values_ref as nvfp4_values
from nemotriton.kernels.scale_tiles import swizzle_scales, unswizzle_scales

__all__ = [
    "Fp8",
    "Nvfp4",
    "dequantize_fp8",
    "dequantize_nvfp4",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3_decode",
    "e4m3_encode",
    "fp8_global_scale",
    "nvfp4_global_scale",
    "nvfp4_values",
    "pack",
    "quantize_fp8",
    "quantize_nvfp4",
    "swizzle_scales",
    "unpack",
    "unswizzle_scales",
]


class Nvfp4(NamedTuple):
    """codes uint8 [..., N, K/2], even column in the low nibble; scales e4m3 [..., N, K/16], row by
    row; global_scale fp32, [] or one for each leading index."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor


class Fp8(NamedTuple):
    """codes e4m3 [..., N, K]; global_scale fp32, [] or one for each leading index."""

    codes: torch.Tensor
    global_scale: torch.Tensor


# ----------------------------------------------------------------------------------- the quantisers
def nvfp4_global_scale(x: torch.Tensor) -> torch.Tensor:
    """max|x| / 2688 of each [N, K] matrix of x [..., N, K]; 1 for a matrix of zeros."""
    return _amax_over(x, E2M1_MAX * E4M3_MAX)


def fp8_global_scale(x: torch.Tensor) -> torch.Tensor:
    """max|x| / 448 of each [N, K] matrix of x [..., N, K]; 1 for a matrix of zeros."""
    return _amax_over(x, E4M3_MAX)


def _amax_over(x: torch.Tensor, largest: float) -> torch.Tensor:
    flat = x.flatten(-2)  # of a large matrix no fp32 copy is made
    amax = torch.maximum(flat.amax(-1), -flat.amin(-1)).float()
    return torch.where(amax == 0, torch.ones_like(amax), amax / largest)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Nvfp4:
    """Quantise x [..., N, K] in blocks of 16 columns.

    global_scale: fp32, [] or one for each leading index; by default `nvfp4_global_scale`. Raises
    UnsupportedError where K is not a multiple of 16.
    """
    if global_scale is None:
        global_scale = nvfp4_global_scale(x)
    return Nvfp4(*nvfp4_codes_ref(x, global_scale[..., None, None]), global_scale)


def dequantize_nvfp4(weight: Nvfp4) -> torch.Tensor:
    """w = (e2m1 * s) * g in fp32, [..., N, K]."""
    return nvfp4_values(weight.codes, weight.scales) * weight.global_scale[..., None, None]


def quantize_fp8(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Fp8:
    """Quantise x [..., N, K] to e4m3; global_scale as in `quantize_nvfp4`."""
    if global_scale is None:
        global_scale = fp8_global_scale(x)
    return Fp8(fp8_codes_ref(x, global_scale[..., None, None]), global_scale)


def dequantize_fp8(weight: Fp8) -> torch.Tensor:
    """w = e4m3 * g in fp32, [..., N, K]."""
    return weight.codes.float() * weight.global_scale[..., None, None]
