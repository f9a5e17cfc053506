"""The fused scan: against the recurrence, against the five kernels, and through every way in."""

import pytest
import torch

from nemotriton.kernels.op import Tile, use, use_tile
from nemotriton.kernels.ssd import chunk_table, ssd_prefill_chunked
from nemotriton.kernels.ssd_fused import SSD_PREFILL, block_length, is_fused, ssd_prefill
from nemotriton.kernels.ssm_state import STATE_AXES, StateNoise, drawn_ref, round_state_ref
from nemotriton.model.config import PRESETS, ModelConfig
from tests.conftest import Poison
from tests.interpreter.test_parity import embed
from tests.interpreter.test_ssd import Ragged, as_model, prefill
from tests.test_ssd import Inputs, Sizes, inputs, state_of

BF16 = torch.bfloat16
FACTORS = 3  # C_m . B_k, its decay, and their product are rounded
PLAIN = Tile(BLOCK_P=16, PACKED=True, ROLES=False, GROUPED=False, num_warps=4, num_stages=2)
WIDE = Sizes(H=4, P=16, N=16, G=2)  # TMA reads these
ODD = Sizes(H=3, P=5, N=12, G=1)


def rows(case: Ragged, extreme: bool = False, seed: int = 0) -> Inputs:
    return as_model(inputs(sum(case.lengths), case.sizes, seed, extreme), BF16)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("chunk,sizes", [(64, WIDE), (12, ODD), (128, ODD), (48, WIDE)])
def test_ragged_pieces_against_the_recurrence(
    chunk: int, sizes: Sizes, extreme: bool, packed: bool, poison: Poison
) -> None:
    """Chunks of one block, of two, of three, and ones that blocks do not tile."""
    case = Ragged.around(chunk, sizes)
    a = rows(case, extreme, seed=chunk)
    with use_tile("ssd_prefill", PLAIN.but(PACKED=packed)):
        case.check(ssd_prefill, a, BF16, FACTORS)


@pytest.mark.parametrize("extreme", [False, True])
def test_a_table_on_the_sequence_s_own_grid(extreme: bool, poison: Poison) -> None:
    """A short first row, whole rows, a short last one; and pieces of a single short row."""
    lengths, done = [100, 9, 32, 0, 3], [20, 5, 0, 7, 0]
    table = chunk_table(lengths, 32, done)
    case = Ragged(WIDE, 32, lengths, [3, 0, 5, -1, 1], [False, True, False, True, False], table)
    case.check(ssd_prefill, rows(case, extreme), BF16, FACTORS)


def test_any_table_of_short_chunks(poison: Poison) -> None:
    """Rows between the first and the last that are not full are walked one by one."""
    cuts = {0: [32, 5, 32, 16, 1, 30], 1: [7, 7]}
    table, first = [], 0
    for s, sizes in cuts.items():
        for tokens in sizes:
            table.append((s, first, tokens))
            first += tokens
    lengths = [sum(sizes) for sizes in cuts.values()]
    case = Ragged(WIDE, 32, lengths, [3, 0], [False, True], [*table, (-1, 0, 0)])
    case.check(ssd_prefill, rows(case), BF16, FACTORS)


def test_pointers_and_descriptors_give_the_same_bits(poison: Poison) -> None:
    case = Ragged.around(32, WIDE)
    plain = rows(case)
    sliced = Inputs(**{**vars(plain), **{k: embed(getattr(plain, k)) for k in "xBC"}})
    found = []
    for a in (plain, sliced):
        state = state_of(7, WIDE).float()
        found.append(
            (prefill(a, state, case.lengths, case.slots, case.fresh, 32, op=ssd_prefill), state)
        )
    assert all(torch.equal(p, q) for p, q in zip(*found))


def test_the_five_kernels_agree_and_can_be_asked_for() -> None:
    sizes = Sizes(H=2, P=16, N=16, G=1)
    case = Ragged.around(16, sizes)
    a, found = rows(case), {}
    where = (case.lengths, case.slots, case.fresh, 16)
    for name in ("triton", "chunked"):
        state = state_of(7, sizes).float()
        with use(ssd_prefill=name):
            found[name] = (call(a, state, case), state)
    state = state_of(7, sizes).float()
    y = prefill(a, state, *where, op=ssd_prefill_chunked)
    assert torch.equal(found["chunked"][0], y)
    assert torch.equal(found["chunked"][1], state)
    for mine, theirs in zip(found["triton"], (y, state)):
        error = (mine.double() - theirs.double()).norm() / theirs.double().norm()
        assert 0 < float(error) < 6e-3  # other roundings, so not the same bits


def call(
    a: Inputs,
    state: torch.Tensor,
    case: Ragged,
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Through the op, so that what `use` forces is taken."""
    table = torch.tensor(chunk_table(case.lengths, case.chunk), dtype=torch.int32)
    cu = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.tensor(case.slots, dtype=torch.int32)
    where = (state, cu, slots, torch.tensor(case.fresh), table, case.chunk)
    return ssd_prefill(*a.all(), *where, scales=scales, noise=noise)


@pytest.mark.parametrize("axis", STATE_AXES)
def test_the_final_state_is_stored_in_every_format(axis: str, poison: Poison) -> None:
    """To the bit what the twin makes of the fp32 state."""
    fmt, sizes = STATE_AXES[axis], Sizes(H=2, P=5, N=12, G=1)
    case = Ragged(sizes, 16, [20, 0, 3], [2, 0, -1], [True, True, True])
    a, full = rows(case), torch.full((3, 2, 5, 12), torch.nan)
    call(a, full, case)
    state = torch.zeros(3, 2, 5, 12, dtype=fmt.dtype)
    scales = torch.full((3, 2, 5), torch.nan) if fmt.scaled else None
    noise, drawn = None, None
    if fmt.stochastic:
        noise = StateNoise(torch.tensor([7, 8, 9]), torch.tensor([50, 0, 3], dtype=torch.int32), 4)
        drawn = drawn_ref(noise, 0, -1, full[2])
    call(a, state, case, scales=scales, noise=noise)
    want, want_scales = round_state_ref(full[2], fmt.dtype, drawn)
    assert torch.equal(state[2], want)
    assert not state[:2].any()  # an empty fresh piece begins at zero; nobody owns slot 1
    if scales is not None:
        assert torch.equal(scales[2], want_scales)
        assert bool(scales[1].isnan().all())


def test_one_huge_step_leaves_its_neighbours_their_digits(poison: Poison) -> None:
    """dt A of -1e6 in one token: sums behind it would have no digits left below 0.06."""
    case = Ragged(WIDE, 64, [60], [1], [False])
    a = rows(case)
    a.dt[3] = 1e5
    case.check(ssd_prefill, a, BF16, FACTORS)


def test_a_sick_token_is_seen_from_itself_on() -> None:
    case = Ragged(WIDE, 16, [60], [1], [False])
    a, state = rows(case), state_of(2, WIDE).float()
    a.dt[37, 1] = torch.nan
    y = prefill(a, state, [60], [1], [False], 16, op=ssd_prefill)
    assert bool(y[37:, 1].isnan().all())
    assert bool(state[1, 1].isnan().all())
    assert bool(y[:32].isfinite().all())  # earlier blocks, and other heads
    assert bool(y[:, [0, 2, 3]].isfinite().all())
    assert bool(state[1, [0, 2, 3]].isfinite().all())


def test_which_calls_are_fused() -> None:
    x, B = torch.empty(1, 2, 8, dtype=BF16), torch.empty(1, 1, 256, dtype=BF16)
    assert is_fused(x, B, B)
    assert not is_fused(x.half(), B.half(), B.half())
    assert not is_fused(x.float(), B.float(), B.float())
    assert not is_fused(x, B.float(), B)
    wide = torch.empty(1, 1, 257, dtype=BF16)
    assert not is_fused(x, wide, wide)


def test_blocks_tile_the_chunk_where_they_can() -> None:
    lengths = {8: 16, 12: 16, 16: 16, 32: 32, 40: 64, 64: 64, 96: 32, 128: 64, 200: 64, 256: 64}
    assert {chunk: block_length(chunk) for chunk in lengths} == lengths


def test_tiles_differ_in_nothing_that_rounds() -> None:
    """The tuned tile goes by the tokens of the batch, so neighbours choose it."""
    for name in PRESETS:
        for case in SSD_PREFILL.cases(ModelConfig.preset(name)):
            tiles = SSD_PREFILL.tiles(case)
            assert {SSD_PREFILL.default(case, t) for t in (1, 512, 65536)} <= set(tiles)
            for entry in ("BLOCK_P", "PACKED", "ROLES", "num_warps"):
                assert len({tile[entry] for tile in tiles}) == 1
