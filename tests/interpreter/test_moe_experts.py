"""Both forms of the expert kernels, on counts, widths and routings that the grid does not have."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.kernels.moe_experts import RUN_EXPERTS, run_experts
from nemotriton.kernels.moe_route import Routing, route_experts_ref
from nemotriton.kernels.op import Args, Tile, use_tile
from tests.conftest import Poison

PAIR = Tile(BLOCK_M=1, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=1)
BLOCKS = Tile(BLOCK_M=16, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3)
TILES = pytest.mark.parametrize("tile", [PAIR, BLOCKS], ids=["pair", "blocks"])


def arguments(
    T: int, E: int, F: int, L: int, routing: Routing, dtype: torch.dtype = torch.float32
) -> Args:
    rng = torch.Generator().manual_seed(T + E + F)
    up = torch.randn(E, F, L, generator=rng) / L**0.5
    down = torch.randn(E, L, F, generator=rng) / F**0.5
    x = torch.randn(T, L, generator=rng)
    return {"x": x.to(dtype), "up": up.to(dtype), "down": down.to(dtype), "routing": routing}


def check(args: Args, tile: Tile) -> torch.Tensor:
    """The output, once it is as near to float64 as the twin."""
    with use_tile("run_experts", tile):
        out = parity.run(RUN_EXPERTS, args)
    twin = parity.run(RUN_EXPERTS, args, ref=True)
    verdict = parity.compare(RUN_EXPERTS, out, twin, parity.oracle(RUN_EXPERTS, args))
    assert verdict.ok, verdict.detail
    return out["out0"]


def random_routing(T: int, E: int, K: int, groups: int = 1, top: int = 1) -> Routing:
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(T * E))
    return route_experts_ref(logits, None, K, groups, top, True, 2.5)


@TILES
@pytest.mark.parametrize(
    "E,K,groups,top",
    [(5, 1, 1, 1), (29, 22, 1, 1), (96, 6, 1, 1), (128, 6, 8, 3), (160, 6, 1, 1), (512, 22, 1, 1)],
)
def test_expert_counts(E: int, K: int, groups: int, top: int, tile: Tile, poison: Poison) -> None:
    check(arguments(2, E, 12, 20, random_routing(2, E, K, groups, top)), tile)


@TILES
@pytest.mark.parametrize("F,L", [(1856, 24), (336, 80), (24, 928), (672, 8), (17, 131)])
def test_widths_that_no_tile_divides(F: int, L: int, tile: Tile, poison: Poison) -> None:
    check(arguments(2, 3, F, L, random_routing(2, 3, 1), torch.bfloat16), tile)


@TILES
@pytest.mark.parametrize("T", [0, 1, 33])
def test_all_tokens_to_one_expert(T: int, tile: Tile, poison: Poison) -> None:
    """Two blocks and a bit of one expert, and nothing of its neighbours."""
    logits = torch.zeros(T, 7)
    logits[:, 4] = 9
    args = arguments(T, 7, 24, 16, route_experts_ref(logits, None, 1))
    args["up"][[0, 1, 2, 3, 5, 6]] = float("nan")
    args["down"][[0, 1, 2, 3, 5, 6]] = float("nan")
    assert check(args, tile).isfinite().all()


@TILES
def test_scale_is_applied_once(tile: Tile) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    outs = []
    for scale in (1.0, 4.0):
        r = route_experts_ref(logits, None, 2, 1, 1, True, scale)
        outs.append(check(arguments(3, 8, 16, 16, r), tile))
    assert torch.equal(outs[0] * 4, outs[1])


@TILES
def test_a_token_has_the_same_bits_in_any_company(tile: Tile) -> None:
    """Neighbours decide which block a token falls in, never its value."""
    r = random_routing(19, 6, 2)
    args = arguments(19, 6, 40, 24, r, torch.bfloat16)
    with use_tile("run_experts", tile):
        together = run_experts.triton(**args)
        for t in (0, 7, 18):
            ids = r.ids[t : t + 1]
            order = ids.flatten().sort(stable=True)
            offsets = torch.searchsorted(order.values, torch.arange(7, dtype=torch.int32)).int()
            alone = Routing(ids, r.weights[t : t + 1], order.indices.int(), offsets)
            one = run_experts.triton(args["x"][t : t + 1], args["up"], args["down"], alone)
            assert torch.equal(one[0], together[t])
