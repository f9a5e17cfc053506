"""Products of e4m3 codes with the weights on the long side: odd sizes, parts of K, epilogues."""

import itertools

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.errors import UnsupportedError
from nemotriton.kernels import gemm_quant_tiles
from nemotriton.kernels.gemm_codes import codes_tile
from nemotriton.kernels.gemm_direct import direct_tile
from nemotriton.kernels.gemm_quant import FP8_MATMUL, random_fp8
from nemotriton.kernels.gemm_quant_tiles import generic_tile
from nemotriton.kernels.gemm_square import square_tile
from nemotriton.kernels.gemm_stream import stream_tile
from nemotriton.kernels.gemm_wide import wide_tile
from nemotriton.kernels.op import Case, use_tile
from tests.conftest import Poison
from tests.interpreter.test_parity import embed

CPU = torch.device("cpu")
SCALE, X_SCALE = torch.tensor(0.0137), torch.tensor(1.5e-3)


def inputs(N: int, depth: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(T)
    return torch.randn(T, depth, generator=rng), random_fp8((N, depth), CPU, rng)


@pytest.mark.parametrize("N,depth", [(80, 1040), (37, 80), (130, 336)])
@pytest.mark.parametrize("T", [0, 1, 19])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_codes_times_codes(
    N: int, depth: int, T: int, dtype: torch.dtype, splits: int, poison: Poison
) -> None:
    """What rounded rows give in 16 bits, for rows of x in a wider buffer of NaN."""
    x, w = inputs(N, depth, T)
    bias, residual = torch.linspace(-1, 1, N).to(dtype), torch.randn(T, N).to(dtype)
    x = embed(x.to(dtype)) if T else x.to(dtype)
    args = (w, SCALE, X_SCALE, bias, "residual", residual, torch.float32)
    with use_tile("fp8_matmul", codes_tile(16, 64, 128, 4, 1, splits)):
        y = K.fp8_matmul.triton(x, *args)
    with use_tile("fp8_matmul", generic_tile(Case(N=N, K=depth), 16)):
        want = K.fp8_matmul.triton(x, *args)
    assert y.shape == (T, N)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2])
def test_activation_comes_after_scale_and_parts(splits: int, poison: Poison) -> None:
    x, w = inputs(80, 336, 5)
    with use_tile("fp8_matmul", codes_tile(16, 64, 128, 4, 1, splits)):
        y = K.fp8_matmul.triton(x.bfloat16(), w, SCALE, X_SCALE, None, "relu2")
        plain = K.fp8_matmul.triton(x.bfloat16(), w, SCALE, X_SCALE, out_dtype=torch.float32)
    assert torch.equal(y, (plain.relu() ** 2).bfloat16())


def test_rows_do_not_depend_on_their_number(poison: Poison) -> None:
    x, w = inputs(80, 336, 40)
    x = x.bfloat16()
    few, many = codes_tile(16, 64, 128, 4, 1, 2), codes_tile(32, 128, 128, 4, 1, 2)
    with use_tile("fp8_matmul", many):
        want = K.fp8_matmul.triton(x, w, SCALE, X_SCALE)
    with use_tile("fp8_matmul", few):
        assert torch.equal(K.fp8_matmul.triton(x[:7], w, SCALE, X_SCALE), want[:7])
    order = K.fp8_matmul.spec.fixed.order
    assert order(few) == order(many) != order(few.but(SPLITS=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_falls_back_where_codes_cannot_be_multiplied(dtype: torch.dtype, poison: Poison) -> None:
    """fp32 products are exact; rows that start anywhere have no descriptor; w8a16 has no codes."""
    x, w = inputs(48, 336, 5)
    x, scale = x.to(dtype), X_SCALE if dtype == torch.bfloat16 else None
    if scale is not None:
        w = embed(w.view(torch.uint8)).view(w.dtype)
    tile = codes_tile(16, 64, 128, 4, 1, 2)
    with use_tile("fp8_matmul", tile):
        y = K.fp8_matmul.triton(x, w, SCALE, scale)
    plain = generic_tile(Case(N=48, K=336), 16)
    with use_tile("fp8_matmul", plain):
        assert torch.equal(y, K.fp8_matmul.triton(x, w, SCALE, scale))


@pytest.mark.parametrize("T,dtype", [(3, torch.float16), (19, torch.bfloat16)])
def test_x_may_come_as_codes(T: int, dtype: torch.dtype, poison: Poison) -> None:
    """By every form: the bits of x quantised on the way."""
    x, w = inputs(80, 1024, T)
    x = x.to(dtype)
    coded = embed(K.quantize_fp8(x, X_SCALE).view(torch.uint8)).view(torch.float8_e4m3fn)
    tight = K.quantize_fp8(x, X_SCALE)
    forms = [
        codes_tile(32, 64, 128, 4, 1, 2),
        square_tile((32, 64, 128, 4, 1)),
        direct_tile(32, 16, 4, 2),
        stream_tile(80, T, 1),
        wide_tile(32, 64, 128, 4, 1, 2),
        generic_tile(Case(N=80, K=1024), T),
    ]
    for tile in forms:
        with use_tile("fp8_matmul", tile):
            want = K.fp8_matmul.triton(x, w, SCALE, X_SCALE)
            for given in (tight, coded):
                y = K.fp8_matmul.triton(given, w, SCALE, X_SCALE, out_dtype=dtype)
                assert torch.equal(y, want), tile
    want = K.fp8_matmul.ref(x, w, SCALE, X_SCALE)
    assert torch.equal(K.fp8_matmul.ref(tight, w, SCALE, X_SCALE, out_dtype=dtype), want)


def test_codes_without_scale_or_dtype_are_refused() -> None:
    x, w = inputs(48, 64, 3)
    x = K.quantize_fp8(x, X_SCALE)
    for scale, dtype in ((None, torch.bfloat16), (X_SCALE, None)):
        with pytest.raises(UnsupportedError, match="x as e4m3 codes needs the input_scale"):
            K.fp8_matmul.triton(x, w, SCALE, scale, out_dtype=dtype)


@pytest.mark.parametrize("hopper", [True, False])
def test_defaults_on_hopper_alone(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For up to 256 rows whose activations are quantised, and in the space of a sweep."""
    monkeypatch.setattr(gemm_quant_tiles, "on_hopper", lambda: hopper)
    for N, depth in ((18560, 4096), (4096, 8192), (5376, 4096), (4096, 5376), (10304, 2688)):
        for tokens, quantised in itertools.product((1, 8, 16, 32, 64, 128, 256, 1024), (0, 1)):
            case = Case(N=N, K=depth, Q=quantised)
            tile = FP8_MATMUL.default(case, tokens)
            assert ("CODES" in tile) == (hopper and bool(quantised) and tokens <= 256)
            if "CODES" in tile:
                assert tile in FP8_MATMUL.tiles(case)
                assert FP8_MATMUL.suits(tile, tokens)
