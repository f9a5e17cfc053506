"""Block scales in the tiles that Blackwell's tensor cores read, and activations quantised for them.

A scaled product of NVFP4 takes its scales from tensor memory, in tiles of 128 rows by 4 columns,
512 bytes each. Scales that lie in memory in that order are copied there by one instruction; in rows
they pass through registers at every step of the product. Weights are put in order when they are
loaded, activations when they are quantised.

Source of the layout: cuBLAS, block scaling factors in 128 x 4 tiles.
"""

import torch
import triton
import triton.language as tl

from nemotriton.kernels.fp4 import nvfp4_codes
from nemotriton.kernels.op import cdiv, launch, next_pow2

TILE_ROWS, TILE_COLS = 128, 4
TILE = 512  # bytes


# ------------------------------------------------------------------------------- torch: whole tiles
def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Block scales [..., R, C], row by row, -> the tensor cores' tiles [..., R/128 * C/4 * 512].

    Rows are padded to 128 and columns to 4 with zeros. Tiles are ordered by rows of tiles; inside a
    tile scale (r, c) is at (r % 32) * 16 + (r // 32) * 4 + c. The dtype is kept.
    """
    raw = scales.view(torch.uint8)
    *lead, rows, cols = raw.shape
    row_tiles, col_tiles = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    padded = raw.new_zeros(*lead, row_tiles * TILE_ROWS, col_tiles * TILE_COLS)
    padded[..., :rows, :cols] = raw
    tiles = padded.view(*lead, row_tiles, 4, 32, col_tiles, 4).transpose(-4, -2)
    return tiles.flatten(-5).view(scales.dtype)  # [..., row tile, column tile, 32, 4, 4]


def unswizzle_scales(tiles: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `swizzle_scales`: [..., bytes] -> [..., rows, cols]."""
    row_tiles, col_tiles = -(-rows // TILE_ROWS), -(-cols // TILE_COLS)
    *lead, _ = tiles.shape
    raw = tiles.view(torch.uint8) if tiles.dtype.itemsize == 1 else tiles  # fp64 of an oracle
    raw = raw.view(*lead, row_tiles, col_tiles, 32, 4, 4).transpose(-4, -2)
    whole = raw.reshape(*lead, row_tiles * TILE_ROWS, col_tiles * TILE_COLS)
    return whole[..., :rows, :cols].contiguous().view(tiles.dtype)


def tile_bytes(rows: int, cols: int) -> int:
    """What the scales of a matrix [rows, cols] take in tiles."""
    down, across = tiles_of(rows, cols)
    return down * across * TILE


def tiles_of(rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of tiles that hold the scales of a matrix [rows, cols]."""
    return cdiv(rows, TILE_ROWS), cdiv(cols, 16 * TILE_COLS)


# --------------------------------------------------------------------------------------- jit: tiles
@triton.jit
def load_scale_tiles(ptr, row_tile, step, COLUMNS, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scales [ROWS, BLOCK_K / 16] of step `step` along K, in a matrix of COLUMNS tiles a row.

    ROWS is 128 or 256. Read as bytes in a row and only then given their places: so the compiler
    sees a copy into tensor memory."""
    R: tl.constexpr = ROWS // 128
    C: tl.constexpr = BLOCK_K // 64
    byte = step * (C * 512) + tl.arange(0, C * 512)
    rows = row_tile * R + tl.arange(0, R)
    at = ptr + rows[:, None].to(tl.int64) * (COLUMNS * 512) + byte[None, :]
    raw = tl.load(at, mask=(byte < COLUMNS * 512)[None, :], other=0.0)
    raw = raw.reshape(R, C, 32, 4, 4)
    return raw.trans(0, 3, 2, 1, 4).reshape(ROWS, BLOCK_K // 16)


@triton.jit
def _quantize_for_tiles(
    x_ptr, scale_ptr, codes_ptr, scales_ptr, x_stride, D, COLUMNS,
    TILED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_D columns of a row to NVFP4; TILED: scales go to tiles, else they stay in rows."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(D, BLOCK_D)
    t, first = pid // blocks, pid % blocks * BLOCK_D
    d = first + tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + t * x_stride + d, mask=d < D, other=0.0).to(tl.float32)
    codes, scale = nvfp4_codes(tl.reshape(x, [1, BLOCK_D // 16, 16]), tl.load(scale_ptr))
    low, high = tl.split(tl.reshape(codes, [BLOCK_D // 2, 2]))
    pair = first // 2 + tl.arange(0, BLOCK_D // 2)
    tl.store(codes_ptr + t * (D // 2) + pair, (low | (high << 4)).to(tl.uint8), mask=pair * 2 < D)
    c = first // 16 + tl.arange(0, BLOCK_D // 16)
    byte = tl.reshape(scale, [BLOCK_D // 16]).to(tl.uint8)
    inside = c * 16 < D
    if TILED:  # zeros in columns that only fill a tile: NaN there would reach the sums
        inside = c < COLUMNS * 4
        tile = t // 128 * COLUMNS + c // 4
        at = tile * 512 + t % 32 * 16 + t % 128 // 32 * 4 + c % 4
    else:
        at = t * (D // 16) + c
    tl.store(scales_ptr + at, byte, mask=inside)


def quantize_for_tiles(
    x: torch.Tensor, scale: torch.Tensor, tiled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [T, D/2] of x [T, D], D a multiple of 16, and e4m3 scales: in rows [T, D/16], or
    `tiled`, where the scales of rows that only fill a tile are left as they are."""
    T, D = x.shape
    codes = torch.empty((T, D // 2), dtype=torch.uint8, device=x.device)
    rows, columns = tiles_of(T, D)
    shape = (rows * columns * TILE,) if tiled else (T, D // 16)
    scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
    block = max(16 * TILE_COLS, min(1024, next_pow2(D)))
    args = (x, scale, codes, scales, x.stride(0), D, columns)
    launch(
        _quantize_for_tiles, (T * cdiv(D, block),), *args, TILED=tiled, BLOCK_D=block, num_warps=4
    )
    return codes, scales.view(torch.float8_e4m3fn)
