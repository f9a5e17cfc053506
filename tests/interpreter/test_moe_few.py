"""The joined launches of a few tokens: against the ops they stand for, and inside a model."""

from pathlib import Path

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.engine.llm import LLM
from nemotriton.kernels.moe_few import ENTER_MOE, SHARE_EXPERT
from nemotriton.kernels.op import Case, counting_calls, use, use_tile
from nemotriton.model.mixers import MoeMixer
from nemotriton.model.packing import forced_packing
from tests.conftest import Poison
from tests.flavours import CONFIG, FLAVOURS

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.mark.parametrize("T", [1, 6])
def test_a_row_has_the_same_bits_in_any_company(T: int, poison: Poison) -> None:
    case = Case(E=20, L=48, F=80, D=336, S=1)
    args = ENTER_MOE.make(case, 8, CPU, BF16, parity.generator(0, CPU))
    every = K.enter_moe.triton(**args)
    some = K.enter_moe.triton(**{**args, "x": args["x"][2 : 2 + T]})
    for a, b in zip(every, some, strict=True):
        assert torch.equal(a[..., 2 : 2 + T, :], b)


def test_the_router_gives_what_it_gives_alone(poison: Poison) -> None:
    """Sums of parts, groups, and as many programs of the router as tokens."""
    case = Case(E=40, K=4, G=8, TG=3, F=64, D=37, S=2)
    args = SHARE_EXPERT.make(case, 5, CPU, BF16, parity.generator(0, CPU))
    routing, _ = K.share_expert.triton(**args)
    names = ("logits", "bias", "top_k", "router_groups", "top_groups", "normalize", "scale")
    alone = {name: args[name] for name in names}
    for sort in (True, False):
        other = K.route_experts.triton(**alone, sort=sort)
        assert torch.equal(routing.ids, other.ids)
        assert torch.equal(routing.weights, other.weights)
        assert len(other.order) == len(other.ids.flatten()) * sort


def test_tiles_of_other_heights(poison: Poison) -> None:
    for spec in (ENTER_MOE, SHARE_EXPERT):
        case = spec.small[0]
        args = spec.make(case, 9, CPU, BF16, parity.generator(0, CPU))
        tile = spec.default(case, 9).but(BLOCK_T=16, BLOCK_N=32, num_warps=2, ROW=256)
        with use_tile(spec.op.name, tile):
            out = parity.run(spec, args)
        twin, exact = parity.run(spec, args, ref=True), parity.oracle(spec, args)
        verdict = parity.compare(spec, out, twin, exact, case)
        assert verdict.ok, verdict.detail


@pytest.mark.parametrize("packed", [True, False])
def test_inside_a_layer(packed: bool, tmp_path: Path) -> None:
    """As near to the twins in fp32 as bf16 twins are, and as the ops one by one."""
    FLAVOURS["super-mixed"](tmp_path / "m")
    x = torch.randn(3, CONFIG.width, generator=torch.Generator().manual_seed(0)).bfloat16()

    def outputs(dtype: str, force: dict[str, str]) -> torch.Tensor:
        options = {"dtype": dtype, "device": "cpu", "max_context": 128}
        with forced_packing(packed), LLM(tmp_path / "m", **options) as llm, use(force):
            layers = [m for m in llm.runner.model.modules() if isinstance(m, MoeMixer)]
            return layers[0](x.to(getattr(torch, dtype)), None, None).double()

    exact, twins = outputs("float32", {"*": "ref"}), outputs("bfloat16", {"*": "ref"})
    with counting_calls() as called:
        found = outputs("bfloat16", {})
    assert called["enter_moe"] == 1
    assert ("share_expert" in called) == packed
    with counting_calls() as called:
        beside = outputs("bfloat16", {"share_expert": "ref"})
    assert called["enter_moe"] == 1
    assert "share_expert" not in called
    with counting_calls() as called:
        apart = outputs("bfloat16", {"enter_moe": "ref"})
    assert "enter_moe" not in called
    limit = 2 * float((twins - exact).norm())
    assert float((found - exact).norm()) < limit
    assert float((beside - exact).norm()) < limit
    assert float((apart - exact).norm()) < limit
