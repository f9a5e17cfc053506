"""Guesses for the next tokens, by the model's own draft (MTP) block, and the block's caches.

The block reads pairs: a token and the hidden state of the one before it. A pair has the position of
the latter, so of n computed tokens the block's caches hold the n pairs whose second token is known,
and its output on the last of them drafts token n + 1. `follow` adds the pairs of the tokens that a
step computed, be it a prompt's piece or the rows of a verify pass, right behind the trunk and on
the same rows; a rejected draft leaves a pair that the next step overwrites, as in the trunk.

`propose` applies the block again to each draft: its own output stands in for the hidden state. What
these passes write to the caches lies behind the complete pairs and is overwritten by `follow`;
Mamba layers of a block are not moved. Drafts are picked with the temperature, filters, penalties
and noise that the trunk's pick at that position will have, see `verify_drafts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nemotriton.engine.batch import Batch, build_batch
from nemotriton.engine.request import Piece, Request

if TYPE_CHECKING:
    from nemotriton.engine.caches import Caches
    from nemotriton.engine.draft_shape import DraftShape
    from nemotriton.engine.sampler import Sampler


class DraftModel(Protocol):
    """What drafting needs of a model."""

    def draft(self, batch: Batch, hidden: Tensor, caches: Caches) -> Tensor:
        """The block's output [T, D]; see `NemotronH.draft`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden states or of the block's outputs [R, D]."""
        ...

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of the block's outputs, or of hidden states [R, D], to pick drafts by."""
        ...


class Passes(Protocol):
    """The sequences that `Drafter.guess` drafts for, those with most drafts first."""

    def having(self, draft: int) -> int:
        """How many have this draft: the first so many."""
        ...

    def pick(self, logits: Tensor, parent: int, ids: Tensor) -> Tensor:
        """Tokens int64 [n] for logits [n, V] of the first n, behind their draft `parent`.

        ids [>= n, widest]: the drafts so far. -1 for a broken row."""
        ...

    def batch_of(self, n: int, first: int, count: int) -> Batch:
        """The drafts first .. first + count - 1 of the first n sequences as a decode batch."""
        ...


class _Listed:
    """The passes over requests, sorted by their number of drafts."""

    def __init__(self, drafter: Drafter, order: Sequence[Request]) -> None:
        self.drafter = drafter
        self.order = order

    def having(self, draft: int) -> int:
        return sum(r.drafts >= draft for r in self.order)

    def pick(self, logits: Tensor, parent: int, ids: Tensor) -> Tensor:
        having = self.order[: logits.shape[0]]
        ahead = [self.drafter.before(ids[j], parent, r) for j, r in enumerate(having)]
        return self.drafter.sampler.pick(logits, having, ahead)

    def batch_of(self, n: int, first: int, count: int) -> Batch:
        return build_batch(
            [Piece(r, r.length + first - 2, count) for r in self.order[:n]],
            [],
            [],
            page_size=self.drafter.page_size,
            chunk=None,
            device=self.drafter.device,
            parents=self.drafter.parents(count) * n,
        )


class Drafter:
    """Proposes the drafts of a step and completes the block's caches after it.

    stateful: the block has Mamba layers, so every pass starts again from their committed state.
    """

    def __init__(
        self,
        model: DraftModel,
        caches: Caches,
        sampler: Sampler,
        shape: DraftShape,
        *,
        page_size: int,
        device: torch.device | str,
        stateful: bool = False,
    ) -> None:
        self.model = model
        self.caches = caches
        self.sampler = sampler
        self.shape = shape
        self.page_size = page_size
        self.device = device
        self._again = stateful or not shape.is_chain
        self._paths = [
            torch.tensor([d - 1 for d in shape.path(draft)], dtype=torch.int64, device=device)
            for draft in range(len(shape) + 1)
        ]

    def before(self, drafts: Tensor, draft: int, request: Request) -> Tensor:
        """Of a request's drafts, in order, those on the path to number `draft`, itself included."""
        counted = not request.params.penalised and request.constraint is None
        if self.shape.is_chain or counted:
            return drafts[: self._paths[draft].shape[0]]  # only their number matters, or both do
        return drafts[self._paths[draft]]

    def propose(self, pieces: Sequence[Piece]) -> Tensor:
        """The drafts of all pieces, int64 on the device, each in 0 .. V - 1, piece by piece."""
        drafting = [p.request for p in pieces if p.request.drafts]
        # most drafts first: those who have draft d are then the first so many
        order = sorted(drafting, key=lambda r: -r.drafts)
        widest = order[0].drafts
        start = torch.stack([r.hidden for r in order])
        ids = self.guess(widest, start, _Listed(self, order))
        if order[-1].drafts == widest:
            return ids.flatten()
        rank = {r.id: j for j, r in enumerate(order)}
        cells = [rank[r.id] * widest + d for r in drafting for d in range(r.drafts)]
        return ids.flatten()[torch.tensor(cells, device=self.device)]

    def guess(self, widest: int, start: Tensor, passes: Passes) -> Tensor:
        """Drafts int64 [n, widest] of n sequences behind their hidden states `start` [n, D]."""
        ids = torch.zeros((start.shape[0], widest), dtype=torch.int64, device=self.device)
        hidden = {0: start}
        levels = self.shape.levels(widest)
        for level, deeper in zip(levels, [*levels[1:], []]):
            self._pick(level, passes, hidden, ids)
            if deeper:
                self._extend(level, passes.having(deeper[0]), passes, hidden, ids)
        return ids

    def _pick(
        self, level: list[int], passes: Passes, hidden: dict[int, Tensor], ids: Tensor
    ) -> None:
        """The drafts of one level: behind each parent the likeliest tokens, one after the other."""
        children: dict[int, list[int]] = {}
        for draft in level:
            children.setdefault(self.shape.parents[draft - 1], []).append(draft)
        rows = {p: passes.having(own[0]) for p, own in children.items()}
        logits = self.model.draft_logits(torch.cat([hidden[p][: rows[p]] for p in children]))
        parts = dict(zip(children, logits.split(list(rows.values())), strict=True))
        for parent, own in children.items():
            for draft in own:
                having = passes.having(draft)
                row_logits = parts[parent][:having]
                picked = passes.pick(row_logits, parent, ids).clamp_min(0)
                ids[:having, draft - 1] = picked
                if draft != own[-1]:
                    row_logits.scatter_(1, picked[:, None], -torch.inf)

    def _extend(
        self, level: list[int], n: int, passes: Passes, hidden: dict[int, Tensor], ids: Tensor
    ) -> None:
        """The block's outputs on the drafts of one level, for the n who draft behind them."""
        first = 1 if self._again else level[0]
        drafts = range(first, level[-1] + 1)
        count = len(drafts)
        batch = passes.batch_of(n, first, count)
        assert batch.decode is not None
        batch.decode.trial = True
        batch = replace(batch, ids=ids[:n, first - 1 : level[-1]].flatten())
        before = torch.stack([hidden[self.shape.parents[d - 1]][:n] for d in drafts], 1)
        out = self.model.draft(batch, before.flatten(0, 1), self.caches).unflatten(0, (n, count))
        for draft in level:
            hidden[draft] = out[:, draft - first]

    def parents(self, count: int) -> list[int]:
        """`Span.parents` of one sequence's first `count` drafts, alone in a pass; [] of a chain."""
        return [] if self.shape.is_chain else [p - 1 for p in self.shape.parents[:count]]

    def follow(self, batch: Batch, hidden: Tensor, picked: Tensor, rows: Tensor) -> Tensor:
        """Complete the block's caches by a step's rows; its outputs [R, D] on `rows`.

        hidden [T, D]: the trunk's. picked int64 [P]: the tokens picked on the first P rows of
        batch.logit_rows, which the host does not know yet.
        """
        assert batch.next_ids is not None
        at = batch.logit_rows[: picked.shape[0]]
        ids = batch.next_ids.index_copy(0, at, picked.clamp_min(0))
        out = self.model.draft(replace(batch, ids=ids), hidden, self.caches)
        return out.index_select(0, rows)
