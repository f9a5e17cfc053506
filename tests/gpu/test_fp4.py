"""FP8 and NVFP4 bytes on the device: codes, scales and fused quantisers, to the bit."""

from collections.abc import Callable

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.kernels.fp4 import random_fp8
from nemotriton.kernels.op import Case, use_tile
from nemotriton.kernels.rms_norm import row_default
from tests.interpreter import test_fp4 as checks


@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_encoders(name: str, cuda: torch.device) -> None:
    checks.check_encoder(name, cuda)


def test_decoders_and_reciprocal(cuda: torch.device) -> None:
    checks.check_decoders(cuda)
    checks.check_reciprocal(cuda)


@pytest.mark.parametrize("block_k", [16, 64])
def test_every_scale_byte_times_every_code(block_k: int, cuda: torch.device) -> None:
    checks.check_every_scale_and_code(block_k, cuda)
    checks.check_every_fp8_byte(block_k, cuda)


@pytest.mark.parametrize("g", checks.GLOBAL_SCALES)
def test_quantiser(g: float, cuda: torch.device) -> None:
    checks.check_quantiser(g, cuda)


def rows(T: int, D: int, dtype: torch.dtype, cuda: torch.device, seed: int) -> torch.Tensor:
    rng = torch.Generator(cuda).manual_seed(seed)
    size = torch.exp(torch.randn(T, D // 16, device=cuda, generator=rng))
    x = torch.randn(T, D, device=cuda, generator=rng) * size.repeat_interleave(16, 1)
    return x.to(dtype)


def same_bytes(got: object, want: object) -> None:
    got, want = (list(v) if isinstance(v, tuple) else [v] for v in (got, want))
    for a, b in zip(got, want, strict=True):
        a, b = (v.view(torch.uint8) if v.dtype.itemsize == 1 else v for v in (a, b))
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_fused_bytes_are_those_of_the_pair(
    scheme: str, dtype: torch.dtype, cuda: torch.device
) -> None:
    """In one tile: a sum of squares in another order may end in another last bit."""
    T, D, G = 300, 4096, 8
    x, other = (rows(T, D, dtype, cuda, seed) for seed in (1, 2))
    weight = torch.linspace(0.5, 2, D, device=cuda).to(dtype)
    scale = torch.tensor(2e-3, device=cuda)
    quantise: Callable = getattr(K, f"quantize_{scheme}")

    with (
        use_tile("add_rms_norm", row_default(Case(D=D), T)),
        use_tile(f"add_rms_norm_{scheme}", row_default(Case(D=D), T)),
    ):
        normed, total = K.add_rms_norm(x, other, weight)
        got = getattr(K, f"add_rms_norm_{scheme}")(x, other, weight, scale)
    want = quantise(normed, scale)
    same_bytes(got, (*want, total) if scheme == "nvfp4" else (want, total))

    with (
        use_tile("gated_rms_norm", row_default(Case(D=D // G), T)),
        use_tile(f"gated_rms_norm_{scheme}", row_default(Case(D=D // G), T)),
    ):
        normed = K.gated_rms_norm(x, other, weight, 1e-5, G)
        got = getattr(K, f"gated_rms_norm_{scheme}")(x, other, weight, scale, 1e-5, G)
    same_bytes(got, quantise(normed, scale))

    h = torch.relu(x.float()).square().to(dtype)
    same_bytes(getattr(K, f"relu2_{scheme}")(x, scale), quantise(h, scale))


@pytest.mark.parametrize("T", [1, 17, 200, 1100])
def test_products_of_codes_given_and_of_codes_made(T: int, cuda: torch.device) -> None:
    rng = torch.Generator(cuda).manual_seed(T)
    x, weight = rows(T, 4096, torch.bfloat16, cuda, T), random_fp8((5376, 4096), cuda, rng)
    scale, x_scale = torch.tensor(0.01, device=cuda), torch.tensor(2e-3, device=cuda)
    want = K.fp8_matmul(x, weight, scale, x_scale)
    codes = K.quantize_fp8(x, x_scale)
    assert torch.equal(K.fp8_matmul(codes, weight, scale, x_scale, out_dtype=x.dtype), want)
