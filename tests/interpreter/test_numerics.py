"""The shared scalar functions against their twins, over the whole range of fp32."""

import pytest
import torch
import triton
import triton.language as tl

from nemotriton.kernels import numerics
from nemotriton.kernels.numerics import relu2, silu, softplus

N = 4096


@triton.jit
def _softplus(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, softplus(tl.load(x_ptr + i)))


@triton.jit
def _silu(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, silu(tl.load(x_ptr + i)))


@triton.jit
def _relu2(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, relu2(tl.load(x_ptr + i)))


FUNCTIONS = {"softplus": _softplus, "silu": _silu, "relu2": _relu2}


def values() -> torch.Tensor:
    spread = torch.linspace(-90, 90, N - 1032)
    near = torch.linspace(19.9, 20.1, 512)
    tiny = torch.logspace(-30, 0, 256)
    special = torch.tensor([0.0, -0.0, 1e30, -1e30, float("inf"), 88.8, -88.8, 104.0])
    return torch.cat([spread, near, tiny, -tiny, special])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_matches_the_twin(name: str) -> None:
    x, y = values(), torch.full((N,), float("nan"))
    FUNCTIONS[name][(1,)](x, y, N=N)
    exact = getattr(numerics, f"{name}_ref")(x.double())
    finite = exact.abs() < 3e38
    error = (y[finite].double() - exact[finite]).abs()
    # a few ulp of the value itself, and for silu the rounding of the power's exponent -x log2(e),
    # which a GPU's exp has as well; below 3e-37 exp(-x) overflows and silu gives zero
    ulps = 1e-6 + (2**-24 * x[finite].abs().double() if name == "silu" else 0.0)
    assert bool((error <= ulps * exact[finite].abs() + 3e-37).all())
    assert torch.equal(y[~finite], exact[~finite].float())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays(name: str) -> None:
    x, y = torch.full((N,), float("nan")), torch.zeros(N)
    FUNCTIONS[name][(1,)](x, y, N=N)
    assert y.isnan().all()
    assert getattr(numerics, f"{name}_ref")(x).isnan().all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_twins_are_differentiable_where_they_bend(name: str) -> None:
    """At the seams, and far out, where a discarded branch must not send back NaN."""
    x = torch.tensor([-1e4, -30.0, 0.0, 19.999, 20.001, 1e4], dtype=torch.float64)
    x.requires_grad_()
    getattr(numerics, f"{name}_ref")(x).sum().backward()
    assert bool(x.grad.isfinite().all())
