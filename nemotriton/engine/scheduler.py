"""Which tokens of which requests run in the next step. Pure Python: no torch, no clock.

First come, first served: what runs is always older than what waits. Requests that decode come
first, then prompts in pieces under a token budget, then newcomers. A newcomer gets the pages of its
whole prompt at once, so only decoding needs more; when pages run out the newest request is
preempted, to go on later from exactly where it was. The oldest request always advances, and a
request that could never fit alone is refused, so every request ends. Drafts get only what is left:
nobody is preempted for them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nemotriton.engine.request import Move, Piece, Request, State, Step
from nemotriton.errors import CapacityError, require

if TYPE_CHECKING:
    from nemotriton.engine.pool import Pool


class Scheduler:
    """Plans steps and keeps the books of pages and slots.

    pages: None without attention layers. slots: None without Mamba layers. prefill_piece: prompt
    tokens a step, of all requests together, >= 1. grain: all pieces of a prompt but the last end at
    multiples of it; prefill_piece is one. The cycle is `add`, `step`, the forward pass by whoever
    runs it, then `advance` for every piece of the step.
    """

    def __init__(
        self,
        *,
        pages: Pool | None,
        slots: Pool | None,
        page_size: int,
        max_requests: int,
        prefill_piece: int,
        grain: int = 1,
    ) -> None:
        assert min(page_size, max_requests, prefill_piece, grain) >= 1
        assert prefill_piece % grain == 0
        self.pages = pages
        self.slots = slots
        self.page_size = page_size
        self.max_requests = max_requests
        self.prefill_piece = prefill_piece
        self.grain = grain
        self.drafts = 0  # wanted behind the last token of every request that decodes
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """True while any request has not ended."""
        return bool(self.waiting or self.running)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size) if self.pages is not None else 0

    def check(self, request: Request) -> None:
        """Raise CapacityError if the request could not run even alone."""
        if self.pages is None:
            return
        tokens = self._most(request)
        room = self.pages.size * self.page_size
        require(
            self.pages_for(tokens) <= self.pages.size,
            f"request {request.id} may grow to {tokens:,} tokens, but the KV cache holds {room:,}: "
            "lower max_tokens, shorten the prompt, or give the cache more memory.",
            CapacityError,
        )

    def add(self, request: Request) -> None:
        """Queue a new request; CapacityError if it could not run even alone."""
        self.check(request)
        assert not self.waiting or request.arrival > self.waiting[-1].arrival
        request.state = State.WAITING
        self.waiting.append(request)

    # ---- one step -----------------------------------------------------------------------------

    def step(self) -> Step:
        """Plan the next step; it has at least one piece while any request is left."""
        step = Step()
        budget = self.prefill_piece
        decoding = []
        for request in list(self.running):
            if request.state is State.DECODE and self._grow(request, step):
                decoding.append(request)
        for request in decoding:
            self._deepen(request)
            count = request.length - request.computed + request.drafts
            step.decode.append(Piece(request, request.computed, count))
        for request in self.running:
            if request.state is State.PREFILL and self._piece(request, budget):
                budget -= self._prefill(request, budget, step)
        # Whoever was just preempted waits first in line and does not fit (its pages went to an
        # older request), so no step saves and restores.
        self._admit(budget, step)
        assert step.decode or step.prefill or not self.busy
        return step

    def ahead(self, step: Step) -> Step | None:
        """The step that follows `step`, planned while that one runs; None where it cannot be known.

        It can where all that run decode with all their drafts in both steps, nobody ends by a
        limit, nobody waits who could start, and there are pages for whatever is accepted. Pieces
        start where they would if everything was; who then ends by a token is in the new step all
        the same: what it gets there is for nobody.
        """
        requests, most = [p.request for p in step.decode], 1 + self.drafts
        if step.prefill or not requests or requests != self.running:
            return None
        if any(p.count != most for p in step.decode):
            return None
        if any(r.limit - len(r.output) < 2 * most for r in requests):
            return None
        if self.waiting and len(self.running) < self.max_requests and self._fits(self.waiting[0]):
            return None
        tokens = [r.length + most + self.drafts for r in requests]
        if self.pages is not None:
            missing = [self.pages_for(n) - len(r.pages) for n, r in zip(tokens, requests)]
            if sum(n for n in missing if n > 0) > self.pages.free:
                return None
            for request, count in zip(requests, missing):
                if count > 0:
                    request.pages += self.pages.take(count)
        for request, count in zip(requests, tokens):
            request.held, request.drafts = count, self.drafts
        return Step(decode=[Piece(p.request, p.start + most, most) for p in step.decode])

    def _piece(self, request: Request, budget: int) -> int:
        """Tokens of the request's next piece; 0 where the budget holds none."""
        left = len(request.prompt) - request.computed
        if left <= budget:
            return left
        return budget - (request.computed + budget) % self.grain

    def _prefill(self, request: Request, budget: int, step: Step) -> int:
        count = self._piece(request, budget)
        step.prefill.append(Piece(request, request.computed, count))
        return count

    def _grow(self, request: Request, step: Step) -> bool:
        """Give the request a page for its last token, preempting newer ones; False if it was it."""
        if self.pages is None:
            return True
        missing = self.pages_for(request.length) - len(request.pages)
        while missing > self.pages.free:
            newest = self.running[-1]
            self._preempt(newest, step)
            if newest is request:
                return False
        if missing > 0:
            request.pages += self.pages.take(missing)
        return True

    def _deepen(self, request: Request) -> None:
        """Decide how many drafts the request gets: none that could not be kept, nor any page that
        others would have to be preempted for."""
        drafts = min(self.drafts, request.limit - len(request.output) - 1)
        if drafts and self.pages is not None:
            room = len(request.pages) + self.pages.free
            drafts = min(drafts, room * self.page_size - request.length)
            missing = self.pages_for(request.length + drafts) - len(request.pages)
            if missing > 0:
                request.pages += self.pages.take(missing)
        request.drafts = drafts

    def _give_back(self, request: Request, tokens: int) -> None:
        """Free the pages behind those of `tokens` tokens: only rejected drafts were in them."""
        used = self.pages_for(tokens)
        if self.pages is not None and len(request.pages) > used:
            self.pages.give(request.pages[used:])
            del request.pages[used:]

    def _preempt(self, request: Request, step: Step) -> None:
        self.preemptions += 1
        if request.computed:
            kept = request.pages[: self.pages_for(request.computed)]
            step.saves.append(Move(request, tuple(kept), request.slot))
        self._release(request)
        request.state = State.WAITING
        request.drafts = 0
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _admit(self, budget: int, step: Step) -> None:
        """Start or resume waiting requests in order, as long as the next one fits."""
        while self.waiting and len(self.running) < self.max_requests:
            request = self.waiting[0]
            starts = request.prefilled or self._piece(request, budget)
            if not starts or not self._fits(request):
                return
            self.waiting.popleft()
            self.running.append(request)
            if self.pages is not None:
                request.pages = self.pages.take(self.pages_for(request.length))
            if self.slots is not None:
                request.slot = self.slots.take(1)[0]
            if request.computed:
                kept = request.pages[: self.pages_for(request.computed)]
                step.restores.append(Move(request, tuple(kept), request.slot))
            if request.prefilled:
                request.state = State.DECODE
                count = request.length - request.computed
                step.decode.append(Piece(request, request.computed, count))
            else:
                request.state = State.PREFILL
                budget -= self._prefill(request, budget, step)

    def _fits(self, request: Request) -> bool:
        """Room for the request, and a page for each running one that may still need one."""
        if self.slots is not None and not self.slots.free:
            return False
        if self.pages is None:
            return True
        left = self.pages.free - self.pages_for(request.length)
        if left < 0 or left >= len(self.running):
            return left >= 0
        return left >= sum(self.pages_for(self._most(r)) > len(r.pages) for r in self.running)

    @staticmethod
    def _most(request: Request) -> int:
        """Tokens that a request may come to compute: the last one is never fed back."""
        return len(request.prompt) + request.limit - 1

    # ---- after the step -----------------------------------------------------------------------

    def advance(self, piece: Piece, tokens: list[int]) -> list[int]:
        """Book a computed piece and its new tokens; returns those kept (none after the end).

        A decoding piece yields the accepted drafts and one token more; a prompt's last piece one
        token; its other pieces none.
        """
        request = piece.request
        if request.state is State.PREFILL:
            request.computed = piece.end
            if request.prefilled:
                request.state = State.DECODE
                if request.keep_logits:
                    self.finish(request, "length")
        else:
            request.computed = piece.start + len(tokens)
            self._give_back(request, max(request.length + len(tokens), request.held))
        request.drafts = request.held = 0
        kept: list[int] = []
        for token in tokens:
            request.output.append(token)
            kept.append(token)
            self._check_end(request, token)
            if request.state is State.DONE:
                break
        return kept

    def _check_end(self, request: Request, token: int) -> None:
        params, count = request.params, len(request.output)
        if token in request.stop_ids and count > params.min_tokens:
            named = token in (params.stop_token_ids or ())
            self.finish(request, "stop", token if named else None)
        elif count >= request.limit:
            self.finish(request, "length")

    def finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, whatever its state, and free what it owned; again only renames why."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.state is State.DONE:
            return
        if request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release(request)
        request.state = State.DONE
        request.saved = request.hidden = None

    def _release(self, request: Request) -> None:
        if self.pages is not None:
            self.pages.give(request.pages)
        if self.slots is not None:
            self.slots.give([request.slot])
        request.pages, request.slot = [], -1
