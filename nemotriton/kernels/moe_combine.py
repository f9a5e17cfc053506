"""How the weighted rows of a token's experts become its y: which way, and the launch that ends it.

ordered   every (token, expert) pair stores its row, and a last launch sums a token's rows in one
          fixed order. The default, and the only way in the invariant mode: equal inputs give
          equal bits.
atomic    the down product adds its rows to one fp32 row a token by atomic adds, in whatever order
          its programs are through, and the last launch only rounds. The last bits then differ from
          call to call. The rows begin as zeros, which a launch of their own writes (`token_rows`).

NEMOTRITON_COMBINE=atomic in the environment, or `combining("atomic")`, asks for the second one.
Packed experts have it; blocks that are multiplied by `moe_packed_async` store their rows all the
same. It reads and writes less, and gains nothing: slower up to 8 tokens, beyond within 2 %.
"""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from nemotriton.errors import nearest, require
from nemotriton.kernels.fixed_order import DECODE, phase
from nemotriton.kernels.moe_packed import _packed_combine
from nemotriton.kernels.op import cdiv, launch, next_pow2

WAYS = ("ordered", "atomic")
COMBINE_PROGRAMS = 256  # so many add rows up, where columns suffice: that keeps the last one short
_WAY: ContextVar[str | None] = ContextVar("how experts' rows are combined", default=None)


@contextlib.contextmanager
def combining(way: str) -> Iterator[None]:
    """Inside the block rows are combined in this way, one of WAYS, whatever the environment says.
    What a graph captured before stays as it was captured."""
    token = _WAY.set(_known(way))
    try:
        yield
    finally:
        _WAY.reset(token)


def adds_atomically() -> bool:
    """Whether the down product shall add its rows by atomic adds; never in the invariant mode.

    UnsupportedError names a way that does not exist."""
    way = _WAY.get() or _known(os.environ.get("NEMOTRITON_COMBINE") or WAYS[0])
    return way == "atomic" and phase() is None


def _known(way: str) -> str:
    hint = nearest(way, WAYS) or " or ".join(WAYS)
    require(way in WAYS, f"experts' rows cannot be combined by {way!r}; use {hint}")
    return way


def token_rows(tokens: int, width: int, where: torch.device) -> torch.Tensor:
    """Zeros fp32 [tokens, width], for rows to be added to."""
    return torch.zeros((tokens, width), dtype=torch.float32, device=where)


def combine(
    parts: torch.Tensor, y: torch.Tensor, count: int, narrow: bool, in_turn: bool, pdl: bool
) -> None:
    """y [T, L] = the sums of every token's `count` rows of parts, one launch; one row is rounded.

    narrow (parts of many tokens, in y's dtype) and in_turn: one row after the other. Else how the
    sum is ordered follows from the phase, and outside the invariant mode from the tokens."""
    T, L = y.shape
    warps, block_r = 4, next_pow2(count)
    block_l = min(next_pow2(L), 128 if count > 32 else 256)
    if narrow:
        block_l, block_r = min(next_pow2(L), 512), 1
        warps = max(1, block_l // 128)
    if phase() == DECODE:  # the order of the sum depends on it
        block_l = min(block_l, 64)
    while phase() is None and T * cdiv(L, block_l) < COMBINE_PROGRAMS and block_l > 32:
        block_l //= 2
    if in_turn and not narrow:
        warps, block_r = max(1, block_l // 32), 1
    launch(
        _packed_combine, (T * cdiv(L, block_l),), parts, y, L, COUNT=count, BLOCK_R=block_r,
        BLOCK_L=block_l, EVEN=L % block_l == 0, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
