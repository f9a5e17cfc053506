"""The router's form for many tokens: the same ids, weights and order as the twin's, to the bit."""

import pytest
import torch

from nemotriton.kernels.moe_route import route_experts, route_experts_ref
from nemotriton.kernels.moe_route_rows import row_tile
from nemotriton.kernels.op import use_tile
from tests.conftest import Poison

NAN, INF = float("nan"), float("inf")


def assert_routing(logits: torch.Tensor, bias: torch.Tensor | None, K: int, blocks: int) -> None:
    with use_tile("route_experts", row_tile(blocks)):
        got = route_experts.triton(logits, bias, K, scale=2.5)
    want = route_experts_ref(logits, bias, K, scale=2.5)
    for name in ("ids", "order", "offsets"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.allclose(got.weights, want.weights, rtol=3e-7, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("E,K,biased", [(128, 22, True), (70, 6, False), (33, 5, True)])
def test_rows_of_every_kind(E: int, K: int, biased: bool, poison: Poison) -> None:
    """Plain rows; ties that fill more than the window, of all and of half; NaN among and instead of
    the chosen; scores of zero; infinite logits."""
    rng = torch.Generator().manual_seed(E)
    logits = (torch.randn(8, E, generator=rng) * 1.5).bfloat16().float()
    logits[1] = 0.5
    logits[2, ::2] = 3.0
    logits[3] = NAN
    logits[4, : E - K + 2] = NAN
    logits[5] = -1e4
    logits[6, [1, 7]] = torch.tensor([INF, -INF])
    bias = 57 + torch.randn(E, generator=rng) * 0.05 if biased else None
    assert_routing(logits, bias, K, 3)


def test_infinite_biases(poison: Poison) -> None:
    rng = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(2, 80, generator=rng), torch.zeros(80)
    bias[3], bias[5:9] = INF, -INF
    assert_routing(logits, bias, 4, 1)
