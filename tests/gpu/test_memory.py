"""A card filled as the plan says: full width, few layers, a budget that PyTorch enforces.

The budget is a share of the card beyond which torch refuses to allocate, so a plan that overlooked
something ends in an error here, on a card of any size. It is what the plan takes for free memory,
too: what others hold on the card changes while the tests run.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nemotriton import LLM, SamplingParams, device
from nemotriton.engine.caches import PAGE_SIZE

GIB = 2**30


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that caps this process at so many GiB more than it holds now, all of them free."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory

    def cap(gib: int) -> None:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, (torch.cuda.memory_reserved() + gib * GIB) / total)
        )
        torch.cuda.reset_peak_memory_stats()
        monkeypatch.setattr(device, "free_memory", lambda where: gib * GIB)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafts": 2},
        {"state_dtype": "int8", "kv_dtype": "fp8"},
        {"state_dtype": "bfloat16", "prefill_piece": 2048},
    ],
    ids=str,
)
def test_a_full_load_allocates_what_was_planned(options: dict[str, Any], budget: Any) -> None:
    """Every slot taken, every page used, prompts in pieces beside decoding; nothing is refused."""
    budget(20)
    with LLM.synthetic(
        "super-120b", layers=8, quant="release", device="cuda", memory=1, max_requests=48,
        max_context=16384, **options,
    ) as llm:  # fmt: skip
        plan, pages = llm.plan, llm.engine.scheduler.pages
        assert llm.stats()["graphs"]["problem"] is None
        assert pages is not None
        each = min(pages.size // 48 * PAGE_SIZE, 16384)
        # the first still answers when the last prompt's last piece has been read
        tokens = 48 * -(-each // llm.engine.scheduler.prefill_piece) + 8
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        spread = [each - tokens - (i % 3) for i in range(48)]
        groups = [
            llm.engine.submit(llm.engine.prepare([(i * 7 + j) % 1000 for j in range(n)], params))
            for i, n in enumerate(spread)
        ]
        most = 0
        while not all(g.finished for g in groups):
            llm.step()
            most = max(most, len(llm.engine.scheduler.running))
        assert most == 48
        assert llm.engine.scheduler.preemptions == 0
        assert all(len(g.completions[0].request.output) == tokens for g in groups)
        assert torch.cuda.max_memory_reserved() <= plan.available


def test_a_million_tokens_of_one_sequence(budget: Any) -> None:
    """Full width, one layer of each kind; prefilled in pieces and decoded behind."""
    budget(20)
    context = 1 << 20
    with LLM.synthetic(
        "super-120b", layers=3, quant="release", device="cuda", memory=1, max_requests=1,
        max_context=context, kv_dtype="fp8",
    ) as llm:  # fmt: skip
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(1000, 100_000, (context - 8,), generator=rng).tolist()
        output = llm.generate([ids], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert len(output[0].outputs[0].token_ids) == 8
        assert output[0].outputs[0].finish_reason == "length"
        assert llm.plan.pages == context // PAGE_SIZE
        assert torch.cuda.max_memory_reserved() <= llm.plan.available
