"""The router's twin against a plain Python rule, and what it promises about ties and precision."""

import math
from fractions import Fraction

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.moe_route import Routing, route_experts_ref
from nemotriton.kernels.order import order_keys, top_indices


def by_hand(
    logits: list[float], bias: list[float] | None, K: int, groups: int, top: int
) -> list[int]:
    """The ids of one token, from sorted() on float32 values."""
    score = torch.sigmoid(torch.tensor(logits, dtype=torch.float64)).float()
    choice = score if bias is None else score + torch.tensor(bias)
    c, size = choice.tolist(), len(logits) // groups
    worth = []
    for g in range(groups):
        two = sorted(choice[g * size : (g + 1) * size].tolist(), reverse=True)[:2]
        worth.append(torch.tensor(two).sum().item())
    kept = sorted(range(groups), key=lambda g: (-worth[g], g))[:top]
    pool = [e for e in range(len(c)) if e // size in kept]
    return sorted(sorted(pool, key=lambda e: (-c[e], e))[:K])


def check_sorted(r: Routing, E: int) -> None:
    """`order` and `offsets` are the stable sort of the pairs by expert."""
    flat = r.ids.flatten().tolist()
    assert r.order.tolist() == sorted(range(len(flat)), key=lambda p: (flat[p], p))
    assert r.offsets.tolist() == [sum(e < x for e in flat) for x in range(E + 1)]


GEOMETRIES = [
    (5, 1, 1, 1), (29, 6, 1, 1), (96, 6, 1, 1), (128, 6, 1, 1), (160, 6, 1, 1), (512, 22, 1, 1),
    (128, 6, 8, 3), (160, 6, 8, 4), (8, 3, 8, 5), (512, 22, 4, 2), (30, 22, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("E,K,groups,top", GEOMETRIES)
@pytest.mark.parametrize("kind", ["plain", "bias", "coarse"])
def test_ids_are_the_rule_by_hand(E: int, K: int, groups: int, top: int, kind: str) -> None:
    rng = torch.Generator().manual_seed(E * K + groups)
    logits = torch.randn(7, E, generator=rng) * 2
    if kind == "coarse":  # many exact ties
        logits = logits.round()
    bias = torch.randn(E, generator=rng) if kind == "bias" else None
    r = route_experts_ref(logits, bias, K, groups, top, True, 2.5)
    plain_bias = None if bias is None else bias.tolist()
    for t in range(7):
        assert r.ids[t].tolist() == by_hand(logits[t].tolist(), plain_bias, K, groups, top)
    check_sorted(r, E)
    assert (r.ids.dtype, r.weights.dtype) == (torch.int32, torch.float32)
    assert (r.order.dtype, r.offsets.dtype) == (torch.int32, torch.int32)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5, 5.0])
def test_weights_are_unbiased_then_normalised_then_scaled(normalize: bool, scale: float) -> None:
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 128, generator=rng)
    bias = torch.randn(128, generator=rng) * 10
    r = route_experts_ref(logits, bias, 6, 1, 1, normalize, scale)
    for t in range(9):
        s = [1 / (1 + math.exp(-logits[t, e].item())) for e in r.ids[t].tolist()]
        want = [x / (sum(s) + 1e-20 if normalize else 1) * scale for x in s]
        torch.testing.assert_close(r.weights[t], torch.tensor(want), rtol=1e-6, atol=0)


def test_biases_closer_than_a_bf16_step_still_choose() -> None:
    """Biases near 57 and far less than a bf16 step apart: rounding would reorder the experts."""
    E = 128
    bias = 57 + torch.arange(E, dtype=torch.float32).flip(0) * 2.0**-17
    assert len(bias.bfloat16().unique()) < E
    r = route_experts_ref(torch.zeros(3, E), bias, 6)
    assert r.ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    swapped = bias.clone()
    swapped[:2] = bias[:2].flip(0)
    assert route_experts_ref(torch.zeros(1, E), swapped, 6).ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert route_experts_ref(torch.zeros(1, E), swapped, 1).ids.tolist() == [[1]]


def test_scores_an_ulp_apart_are_told_apart() -> None:
    """Scores are the float32 nearest to the true sigmoid, whatever the host's exp does."""
    one = torch.tensor(0.3)
    near = torch.stack([torch.nextafter(one, torch.tensor(-1.0)), one, one])
    exact = [Fraction(1) / (1 + Fraction(math.exp(-x))) for x in near.tolist()]
    ids = route_experts_ref(near[None], None, 2).ids[0].tolist()
    rounded = torch.tensor([float(v) for v in exact], dtype=torch.float64).float()
    assert ids == sorted(sorted(range(3), key=lambda e: (-rounded[e].item(), e))[:2])


def test_all_equal_takes_the_lowest_ids_and_groups() -> None:
    assert route_experts_ref(torch.zeros(2, 512), None, 22).ids[1].tolist() == list(range(22))
    assert route_experts_ref(torch.zeros(1, 32), None, 6, 8, 3).ids.tolist() == [[*range(6)]]


def test_a_group_is_worth_its_two_best() -> None:
    """One excellent expert does not beat a group of two good ones."""
    logits = torch.tensor([[9.0, -9.0, 1.0, 1.0]])
    assert route_experts_ref(logits, None, 1, 2, 1).ids.tolist() == [[2]]


def test_no_tokens_and_no_bias() -> None:
    r = route_experts_ref(torch.empty(0, 5), None, 2)
    assert [tuple(x.shape) for x in r[:4]] == [(0, 2), (0, 2), (0,), (6,)]
    assert r.offsets.tolist() == [0] * 6


def test_nan_and_infinite_logits_give_valid_ids() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 6, [nan, inf, nan, -inf, 0.0, nan]])
    for groups, top in ((1, 1), (3, 2)):
        r = route_experts_ref(logits, torch.zeros(6), 4, groups, top)
        assert all(len(set(row)) == 4 and max(row) < 6 for row in r.ids.tolist())
        assert r.weights[0].isnan().all()
        check_sorted(r, 6)
    assert route_experts_ref(logits, None, 4).ids.tolist() == [[0, 1, 2, 3], [0, 1, 3, 4]]


def test_the_oracle_chooses_as_the_twin() -> None:
    logits = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    bias = torch.linspace(-1, 1, 512)
    a = route_experts_ref(logits, bias, 22)
    b = route_experts_ref(logits.double(), bias.double(), 22)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.order, b.order)
    assert b.weights.dtype == torch.float64


def test_weights_are_differentiable() -> None:
    logits = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: route_experts_ref(x, None, 3, scale=2.5).weights, logits)


def test_impossible_routers_are_named() -> None:
    for args, word in [((6, 4, 1), "4 equal groups"), ((6, 1, 1), "hold 5"), ((2, 5, 1), "hold 1")]:
        with pytest.raises(UnsupportedError, match=word):
            route_experts_ref(torch.zeros(1, 5), None, *args)
    with pytest.raises(UnsupportedError, match="bias"):
        route_experts_ref(torch.zeros(1, 5), torch.zeros(4), 2)


def test_order_keys_are_a_total_order() -> None:
    values = [float("-inf"), -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0, float("inf")]
    keys = order_keys(torch.tensor(values)).tolist()
    assert sorted(keys) == [keys[i] for i in (0, 1, 2, 4, 3, 5, 7, 6, 8)]  # the lowest index wins
    assert order_keys(torch.tensor([float("nan"), float("-inf")])).argsort().tolist() == [0, 1]
    assert top_indices(torch.tensor([1.0, 3.0, 3.0]), 2).tolist() == [1, 2]
