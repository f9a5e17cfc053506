"""The form for Hopper: its first kernel in the interpreter, its second by emulation."""

from typing import Any

import pytest
import torch

from nemotriton.kernels import ssd_fused, ssd_hopper, ssd_loads, ssd_roles
from nemotriton.kernels.op import Case, launch, use_tile
from nemotriton.kernels.ssd import chunk_table
from nemotriton.kernels.ssd_fused import SSD_PREFILL, has_roles, ssd_prefill
from nemotriton.kernels.ssd_hopper import _scan_roles
from tests.conftest import Poison
from tests.interpreter.gluon_emulation import emulate
from tests.interpreter.test_ssd import Ragged, as_model, prefill
from tests.test_ssd import Inputs, Sizes, inputs, state_of

SIZES = Sizes(H=2, P=64, N=128, G=1)
BF16 = torch.bfloat16
SMS = 3  # fewer than items, so that a program goes from one to the next


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on Hopper: the op takes this form, and its second kernel is emulated."""
    seeds = iter(range(100))

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        if kernel is not _scan_roles:
            launch(kernel, grid, *args, **meta)
            return
        options = {k: v for k, v in meta.items() if k not in ("num_warps", "maxnreg", "launch_pdl")}
        programs = min(SMS, args[14] if grid[0] > 0 else 0)
        modules = (ssd_loads, ssd_hopper)
        emulate(modules, "_scan_roles", programs, list(args), options, next(seeds))

    monkeypatch.setattr(ssd_roles, "launch", run)
    monkeypatch.setattr(ssd_fused, "target", lambda where: 90)


def rows(lengths: list[int], extreme: bool = False) -> Inputs:
    return as_model(inputs(sum(lengths), SIZES, len(lengths), extreme), BF16)


@pytest.mark.parametrize("extreme", [False, True])
def test_ragged_pieces_against_the_recurrence(extreme: bool, poison: Poison) -> None:
    """Whole chunks and short ones, an empty piece, one token, a pad; fresh and continued."""
    lengths = [129, 0, 1, 256, 70, 3]
    case = Ragged(SIZES, 128, lengths, [4, 2, 0, 6, 5, -1], [False, True, True, False, True, False])
    case.check(ssd_prefill, rows(lengths, extreme), BF16, roundings=4)


def test_a_table_on_the_sequence_s_own_grid(poison: Poison) -> None:
    lengths = [200, 130]
    table = [*chunk_table(lengths, 128, [100, 60]), (-1, 0, 0)]
    case = Ragged(SIZES, 128, lengths, [1, 0], [False, True], table)
    case.check(ssd_prefill, rows(lengths), BF16, roundings=4)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_states_of_other_formats(dtype: torch.dtype, poison: Poison) -> None:
    """Read as they are stored, and rounded once at the end."""
    lengths = [130, 4]
    a, state = rows(lengths), state_of(3, SIZES).to(dtype)
    full = state.float()
    where = (lengths, [2, 0], [False, False], 128)
    y = prefill(a, state, *where, op=ssd_prefill)
    assert torch.equal(y, prefill(a, full, *where, op=ssd_prefill))
    assert torch.equal(state, full.to(dtype))


def test_a_piece_has_the_bits_it_has_alone() -> None:
    """NaN behind the short end of one and before the other change nothing."""
    lengths = [131, 5, 128]
    a, start = rows(lengths), state_of(3, SIZES).float()
    packed = start.clone()
    for sick in (a.x, a.dt, a.B, a.C):
        sick[131:136] = torch.nan
    y = prefill(a, packed, lengths, [2, 0, 1], [False] * 3, 128, op=ssd_prefill)
    for s, slot in ((0, 2), (2, 1)):
        part = slice(sum(lengths[:s]), sum(lengths[: s + 1]))
        alone = start[slot : slot + 1].clone()
        got = prefill(a.rows(part), alone, [lengths[s]], [0], [False], 128, op=ssd_prefill)
        assert torch.equal(got, y[part])
        assert torch.equal(alone[0], packed[slot])


@pytest.mark.parametrize("roles", [True, False])
def test_the_order_of_heads_moves_no_bit(roles: bool) -> None:
    sizes, found = Sizes(H=4, P=64, N=128, G=2), []
    a = as_model(inputs(140, sizes, 1), BF16)
    for grouped in (False, True):
        tile = SSD_PREFILL.default(Case(H=4, P=64, N=128, G=2, Q=128), 140)
        state = state_of(1, sizes).float()
        with use_tile("ssd_prefill", tile.but(ROLES=roles, GROUPED=grouped)):
            y = prefill(a, state, [140], [0], [False], 128, op=ssd_prefill)
        found.append((y, state))
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


def test_the_plain_form_agrees() -> None:
    lengths = [140]
    a, found = rows(lengths), []
    for shape in (ssd_fused.SHAPE, None):
        state = state_of(1, SIZES).float()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ssd_fused, "SHAPE", shape)
            found.append((prefill(a, state, lengths, [0], [False], 128, op=ssd_prefill), state))
    for mine, plain in zip(*found, strict=True):
        error = (mine.double() - plain.double()).norm() / plain.double().norm()
        assert 0 < float(error) < 6e-3


def test_which_calls_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, B = torch.zeros(1, 2, 64, dtype=BF16), torch.zeros(1, 1, 128, dtype=BF16)
    state, table = torch.zeros(1, 2, 64, 128), torch.zeros(1, 3, dtype=torch.int32)

    def taken(x=x, B=B, state=state, scales=None, table=table, chunk=128) -> bool:
        return has_roles(x, B, B, state, scales, None, table, chunk)

    assert taken()
    assert not taken(chunk=64)
    assert not taken(table=table[:0])
    assert not taken(x=torch.zeros(1, 2, 65, dtype=BF16)[..., 1:])  # two bytes off
    assert not taken(state=torch.zeros(4, 2, 64, 128)[::2])
    assert not taken(state=state.to(torch.int8), scales=torch.ones(1, 2, 64))
    monkeypatch.setattr(ssd_fused, "target", lambda where: 100)
    assert not taken()
