"""State update and prefill in the formats with scales or noise: what is stored depends on nothing
but the sequence, its seed and its positions."""

from dataclasses import dataclass

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.ssd import chunk_table
from nemotriton.kernels.ssd_fused import ssd_prefill
from nemotriton.kernels.ssm_state import STATE_AXES, StateNoise, restore_state_ref, round_state_ref
from nemotriton.kernels.ssm_update import ssm_update, unowned_state
from tests.conftest import Poison
from tests.interpreter.test_ssd import as_model
from tests.test_ssd import Inputs, Sizes, inputs, state_of
from tests.test_ssm_update import TREE

SIZES = Sizes(H=1, P=6, N=12, G=1)
CPU = torch.device("cpu")
FORMATS = ["fp16-sr", "int16", "int8"]
SEEDS = [7, -(2**50) - 3, 2**61 + 5]


@dataclass
class Pool:
    """Stored states [cells, H, P, N] of a format with all that belongs to them."""

    axis: str
    state: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def of(
        cls, axis: str, shape: tuple[int, ...], owned: list[int], sizes: Sizes = SIZES
    ) -> "Pool":
        fmt = STATE_AXES[axis]
        pool = cls(axis, *unowned_state((*shape, sizes.H, sizes.P, sizes.N), fmt.dtype, CPU))
        for cell in owned:
            kept, scales = round_state_ref(state_of(1, sizes, seed=cell)[0].float(), fmt.dtype)
            pool.state[cell] = kept
            if pool.scales is not None:
                pool.scales[cell] = scales
        return pool

    def copy(self) -> "Pool":
        scales = None if self.scales is None else self.scales.clone()
        return Pool(self.axis, self.state.clone(), scales)

    def at(self, *index: int) -> torch.Tensor:
        return restore_state_ref(
            self.state[index], None if self.scales is None else self.scales[index]
        )


def update(
    a: Inputs,
    pool: Pool,
    lengths: list[int],
    slots: list[int],
    ends: list[int],
    seeds: list[int],
    lanes: Pool | None = None,
    **options: object,
) -> torch.Tensor:
    """ends: the sequences' lengths after the call."""
    noise = None
    if STATE_AXES[pool.axis].stochastic:
        noise = StateNoise(torch.tensor(seeds), torch.tensor(ends, dtype=torch.int32), layer=3)
    if lanes is not None:
        options |= {"lanes": lanes.state, "lane_scales": lanes.scales}
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    index = torch.tensor(slots, dtype=torch.int32)
    where = (pool.state, cu, index, max(lengths))
    return ssm_update.triton(*a.all(), *where, scales=pool.scales, noise=noise, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", FORMATS)
def test_several_tokens_are_as_many_calls(axis: str, poison: Poison) -> None:
    """Bit for bit, whatever else is in the call: the noise is of the position, not of the launch.
    A second verification of the same positions, after a rollback, leaves the same lanes."""
    lengths, slots = [3, 0, 2], [2, 0, 1]
    a = as_model(inputs(5, SIZES), torch.bfloat16)
    once = Pool.of(axis, (4,), [2, 0, 1])
    steps, kept = once.copy(), once.copy()
    lanes, again = (Pool.of(axis, (4, 3), []) for _ in range(2))
    ends = [20, 9, 31]
    y = update(a, once, lengths, slots, ends, SEEDS, lanes)
    for _ in range(2):
        z = update(a, kept, lengths, slots, ends, SEEDS, again, update_state=False)
        assert torch.equal(y, z)
        for slot, length in zip(slots, lengths):
            for t in range(length):
                assert torch.equal(lanes.at(slot, t), again.at(slot, t))
    for t in range(3):
        on = [s for s in range(3) if t < lengths[s]]
        rows = [sum(lengths[:s]) + t for s in on]
        part = Inputs(*(v[rows] if v.shape[:1] == (5,) else v for v in a.all()))
        where = ([slots[s] for s in on], [ends[s] - lengths[s] + t + 1 for s in on])
        out = update(part, steps, [1] * len(on), *where, [SEEDS[s] for s in on])
        assert torch.equal(out, y[rows])
        for s in on:
            assert torch.equal(lanes.at(slots[s], t), steps.at(slots[s]))
    for slot in slots:
        assert torch.equal(once.at(slot), steps.at(slot))
    if STATE_AXES[axis].stochastic:
        other = kept.copy()
        update(a, other, lengths, slots, ends, [8, 9, 10])
        assert not torch.equal(other.at(2), once.at(2))


@pytest.mark.parametrize("axis", FORMATS)
def test_a_branch_has_the_bits_of_the_chain_of_its_path(axis: str, poison: Poison) -> None:
    a = as_model(inputs(8, SIZES), torch.bfloat16)
    pool, lanes = Pool.of(axis, (2,), [1]), Pool.of(axis, (2, 8), [])
    before = pool.copy()
    options = {"update_state": False, "parents": torch.tensor(TREE, dtype=torch.int32)}
    y = update(a, pool, [8], [1], [40], SEEDS[:1], lanes, **options)
    for t in range(8):
        path, p = [], t
        while p >= 0:
            path, p = [p, *path], TREE[p]
        rows = Inputs(*(v[path] if v.shape[:1] == (8,) else v for v in a.all()))
        chain = before.copy()
        want = update(rows, chain, [len(path)], [1], [32 + len(path)], SEEDS[:1])
        assert torch.equal(y[t], want[-1])
        assert torch.equal(lanes.at(1, t), chain.at(1))
    assert torch.equal(pool.at(1), before.at(1))


def test_what_does_not_fit_is_refused() -> None:
    a, pool = as_model(inputs(1, SIZES), torch.bfloat16), Pool.of("int8", (2,), [0, 1])
    with pytest.raises(UnsupportedError, match=r"torch.int8 needs fp32 scales \(2, 1, 6\)"):
        update(a, Pool("int8", pool.state, None), [1], [0], [1], [0])
    with pytest.raises(UnsupportedError, match="bfloat16 has no scales"):
        update(a, Pool("bf16", pool.state.bfloat16(), pool.scales), [1], [0], [1], [0])
    with pytest.raises(UnsupportedError, match="stochastic rounding is for fp16"):
        update(a, Pool("fp16-sr", pool.state.bfloat16(), None), [1], [0], [1], [0])
    with pytest.raises(UnsupportedError, match=r"seeds must be torch.int64 \[1\]"):
        update(a, Pool("fp16-sr", pool.state.half(), None), [1], [0], [1], [0, 1])
    lanes = Pool("int8", pool.state[:, None], None)
    with pytest.raises(UnsupportedError, match=r"need lane_scales \(2, 1, 1, 6\)"):
        update(a, pool, [1], [0], [1], [0], lanes, update_state=False)


@pytest.mark.parametrize("axis", [*FORMATS, "bf16"])
def test_prefill_stores_final_states_in_every_format(axis: str, poison: Poison) -> None:
    """A fresh piece, one that continues, and a pad; then the pieces end at other positions."""
    sizes = Sizes(H=2, P=5, N=12, G=1)
    a, pool = as_model(inputs(9, sizes), torch.float32), Pool.of(axis, (3,), [1], sizes)
    lengths, slots = [4, 3, 2], torch.tensor([2, 1, -1], dtype=torch.int32)
    cu = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
    table = torch.tensor(chunk_table(lengths, 3), dtype=torch.int32)
    where = (cu, slots, torch.tensor([True, False, False]), table, 3)
    twin, other = pool.copy(), pool.copy()
    for run, to, ends in (
        (ssd_prefill.triton, pool, [4, 30, 2]),
        (ssd_prefill.ref, twin, [4, 30, 2]),
        (ssd_prefill.triton, other, [5, 31, 2]),
    ):
        noise = None
        if STATE_AXES[axis].stochastic:
            noise = StateNoise(torch.tensor(SEEDS), torch.tensor(ends, dtype=torch.int32), 1)
        y = run(*a.all(), to.state, *where, scales=to.scales, noise=noise)  # type: ignore[operator]
        assert not y[7:].any()
    for slot in (1, 2):
        got, want = pool.at(slot), twin.at(slot)
        assert bool(got.isfinite().all())
        # equal but for sums that fell on two sides of a tie
        assert ((got - want).abs() > 1e-5 * want.abs().amax()).double().mean() < 0.05
        assert torch.allclose(got, want, rtol=0.01, atol=0.02)
        assert torch.equal(got, other.at(slot)) != STATE_AXES[axis].stochastic
