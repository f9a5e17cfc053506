"""Prompts that begin with an earlier one: fewer tokens computed, the same said, honest misses."""

from collections.abc import Iterator

import pytest
import torch

from nemotriton.engine.llm import LLM, SamplingParams
from nemotriton.engine.prefixes import Prefixes

START = list(b"a prompt that many others begin with, of seventy tokens or some more...")
ENDS = [list(b"!"), list(b" and how they go on from there"), list(b"?" * 90)]
PARAMS = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[(0, None), (2, "lanes"), (2, "replay")], ids=str)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    drafts, rollback = request.param
    sizes = {"max_context": 256, "max_requests": 3, "prefill_piece": 48}
    with LLM(device="cpu", dtype="float32", drafts=drafts, rollback=rollback, **sizes) as found:
        yield found


def said(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[list[int]]:
    return [c.token_ids for output in llm.generate(prompts, params) for c in output.outputs]


def test_the_same_is_said_and_less_is_computed(llm: LLM) -> None:
    prompts = [START + end for end in ENDS]
    many = SamplingParams(max_tokens=8, seed=1, n=2, ignore_eos=True)
    llm.engine.prefixes = None
    expected, others = said(llm, prompts), said(llm, prompts, many)
    llm.engine.prefixes = prefixes = Prefixes(2**30)
    said(llm, [START])
    assert START in prefixes
    before = llm.stats()["prompt_tokens"]
    assert said(llm, prompts) == expected
    assert llm.stats()["prompt_tokens"] - before == sum(map(len, ENDS))
    longer = [prompt + [65] for prompt in prompts]
    assert said(llm, prompts, many) == others
    before = llm.stats()["prompt_tokens"]
    said(llm, longer)
    assert llm.stats()["prompt_tokens"] - before == len(longer), "the longest one is taken"
    scheduler = llm.engine.scheduler
    assert scheduler.pages is not None
    assert scheduler.pages.taken == 0


def test_misses(llm: LLM) -> None:
    llm.engine.prefixes = prefixes = Prefixes(2**30)

    def reused(prompt: list[int], params: SamplingParams = PARAMS) -> int:
        group = llm.engine.submit(llm.engine.prepare(prompt, params))
        while not group.finished:
            llm.step()
        return group.reused

    assert [reused(START), reused(START)] == [0, 0], "nothing is left to compute"
    assert reused(START[:-1] + [65, 66]) == 0
    assert reused(START[:-1]) == 0
    assert reused([*START, 65]) == len(START)
    assert reused([*START, 65, 66]) == len(START) + 1
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    assert reused([*START, 70], scored) == 0, "each of its tokens is to be scored"
    llm.logits([*START, 70, 71])
    assert reused([*START, 70, 72]) == len(START) + 1
    assert prefixes.used <= prefixes.room


def test_room() -> None:
    prefixes = Prefixes(100)
    for token in range(4):
        prefixes.keep([token], "saved", 30)
    assert [[t] in prefixes for t in range(4)] == [False, True, True, True]
    assert prefixes.find([1, 9]) is not None, "now it is the newest"
    prefixes.keep([4], "saved", 30)
    assert [[t] in prefixes for t in range(5)] == [False, True, False, True, True]
    prefixes.keep([5], "saved", 101)
    assert [5] not in prefixes
    prefixes.keep([4], "again", 30)
    assert (len(prefixes), prefixes.used) == (3, 90)
    found = prefixes.find([4, 0])
    assert found is not None
    assert found.saved == "saved"
