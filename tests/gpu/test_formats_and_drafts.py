"""Quantised models and drafts on compiled kernels: the twins' logits, and the same tokens."""

import pytest
import torch

from nemotriton import LLM, SamplingParams
from tests.gpu.test_parity import free_memory  # noqa: F401  (fixture)

PROMPTS = [[25, 90, 200, 31], [77] * 3 + list(range(20, 170)), [40]]


@pytest.mark.parametrize("act_quant", [False, True], ids=["weights", "activations"])
@pytest.mark.parametrize("quant", ["fp8", "nvfp4", "super-mixed"])
def test_tiny_in_every_format(quant: str, act_quant: bool) -> None:
    """Keys and values stay as they are (super-mixed has them in FP8): they have their own test."""
    found = []
    for impl in ("triton", "ref"):
        with LLM.synthetic(
            "tiny", quant=quant, act_quant=act_quant, dtype="float32", device="cuda",
            kv_dtype="bf16", max_context=256, max_requests=4, impl=impl,
        ) as llm:  # fmt: skip
            found.append(llm.logits(PROMPTS))
    for ours, twins in zip(*found, strict=True):
        error = float((ours - twins).norm() / twins.norm())
        # quantised activations amplify a last bit into a neighbouring code
        assert error <= (2e-2 if act_quant else 1e-5)


def test_super_in_its_release_formats_at_full_width() -> None:
    """Token by token as far from fp32 as the twins in bf16 are. Of 512 experts with random weights
    some lie so close that rounding alone chooses others: a few tokens are off by percents, in the
    twins as well, so what most tokens and what nearly all of them are off by is compared."""
    found = {}
    for impl, dtype in (("ref", "float32"), ("ref", "bfloat16"), ("triton", "bfloat16")):
        with LLM.synthetic(
            "super-120b", quant="release", layers=8, dtype=dtype, device="cuda",
            max_context=256, max_requests=4, impl=impl,
        ) as llm:  # fmt: skip
            found[impl, dtype] = torch.cat(llm.logits(PROMPTS))
    exact = found["ref", "float32"]
    ours, twin = (
        (found[impl, "bfloat16"] - exact).norm(dim=1) / exact.norm(dim=1)
        for impl in ("triton", "ref")
    )
    print(
        "off by, at 50 / 90 / 100 %:",
        *(x.quantile(torch.tensor([0.5, 0.9, 1.0])) for x in (ours, twin)),
    )
    assert ours.quantile(0.5) <= 1.5 * twin.quantile(0.5)
    assert ours.quantile(0.9) <= 2 * twin.quantile(0.9)
    assert ours.square().mean() <= 4 * twin.square().mean()


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_change_no_token(drafts: int) -> None:
    for params in (
        SamplingParams(temperature=0, max_tokens=48, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32, ignore_eos=True),
    ):
        tokens = []
        for k in (0, drafts):
            with LLM.synthetic(
                "tiny", dtype="float32", device="cuda", max_context=256, drafts=k
            ) as llm:
                tokens.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
                if k:
                    assert llm.stats()["drafts"]["verified"] > 0
        assert tokens[0] == tokens[1]


def test_fp8_keys_and_values_on_the_device() -> None:
    found = []
    for impl in ("triton", "ref"):
        with LLM.synthetic(
            "tiny", kv_dtype="fp8", dtype="float32", device="cuda", max_context=256, impl=impl
        ) as llm:
            found.append(llm.logits(PROMPTS))
    for ours, twins in zip(*found, strict=True):
        assert torch.isfinite(ours).all()
        assert float((ours - twins).norm() / twins.norm()) <= 2e-2  # a last bit may flip a code
