"""Steps that start before the tokens of the one before them are read change no token, whoever ends,
comes, is cancelled, preempted or stopped meanwhile, and leave no page or slot behind.

Over the exact model with NaN in free memory; the device is a CPU, on which a step is over when it
has started, so what is tested is the books. CUDA streams are tests/gpu/test_run_ahead.py.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.forced import Forced
from nemotriton import LLM, SamplingParams
from nemotriton.engine import replay
from nemotriton.engine.depth import Depth
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine
from nemotriton.engine.graphs import Direct, Flight
from nemotriton.engine.outputs import Group
from nemotriton.engine.pool import Pool
from nemotriton.engine.request import Piece, Request, State, Step
from nemotriton.engine.scheduler import Scheduler
from tests.fake_model import VOCAB, finish, ids_of, make_engine, submit

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=14)
WARM = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=14, seed=5)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(VOCAB), k=length)


def engine(ahead: bool, **sizes: Any) -> Engine:
    made = make_engine(capture=Direct(CPU), **sizes)
    made.run_ahead = ahead
    return made


def watched(made: Engine) -> list[Step]:
    """Every step that was started ahead of its predecessor's tokens."""
    found: list[Step] = []
    own = made.runner.launch

    def launch(step: Step, behind: Flight | None = None) -> Flight | None:
        flight = own(step, behind)
        if behind is not None and flight is not None:
            found.append(step)
        return flight

    made.runner.launch = launch  # type: ignore[method-assign]
    return found


def clean(made: Engine) -> None:
    """Nothing runs and nobody owns anything."""
    pages, slots = made.scheduler.pages, made.scheduler.slots
    assert pages is None or pages.free == pages.size
    assert slots is None or slots.free == slots.size
    assert not made.scheduler.running
    assert not made.scheduler.waiting
    made.settle()
    assert made._ahead is None


def served(
    made: Engine, work: Sequence[tuple[int, SamplingParams]], every: int = 2
) -> list[tuple[list[int], Any, str | None]]:
    groups: list[Group] = []
    for n, params in work:
        groups.append(submit(made, prompt_of(n), params))
        for _ in range(every):
            made.step()
    finish(made)
    clean(made)
    requests = [g.completions[0].request for g in groups]
    return [(ids_of(g), r.logprobs, r.finish_reason) for g, r in zip(groups, requests)]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("pages", [200, 18])
def test_join_leave_preempt_and_end(params: SamplingParams, pages: int) -> None:
    sizes = {"pages": pages, "slots": 5, "requests": 5, "piece": 9, "max_context": 64}
    ends = [t for t in range(VOCAB) if t % 16 == 1]  # some stop by a token nobody foresaw
    work = [
        (n, replace(params, max_tokens=9 + 4 * i, stop_token_ids=ends if i % 2 else None))
        for i, n in enumerate([10, 8, 1, 12, 6, 30, 9, 2, 17])
    ]
    ahead = engine(True, **sizes)
    started = watched(ahead)
    found = served(ahead, work)
    assert found == served(engine(False, **sizes), work)
    assert len(started) > 10
    assert {"stop", "length"} == {reason for _, _, reason in found}
    assert (ahead.scheduler.preemptions > 0) is (pages == 18)


def test_what_a_token_decides_is_waited_for() -> None:
    """Logprobs, penalties and min_tokens are read before the next step starts; neighbours too."""
    hard = SamplingParams(
        temperature=0.9, seed=3, max_tokens=20, min_tokens=6, repetition_penalty=1.4,
        stop_token_ids=list(range(0, VOCAB, 2)),
    )  # fmt: skip
    told = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    for work in ([(5, hard), (9, WARM)], [(5, told), (9, WARM)]):
        ahead = engine(True, requests=4)
        started = watched(ahead)
        assert served(ahead, work, every=1) == served(engine(False, requests=4), work, every=1)
        special = {"0-0"}
        assert not any(p.request.id in special for s in started for p in s.decode)
        assert started, "once the plain one is alone it runs ahead"


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("rollback", ["lanes", "replay"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts(drafts: int, rollback: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is always right and acceptance is cut short at random: tokens stay as they are.

    Whatever of a step was not accepted is NaN before the next one, of states, rings and K/V."""
    monkeypatch.setattr(replay, "REPLAY_INTERVAL", 8)
    work = [
        (n, replace(params, max_tokens=20 + 9 * i))
        for i, (n, params) in enumerate([(10, GREEDY), (3, WARM), (17, GREEDY), (6, WARM)])
    ]
    plain = [ids for ids, _, _ in served(engine(False), work)]
    forced = Forced(3, drafts, "cpu")
    forced.at_rate(share)
    sizes: dict[str, Any] = {"requests": 3, "shape": DraftShape.chain(drafts), "pages": 48}
    with forced.installed():
        made = engine(True, rollback=rollback, slots=3, **sizes)
        started = watched(made)
        found = served(made, work)
    assert [ids for ids, _, _ in found] == plain
    assert len(started) > 4
    assert all(p.count == drafts + 1 for s in started for p in s.decode)
    accepted, verified = made.draft_meter.accepted, made.draft_meter.verified
    assert verified
    assert (accepted == 0, accepted == verified) == (share == 0, share == 1)


def test_drafts_beside_ends_cancellations_and_few_pages() -> None:
    ends = [t for t in range(VOCAB) if t % 16 == 1]
    stopping = replace(GREEDY, max_tokens=60, stop_token_ids=ends)
    lengths = [10, 8, 1, 12, 6, 30, 9]
    alone = [ids_of(group_of(engine(False), n, stopping)) for n in lengths]
    forced = Forced(4, 2, "cpu")
    forced.at_rate(0.7)
    with forced.installed():
        made = engine(True, requests=4, shape=DraftShape.chain(2), pages=26, slots=4)
        started = watched(made)
        groups = []
        for n in lengths:
            groups.append(submit(made, prompt_of(n), stopping))
            for _ in range(3):
                made.step()
        made.cancel(groups[-1].id)
        finish(made)
    clean(made)
    assert [ids_of(g) for g in groups[:-1]] == alone[:-1]
    cut = ids_of(groups[-1])
    assert cut == alone[-1][: len(cut)]
    assert started


def test_trees_and_a_changing_number_of_drafts_are_not_run_ahead() -> None:
    made = engine(True, requests=2, shape=DraftShape.parse("0,0,1"))
    started = watched(made)
    assert ids_of(group_of(made, 9)) == ids_of(group_of(engine(False), 9))
    assert not started
    made = engine(True, requests=2, shape=DraftShape.chain(2))
    made.depth = Depth(DraftShape.chain(2))
    started = watched(made)
    depths: list[int] = []
    book = made.depth.book

    def booked(requests: int, accepted: Sequence[int], seconds: float | None) -> None:
        assert made.depth is not None
        depths.append(made.depth.current)
        book(requests, accepted, seconds)

    made.depth.book = booked  # type: ignore[method-assign]
    long = replace(GREEDY, max_tokens=110)
    assert ids_of(group_of(made, 9, long)) == ids_of(group_of(engine(False), 9, long))
    assert {*depths} >= {0, 2}, "both are looked at"
    assert started
    assert made.draft_meter.accepted == made.draft_meter.verified > 0


@pytest.mark.parametrize("at", range(1, 7))
def test_cancelled_between_any_two_steps(at: int) -> None:
    """The others say what they say alone, and the cancelled one's places serve a newcomer."""
    alone = [ids_of(group_of(engine(False), n)) for n in (4, 9)]
    made = engine(True, requests=2, slots=2, max_context=64)
    kept, dropped = (submit(made, prompt_of(n), GREEDY) for n in (4, 7))
    for _ in range(at):
        made.step()
    made.cancel(dropped.id)
    newcomer = submit(made, prompt_of(9), GREEDY)
    finish(made)
    assert [ids_of(kept), ids_of(newcomer)] == alone
    assert dropped.completions[0].request.finish_reason == "abort"
    assert len(ids_of(dropped)) <= at
    clean(made)


def group_of(made: Engine, n: int, params: SamplingParams = GREEDY) -> Group:
    group = submit(made, prompt_of(n), params)
    finish(made)
    return group


def test_a_step_that_fails_takes_the_one_behind_it_along() -> None:
    made = engine(True, requests=2)
    group = submit(made, prompt_of(4), GREEDY)
    for _ in range(4):
        made.step()
    assert made._ahead is not None
    steps = made.runner.steps
    assert steps is not None
    own = steps.read

    def broken(flight: Flight) -> Any:
        raise RuntimeError("the device is gone")

    steps.read = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="is gone"):
        made.step()
    steps.read = own  # type: ignore[method-assign]
    assert group.completions[0].request.finish_reason == "abort"
    assert made._ahead is None
    clean(made)
    assert ids_of(group_of(made, 9)) == ids_of(group_of(engine(False), 9))


def test_the_device_need_not_wait_for_the_host() -> None:
    """The next step has started when a step's tokens are read; each is read once, in order."""
    made = engine(True, requests=2)
    order: list[str] = []
    launch, read = made.runner.launch, made.runner.read

    def launched(step: Step, behind: Flight | None = None) -> Flight | None:
        order.append(f"start {step.decode[0].start if step.decode else 'prompt'}")
        return launch(step, behind)

    def taken(step: Step, flight: Flight) -> Any:
        order.append(f"read {step.decode[0].start}")
        return read(step, flight)

    made.runner.launch, made.runner.read = launched, taken  # type: ignore[method-assign]
    submit(made, prompt_of(4), replace(GREEDY, max_tokens=5))
    finish(made)
    assert order == [
        "start prompt", "start 4", "start 5", "read 4", "start 6", "read 5", "start 7", "read 6",
        "read 7",
    ]  # fmt: skip


# ----------------------------------------------------------------------------------- the scheduler
def running(count: int, pages: int, **sizes: int) -> tuple[Scheduler, Step]:
    made = Scheduler(
        pages=Pool(pages, "pages"), slots=Pool(4, "slots"), page_size=4, max_requests=count,
        prefill_piece=64,
    )  # fmt: skip
    for i in range(count):
        made.add(Request(f"{i}", i, prompt_of(5), GREEDY, seed=0, limit=sizes.get("limit", 9)))
    for piece in made.step().prefill:
        made.advance(piece, [1])
    return made, made.step()


def test_a_step_ahead_has_the_pages_of_its_tokens() -> None:
    made, step = running(2, 9)
    following = step
    for known in (7, 8, 9):  # tokens behind each step, of which the last is computed in the next
        ahead = made.ahead(following)
        assert ahead is not None
        assert [(p.start, p.count) for p in ahead.decode] == [(known - 1, 1)] * 2
        assert all(len(p.request.pages) == -(-known // 4) for p in ahead.decode)
        for piece in following.decode:
            made.advance(piece, [1])
        following = ahead


def test_no_step_ahead_of_what_decides_it() -> None:
    made, step = running(2, 9)
    assert made.ahead(Step()) is None
    prompt = Step(decode=step.decode, prefill=[Piece(made.running[0], 0, 2)])
    assert made.ahead(prompt) is None
    assert made.ahead(Step(decode=step.decode[:1])) is None, "somebody joined"
    made.drafts = 1
    assert made.ahead(step) is None, "this one had none"
    made.drafts = 0
    assert made.ahead(step) is not None
    made.finish(made.running[1], "abort")
    assert made.ahead(step) is None, "somebody left"
    made, step = running(2, 9, limit=2)
    assert made.ahead(step) is None, "both end by their limit"
    made, step = running(2, 5)
    for piece in step.decode:
        made.advance(piece, [1])
    step = made.step()
    assert made.pages is not None
    made.pages.take(made.pages.free)
    for piece in step.decode:
        made.advance(piece, [1])
    step = Step(decode=[Piece(r, r.computed, 1) for r in made.running])
    assert made.ahead(step) is None, "no pages"
    assert all(r.state is State.DECODE for r in made.running)


def test_who_waits_in_vain_does_not_hold_up_the_others() -> None:
    made, step = running(2, 9)
    made.add(Request("new", 9, prompt_of(5), GREEDY, seed=0, limit=9))
    assert made.ahead(step) is not None, "no place is free"
    made.max_requests = 3
    assert made.ahead(step) is None, "it can start"


def test_a_real_model_and_its_texts() -> None:
    """Stop strings are seen a step later, and what came meanwhile is dropped."""
    prompts = [prompt_of(n, 1) for n in (3, 40, 11)]
    found: list[Any] = []
    for ahead in (True, False):
        with LLM.synthetic(
            "tiny", dtype="float32", device="cpu", max_context=96, max_requests=2, graphs=True
        ) as llm:  # fmt: skip
            llm.engine.run_ahead = ahead
            plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
            text = plain[0].outputs[0].text
            stop = SamplingParams(temperature=0, max_tokens=12, stop=[text[len(text) // 2 :][:2]])
            stopped = llm.generate(prompts, stop)
            streamed = "".join(d.text for d in llm.stream(prompts[1], stop))
            assert streamed == stopped[1].outputs[0].text
            found.append([(o.outputs[0].text, o.outputs[0].token_ids) for o in plain + stopped])
            clean(llm.engine)
    assert found[0] == found[1]
