"""One step on the device: restore, draft, forward, pick, verify, commit, score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nemotriton.engine.batch import Batch, build_batch
from nemotriton.engine.caches import PAGE_SIZE, SCORE_BYTES, Caches, SavedState
from nemotriton.engine.clock import Clock
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.drafter import Drafter, DraftModel
from nemotriton.engine.graphs import Capture, DecodeSteps, Flight
from nemotriton.engine.request import Move, Piece, Request, State, Step
from nemotriton.engine.sampler import Sampler, describe, is_plain
from nemotriton.engine.step_inputs import StepShape
from nemotriton.kernels import Verdict, verify_drafts
from nemotriton.kernels.fixed_order import PREFILL, fixed_order, phase

Result = tuple[Piece, list[int] | None]


class Model(DraftModel, Protocol):
    """What the runner needs of a model; `draft` only where drafts are wanted."""

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        """Hidden states [T, D] of the step's rows; states and pages move in place."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """Host copies of what a preempted request owned."""

    kv: tuple[Tensor, Tensor] | None
    mamba: SavedState | None

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return _nbytes(self.kv) + _nbytes(self.mamba)


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows of a step's batch tokens are picked from: those of decode pieces, in order, then
    the last one of each prompt that ends."""

    picking: list[Piece]
    scoring: list[Piece]
    first: dict[str, int]  # flat row where a request's piece starts
    counts: list[int]  # rows of each picking piece that are picked from

    @classmethod
    def of(cls, step: Step) -> Rows:
        first, row = {}, 0
        for p in (*step.decode, *step.prefill):
            first[p.request.id] = row
            row += p.count
        ending = [p for p in step.prefill if p.end == len(p.request.prompt)]
        answering = [p for p in ending if not p.request.keep_logits]
        return cls(
            picking=[*step.decode, *answering],
            scoring=[p for p in step.prefill if scored_rows(p)],
            first=first,
            counts=[p.count for p in step.decode] + [1] * len(answering),
        )

    @property
    def requests(self) -> list[Request]:
        """The request of each row that is picked from."""
        return [p.request for p, n in zip(self.picking, self.counts) for _ in range(n)]

    def logit_rows(self) -> list[int]:
        """Flat rows whose logits are wanted: those picked from, then those scored."""
        found: list[int] = []
        for p, count in zip(self.picking, self.counts):
            end = self.first[p.request.id] + p.count
            found += range(end - count, end)
        for p in self.scoring:
            start = self.first[p.request.id]
            found += range(start, start + scored_rows(p))
        return found


class Runner:
    """Owns the model and its caches and runs steps; between steps it keeps nothing of requests.

    chunk: the model's SSD chunk, None without Mamba layers. vocab: rows of the head. shape: the
    drafts of a step, None where the model does not draft; stateful: see Drafter.
    """

    def __init__(
        self,
        model: Model,
        caches: Caches,
        *,
        vocab: int,
        chunk: int | None,
        device: torch.device | str,
        shape: DraftShape | None = None,
        stateful: bool = False,
    ) -> None:
        self.model = model
        self.caches = caches
        self.vocab = vocab
        self.chunk = chunk
        self.device = device
        self.page_size = caches.kv.page_size if caches.kv is not None else PAGE_SIZE
        self.sampler = Sampler(vocab, device)
        self.clock = Clock(device)
        self.drafter: Drafter | None = None
        if shape is not None:
            self.drafter = Drafter(
                model,
                caches,
                self.sampler,
                shape,
                page_size=self.page_size,
                device=device,
                stateful=stateful,
            )
        self.steps: DecodeSteps | None = None

    def record(self, capture: Capture, *, requests: int, context: int) -> DecodeSteps:
        """Let `capture` repeat decode steps of up to so many requests and tokens of context.

        Of the caches' pages the last must be nobody's. Call `warm` of what this returns before the
        first step."""
        kv = self.caches.kv
        self.steps = DecodeSteps(
            self.model,
            self.caches,
            self.sampler,
            self.drafter,
            capture,
            requests=requests,
            context=context,
            page_size=self.page_size,
            spare=-1 if kv is None else kv.k.shape[1] - 1,
            device=torch.device(self.device),
        )
        return self.steps

    def close(self) -> None:
        """Let recorded steps go; nothing runs after."""
        if self.steps is not None:
            self.steps.close()

    @torch.no_grad()
    def run(self, step: Step) -> list[Result]:
        """The step's pieces, each with its new tokens; None where the model gave no usable logits.

        A decode piece has its accepted drafts and one token more. Logprobs, prompt logprobs and
        kept logits are appended to the requests. In the invariant mode prompts and decode rows,
        which are summed in different orders, go through the model one after the other.
        """
        if phase() is None:
            return self._run(step)
        found, rest = [], step
        if step.decode:
            found, rest = self._run(replace(step, prefill=[])), Step(prefill=step.prefill)
        if step.prefill:
            with fixed_order(PREFILL):
                found += self._run(rest)
        return found

    def _run(self, step: Step) -> list[Result]:
        shape = self.steps.shape_of(step, self.drafter) if self.steps is not None else None
        if self.steps is not None and (shape is None or step.restores):
            self.steps.settle(step)
        for move in step.saves:
            self._save(move)
        for move in step.restores:
            self._restore(move)
        if self.caches.mamba is not None:
            first = [p.request for p in step.prefill if p.start == 0]
            self.caches.mamba.start([r.slot for r in first], [r.seed for r in first])
        self.clock.start()
        if shape is not None and self.steps is not None:
            return self.read(step, self.steps.launch(step, shape, self.clock))
        if self.steps is not None and not step.prefill:
            self.steps.others += 1
        rows = Rows.of(step)
        drafting = any(p.request.drafts for p in step.decode)
        batch = self._batch(step, rows, drafting)
        if drafting:
            assert self.drafter is not None
            drafts = self.drafter.propose(step.decode)
            batch.ids.index_copy_(0, self._draft_rows(step), drafts)
            self.clock.mark("draft")
        hidden = self.model.forward(batch, self.caches)
        count = sum(rows.counts)
        logits = self._logits(hidden, batch, count)
        picked = self._pick(logits, batch, rows)
        verdict = self._verify(batch, picked) if drafting else None
        self.clock.mark("verify")
        if self.drafter is not None:
            self._follow(batch, hidden, picked, verdict, rows)
            self.clock.mark("draft")
        if verdict is not None:
            self._commit(batch, verdict)
            self.clock.mark("commit")
        elif batch.decode is not None and self.caches.mamba is not None:
            self.caches.mamba.advance(batch.decode.slots)
        tokens = self._gained(picked, verdict, rows)
        self._describe(lambda: logits, tokens, rows.picking)
        self._score(hidden.index_select(0, batch.logit_rows[count:]), rows.scoring)
        found = {
            p.request.id: [t for _, t in gained] or None
            for p, gained in zip(rows.picking, tokens, strict=True)
        }
        return [(p, found.get(p.request.id, [])) for p in (*step.decode, *step.prefill)]

    @torch.no_grad()
    def launch(self, step: Step, behind: Flight | None = None) -> Flight | None:
        """Start a step that has been recorded and moves nobody; None for any other, which `run`
        takes. behind: see `DecodeSteps.launch`; what must be read first has no step behind it."""
        if self.steps is None or step.saves or step.restores:
            return None
        if behind is not None and not all(is_foreseen(p.request) for p in step.decode):
            return None
        shape = self.steps.shape_of(step, self.drafter)
        if shape is None or (behind is not None and not self._follows(shape, behind.shape)):
            return None
        clock = Clock(self.device)
        clock.start()
        return self.steps.launch(step, shape, clock, behind)

    def _follows(self, shape: StepShape, before: StepShape) -> bool:
        """Whether the device can bring the tokens of one step to the next by itself."""
        chain = self.drafter is None or self.drafter.shape.is_chain
        return chain and (shape.sequences, shape.drafts) == (before.sequences, before.drafts)

    @torch.no_grad()
    def read(self, step: Step, flight: Flight) -> list[Result]:
        """What `run` gives, of a step that was started; waits for the device.

        Requests that have ended since are left out."""
        steps = self.steps
        assert steps is not None
        self.clock = flight.clock
        tokens = steps.read(flight)
        self._describe(lambda: steps.logits(flight.shape), tokens, step.decode)
        return [
            (p, [t for _, t in gained] or None)
            for p, gained in zip(step.decode, tokens, strict=True)
            if p.request.state is not State.DONE
        ]

    # ---- the parts of a step ------------------------------------------------------------------

    def _batch(self, step: Step, rows: Rows, drafting: bool) -> Batch:
        parents: list[int] = []
        if drafting and self.drafter is not None and not self.drafter.shape.is_chain:
            for p in step.decode:
                parents += self.drafter.shape.row_parents(p.request.drafts)
        return build_batch(
            step.decode,
            step.prefill,
            rows.logit_rows(),
            page_size=self.page_size,
            chunk=self.chunk,
            device=self.device,
            parents=parents,
            verify=drafting,
            following=self.drafter is not None,
        )

    def _draft_rows(self, step: Step) -> Tensor:
        """Flat rows that hold drafts."""
        found: list[int] = []
        row = 0
        for p in step.decode:
            found += range(row + p.count - p.request.drafts, row + p.count)
            row += p.count
        return torch.tensor(found).to(self.device, non_blocking=True)

    def _logits(self, hidden: Tensor, batch: Batch, count: int) -> Tensor:
        if not count:
            return torch.empty((0, self.vocab), device=self.device)
        return self.model.logits(hidden.index_select(0, batch.logit_rows[:count]))

    def _pick(self, logits: Tensor, batch: Batch, rows: Rows) -> Tensor:
        """The token that follows each row picked from, int64; -1 where its logits are broken."""
        if not rows.picking:
            return torch.empty((0,), dtype=torch.int64, device=self.device)
        ahead: list[Tensor] = []
        for p, count in zip(rows.picking, rows.counts):
            if self.drafter is None:
                break
            start = rows.first[p.request.id] + 1
            drafts = batch.ids[start : start + p.request.drafts]
            ahead += [self.drafter.before(drafts, d, p.request) for d in range(count)]
        return self.sampler.pick(logits, rows.requests, ahead)

    def _verify(self, batch: Batch, picked: Tensor) -> Verdict:
        span = batch.decode
        assert span is not None
        ids = batch.ids[: span.end]
        return verify_drafts(ids, picked[: span.end], span.cu, span.max_new, span.parents)

    def _follow(
        self, batch: Batch, hidden: Tensor, picked: Tensor, verdict: Verdict | None, rows: Rows
    ) -> None:
        """Complete the draft block's caches, and keep what the next drafts start from."""
        assert self.drafter is not None
        last = batch.logit_rows[: picked.shape[0]]
        if verdict is not None and batch.decode is not None:
            ends = batch.decode.cu[:-1] + verdict.last
            last = torch.cat([ends.long(), last[batch.decode.end :]])
        kept = self.drafter.follow(batch, hidden, picked, last)
        for i, p in enumerate(rows.picking):
            p.request.hidden = kept[i]

    def _commit(self, batch: Batch, verdict: Verdict) -> None:
        """Make the accepted rows the past: states, and of a tree the accepted path's K/V."""
        span = batch.decode
        assert span is not None
        if self.caches.mamba is not None:
            tree = () if span.parents is None else (verdict.path, span.cu)
            self.caches.mamba.commit(span.slots, verdict.last, *tree)
        if self.caches.kv is not None and span.parents is not None:
            target = batch.kv_rows[: span.end]
            start = torch.repeat_interleave(span.cu[:-1], span.cu.diff(), output_size=span.end)
            source = target[(start + verdict.path.clamp_min(0)).long()]
            self.caches.kv.move(torch.where(verdict.path < 0, target, source), target)

    def _gained(
        self, picked: Tensor, verdict: Verdict | None, rows: Rows
    ) -> list[list[tuple[int, int]]]:
        """Of each picking piece (row of the logits, token) of its new tokens, on the host.

        This is where the host waits for the device.
        """
        if verdict is None:
            return [[(i, t)] if t >= 0 else [] for i, t in enumerate(picked.tolist())]
        values = torch.cat([picked, verdict.path.long()]).tolist()
        tokens, path = values[: picked.shape[0]], values[picked.shape[0] :]
        path += [0] * (len(tokens) - len(path))  # a prompt's last row
        found, row = [], 0
        for count in rows.counts:
            on = [row + r for r in path[row : row + count] if r >= 0]
            found.append([(i, tokens[i]) for i in on if tokens[i] >= 0])
            row += count
        return found

    def _describe(
        self,
        logits: Callable[[], Tensor],
        tokens: Sequence[list[tuple[int, int]]],
        pieces: Sequence[Piece],
    ) -> None:
        """Append logprobs to the requests that want them: the model's, of every token gained."""
        asking = [
            (p.request, i, token)
            for p, gained in zip(pieces, tokens, strict=True)
            for i, token in gained
            if p.request.params.logprobs is not None
        ]
        if asking:
            requests, index, chosen = zip(*asking)
            wanted = [r.params.logprobs for r in requests]
            for request, row in zip(requests, describe(logits()[list(index)], chosen, wanted)):
                request.logprobs.append(row)

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

    def snapshot(self, pages: Sequence[int], slot: int) -> Saved:
        """Host copies of what pages and a slot hold between steps."""
        kv, mamba = self.caches.kv, self.caches.mamba
        return Saved(
            kv=kv.save(pages) if kv is not None else None,
            mamba=mamba.save(slot) if mamba is not None else None,
        )

    def _save(self, move: Move) -> None:
        move.request.saved = self.snapshot(move.pages, move.slot)

    def _restore(self, move: Move) -> None:
        saved = move.request.saved
        assert isinstance(saved, Saved), f"nothing was saved of request {move.request.id}"
        if self.caches.kv is not None and saved.kv is not None:
            self.caches.kv.restore(move.pages, saved.kv)
        if self.caches.mamba is not None and saved.mamba is not None:
            self.caches.mamba.restore(move.slot, saved.mamba)
            self.caches.mamba.seed([move.slot], [move.request.seed])
        move.request.saved = None


def _nbytes(part: object) -> int:
    if isinstance(part, Tensor):
        return part.nbytes
    return sum(map(_nbytes, part)) if isinstance(part, tuple) else 0


def scored_rows(piece: Piece) -> int:
    """How many of a prompt piece's rows, from its first, are scored."""
    request = piece.request
    if request.keep_logits:
        return piece.count
    if request.params.prompt_logprobs is None:
        return 0
    return min(piece.end, len(request.prompt) - 1) - piece.start  # the last row predicts no prompt


def is_foreseen(request: Request) -> bool:
    """True where a step can follow before the host has seen the request's next token."""
    return is_plain(request) and request.params.logprobs is None
