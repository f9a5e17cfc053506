"""The engine wholly on kernels: the twins' tokens, at tiny and at real widths."""

import pytest
import torch

from nemotriton import LLM, SamplingParams
from tests.gpu.test_parity import free_memory  # noqa: F401  (fixture)

PROMPTS = [[5, 9, 200, 31], [77] * 3 + list(range(10, 170)), [400]]


def logits(preset: str, impl: str, dtype: str, layers: int | None = None) -> list[torch.Tensor]:
    with LLM.synthetic(
        preset,
        layers=layers,
        dtype=dtype,
        device="cuda",
        max_context=512,
        max_requests=4,
        impl=impl,
    ) as llm:
        return llm.logits(PROMPTS)


def test_fp32_kernels_give_the_twins_logits_and_tokens() -> None:
    for a, b in zip(
        logits("tiny", "triton", "float32"), logits("tiny", "ref", "float32"), strict=True
    ):
        assert float((a - b).abs().max()) <= 2e-5 * float(b.abs().max())
    tokens = []
    for impl in ("triton", "ref"):
        with LLM.synthetic(
            "tiny", dtype="float32", device="cuda", max_context=512, impl=impl
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            tokens.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("preset", ["super-120b", "nano-30b", "h-8b"])
def test_real_widths_in_bf16(preset: str) -> None:
    """Kernels against twins at full width and few layers; bf16 noise, measured by the twins."""
    layers = 6 if preset != "h-8b" else 10
    exact = logits(preset, "ref", "float32", layers)
    twin = logits(preset, "ref", "bfloat16", layers)
    ours = logits(preset, "triton", "bfloat16", layers)
    for e, t, o in zip(exact, twin, ours, strict=True):
        own = float((t - e).norm() / e.norm())
        assert float((o - e).norm() / e.norm()) <= 2 * own + 2**-8


def test_single_ops_can_be_swapped() -> None:
    with LLM.synthetic(
        "tiny", dtype="float32", device="cuda", max_context=512, impl={"ssd_prefill": "ref"}
    ) as llm:
        mixed = llm.logits(PROMPTS)
    for a, b in zip(mixed, logits("tiny", "triton", "float32"), strict=True):
        assert float((a - b).abs().max()) <= 2e-5 * float(b.abs().max())


def test_sampled_tokens_do_not_depend_on_neighbours() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=32, ignore_eos=True)
    with LLM.synthetic("tiny", dtype="float32", device="cuda", max_context=512) as llm:
        together = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
        alone = [llm.generate([p], params)[0].outputs[0].token_ids for p in PROMPTS]
    assert together == alone
