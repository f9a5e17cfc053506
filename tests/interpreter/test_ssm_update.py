"""The kernels of the state update: lanes, draft trees, pads, gates, limits, refusals."""

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.op import Tile, use_tile
from nemotriton.kernels.ssm_update import ssm_update
from tests.conftest import Poison
from tests.interpreter.test_ssd import as_model, within_twice
from tests.test_ssd import Inputs, Sizes, inputs, state_of
from tests.test_ssm_update import TREE

SIZES = Sizes(H=1, P=6, N=12, G=1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def update(
    a: Inputs, state: torch.Tensor, lengths: list[int], slots: list[int], **options: object
) -> torch.Tensor:
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    index = torch.tensor(slots, dtype=torch.int32)
    run = ssm_update.ref if options.pop("ref", False) else ssm_update.triton
    return run(*a.all(), state, cu, index, max(lengths), **options)  # type: ignore[arg-type]


def pool(slots: int, owned: list[int], dtype: torch.dtype, sizes: Sizes = SIZES) -> torch.Tensor:
    state = torch.full((slots, sizes.H, sizes.P, sizes.N), torch.nan)
    for slot in owned:
        state[slot] = state_of(1, sizes, seed=slot)[0].float()
    return state.to(dtype)


def lanes_of(state: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.full_like(state[:, None], torch.nan).repeat(1, steps, 1, 1, 1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tokens_are_as_many_calls(dtype: torch.dtype, poison: Poison) -> None:
    """Bit for bit, in every dtype of the state: drafts on or off changes nothing."""
    lengths, slots = [3, 1, 0, 4, 2], [2, 4, 0, 5, -1]
    a = as_model(inputs(10, SIZES), torch.bfloat16)
    once = pool(6, [2, 4, 0, 5], dtype)
    steps, kept = once.clone(), once.clone()
    lanes, others = lanes_of(once, 5), lanes_of(once, 5)
    y = update(a, once, lengths, slots, lanes=lanes)
    z = update(a, kept, lengths, slots, lanes=others, update_state=False)
    assert torch.equal(y, z)
    assert same(lanes, others)
    assert same(kept, steps)  # not moved
    for t in range(4):
        rows = [sum(lengths[:s]) + t for s in range(5) if t < lengths[s]]
        live = [slots[s] for s in range(5) if t < lengths[s]]
        part = Inputs(*(v[rows] if v.shape[:1] == (10,) else v for v in a.all()))
        assert torch.equal(update(part, steps, [1] * len(rows), live), y[rows])
        for s in live:
            if s >= 0:
                assert torch.equal(lanes[s, t], steps[s])
    assert same(steps, once)
    assert not y[8:].any()  # the pad
    for s, slot in enumerate(slots[:4]):
        assert bool(lanes[slot, lengths[s] :].isnan().all())
    assert bool(lanes[[1, 3]].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_branch_has_the_bits_of_the_chain_of_its_path(dtype: torch.dtype, poison: Poison) -> None:
    """Two sequences with different trees, and a pad between them."""
    trees = [TREE, [-1, -1, 1], [-1, 0, 1, 1]]
    lengths, slots = [len(t) for t in trees], [3, -1, 1]
    a = as_model(inputs(sum(lengths), SIZES), torch.bfloat16)
    state = pool(4, [3, 1], dtype)
    before, lanes = state.clone(), lanes_of(state, 8)
    parents = torch.tensor([p for tree in trees for p in tree], dtype=torch.int32)
    options = {"lanes": lanes, "update_state": False, "parents": parents}
    y = update(a, state, lengths, slots, **options)
    assert same(state, before)
    start = 0
    for tree, slot in zip(trees, slots):
        for t in range(len(tree) if slot >= 0 else 0):
            path, p = [], t
            while p >= 0:
                path, p = [start + p, *path], tree[p]
            rows = Inputs(*(v[path] if v.shape[:1] == y.shape[:1] else v for v in a.all()))
            chain = before[slot : slot + 1].clone()
            want = update(rows, chain, [len(path)], [0])
            assert torch.equal(y[start + t], want[-1])
            assert torch.equal(lanes[slot, t], chain[0])
        start += len(tree)
    assert not y[8:11].any()
    assert bool(lanes[[0, 2]].isnan().all())
    plain = update(a, state, lengths, slots, update_state=False, parents=parents)
    assert torch.equal(plain, y)  # lanes are an output only


@pytest.mark.parametrize("ref", [False, True], ids=["kernel", "twin"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_lanes_may_lie_over_the_state_they_start_from(
    tree: bool, ref: bool, poison: Poison
) -> None:
    """The stored state of slot s is one of its own lanes; so a commit need not copy anything."""
    lengths, slots, cursors = [3, 1, 2, 4], [2, 0, -1, 1], [1, 3, 0, 0]
    a = as_model(inputs(10, SIZES), torch.bfloat16)
    parents = [-1, 0, 0, -1, -1, 0, -1, 0, 1, 1] if tree else None
    options = {"update_state": False, "ref": ref} | (
        {"parents": torch.tensor(parents, dtype=torch.int32)} if parents else {}
    )
    state = pool(3, [0, 1, 2], torch.bfloat16)
    apart = lanes_of(state, 4)
    want = update(a, state, lengths, slots, lanes=apart, **options)
    whole = lanes_of(state, 4)
    for slot, cursor in zip(slots, cursors):
        if slot >= 0:
            whole[slot, cursor] = state[slot]
    cells = [4 * slot + cursor if slot >= 0 else -1 for slot, cursor in zip(slots, cursors)]
    homes = torch.tensor(slots, dtype=torch.int32)
    flat = whole.flatten(0, 1)
    y = update(a, flat, lengths, cells, lanes=whole, lane_slots=homes, **options)
    assert torch.equal(y, want)
    for slot, length in zip(slots, lengths):
        if slot >= 0:
            assert torch.equal(whole[slot, :length], apart[slot, :length])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [3, 0, 2]])
def test_gate_limits_and_extreme_steps(lengths: list[int], poison: Poison) -> None:
    sizes = Sizes(H=4, P=5, N=20, G=2)
    T = sum(lengths)
    a = as_model(inputs(T, sizes, extreme=True), torch.bfloat16)
    z = torch.randn(T, 4, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    for options in ({}, {"z": z}, {"dt_limit": (0.001, 0.1)}, {"z": z, "dt_limit": (0.0, 2.0)}):
        state = pool(3, [0, 1, 2], torch.float32, sizes)
        twin_state, exact_state = state.clone(), state.double()
        y = update(a, state, lengths, [2, 0, 1], **options)
        twin = update(a, twin_state, lengths, [2, 0, 1], ref=True, **options)
        exact = {k: v.double() if k == "z" else v for k, v in options.items()}
        want = update(a.to(torch.float64), exact_state, lengths, [2, 0, 1], ref=True, **exact)
        within_twice(y, twin, want, torch.bfloat16)
        within_twice(state, twin_state, exact_state, torch.float32)


@pytest.mark.parametrize("lengths", [[3, 1], [1, 1]], ids=["tokens", "one"])
@pytest.mark.parametrize("rows,each", [(1, 1), (2, 1), (16, 1), (1, 2), (2, 4), (4, 2)])
def test_the_tile_changes_no_bit(rows: int, each: int, lengths: list[int], poison: Poison) -> None:
    """The last of several blocks of rows may be behind the head's last row."""
    a = as_model(inputs(sum(lengths), SIZES), torch.bfloat16)
    want, state = pool(2, [0, 1], torch.float32), pool(2, [0, 1], torch.float32)
    y = update(a, want, lengths, [1, 0])
    tile = Tile(BLOCK_P=rows, BLOCK_N=16, EACH=each, num_warps=1, num_stages=1)
    with use_tile("ssm_update", tile):
        assert torch.equal(update(a, state, lengths, [1, 0]), y)
    assert torch.equal(state, want)


def test_a_graph_of_pads_alone_writes_zeros(poison: Poison) -> None:
    a = as_model(inputs(3, SIZES), torch.bfloat16)
    for v in (a.x, a.dt, a.B, a.C):
        v.fill_(torch.nan)
    state = pool(1, [], torch.float32)
    assert not update(a, state, [1, 1, 1], [-1, -1, -1]).any()
    assert not update(a, state, [2, 1], [-1, -1]).any()
    assert bool(state.isnan().all())


def test_refuses_what_it_cannot_do() -> None:
    sizes = Sizes(H=2, P=6, N=12, G=1)
    a, state = as_model(inputs(2, sizes), torch.bfloat16), pool(1, [0], torch.float32, sizes)
    wide = a.B.repeat(1, 3, 1)
    parents = torch.tensor([-1, 0], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="update_state=False"):
        update(a, state, [2], [0], parents=parents)
    with pytest.raises(UnsupportedError, match="at least 2"):
        update(a, state, [2], [0], lanes=lanes_of(state, 1))
    with pytest.raises(UnsupportedError, match="bfloat16"):
        update(a, state, [2], [0], lanes=lanes_of(state, 2).bfloat16())
    with pytest.raises(UnsupportedError, match=r"\[slots, 2, 6, 12\]"):
        update(a, state[..., :4], [2], [0])
    with pytest.raises(UnsupportedError, match="x must be"):
        update(Inputs(**{**a.__dict__, "x": a.x.mT.contiguous().mT}), state, [2], [0])
    with pytest.raises(UnsupportedError, match="cannot share 3 groups"):
        update(Inputs(**{**a.__dict__, "B": wide, "C": wide}), state, [2], [0])
