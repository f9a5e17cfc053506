"""CachePlan: bytes add up, defaults leave room, and refusals name what would fit."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotriton.engine.caches import PAGE_SIZE
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.loading import make_caches
from nemotriton.engine.plan import CachePlan, Wishes, largest, make_plan
from nemotriton.errors import CapacityError
from nemotriton.kernels import STATE_FORMATS
from nemotriton.model.config import ModelConfig

GIB = 2**30
FP32 = STATE_FORMATS["float32"]
WISHES = Wishes(None, None, 8192, 0, 2, 4)
NANO = ModelConfig.preset("nano-30b")
NANO_BYTES = 2 * NANO.parameter_count()


def plan(config: ModelConfig, gib: float, weights: int | None = None, **wishes: int) -> CachePlan:
    size = 2 * config.parameter_count() if weights is None else weights
    asked = replace(WISHES, **wishes)
    return make_plan(config, asked, weights=size, available=int(gib * GIB), where="a test device")


@pytest.mark.parametrize(
    "name, ssm, conv",
    [("super-120b", 160, 2.34375), ("ultra-550b", 384, 5.0625), ("nano-30b", 46, 0.80859375)],
)
def test_states_of_a_request(name: str, ssm: float, conv: float) -> None:
    """model.md's figures: Super 160 MiB of fp32 states and 2.3 MiB of conv windows."""
    found = plan(ModelConfig.preset(name), 4096, max_requests=3)
    assert found.states == 3 * (ssm + conv) * 2**20
    half = plan(ModelConfig.preset(name), 4096, max_requests=3, state_item=2)
    assert half.states == 3 * (ssm / 2 + conv) * 2**20


def test_kv_of_super_is_eight_kib_a_token() -> None:
    found = plan(ModelConfig.preset("super-120b"), 1024, max_requests=2, max_context=65536)
    assert found.pages == 2 * 65536 // PAGE_SIZE
    assert found.kv == 2 * 65536 * 8 * 2**10


def test_drafts_cost_a_lane_each() -> None:
    plain = plan(NANO, 120, max_requests=8, max_context=4096)
    drafting = plan(NANO, 120, max_requests=8, max_context=4096, drafts=3)
    assert plain.lanes == 0
    assert drafting.states == plain.states
    windows = 8 * int(0.80859375 * 2**20)
    assert drafting.lanes == 3 * plain.states + windows, "and a window for the last token as well"
    nano_with_mtp = ModelConfig.preset("super-120b")
    layers = [plan(nano_with_mtp, 999, max_requests=1, max_context=64, drafts=k).kv for k in (0, 1)]
    assert layers[1] * 8 == layers[0] * 9, "the MTP block's attention layer has pages too"


@pytest.mark.parametrize("name", ["tiny", "nano-30b", "h-8b", "super-120b"])
def test_the_bytes_planned_are_the_bytes_allocated(name: str) -> None:
    config = ModelConfig.preset(name)
    found = plan(config, 1024, max_requests=2, max_context=256)
    device = torch.device("meta")
    caches = make_caches(config, found, torch.bfloat16, FP32, device, None)
    assert caches.kv is not None
    assert caches.mamba is not None
    assert found.kv == caches.kv.k.nbytes + caches.kv.v.nbytes
    assert found.states == caches.mamba.ssm.nbytes + caches.mamba.conv.nbytes
    lanes = plan(config, 1024, max_requests=2, max_context=256, drafts=2)
    caches = make_caches(config, lanes, torch.bfloat16, FP32, device, DraftShape.chain(2))
    assert caches.mamba is not None
    assert caches.mamba.conv_lanes is not None
    held = (caches.mamba.ssm, caches.mamba.conv, caches.mamba.conv_lanes)
    assert lanes.states + lanes.lanes == sum(t.nbytes for t in held)
    small = {"state_item": 1, "state_scale": 4}
    lanes = plan(config, 1024, max_requests=2, max_context=256, drafts=2, **small)
    caches = make_caches(
        config, lanes, torch.bfloat16, STATE_FORMATS["int8"], device, DraftShape.chain(2)
    )
    assert caches.mamba is not None
    assert caches.mamba.scales is not None
    held = (caches.mamba.ssm, caches.mamba.scales, caches.mamba.conv, caches.mamba.conv_lanes)
    assert lanes.states + lanes.lanes == sum(t.nbytes for t in held if t is not None)


def test_models_without_a_kind_own_nothing_of_it() -> None:
    tiny = ModelConfig.preset("tiny")
    only = {
        kind: replace(
            tiny,
            kinds=tuple(k for k in tiny.kinds if k.value == kind),
            mlp_widths=(0,) * tiny.pattern.count(kind),
            moes=(None,) * tiny.pattern.count(kind),
            mamba=tiny.mamba if kind == "M" else None,
            attention=tiny.attention if kind == "*" else None,
            mtp=None,
            mtp_moe=None,
        )
        for kind in "M*"
    }
    mamba, attention = plan(only["M"], 1), plan(only["*"], 1)
    assert (mamba.pages, mamba.kv) == (0, 0)
    assert mamba.slots == mamba.max_requests
    assert (attention.slots, attention.states) == (0, 0)
    assert attention.pages > 0
    for config, found in ((only["M"], mamba), (only["*"], attention)):
        caches = make_caches(config, found, torch.bfloat16, FP32, torch.device("meta"), None)
        assert (caches.kv is None) == (found.pages == 0)
        assert (caches.mamba is None) == (found.slots == 0)


def test_defaults_shrink_with_the_memory_there_is() -> None:
    roomy, tight = plan(NANO, 126), plan(NANO, 62)
    assert (roomy.max_context, roomy.max_requests) == (NANO.max_context, 64)
    assert tight.max_context < NANO.max_context
    assert tight.max_requests == 8
    assert tight.pages * PAGE_SIZE >= tight.max_context


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["nano-30b", "tiny", "h-8b", "super-120b"]),
    beyond=st.floats(0, 80),
    context=st.none() | st.integers(1, 300_000),
    requests=st.none() | st.integers(1, 2000),
    piece=st.sampled_from([1, 512, 8192]),
    drafts=st.sampled_from([0, 3]),
)
def test_a_plan_fits_or_its_advice_does(
    name: str,
    beyond: float,
    context: int | None,
    requests: int | None,
    piece: int,
    drafts: int,
) -> None:
    config = ModelConfig.preset(name)
    weights = 2 * config.parameter_count()
    available = weights + int(beyond * GIB)
    asked = Wishes(context, requests, piece, drafts, 2, 4)

    def planned(wishes: Wishes) -> CachePlan:
        return make_plan(config, wishes, weights=weights, available=available, where="it")

    try:
        found = planned(asked)
    except CapacityError as problem:
        text = str(problem)
        assert re.search(r"needs [\d.]+ [GM]iB \(weights .*\); it has [\d.]+ [GM]iB for it\.", text)
        advice = re.search(r"Would fit: (.*)\.$", text)
        if advice is None:
            assert "No smaller max_context, max_requests or prefill_piece is enough" in text
            with pytest.raises(CapacityError):
                planned(Wishes(1, 1, 1, 0, 2, 4))
            return
        for option in advice.group(1).split(", or "):
            changes = {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", option)}
            fixed = replace(asked, **changes)
            assert planned(fixed).total <= available
            for key, value in changes.items():
                if key in ("max_context", "max_requests") and len(changes) == 1:
                    with pytest.raises(CapacityError):
                        planned(replace(asked, **{key: value + 1}))
        return
    assert found.total <= available
    assert found.total + found.parts().get("free", 0) == available
    assert found.max_context == context or context is None
    assert found.max_requests == requests or requests is None
    assert found.pages * PAGE_SIZE >= found.max_context
    assert found.slots == found.max_requests


def test_the_refusal_in_full() -> None:
    with pytest.raises(CapacityError) as caught:
        plan(NANO, 62, max_context=131072, max_requests=64)
    assert str(caught.value) == (
        "needs 64.5 GiB (weights 58.8, states 2.9, KV 0.8, work 2.0); a test device has 62.0 GiB "
        "for it. The states of a request take 46.8 MiB. Would fit: max_requests=13."
    )
    with pytest.raises(CapacityError, match=r"least beside them take 58\.9 GiB. Use a quantised"):
        plan(NANO, 50)


@given(st.integers(1, 100), st.integers(1, 100))
def test_largest(high: int, limit: int) -> None:
    assert largest(lambda n: n <= limit, 1, high) == min(high, limit)
    assert largest(lambda n: False, 1, high) is None


def test_recorded_steps_have_their_memory_and_a_page_of_their_own() -> None:
    sizes = {"max_requests": 16, "max_context": 4096}
    plain = plan(NANO, 120, **sizes)
    found = plan(NANO, 120, **sizes, spare_pages=1, graphs=1)
    page = plain.kv // plain.pages
    assert plain.graphs == 0
    assert found.pages == plain.pages
    assert found.kv == plain.kv + page
    assert found.parts()["graphs"] == found.graphs > 4 * 32 * 2**10 * len(NANO.kinds)
    assert found.total == plain.total + page + found.graphs
    longer = plan(NANO, 120, max_requests=16, max_context=65536, spare_pages=1, graphs=1)
    assert longer.graphs > found.graphs, "attention over more keys has more splits"
    device = torch.device("meta")
    caches = make_caches(NANO, found, torch.bfloat16, STATE_FORMATS["float32"], device, 0, spare=1)
    assert caches.kv is not None
    assert found.kv == caches.kv.k.nbytes + caches.kv.v.nbytes


def test_work_holds_what_a_prompt_widens() -> None:
    """A decoded matrix, or the keys of an fp8 cache in powers of two: whichever is more."""
    hold = {"max_requests": 4, "max_context": 65536}
    config = ModelConfig.preset("super-120b")
    base = plan(config, 999, kv_item=2, **hold).work
    assert plan(config, 999, kv_item=2, widened=152 << 20, **hold).work == base + (152 << 20)
    assert plan(config, 999, kv_item=1, **hold).work == base + 2**18 * 2 * 256 * 2
    both = {"kv_item": 1, "widened": 152 << 20}
    assert plan(config, 999, **both, **hold).work == base + 2**28
    one = {"max_requests": 1, "max_context": 600_000}
    more = plan(config, 999, **both, **one).work - plan(config, 999, kv_item=2, **one).work
    assert more == 2**20 * 2 * 256 * 2
    few = {**hold, "prefill_piece": 8}
    more = plan(config, 999, kv_item=1, **few).work - plan(config, 999, kv_item=2, **few).work
    assert more == 2**28, "the keys of short pieces are widened, too"
