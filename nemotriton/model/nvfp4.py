"""NVFP4 and FP8 numbers, exactly: the twins of every encoder, decoder and scale layout.

    e2m1    code = sign << 3 | index into 0, .5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN
    e4m3    sign, 4 exponent bits (bias 7), 3 mantissa bits; largest 448, NaN is 0x7f and 0xff
    NVFP4   16 consecutive columns share an e4m3 scale s, the matrix an fp32 scale g:
            w = e2m1 * s * g. e2m1 * s has at most six significant bits and is exact in bf16.
    FP8     w = e4m3 * g

Both encoders round to the nearest, ties to the even code, and saturate: infinities become the
largest number. NaN becomes e4m3's 0x7f, and e2m1's 6 (as the hardware's cvt.satfinite does).

`quantize_nvfp4`, in fp32, every operation rounded once, in this order, for a block x of 16:
    k = min(1 / g, FLT_MAX) / 6;  s = e4m3(max|x| * k)
    m = min(1 / (s * g), FLT_MAX);  code = e2m1(x * m)
and where s is 0 all codes are 0. So an all-zero block has s = 0; a block whose scale underflows
becomes zero; one that holds a NaN decodes to NaN throughout; one with an infinity has s = 448. A
block too large for g saturates at s = 448 and codes of 6. `quantize_fp8`: with m = min(1 / g,
FLT_MAX), code = e4m3(x * m).

Sources: OCP MX and FP8 formats, the order of operations of Transformer Engine's quantiser, the
128 x 4 layout of cuBLAS.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nemotriton.errors import require
from nemotriton.model.formats import NVFP4_GROUP

E2M1_MAX = 6.0
E4M3_MAX = 448.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between magnitude i and i + 1; a tie goes to the even index.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FLT_MAX = torch.finfo(torch.float32).max
_TILE_ROWS, _TILE_COLS = 128, 4  # of a tile of swizzled block scales


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


# ------------------------------------------------------------------------------------- single codes
def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """The codes 0..15 (uint8) nearest to x; the sign of zero is kept."""
    magnitude = x.float().abs()
    index = torch.zeros_like(magnitude, dtype=torch.uint8)
    for i, midpoint in enumerate(_MIDPOINTS):
        index += magnitude >= midpoint if i % 2 else magnitude > midpoint
    index[magnitude.isnan()] = 7
    negative = x.float().signbit() & ~x.isnan()
    return index | negative.to(torch.uint8) << 3


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of codes 0..15; code 8 is minus zero."""
    values = [sign * magnitude for sign in (1.0, -1.0) for magnitude in _MAGNITUDES]
    return torch.tensor(values, device=codes.device)[codes.long()]


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """The e4m3 numbers nearest to x; out of range becomes +-448, NaN becomes 0x7f."""
    codes = x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, 0x7F), codes).view(torch.float8_e4m3fn)


def e4m3_decode(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of e4m3 numbers, given as such or as bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [..., K] -> bytes [..., K/2], the even column in the low nibble."""
    require(codes.shape[-1] % 2 == 0, f"{codes.shape[-1]} columns cannot be packed in pairs")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


# --------------------------------------------------------------------------------------- whole ones
def nvfp4_global_scale(x: torch.Tensor) -> torch.Tensor:
    """max|x| / 2688 of each [N, K] matrix of x [..., N, K]; 1 for a matrix of zeros."""
    return _amax_over(x, E2M1_MAX * E4M3_MAX)


def fp8_global_scale(x: torch.Tensor) -> torch.Tensor:
    """max|x| / 448 of each [N, K] matrix of x [..., N, K]; 1 for a matrix of zeros."""
    return _amax_over(x, E4M3_MAX)


def _amax_over(x: torch.Tensor, largest: float) -> torch.Tensor:
    amax = x.float().abs().flatten(-2).amax(-1)
    return torch.where(amax == 0, torch.ones_like(amax), amax / largest)


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    """1 / x, but finite: x may be zero or, as small global scales are, subnormal."""
    return (1 / x).clamp(max=_FLT_MAX)


def quantize_nvfp4(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Nvfp4:
    """Quantise x [..., N, K] in blocks of 16 columns; the order of operations is stated on top.

    global_scale: fp32, [] or one for each leading index; by default `nvfp4_global_scale`. Raises
    UnsupportedError where K is not a multiple of 16.
    """
    columns = x.shape[-1]
    require(
        columns % NVFP4_GROUP == 0,
        f"{columns} columns are not whole groups of {NVFP4_GROUP}; keep this matrix in bf16",
    )
    if global_scale is None:
        global_scale = nvfp4_global_scale(x)
    g = global_scale.float()[..., None, None]
    blocks = x.float().unflatten(-1, (-1, NVFP4_GROUP))  # [..., N, K/16, 16]
    scales = e4m3_encode(blocks.abs().amax(-1) * (_reciprocal(g) / E2M1_MAX))
    s = scales.float()
    multiplier = _reciprocal(s * g)[..., None]
    codes = e2m1_encode(blocks * multiplier)
    codes = torch.where(s[..., None] == 0, torch.zeros_like(codes), codes)
    return Nvfp4(pack(codes.flatten(-2)), scales, global_scale)


def nvfp4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """e2m1 * s in fp32 [..., N, K], without the global scale: exact in bf16 and fp16 too.

    A zero code is zero whatever its scale, NaN included."""
    values = e2m1_decode(unpack(codes)).unflatten(-1, (-1, NVFP4_GROUP))
    product = values * e4m3_decode(scales)[..., None]
    return torch.where(values == 0, values, product).flatten(-2)


def dequantize_nvfp4(weight: Nvfp4) -> torch.Tensor:
    """w = (e2m1 * s) * g in fp32, [..., N, K]."""
    return nvfp4_values(weight.codes, weight.scales) * weight.global_scale[..., None, None]


def quantize_fp8(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Fp8:
    """Quantise x [..., N, K] to e4m3; global_scale as in `quantize_nvfp4`."""
    if global_scale is None:
        global_scale = fp8_global_scale(x)
    multiplier = _reciprocal(global_scale.float())[..., None, None]
    return Fp8(e4m3_encode(x.float() * multiplier), global_scale)


def dequantize_fp8(weight: Fp8) -> torch.Tensor:
    """w = e4m3 * g in fp32, [..., N, K]."""
    return weight.codes.float() * weight.global_scale[..., None, None]


# -------------------------------------------------------------------------------- layouts of scales
def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Block scales [..., R, C], row by row, -> the tensor cores' tiles [..., R/128 * C/4 * 512].

    Rows are padded to 128 and columns to 4 with zeros. Tiles are ordered by rows of tiles; inside a
    tile scale (r, c) is at (r % 32) * 16 + (r // 32) * 4 + c. The dtype is kept.
    """
    raw = scales.view(torch.uint8)
    *lead, rows, cols = raw.shape
    row_tiles, col_tiles = -(-rows // _TILE_ROWS), -(-cols // _TILE_COLS)
    padded = raw.new_zeros(*lead, row_tiles * _TILE_ROWS, col_tiles * _TILE_COLS)
    padded[..., :rows, :cols] = raw
    tiles = padded.view(*lead, row_tiles, 4, 32, col_tiles, 4).transpose(-4, -2)
    return tiles.flatten(-5).view(scales.dtype)  # [..., row tile, column tile, 32, 4, 4]


def unswizzle_scales(tiles: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `swizzle_scales`: [..., bytes] -> [..., rows, cols]."""
    row_tiles, col_tiles = -(-rows // _TILE_ROWS), -(-cols // _TILE_COLS)
    *lead, _ = tiles.shape
    raw = tiles.view(torch.uint8).view(*lead, row_tiles, col_tiles, 32, 4, 4).transpose(-4, -2)
    whole = raw.reshape(*lead, row_tiles * _TILE_ROWS, col_tiles * _TILE_COLS)
    return whole[..., :rows, :cols].contiguous().view(tiles.dtype)
