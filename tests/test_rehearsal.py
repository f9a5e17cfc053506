"""Prompts that run before the first request: which ones, and that they leave no trace."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton.console import Console
from nemotriton.engine.depth import Depth
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.graphs import Direct
from nemotriton.engine.rehearsal import Rehearsal, lengths, rehearsals, rehearse, split
from nemotriton.errors import RequestError
from nemotriton.serve.__main__ import warm_up
from tests.fake_model import finish, ids_of, make_engine, submit

PARAMS = SamplingParams(temperature=1, max_tokens=5, ignore_eos=True)


def test_both_ends_of_every_bucket_up_to_a_piece_are_met() -> None:
    found = lengths(3000)
    assert {1, 16, 17, 64, 65, 256, 257, 1024, 1025, 2048, 2049, 3000} <= set(found)
    assert found[-1] == 3000, "the piece itself"
    assert split(12, 5) == (5, 5, 2)
    assert split(10, 5) == (5, 5)


@pytest.mark.parametrize("shape", [None, DraftShape.chain(2)], ids=["plain", "drafts"])
def test_rehearsals_keep_to_context_pages_and_requests(shape: DraftShape | None) -> None:
    engine = make_engine(pages=20, slots=4, requests=4, piece=40, max_context=24, shape=shape)
    found = rehearsals(engine)
    assert max(sum(r.prompts) for r in found) == 40, "a piece, of which a prompt can be but a part"
    assert max(max(r.prompts) for r in found) == 23
    assert {len(r.prompts) + r.decoding for r in found} == {1, 2, 3, 4}
    assert Rehearsal((23, 17), 1) in found
    assert rehearsals(make_engine(max_context=1)) == []


def served(warm: bool, shape: DraftShape | None) -> Any:
    """Books before the first request, and what requests with seeds of the engine's own get."""
    engine = make_engine(shape=shape, capture=Direct(torch.device("cpu")), piece=40, requests=4)
    engine.reuse(2**20)
    if shape is not None:
        engine.depth = Depth(shape)
    llm: Any = SimpleNamespace(engine=engine, runner=engine.runner, step=engine.step)
    llm.everywhere = lambda function, *args: function(llm, *args)
    if warm:
        told: list[Any] = []
        rehearse(llm, lambda *news: told.append(news))
        assert told[-1] == (len(told), len(told), "40 tokens beside 1")
    steps, scheduler = engine.runner.steps, engine.scheduler
    assert steps is not None
    assert engine.prefixes is not None
    books: list[Any] = [engine.meter, engine.draft_meter, len(engine.prefixes), engine.run_ahead]
    books += [scheduler.drafts, scheduler.preemptions, engine.busy, steps.replays, steps.others]
    books += [p.indices for p in (scheduler.pages, scheduler.slots) if p is not None]
    books += [] if engine.depth is None else [engine.depth._loads, engine.depth.current]
    shown = repr(books)
    groups = [submit(engine, ids, PARAMS) for ids in ([20, 9, 20], [5] * 9)]
    finish(engine)
    return shown, [(g.id, ids_of(g)) for g in groups]


@pytest.mark.parametrize("shape", [None, DraftShape.chain(2)], ids=["plain", "drafts"])
def test_a_rehearsal_leaves_no_trace(shape: DraftShape | None) -> None:
    """In numbers, seeds, ids, what is kept for reuse, free places and answers."""
    assert served(True, shape) == served(False, shape)


def test_a_real_model_and_nobody_may_be_running() -> None:
    with LLM.synthetic(
        "tiny", dtype="float32", device="cpu", max_context=9, max_requests=1, layers=2
    ) as llm:
        llm.warm_up_prompts()
        assert llm.stats()["requests"] == llm.stats()["steps"] == 0
        llm.engine.submit(llm.engine.prepare([1, 2], PARAMS))
        with pytest.raises(RequestError, match="before the first"):
            llm.warm_up_prompts()


def test_a_server_warms_up_on_a_gpu_alone(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    for kind in ("cpu", "cuda"):
        llm: Any = SimpleNamespace(
            device=torch.device(kind), warm_up_prompts=lambda progress: calls.append(progress)
        )
        warm_up(llm, Console())
    assert len(calls) == 1
    assert "prompts of every size" in capsys.readouterr().err
