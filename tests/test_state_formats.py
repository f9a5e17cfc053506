"""The engine with recurrent states in every format: cut, preempted, verified, the same tokens."""

import pytest
import torch

from nemotriton.engine.llm import LLM
from nemotriton.engine.pool import Pool
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import ConfigError
from nemotriton.kernels import STATE_FORMATS
from nemotriton.model.layer_config import STATE_DTYPES
from tests.test_llm import ids_of, poison, prompt_of

LENGTHS = (60, 62, 63)
TOKENS = 8


def made(name: str | None, drafts: int = 0) -> LLM:
    return LLM(
        dtype="float32", device="cpu", max_requests=3, max_context=256, state_dtype=name,
        drafts=drafts, adapt_drafts=False,
    )  # fmt: skip


def greedy(seed: int = 5) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=seed)


def state_of(llm: LLM, slot: int = 0) -> torch.Tensor:
    mamba = llm.runner.caches.mamba
    assert mamba is not None
    saved = mamba.save(slot)
    return saved.ssm if saved.scales is None else saved.ssm * saved.scales[..., None]


def test_the_names_are_known_without_torch() -> None:
    assert tuple(STATE_FORMATS) == STATE_DTYPES


@pytest.mark.parametrize("name", STATE_FORMATS)
def test_alone_together_preempted_and_with_drafts(name: str) -> None:
    """The tokens of a request depend on nothing else: not on neighbours, on the slot, on being
    moved to the host and back, nor on drafts that were verified and thrown away."""
    prompts = [prompt_of(n) for n in LENGTHS]
    with made(name) as llm:
        poison(llm)
        fmt, mamba = STATE_FORMATS[name], llm.runner.caches.mamba
        assert mamba is not None
        assert mamba.ssm.dtype == fmt.dtype
        scales = 0 if mamba.scales is None else mamba.scales.nbytes
        assert llm.plan.states == mamba.ssm.nbytes + mamba.conv.nbytes + scales
        (note,) = [n for n in llm.notes if n.startswith("recurrent states are")]
        assert str(fmt.dtype).removeprefix("torch.") in note
        assert "as asked for" in note
        want = [ids_of(llm.generate([p], greedy()))[0] for p in prompts]
        assert all(len(ids) == TOKENS for ids in want)
        assert ids_of(llm.generate(prompts, greedy())) == want
        llm.engine.scheduler.pages = Pool(5, "pages")
        assert ids_of(llm.generate(prompts, greedy())) == want
        assert llm.stats()["preemptions"] == 1
    with made(name, drafts=2) as llm:
        poison(llm)
        assert ids_of(llm.generate(prompts, greedy())) == want


def test_noise_follows_the_seed_of_the_request() -> None:
    with made("float16-sr") as llm:
        found = []
        for seed in (5, 5, 6):
            llm.generate([prompt_of(40)], greedy(seed))
            found.append(state_of(llm).double())
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
    with made("float32") as llm:
        llm.generate([prompt_of(40)], greedy())
        exact = state_of(llm).double()
    for rounded in found:
        assert float((rounded - exact).norm() / exact.norm()) < 2e-3


def test_resolution() -> None:
    """An option, else the configuration's, else fp32; what is not known is named."""
    with made(None) as llm:
        mamba = llm.runner.caches.mamba
        assert mamba is not None
        assert llm.config.mamba is not None
        assert mamba.format.name == llm.config.mamba.state_dtype
        assert any("the model's" in note for note in llm.notes)
    with pytest.raises(ConfigError, match="state_dtype='fp8': use one of float32, bfloat16"):
        made("fp8")
