"""A decode step of a fixed shape as work for the device alone: no host value, no new address.

The same ops as `Runner.run`, on `StepInputs`; what comes out stays in `StepMemory`. Each part may
be recorded once and replayed (see `graphs`), in order: "draft" only where the shape has drafts,
"commit" there and where states roll back by replay, a second "draft" (the block's caches) wherever
the model drafts at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemotriton.engine.batch import Batch, Span
from nemotriton.engine.sampler import choose
from nemotriton.kernels import verify_drafts

if TYPE_CHECKING:
    from nemotriton.engine.caches import Caches
    from nemotriton.engine.drafter import Drafter
    from nemotriton.engine.step_inputs import StepInputs, StepShape

_NO_TOKEN = -2  # no pick is this, so a draft that does not count is never accepted
_RULES = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")


class StepMemory:
    """What a step leaves behind, shared by all shapes of up to so many sequences and rows.

    found int64 [2 * rows]: the picks of a shape's rows, then the verdict's path; twice on the host,
    for a step may start before the one before it has been read. last int32 [sequences]: see
    `Verdict`. hidden [rows, D]: the trunk's. start [sequences, D]: what a sequence's next drafts
    start from. The latter two are made when first written, which must not be under capture.
    """

    def __init__(self, sequences: int, rows: int, device: torch.device) -> None:
        self.sequences, self.rows = sequences, rows
        pinned = device.type == "cuda"
        self.found = torch.zeros(2 * rows, dtype=torch.int64, device=device)
        shape = (2, 2 * rows)
        self.host = torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)
        self.last = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.hidden: Tensor = torch.empty(0)
        self.start: Tensor = torch.empty(0)

    def keep_hidden(self, hidden: Tensor) -> None:
        if not self.hidden.numel():
            self.hidden = hidden.new_zeros((self.rows, hidden.shape[1]))
        self.hidden[: hidden.shape[0]].copy_(hidden)

    def keep_start(self, start: Tensor) -> None:
        if not self.start.numel():
            self.start = start.new_zeros((self.sequences, start.shape[1]))
        self.start[: start.shape[0]].copy_(start)


@dataclass(slots=True)
class StaticStep:
    """The work of one shape, on inputs and memory that other shapes use too."""

    shape: StepShape
    model: Any  # runner.Model
    caches: Caches
    drafter: Drafter | None
    inputs: StepInputs
    memory: StepMemory
    device: torch.device
    batch: Batch = field(init=False)
    span: Span = field(init=False)
    _cu: dict[int, Tensor] = field(init=False)
    _parents: dict[int, Tensor | None] = field(init=False)
    _owner: Tensor = field(init=False)  # first row of each row's sequence

    def __post_init__(self) -> None:
        shape, device, inputs = self.shape, self.device, self.inputs
        S, R, each = shape.sequences, shape.rows, shape.each

        def whole(values: list[int]) -> Tensor | None:
            return torch.tensor(values * S, dtype=torch.int32, device=device) if values else None

        steps = torch.arange(S + 1, dtype=torch.int32, device=device)
        self._cu = {count: steps * count for count in range(1, each + 1)}
        drafter = self.drafter
        own: list[int] = []
        if drafter is not None and shape.drafts and not drafter.shape.is_chain:
            own = drafter.shape.row_parents(shape.drafts)
        self._parents = {
            count: whole(drafter.parents(count) if drafter is not None else [])
            for count in range(1, each)
        }
        self._owner = torch.arange(R, dtype=torch.int64, device=device) // each * each
        self.span = self._span(each)
        self.span.parents = whole(own)
        self.span.verify = shape.drafts > 0
        ids = inputs.view("last", S)
        self.batch = Batch(
            ids=ids if each == 1 else torch.zeros(R, dtype=torch.int64, device=device),
            kv_rows=inputs.view("kv_rows", R),
            decode=self.span,
            prefill=None,
            logit_rows=torch.arange(R, dtype=torch.int64, device=device),
            next_ids=torch.zeros(R, dtype=torch.int64, device=device) if drafter else None,
        )

    def _span(self, count: int) -> Span:
        """A span of `count` rows a sequence, at the end of each's context."""
        S, keys = self.shape.sequences, self.shape.keys
        return Span(
            start=0,
            end=S * count,
            cu=self._cu[count],
            slots=self.inputs.view("slots", S),
            lengths=self.inputs.view("lengths", S),
            pages=self.inputs.tables[keys].device[:S],
            max_new=count,
            max_length=keys,
        )

    def parts(self) -> list[tuple[str, Callable[[], None]]]:
        """What to run, in order, by the name of the part of a step (see `Clock`)."""
        found: list[tuple[str, Callable[[], None]]] = []
        if self.shape.drafts:
            found.append(("draft", self._draft))
        found.append(("verify", self._forward))
        if self.drafter is not None:
            found.append(("draft", self._follow))
        if self.shape.drafts:
            found.append(("commit", self._commit))
        elif self.caches.mamba is not None and self.caches.mamba.rings is not None:
            found.append(("commit", self._advance))
        return found

    # ---- the parts ----------------------------------------------------------------------------

    def _draft(self) -> None:
        assert self.drafter is not None
        S = self.shape.sequences
        drafts = self.drafter.guess(self.shape.drafts, self.memory.start[:S], self)
        ids = self.batch.ids.view(S, -1)
        ids[:, 0].copy_(self.inputs.view("last", S))
        ids[:, 1:].copy_(drafts)

    def _forward(self) -> None:
        R, memory = self.shape.rows, self.memory
        self.span.cells = None  # looked up anew on every run
        hidden = self.model.forward(self.batch, self.caches)
        memory.keep_hidden(hidden)
        logits = self.model.logits(hidden)
        picked = choose(logits, logits, *(self.inputs.view(name, R) for name in _RULES))
        memory.found[:R].copy_(picked)
        if not self.shape.drafts:
            return
        ids, span = self.batch.ids, self.span
        wanted = self.inputs.view("wanted", self.shape.sequences)[:, None]
        counts = (self.batch.logit_rows - self._owner).view(-1, self.shape.each) <= wanted
        verdict = verify_drafts(
            torch.where(counts.flatten(), ids, _NO_TOKEN),
            picked,
            span.cu,
            span.max_new,
            span.parents,
        )
        memory.found[R : 2 * R].copy_(verdict.path)
        memory.last[: self.shape.sequences].copy_(verdict.last)

    def _follow(self) -> None:
        assert self.drafter is not None
        R, S, memory = self.shape.rows, self.shape.sequences, self.memory
        self.span.cells = None
        ends = self._cu[self.shape.each][:-1].long()
        if self.shape.drafts:
            ends = ends + memory.last[:S]
        out = self.drafter.follow(self.batch, memory.hidden[:R], memory.found[:R], ends)
        memory.keep_start(out)

    def _commit(self) -> None:
        """As `Runner._commit`; pads repeat what the first sequence does, which changes nothing."""
        R, S, memory = self.shape.rows, self.shape.sequences, self.memory
        slots, last, path = self.inputs.view("slots", S), memory.last[:S], memory.found[R : 2 * R]
        tree = self.span.parents is not None
        if self.caches.mamba is not None:
            self.caches.mamba.commit(slots, last, *((path, self.span.cu) if tree else ()))
        if self.caches.kv is not None and tree:
            target = self.batch.kv_rows
            source = torch.where(path < 0, target, target[self._owner + path.clamp_min(0)])
            pad = target < 0
            cells = [torch.where(pad, c[:1].clamp_min(0), c) for c in (source, target)]
            self.caches.kv.move(*cells)

    def _advance(self) -> None:
        assert self.caches.mamba is not None
        self.caches.mamba.advance(self.inputs.view("slots", self.shape.sequences))

    # ---- the passes of the drafter ------------------------------------------------------------

    def having(self, draft: int) -> int:
        return self.shape.sequences

    def pick(self, logits: Tensor, parent: int, ids: Tensor) -> Tensor:
        S, R = self.shape.sequences, self.shape.rows
        rows = (self.inputs.view(name, R).view(S, -1)[:, parent] for name in _RULES)
        return choose(logits, logits, *(x.contiguous() for x in rows))

    def batch_of(self, n: int, first: int, count: int) -> Batch:
        S = self.shape.sequences
        assert n == S
        span = self._span(count)
        behind = self.shape.drafts + 2 - first - count  # of the whole step's rows
        span.lengths = (span.lengths - behind).clamp_min(0)
        span.parents = self._parents[count]
        # of one column `flatten` is a view with gaps; kernels read one row behind the other
        kv_rows = self.batch.kv_rows.view(S, -1)[:, first - 1 : first - 1 + count].flatten()
        none = self.batch.logit_rows[:0]
        kv_rows = kv_rows.contiguous()
        return Batch(ids=none, kv_rows=kv_rows, decode=span, prefill=None, logit_rows=none)
