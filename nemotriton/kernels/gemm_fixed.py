"""Products in the invariant mode: which tiles sum alike, and the ones that are taken.

Along K every form adds products in one order of its own, the same for every row and column of a
tile. Generated tokens are always multiplied by the streaming form (`gemm_stream`), whatever their
number: its order is that of the warps' slices. Prompts, however short, take wgmma from the first
column to the last, without parts of K: blocks of tokens and outputs may then be of any size. Where
there is no such form (NVFP4 as it is stored) generated tokens take mma.sync with K in parts.
"""

from typing import Any

from nemotriton.kernels.fixed_order import DECODE
from nemotriton.kernels.gemm_roles import CODES, NUMBERS
from nemotriton.kernels.gemm_square import square_tile
from nemotriton.kernels.gemm_stream import WIDE, _shape
from nemotriton.kernels.op import Case, Tile, on_hopper

FEW = 512  # tokens up to which a prompt's tiles are read without descriptors, see `gemm`


def is_asynchronous(tall: int, tile: Tile) -> bool:
    """Whether Hopper multiplies a tile `tall` on the first operand's side by wgmma."""
    return tall >= 64 and int(tile["num_warps"]) >= 4


def product_order(tile: Tile) -> Any:
    """What decides the order along K of a tile of `gemm` or `gemm_quant`."""
    if "GROUPS" in tile:
        return "direct", tile["num_warps"], tile["GROUPS"]
    step = int(tile["BLOCK_K"])
    if "STREAM" in tile:
        # a rotated start depends on which outputs a program has
        turned = tile["BLOCK_N"] if tile.get("ROTATE", False) else 0
        return "stream", tile["num_warps"], step, turned
    if "WIDE" in tile:
        return "wide", step, tile["SPLITS"]
    if "CODES" in tile:
        return "codes", step, tile["SPLITS"]
    swap = bool(tile.get("SWAP", False))
    tall = int(tile["BLOCK_N"] if swap else tile["BLOCK_T"])
    codes = "TMA" in tile and step > 64  # multiplies e4m3 codes; other tiles the numbers they mean
    return "tiles", swap, is_asynchronous(tall, tile), step, tile.get("SPLITS", 1), codes


def fixed_stream(N: int, tokens: int, itemsize: int) -> Tile:
    """The streaming tile of the mode: slices as for a few tokens, blocks by their number."""
    t = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
    if itemsize == 4:
        return _unturned(_shape((t, 16, 512, 8, 4), itemsize))
    n = 32 if t == 32 else 16
    if N >= WIDE and (t, itemsize) not in ((8, 1), (32, 1)):
        n *= 2
    return _unturned(_shape((t, n, 512, 4, 4 if n == 16 else 3), itemsize))


def _unturned(tile: Tile) -> Tile:
    return tile.but(ROTATE=False) if "ROTATE" in tile else tile


def fixed_matmul(case: Case, tokens: int, phase: str) -> Tile:
    """Of `gemm.matmul`."""
    if phase == DECODE:
        return fixed_stream(case.N, tokens, 4 if case.ieee else 2)
    if case.ieee:  # as few parts as `gemm._parts_tile` makes
        return _plain((64, 64, 64, 4, 3), 4).but(SWAP=False)
    if tokens > FEW:
        return NUMBERS if on_hopper() else square_tile((128, 128, 64, 8, 3))
    shape = (64, 64, 64, 4, 4) if tokens <= 64 else (128, 128, 64, 8, 3)
    return _plain(shape, 1).but(SWAP=False)


def fixed_fp8(case: Case, tokens: int, phase: str) -> Tile:
    """Of `gemm_quant.fp8_matmul`; w8a8 prompts sum 128 columns at a time (`gemm_square`)."""
    if phase == DECODE:
        return fixed_stream(case.N, tokens, 1)
    if case.Q:
        shape = (64, 64 if tokens <= 64 else 128, 128, 4, 4)
        many = CODES if on_hopper() else square_tile((128, 128, 128, 8, 3))
        return square_tile(shape) if tokens <= 256 else many
    if tokens > FEW:  # of a widened weight, or else by `generic_tile`
        return NUMBERS if on_hopper() else square_tile((128, 128, 64, 8, 3))
    return _plain((64, 64, 64, 4, 3) if tokens <= 64 else (128, 128, 64, 8, 3), 1)


def fixed_nvfp4(case: Case, tokens: int, phase: str) -> Tile:
    """Of `gemm_quant.nvfp4_matmul`."""
    if phase == DECODE:
        splits = 4 if case.K >= 2048 and case.N < WIDE else 2 if case.K >= 1024 else 1
        return _plain((16 if tokens <= 16 else 32, 64, 128, 4, 3), splits)
    return _plain((64, 64, 64, 4, 3) if tokens <= 64 else (128, 128, 64, 8, 3), 1)


def _plain(shape: tuple[int, int, int, int, int], splits: int) -> Tile:
    """(BLOCK_T, BLOCK_N, BLOCK_K, num_warps, num_stages), read through pointers."""
    t, n, k, warps, stages = shape
    tile = Tile(BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return tile.but(SPLITS=splits, GROUP=8)
