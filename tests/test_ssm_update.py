"""The twin of the state update: lanes, draft trees, pads, gates and limits."""

import pytest
import torch

from nemotriton.kernels.ssd import recurrence_ref
from nemotriton.kernels.ssm_update import ssm_update_ref, time_step_ref
from tests.test_ssd import Inputs, Sizes, close, inputs, state_of

SIZES = Sizes(H=4, P=3, N=5, G=2)
TREE = [-1, 0, 0, 1, 2, 2, -1, 6]  # parents of eight draft tokens: two roots, three branches


def update(
    a: Inputs, state: torch.Tensor, lengths: list[int], slots: list[int], **options: object
) -> torch.Tensor:
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    index = torch.tensor(slots, dtype=torch.int32)
    return ssm_update_ref(*a.all(), state, cu, index, max(lengths), **options)  # type: ignore[arg-type]


def pool(slots: int, owned: list[int]) -> torch.Tensor:
    """A state pool that is NaN wherever no sequence lives."""
    state = torch.full((slots, SIZES.H, SIZES.P, SIZES.N), torch.nan, dtype=torch.float64)
    for slot in owned:
        state[slot] = state_of(1, SIZES, seed=slot)[0]
    return state


@pytest.mark.parametrize("extreme", [False, True])
def test_ragged_steps_are_the_recurrence(extreme: bool) -> None:
    lengths, slots = [1, 3, 0, 2, 4], [5, 0, 3, -1, 2]
    a = inputs(sum(lengths), SIZES, extreme=extreme)
    state = pool(7, [5, 0, 3, 2])
    before = state.clone()
    lanes = torch.full((7, 4, *state.shape[1:]), torch.nan, dtype=torch.float64)
    y = update(a, state, lengths, slots, lanes=lanes)
    start = 0
    for length, slot in zip(lengths, slots):
        rows = a.rows(slice(start, start + length))
        out, start = y[start : start + length], start + length
        if slot < 0:
            assert not out.any()
            continue
        want, final = recurrence_ref(*rows.steps(), before[slot])
        close(out, want, 1e-13)
        close(state[slot], final, 1e-13)
        for t in range(length):
            upto = rows.rows(slice(0, t + 1)).steps()
            close(lanes[slot, t], recurrence_ref(*upto, before[slot])[1], 1e-13)
        assert bool(lanes[slot, length:].isnan().all())
    for slot in (1, 4, 6):
        assert bool(state[slot].isnan().all())
        assert bool(lanes[slot].isnan().all())


def test_without_update_the_stored_state_stays() -> None:
    a, state = inputs(3, SIZES), pool(2, [1])
    before = state.clone()
    lanes = torch.full((2, 5, *state.shape[1:]), torch.nan, dtype=torch.float64)
    y = update(a, state, [3], [1], lanes=lanes, update_state=False)
    assert torch.equal(state[1], before[1])
    again = before.clone()
    assert torch.equal(update(a, again, [3], [1]), y)
    assert torch.equal(again[1], lanes[1, 2])  # promoting the last lane is the update


def test_a_branch_of_a_tree_is_the_chain_of_its_path() -> None:
    a = inputs(len(TREE), SIZES)
    state = pool(2, [1])
    lanes = torch.full((2, 8, *state.shape[1:]), torch.nan, dtype=torch.float64)
    parents = torch.tensor(TREE, dtype=torch.int32)
    y = update(a, state, [8], [1], lanes=lanes, update_state=False, parents=parents)
    for t in range(len(TREE)):
        path, p = [], t
        while p >= 0:
            path, p = [p, *path], TREE[p]
        rows = Inputs(*(v[path] if v.shape[:1] == (8,) else v for v in a.all()))
        want, final = recurrence_ref(*rows.steps(), state[1])
        close(y[t], want[-1], 1e-13)
        close(lanes[1, t], final, 1e-13)


def test_a_chain_by_parents_is_the_chain() -> None:
    a, lengths = inputs(7, SIZES), [4, 3]
    parents = torch.tensor([-1, 0, 1, 2, -1, 0, 1], dtype=torch.int32)
    state = pool(2, [0, 1])
    one, two = (torch.full((2, 4, *state.shape[1:]), torch.nan).double() for _ in range(2))
    chain = update(a, state, lengths, [1, 0], lanes=one, update_state=False)
    tree = update(a, state, lengths, [1, 0], lanes=two, update_state=False, parents=parents)
    assert torch.equal(tree, chain)
    assert torch.equal(one.nan_to_num(9.0), two.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_four_tokens_at_once_are_four_calls(dtype: torch.dtype) -> None:
    """Also in a narrow state: it is rounded after every token, as storing it would."""
    a = inputs(4, SIZES).to(torch.float32)
    once, steps = pool(1, [0]).to(dtype), pool(1, [0]).to(dtype)
    y = update(a, once, [4], [0])
    for t in range(4):
        assert torch.equal(update(a.rows(slice(t, t + 1)), steps, [1], [0])[0], y[t])
        assert torch.equal(steps, once) == (t == 3)


def test_the_gate_and_the_limits_of_dt() -> None:
    a, state = inputs(2, SIZES), pool(1, [0])
    z = torch.randn(2, SIZES.H, SIZES.P, dtype=torch.float64)
    plain = update(a, state.clone(), [2], [0])
    gated = update(a, state.clone(), [2], [0], z=z)
    close(gated, plain * z * z.sigmoid(), 1e-14)
    limited = state.clone()
    got = update(a, limited, [2], [0], dt_limit=(0.02, 0.05))
    dt = time_step_ref(a.dt, a.dt_bias).clamp(0.02, 0.05)
    assert float(dt.max()) == 0.05
    want, final = recurrence_ref(a.x, dt, a.A, a.B, a.C, a.D, state[0])
    assert torch.equal(got, want)
    assert torch.equal(limited[0], final)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_state_and_output_keep_their_own_dtypes(dtype: torch.dtype) -> None:
    a = inputs(1, SIZES).to(torch.float32)
    state = pool(1, [0]).to(dtype)
    before = state.float().clone()
    y = update(a, state, [1], [0])
    want, final = recurrence_ref(*a.steps(), before[0])
    assert y.dtype == torch.float32
    assert torch.equal(y, want)
    assert torch.equal(state[0], final.to(dtype))
