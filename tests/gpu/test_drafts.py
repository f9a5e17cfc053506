"""Drafting on kernels: the tokens of plain decoding, and where the time of a step goes."""

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.kernels import fp8_matmul
from nemotriton.model.nemotron_h import e4m3_copy
from nemotriton.model.packing import forced_packing
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


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_picked_by_the_heads_copy_change_no_token(graphs: bool) -> None:
    """The trained model, in the mode in which a verify pass gives decoding's bits; the copy costs
    hardly a draft."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    prompts = ["def add(a, b):", "for i in range(3):", "import os\n", "class A:"]
    options = {"device": "cuda", "dtype": "bfloat16", "max_context": 256, "graphs": graphs}
    options |= {"invariant": True}
    accepted = {}
    for copied in (False, True):
        with forced_packing(copied), LLM(**options) as llm:  # type: ignore[arg-type]
            want = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        with forced_packing(copied), LLM(**options, drafts=2, adapt_drafts=False) as llm:  # type: ignore[arg-type]
            assert (llm.runner.model.head_copy is not None) == copied
            found = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
            accepted[copied] = llm.stats()["drafts"]["accepted"]
        assert found == want
    assert accepted[False] > 40
    assert accepted[True] >= 0.9 * accepted[False]


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 200])
def test_the_copy_of_a_full_heads_logits(rows: int) -> None:
    rng = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(131072, 4096, device="cuda", generator=rng).mul_(0.02).bfloat16()
    x = torch.randn(rows, 4096, device="cuda", generator=rng).bfloat16()
    codes, scale = e4m3_copy(weight)
    found = fp8_matmul(x, codes, scale, out_dtype=torch.float32)
    want = x.double() @ (codes[:4096].double() * scale.double()).T
    assert found.dtype == torch.float32
    assert (found[:, :4096] - want).abs().max() <= 1e-5 * want.abs().max()
    exact = x.double() @ weight[-4096:].double().T
    off = (found[:, -4096:] - exact).norm() / exact.norm()
    assert 0.01 < off < 0.04, "what e4m3 rounds away of normal weights"


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
