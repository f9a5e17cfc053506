"""Dense NVFP4 on packed words: every form, widths that no tile divides, epilogues."""

import pytest
import torch

from nemotriton.kernels.fp4 import nvfp4_values_ref, random_nvfp4
from nemotriton.kernels.gemm_packed import packed_matmul
from nemotriton.kernels.hopper_pack import pack_hopper
from nemotriton.kernels.op import Tile, use_tile
from tests.conftest import Poison
from tests.interpreter.test_parity import embed

CPU = torch.device("cpu")
STREAM = Tile(STREAM=True, BLOCK_T=8, BLOCK_N=64, num_warps=2, num_stages=1, ASM=True)
STREAM = STREAM.but(ROTATE=True, AHEAD=2, EARLY=False)
MANY = Tile(BLOCK_T=16, BLOCK_N=128, BLOCK_K=128, GROUP=2, SPLITS=1, ASM=True, num_warps=4)
MANY = MANY.but(num_stages=1)
FORMS = {
    "stream": STREAM,
    "four-warps": STREAM.but(num_warps=4, BLOCK_N=128),
    "one-warp": STREAM.but(num_warps=1, BLOCK_N=16, BLOCK_T=16),
    "many": MANY,
    "many-64": MANY.but(BLOCK_K=64, BLOCK_N=64),
    "split": MANY.but(SPLITS=3),
}


def arguments(T: int, N: int, K: int, dtype: torch.dtype) -> tuple[dict, torch.Tensor]:
    """The op's arguments, x a slice of wider rows, and the plain product in fp64."""
    rng = torch.Generator().manual_seed(T)
    codes, scales = random_nvfp4((N, K), CPU, rng)
    x, scale = torch.randn(T, K, generator=rng).to(dtype), torch.tensor(0.0137)
    want = (x.double() @ nvfp4_values_ref(codes, scales).double().T) * scale.double()
    words = pack_hopper(codes, scales)
    return {"x": embed(x), "words": words, "rows": N, "global_scale": scale}, want


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("N,K", [(37, 80), (160, 336)])
@pytest.mark.parametrize("T,dtype", [(3, torch.bfloat16), (19, torch.float16)])
def test_every_form(form: str, N: int, K: int, T: int, dtype: torch.dtype, poison: Poison) -> None:
    """Values are exact in 16 bits and sums are fp32: only the order of summation is free."""
    args, want = arguments(T, N, K, dtype)
    with use_tile("packed_matmul", FORMS[form]):
        y = packed_matmul.triton(**args, out_dtype=torch.float32)
    assert float((y.double() - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("form", ["stream", "many", "split"])
def test_scale_comes_before_bias_activation_and_residual(form: str, poison: Poison) -> None:
    args, plain = arguments(5, 48, 400, torch.bfloat16)
    args |= {"bias": torch.linspace(-1, 1, 48).bfloat16(), "out_dtype": torch.float32}
    plain = plain + args["bias"].double()
    residual = torch.randn(5, 48).bfloat16()
    with use_tile("packed_matmul", FORMS[form]):
        squared = packed_matmul.triton(**args, epilogue="relu2")
        summed = packed_matmul.triton(**args, epilogue="residual", residual=residual)
    torch.testing.assert_close(squared.double(), plain.relu() ** 2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed.double(), plain + residual.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_how_many_there_are(form: str) -> None:
    args, _ = arguments(20, 48, 300 // 16 * 16, torch.bfloat16)
    with use_tile("packed_matmul", FORMS[form]):
        every = packed_matmul.triton(**args, out_dtype=torch.float32)
        for rows in (slice(0, 1), slice(4, 20)):
            part = packed_matmul.triton(**args | {"x": args["x"][rows]}, out_dtype=torch.float32)
            assert torch.equal(part, every[rows])
