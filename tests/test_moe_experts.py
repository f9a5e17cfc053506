"""The experts' twin against a dense float64 loop over every expert."""

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.moe_experts import experts_ref, most_blocks, run_experts_ref
from nemotriton.kernels.moe_route import Routing, route_experts_ref


def dense(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, r: Routing) -> torch.Tensor:
    """Every expert on every token, in float64, weighted by a dense [T, E] matrix."""
    E = up.shape[0]
    gate = torch.zeros(x.shape[0], E, dtype=torch.float64)
    gate.scatter_(1, r.ids.long(), r.weights.double())
    y = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for e in range(E):
        h = (x.double() @ up[e].double().T).relu() ** 2
        y += gate[:, e : e + 1] * (h @ down[e].double().T)
    return y


def weights(E: int, F: int, L: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    up, down = torch.randn(E, F, L, generator=rng), torch.randn(E, L, F, generator=rng)
    return up / L**0.5, down / F**0.5


@pytest.mark.parametrize(
    "E,K,groups,top",
    [(5, 1, 1, 1), (29, 6, 1, 1), (96, 6, 1, 1), (128, 6, 8, 3), (160, 22, 1, 1), (512, 22, 1, 1)],
)
@pytest.mark.parametrize("T", [0, 1, 9])
def test_equals_a_dense_loop(E: int, K: int, groups: int, top: int, T: int) -> None:
    up, down = weights(E, 20, 12)
    rng = torch.Generator().manual_seed(T)
    x, logits = torch.randn(T, 12, generator=rng), torch.randn(T, E, generator=rng)
    for normalize, scale in ((True, 2.5), (False, 5.0)):
        r = route_experts_ref(logits, None, K, groups, top, normalize, scale)
        got = run_experts_ref(x, up, down, r)
        assert (got.shape, got.dtype) == ((T, 12), torch.float32)
        torch.testing.assert_close(got.double(), dense(x, up, down, r), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tokens_to_one_expert(dtype: torch.dtype) -> None:
    up, down = (w.to(dtype) for w in weights(7, 16, 8))
    x = torch.randn(33, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = torch.zeros(33, 7)
    logits[:, 4] = 9
    r = route_experts_ref(logits, None, 1)
    assert r.offsets.tolist() == [0, 0, 0, 0, 0, 33, 33, 33]
    want = dense(x, up, down, r)
    error = (run_experts_ref(x, up, down, r).double() - want).abs().max()
    assert error <= 2 * torch.finfo(dtype).eps * want.abs().max()


def test_h_is_rounded_to_the_model_dtype_once() -> None:
    """The rounding point the docstring states, and no other."""
    up, down = (w.bfloat16() for w in weights(3, 16, 8))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    r = route_experts_ref(torch.randn(5, 3, generator=torch.Generator().manual_seed(3)), None, 2)
    want = torch.zeros(5, 8)
    for t in range(5):
        for j in range(2):
            e = int(r.ids[t, j])
            h = (up[e].float() @ x[t].float()).relu().square().bfloat16().float()
            want[t] += (down[e].float() @ h) * r.weights[t, j]
    torch.testing.assert_close(
        run_experts_ref(x, up, down, r), want.bfloat16(), rtol=8e-3, atol=1e-3
    )


def test_gradients_reach_inputs_experts_and_router() -> None:
    up, down = (w.double().requires_grad_() for w in weights(4, 6, 5))
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 2], [2, 1], [1, 0]])
    w = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *a: experts_ref(a[0], a[1], a[2], ids, a[3]), (x, up, down, w))


def test_mismatched_shapes_are_named() -> None:
    up, down = weights(4, 6, 5)
    r = route_experts_ref(torch.zeros(2, 4), None, 1)
    with pytest.raises(UnsupportedError, match="width 3"):
        run_experts_ref(torch.zeros(2, 3), up, down, r)
    with pytest.raises(UnsupportedError, match="3 tokens"):
        run_experts_ref(torch.zeros(3, 5), up, down, r)
    with pytest.raises(UnsupportedError, match="over 4 experts"):
        run_experts_ref(torch.zeros(2, 5), up[:3], down[:3], r)


@pytest.mark.parametrize("block", [2, 3, 16])
def test_most_blocks_is_the_exact_bound(block: int) -> None:
    """Over every way of dealing `pairs` to three experts."""
    for pairs in range(20):
        deals = [(a, b, pairs - a - b) for a in range(pairs + 1) for b in range(pairs + 1 - a)]
        worst = max(sum(-(-c // block) for c in deal) for deal in deals)
        assert most_blocks(pairs, 3, block) == worst
