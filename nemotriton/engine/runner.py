"""One step on the device: restore, build the batch, forward, logits where wanted, pick."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemotriton.engine.batch import Batch, build_batch
from nemotriton.engine.caches import PAGE_SIZE, SCORE_BYTES, Caches
from nemotriton.engine.request import Move, Piece, Request, Step
from nemotriton.engine.sampler import Sampler, describe


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Hidden states [T, D] of the step's rows; states and pages move in place."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, V] of hidden states [R, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """Host copies of what a preempted request owned."""

    kv: tuple[Tensor, Tensor] | None
    mamba: tuple[Tensor, Tensor] | None


class Runner:
    """Owns the model and its caches and runs steps; between steps it keeps nothing of requests.

    chunk: the model's SSD chunk, None without Mamba layers. vocab: rows of the head.
    """

    def __init__(
        self,
        model: Model,
        caches: Caches,
        *,
        vocab: int,
        chunk: int | None,
        device: torch.device | str,
    ) -> None:
        self.model = model
        self.caches = caches
        self.vocab = vocab
        self.chunk = chunk
        self.device = device
        self.page_size = caches.kv.page_size if caches.kv is not None else PAGE_SIZE
        self.sampler = Sampler(vocab, device)

    @torch.no_grad()
    def run(self, step: Step) -> list[tuple[Piece, list[int] | None]]:
        """The step's pieces, each with its new tokens; None where the model gave no usable logits.

        Logprobs, prompt logprobs and kept logits are appended to the requests.
        """
        for move in step.saves:
            self._save(move)
        for move in step.restores:
            self._restore(move)
        ending = [p for p in step.prefill if p.end == len(p.request.prompt)]
        picking = [*step.decode, *(p for p in ending if not p.request.keep_logits)]
        scoring = [p for p in step.prefill if scored_rows(p)]
        batch = build_batch(
            step.decode,
            step.prefill,
            _logit_rows(step, picking, scoring),
            page_size=self.page_size,
            chunk=self.chunk,
            device=self.device,
        )
        hidden = self.model.forward(batch, self.caches)
        hidden = hidden.index_select(0, batch.logit_rows)
        tokens = self._pick(hidden[: len(picking)], [p.request for p in picking])
        self._score(hidden[len(picking) :], scoring)
        picked: dict[str, list[int] | None] = {
            p.request.id: [t] if t >= 0 else None for p, t in zip(picking, tokens, strict=True)
        }
        return [(p, picked.get(p.request.id, [])) for p in (*step.decode, *step.prefill)]

    def _pick(self, hidden: Tensor, requests: Sequence[Request]) -> list[int]:
        if not requests:
            return []
        logits = self.model.logits(hidden)
        tokens: list[int] = self.sampler.pick(logits, requests).tolist()
        rows = [
            i for i, r in enumerate(requests) if r.params.logprobs is not None and tokens[i] >= 0
        ]
        if rows:
            wanted = [requests[i].params.logprobs or 0 for i in rows]
            found = describe(logits[rows], [tokens[i] for i in rows], wanted)
            for i, row in zip(rows, found, strict=True):
                requests[i].logprobs.append(row)
        return tokens

    def _score(self, hidden: Tensor, scoring: Sequence[Piece]) -> None:
        """Prompt logprobs and kept logits, a block of rows at a time."""
        block = max(1, SCORE_BYTES // (4 * self.vocab))
        first = 0
        for piece in scoring:
            request, count = piece.request, scored_rows(piece)
            for start in range(0, count, block):
                end = min(start + block, count)
                logits = self.model.logits(hidden[first + start : first + end])
                if request.keep_logits:
                    request.logits.append(logits.cpu())
                    continue
                targets = request.tokens(piece.start + start + 1, piece.start + end + 1)
                wanted = [request.params.prompt_logprobs or 0] * len(targets)
                request.prompt_logprobs += describe(logits, targets, wanted)
            first += count

    def _save(self, move: Move) -> None:
        kv, mamba = self.caches.kv, self.caches.mamba
        move.request.saved = Saved(
            kv=kv.save(move.pages) if kv is not None else None,
            mamba=mamba.save(move.slot) if mamba is not None else None,
        )

    def _restore(self, move: Move) -> None:
        saved = move.request.saved
        assert isinstance(saved, Saved), f"nothing was saved of request {move.request.id}"
        if self.caches.kv is not None and saved.kv is not None:
            self.caches.kv.restore(move.pages, saved.kv)
        if self.caches.mamba is not None and saved.mamba is not None:
            self.caches.mamba.restore(move.slot, saved.mamba)
        move.request.saved = None


def scored_rows(piece: Piece) -> int:
    """How many of a prompt piece's rows, from its first, are scored."""
    request = piece.request
    if request.keep_logits:
        return piece.count
    if request.params.prompt_logprobs is None:
        return 0
    return min(piece.end, len(request.prompt) - 1) - piece.start  # the last row predicts no prompt


def _logit_rows(step: Step, picking: Sequence[Piece], scoring: Sequence[Piece]) -> list[int]:
    """Flat rows whose logits are wanted: those picked from, then those scored."""
    first = dict(_first_rows(step))
    rows = [first[p.request.id] + p.count - 1 for p in picking]
    for p in scoring:
        rows += range(first[p.request.id], first[p.request.id] + scored_rows(p))
    return rows


def _first_rows(step: Step) -> Iterator[tuple[str, int]]:
    row = 0
    for p in (*step.decode, *step.prefill):
        yield p.request.id, row
        row += p.count
