"""Scalar functions that several kernels share, each a jit function beside its torch twin.

All take and return fp32 (the twins also fp64) and let NaN through, so that a sick value is seen
downstream instead of turning into a plausible one.
"""

import torch
import triton
import triton.language as tl

from nemotriton.kernels.fixed_order import per_row

# above this softplus(x) is x to the last bit of fp32, and exp would only come nearer to overflow
SOFTPLUS_LINEAR = tl.constexpr(20.0)
WORD = 2**32 - 1  # all bits of a random word


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
    linear = SOFTPLUS_LINEAR.value
    return per_row(lambda x: torch.nn.functional.softplus(x, threshold=linear), x)


@triton.jit
def silu(x):
    """x * sigmoid(x), in six instructions: 1 / (1 + e) as the square of a reciprocal root.

    Triton's own division costs as many again for denominators that 1 + e never takes, and the
    convolution of a prompt is bound by them. Within 4 ulp; below -88 it is a zero."""
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * r * r


def silu_ref(x: torch.Tensor) -> torch.Tensor:
    """Twin of `silu`."""
    return per_row(torch.nn.functional.silu, x)


@triton.jit
def relu2(x):
    """max(x, 0)^2, the activation of the MLPs and experts."""
    r = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return r * r


def relu2_ref(x: torch.Tensor) -> torch.Tensor:
    """Twin of `relu2`."""
    return torch.relu(x).square()


def philox_ref(
    seed: torch.Tensor,
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rounds: int = 10,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32: four random words (int64 in 0..2^32-1) of a 64-bit key and four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps as the 64-bit product must
        c0, c1, c2, c3 = (b >> 32 & WORD) ^ c1 ^ k0, b & WORD, (a >> 32 & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3
