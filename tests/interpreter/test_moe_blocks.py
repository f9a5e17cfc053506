"""Blocks of pairs that the router of a few tokens makes, and the experts that take them.

The checks take a device: the GPU tests run the same ones on compiled kernels."""

from pathlib import Path

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.engine.llm import LLM
from nemotriton.errors import UnsupportedError
from nemotriton.kernels import moe_experts_packed
from nemotriton.kernels.moe_combine import combining
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.moe_few import FEWEST, FIRST, SHARE_EXPERT, find_blocks_ref
from nemotriton.kernels.moe_packed_tiles import one_launch, packed_tile
from nemotriton.kernels.moe_route import OwnRouting, Routing
from nemotriton.kernels.op import Args, Case, Tile, use_tile
from nemotriton.model.layers import Experts
from nemotriton.model.mixers import MoeMixer
from nemotriton.model.packing import forced_packing
from tests.conftest import Poison
from tests.flavours import CONFIG, FLAVOURS

CPU = torch.device("cpu")
SMALL = Case(E=40, K=4, G=1, TG=1, F=64, D=37, S=2)
EXPERTS = Case(E=6, F=80, L=64, K=2, O=0)
HOWS = ("alike", "apart", "drawn")
MMA = packed_tile((8, 128, 128, 3, 2), (8, 128, 128, 3, 2), 3, blocks=0)
ONE = one_launch((64, 6), (64, 6))


def logits(how: str, T: int, E: int, K: int, where: torch.device) -> torch.Tensor:
    """All tokens with the same experts, no two with a common one, or as it comes."""
    rng = parity.generator(T, where)
    drawn = torch.randn(T, E, generator=rng, device=where)
    if how == "alike":
        return drawn[:1].repeat(T, 1)
    if how == "apart":
        assert T * K <= E
        own = torch.arange(E, device=where)[None] // K == torch.arange(T, device=where)[:, None]
        return drawn + 20 * own
    return drawn


def shared_args(case: Case, T: int, how: str, where: torch.device) -> Args:
    args = SHARE_EXPERT.make(case, T, where, torch.bfloat16, parity.generator(T, where))
    parts = torch.zeros_like(args["logits"])
    parts[1] = logits(how, T, case.E, case.K, where)
    return args | {"logits": parts, "bias": None}


def check_blocks(case: Case, T: int, how: str, where: torch.device, calls: int) -> None:
    """The twin's blocks in every call, and no count that is left."""
    args = shared_args(case, T, how, where)
    want = K.share_expert.ref(**args)[0]
    assert want.block_pairs is not None
    shared = int((want.block_pairs >= 0).sum(1).max())
    assert shared == {"alike": T, "apart": 1}.get(how, shared)
    for _ in range(calls):
        routing, _ = K.share_expert.triton(**args)
        for name in ("ids", "block_experts", "block_pairs"):
            assert torch.equal(getattr(routing, name), getattr(want, name)), name
        assert not args["arrivals"].any()


def check_same_bits(
    case: Case, T: int, how: str, where: torch.device, tile: Tile, ordered: bool
) -> None:
    """Experts by the routing's blocks, one pair at a time, by ids, and by sorted pairs; with ONE in
    one launch, whose counts are zeros again, and in three."""
    args = RUN_EXPERTS_PACKED.make(case, T, where, torch.bfloat16, parity.generator(T, where))
    args["ordered"] = ordered
    scores = logits(how, T, case.E, case.K, where)
    bare = K.route_experts_ref(scores, None, case.K, scale=2.5, sort=False)
    routings = {
        "blocks": (find_blocks_ref(bare), tile),
        "pairs": (bare, tile),
        "ids": (bare, tile.but(BLOCKS=1)),
        "sorted": (K.route_experts_ref(scores, None, case.K, scale=2.5), tile.but(BLOCKS=2)),
    }
    found = {}
    for name, (routing, its) in routings.items():
        with use_tile("run_experts_packed", its):
            found[name] = K.run_experts_packed.triton(**args | {"routing": routing})
            apart = args | {"routing": routing, "arrivals": None}
            found[f"{name} apart"] = K.run_experts_packed.triton(**apart)
        assert not args["arrivals"].any()
    assert found["pairs"].isfinite().all()
    for name, y in found.items():
        assert torch.equal(y, found["pairs"]), name


@pytest.mark.parametrize("T", [FIRST, 7, FEWEST])
@pytest.mark.parametrize("how", HOWS)
def test_blocks_are_the_twins(how: str, T: int, poison: Poison) -> None:
    check_blocks(SMALL, T, how, CPU, calls=2)


def test_the_twins_blocks_are_what_they_are_said_to_be() -> None:
    ids = torch.tensor([[0, 2, 5], [2, 3, 5], [1, 5, 6]], dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int32)
    found = find_blocks_ref(Routing(ids, torch.ones(3, 3), nothing, nothing))
    assert found.block_experts is not None
    assert found.block_pairs is not None
    assert found.block_experts.tolist() == [0, 2, 5, -1, 3, -1, 1, -1, 6]
    by_expert = {0: [0], 1: [6], 2: [1, 3], 3: [4], 5: [2, 5, 7], 6: [8]}
    for p, expert in enumerate(ids.flatten().tolist()):
        rows = [-1] * FEWEST
        for pair in by_expert[expert]:
            rows[pair // 3] = pair
        assert found.block_pairs[p].tolist() == rows


@pytest.mark.parametrize("T", [0, 1, FIRST - 1, FEWEST + 1])
def test_no_blocks_where_none_help(T: int, poison: Poison) -> None:
    args = SHARE_EXPERT.make(SMALL, T, CPU, torch.bfloat16, parity.generator(T, CPU))
    for op in (K.share_expert.triton, K.share_expert.ref):
        assert op(**args)[0].block_pairs is None


def test_blocks_are_nothing_that_the_rest_depends_on(poison: Poison) -> None:
    args = shared_args(SMALL, 5, "drawn", CPU)
    (one, y), (other, z) = (K.share_expert.triton(**args | {"arrivals": a}) for a in
                            (args["arrivals"], None))  # fmt: skip
    assert other.block_pairs is None
    for a, b in zip((*one[:4], y), (*other[:4], z), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("how,ordered", [(how, how != "apart") for how in HOWS])
@pytest.mark.parametrize("tile", [MMA, ONE], ids=["apart", "one launch"])
def test_experts_give_the_same_bits(tile: Tile, how: str, ordered: bool, poison: Poison) -> None:
    check_same_bits(EXPERTS, 3, how, CPU, tile, ordered)


def test_where_one_launch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With counts enough, blocks of one height, all experts here, and rows that are summed."""
    taken: list[torch.Tensor] = []

    def seen(x: torch.Tensor, *more: object) -> None:
        taken.append(x)

    monkeypatch.setattr(moe_experts_packed, "multiply_at_once", seen)
    args = RUN_EXPERTS_PACKED.make(EXPERTS, 3, CPU, torch.bfloat16, parity.generator(0, CPU))
    routing = args["routing"]
    blocks = find_blocks_ref(routing)
    own = OwnRouting.of(routing, 0, EXPERTS.E)
    few = args["arrivals"][1:]
    for times, tile, changes, way in (
        (1, ONE, {}, "ordered"),
        (1, ONE.but(BLOCKS=2), {"routing": blocks}, "ordered"),
        (1, ONE.but(BLOCKS=2), {}, "ordered"),
        (1, ONE.but(BLOCKS=1), {}, "ordered"),
        (0, ONE.but(UP_M=16), {}, "ordered"),
        (0, ONE, {"routing": own}, "ordered"),
        (0, ONE, {"arrivals": few}, "ordered"),
        (0, ONE, {}, "atomic"),
        (0, MMA, {}, "ordered"),
    ):
        taken.clear()
        with use_tile("run_experts_packed", tile), combining(way):
            K.run_experts_packed.triton(**args | changes)
        assert len(taken) == times, (tile, changes.keys(), way)


def test_blocks_that_do_not_fit_a_tile_are_left_alone(poison: Poison) -> None:
    tile = packed_tile((16, 128, 128, 3, 4), (16, 128, 128, 3, 4))
    case = Case(E=6, F=48, L=64, K=2, O=0)
    args = RUN_EXPERTS_PACKED.make(case, 3, CPU, torch.bfloat16, parity.generator(0, CPU))
    with use_tile("run_experts_packed", tile):
        want = K.run_experts_packed.triton(**args)
        args["routing"] = find_blocks_ref(args["routing"])
        assert torch.equal(K.run_experts_packed.triton(**args), want)


def test_a_layer_hands_them_on(tmp_path: Path) -> None:
    FLAVOURS["super-mixed"](tmp_path / "m")
    seen: list[Routing] = []
    options = {"dtype": "bfloat16", "device": "cpu", "max_context": 128}
    with forced_packing(True), LLM(tmp_path / "m", **options) as llm:
        modules = list(llm.runner.model.modules())
        layer = next(m for m in modules if isinstance(m, MoeMixer))
        for m in modules:
            if isinstance(m, Experts):
                m.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
        for T in (1, 3):
            layer(torch.ones(T, CONFIG.width).bfloat16(), None, None)
    one, three = seen
    assert one.block_pairs is None
    assert three.block_pairs is not None
    assert three.block_pairs.shape == (three.ids.numel(), FEWEST)
    for counts in (layer.arrivals, layer.experts.arrivals):
        assert counts is not None
        assert not counts.any()


def test_what_does_not_fit_is_named() -> None:
    args = shared_args(SMALL, 3, "drawn", CPU)
    with pytest.raises(UnsupportedError, match="arrivals must be int32"):
        K.share_expert.triton(**args | {"arrivals": torch.zeros(1)})
    args = RUN_EXPERTS_PACKED.make(EXPERTS, 2, CPU, torch.bfloat16, parity.generator(0, CPU))
    with pytest.raises(UnsupportedError, match="int32 of one axis"):
        K.run_experts_packed.triton(**args | {"arrivals": torch.zeros(9)})
    blocks = find_blocks_ref(args["routing"])
    assert blocks.block_pairs is not None
    args["routing"] = blocks._replace(block_pairs=blocks.block_pairs[1:])
    with pytest.raises(UnsupportedError, match="as many blocks"):
        K.run_experts_packed.triton(**args)
