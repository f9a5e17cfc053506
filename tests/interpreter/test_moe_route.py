"""The router kernels on what the generic grid does not reach: every geometry, ties, sick rows."""

import pytest
import torch

from nemotriton.kernels.moe_route import Routing, route_experts
from nemotriton.kernels.op import Tile, use_tile
from tests.conftest import Poison


def assert_same(a: Routing, b: Routing) -> None:
    for name in ("ids", "order", "offsets"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    torch.testing.assert_close(a.weights, b.weights, rtol=3e-7, atol=0, equal_nan=True)


def both(*args: object, block: int | None = None) -> Routing:
    """The kernels' routing, held against the twin's; in three launches if a `block` is given."""
    if block is None:
        got = route_experts.triton(*args)  # type: ignore[arg-type]
    else:
        with use_tile("route_experts", Tile(BLOCK_T=block, BLOCKS=3, num_warps=1, num_stages=1)):
            got = route_experts.triton(*args)  # type: ignore[arg-type]
    assert_same(got, route_experts.ref(*args))  # type: ignore[arg-type]
    return got


@pytest.mark.parametrize("E", [5, 29, 96, 128, 160, 512])
@pytest.mark.parametrize("K", [1, 6, 22])
def test_expert_counts(E: int, K: int, poison: Poison) -> None:
    rng = torch.Generator().manual_seed(E + K)
    logits = (torch.randn(7, E, generator=rng) * 2).bfloat16().float()  # with exact ties
    bias = torch.randn(E, generator=rng)
    K = min(K, E)
    both(logits, bias, K, 1, 1, True, 2.5)
    both(logits, None, K, 1, 1, False, 5.0, block=4)


@pytest.mark.parametrize(
    "E,K,groups,top", [(128, 6, 8, 3), (160, 6, 8, 4), (8, 3, 8, 5), (512, 22, 4, 2), (12, 2, 3, 1)]
)
def test_router_groups(E: int, K: int, groups: int, top: int, poison: Poison) -> None:
    rng = torch.Generator().manual_seed(E)
    logits = torch.randn(9, E, generator=rng).mul(4).round().div(4)  # ties of experts and groups
    for block in (None, 4):
        both(logits, torch.randn(E, generator=rng), K, groups, top, True, 2.5, block=block)
        both(torch.zeros(3, E), None, K, groups, top, True, 1.0, block=block)


@pytest.mark.parametrize("T", [0, 1, 3, 4, 5, 150])
def test_blocks_of_tokens_equal_one_program(T: int, poison: Poison) -> None:
    """More blocks than one step of the scan holds, and fewer tokens than a block."""
    logits = torch.randn(T, 40, generator=torch.Generator().manual_seed(T))
    blocks = both(logits, None, 3, 1, 1, True, 1.0, block=2)
    with use_tile("route_experts", Tile(BLOCK_T=256, BLOCKS=1, num_warps=4, num_stages=1)):
        one = route_experts.triton(logits, None, 3, 1, 1, True, 1.0)
    for a, b in zip(blocks[:4], one[:4], strict=True):
        assert torch.equal(a, b)


def test_biases_below_a_bf16_step_choose() -> None:
    bias = 57 + torch.arange(128, dtype=torch.float32).flip(0) * 2.0**-17
    for block in (None, 2):
        r = both(torch.zeros(5, 128), bias, 6, 1, 1, True, 2.5, block=block)
        assert r.ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 5


def test_logits_an_ulp_apart_choose_as_the_twin() -> None:
    """Neighbouring floats, whose sigmoids a float32 exp would not order."""
    base = torch.linspace(-12, 12, 64)
    logits = torch.stack([base, torch.nextafter(base, torch.tensor(99.0))], -1).flatten(1)
    both(torch.cat([logits.T, logits.T.flip(1)]).contiguous(), None, 20, 1, 1, True, 1.0)


@pytest.mark.parametrize("block", [None, 2])
def test_all_tokens_to_one_expert(block: int | None) -> None:
    logits = torch.full((37, 16), -3.0)
    logits[:, 11] = 4.0
    r = both(logits, None, 1, 1, 1, True, 2.5, block=block)
    assert r.order.tolist() == list(range(37))
    assert r.offsets.tolist() == [0] * 12 + [37] * 5


@pytest.mark.parametrize("groups,top", [(1, 1), (4, 2)])
def test_sick_rows_have_valid_ids_and_nan_weights(groups: int, top: int) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    logits[0] = nan
    logits[1, ::2] = nan
    logits[2, 3], logits[2, 5] = inf, -inf
    logits[3] = -inf
    for bias in (None, torch.randn(8)):
        r = both(logits, bias, 4, groups, top, True, 2.5)
        assert r.weights[0].isnan().all()
        assert r.weights[[2, 4, 5]].isfinite().all()
        assert all(len(set(row)) == 4 for row in r.ids.tolist())


def test_more_experts_than_ten_bits_count() -> None:
    logits = torch.randn(2, 1100, generator=torch.Generator().manual_seed(3))
    logits[1, 5:1095] = 0.25  # more than 1,023 keys at one bar
    both(logits, None, 1030, 1, 1, True, 1.0)
