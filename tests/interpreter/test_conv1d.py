"""The convolution kernel at tile edges, with odd windows, pads, pieces and draft trees."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.kernels.conv1d import CAUSAL_CONV1D, causal_conv1d
from nemotriton.kernels.conv1d_update import CAUSAL_CONV1D_UPDATE, causal_conv1d_update
from nemotriton.kernels.op import Tile, use_tile
from tests.conftest import Poison

TILE = Tile(BLOCK_T=16, BLOCK_C=32, num_warps=1, num_stages=1)
EDGES = [15, 16, 17, 0, 1, 32, 33, 2, 3, 65, 0]
BF16 = torch.bfloat16


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def arguments(lengths: list[int], C: int, W: int, dtype: torch.dtype = BF16) -> dict:
    """One slot a sequence, in reversed order, between slots of NaN."""
    rng, S = torch.Generator().manual_seed(W), len(lengths)
    state = torch.full((2 * S + 1, W - 1, C), float("nan"), dtype=dtype)
    state[1::2] = torch.randn(S, W - 1, C, generator=rng).to(dtype)
    return {
        "x": torch.randn(sum(lengths), C, generator=rng).to(dtype),
        "weight": torch.randn(C, W, generator=rng).to(dtype),
        "bias": torch.randn(C, generator=rng).to(dtype),
        "state": state,
        "cu": starts(*lengths),
        "slots": torch.arange(S).flip(0).int() * 2 + 1,
        "max_new": max(lengths),
    }


def assert_parity(spec, args: dict) -> dict[str, torch.Tensor]:
    """Within the spec's tolerance, and the windows, which are copies, to the bit."""
    out, twin = parity.run(spec, args), parity.run(spec, args, ref=True)
    verdict = parity.compare(spec, out, twin, parity.oracle(spec, args))
    assert verdict.ok, verdict.detail
    for name in spec.mutates:
        if name in out:
            assert_bits(out[name], twin[name])
    return out


def assert_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("W,biased", [(1, True), (2, True), (3, False), (4, True), (6, True)])
def test_tile_edges(W: int, biased: bool, poison: Poison) -> None:
    args = arguments(EDGES, 40, W)
    args["fresh"] = torch.arange(len(EDGES)) % 3 == 0
    if not biased:
        args["bias"] = None
    with use_tile("causal_conv1d", TILE):
        assert_parity(CAUSAL_CONV1D, args)


def test_the_grid_may_be_larger_than_any_sequence(poison: Poison) -> None:
    args = arguments([3, 0, 20], 8, 4) | {"fresh": None}
    with use_tile("causal_conv1d", TILE):
        exact, loose = (parity.run(CAUSAL_CONV1D, args | {"max_new": n}) for n in (20, 100))
    for name in exact:
        assert_bits(exact[name], loose[name])


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 128, 0], [0, 0, 5], [0, 5, 0]])
def test_empty_sequences(lengths: list[int], poison: Poison) -> None:
    """An empty sequence keeps its window, or gets a window of zeros where it is fresh."""
    args = arguments(lengths, 8, 4)
    for fresh in (False, True):
        args["fresh"] = torch.full((len(lengths),), fresh)
        out = assert_parity(CAUSAL_CONV1D, args)
        for n, slot in zip(lengths, args["slots"].tolist()):
            if n == 0:
                want = torch.zeros(3, 8, dtype=BF16) if fresh else args["state"][slot]
                assert_bits(out["state"][slot], want)


def test_state_and_input_in_one_buffer(poison: Poison) -> None:
    """The windows may lie between the rows of the input's own storage."""
    args = arguments([5, 1, 40], 24, 4) | {"fresh": None}
    want = parity.run(CAUSAL_CONV1D, args)
    whole = torch.full((64, 100), float("nan"), dtype=BF16)
    x, state = whole[:46, 3:27], whole[:21, 50:74].unflatten(0, (7, 3))
    x.copy_(args["x"])
    state.copy_(args["state"])
    y = causal_conv1d.triton(**args | {"x": x, "state": state})
    assert_bits(y, want["out0"])
    assert_bits(state, want["state"])
    assert whole[:, 27:50].isnan().all()


@pytest.mark.parametrize("W", [2, 3, 4])
def test_any_cut_gives_the_same_bits(W: int) -> None:
    """A prompt in pieces, then single tokens and runs, against the whole prompt at once."""
    args = arguments([101], 20, W)
    x, rest = args["x"], {k: args[k] for k in ("weight", "bias")}
    slots, fresh = args["slots"], torch.tensor([True])
    states = [args["state"].clone() for _ in range(2)]
    with use_tile("causal_conv1d", TILE):
        want = causal_conv1d.triton(x, *rest.values(), states[0], starts(101), slots, fresh, 101)
        got, at = [], 0
        for n in (1, 3, 16, 0, 2, 17, 31):
            where = (states[1], starts(n), slots, torch.tensor([at == 0]), n)
            got.append(causal_conv1d.triton(x[at : at + n], *rest.values(), *where))
            at += n
    for n in (1, 1, 5, 1, 8, 2, 13):
        where = (states[1], starts(n), slots, n)
        got.append(causal_conv1d_update.triton(x[at : at + n], *rest.values(), *where))
        at += n
    assert at == 101
    assert torch.equal(torch.cat(got), want)
    assert_bits(*states)


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("laned", [True, False])
def test_update(W: int, update: bool, laned: bool, poison: Poison) -> None:
    args = arguments([1, 5, 0, 2, 3, 4], 40, W)
    args["slots"][3] = -1
    args["update_state"] = update
    if laned:
        args["lanes"] = torch.full((13, 6, W - 1, 40), float("nan"), dtype=BF16)
    out = assert_parity(CAUSAL_CONV1D_UPDATE, args)
    assert not out["out0"][6:8].any()


@pytest.mark.parametrize("W", [2, 4])
def test_update_longer_than_its_bound_in_slots(W: int, poison: Poison) -> None:
    """max_new above every length, as a captured graph has it."""
    args = arguments([1, 3, 2], 40, W)
    exact, loose = (parity.run(CAUSAL_CONV1D_UPDATE, args | {"max_new": n}) for n in (3, 8))
    for name in exact:
        assert_bits(exact[name], loose[name])


@pytest.mark.parametrize("W", [2, 3, 4])
def test_draft_trees(W: int, poison: Poison) -> None:
    trees = [[-1, 0, 0, 2, -1, 3, 1], [-1], [-1, -1, 1, 2, 3]]
    args = arguments([len(t) for t in trees], 40, W)
    args["parents"] = torch.tensor([*trees[0], *trees[1], *trees[2]]).int()
    args["update_state"] = False
    args["lanes"] = torch.full((7, 7, W - 1, 40), float("nan"), dtype=BF16)
    out = assert_parity(CAUSAL_CONV1D_UPDATE, args)
    assert_bits(out["state"], args["state"])


def test_a_chain_of_parents_is_a_chain(poison: Poison) -> None:
    args = arguments([4, 1, 6], 40, 4) | {"update_state": False}
    chain = torch.cat([torch.arange(n) - 1 for n in (4, 1, 6)]).int()
    plain = parity.run(CAUSAL_CONV1D_UPDATE, args)
    tree = parity.run(CAUSAL_CONV1D_UPDATE, args | {"parents": chain})
    assert_bits(plain["out0"], tree["out0"])


def test_a_sick_sequence_leaves_the_others(poison: Poison) -> None:
    """NaN in one sequence's window and tokens, next to others in the same tile of slots."""
    args = arguments([17, 9, 33], 40, 4) | {"fresh": None}
    sick = parity.copy(args)
    sick["x"][17:26] = float("nan")
    sick["state"][sick["slots"][1]] = float("nan")
    healthy, ill = parity.run(CAUSAL_CONV1D, args), parity.run(CAUSAL_CONV1D, sick)
    rows = [*range(17), *range(26, 59)]
    assert_bits(healthy["out0"][rows], ill["out0"][rows])
    assert ill["out0"][17:26].isnan().all()
    for slot in args["slots"][[0, 2]].tolist():
        assert_bits(healthy["state"][slot], ill["state"][slot])
