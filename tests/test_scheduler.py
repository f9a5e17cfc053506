"""Scheduler and pools: no leak, no double use, every request ends, whatever the order of events."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nemotriton.engine.pool import Pool
from nemotriton.engine.request import Piece, Request, State, Step
from nemotriton.engine.sampling import SamplingParams
from nemotriton.engine.scheduler import Scheduler
from nemotriton.errors import CapacityError


def make(arrival: int, prompt: int, limit: int, **params: object) -> Request:
    values = SamplingParams(max_tokens=None, **params)  # type: ignore[arg-type]
    return Request(f"r{arrival}", arrival, [7] * prompt, values, 0, limit)


def scheduler(
    pages: int | None = 8, slots: int | None = 4, requests: int = 4, piece: int = 16, size: int = 4
) -> Scheduler:
    return Scheduler(
        pages=None if pages is None else Pool(pages, "pages"),
        slots=None if slots is None else Pool(slots, "slots"),
        page_size=size,
        max_requests=requests,
        prefill_piece=piece,
    )


def tokens_of(piece: Piece, accepted: int = 0) -> list[int]:
    """What a model would return for a piece."""
    request = piece.request
    if request.state is State.DECODE:
        return [1] * (1 + min(accepted, request.drafts))
    return [1] if piece.end == len(request.prompt) and not request.keep_logits else []


def run(s: Scheduler, limit: int = 10_000) -> list[Step]:
    steps = []
    while s.busy:
        step = s.step()
        steps.append(step)
        for piece in [*step.decode, *step.prefill]:
            s.advance(piece, tokens_of(piece))
        assert len(steps) < limit, "the scheduler goes round in circles"
    return steps


class PoolMachine(RuleBasedStateMachine):
    """A pool against a set."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(9, "pages")
        self.held: set[int] = set()

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.free))
        got = self.pool.take(count)
        assert len(set(got)) == count
        assert not self.held & set(got), "handed out twice"
        assert set(got) <= set(range(9))
        self.held |= set(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        back = data.draw(st.sets(st.sampled_from(sorted(self.held))))
        self.pool.give(sorted(back))
        self.held -= back

    @rule()
    def refuse_too_many(self) -> None:
        with pytest.raises(AssertionError, match="wanted"):
            self.pool.take(self.pool.free + 1)

    @precondition(lambda self: len(self.held) < 9)
    @rule()
    def refuse_what_is_free(self) -> None:
        stranger = next(i for i in range(9) if i not in self.held)
        with pytest.raises(AssertionError, match="is free"):
            self.pool.give([stranger])

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.pool.free + len(self.held) == 9
        assert self.pool.taken == len(self.held)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps, drafts, cancels and stops, checked after each."""

    @initialize(
        pages=st.sampled_from([None, 3, 6, 20]),
        slots=st.sampled_from([None, 3, 5]),
        requests=st.integers(1, 5),
        piece=st.integers(1, 13),
    )
    def begin(self, pages: int | None, slots: int | None, requests: int, piece: int) -> None:
        self.s = scheduler(pages, slots, min(requests, slots or requests), piece)
        self.all: list[Request] = []
        self.saved: dict[str, int] = {}

    @rule(prompt=st.integers(1, 30), limit=st.integers(1, 25))
    def add(self, prompt: int, limit: int) -> None:
        request = make(len(self.all), prompt, limit)
        fits = self.s.pages is None or -(-(prompt + limit - 1) // 4) <= self.s.pages.size
        if not fits:
            with pytest.raises(CapacityError, match=f"{prompt + limit - 1} tokens"):
                self.s.add(request)
            return
        self.s.add(request)
        self.all.append(request)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.s.drafts = data.draw(st.integers(0, 9))
        oldest = self.s.running[0] if self.s.running else None
        before = (oldest.computed, oldest.length) if oldest else None
        step = self.s.step()
        self.check(step)
        for piece in [*step.decode, *step.prefill]:
            self.s.advance(piece, tokens_of(piece, data.draw(st.integers(0, 9))))
        if oldest is not None:
            assert (oldest.computed, oldest.length) != before, "the oldest request stood still"

    def check(self, step: Step) -> None:
        s = self.s
        for move in step.saves:
            assert move.request.state is State.WAITING
            self.saved[move.request.id] = move.request.computed
        for move in step.restores:
            assert self.saved.pop(move.request.id) == move.request.computed > 0
            assert len(move.pages) == s.pages_for(move.request.computed)
            assert list(move.pages) == move.request.pages[: len(move.pages)]
            assert move.slot == move.request.slot
        assert not (step.saves and step.restores)
        assert sum(p.count for p in step.prefill) <= s.prefill_piece
        pieces = [*step.decode, *step.prefill]
        assert len({p.request.id for p in pieces}) == len(pieces)
        for p in pieces:
            assert p.count >= 1
            assert p.start == p.request.computed
            assert p.request in s.running
            assert s.pages_for(p.end) <= len(p.request.pages) or s.pages is None
            assert (p.request.state is State.DECODE) == (p in step.decode)
            assert p.count == 1 + p.request.drafts or p in step.prefill
            assert p.request.drafts == 0 or len(p.request.output) + p.count <= p.request.limit
        assert bool(pieces) == s.busy

    @precondition(lambda self: getattr(self, "all", None))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.all))
        if request.state is not State.DONE:
            self.s.finish(request, "abort")
            self.saved.pop(request.id, None)
            assert request.finish_reason == "abort"

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "s"):
            return
        s = self.s
        live = [r for r in self.all if r.state is not State.DONE]
        assert sorted(r.id for r in live) == sorted(r.id for r in [*s.waiting, *s.running])
        order = [r.arrival for r in [*s.running, *s.waiting]]
        assert order == sorted(order), "what runs must be older than what waits"
        assert len(s.running) <= s.max_requests
        pages = [page for r in self.all for page in r.pages]
        assert len(set(pages)) == len(pages), "two requests share a page"
        if s.pages is not None:
            assert s.pages.taken == len(pages), "a page leaked"
        slots = [r.slot for r in self.all if r.slot >= 0]
        assert len(set(slots)) == len(slots), "two requests share a slot"
        if s.slots is not None:
            assert s.slots.taken == len(slots) == len(s.running), "a slot leaked"
        for r in self.all:
            if r.state in (State.WAITING, State.DONE):
                assert not r.pages
                assert r.slot == -1

    def teardown(self) -> None:
        if not hasattr(self, "s"):
            return
        while self.s.busy:
            step = self.s.step()
            self.check(step)
            for piece in [*step.decode, *step.prefill]:
                self.s.advance(piece, tokens_of(piece))
        assert all(r.state is State.DONE for r in self.all)
        assert all(r.finish_reason for r in self.all)
        for r in self.all:
            assert r.finish_reason == "abort" or len(r.output) == r.limit
        assert self.s.pages is None or self.s.pages.taken == 0
        assert self.s.slots is None or self.s.slots.taken == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(
    prompt=st.integers(1, 40),
    piece=st.integers(1, 45),
    limit=st.integers(1, 9),
)
def test_a_prompt_is_cut_into_pieces_that_cover_it_once(
    prompt: int, piece: int, limit: int
) -> None:
    s = scheduler(pages=20, piece=piece)
    request = make(0, prompt, limit)
    s.add(request)
    steps = run(s)
    cuts = [(p.start, p.end) for step in steps for p in step.prefill]
    assert cuts == [(i, min(i + piece, prompt)) for i in range(0, prompt, piece)]
    assert sum(len(step.decode) for step in steps) == limit - 1


def test_prefill_and_decode_share_a_step_and_the_budget_is_for_all_prompts() -> None:
    s = scheduler(pages=40, piece=10)
    for arrival, prompt in enumerate((10, 4, 9)):
        s.add(make(arrival, prompt, 5))
    first = s.step()
    assert [p.count for p in first.prefill] == [10]
    s.advance(first.prefill[0], [1])
    second = s.step()
    assert [p.request.id for p in second.decode] == ["r0"]
    assert [(p.request.id, p.count) for p in second.prefill] == [("r1", 4), ("r2", 6)]


def test_the_newest_is_preempted_and_resumes_where_it_was() -> None:
    s = scheduler(pages=5, slots=2, requests=2)
    old, new = make(0, 8, 12), make(1, 4, 8)
    s.add(old)
    s.add(new)
    saves, restores, at = [], [], 0
    while s.busy:
        step = s.step()
        if step.saves:
            at = step.saves[0].request.computed
        saves += [m.request.id for m in step.saves]
        for m in step.restores:
            assert m.request.computed == at
            assert m.request.state is State.DECODE
        restores += [m.request.id for m in step.restores]
        for piece in [*step.decode, *step.prefill]:
            s.advance(piece, tokens_of(piece))
    assert saves == restores == ["r1"]
    assert s.preemptions == 1
    assert (len(old.output), len(new.output)) == (12, 8)


def test_only_pages_with_computed_tokens_are_saved() -> None:
    s = scheduler(pages=8, slots=2, requests=2, piece=8)
    old, new = make(0, 8, 12), make(1, 16, 1)
    s.add(old)
    s.advance(s.step().prefill[0], [1])
    s.add(new)
    s.prefill_piece = 1
    step = s.step()
    assert [p.count for p in step.prefill] == [1]
    assert len(new.pages) == 4
    saved = []
    while not saved:
        for piece in [*step.decode, *step.prefill]:
            s.advance(piece, tokens_of(piece))
        step = s.step()
        saved = step.saves
    assert new.computed < 16
    assert len(saved[0].pages) == s.pages_for(new.computed) < 4


def test_nobody_is_preempted_for_drafts() -> None:
    s = scheduler(pages=6, slots=2, requests=2)
    old, new = make(0, 7, 9), make(1, 7, 4)
    s.add(old)
    s.add(new)
    for piece in s.step().prefill:
        s.advance(piece, [1])
    s.drafts = 8
    step = s.step()
    assert not step.saves
    # of 8 more tokens the last is never fed back, so the older one drafts 7, on the last two pages
    assert [p.count for p in step.decode] == [8, 1]
    s.advance(step.decode[0], [1])
    s.advance(step.decode[1], [1])
    assert [len(r.pages) for r in (old, new)] == [3, 2], "pages of rejected drafts come back"


def test_drafts_shrink_at_the_end() -> None:
    s = scheduler(pages=20)
    request = make(0, 5, 7)
    s.add(request)
    s.advance(s.step().prefill[0], [1])
    s.drafts = 3
    counts = []
    while s.busy:
        piece = s.step().decode[0]
        counts.append(piece.count)
        s.advance(piece, [1, 1])
    assert counts == [4, 4, 2]
    assert len(request.output) == 7


def test_a_newcomer_waits_for_its_whole_prompt_and_nobody_overtakes() -> None:
    s = scheduler(pages=6, piece=100)
    s.add(make(0, 12, 4))
    s.add(make(1, 16, 2))
    s.add(make(2, 1, 1))
    step = s.step()
    assert [p.request.id for p in step.prefill] == ["r0"]
    run(s)


def test_stop_ids_end_a_request_and_later_tokens_are_dropped() -> None:
    s = scheduler()
    request = make(0, 2, 9, stop_token_ids=[5], min_tokens=1)
    request.stop_ids = frozenset({5, 2})
    s.add(request)
    piece = s.step().prefill[0]
    assert s.advance(piece, [2]) == [2], "no stop before min_tokens"
    assert request.state is State.DECODE
    s.drafts = 3
    piece = s.step().decode[0]
    assert piece.count == 4
    assert s.advance(piece, [4, 5, 6, 7]) == [4, 5]
    assert (request.finish_reason, request.stop_reason) == ("stop", 5)
    assert request.output == [2, 4, 5]


def test_an_end_token_is_no_named_stop() -> None:
    s = scheduler()
    request = make(0, 2, 9)
    request.stop_ids = frozenset({2})
    s.add(request)
    s.advance(s.step().prefill[0], [2])
    assert (request.finish_reason, request.stop_reason) == ("stop", None)


def test_scoring_ends_with_the_prompt() -> None:
    s = scheduler(piece=3)
    request = make(0, 7, 1)
    request.keep_logits = True
    s.add(request)
    steps = run(s)
    assert len(steps) == 3
    assert request.finish_reason == "length"
    assert not request.output


def test_what_could_never_fit_is_refused_with_both_numbers() -> None:
    s = scheduler(pages=3)
    with pytest.raises(CapacityError, match=r"may grow to 13 tokens, but the KV cache holds 12"):
        s.add(make(0, 4, 10))
    s.add(make(1, 4, 9))
    assert len(run(s)) == 9


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, nemotriton.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
