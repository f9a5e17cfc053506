"""Where two ways of computing the same tokens part: the layer, then the op.

Every layer is run from the reference's own input, so errors of layers before it do not count; the
first whose error is above its bound (`compare`) is where the fault is. There one op at a time is
swapped for its twin: the one whose swap brings the layer back within its bound is named.

Routing is compared on the same input, expert by expert: where a token's set of experts differs
everything behind it does, so such tokens are counted and then left out of the rest of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nemotriton.audit.compare import ROUNDINGS, Distance, distance, floor, nudged, row_error, terms
from nemotriton.audit.report import table
from nemotriton.audit.walk import TWINS, Entry, Impl, Passed, Walk
from nemotriton.kernels.op import OPS, counting_calls

_NEAR_TIES = 256  # tokens, among which one set of experts may differ by a near tie


@dataclass(frozen=True, slots=True)
class Check:
    """One boundary from the same input: its error and bound (of a router also in sets)."""

    boundary: str
    error: float
    bound: float

    @property
    def excess(self) -> float:
        """Error over bound; above 1 is a fault."""
        return self.error / self.bound


@dataclass(frozen=True)
class Layer:
    """What is told of a layer: distances at its end when all runs on, and its own checks.

    sets: tokens whose experts differ when all runs on; own_sets: from the same input."""

    index: int
    kind: str
    apart: Distance
    sets: int | None
    own_sets: int | None
    checks: list[Check]

    @property
    def worst(self) -> Check:
        """The check with the largest excess."""
        return max(self.checks, key=lambda c: c.excess)

    @property
    def beyond(self) -> bool:
        """Whether one is above its bound."""
        return self.worst.excess > 1


@dataclass
class Culprit:
    """The first layer beyond its bound, the boundary where that shows first, and the ops named.

    tried: the layer's largest excess with this op on its twin."""

    layer: int
    kind: str
    boundary: str
    ops: list[str]
    tried: dict[str, float] = field(default_factory=dict)


class Audit:
    """A walk under `impl` against a reference: passes of every layer, then the head's."""

    def __init__(
        self, walk: Walk, impl: Impl, reference: Sequence[Passed], roundings: float = ROUNDINGS
    ) -> None:
        self.walk, self.impl, self.reference = walk, impl, reference
        self.roundings = roundings
        longest = max(terms(walk.model.config), len(walk.ids))
        self.floor = floor(walk.model.dtype, longest)
        self._bounds: dict[int, dict[str, float]] = {}

    def run(self, seen: Callable[[Layer], None] = lambda _: None) -> list[Layer]:
        """Every layer, in order; `seen` is told of each as it is there."""
        layers = []
        for index, passed in enumerate(self.walk.chain(self.impl)):
            layer = self._layer(index, passed)
            seen(layer)
            layers.append(layer)
        return layers

    def culprit(self, layers: Sequence[Layer]) -> Culprit | None:
        """The fault's layer and ops; None where no layer is beyond its bound."""
        first = next((layer for layer in layers if layer.beyond), None)
        if first is None:
            return None
        boundary = next(c.boundary for c in first.checks if c.excess > 1)
        found = Culprit(first.index, first.kind, boundary, [])
        with counting_calls() as called:
            self._checks(first.index, self.impl)
        left, swapped = list(called), set[str]()
        best = first.worst.excess
        while left and best > 1:
            tried = {op: self._excess(first.index, swapped | {op}) for op in left}
            found.tried = found.tried or tried
            op = min(tried, key=lambda name: tried[name])
            if tried[op] >= best:  # no twin helps
                break
            best = tried[op]
            swapped.add(op)
            found.ops.append(op)
            left.remove(op)
        if best > 1:  # twins are as wrong: it is not one of the kernels
            found.ops = []
        return found

    # ---- one layer ----------------------------------------------------------------------------

    def _layer(self, index: int, passed: Passed) -> Layer:
        want = self.reference[index]
        last = "logits" if index == self.walk.head else "mixer"
        checks, own_sets = self._checks(index, self.impl)
        sets = None
        if want.sets is not None and passed.sets is not None:
            sets = int((~_alike(passed.sets, want.sets)).sum())
        kind = "head" if last == "logits" else self.walk.model.config.kinds[index].word
        return Layer(index, kind, distance(passed.at[last], want.at[last]), sets, own_sets, checks)

    def _excess(self, index: int, swapped: Iterable[str]) -> float:
        """The layer's with twins in the places of these ops: what is joined stays joined."""
        with _twins_in_place(swapped):
            return max(check.excess for check in self._checks(index, self.impl)[0])

    def _checks(self, index: int, impl: Impl) -> tuple[list[Check], int | None]:
        """The layer from the reference's input, boundary by boundary; and its differing sets."""
        want = self.reference[index]
        got = self.walk.layer(index, want.entry, impl)
        bounds = self._bounds_of(index)
        rows: Tensor | None = None
        own_sets = None
        checks = []
        for name in got.at:
            if name not in want.at:
                continue
            if name == "router":
                check, own_sets = self._router(index, want, impl)
                checks.append(check)
                assert got.sets is not None
                assert want.sets is not None
                rows = _alike(got.sets, want.sets)
                continue
            error = row_error(got.at[name], want.at[name], rows)
            checks.append(Check(name, error, bounds[name]))
        return checks, own_sets

    def _router(self, index: int, want: Passed, impl: Impl) -> tuple[Check, int]:
        """The router on the reference's own normed input: fp32 on both sides."""
        sets, weights = self.walk.route(index, want.at["norm"], impl)
        assert want.sets is not None
        alike = _alike(sets, want.sets)
        differing = int((~alike).sum())
        bound = self._bounds_of(index)["router"]
        error = row_error(weights, want.at["router"], alike)
        allowed = len(alike) // _NEAR_TIES + 1
        if differing > allowed:
            error = max(error, bound * differing / allowed)
        return Check("router", error, bound), differing

    def _bounds_of(self, index: int) -> dict[str, float]:
        """What rounding may do to the layer, by boundary, measured on the twins."""
        if index in self._bounds:
            return self._bounds[index]
        entry = self.reference[index].entry
        eps = torch.finfo(self.walk.model.dtype).eps
        plain = self.walk.layer(index, entry, TWINS)
        delta = None if entry.delta is None else nudged(entry.delta, eps, 1)
        moved = self.walk.layer(index, Entry(delta, nudged(entry.residual, eps, 2)), TWINS)
        rows = None
        if plain.sets is not None and moved.sets is not None:
            rows = _alike(plain.sets, moved.sets)
        found = {
            name: self.floor + self.roundings * row_error(moved.at[name], plain.at[name], rows)
            for name in plain.at
        }
        if "router" in found:  # reads the very same input, in fp32
            found["router"] = floor(torch.float32, self.walk.model.config.width)
        self._bounds[index] = found
        return found


@contextmanager
def _twins_in_place(names: Iterable[str]) -> Iterator[None]:
    """Let the twins of these ops do the work of their kernels inside the block. Unlike under `use`
    the model calls the same ops as before, also where it joins what twins do one by one."""
    kept = [(op, op.triton, op.others) for op in map(OPS.__getitem__, names)]
    try:
        for op, _, others in kept:
            op.triton, op.others = op.ref, dict.fromkeys(others, op.ref)
        yield
    finally:
        for op, kernel, others in kept:
            op.triton, op.others = kernel, others


def _alike(a: Tensor, b: Tensor) -> Tensor:
    """bool [T]: tokens with the same set of experts."""
    return (a == b).all(-1)


def as_object(layers: Sequence[Layer], culprit: Culprit | None, tokens: int) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "tokens": tokens,
        "layers": [asdict(layer) | {"beyond": layer.beyond} for layer in layers],
        "culprit": None if culprit is None else asdict(culprit),
    }


def as_lines(layers: Sequence[Layer], culprit: Culprit | None) -> Iterable[str]:
    """The result as text."""
    head = ("layer", "kind", "rms ratio", "largest", "cosine", "sets!=", "own error", "bound", "")
    rows = []
    for layer in layers:
        worst, mark = layer.worst, ""
        if layer.beyond:
            first = culprit is not None and layer.index == culprit.layer
            mark = f"!! {worst.boundary}" + (" <- first" if first else "")
        cosine = f"{layer.apart.cosine:.6f}"
        numbers = (layer.apart.rms, layer.apart.largest, cosine, layer.sets)
        rows.append((layer.index, layer.kind, *numbers, worst.error, worst.bound, mark))
    yield from table(head, rows, left=2)
    if culprit is None:
        yield "no layer is beyond its bound"
        return
    yield f"layer {culprit.layer} ({culprit.kind}) is the first beyond its bound, at: " + (
        culprit.boundary
    )
    for op, excess in sorted(culprit.tried.items(), key=lambda item: item[1]):
        yield f"  {op} -> ref: {excess:.2g} of the bound"
    if culprit.ops:
        yield f"op: {', '.join(culprit.ops)}"
    else:
        yield "op: none; the twins are as far off, so look at the weights or at the model's code"
