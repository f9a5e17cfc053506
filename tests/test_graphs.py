"""Decode steps of fixed shape give what steps that are built anew give, whoever repeats them.

Over the exact model, whose free memory is NaN, and with inputs that are trash between steps: what a
step reads and has not been written for it shows. CUDA graphs themselves are tests/gpu/test_graphs.
"""

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine
from nemotriton.engine.graphs import (
    CudaGraphs,
    Direct,
    Replay,
    _nothing_collected,
    find_capture,
    key_limits,
    ladder,
)
from nemotriton.engine.outputs import Group
from nemotriton.engine.request import Piece, Request
from nemotriton.engine.step_inputs import StepInputs, StepShape
from nemotriton.errors import UnsupportedError
from tests import test_drafts
from tests.fake_model import VOCAB, finish, ids_of, make_engine, submit

CPU = torch.device("cpu")
rollback = test_drafts.rollback  # both ways
GREEDY = SamplingParams(temperature=0, max_tokens=14)
WARM = SamplingParams(temperature=1.1, top_p=0.95, max_tokens=14, seed=5)


class Trash(Direct):
    """Runs the work itself; after each step nothing that was its input is left. Counts."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.recorded = self.replayed = 0
        self.engine: Engine | None = None

    def record(self, work: Replay) -> Replay:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay

    def wait(self, mark: Any) -> None:
        if self.engine is None or self.engine.runner.steps is None:
            return
        steps = self.engine.runner.steps
        steps.inputs._arena._device.fill_(0x55)
        if self.engine._ahead is None:  # which may be what the step after that starts from
            steps.memory.found.fill_(10**12)
            steps.memory.last.fill_(77)
        owned = len(steps._starting)
        if steps.memory.start.numel():
            steps.memory.start[owned:] = float("nan")


def recorded(**sizes: Any) -> Engine:
    capture = Trash()
    engine = make_engine(capture=capture, **sizes)
    capture.engine = engine
    return engine


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(VOCAB), k=length)


def served(engine: Engine, work: Sequence[tuple[int, SamplingParams]], every: int = 2) -> Any:
    """Requests that join one after the other; tokens and logprobs of each."""
    groups: list[Group] = []
    for n, params in work:
        groups.append(submit(engine, prompt_of(n), params))
        for _ in range(every):
            engine.step()
    finish(engine)
    return [(ids_of(g), g.completions[0].request.logprobs) for g in groups]


def test_the_ladder_has_every_small_number_and_the_last() -> None:
    assert ladder(1) == [1]
    assert ladder(3) == [1, 2, 3]
    assert ladder(8) == [1, 2, 4, 8]
    assert ladder(36) == [1, 2, 4, 8, 16, 24, 32, 36]
    assert key_limits(100) == [100]
    assert key_limits(4097) == [4097]
    assert key_limits(8192) == [4096, 8192]
    assert key_limits(262147) == [4096, 32768, 262147]


def test_who_records() -> None:
    assert find_capture(None, CPU, []) is None
    assert find_capture(False, CPU, []) is None
    assert type(find_capture(True, CPU, ["ref"])) is Direct
    cuda = torch.device("cuda", 0)
    assert type(find_capture(False, cuda, [])) is Direct
    assert find_capture(None, cuda, ["ref"]) is None
    with pytest.raises(UnsupportedError, match="impl"):
        find_capture(True, cuda, ["triton", "ref"])


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("shape", [None, "0", "0,1,2", "0,0,1,1"])
def test_join_leave_preempt_and_end(shape: str | None, params: SamplingParams) -> None:
    """Few pages and slots, so requests are preempted and come back elsewhere; limits that differ,
    so that some may not have all drafts."""
    sizes: dict[str, Any] = {"pages": 30, "slots": 5, "requests": 5, "piece": 9, "max_context": 64}
    sizes["shape"] = None if shape is None else DraftShape.parse(shape)
    lengths = [10, 8, 1, 12, 6, 30, 9, 2, 17]
    work = [(n, replace(params, max_tokens=5 + 4 * i)) for i, n in enumerate(lengths)]
    engine = recorded(**sizes)
    assert served(engine, work) == served(make_engine(**sizes), work)
    steps = engine.runner.steps
    assert steps is not None
    assert engine.scheduler.preemptions > 0
    assert steps.replays >= 15
    assert steps.others == 0, "a step without prompt tokens was not recorded"


@pytest.mark.parametrize("pages, slots", [(None, 4), (40, None)])
def test_models_without_pages_or_slots(pages: int | None, slots: int | None) -> None:
    sizes = {"pages": pages, "slots": slots, "requests": 4, "max_context": 64}
    work = [(5, GREEDY), (9, WARM), (3, GREEDY)]
    assert served(recorded(**sizes), work) == served(make_engine(**sizes), work)


def test_a_request_that_comes_back_in_its_old_row_is_read_anew() -> None:
    """Other pages and another slot, and nothing else has been in its row meanwhile."""
    inputs = StepInputs(2, 1, [64], page_size=4, spare=9, vocab=VOCAB, device=CPU)
    request = Request("r", 0, prompt_of(9), WARM, seed=3, limit=9, output=[4], computed=9)
    shape = StepShape(2, 1, 64)
    for slot, pages in ((1, [2, 3, 4]), (0, [5, 2, 7])):
        request.slot, request.pages, request.drafts = slot, pages, 0
        inputs.fill([Piece(request, 9, 1)], shape, [0, 1])
        assert inputs.view("slots", 2).tolist() == [slot, -1]
        assert inputs.tables[64].device[0, :4].tolist() == [*pages, 9]
        cell = 4 * pages[2] + 1
        assert inputs.view("kv_rows", 4).tolist() == [cell, cell + 1, -1, -1]
        assert inputs.view("lengths", 2).tolist() == [11, 0]
        inputs.forget()  # as `DecodeSteps.settle` does before a restore


def test_penalties_minimum_and_logprobs_beside_plain_requests() -> None:
    """Picked from logits that are computed again; with drafts such steps are not recorded."""
    hard = SamplingParams(
        temperature=0.9, seed=3, max_tokens=20, min_tokens=6, repetition_penalty=1.4,
        frequency_penalty=0.6, logprobs=2, stop_token_ids=list(range(0, VOCAB, 2)),
    )  # fmt: skip
    told = SamplingParams(temperature=0, max_tokens=20, logprobs=1)
    work = [(5, hard), (9, WARM), (3, told), (8, hard)]
    for shape, others in ((None, False), ("0,1", True)):
        sizes = {"requests": 4, "shape": None if shape is None else DraftShape.parse(shape)}
        engine = recorded(**sizes)
        assert served(engine, work, every=1) == served(make_engine(**sizes), work, every=1)
        steps = engine.runner.steps
        assert steps is not None
        assert steps.replays > 0
        assert (steps.others > 0) is others


def test_drafts_are_all_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's caches are whole, on chains and trees, where neighbours come and go."""
    engines: list[Engine] = []

    def made(**sizes: Any) -> Engine:
        engines.append(recorded(**sizes))
        return engines[-1]

    monkeypatch.setattr(test_drafts, "make_engine", made)
    for shape in ("0,1,2", "0,0,0,1,1,2,4"):
        test_drafts.test_the_block_is_always_right(shape, GREEDY)
    assert all(e.runner.steps is not None and e.runner.steps.replays for e in engines)


def test_other_drafts_than_the_recorded_ones_are_not_replayed() -> None:
    """Stubs put in later are asked, and what they start from is theirs again."""
    engine = recorded(shape=DraftShape.chain(2))
    group = submit(engine, prompt_of(9), GREEDY)
    for _ in range(3):
        engine.step()
    steps = engine.runner.steps
    assert steps is not None
    before = steps.replays
    assert before > 0
    stub = test_drafts.stubbed(engine, lambda n, depth: True)
    stub.truth[group.completions[0].request.id] = test_drafts.greedy(prompt_of(9), 14)
    finish(engine)
    assert steps.replays == before
    assert ids_of(group) == test_drafts.greedy(prompt_of(9), 14)


def test_all_is_recorded_before_the_first_request_and_nothing_after() -> None:
    calls = []
    capture = Trash()
    engine = make_engine(requests=5, shape=DraftShape.chain(2), rollback="lanes")
    steps = engine.runner.record(capture, requests=5, context=100)
    steps.warm(lambda done, total, what: calls.append((done, total, what)))
    assert [c[:2] for c in calls] == [(i + 1, 12) for i in range(12)], "4 rungs, 0 .. 2 drafts"
    assert (calls[0][2], calls[-1][2]) == ("5 x 3", "1 x 1"), "the largest first"
    assert capture.recorded == 4 * (2 + 5 + 5)
    served(engine, [(5, GREEDY), (9, WARM)])
    assert capture.recorded == 4 * (2 + 5 + 5)
    assert capture.replayed > 0


class Full(Direct):
    """A device on which the third recording does not fit."""

    left = 2

    def record(self, work: Replay) -> Replay:
        if not self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        self.left -= 1
        return super().record(work)


def test_out_of_memory_is_one_message_and_slower_steps(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(requests=4, capture=Full(CPU), rollback="lanes")
    steps = engine.runner.steps
    assert steps is not None
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage() == steps.problem
    assert "2 of 3" in steps.problem
    assert "2 GiB. Decoding runs without graphs" in steps.problem
    assert served(engine, [(5, GREEDY), (9, WARM)]) == served(
        make_engine(requests=4), [(5, GREEDY), (9, WARM)]
    )
    assert steps.replays > 0


def test_nothing_is_recorded_with_cuda_graphs_here() -> None:
    assert not isinstance(find_capture(True, CPU, []), CudaGraphs)


@pytest.mark.parametrize("tree, rollback", [(None, "lanes"), ("0,1", "lanes"), ("0,0,1", "replay")])
def test_a_real_model(tree: str | None, rollback: str) -> None:
    """Every layer kind; tokens as without recording, of as many requests as come together."""
    params = [
        SamplingParams(temperature=t, seed=7, max_tokens=12 + 3 * i, ignore_eos=True)
        for i, t in enumerate((0, 0.8, 0))
    ]
    prompts = [prompt_of(n, 1) for n in (3, 70, 11)]
    found = []
    for graphs in (True, False):
        with LLM.synthetic(
            "tiny", dtype="float32", device="cpu", max_context=128, max_requests=3, tree=tree,
            adapt_drafts=False, graphs=graphs, rollback=rollback,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params)
            found.append([o.outputs[0].token_ids for o in outputs])
            report = llm.stats()["graphs"]
            assert (report is not None) is graphs
            if report is not None:
                assert report["replays"] > 0
                assert report["other_steps"] == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_waits_for_a_capture(before: bool) -> None:
    """It may hold graphs of another model, and to destroy one would end the capture."""
    usual = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        with _nothing_collected():
            assert not gc.isenabled()
        assert gc.isenabled() is before
    finally:
        (gc.enable if usual else gc.disable)()
