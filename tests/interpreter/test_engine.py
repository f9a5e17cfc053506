"""The embedded model end to end on kernels in the interpreter: the twins' tokens and logits."""

from collections.abc import Callable, Sequence

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton.engine.request import Piece
from nemotriton.kernels.op import OPS
from tests.test_drafts import stubbed

PROMPTS = [[20, 9, 200, 31, 7], [77] * 3 + list(range(20, 50))]


def test_every_kernel_together_gives_the_twins_tokens() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    warm = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=2, ignore_eos=True)
    found = []
    sizes = {"dtype": "float32", "device": "cpu", "max_context": 128, "layers": 4}
    for impl in ("triton", "ref"):
        called: set[str] = set()
        with (
            LLM.synthetic("tiny", prefill_piece=24, impl=impl, **sizes) as llm,
            watching(called, impl),
        ):
            done = llm.generate(PROMPTS, greedy) + llm.generate(PROMPTS[0], warm)
            tokens = [o.outputs[0].token_ids for o in done]
            found.append((tokens, llm.logits(PROMPTS[0])))
        step = "mamba_step" if impl == "triton" else "ssm_update"
        assert {"ssd_prefill", step, "attend_decode", "run_experts"} <= called
    assert found[0][0] == found[1][0]
    worst = (found[0][1] - found[1][1]).abs().max()
    assert float(worst) <= 2e-5 * float(found[1][1].abs().max())


@pytest.mark.parametrize("tree", ["0,1", "0,0,2"])
def test_drafts_on_kernels_change_no_token(tree: str) -> None:
    """A verify pass that is wholly right, then wrong ones: lanes, cursor, trees."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sizes = {"dtype": "float32", "device": "cpu", "max_context": 128, "layers": 4}
    with LLM.synthetic("tiny", impl="ref", **sizes) as llm:
        want = llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids
    called: set[str] = set()
    with (
        LLM.synthetic("tiny", impl="triton", tree=tree, adapt_drafts=False, **sizes) as llm,
        watching(called, "triton"),
    ):
        stub = stubbed(llm.engine, lambda n, depth: n == 0)
        own = stub.propose

        def second_branch(pieces: Sequence[Piece]) -> torch.Tensor:
            ids = own(pieces)
            if tree == "0,0,2":
                ids[0] = (ids[0] + 1) % 500  # so that the accepted path leaves a gap
            return ids

        stub.propose = second_branch  # type: ignore[method-assign]
        stub.truth = {"0-0": want}
        assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == want
        drafts = llm.stats()["drafts"]
    assert 2 <= drafts["accepted"] < drafts["verified"]
    assert {"verify_drafts", "ssm_update", "causal_conv1d_update", "attend_decode"} <= called


class watching:
    """Records which ops ran through the implementation asked for."""

    def __init__(self, called: set[str], impl: str) -> None:
        self.called, self.attribute = called, "triton" if impl == "triton" else "ref"
        self.kept = {name: getattr(op, self.attribute) for name, op in OPS.items()}

    def __enter__(self) -> None:
        for name, op in OPS.items():
            setattr(op, self.attribute, self.note(name))

    def note(self, name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.called.add(name)
            return self.kept[name](*args, **kwargs)

        return call

    def __exit__(self, *exc: object) -> None:
        for name, op in OPS.items():
            setattr(op, self.attribute, self.kept[name])


@pytest.mark.parametrize("name", ["float16-sr", "int8"])
def test_states_with_noise_or_scales_give_the_twins_tokens(name: str) -> None:
    """Prefill in pieces and decode; scales and seeds find their kernels."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, seed=11)
    sizes = {"dtype": "float32", "device": "cpu", "max_context": 64, "layers": 2}
    found = []
    for impl in ("ref", "triton"):
        with LLM.synthetic("tiny", impl=impl, prefill_piece=8, state_dtype=name, **sizes) as llm:
            found.append(llm.generate([20, 9, 200, 31, 7, 8, 33, 90, 4, 5], params))
    tokens = [outputs[0].outputs[0].token_ids for outputs in found]
    assert tokens[0] == tokens[1]
