"""Drafts change nothing but the number of steps: the engine over the exact model, all at once.

The model's own draft block is right as long as its caches are whole; stubs are right or wrong on
purpose. Every engine's free memory is NaN at all times.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemotriton.engine import replay
from nemotriton.engine.depth import Depth
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.drafter import Drafter
from nemotriton.engine.engine import Engine
from nemotriton.engine.request import Piece, Request
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import ConfigError
from nemotriton.text.tokens import ByteTokenizer
from tests import fake_model
from tests.fake_model import VOCAB, finish, greedy, ids_of, make_engine, submit

GREEDY = SamplingParams(temperature=0, max_tokens=14)
WARM = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=14, seed=5)
SHAPES = ["0", "0,1", "0,1,2", "0,1,2,3,4", "0,0,1", "0,0,0,1,1,2,4"]


@pytest.fixture(params=["lanes", "replay"], autouse=True)
def rollback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with both ways to roll back; states are stored every few tokens."""
    monkeypatch.setattr(fake_model, "ROLLBACK", request.param)
    monkeypatch.setattr(replay, "REPLAY_INTERVAL", 8)
    return request.param


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(VOCAB), k=length)


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    engine = make_engine()
    group = submit(engine, prompt, params)
    finish(engine)
    return ids_of(group)


class Stub(Drafter):
    """Drafts the true continuation where `right(pass number, depth)`, else another token."""

    truth: dict[str, Sequence[int]]
    right: Callable[[int, int], bool]
    passes = 0

    def propose(self, pieces: Sequence[Piece]) -> Tensor:
        ids = []
        for request in [p.request for p in pieces]:
            true, done = self.truth[request.id], len(request.output)
            for draft in range(1, request.drafts + 1):
                depth = self.shape.depth(draft)
                token = true[done + depth - 1] if done + depth - 1 < len(true) else 0
                ids.append(token if self.right(self.passes, depth) else (token + 7) % VOCAB)
        self.passes += 1
        return torch.tensor(ids, device=self.device)


def stubbed(engine: Engine, right: Callable[[int, int], bool]) -> Stub:
    own = engine.runner.drafter
    assert own is not None
    where = (own.model, own.caches, own.sampler, own.shape)
    stub = Stub(*where, page_size=own.page_size, device=own.device)
    stub.truth, stub.right = {}, right
    engine.runner.drafter = stub
    return stub


# ------------------------------------------------------------------------------- right and wrong
@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
def test_stubs_right_wrong_and_wrong_from_each_position(drafts: int) -> None:
    """Also right, then wrong from another position on every pass. Token ids, and how many steps."""
    prompt, true = prompt_of(9), greedy(prompt_of(9), 14)
    rules = {j: lambda n, depth, j=j: depth < j for j in range(1, drafts + 2)}
    rules[0] = lambda n, depth: depth <= n % (drafts + 1)
    rules[-1] = lambda n, depth: depth % 2 == 0  # a right one behind a wrong one counts for nothing
    for j, rule in rules.items():
        engine = make_engine(shape=DraftShape.chain(drafts), piece=5)
        stub = stubbed(engine, rule)
        group = submit(engine, prompt, GREEDY)
        stub.truth[group.completions[0].request.id] = true
        finish(engine)
        assert ids_of(group) == true, f"wrong from {j}"
        meter = engine.draft_meter
        if j >= 1:
            assert meter.hit[: j - 1] == meter.tried[: j - 1]
            assert not any(meter.hit[j - 1 :])
            passes = -(-13 // j)  # each brings j tokens
            assert engine.meter.steps == 2 + passes
        if j == -1:
            assert meter.accepted == 0


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_block_is_always_right(shape: str, params: SamplingParams) -> None:
    """Pieces, neighbours that join and leave, pages for a part of them: tokens as without drafts,
    and every draft on the likeliest path accepted, which needs the block's caches to be whole."""
    engine = make_engine(shape=DraftShape.parse(shape), pages=24, piece=7, max_context=64, slots=4)
    lengths = [10, 8, 1, 12, 6, 30, 9]
    groups = []
    for n in lengths:
        groups.append(submit(engine, prompt_of(n), params))
        engine.step()
    finish(engine)
    for n, group in zip(lengths, groups):
        assert ids_of(group) == alone(prompt_of(n), params), f"prompt of {n}"
    meter = engine.draft_meter
    assert meter.proposed == meter.verified > 0
    assert meter.hit[0] == meter.tried[0]
    if DraftShape.parse(shape).is_chain:
        assert meter.accepted == meter.verified


def test_a_tree_goes_down_the_branch_that_is_right() -> None:
    """Only one of the alternatives is right, each in turn."""
    shape, true = DraftShape.parse("0,0,1,1,2,2,6"), greedy(prompt_of(9), 14)
    for path in ([1, 3], [1, 4], [2, 5], [2, 6, 7], [2], []):
        engine = make_engine(shape=shape)
        stub = stubbed(engine, lambda n, depth: True)
        plain = stub.propose

        def propose(pieces: Sequence[Piece], path=path, plain=plain) -> Tensor:
            ids = plain(pieces)
            off = [d - 1 for d in range(1, len(ids) + 1) if d not in path]
            ids[off] = (ids[off] + 1 + torch.tensor(off, dtype=torch.int64)) % VOCAB
            return ids

        stub.propose = propose  # type: ignore[method-assign]
        group = submit(engine, prompt_of(9), GREEDY)
        stub.truth[group.completions[0].request.id] = true
        finish(engine)
        assert ids_of(group) == true
        assert engine.draft_meter.hit[: len(path)] != [0] * len(path) or not path
        assert not any(engine.draft_meter.hit[len(path) :])


def test_one_batch_of_pieces_plain_rows_and_drafts() -> None:
    """A drafts, B prefills in pieces, C starts in the same step, D may not draft any more."""
    engine = make_engine(shape=DraftShape.chain(3), piece=16, pages=64, max_context=160)
    a = submit(engine, prompt_of(12), replace(GREEDY, max_tokens=40))
    d = submit(engine, prompt_of(4), replace(GREEDY, max_tokens=2))
    engine.step()
    b, c = submit(engine, prompt_of(90), GREEDY), submit(engine, prompt_of(3), GREEDY)
    kinds = []
    plan = engine.scheduler.step

    def step() -> object:
        planned = plan()
        counts = [p.count for p in planned.decode]
        kinds.append((1 in counts, max(counts, default=0) > 1, bool(planned.prefill)))
        return planned

    engine.scheduler.step = step  # type: ignore[method-assign, assignment]
    finish(engine)
    assert (True, True, True) in kinds, "a step with all three kinds of row"
    for group, n, count in ((a, 12, 40), (b, 90, 14), (c, 3, 14), (d, 4, 2)):
        assert ids_of(group) == greedy(prompt_of(n), count)


# ------------------------------------------------------------------------------------- the ends
@pytest.mark.parametrize("shape", ["0,1,2,3,4", "0,0,1,1,2,3"])
def test_a_stop_inside_an_accepted_run(shape: str) -> None:
    """At once, as soon as min_tokens allows it, and forbidden by min_tokens."""
    prompt = prompt_of(9)
    for at, least in [(1, 0), (2, 0), (3, 0), (4, 0), (2, 2), (3, 3), (5, 5), (2, 9), (4, 9)]:
        stop = greedy(prompt, 14)[at]
        params = replace(GREEDY, stop_token_ids=[stop], min_tokens=least, logprobs=2)
        want = make_engine()
        plain = submit(want, prompt, params)
        finish(want)
        engine = make_engine(shape=DraftShape.parse(shape))
        group = submit(engine, prompt, params)
        deltas: list[int] = []
        while engine.busy:
            engine.step()
            deltas += [t for delta in group.take() for t in delta.token_ids]
        assert deltas == ids_of(group) == ids_of(plain)
        ended, other = group.output().outputs[0], plain.output().outputs[0]
        assert (ended.finish_reason, ended.stop_reason) == (other.finish_reason, other.stop_reason)
        assert ended.logprobs == other.logprobs, "logprobs are the trunk's, and no more than tokens"


def test_a_stop_string_across_and_inside_an_accepted_run() -> None:
    prompt = prompt_of(9)
    tokenizer = ByteTokenizer(VOCAB, None, ())
    whole = make_engine(tokenizer=tokenizer)
    plain = submit(whole, prompt, GREEDY)
    finish(whole)
    text = plain.output().outputs[0].text
    for start in range(len(text) - 1):
        params = replace(GREEDY, stop=[text[start : start + 2]])
        outputs = []
        for shape in (None, DraftShape.chain(5)):
            engine = make_engine(tokenizer=tokenizer, shape=shape)
            group = submit(engine, prompt, params)
            streamed = ""
            while engine.busy:
                engine.step()
                streamed += "".join(delta.text for delta in group.take())
            outputs.append(group.output().outputs[0])
            assert streamed == outputs[-1].text
            assert params.stop[0] not in streamed  # type: ignore[index]
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6, 7])
def test_to_the_last_token_of_the_context(room: int) -> None:
    """Drafts shrink at the end: no page, position or lane beyond what there is."""
    engine = make_engine(pages=8, max_context=32, shape=DraftShape.chain(5), slots=1, requests=1)
    params = SamplingParams(temperature=0, max_tokens=None)
    group = submit(engine, prompt_of(32 - room), params)
    finish(engine)
    assert ids_of(group) == greedy(prompt_of(32 - room), room)
    assert engine.draft_meter.accepted == engine.draft_meter.verified <= max(room - 2, 0)


def test_cancelling_in_the_middle_of_drafts() -> None:
    engine = make_engine(shape=DraftShape.chain(3), slots=2, requests=2)
    kept, gone = (submit(engine, prompt_of(n), replace(GREEDY, max_tokens=30)) for n in (8, 9))
    for _ in range(3):
        engine.step()
    engine.cancel(gone.id)
    late = submit(engine, prompt_of(5), GREEDY)  # takes over the slot, its lanes and its cursor
    finish(engine)
    assert ids_of(gone) == greedy(prompt_of(9), 30)[: len(ids_of(gone))]
    assert ids_of(kept) == greedy(prompt_of(8), 30)
    assert ids_of(late) == greedy(prompt_of(5), 14)


def test_broken_logits_inside_a_run_end_the_request_where_they_would_without_drafts() -> None:
    prompt, true = [t % 200 for t in prompt_of(9)], []
    for at in range(1, 6):
        true = greedy(prompt, 14)
        outputs = []
        for shape in (None, DraftShape.chain(3), DraftShape.parse("0,0,1,1")):
            engine = make_engine(shape=shape)
            engine.runner.model.broken = {true[at]}  # type: ignore[attr-defined]
            group = submit(engine, prompt, GREEDY)
            finish(engine)
            outputs.append(group.output().outputs[0])
        assert outputs[0].finish_reason == "error"
        assert outputs[1:] == outputs[:1] * 2


# ------------------------------------------------------------------------------- penalties, seeds
@pytest.mark.parametrize("shape", ["0,1,2", "0,0,1,1,3"])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_penalties_count_the_drafts_before_a_row(shape: str, temperature: float) -> None:
    """A token accepted in a run counts later in the same run, as it does without drafts.

    Presence is rewarded, so that a token's first use decides about the next ones."""
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=24, repetition_penalty=1.1,
        presence_penalty=-1.5, frequency_penalty=0.3,
    )  # fmt: skip
    for seed in range(4):
        prompt = prompt_of(40, seed)
        want = alone(prompt, params)
        assert len(set(want)) < len(want), "tokens come back"
        engine = make_engine(shape=DraftShape.parse(shape))
        group = submit(engine, prompt, params)
        finish(engine)
        assert ids_of(group) == want
        meter = engine.draft_meter
        assert meter.hit[:2] == meter.tried[:2], "the drafter counts alike"


def test_seeds_whatever_the_depth() -> None:
    """One seed, one text: with any number of drafts, any neighbours, and again."""
    params = [replace(WARM, seed=s) for s in (1, 1, 2)]
    want = [alone(prompt_of(6), p) for p in params]
    assert want[0] == want[1] != want[2]
    for shape in SHAPES:
        engine = make_engine(shape=DraftShape.parse(shape), piece=4)
        groups = [submit(engine, prompt_of(6), p) for p in params]
        finish(engine)
        assert [ids_of(g) for g in groups] == want


# ----------------------------------------------------------------------------------------- shapes
def test_shapes() -> None:
    tree = DraftShape.parse("0,0,1,1,3")
    assert [tree.path(d) for d in range(6)] == [[], [1], [2], [1, 3], [1, 4], [1, 3, 5]]
    assert tree.levels(5) == [[1, 2], [3, 4], [5]]
    assert tree.levels(3) == [[1, 2], [3]]
    assert tree.row_parents(3) == [-1, 0, 0, 1]
    assert (tree.options, DraftShape.chain(2).options) == ([0, 5], [0, 1, 2])
    assert DraftShape.parse("0,1,2") == DraftShape.chain(3) == DraftShape.wanted(3, None)
    assert DraftShape.wanted(0, None) is None
    assert DraftShape.wanted(0, "0,0") == DraftShape.wanted(2, "0,0") == DraftShape((0, 0))
    for text in ("", "0,", "1", "0,3", "-1", "0,1,0", ",".join("0" * 33)):
        with pytest.raises(ConfigError):
            DraftShape.parse(text)


# ------------------------------------------------------------------------------------------ depth
def simulate(
    depth: Depth, steps: int, accept: Callable[[int], float], cost: Callable[[int], float]
) -> list[int]:
    """Depths chosen: draft i + 1 is accepted behind i with chance accept(i); a step of d costs
    cost(d)."""
    rng, chosen = random.Random(0), []
    for _ in range(steps):
        d = depth.next(1)
        accepted = 0
        while accepted < d and rng.random() < accept(accepted):
            accepted += 1
        depth.book(1, [accepted], cost(d) * rng.uniform(0.95, 1.05))
        chosen.append(d)
    return chosen


def share(chosen: list[int], want: int) -> float:
    late = chosen[len(chosen) // 2 :]
    return late.count(want) / len(late)


def test_depth_finds_what_pays_and_comes_back() -> None:
    depth = Depth(DraftShape.chain(5))
    good = simulate(depth, 600, lambda i: 0.9, lambda d: 1 + 0.05 * d)
    assert share(good, 5) > 0.9
    bad = simulate(depth, 1500, lambda i: 0.02, lambda d: 1 + 0.05 * d)
    assert share(bad, 0) > 0.9
    again = simulate(depth, 1000, lambda i: 0.9, lambda d: 1 + 0.05 * d)
    assert share(again, 5) > 0.9


def test_depth_may_end_in_between() -> None:
    """Sure for two drafts, hopeless behind them."""
    chosen = simulate(
        Depth(DraftShape.chain(5)), 1200, lambda i: 1.0 if i < 2 else 0.0, lambda d: 1 + 0.2 * d
    )
    assert share(chosen, 2) > 0.85


def test_depth_depends_on_how_many_decode_and_can_be_fixed() -> None:
    depth = Depth(DraftShape.chain(3))
    for _ in range(300):
        for requests, cost in ((1, 0.05), (64, 1.0)):
            d = depth.next(requests)
            depth.book(requests, [min(d, 2)] * requests, 1 + cost * d)
    assert depth.rate(1, 2) is not None
    assert [depth.next(1), depth.next(64)] == [2, 0]
    fixed = Depth(DraftShape.chain(3), adaptive=False)
    assert simulate(fixed, 50, lambda i: 0.0, lambda d: 1 + d) == [3] * 50


def test_depth_never_changes_a_token() -> None:
    """Driven by a clock that says anything."""
    engine = make_engine(shape=DraftShape.chain(3), piece=6)
    rng = random.Random(1)
    depth = Depth(DraftShape.chain(3))
    book = depth.book
    depth.book = lambda n, accepted, _: book(n, accepted, rng.random())  # type: ignore[method-assign]
    engine.depth = depth
    groups = [submit(engine, prompt_of(n), replace(GREEDY, max_tokens=60)) for n in (5, 9, 3)]
    finish(engine)
    for n, group in zip((5, 9, 3), groups):
        assert ids_of(group) == greedy(prompt_of(n), 60)
    assert 0 < engine.draft_meter.verified < 3 * engine.meter.output_tokens


def test_no_draft_starts_from_what_was_never_kept() -> None:
    """A request's drafts start from the block's output behind its last computed token."""
    engine = make_engine(shape=DraftShape.chain(2))
    request: Request = submit(engine, prompt_of(5), GREEDY).completions[0].request
    assert request.hidden is None
    engine.step()
    assert request.hidden is not None
    finish(engine)
    assert request.hidden is None
