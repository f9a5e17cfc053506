"""Linear layers: the twin's arithmetic, refusals, and what the compiler makes of fp32 products."""

import os

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.gemm import MATMUL, matmul, matmul_ref
from nemotriton.kernels.op import Case, compile_only, use_tile
from nemotriton.model.config import ModelConfig

X, W = torch.randn(5, 12).double(), torch.randn(7, 12).double()
BIAS, RESIDUAL = torch.randn(7).double(), torch.randn(5, 7).double()


def test_twin_is_linear_with_an_epilogue() -> None:
    y = torch.nn.functional.linear(X, W, BIAS)
    torch.testing.assert_close(matmul_ref(X, W, BIAS), y)
    torch.testing.assert_close(matmul_ref(X, W, BIAS, "relu2"), y.clamp(min=0) ** 2)
    torch.testing.assert_close(matmul_ref(X, W, BIAS, "residual", RESIDUAL), y + RESIDUAL)


def test_twin_rounds_once_and_to_the_dtype_asked_for() -> None:
    x, w, r = X.bfloat16(), W.bfloat16(), RESIDUAL.bfloat16()
    y = x.float() @ w.float().T
    assert torch.equal(matmul_ref(x, w, epilogue="residual", residual=r), (y + r).bfloat16())
    assert torch.equal(matmul_ref(x, w, out_dtype=torch.float32), y)
    assert torch.equal(matmul_ref(x, W.float(), out_dtype=torch.float32), x.float() @ W.float().T)


def test_twin_is_differentiable() -> None:
    inputs = [t.clone().requires_grad_() for t in (X, W, BIAS, RESIDUAL)]
    assert torch.autograd.gradcheck(lambda x, w, b, r: matmul_ref(x, w, b, "residual", r), inputs)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": torch.zeros(2, 5, 12)}, "x must be"),
        ({"weight": torch.zeros(7, 11)}, "does not match x of width 12"),
        ({"weight": torch.zeros(12, 7).T}, "unit stride"),
        ({"x": torch.zeros(5, 12).half(), "weight": torch.zeros(7, 12).bfloat16()}, "one dtype"),
        ({"bias": torch.zeros(6)}, "bias must be"),
        ({"epilogue": "gelu"}, "'gelu' without a residual"),
        ({"epilogue": "residual"}, "'residual' without"),
        ({"residual": torch.zeros(5, 7)}, "'none' with a residual"),
        ({"epilogue": "residual", "residual": torch.zeros(5, 8)}, "residual must be"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    args = {"x": torch.zeros(5, 12), "weight": torch.zeros(7, 12)} | change
    with pytest.raises(UnsupportedError, match=message):
        matmul.triton(**args)


def test_every_matrix_of_super_is_a_case_once() -> None:
    cases = MATMUL.cases(ModelConfig.preset("super-120b"))
    sizes = {(c.N, c.K): c.ieee for c in cases}
    assert len(sizes) == len(cases)
    latent = {(1024, 4096), (4096, 1024)}
    shared = {(5376, 4096), (4096, 5376)}
    attention = {(4608, 4096), (4096, 4096)}  # q, k and v in one
    assert sizes.keys() == latent | shared | attention | {
        (18560, 4096), (4096, 8192), (131072, 4096), (512, 4096),
    }  # fmt: skip
    assert [size for size, ieee in sizes.items() if ieee] == [(512, 4096)]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("T", [1, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp32_products_stay_fp32(arch: int, T: int, dtype: torch.dtype) -> None:
    """No tile of the router's product may reach a tensor core in tf32 (Triton 3.6 and 3.7 do so
    on sm_100 from 64 rows on, whatever precision is asked for)."""
    case = Case(N=512, K=4096, ieee=1)
    x = torch.empty(T, 4096, dtype=dtype, device="meta")
    w = torch.empty(512, 4096, device="meta")
    widest = max(MATMUL.tiles(case), key=lambda t: (t["BLOCK_T"], t["BLOCK_N"], t["BLOCK_K"]))
    for tile in (MATMUL.default(case, T), widest):
        with compile_only(arch) as done, use_tile("matmul", tile):
            matmul.triton(x, w, out_dtype=torch.float32)
        for compiled in done:
            assert "tf32" not in compiled.kernel.asm["ptx"]
