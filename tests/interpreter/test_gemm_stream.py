"""The streaming, direct and square forms number by number: every e4m3 byte, and bits that repeat.

The checks take a device: the GPU tests run the same ones on compiled kernels."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.kernels.gemm_direct import direct_tile
from nemotriton.kernels.gemm_quant import FP8_MATMUL
from nemotriton.kernels.gemm_square import square_tile
from nemotriton.kernels.gemm_wide import wide_tile
from nemotriton.kernels.op import Case, Tile, use_tile

CPU = torch.device("cpu")
STREAM = Tile(STREAM=True, BLOCK_T=16, BLOCK_N=64, BLOCK_K=32, num_warps=2, num_stages=3)
STREAM = STREAM.but(ROTATE=True, AHEAD=2, EARLY=False)
GENERIC = Tile(BLOCK_T=64, BLOCK_N=64, BLOCK_K=64, SPLITS=1, GROUP=8, num_warps=4, num_stages=3)


def check_every_byte(tile: Tile, dtype: torch.dtype, where: torch.device) -> None:
    """One-hot rows pick single weights: every e4m3 number arrives as it is, but for NaN."""
    byte = torch.arange(256, dtype=torch.uint8).repeat(16)
    byte[byte & 0x7F == 0x7F] = 0
    weight = byte[torch.arange(64)[:, None] * 37 + torch.arange(64)[None, :] * 5]
    assert len(weight.unique()) == 254
    weight = weight.view(torch.float8_e4m3fn).to(where)
    one = torch.ones((), device=where)
    with use_tile("fp8_matmul", tile):
        y = K.fp8_matmul.triton(torch.eye(64, dtype=dtype, device=where), weight, one)
    assert torch.equal(y.float(), weight.float().T)


def check_sums_of_e4m3(where: torch.device, columns: int) -> None:
    """e4m3 times e4m3 with nothing but ones: sums of integers, exact up to 2^13 in 14 bits, and
    past that because each PARTIAL columns are added to the sum in fp32."""
    ones = torch.ones(20, columns, device=where)
    weight, one = (
        torch.ones(200, columns, device=where).to(torch.float8_e4m3fn),
        torch.ones((), device=where),
    )
    x = ones.bfloat16()
    for halves in (1, 2):
        tile = square_tile((64, 128, 128, 4, 3), halves)
        with use_tile("fp8_matmul", tile):
            y = K.fp8_matmul.triton(x, weight, one, one, out_dtype=torch.float32)
        assert torch.equal(y, torch.full_like(y, columns))


TILES = {
    "stream": STREAM,
    "generic": GENERIC,
    "direct": direct_tile(16, 16, 1, 1),
    "direct, plain": direct_tile(16, 16, 1, 1, asm=False),
    "wide": wide_tile(64, 64, 64, 4, 3, 1),
}


@pytest.mark.parametrize("form", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte(form: str, dtype: torch.dtype) -> None:
    check_every_byte(TILES[form], dtype, CPU)


def test_sums_of_e4m3() -> None:
    check_sums_of_e4m3(CPU, 400)


def test_defaults_are_among_the_tiles() -> None:
    """So that a sweep on any GPU measures the same space."""
    for case in (Case(N=18560, K=4096, Q=1), Case(N=4096, K=8192, Q=1)):
        for tokens in (2048, 8192):
            assert FP8_MATMUL.default(case, tokens) in FP8_MATMUL.tiles(case)
