"""Drafting on kernels: the tokens of plain decoding, and where the time of a step goes."""

import pytest

from nemotriton import LLM, SamplingParams
from nemotriton.engine.draft_shape import DraftShape
from tests.test_drafts import stubbed

PROMPTS = [[5, 9, 200, 31], [77] * 3 + list(range(10, 170)), [400]]


def made(preset: str = "tiny", **options: object) -> LLM:
    sizes = {"dtype": "float32", "max_context": 512, "max_requests": 4, "adapt_drafts": False}
    return LLM.synthetic(preset, device="cuda", **(sizes | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("rollback", ["lanes", "replay"])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_change_no_token(temperature: float, rollback: str) -> None:
    """The block's own drafts, then drafts that are right up to another depth on every pass."""
    params = SamplingParams(
        temperature=temperature, top_p=0.9, seed=3, max_tokens=48, ignore_eos=True
    )
    with made(rollback="lanes") as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    with made(rollback=rollback) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == want
    for text in ("0,1,2", "0,1,2,3,4", "0,0,1,1,2"):
        with made(tree=text, rollback=rollback) as llm:
            assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == want
            stub = stubbed(llm.engine, lambda n, depth: depth <= n % 5)
            stub.truth = {f"{len(PROMPTS) + i}-0": ids for i, ids in enumerate(want)}
            assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == want
            drafts = llm.stats()["drafts"]
            assert 0 < drafts["accepted"] < drafts["verified"]


@pytest.mark.alone
def test_a_commit_is_two_percent_of_a_step_at_most() -> None:
    """Super's widths in bf16, a few layers of each kind; 16 requests, 3 drafts, all accepted."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    sizes = {"dtype": "bfloat16", "max_requests": 16, "layers": 10}
    prompts = [[i + 1] * 8 for i in range(16)]
    with made("super-120b", **sizes, drafts=3) as llm:
        assert llm.engine.runner.drafter is not None
        assert llm.engine.runner.drafter.shape == DraftShape.chain(3)
        llm.generate(prompts, params)
        llm.engine.draft_meter.seconds.clear()
        llm.generate(prompts, params)
        seconds = llm.stats()["drafts"]["seconds"]
    assert seconds["commit"] <= 0.02 * sum(seconds.values()), seconds
