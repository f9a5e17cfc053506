"""The fused quantisers against the kernels they replace, byte for byte."""

from collections.abc import Callable

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.kernels.fp4 import nvfp4_values_ref
from nemotriton.kernels.quantize import round_rows
from tests.conftest import Poison

SCALE = torch.tensor(2e-3)
QUANTISERS = {"nvfp4": K.quantize_nvfp4, "fp8": K.quantize_fp8}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows(T: int, D: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Blocks of 16 of different sizes; one of zeros, one too large for the scale."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.exp(2 * torch.randn(T, D // 16, generator=rng))
    size[0, 0], size[-1, -1] = 0, 2e3
    x = torch.randn(T, D, generator=rng) * size.repeat_interleave(16, 1)
    return x.to(dtype)


def same_bytes(got: object, want: object) -> None:
    got, want = (list(v) if isinstance(v, tuple) else [v] for v in (got, want))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        a, b = (v.view(torch.uint8) if v.dtype.itemsize == 1 else v for v in (a, b))
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", QUANTISERS)
def test_add_rms_norm(scheme: str, dtype: torch.dtype, poison: Poison) -> None:
    x, residual = rows(3, 336, dtype, 1), rows(3, 336, dtype, 2)
    weight = torch.linspace(0.5, 2, 336).to(dtype)
    fused: Callable = getattr(K, f"add_rms_norm_{scheme}")
    normed, total = K.add_rms_norm(x, residual, weight, 1e-5)
    want = QUANTISERS[scheme](normed, SCALE)
    want = (*want, total) if scheme == "nvfp4" else (want, total)
    same_bytes(fused(x, residual, weight, SCALE, 1e-5), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", QUANTISERS)
def test_gated_rms_norm(scheme: str, dtype: torch.dtype, poison: Poison) -> None:
    x, z = rows(3, 144, dtype, 1), rows(3, 144, dtype, 2)
    weight = torch.linspace(0.5, 2, 144).to(dtype)
    fused: Callable = getattr(K, f"gated_rms_norm_{scheme}")
    want = QUANTISERS[scheme](K.gated_rms_norm(x, z, weight, 1e-5, 3), SCALE)
    same_bytes(fused(x, z, weight, SCALE, 1e-5, 3), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", QUANTISERS)
def test_relu2(scheme: str, dtype: torch.dtype, poison: Poison) -> None:
    """The pair is a product with the relu^2 epilogue, rounded to x's dtype, and the quantiser."""
    x = rows(3, 80, dtype, 1)
    fused: Callable = getattr(K, f"relu2_{scheme}")
    h = K.matmul(x, torch.eye(80).to(dtype), epilogue="relu2")
    same_bytes(fused(x, SCALE), QUANTISERS[scheme](h, SCALE))


@pytest.mark.parametrize("scheme", QUANTISERS)
def test_rounded_rows_are_what_the_codes_stand_for(scheme: str, poison: Poison) -> None:
    x = rows(4, 48, torch.bfloat16, 1)
    got = round_rows(x, SCALE, scheme == "nvfp4")
    if scheme == "nvfp4":
        want = nvfp4_values_ref(*K.quantize_nvfp4(x, SCALE))
    else:
        want = K.quantize_fp8(x, SCALE).float()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.float(), want)


@pytest.mark.parametrize("scheme", QUANTISERS)
def test_rounded_rows_of_pairs_take_their_experts_scale(scheme: str, poison: Poison) -> None:
    x = rows(3, 32, torch.float32, 1)
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    routing = K.route_experts_ref(logits, None, 2)
    scales = torch.tensor([1.0, 1e-2, 1e-3, 0.3, 5.0])
    got = round_rows(x, scales, scheme == "nvfp4", routing)
    for i, pair in enumerate(routing.order.tolist()):
        t, j = divmod(pair, 2)
        alone = round_rows(x[t : t + 1], scales[routing.ids[t, j]], scheme == "nvfp4")
        assert torch.equal(got[i : i + 1], alone)
