"""The invariant mode of the ops: a row is summed in one order, whatever stands beside it.

A kernel sums a row of its output in an order that its tile decides: how K is split, how wide a step
is, whether the tensor core is fed by warps (mma.sync) or by groups of them (wgmma). Tiles are
chosen by the number of tokens, so a token's last bits depend on its neighbours. Inside
`fixed_order(phase)` they do not: of an op's tiles only those are taken that sum in the order of one
fixed tile, from the tune cache too, and what else they say (rows a block, stages, warps that share
no sum) may still follow the number of tokens.

There is one order for generated tokens, "decode", and one for prompts, "prefill": few and many rows
are best summed differently, and no step holds both (see `Runner.run`). PyTorch's own products
depend on the number of rows, so the twins run a row at a time (`FixedOrder.twin`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nemotriton.errors import require

if TYPE_CHECKING:
    from nemotriton.kernels.op import Case, Tile

DECODE, PREFILL = "decode", "prefill"
TOKENS = {DECODE: 16, PREFILL: 2048}  # whose default tile is the fixed one of most ops
_PHASE: ContextVar[str | None] = ContextVar("phase of the invariant mode", default=None)


@contextlib.contextmanager
def fixed_order(phase: str | None) -> Iterator[None]:
    """Inside the block the bits of a row depend on that row alone; None is the normal mode.

    phase: "decode" or "prefill"; UnsupportedError for another."""
    require(phase in (None, DECODE, PREFILL), f"phase {phase!r}: use {DECODE!r} or {PREFILL!r}")
    token = _PHASE.set(phase)
    try:
        yield
    finally:
        _PHASE.reset(token)


def phase() -> str | None:
    """ "decode", "prefill", or None outside the invariant mode."""
    return _PHASE.get()


def _whole(tile: Tile) -> Any:
    return tile


@dataclass(frozen=True)
class FixedOrder:
    """What the invariant mode must know of an op.

    order: of a tile what decides in which order a row is summed; equal orders, equal bits. tile:
    (case, tokens, phase) -> the mode's tile, of one order for all tokens of a case and phase; None:
    the default of `TOKENS`, or that of the tokens at hand where its order is the same. blind: axes
    that say how rows fall to sequences, such as drafts, with the value that stands for all; they
    must not decide the order either. twin: the twin in this mode, where the plain one will not do.
    """

    order: Callable[[Tile], Any] = _whole
    tile: Callable[[Case, int, str], Tile] | None = None
    blind: Mapping[str, Any] = field(default_factory=dict)
    twin: Callable[..., Any] | None = None

    def choose(
        self,
        default: Callable[[Case, int], Tile],
        case: Case,
        tokens: int,
        phase: str | None,
        tuned: Tile | None,
    ) -> Tile:
        """The tile for a case and bucket of tokens; `tuned` is what the tune cache has for them."""
        if phase is None:
            return default(case, tokens) if tuned is None else tuned
        if self.tile is not None:
            own = self.tile(case, tokens, phase)
        else:
            own = default(type(case)(**{**case, **self.blind}), TOKENS[phase])
            at_hand = default(case, tokens)
            own = at_hand if self.order(at_hand) == self.order(own) else own
        if tuned is not None and self.order(tuned) == self.order(own):
            return tuned
        return own


WHOLE = FixedOrder()  # one tile
# of an op that sums nothing, or in integers, or in one thread: every tile gives the same bits
UNORDERED = FixedOrder(order=lambda tile: None)


def row_of(x: torch.Tensor, t: int) -> torch.Tensor:
    """Row t of x, copied: where it lies in memory must not matter either."""
    return x[t : t + 1].clone()


class ByRow:
    """A twin that is called for one row at a time.

    rows: by the name of an argument what picks row t of it, tensors [T, ...] by `row_of`; the first
    one has the T. None stays None, and other arguments are given as they are."""

    def __init__(
        self, twin: Callable[..., torch.Tensor], rows: Mapping[str, Callable[[Any, int], Any]]
    ) -> None:
        self.twin, self.rows = twin, rows
        self.signature = inspect.signature(twin)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self.signature.bind(*args, **kwargs).arguments
        count = given[next(iter(self.rows))].shape[0]
        found = []
        for t in range(count):
            picked = {k: p(given[k], t) for k, p in self.rows.items() if given.get(k) is not None}
            found.append(self.twin(**{**given, **picked}))
        return torch.cat(found) if found else self.twin(*args, **kwargs)


LINEAR_ROWS = {"x": row_of, "residual": row_of}


def per_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), elementwise, of x [T, ...]; in this mode every row is an array of its own.

    PyTorch's vector loops compute the last elements of an array by other instructions."""
    if phase() is None or x.ndim < 2 or x.shape[0] == 0:
        return function(x)
    return torch.stack([function(row.contiguous()) for row in x])
