"""The direct form of FP8 and packed NVFP4 products: tails of rows and tokens, epilogues, and what
it leaves to the streaming form."""

from collections.abc import Callable

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.kernels import gemm_packed, gemm_quant
from nemotriton.kernels.fp4 import nvfp4_values_ref, random_fp8, random_nvfp4
from nemotriton.kernels.gemm_direct import direct_tile
from nemotriton.kernels.hopper_pack import pack_hopper
from nemotriton.kernels.op import Tile, use_tile
from tests.conftest import Poison

CPU = torch.device("cpu")
# (BLOCK_T, BLOCK_N, GROUPS, warps, assembly): one step and several, one warp and several
TILES = [
    direct_tile(8, 16, 2, 2),
    direct_tile(16, 32, 2, 4, asm=False),
    direct_tile(32, 16, 4, 1),
    direct_tile(8, 32, 4, 2),
]
FORMATS = pytest.mark.parametrize("scheme", ["fp8", "packed"])
Call = Callable[..., torch.Tensor]


def product(
    scheme: str, T: int, N: int, depth: int, dtype: torch.dtype, skip: int = 0
) -> tuple[Call, torch.Tensor]:
    """The op with all but its epilogue, and the plain product; x: a slice of wider rows from the
    `skip`-th column on."""
    rng = torch.Generator().manual_seed(T + N)
    x = torch.randn(T, depth + 24, generator=rng).to(dtype)[:, skip : skip + depth]
    scale = torch.tensor(0.0137)
    if scheme == "fp8":
        w = random_fp8((N, depth), CPU, rng)
        want = (x.double() @ w.double().T) * scale.double()
        return lambda **more: K.fp8_matmul.triton(x, w, scale, **more), want
    codes, scales = random_nvfp4((N, depth), CPU, rng)
    words = pack_hopper(codes, scales)
    want = (x.double() @ nvfp4_values_ref(codes, scales).double().T) * scale.double()
    return lambda **more: K.packed_matmul.triton(x, words, N, scale, **more), want


def using(scheme: str, tile: Tile) -> object:
    return use_tile("fp8_matmul" if scheme == "fp8" else "packed_matmul", tile)


@FORMATS
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("T,dtype", [(3, torch.bfloat16), (19, torch.float16)])
def test_products(
    scheme: str, tile: Tile, T: int, dtype: torch.dtype, poison: Poison,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Values are exact in 16 bits and sums are fp32: only the order of summation is free."""
    for module in (gemm_quant, gemm_packed):
        monkeypatch.setattr(module, "_stream_tile", None, raising=False)  # no other form
        monkeypatch.setattr(module, "stream_tile", None, raising=False)
    call, want = product(scheme, T, 37, 512, dtype)
    with using(scheme, tile):
        y = call(out_dtype=torch.float32)
    assert float((y.double() - want).norm() / want.norm()) < 1e-6


@FORMATS
def test_scale_comes_before_bias_activation_and_residual(scheme: str, poison: Poison) -> None:
    call, plain = product(scheme, 5, 48, 512, torch.bfloat16)
    bias, residual = torch.linspace(-1, 1, 48).bfloat16(), torch.randn(5, 48).bfloat16()
    plain = plain + bias.double()
    with using(scheme, TILES[0]):
        squared = call(bias=bias, epilogue="relu2", out_dtype=torch.float32)
        summed = call(bias=bias, epilogue="residual", residual=residual, out_dtype=torch.float32)
    torch.testing.assert_close(squared.double(), plain.relu() ** 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed.double(), plain + residual.double(), rtol=1e-5, atol=1e-5)


@FORMATS
@pytest.mark.parametrize("depth,skip", [(400, 0), (512, 1)])
def test_other_widths_and_places_are_streamed(
    scheme: str, depth: int, skip: int, poison: Poison
) -> None:
    call, want = product(scheme, 3, 37, depth, torch.bfloat16, skip)
    with using(scheme, TILES[0]):
        y = call(out_dtype=torch.float32)
    assert float((y.double() - want).norm() / want.norm()) < 1e-6


def test_fp8_rows_off_the_16_byte_grid_are_streamed(poison: Poison) -> None:
    rng = torch.Generator().manual_seed(0)
    wide = random_fp8((24, 520), CPU, rng)
    x, one = torch.randn(5, 512, generator=rng).bfloat16(), torch.tensor(1.0)
    for w in (wide[:, 4:516], wide[:, :512].clone(), wide[:, 3:515]):
        with use_tile("fp8_matmul", TILES[0]):
            y = K.fp8_matmul.triton(x, w, one, out_dtype=torch.float32)
        torch.testing.assert_close(y, x.float() @ w.float().T, rtol=1e-5, atol=1e-5)
