"""The invariant mode: what is chosen in it, and the same bits however the work is cut, on twins.

tests/interpreter and tests/gpu run the same schedules on kernels.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton.engine.loading import find_grain
from nemotriton.errors import UnsupportedError
from nemotriton.kernels.fixed_order import DECODE, PREFILL, fixed_order, phase
from nemotriton.kernels.op import SPECS, Case, KernelSpec
from nemotriton.kernels.ssm_state import STATE_FORMATS
from nemotriton.model.config import ModelConfig
from tests import schedules
from tests.schedules import raw_logits  # noqa: F401

SIZES: dict[str, Any] = {
    "device": "cpu", "max_context": 256, "memory": 0.05, "layers": 4, "invariant": True,
}  # fmt: skip
WAYS = {
    "pieces": {"prefill_piece": 64, "max_requests": 5},
    "drafts": {"prefill_piece": 100, "max_requests": 3, "drafts": 3},
    "tree": {"prefill_piece": 32, "max_requests": 4, "tree": "0,0,1", "graphs": True},
}


@pytest.mark.usefixtures("raw_logits")
@pytest.mark.parametrize(("dtype", "quant"), [("float32", "bf16"), ("bfloat16", "super-mixed")])
def test_schedules_change_no_bit(dtype: str, quant: str) -> None:
    wanted = schedules.wishes(9, seed=1, vocab=512, longest=130, tokens=9)
    sizes = SIZES | {"dtype": dtype, "quant": quant}
    with LLM.synthetic("tiny", max_requests=1, **sizes) as llm:
        assert llm.stats()["invariant"] is True
        want = schedules.alone(llm, wanted)
    ways = WAYS if dtype == "float32" else {"drafts": WAYS["drafts"]}
    preemptions = accepted = 0
    for way in ways.values():
        with LLM.synthetic("tiny", **sizes, **way) as llm:
            found = schedules.run(llm, wanted, schedules.chance(llm, want, seed=3))
            preemptions += llm.stats()["preemptions"]
            accepted += llm.engine.draft_meter.accepted
        schedules.check(found, want, wanted)
    assert accepted > 0
    assert preemptions > 0


@pytest.mark.usefixtures("raw_logits")
@pytest.mark.parametrize("state_dtype", ["float16-sr", "int8"])
def test_rounded_states_hang_on_the_size_of_pieces_and_on_nothing_else(state_dtype: str) -> None:
    """A state is rounded where a piece ends, so other pieces give longer prompts other bits: the
    schedules that must agree have one `prefill_piece`."""
    wanted = schedules.wishes(6, seed=1, vocab=512, longest=130, tokens=4)
    sizes = SIZES | {"dtype": "float32", "state_dtype": state_dtype, "prefill_piece": 64}
    with LLM.synthetic("tiny", max_requests=1, **sizes) as llm:
        want = schedules.alone(llm, wanted)
    with LLM.synthetic("tiny", max_requests=3, drafts=2, **sizes) as llm:
        found = schedules.run(llm, wanted, schedules.chance(llm, want, seed=3))
    schedules.check(found, want, wanted)
    with LLM.synthetic("tiny", max_requests=1, **sizes | {"prefill_piece": 32}) as llm:
        other = schedules.alone(llm, wanted)
    lengths = [len(w.prompt) for w in wanted]
    same = [torch.equal(a.rows[0], b.rows[0]) for a, b in zip(other, want, strict=True)]
    assert same == [n <= 32 for n in lengths], lengths
    assert not all(same)


# ------------------------------------------------------------------------------------- the choice
PRESETS = ("super-120b", "nano-30b", "h-8b", "tiny")
BLIND = ("NEW", "TREE", "new", "tree")  # how rows fall to sequences


def cases_of(spec: KernelSpec) -> Iterator[Case]:
    for preset in PRESETS:
        yield from spec.cases(ModelConfig.preset(preset))
    yield from spec.small


@pytest.mark.parametrize("phase", [DECODE, PREFILL])
@pytest.mark.parametrize("name", sorted(SPECS))
def test_one_order_of_sums_for_all_tokens(name: str, phase: str) -> None:
    """Also whatever the tune cache holds, and however rows fall to sequences."""
    spec = SPECS[name]
    orders: dict[Any, Any] = {}
    for case in cases_of(spec):
        key = tuple(sorted((k, v) for k, v in case.items() if k not in BLIND))
        for tokens in (*spec.tokens, 2 * spec.tokens[-1]):
            for tuned in (None, *spec.tiles(case)):
                tile = spec.fixed.choose(spec.default, case, tokens, phase, tuned)
                want = orders.setdefault(key, spec.fixed.order(tile))
                assert spec.fixed.order(tile) == want, f"{case} at {tokens} tokens: {tile}"


def test_a_tuned_tile_of_the_same_order_is_taken() -> None:
    spec, case = SPECS["matmul"], Case(N=4096, K=4096, ieee=0)
    own = spec.fixed.choose(spec.default, case, 8, DECODE, None)
    for tuned, taken in ((own.but(num_stages=2), True), (own.but(BLOCK_K=32), False)):
        tile = spec.fixed.choose(spec.default, case, 8, DECODE, tuned)
        assert (tile == tuned) is taken


def test_outside_the_mode_nothing_changes() -> None:
    spec, axes = SPECS["matmul"], {"N": 4096, "K": 4096, "ieee": 0}
    x = torch.empty(0, dtype=torch.bfloat16)
    plain = spec.tile(64, x, **axes)
    with fixed_order(DECODE):
        assert phase() == DECODE
        assert spec.tile(64, x, **axes) != plain
        with fixed_order(None):
            assert spec.tile(64, x, **axes) == plain
    assert phase() is None
    assert spec.tile(64, x, **axes) == plain
    with pytest.raises(UnsupportedError, match="verify"), fixed_order("verify"):
        pass


# ------------------------------------------------------------------------------------- the engine
def test_pieces_are_cut_on_the_sequences_own_grid() -> None:
    config = ModelConfig.preset("tiny")  # chunks of 32
    fp32, int8 = STATE_FORMATS["float32"], STATE_FORMATS["int8"]
    assert find_grain(100, config, fp32, False) == (100, 1)
    assert find_grain(100, config, fp32, True) == (96, 32)
    assert find_grain(5, config, fp32, True) == (32, 32)
    assert find_grain(100, config, int8, True) == (96, 96)  # rounded where a piece ends
    with LLM.synthetic("tiny", prefill_piece=100, max_requests=3, **SIZES) as llm:
        for n in (70, 45, 90):
            llm.engine.submit(llm.engine.prepare([5] * n, SamplingParams(max_tokens=4)))
        while llm.engine.busy:
            step = llm.engine.scheduler.step()
            for p in step.prefill:
                assert p.start % 32 == 0
                assert p.end % 32 == 0 or p.end == len(p.request.prompt)
            assert sum(p.count for p in step.prefill) <= 96
            for piece, tokens in llm.runner.run(step) if step.tokens else []:
                llm.engine.scheduler.advance(piece, tokens or [])


def test_only_whole_chunks_of_an_earlier_prompt_are_gone_on_from() -> None:
    from nemotriton.engine.prefixes import Prefixes

    with LLM.synthetic("tiny", max_requests=1, **SIZES) as llm:
        llm.engine.prefixes = Prefixes(2**28)
        for n in (40, 64):
            llm.generate([[7] * n], SamplingParams(max_tokens=1, temperature=0))
        assert [len(p.ids) for p in llm.engine.prefixes._kept.values()] == [64]


@pytest.mark.parametrize(("dtype", "typical"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_prompts_and_answers_are_scored_alike(dtype: str, typical: float) -> None:
    """Prefill and decode sum in different orders: logprobs differ, but of no sequence by much."""
    with LLM.synthetic("tiny", max_requests=4, dtype=dtype, **SIZES) as llm:
        found = sorted(schedules.prefill_against_decode(llm, count=8, tokens=6))
    assert found[len(found) // 2] < typical
    assert found[-1] < 6 * max(found[len(found) // 2], typical / 10), found


def test_logits_of_prompts_are_those_of_each_alone() -> None:
    prompts = [[5, 9, 200, 31], [77] * 3 + list(range(10, 80)), [400]]
    with LLM.synthetic("tiny", max_requests=3, dtype="bfloat16", prefill_piece=32, **SIZES) as llm:
        together = llm.logits(prompts)
        alone = [llm.logits(p) for p in prompts]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
