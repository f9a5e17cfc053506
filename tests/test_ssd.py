"""The chunked scan against the token-by-token recurrence in float64, however the work is cut."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.ssd import (
    chunk_table,
    recurrence_ref,
    ssd_prefill_ref,
    ssd_scan_ref,
)
from nemotriton.kernels.ssm_update import ssm_update_ref, time_step_ref


@dataclass
class Sizes:
    H: int = 4
    P: int = 8
    N: int = 16
    G: int = 2


@dataclass
class Inputs:
    """Rows of packed tokens and the per-head parameters."""

    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    dt_bias: torch.Tensor

    def rows(self, part: slice) -> "Inputs":
        changed = {k: getattr(self, k)[part] for k in ("x", "dt", "B", "C")}
        return replace(self, **changed)

    def to(self, dtype: torch.dtype) -> "Inputs":
        return Inputs(*(v.to(dtype) for v in self.all()))

    def all(self) -> list[torch.Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def steps(self) -> list[torch.Tensor]:
        """The arguments of the pure cores, dt as step sizes."""
        dt = time_step_ref(self.dt, self.dt_bias)
        return [self.x, dt, self.A, self.B, self.C, self.D]


def inputs(T: int, sizes: Sizes, seed: int = 0, extreme: bool = False) -> Inputs:
    """Float64. `extreme`: heads whose steps are ~0, 25, and mixed, with A from 1e-4 to 1e3."""
    g = torch.Generator().manual_seed(seed)
    H, P, N, G = sizes.H, sizes.P, sizes.N, sizes.G

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    A = -1 - 15 * torch.rand(H, generator=g, dtype=torch.float64)
    bias = torch.empty(H, dtype=torch.float64).uniform_(1e-3, 0.1, generator=g).expm1().log()
    if extreme:
        A = -torch.tensor([1e-4, 1e3, 1.0, 16.0], dtype=torch.float64).repeat(H)[:H]
        bias = torch.tensor([-30.0, 25.0, 0.0, -8.0], dtype=torch.float64).repeat(H)[:H]
    dt = normal(T, H) * (8 if extreme else 1)
    return Inputs(normal(T, H, P), dt, A, normal(T, G, N), normal(T, G, N), normal(H), bias)


def close(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """Largest error at most `limit` of the largest value."""
    assert got.shape == want.shape
    assert bool(got.isfinite().all())
    if want.numel():
        error = float((got.double() - want.double()).abs().max())
        scale = float(want.abs().max())
        assert error <= limit * max(scale, 1e-300), f"{error:.2e} of {scale:.2e}"


def state_of(S: int, sizes: Sizes, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(S, sizes.H, sizes.P, sizes.N, generator=g, dtype=torch.float64)


# --------------------------------------------------------------------------------- the pure scan
@pytest.mark.parametrize("chunk", [8, 96, 128])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_scan_is_the_recurrence(chunks: int, off: int, chunk: int) -> None:
    """Four ordinary heads and four whose steps and decays are extreme."""
    sizes, T = Sizes(H=8, P=4, N=8), chunks * chunk + off
    a, b = inputs(T, sizes, seed=chunks), inputs(T, sizes, extreme=True)
    for mine, extreme in ((a.A, b.A), (a.dt, b.dt), (a.dt_bias, b.dt_bias)):
        mine[..., 4:] = extreme[..., 4:]
    h = state_of(1, sizes)[0]
    want, want_final = recurrence_ref(*a.steps(), h)
    y, final = ssd_scan_ref(*a.steps(), h, chunk)
    y32, final32 = ssd_scan_ref(*a.to(torch.float32).steps(), h.float(), chunk)
    assert y32.dtype == final32.dtype == torch.float32
    close(y, want, 1e-11)
    close(final, want_final, 1e-11)
    log_decay = (a.steps()[1] * a.A).abs()
    for n in range(sizes.H):
        # decays are differences of running sums: what an ulp of the largest sum does to them
        largest = max(float(part.sum()) for part in log_decay[:, n].split(chunk))
        limit = torch.finfo(torch.float32).eps * (8 + largest)
        close(y32[:, n], want[:, n], limit)
        close(final32[n], want_final[n], limit)


def test_scan_takes_batches_and_no_initial_state() -> None:
    sizes, T = Sizes(), 21
    one, two = (inputs(T, sizes, seed=s).steps() for s in (3, 4))
    both = [torch.stack(p) if p[0].shape[:1] == (T,) else p[0] for p in zip(one, two)]
    y, final = ssd_scan_ref(*both, chunk_size=8)
    for i, alone in enumerate((one, two)):
        alone[2], alone[5] = one[2], one[5]  # A and D are shared by the batch
        want, want_final = recurrence_ref(*alone, torch.zeros(sizes.H, sizes.P, sizes.N))
        close(y[i], want, 1e-12)
        close(final[i], want_final, 1e-12)


@pytest.mark.parametrize("T", [0, 1, 8, 20])
def test_scan_has_right_and_finite_gradients(T: int) -> None:
    sizes = Sizes(H=2, P=2, N=3, G=1)
    a, h = inputs(T, sizes, seed=5).steps(), state_of(1, sizes)[0]
    leaves = [v.clone().requires_grad_() for v in (*a, h)]
    if T == 8:
        assert torch.autograd.gradcheck(
            lambda *v: ssd_scan_ref(*v, chunk_size=3), leaves, fast_mode=True
        )
    steep = [v.clone().requires_grad_() for v in (*inputs(T, sizes, extreme=True).steps(), h)]
    for values in (leaves, steep):
        y, final = ssd_scan_ref(*values, chunk_size=8)
        (y.sum() + final.sum()).backward()
        assert all(v.grad is None or bool(v.grad.isfinite().all()) for v in values)


def test_recurrence_of_packed_sequences_is_that_of_each_alone() -> None:
    sizes, lengths = Sizes(), [3, 0, 1, 5]
    a, h = inputs(sum(lengths), sizes), state_of(len(lengths), sizes)
    cu = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    y, final = recurrence_ref(*a.steps(), h, cu)
    for s in range(len(lengths)):
        part = slice(int(cu[s]), int(cu[s + 1]))
        want, want_final = recurrence_ref(*a.rows(part).steps(), h[s])
        assert torch.equal(y[part], want)
        assert torch.equal(final[s], want_final)


# ------------------------------------------------------------------------------ packed prefill
def prefill(
    a: Inputs,
    state: torch.Tensor,
    lengths: list[int],
    slots: list[int],
    fresh: list[bool],
    chunk: int,
    done: list[int] | None = None,
) -> torch.Tensor:
    """The op's twin; `state` is updated in place."""
    table = torch.tensor(chunk_table(lengths, chunk, done), dtype=torch.int32).reshape(-1, 3)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    index = torch.tensor(slots, dtype=torch.int32)
    return ssd_prefill_ref(*a.all(), state, cu, index, torch.tensor(fresh), table, chunk)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("chunk", [8, 96])
def test_packed_sequences_against_the_recurrence(chunk: int, extreme: bool) -> None:
    """Ragged, empty and one-token sequences, fresh and continued, one pad; slots permuted."""
    sizes = Sizes()
    lengths = [chunk + 3, 0, 1, 2 * chunk - 1, 0, 5, chunk]
    slots, fresh = [6, 2, 0, 7, 4, -1, 3], [False, False, True, False, True, False, True]
    a = inputs(sum(lengths), sizes, seed=chunk, extreme=extreme)
    state = torch.full((9, sizes.H, sizes.P, sizes.N), torch.nan, dtype=torch.float64)
    for s in range(len(lengths)):
        if slots[s] >= 0 and not fresh[s]:  # a fresh sequence's slot stays full of NaN
            state[slots[s]] = state_of(1, sizes, seed=s)[0]
    before = state.clone()
    y = prefill(a, state, lengths, slots, fresh, chunk)
    start, touched = 0, set()
    for s, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        if slots[s] < 0:
            assert not y[part].any()
            continue
        touched.add(slots[s])
        h = before[slots[s]] if not fresh[s] else torch.zeros_like(before[0])
        want, want_final = recurrence_ref(*a.rows(part).steps(), h)
        close(y[part], want, 1e-11)
        close(state[slots[s]], want_final, 1e-11)
        if not length:
            assert torch.equal(state[slots[s]], h)
    for slot in set(range(9)) - touched:
        assert bool(state[slot].isnan().all())


@pytest.mark.parametrize("own_grid", [False, True])
@pytest.mark.parametrize("piece", [1, 3, 16, 127, 128, 129])
def test_pieces_give_what_the_whole_gives(piece: int, own_grid: bool) -> None:
    sizes, T, chunk = Sizes(H=2, P=4, N=8, G=1), 300, 128
    a = inputs(T, sizes).to(torch.float32)
    whole, cut = (torch.full((2, 2, 4, 8), torch.nan) for _ in range(2))
    want = prefill(a, whole, [T], [1], [True], chunk)
    got = []
    for first in range(0, T, piece):
        n = min(piece, T - first)
        done = [first] if own_grid else None
        rows = a.rows(slice(first, first + n))
        got.append(prefill(rows, cut, [n], [1], [first == 0], chunk, done))
    close(torch.cat(got), want, 1e-5)
    close(cut[1], whole[1], 1e-5)
    if piece == 128:  # the same chunks: the same bits
        assert torch.equal(torch.cat(got), want)
        assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_is_stored_in_the_dtype_of_the_cache(dtype: torch.dtype) -> None:
    sizes = Sizes()
    a = inputs(20, sizes).to(torch.float32)
    full = torch.zeros(1, sizes.H, sizes.P, sizes.N)
    low = full.to(dtype)
    prefill(a, full, [20], [0], [True], 8)
    prefill(a, low, [20], [0], [True], 8)
    assert torch.equal(low, full.to(dtype))  # rounded once, at the end


def test_prefill_then_updates_continue_one_sequence() -> None:
    sizes, T, cut = Sizes(), 30, 23
    a = inputs(T, sizes)
    state = torch.full((1, sizes.H, sizes.P, sizes.N), torch.nan, dtype=torch.float64)
    y = [prefill(a.rows(slice(0, cut)), state, [cut], [0], [True], 8)]
    zero = torch.zeros(1, dtype=torch.int32)
    for t in range(cut, T):
        rows = a.rows(slice(t, t + 1)).all()
        y.append(ssm_update_ref(*rows, state, torch.tensor([0, 1]), zero, 1))
    want, final = recurrence_ref(*a.steps(), torch.zeros(sizes.H, sizes.P, sizes.N))
    close(torch.cat(y), want, 1e-12)
    close(state[0], final, 1e-12)


def test_step_sizes_are_softplus_and_clamped() -> None:
    dt, bias = torch.tensor([[-60.0, -3.0, 0.0, 30.0]]).double(), torch.zeros(4).double()
    want = torch.log1p(dt.exp())
    want[0, 3] = 30.0
    torch.testing.assert_close(time_step_ref(dt, bias), want, rtol=1e-9, atol=0)
    low, high = 0.001, 10.0
    clamped = time_step_ref(dt, bias, (low, high))
    assert clamped[0, 0] == low
    assert clamped[0, 3] == high
    assert time_step_ref(dt.bfloat16(), bias.float()).dtype == torch.float32


# ---------------------------------------------------------------------------------- chunk table
def test_chunk_table_covers_every_token_once_and_straddles_nothing() -> None:
    assert chunk_table([5, 0, 3], 4) == [(0, 0, 4), (0, 4, 1), (2, 5, 3)]
    assert chunk_table([], 4) == []
    lengths, done = [9, 0, 1, 20, 4], [3, 7, 0, 8, 5]
    rows = chunk_table(lengths, 4, done)
    tokens = [t for _, first, n in rows for t in range(first, first + n)]
    assert tokens == list(range(sum(lengths)))
    starts = [sum(lengths[:s]) for s in range(len(lengths))]
    for s, first, n in rows:
        assert 0 < n <= 4
        assert starts[s] <= first
        assert first + n <= starts[s] + lengths[s]
        position = done[s] + first - starts[s]  # every border is on the sequence's own grid
        assert position % 4 == 0 or first == starts[s]


def test_chunk_table_refuses_empty_chunks() -> None:
    with pytest.raises(UnsupportedError, match="not 0"):
        chunk_table([3], 0)
