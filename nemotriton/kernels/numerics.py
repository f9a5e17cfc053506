"""Scalar functions that several kernels share, each a jit function beside its torch twin.

All take and return fp32 (the twins also fp64) and let NaN through, so that a sick value is seen
downstream instead of turning into a plausible one.
"""

import torch
import triton
import triton.language as tl

# above this softplus(x) is x to the last bit of fp32, and exp would only come nearer to overflow
SOFTPLUS_LINEAR = tl.constexpr(20.0)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x itself above 20 (the convention of every Mamba kernel).

    Accurate to a few ulp also where exp(x) is small: the factor e / (u - 1) puts back what the sum
    1 + e lost (Goldberg 1991, theorem 4); without it steps of 1e-4 have three digits less."""
    e = tl.exp(tl.where(x > SOFTPLUS_LINEAR, 0.0, x))
    u = 1.0 + e
    lost = u == 1.0
    log1p = tl.where(lost, e, tl.log(u) * (e / tl.where(lost, 1.0, u - 1.0)))
    return tl.where(x > SOFTPLUS_LINEAR, x, log1p)


def softplus_ref(x: torch.Tensor) -> torch.Tensor:
    """Twin of `softplus`."""
    return torch.nn.functional.softplus(x, threshold=SOFTPLUS_LINEAR.value)


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * tl.sigmoid(x)


def silu_ref(x: torch.Tensor) -> torch.Tensor:
    """Twin of `silu`."""
    return torch.nn.functional.silu(x)


@triton.jit
def relu2(x):
    """max(x, 0)^2, the activation of the MLPs and experts."""
    r = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r


def relu2_ref(x: torch.Tensor) -> torch.Tensor:
    """Twin of `relu2`."""
    return torch.relu(x).square()
