"""Requests in, tokens out: checks and queues prompts, runs steps, turns tokens into text.

One thread steps; `cancel` may be called from any. A request is checked whole before it is queued,
so a bad one never reaches a step that others share.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nemotriton.engine.depth import Depth
from nemotriton.engine.graphs import Flight
from nemotriton.engine.lockstep import Lead, checked
from nemotriton.engine.meter import DraftMeter, Meter
from nemotriton.engine.outputs import Completion, Group
from nemotriton.engine.prefixes import Prefixes
from nemotriton.engine.request import Piece, Request, State, Step
from nemotriton.engine.runner import Result, Runner, is_foreseen
from nemotriton.engine.sampling import SamplingParams, mix_seed
from nemotriton.engine.scheduler import Scheduler
from nemotriton.errors import CapacityError, RequestError, require
from nemotriton.text.chat import ChatPrompt, opens_thought
from nemotriton.text.constraint import Rules
from nemotriton.text.structured import Grammars
from nemotriton.text.tokens import Tokenizer

Prompt = str | Sequence[int] | ChatPrompt
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that has passed every check. chat: the reply is to be taken apart."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    limit: int
    keep_logits: bool
    chat: ChatPrompt | None = None
    rules: Rules | None = None


class Engine:
    """The cycle of scheduler, runner and text.

    max_context: tokens of prompt and completion together. eos_ids: end tokens of the checkpoint.
    seed: what requests without a seed draw theirs from. tokenizer: None works for token ids alone.
    depth: decides the drafts of each step; None leaves them to the scheduler's number.
    `reuse` may be called, before the first request, to go on from earlier prompts. `run_ahead`:
    recorded steps start before the tokens of the one before them are read, where those cannot
    decide what comes next. lead: tells the engines of other ranks what this one does.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        *,
        max_context: int,
        eos_ids: Sequence[int],
        seed: int,
        depth: Depth | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self.depth = depth
        self.meter = Meter()
        self.draft_meter = DraftMeter()
        self.prefixes: Prefixes | None = None
        self._groups: dict[str, Group] = {}
        self._by_request: dict[str, tuple[Group, Completion]] = {}
        self._submitted = 0
        self._arrivals = 0
        self.lead: Lead | None = None
        self._cancelled: deque[str] = deque()
        self._grammars: Grammars | None = None
        self.run_ahead = True
        self._ahead: tuple[Step, Flight] | None = None  # started, its tokens not read

    # ---- prompts ------------------------------------------------------------------------------

    def prepare(
        self, prompt: Prompt, params: SamplingParams, keep_logits: bool = False
    ) -> Prepared:
        """Check a prompt and its parameters; RequestError names the value and the remedy."""
        text = prompt if isinstance(prompt, str) else None
        chat = prompt if isinstance(prompt, ChatPrompt) else None
        given = prompt if chat is None else chat.ids
        ids = self._encode(text) if text is not None else self._check_ids(given)
        n, context = len(ids), self.max_context
        require(
            n <= context,
            f"the prompt is {n:,} tokens; max_context is {context:,}: shorten the prompt or raise "
            "max_context.",
            RequestError,
        )
        require(
            keep_logits or n < context,
            f"the prompt is {n:,} tokens and fills max_context={context:,}: shorten it by at least "
            "one token or raise max_context.",
            RequestError,
        )
        self._check_params(params)
        limit = 1 if keep_logits else min(params.max_tokens or context, context - n)
        return Prepared(text, ids, params, limit, keep_logits, chat, self._rules(ids, params))

    def _encode(self, text: str) -> list[int]:
        require(
            self.tokenizer is not None,
            "a text prompt needs a tokenizer and this model has none: give token ids.",
            RequestError,
        )
        assert self.tokenizer is not None
        ids = self.tokenizer.encode(text)
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        require(bool(ids), "the prompt is empty: give it at least one character.", RequestError)
        self._check_vocabulary(ids)
        return ids

    def _check_ids(self, prompt: object) -> list[int]:
        remedy = "give a text or a list of token ids."
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        require(is_list, f"a prompt of type {type(prompt).__name__}: {remedy}", RequestError)
        assert isinstance(prompt, Sequence)
        ids = list(prompt)
        require(bool(ids), "the prompt is empty: give it at least one token id.", RequestError)
        for i, token in enumerate(() if set(map(type, ids)) == {int} else ids):
            is_id = isinstance(token, int) and not isinstance(token, bool)
            require(is_id, f"prompt[{i}] is {token!r}, not a token id: {remedy}", RequestError)
        self._check_vocabulary(ids)
        return ids

    def _check_vocabulary(self, ids: list[int]) -> None:
        vocab = self.runner.vocab
        if min(ids) >= 0 and max(ids) < vocab:
            return
        wrong = next(i for i, t in enumerate(ids) if not 0 <= t < vocab)
        raise RequestError(
            f"prompt[{wrong}] is {ids[wrong]}, but token ids are 0 .. {vocab - 1}: use the "
            "tokenizer of this model."
        )

    def _check_params(self, params: SamplingParams) -> None:
        vocab = self.runner.vocab
        for token in params.stop_token_ids or ():
            require(
                token < vocab,
                f"stop_token_ids has {token}, but token ids are 0 .. {vocab - 1}: remove it.",
                RequestError,
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name) or 0
            require(
                value <= vocab,
                f"{name}={value} is more than the {vocab} tokens of the vocabulary: lower it.",
                RequestError,
            )
        require(
            not params.stop_strings or self.tokenizer is not None,
            f"stop={params.stop!r} needs a tokenizer and this model has none: use stop_token_ids.",
            RequestError,
        )

    def _rules(self, ids: list[int], params: SamplingParams) -> Rules | None:
        """What the parameters allow of a completion; RequestError for a grammar that is none."""
        budget = params.thinking_token_budget
        if budget is None and not params.structured:
            return None
        require(
            self.tokenizer is not None,
            "a JSON schema, regex or thinking budget needs a tokenizer and this model has none: "
            "leave it out.",
            RequestError,
        )
        assert self.tokenizer is not None
        thinking = opens_thought(self.tokenizer, ids)
        require(
            budget is None or thinking,
            f"thinking_token_budget={budget}, but the prompt opens no thought: leave it out, or "
            "chat with think=True.",
            RequestError,
        )
        grammar = None
        if params.structured:
            if self._grammars is None:
                words, vocab = self.tokenizer.vocabulary(), self.runner.vocab
                self._grammars = Grammars(words, vocab, sorted(self.eos_ids))
            grammar = self._grammars.compile(params.json_schema, params.regex)
        ends = tuple(sorted(self.eos_ids | frozenset(params.stop_token_ids or ())))
        return Rules(self.tokenizer, thinking, budget, grammar, ends)

    # ---- requests -----------------------------------------------------------------------------

    def submit(self, prepared: Prepared) -> Group:
        """Queue the completions of a prompt; their tokens come with later steps."""
        params, number = prepared.params, self._submitted
        seed = params.seed if params.seed is not None else mix_seed(self.seed, number)
        group = Group(
            str(number), prepared.text, prepared.ids, [], self.tokenizer, time.perf_counter()
        )
        ends = frozenset() if params.ignore_eos else self.eos_ids
        requests = [
            Request(
                id=f"{number}-{index}",
                arrival=self._arrivals + index,
                prompt=prepared.ids,
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                seed=seed if index == 0 else mix_seed(seed, index),
                limit=prepared.limit,
                stop_ids=ends | frozenset(params.stop_token_ids or ()),
                keep_logits=prepared.keep_logits,
                prompt_logprobs=[None],
                constraint=prepared.rules.constraint() if prepared.rules else None,
            )
            for index in range(params.n)
        ]
        self.scheduler.check(requests[0])
        group.reused = self._reuse(requests)
        for request in requests:
            self.scheduler.add(request)
            parser = prepared.chat.parser() if prepared.chat else None
            completion = Completion(request, self.tokenizer, parser)
            group.completions.append(completion)
            self._by_request[request.id] = (group, completion)
        self._submitted += 1
        self._arrivals += len(requests)
        self._groups[group.id] = group
        if self.lead is not None:
            self.lead.submit(prepared)
        return group

    def reuse(self, nbytes: int) -> None:
        """Keep up to so many bytes of what prompts leave behind, see `Prefixes`."""
        self.prefixes = Prefixes(nbytes)
        if self.lead is not None:
            self.lead.reuse(nbytes)

    def _reuse(self, requests: Sequence[Request]) -> int:
        """Let new requests go on from an earlier prompt; the tokens that are spared. A draft block
        has read that prompt's own next token there, which can cost a draft and no more."""
        first = requests[0]
        if self.prefixes is None or first.keep_logits or first.params.prompt_logprobs is not None:
            return 0
        found = self.prefixes.find(first.prompt)
        if found is None:
            return 0
        for request in requests:
            request.computed, request.saved = len(found.ids), found.saved
        return len(found.ids)

    def _keep(self, results: Sequence[Result]) -> None:
        """Keep what the prompts that a step has ended left behind, before anything is added."""
        for piece, tokens in results:
            request, prompt = piece.request, piece.request.prompt
            ends = request.state is State.PREFILL and piece.end == len(prompt)
            if self.prefixes is None or not ends or tokens is None or prompt in self.prefixes:
                continue
            if piece.end % self.scheduler.grain:  # a longer prompt has no border there
                continue
            pages = request.pages[: self.scheduler.pages_for(piece.end)]
            saved = self.runner.snapshot(pages, request.slot)
            self.prefixes.keep(prompt, saved, saved.nbytes)

    def cancel(self, request_id: str) -> None:
        """End a request's completions before the next step ("abort"); unknown ids are ignored.

        Thread-safe. What was generated so far stays in the output.
        """
        self._cancelled.append(request_id)

    def drop_cancelled(self) -> None:
        """Carry out what `cancel` asked for."""
        ended = []
        while self._cancelled:
            ended.append(self._cancelled.popleft())
            group = self._groups.get(ended[-1])
            for completion in group.completions if group else ():
                if completion.request.state is not State.DONE:
                    self._finish(completion.request, "abort")
        if self.lead is not None:
            self.lead.cancel(ended)

    # ---- steps --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while any completion is unfinished."""
        return self.scheduler.busy

    def step(self) -> None:
        """Run one step. If the device fails, what ran in it ends ("abort") and the error goes on.

        The next one may have been started when this returns (`run_ahead`). CapacityError where
        device memory ran out in spite of the plan.
        """
        self.drop_cancelled()
        if not self.busy:
            self.settle()
            return
        start = time.perf_counter()
        decoding = sum(r.state is State.DECODE for r in self.scheduler.running)
        if self._ahead is not None:
            decoding = len(self._ahead[0].decode)
        if self.depth is not None and self._ahead is None:
            self.scheduler.drafts = self.depth.next(decoding)
        if self.lead is not None:
            self.lead.tick(self.scheduler.drafts)
        step, results = Step(), []
        try:
            step, flight = self._started() or self._next()
            if flight is None:
                results = self.runner.run(step)
            else:
                self._run_ahead(step, flight)
                results = self.runner.read(step, flight)
        except BaseException as problem:
            self._ahead = None
            self._abort(step)
            if isinstance(problem, torch.OutOfMemoryError):
                raise CapacityError(
                    f"out of device memory in a step of {step.tokens} tokens: lower prefill_piece, "
                    f"max_requests or the share of memory. ({problem})"
                ) from problem
            raise
        if self.lead is not None:
            self.lead.checksum = checked(self.lead.checksum, results)
        self._keep(results)
        new = sum(self._book(piece, tokens) for piece, tokens in results)
        seconds = time.perf_counter() - start
        self.meter.count(step, new, seconds)
        self._book_drafts(step, results, decoding, seconds)

    def _next(self) -> tuple[Step, Flight | None]:
        """Plan the next step, and start it if that needs no waiting."""
        step = self.scheduler.step()
        self.draft_meter.propose(step)
        return step, self.runner.launch(step)

    def _run_ahead(self, step: Step, flight: Flight) -> None:
        """Start the step after one that runs, so that the device need not wait for the host to read
        and book its tokens; not where they may decide what that step is."""
        if not self.run_ahead or not all(is_foreseen(p.request) for p in step.decode):
            return
        if self.runner.drafter is not None and self.lead is not None:
            return  # the number of drafts hangs on a clock, which other ranks do not see
        if self.depth is not None and not self.depth.stays(len(step.decode)):
            return
        planned = self.scheduler.ahead(step)
        if planned is not None:
            self.draft_meter.propose(planned)
            following = self.runner.launch(planned, behind=flight)
            self._ahead = None if following is None else (planned, following)

    def _started(self) -> tuple[Step, Flight] | None:
        """The step that was started ahead, now that it is known where its pieces start."""
        if self._ahead is None:
            return None
        (step, flight), self._ahead = self._ahead, None
        pieces = [Piece(p.request, p.request.computed, p.count) for p in step.decode]
        return Step(decode=pieces), flight

    def settle(self) -> None:
        """Wait for a step that was started and forget it; nothing that runs may be in it."""
        if self._ahead is not None:
            if self.lead is not None:
                self.lead.settle()
            self.runner.read(*self._ahead)
            self._ahead = None

    def _book_drafts(
        self, step: Step, results: Sequence[Result], decoding: int, seconds: float
    ) -> None:
        drafter = self.runner.drafter
        if drafter is None:
            return
        accepted = [(p, len(tokens or [0]) - 1) for p, tokens in results[: len(step.decode)]]
        self.draft_meter.verify(drafter.shape, [(p, n) for p, n in accepted if p.count > 1])
        if not step.prefill:
            self.draft_meter.spend(self.runner.clock.seconds())
        if self.depth is not None:
            alone = not (step.prefill or step.saves or step.restores)
            full = [n for p, n in accepted if p.count == 1 + self.depth.current]
            self.depth.book(decoding, full, seconds if alone else None)

    def _book(self, piece: Piece, tokens: list[int] | None) -> int:
        """As `_take`; a fault in one request's text or grammar ends that request alone."""
        request = piece.request
        try:
            if request.fault is not None:
                raise request.fault
            return self._take(piece, tokens)
        except Exception as problem:
            log.exception("request %s failed", request.id)
            self.scheduler.finish(request, "error", f"{type(problem).__name__}: {problem}")
            self._by_request.pop(request.id, None)
            self.runner.sampler.forget(request)
            group = self._groups.get(request.id.partition("-")[0])
            if group is not None and group.finished:
                del self._groups[group.id]
            return 0

    def _take(self, piece: Piece, tokens: list[int] | None) -> int:
        """Book what one piece brought; the number of new tokens."""
        request = piece.request
        group, completion = self._by_request[request.id]
        if tokens is None:
            self._finish(request, "error", "the model's logits are not finite")
            return 0
        kept = self.scheduler.advance(piece, tokens)
        del request.logprobs[len(request.output) :]
        if kept and group.first_token is None:
            group.first_token = time.perf_counter()
            self.meter.first_token_seconds += group.first_token - group.submitted
            self.meter.requests += 1
        stop = completion.push(kept)
        if stop is not None:
            self._finish(request, "stop", stop)
        elif request.state is State.DONE:
            self._finish(request, request.finish_reason or "stop", request.stop_reason)
        return len(kept)

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> None:
        self.scheduler.finish(request, reason, stop_reason)
        group, completion = self._by_request.pop(request.id)
        late_stop = completion.close()
        if late_stop is not None and reason == "length":
            self.scheduler.finish(request, "stop", late_stop)
        self.runner.sampler.forget(request)
        if group.finished:
            self._groups.pop(group.id, None)

    def _abort(self, step: Step) -> None:
        """End everything whose pages or states the failed step may have left half written."""
        touched = [move.request for move in step.saves] + list(self.scheduler.running)
        for request in touched:
            if request.state is not State.DONE:
                self._finish(request, "abort")
