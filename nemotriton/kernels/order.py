"""Floats and indices packed into integers that sort by (value, lowest index).

An IEEE float's bits, with the negative half mirrored, order like the float. Packed above an index
that counts down, they make keys that are never equal, so "the K best, ties to the lowest index" is
a plain maximum over int64 and comes out the same on every device, tile size and reduction order.
NaN sorts below -inf, and `NOTHING` below every key.
"""

import torch
import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**63))
LOWEST = tl.constexpr(-2139095041)  # order_bits(-inf)
LAST = tl.constexpr(2**31 - 1)  # the key's low half is LAST - index


def order_keys(values: torch.Tensor) -> torch.Tensor:
    """int64 keys [..., n] of float32 values [..., n], descending by (value, lowest index)."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: both zeros are one value
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    bits = torch.where(values.isnan(), -(2**31) + 1, bits)
    index = torch.arange(values.shape[-1], device=values.device)
    return (bits << 32) + (2**31 - 1 - index)


def top_indices(values: torch.Tensor, n: int) -> torch.Tensor:
    """Indices int64 [..., n] of the n largest float32 values, best first, ties to the lowest."""
    return order_keys(values).topk(n, -1).indices


@triton.jit
def order_bits(x):
    """int32 that orders like the float32 x; NaN is below -inf."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, -2147483647)


@triton.jit
def bits_value(bits):
    """The float32 of order_bits; -inf for anything below -inf's."""
    x = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    return tl.where(bits < LOWEST, float("-inf"), x)


@triton.jit
def order_key(x, index):
    """The twin's key of float32 x at `index`."""
    return (order_bits(x).to(tl.int64) << 32) - index + LAST
