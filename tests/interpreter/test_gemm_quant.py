"""FP8 and NVFP4 products: widths no tile divides, NaN padding, exact references."""

from collections.abc import Callable

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.kernels.fp4 import nvfp4_values_ref, pack
from nemotriton.kernels.gemm_quant import random_fp8, random_nvfp4
from nemotriton.kernels.gemm_square import square_tile
from nemotriton.kernels.op import Tile, use_tile
from nemotriton.kernels.quantize import round_rows
from tests.conftest import Poison
from tests.interpreter.test_parity import embed

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
TILE = Tile(BLOCK_T=16, BLOCK_N=256, BLOCK_K=128, SPLITS=1, GROUP=8, num_warps=4, num_stages=2)
STREAM = Tile(STREAM=True, BLOCK_T=8, BLOCK_N=64, BLOCK_K=32, num_warps=2, num_stages=1)
STREAM = STREAM.but(ROTATE=True, AHEAD=2, EARLY=False)
SQUARE = square_tile((16, 32, 128, 4, 1), halves=2).but(GROUP=2)
SCHEMES = pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])


def weight(scheme: str, N: int, depth: int, seed: int = 0) -> tuple[list, torch.Tensor]:
    """The op's weight arguments without their scale, and the values they stand for in fp32."""
    rng = torch.Generator().manual_seed(seed)
    if scheme == "fp8":
        w = random_fp8((N, depth), CPU, rng)
        return [w], w.float()
    codes, scales = random_nvfp4((N, depth), CPU, rng)
    return [codes, scales], nvfp4_values_ref(codes, scales)


def matmul(scheme: str) -> Callable[..., torch.Tensor]:
    return getattr(K, f"{scheme}_matmul").triton


def rows(T: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(T, depth, generator=torch.Generator().manual_seed(T)).to(dtype)


@pytest.mark.parametrize(
    "N,depth",
    [(1856, 80), (80, 1856), (672, 336), (336, 672), (928, 80), (80, 928), (37, 16)],
)
@SCHEMES
def test_widths_that_no_tile_divides(scheme: str, N: int, depth: int, poison: Poison) -> None:
    """Weights, scales and x lie in wider buffers of NaN; every product is right."""
    stored, values = weight(scheme, N, depth)
    # embed fills integers with 0x7f: NaN as a scale or e4m3, and the largest code
    stored = [embed(w.view(torch.uint8)).view(w.dtype) for w in stored]
    for T, dtype, limit in ((3, torch.bfloat16, 4e-3), (17, torch.float32, 1e-5)):
        x, scale = embed(rows(T, depth, dtype)), torch.tensor(0.0137)
        with use_tile(f"{scheme}_matmul", TILE):
            y = matmul(scheme)(x, *stored, scale)
        want = (x.double() @ values.double().T) * scale.double()
        assert y.dtype == dtype
        assert float((y.double() - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@SCHEMES
def test_equals_a_16_bit_model_of_the_decoded_weights(scheme: str, dtype: torch.dtype) -> None:
    """The decoded values are exact in 16 bits: same products, same order, same bits."""
    stored, values = weight(scheme, 48, 336)
    x, scale = rows(5, 336, dtype), torch.tensor(0.0137)
    assert torch.equal(values.to(dtype).float(), values)
    plain = TILE.but(SWAP=False)
    with use_tile("matmul", plain), use_tile(f"{scheme}_matmul", TILE):
        y = matmul(scheme)(x, *stored, scale, out_dtype=torch.float32)
        want = K.matmul.triton(x, values.to(dtype), out_dtype=torch.float32) * scale
    assert torch.equal(y, want)


@SCHEMES
def test_quantised_activations_are_rounded_rows(scheme: str, poison: Poison) -> None:
    """w8a8 and w4a4 are the weight-only product of what x's codes stand for."""
    stored, _ = weight(scheme, 48, 336)
    x, scale, x_scale = rows(5, 336, torch.bfloat16), torch.tensor(0.0137), torch.tensor(1.5e-3)
    y = matmul(scheme)(x, *stored, scale, x_scale, out_dtype=torch.float32)
    rounded = round_rows(x, x_scale, scheme == "nvfp4")
    want = matmul(scheme)(rounded, *stored, scale * x_scale, out_dtype=torch.float32)
    assert torch.equal(y, want)
    plain = matmul(scheme)(x, *stored, scale, out_dtype=torch.float32)
    assert not torch.equal(y, plain)


@pytest.mark.parametrize("splits", [1, 4])
@SCHEMES
def test_fp16_does_not_overflow_before_the_scale(scheme: str, splits: int, poison: Poison) -> None:
    """The plain sum is 200 times the largest fp16 number."""
    N, depth, scale = 16, 4096, torch.tensor(2.0**-10)
    if scheme == "fp8":
        stored, largest = [torch.full((N, depth), 448.0).to(E4M3)], 448.0
    else:
        codes = pack(torch.full((N, depth), 7, dtype=torch.uint8))
        scales = torch.full((N, depth // 16), 448.0).to(E4M3)
        stored, largest = [codes, scales], 2688.0
    x = torch.ones(2, depth, dtype=torch.float16)
    with use_tile(f"{scheme}_matmul", TILE.but(SPLITS=splits)):
        y = matmul(scheme)(x, *stored, scale)
    assert torch.equal(y, torch.full((2, N), largest * depth * 2.0**-10).half())


@pytest.mark.parametrize("splits", [1, 3])
@SCHEMES
def test_scale_comes_before_bias_activation_and_residual(
    scheme: str, splits: int, poison: Poison
) -> None:
    stored, values = weight(scheme, 40, 400)
    x, scale = rows(3, 400, torch.float32), torch.tensor(0.01)
    bias, residual = torch.linspace(-1, 1, 40), torch.randn(3, 40)
    plain = (x.double() @ values.double().T) * scale.double() + bias.double()
    with use_tile(f"{scheme}_matmul", TILE.but(SPLITS=splits)):
        squared = matmul(scheme)(x, *stored, scale, None, bias, "relu2")
        summed = matmul(scheme)(x, *stored, scale, None, bias, "residual", residual)
    torch.testing.assert_close(squared.double(), plain.relu() ** 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed.double(), plain + residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("N,depth", [(80, 1856), (672, 336), (37, 16)])
@pytest.mark.parametrize("T", [1, 8, 19])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_streamed_fp8(N: int, depth: int, T: int, dtype: torch.dtype, poison: Poison) -> None:
    """As plain as the product of the decoded weights, streamed by the same tile."""
    (w,), values = weight("fp8", N, depth)
    w = embed(w.view(torch.uint8)).view(w.dtype)
    x, scale = embed(rows(T, depth, dtype)), torch.tensor(0.0137)
    with use_tile("fp8_matmul", STREAM), use_tile("matmul", STREAM):
        y = K.fp8_matmul.triton(x, w, scale, out_dtype=torch.float32)
        want = K.matmul.triton(x, values.to(dtype), out_dtype=torch.float32) * scale
    assert torch.equal(y, want)


@pytest.mark.parametrize("N,depth", [(80, 1856), (672, 336), (33, 16)])
@pytest.mark.parametrize("T", [1, 19])
def test_fp8_times_fp8(N: int, depth: int, T: int, poison: Poison) -> None:
    """e4m3 codes of x straight into the product: what rounded rows give in 16 bits."""
    (w,), _ = weight("fp8", N, depth)
    x, scale, x_scale = rows(T, depth, torch.bfloat16), torch.tensor(0.0137), torch.tensor(1.5e-3)
    bias, residual = torch.linspace(-1, 1, N).bfloat16(), torch.randn(T, N).bfloat16()
    args = (w, scale, x_scale, bias, "residual", residual, torch.float32)
    with use_tile("fp8_matmul", SQUARE):
        y = K.fp8_matmul.triton(x, *args)
    with use_tile("fp8_matmul", TILE):
        want = K.fp8_matmul.triton(x, *args)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


def test_fp8_rows_off_the_16_byte_grid_take_the_other_form(poison: Poison) -> None:
    (w,), values = weight("fp8", 24, 48)
    w = embed(w.view(torch.uint8)).view(w.dtype)  # rows at odd addresses
    x, one = rows(5, 48, torch.bfloat16), torch.tensor(1.0)
    with use_tile("fp8_matmul", SQUARE):
        y = K.fp8_matmul.triton(x, w, one, one, out_dtype=torch.float32)
    want = round_rows(x, one, False).float() @ values.T
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
