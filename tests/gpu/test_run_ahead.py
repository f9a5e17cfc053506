"""Steps that start before their predecessor's tokens are read: the same tokens, on a real stream.

In fp32, where neighbours change no token: one that ended is in one step more.
"""

from typing import Any

import pytest
import torch

from bench.forced import Forced
from nemotriton import LLM, SamplingParams
from nemotriton.engine.graphs import Flight
from nemotriton.engine.request import Step

PROMPTS = [[5, 9, 200, 31], [77] * 3 + list(range(10, 170)), [400], list(range(300, 340)), [7, 7]]


def params(i: int) -> SamplingParams:
    ends = list(range(i, 512, 40)) if i % 2 else None  # some end by a token nobody foresaw
    return SamplingParams(
        temperature=(0, 0.8, 0)[i % 3], seed=3, max_tokens=60 + 9 * i, stop_token_ids=ends
    )


def served(llm: LLM, cancelled: int | None) -> list[list[int]]:
    """Tokens of requests that join one after the other, one of them cancelled on its way."""
    groups: list[Any] = []
    for i, prompt in enumerate(PROMPTS * 2):
        groups.append(llm.engine.submit(llm.engine.prepare(prompt, params(i))))
        for _ in range(4):
            llm.step()
    if cancelled is not None:
        llm.cancel(groups[cancelled].id)
    while not all(g.finished for g in groups):
        llm.step()
    found = [g.completions[0].request.output for g in groups]
    return found[: cancelled or 0] + found[(cancelled or 0) + 1 :]


@pytest.mark.parametrize("options", [{}, {"state_dtype": "float16-sr"}, {"rollback": "replay"}])
@pytest.mark.parametrize("cancelled", [0, 4])
def test_the_same_tokens(options: dict[str, Any], cancelled: int) -> None:
    found = []
    for ahead in (True, False):
        with LLM.synthetic(
            "tiny", dtype="float32", device="cuda", max_context=512, max_requests=4, **options
        ) as llm:  # fmt: skip
            llm.engine.run_ahead = ahead
            found.append(served(llm, cancelled))
            assert llm.stats()["graphs"]["other_steps"] == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("rollback", ["lanes", "replay"])
def test_the_same_tokens_with_drafts(rollback: str) -> None:
    """Of which each pass accepts one, right or wrong: what follows hangs on the whole past."""
    found = []
    forced = Forced(4, 2, "cuda")
    forced.always(1)
    for ahead in (True, False):
        with forced.installed(), LLM.synthetic(
            "tiny", dtype="float32", device="cuda", max_context=512, max_requests=4, drafts=2,
            adapt_drafts=False, rollback=rollback,
        ) as llm:  # fmt: skip
            llm.engine.run_ahead = ahead
            found.append(served(llm, 4))
            assert llm.stats()["graphs"]["other_steps"] == 0
            assert llm.stats()["drafts"]["tokens_per_pass"] > 1.9
    assert found[0] == found[1]


def test_the_device_starts_the_next_step_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the host reads a step's tokens, the next one has been queued: with a host that sleeps
    before it reads, two steps take no longer than they need."""
    with LLM.synthetic("tiny", device="cuda", max_context=512, max_requests=1) as llm:
        llm.engine.submit(llm.engine.prepare(PROMPTS[1], SamplingParams(max_tokens=40)))
        for _ in range(4):
            llm.step()
        engine, own = llm.engine, llm.runner.read
        done: list[bool] = []

        def late(step: Step, flight: Flight) -> Any:
            torch.cuda.synchronize()
            ahead = engine._ahead
            assert ahead is not None
            done.append(ahead[1].mark.query())
            return own(step, flight)

        with monkeypatch.context() as patch:  # not beyond: `close` reads the last one
            patch.setattr(llm.runner, "read", late)
            for _ in range(8):
                llm.step()
        assert done == [True] * 8
        assert isinstance(engine._ahead, tuple)
        assert isinstance(engine._ahead[0], Step)
