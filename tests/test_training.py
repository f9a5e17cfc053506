"""The training forms of the mixers against the twins, and the trainer of the embedded model."""

from dataclasses import replace

import pytest
import torch

from nemotriton.kernels.conv1d import conv_ref
from nemotriton.kernels.moe_route import route_experts_ref
from nemotriton.kernels.ssd import ssd_scan_ref
from nemotriton.model.config import ModelConfig
from nemotriton.model.mixers import MoeMixer
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.synth import fill
from nemotriton.model.training import balance, chosen_experts, parallel_conv, parallel_scan

TINY = ModelConfig.preset("tiny")


@pytest.mark.parametrize("T", [1, 15, 16, 17, 75])
def test_all_chunks_at_once_are_the_scan(T: int) -> None:
    g = torch.Generator().manual_seed(T)
    b, H, P, G, N = 2, 6, 4, 2, 8
    parts = [torch.randn(b, T, *shape, generator=g) for shape in ((H, P), (G, N), (G, N))]
    x, B, C = (t.double().requires_grad_(True) for t in parts)
    steps = torch.rand(b, T, H, generator=g).double().requires_grad_(True)
    A = -torch.rand(H, generator=g).double() * 3
    D = torch.randn(H, generator=g).double()
    inputs = (x, steps, B, C)
    got = parallel_scan(x, steps, A, B, C, D, chunk=16)
    want, _ = ssd_scan_ref(x, steps, A, B, C, D, chunk_size=8)
    assert float((got - want).detach().abs().max()) <= 1e-12
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in (got, want)]
    for ours, theirs in zip(*grads, strict=True):
        assert bool(ours.isfinite().all())
        assert float((ours - theirs).abs().max()) <= 1e-11


def test_decays_that_underflow_have_finite_gradients() -> None:
    x, B, C = torch.ones(1, 40, 2, 4), torch.ones(1, 40, 1, 8), torch.ones(1, 40, 1, 8)
    steps = torch.full((1, 40, 2), 50.0, requires_grad=True)
    y = parallel_scan(x, steps, torch.tensor([-16.0, -1e-3]), B, C, torch.ones(2), chunk=16)
    y.sum().backward()
    assert steps.grad is not None
    assert bool(y.isfinite().all())
    assert bool(steps.grad.isfinite().all())


def test_shifted_products_are_the_convolution() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 9, 5, generator=g).double()
    weight, bias = torch.randn(5, 4, generator=g).double(), torch.randn(5, generator=g).double()
    cu = torch.arange(0, 28, 9)
    for b in (bias, None):
        want, _ = conv_ref(x.flatten(0, 1), weight, b, x.new_zeros(3, 3, 5), cu)
        assert float((parallel_conv(x, weight, b) - want.view(x.shape)).abs().max()) <= 1e-14


@pytest.mark.parametrize("groups, best", [(1, 1), (4, 2)])
def test_the_same_experts_are_chosen(groups: int, best: int) -> None:
    """Also where scores tie, which quarters of small numbers often do."""
    assert TINY.moe is not None
    moe = replace(TINY.moe, router_groups=groups, top_groups=best)
    g = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (200, moe.experts), generator=g) / 4
    bias = torch.randint(0, 3, (moe.experts,), generator=g) / 8
    chosen = chosen_experts(logits.sigmoid() + bias, moe)
    routing = route_experts_ref(logits, bias, moe.top_k, groups, best)
    want = torch.zeros_like(chosen).scatter(1, routing.ids.long(), True)
    assert torch.equal(chosen, want)


def test_biases_move_towards_an_even_load() -> None:
    model = NemotronH(TINY, torch.float32, torch.device("cpu"))
    fill(TINY, model.named_tensors(), 3, skew=1.0)
    ids = torch.randint(0, TINY.vocab, (1, 64), generator=torch.Generator().manual_seed(0))
    worst = []
    for _ in range(16):
        with torch.no_grad():
            model.train_forward(ids)
        routers = [m for m in model.modules() if isinstance(m, MoeMixer)]
        worst.append(max(float(m.load.max() / m.load.mean()) for m in routers))
        balance(model, 0.05)
    assert worst[-1] < 0.6 * worst[0], worst
    assert all(abs(float(m.gate.e_score_correction_bias.mean())) < 1e-6 for m in routers)
    assert len(routers) == TINY.pattern.count("E")
