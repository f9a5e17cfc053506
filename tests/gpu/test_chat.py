"""Budgets and grammars on a GPU, beside recorded steps, with and without drafts."""

import json
import re

import pytest

from nemotriton import LLM, SamplingParams

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_budget_closes_the_thought(drafts: int) -> None:
    with LLM(device="cuda", max_context=256, drafts=drafts, adapt_drafts=False) as llm:
        assert llm.engine.tokenizer is not None
        closing = llm.engine.tokenizer.encode("\n</think>")
        assert len(closing) == 2
        params = [
            SamplingParams(max_tokens=24, seed=b, thinking_token_budget=b, ignore_eos=True)
            for b in (0, 3, 9, 20)
        ]
        for asked, output in zip(params, llm.chat([USER] * 4, params), strict=True):
            budget = asked.thinking_token_budget or 0
            tokens = output.outputs[0].token_ids
            by_itself = closing[1] in tokens[:budget]
            assert by_itself or tokens[budget : budget + 2] == closing


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_answer_matches(drafts: int) -> None:
    pytest.importorskip("xgrammar", reason="the extra json is not installed")
    with LLM(device="cuda", max_context=256, drafts=drafts, adapt_drafts=False) as llm:
        params = [SamplingParams(seed=s, max_tokens=99, regex="[a-f]{3,9}") for s in range(8)]
        for output in llm.chat([USER] * 8, params, think=False):
            assert re.fullmatch("[a-f]{3,9}", output.outputs[0].text)
        fixed = SamplingParams(json_schema={"const": "said"}, thinking_token_budget=4)
        assert json.loads(llm.chat(USER, fixed)[0].outputs[0].text) == "said"
