"""Block-scaled products at their tiles' edges: scales in tiles, K in parts, more columns than K."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.kernels.fp4 import nvfp4_codes_ref
from nemotriton.kernels.gemm_scaled import SCALED_MATMUL
from nemotriton.kernels.op import Case, Tile, use_tile
from nemotriton.kernels.scale_tiles import quantize_for_tiles, tile_bytes, unswizzle_scales
from tests.conftest import Poison


def tile(t: int, k: int, splits: int = 1) -> Tile:
    blocks = Tile(BLOCK_T=t, BLOCK_N=128, BLOCK_K=k, num_warps=4, num_stages=2)
    return blocks.but(SPLITS=splits, GROUP=8)


@pytest.mark.parametrize(
    "N,K,T,blocks",
    [
        (130, 192, 3, tile(128, 64)),  # x's scales in tiles, too
        (16, 80, 20, tile(128, 256)),  # a step wider than K
        (48, 640, 5, tile(16, 128, splits=2)),  # parts of K: five steps in two parts
    ],
)
def test_edges(N: int, K: int, T: int, blocks: Tile, poison: Poison) -> None:
    case, cpu = Case(N=N, K=K), torch.device("cpu")
    with use_tile("scaled_matmul", blocks):
        verdict = parity.check(SCALED_MATMUL, case, T, cpu, torch.bfloat16, seed=3)
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize("tiled", [True, False])
def test_quantised_rows(tiled: bool, poison: Poison) -> None:
    """The twin's bytes; in tiles those of rows and columns that are there."""
    rng, (T, D) = torch.Generator().manual_seed(0), (131, 80)
    x = (torch.randn(T, D, generator=rng) * torch.randn(T, 1, generator=rng).exp()).bfloat16()
    scale = torch.tensor(4 / 2688)
    codes, scales = quantize_for_tiles(x, scale, tiled)
    if tiled:
        assert scales.shape == (tile_bytes(T, D),)
        scales = unswizzle_scales(scales, T, D // 16)
    want, wanted = nvfp4_codes_ref(x, scale)
    assert torch.equal(codes, want)
    assert torch.equal(scales.view(torch.uint8), wanted.view(torch.uint8))
