"""Experts on packed words: every form of tile, orders of x, and sizes the grid does not have."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.errors import UnsupportedError
from nemotriton.kernels.fixed_order import DECODE, fixed_order
from nemotriton.kernels.hopper_pack import k_order, pack_hopper
from nemotriton.kernels.moe_combine import adds_atomically, combining
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED as SPEC
from nemotriton.kernels.moe_experts_quant import RUN_EXPERTS_NVFP4
from nemotriton.kernels.moe_packed_tiles import packed_tile
from nemotriton.kernels.moe_route import Routing, route_experts_ref
from nemotriton.kernels.op import Args, Case, Tile, use_tile
from tests.conftest import Poison

CPU = torch.device("cpu")
MMA = packed_tile((8, 128, 128, 3, 2), (8, 128, 128, 3, 2))
WGMMA = packed_tile((16, 128, 128, 3, 4), (16, 128, 128, 3, 4), narrow=True)
FORMS = {
    "pairs": MMA.but(BLOCKS=0, SPLIT=3),
    "runs": MMA.but(BLOCKS=1),
    "mma": MMA,
    "mma split, 64 rows": MMA.but(SPLIT=3, UP_N=64, DOWN_N=64, DOWN_WARPS=1),
    "one launch": MMA.but(BLOCKS=0, SPLIT=3, ONE=True),
    "one launch, 64 rows": MMA.but(BLOCKS=0, ONE=True, UP_N=64, DOWN_N=64, SPLIT=3),
    "one launch, tables": MMA.but(ONE=True),
    "wgmma": WGMMA,
    "wgmma of 64 columns": WGMMA.but(UP_K=64, DOWN_K=64, UP_N=64, DOWN_N=64),
    "wgmma, two heights": WGMMA.but(UP_M=32, NARROW=False),
}


def random_routing(T: int, E: int, top: int) -> Routing:
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(T * E))
    return route_experts_ref(logits, None, top, 1, 1, True, 2.5)


def arguments(T: int, E: int, F: int, L: int, top: int, ordered: bool = False) -> Args:
    case = Case(E=E, F=F, L=L, K=top, O=0)
    args = SPEC.make(case, T, CPU, torch.bfloat16, parity.generator(E + F, CPU))
    return args | {"routing": random_routing(T, E, top), "ordered": ordered}


def check(args: Args, tile: Tile) -> torch.Tensor:
    """The output, once it is as near to float64 as the twin."""
    with use_tile("run_experts_packed", tile):
        out = parity.run(SPEC, args)
    twin = parity.run(SPEC, args, ref=True)
    verdict = parity.compare(SPEC, out, twin, parity.oracle(SPEC, args))
    assert verdict.ok, verdict.detail
    return out["out0"]


@pytest.mark.parametrize("tile", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("ordered", [False, True], ids=["natural", "ordered"])
def test_forms(tile: Tile, ordered: bool, poison: Poison) -> None:
    """Columns that end inside a step; three steps of the down-projection's 336 columns."""
    T, top = {0: (2, 1), 1: (5, 2), 2: (11, 1)}[int(tile["BLOCKS"])]
    check(arguments(T, 3 if top == 2 else 2, 336, 192, top, ordered), tile)


@pytest.mark.parametrize("tile", [MMA, WGMMA], ids=["mma", "wgmma"])
@pytest.mark.parametrize("F,L", [(16, 48), (1856, 80), (80, 928)])
def test_widths_that_no_tile_divides(F: int, L: int, tile: Tile, poison: Poison) -> None:
    check(arguments(2, 3, F, L, 1), tile)


@pytest.mark.parametrize(
    "form", ["pairs", "runs", "mma", "one launch, tables", "wgmma, two heights"]
)
def test_pairs_that_nobody_sorted_give_the_same_bits(form: str, poison: Poison) -> None:
    """A block that is full, one that is not, experts without pairs, and no tokens at all."""
    for T, E, top in ((0, 3, 2), (19 if FORMS[form]["BLOCKS"] == 2 else 7, 6, 2)):
        args = arguments(T, E, 48, 64, top)
        empty = torch.empty(0, dtype=torch.int32)
        bare = args | {"routing": args["routing"]._replace(order=empty, offsets=empty)}
        with use_tile("run_experts_packed", FORMS[form]):
            one, other = K.run_experts_packed.triton(**args), K.run_experts_packed.triton(**bare)
        assert torch.equal(one, other)
        assert torch.equal(K.run_experts_packed_ref(**args), K.run_experts_packed_ref(**bare))


def test_order_of_x_is_only_an_order(poison: Poison) -> None:
    """The same numbers in the products' order give the same bits."""
    args = arguments(3, 3, 64, 128, 1)
    ordered = args | {"x": args["x"][:, k_order(128, True)].contiguous(), "ordered": True}
    for name in ("pairs", "mma", "wgmma of 64 columns"):
        tile = FORMS[name]
        with use_tile("run_experts_packed", tile):
            one, other = K.run_experts_packed.triton(**args), K.run_experts_packed.triton(**ordered)
        assert torch.equal(one, other)
    ref = K.run_experts_packed_ref
    assert torch.equal(ref(**args), ref(**ordered))


@pytest.mark.parametrize("T", [0, 1, 33])
@pytest.mark.parametrize("tile", [MMA, WGMMA], ids=["mma", "wgmma"])
def test_all_tokens_to_one_expert(T: int, tile: Tile, poison: Poison) -> None:
    """Several blocks of one expert, and nothing of its neighbours: those are all NaN."""
    logits = torch.zeros(T, 7)
    logits[:, 4] = 9
    args = arguments(T, 7, 48, 64, 1) | {"routing": route_experts_ref(logits, None, 1)}
    for name in ("up_words", "up_global", "down_words", "down_global"):
        sick = args[name].view(torch.float32) if args[name].dtype == torch.int32 else args[name]
        sick[[0, 1, 2, 3, 5, 6]] = float("nan")
    assert check(args, tile).isfinite().all()


@pytest.mark.parametrize("blocks", [1, 2])
def test_many_experts_find_their_blocks(blocks: int, poison: Poison) -> None:
    """512 experts, most of them without a token; several programs write the tables."""
    check(arguments(1, 512, 16, 32, 12), MMA.but(BLOCKS=blocks))


@pytest.mark.parametrize("T", [1, 8, 9])
def test_runs_of_as_many_pairs_as_a_block_holds(T: int, poison: Poison) -> None:
    """All tokens with the same two experts; with nine a run is longer than the block."""
    logits = torch.tensor([0.0, 3, 0, 2]).repeat(T, 1)
    args = arguments(T, 4, 48, 64, 2) | {"routing": route_experts_ref(logits, None, 2)}
    check(args, MMA.but(BLOCKS=1))


def test_the_canonical_experts_give_the_same(poison: Poison) -> None:
    """Against `run_experts_nvfp4` on the checkpoint's layout, where sums are exact: equal bits."""
    case = Case(E=4, F=64, L=64, K=2, Q=0)
    args = RUN_EXPERTS_NVFP4.make(case, 6, CPU, torch.bfloat16, parity.generator(3, CPU))
    args["x"] = (args["x"] * 2).round()
    for name in ("up", "down"):
        args[f"{name}_global"] = 2.0 ** -torch.arange(4.0, 8.0)
        args[f"{name}_scales"] = torch.full_like(args[f"{name}_scales"].float(), 2.0).to(
            torch.float8_e4m3fn
        )
    args["routing"] = args["routing"]._replace(weights=torch.full((6, 2), 0.5))
    want = K.run_experts_nvfp4.triton(**args)
    packed = {
        f"{n}_words": pack_hopper(args[f"{n}_codes"], args[f"{n}_scales"]) for n in ("up", "down")
    }
    kept = {k: args[k] for k in ("x", "routing", "up_global", "down_global")}
    for tile in (MMA, WGMMA.but(NARROW=False)):
        with use_tile("run_experts_packed", tile):
            found = K.run_experts_packed.triton(**kept, **packed, width=64)
        assert torch.equal(found, want)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    args = arguments(19, 6, 48, 64, 1)
    r = args["routing"]
    for tile in (MMA, WGMMA):
        with use_tile("run_experts_packed", tile):
            together = K.run_experts_packed.triton(**args)
            ids = r.ids[18:]
            order = ids.flatten().sort(stable=True)
            offsets = torch.searchsorted(order.values, torch.arange(7, dtype=torch.int32)).int()
            alone = Routing(ids, r.weights[18:], order.indices.int(), offsets)
            one = K.run_experts_packed.triton(**(args | {"x": args["x"][18:], "routing": alone}))
        assert torch.equal(one[0], together[18])


@pytest.mark.parametrize("form", ["pairs", "runs", "mma split, 64 rows", "wgmma"])
def test_rows_that_are_added_as_they_come(form: str, poison: Poison) -> None:
    """Within the same bounds; widths that end inside a tile, and no tokens at all."""
    for T in (0, 5):
        with combining("atomic"):
            check(arguments(T, 3, 336, 80, 2), FORMS[form])


def test_who_adds_atomically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for it, but never the invariant mode."""
    assert not adds_atomically()
    monkeypatch.setenv("NEMOTRITON_COMBINE", "atomic")
    assert adds_atomically()
    with fixed_order(DECODE):
        assert not adds_atomically()
    with combining("ordered"):
        assert not adds_atomically()
    monkeypatch.setenv("NEMOTRITON_COMBINE", "atomics")
    with pytest.raises(UnsupportedError, match="'atomics'; use atomic"):
        adds_atomically()
