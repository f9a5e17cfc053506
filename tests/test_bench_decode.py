"""The decode benchmark's card and its walk through the engine, on a model and a device that are
small; times are nobody's business here."""

import pytest
import torch

from bench import decode
from bench.decode import Load
from nemotriton import LLM
from nemotriton.autotune.ceilings import Ceilings
from nemotriton.autotune.trial import Facts
from nemotriton.device import CPU
from nemotriton.engine.loading import random_weights


def test_the_card_of_one_token_is_the_active_weights() -> None:
    weights = random_weights("nano-30b", 0)
    config = weights.config
    parts = decode.card(weights, Load(1, 0, 0))
    states = parts.pop("M states") + parts.pop("* K/V")
    table = 2 * config.vocab * config.width  # of which one row is read
    active = 2 * config.active_parameter_count() - table
    active += 2 * 128 * config.width * len(config.moe_layers)  # routers are fp32
    assert sum(parts.values()) == pytest.approx(active, rel=1e-4)
    m = config.mamba
    assert m is not None
    windows = 2 * 2 * len(config.mamba_layers) * 3 * m.conv_dim
    kv = 2 * 2 * len(config.attention_layers) * config.attention.kv_rows  # type: ignore[union-attr]
    assert states == 2 * 46 * 2**20 + windows + kv


def test_many_rows_reach_all_experts_and_drafts_read_more() -> None:
    assert decode.reached(128, 6, 1) == pytest.approx(6)
    assert decode.reached(128, 6, 10_000) == pytest.approx(128)
    weights = random_weights("super-120b", 0, quant="release", drafting=True)
    plain, drafting = (decode.card(weights, Load(16, 1024, d)) for d in (0, 3))
    assert drafting["head"] == 4 * plain["head"]
    assert drafting["M weights"] == plain["M weights"]
    assert drafting["M states"] < plain["M states"], "a state is seldom written"
    assert plain["MTP weights"] == 0 < drafting["MTP weights"]


@pytest.mark.parametrize("drafts", [0, 2])
def test_steps_over_contexts_that_nobody_computed(drafts: int) -> None:
    weights = random_weights("tiny", 0, drafting=drafts > 0)
    facts = Facts(CPU, "", Ceilings(4000.0, 4000.0, 700.0, 50.0))
    with LLM.synthetic(
        "tiny", dtype="float32", device="cpu", graphs=True, max_context=160, max_requests=2,
        drafts=drafts, adapt_drafts=False,
    ) as llm:  # fmt: skip
        decode.noise(llm)
        for batch in (1, 2):
            load = Load(batch, 100, drafts)
            row = decode.measured(llm, weights, load, facts, count=3)
            assert row["tokens_per_s"] > 0
            assert row["host_us"] <= row["p80"]
            assert row["experts"] >= llm.config.moe.top_k  # type: ignore[union-attr]
            assert decode.line(row | {"tokens": batch}).count("|") == decode.HEAD.count("|")
        report = llm.stats()["graphs"]
        assert report["replays"] >= 2 * (decode.WARM + 3)
        assert report["other_steps"] == 0
        assert not torch.isnan(llm.runner.steps.memory.hidden).any()  # type: ignore[union-attr]
