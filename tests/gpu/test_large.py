"""Addresses beyond 2^31 elements, and more than 65,535 of whatever has no bound.

Inputs are slices of rows as wide as Super's in-projection (18,560), long enough that the last rows
start beyond element 2^31. The far rows must have the bits they have when run alone.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from nemotriton.kernels import (
    attend_decode,
    causal_conv1d,
    gated_rms_norm,
    matmul,
    rms_norm,
    route_experts,
    run_experts,
    ssd_prefill,
    ssm_update,
    write_kv,
)
from nemotriton.kernels.ssd import chunk_table

pytestmark = pytest.mark.alone
ROW = 18_560
EDGE = 2**31 // ROW  # 115,704: the first row that crosses
H, P, G, N = 128, 64, 8, 128
INNER, CONV = H * P, H * P + 2 * G * N


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def wide(cuda: torch.device) -> torch.Tensor:
    """[EDGE + 300, ROW] bf16, 4.3 GB; seeded in slabs, since randn itself has limits."""
    x = torch.empty(EDGE + 300, ROW, dtype=torch.bfloat16, device=cuda)
    for part in x.split(8192):
        part.normal_()
    return x


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_norms(wide: torch.Tensor) -> None:
    x, z = wide[:, INNER:][:, :INNER], wide[:, :INNER]
    w = torch.rand(INNER, device=wide.device, dtype=torch.bfloat16)
    for tail in (1, 300):
        far = slice(wide.shape[0] - tail, None)
        near = x[far].clone(), z[far].clone()
        assert torch.equal(
            gated_rms_norm(x, z, w, groups=G)[far], gated_rms_norm(*near, w, groups=G)
        )
    assert torch.equal(rms_norm(x, w)[-300:], rms_norm(x[-300:].clone(), w))


def test_conv1d(wide: torch.Tensor) -> None:
    device, T = wide.device, wide.shape[0]
    x = wide[:, INNER : INNER + CONV]
    w = torch.randn(CONV, 4, device=device, dtype=torch.bfloat16)
    b = torch.randn(CONV, device=device, dtype=torch.bfloat16)
    state = torch.zeros(2, 3, CONV, device=device, dtype=torch.bfloat16)
    fresh = torch.tensor([True], device=device)
    y = causal_conv1d(x, w, b, state, ints([0, T], device), ints([1], device), fresh, T)
    assert torch.equal(state[1], x[-3:])
    tail = x[-203:].clone()
    alone = torch.zeros_like(state)
    short = causal_conv1d(tail, w, b, alone, ints([0, 203], device), ints([0], device), fresh, 203)
    assert torch.equal(y[-200:], short[-200:])


def test_ssd_prefill(wide: torch.Tensor) -> None:
    """A short sequence behind a long one has the bits it has alone."""
    device, T = wide.device, wide.shape[0]
    xs = wide[:, INNER : 2 * INNER].unflatten(-1, (H, P))
    Bs = wide[:, 2 * INNER : 2 * INNER + G * N].unflatten(-1, (G, N))
    Cs = wide[:, 2 * INNER + G * N : 2 * INNER + 2 * G * N].unflatten(-1, (G, N))
    dt = wide[:, -H:]
    A = -torch.rand(H, device=device) - 0.1
    D, bias = torch.rand(H, device=device), torch.rand(H, device=device) - 4
    state = torch.full((2, H, P, N), float("nan"), device=device)
    fresh = torch.tensor([True, True], device=device)
    rest = 290
    chunks = torch.tensor(chunk_table([T - rest, rest], 128), dtype=torch.int32, device=device)
    cu, slots = ints([0, T - rest, T], device), ints([0, 1], device)
    y = ssd_prefill(xs, dt, A, Bs, Cs, D, bias, state, cu, slots, fresh, chunks, 128)
    lone = torch.full((1, H, P, N), float("nan"), device=device)
    few = torch.tensor(chunk_table([rest], 128), dtype=torch.int32, device=device)
    tail = [t[-rest:].clone() for t in (xs, dt, Bs, Cs)]
    want = ssd_prefill(
        tail[0], tail[1], A, tail[2], tail[3], D, bias, lone,
        ints([0, rest], device), ints([0], device), fresh[:1], few, 128,
    )  # fmt: skip
    assert torch.equal(y[-rest:], want)
    assert torch.equal(state[1], lone[0])


@pytest.mark.parametrize("slot", [2047, 2048, 2049])
def test_state_pool(slot: int, cuda: torch.device) -> None:
    """Slots on both sides of element 2^31 of the pool."""
    pool = torch.empty(2050, H, P, N, device=cuda)
    for part in pool.split(64):
        part.normal_()
    before = pool[slot].clone()
    x = torch.randn(1, H, P, device=cuda, dtype=torch.bfloat16)
    dt = torch.randn(1, H, device=cuda, dtype=torch.bfloat16)
    B, C = (torch.randn(1, G, N, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    A, D, bias = (
        -torch.rand(H, device=cuda),
        torch.rand(H, device=cuda),
        torch.zeros(H, device=cuda),
    )
    cu = ints([0, 1], cuda)
    y = ssm_update(x, dt, A, B, C, D, bias, pool, cu, ints([slot], cuda), 1)
    small = before[None].clone()
    want = ssm_update(x, dt, A, B, C, D, bias, small, cu, ints([0], cuda), 1)
    assert torch.equal(y, want)
    assert torch.equal(pool[slot], small[0])


def test_pages(cuda: torch.device) -> None:
    pages, page, kv, d = 131_080, 64, 2, 128
    k = torch.zeros(pages, page, kv, d, dtype=torch.bfloat16, device=cuda)
    v = torch.zeros_like(k)
    new = torch.randn(3, kv, d, device=cuda, dtype=torch.bfloat16)
    last = pages - 1
    rows = torch.tensor([last * page, last * page + 1, -1], device=cuda)
    write_kv(new, new + 1, k, v, rows)
    assert torch.equal(k[last, :2], new[:2])
    assert torch.equal(v[last, :2], (new + 1)[:2])
    q = torch.randn(1, 32, d, device=cuda, dtype=torch.bfloat16)
    where = (ints([0, 1], cuda), ints([2], cuda), 1, 2, d**-0.5)
    far = attend_decode(q, k, v, ints([last] + [-1] * 15, cuda)[None], *where)
    near = attend_decode(
        q, k[last:].clone(), v[last:].clone(), ints([0] + [-1] * 15, cuda)[None], *where
    )
    assert torch.equal(far, near)


@pytest.mark.parametrize("tokens", [36_000, 37_000])
def test_experts_on_both_sides_of_the_edge(tokens: int, cuda: torch.device) -> None:
    """22 x 2,688 x 36,315 is 2^31: the hidden rows of a long prefill."""
    E, K, F, L = 32, 22, 2688, 128
    up = torch.randn(E, F, L, device=cuda, dtype=torch.bfloat16) * 0.1
    down = torch.randn(E, L, F, device=cuda, dtype=torch.bfloat16) * 0.1
    x = torch.randn(tokens, L, device=cuda, dtype=torch.bfloat16)
    logits = torch.randn(tokens, E, device=cuda)
    routing = route_experts(logits, None, K, 1, 1, True, 5.0)
    y = run_experts(x, up, down, routing)
    few = 64
    want = run_experts(
        x[-few:].clone(), up, down, route_experts(logits[-few:].clone(), None, K, 1, 1, True, 5.0)
    )
    error = (y[-few:].float() - want.float()).norm() / want.float().norm()
    assert float(error) < 4e-3  # other tiles: another order of the same sums, rounded to bf16


def test_expert_weights_beyond_the_edge(cuda: torch.device) -> None:
    E, F, L = 512, 4128, 1024  # 2.16e9 weights a matrix
    up = torch.empty(E, F, L, device=cuda, dtype=torch.bfloat16)
    down = torch.empty(E, L, F, device=cuda, dtype=torch.bfloat16)
    for w in (up, down):
        for part in w.split(16):
            part.normal_(std=0.03)
    x = torch.randn(4, L, device=cuda, dtype=torch.bfloat16)
    logits = torch.full((4, E), -5.0, device=cuda)
    logits[:, -2:] = 5.0
    y = run_experts(x, up, down, route_experts(logits, None, 2, 1, 1, True, 1.0))
    few = route_experts(logits[:, -2:].clone(), None, 2, 1, 1, True, 1.0)
    assert torch.equal(y, run_experts(x, up[-2:].clone(), down[-2:].clone(), few))


def test_more_rows_than_a_secondary_grid_axis_holds(cuda: torch.device) -> None:
    for rows in (65_535, 65_536, 70_001):
        x = torch.randn(rows, 64, device=cuda, dtype=torch.bfloat16)
        w = torch.randn(32, 64, device=cuda, dtype=torch.bfloat16)
        g = torch.ones(64, device=cuda, dtype=torch.bfloat16)
        assert torch.equal(rms_norm(x, g)[-9:], rms_norm(x[-9:].clone(), g))
        want = (x[-9:].float() @ w.float().T).bfloat16()
        torch.testing.assert_close(matmul(x, w)[-9:], want, rtol=1e-2, atol=1e-2)
        routing = route_experts(torch.randn(rows, 8, device=cuda), None, 2, 1, 1, True, 1.0)
        assert int(routing.offsets[-1]) == rows * 2
        assert torch.equal(routing.order.sort().values, torch.arange(rows * 2, device=cuda).int())


def test_more_sequences_than_a_secondary_grid_axis_holds(cuda: torch.device) -> None:
    S, h, p, n = 70_001, 2, 8, 16
    x = torch.randn(S, h, p, device=cuda, dtype=torch.bfloat16)
    dt = torch.randn(S, h, device=cuda, dtype=torch.bfloat16)
    B, C = (torch.randn(S, 1, n, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    A, D, bias = (
        -torch.rand(h, device=cuda),
        torch.rand(h, device=cuda),
        torch.zeros(h, device=cuda),
    )
    state = torch.randn(S, h, p, n, device=cuda)
    last = state[-5:].clone()
    cu, slots = (torch.arange(k, device=cuda, dtype=torch.int32) for k in (S + 1, S))
    y = ssm_update(x, dt, A, B, C, D, bias, state, cu, slots, 1)
    want = ssm_update(
        x[-5:].clone(), dt[-5:].clone(), A, B[-5:].clone(), C[-5:].clone(), D, bias, last,
        cu[:6], slots[:5], 1,
    )  # fmt: skip
    assert torch.equal(y[-5:], want)
    assert torch.equal(state[-5:], last)
