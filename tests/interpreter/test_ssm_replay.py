"""The kernels of replay: random steps, cuts that change no bit, extremes, pads, refusals."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemotriton.errors import UnsupportedError
from nemotriton.kernels import STATE_FORMATS, ring_places, ssm_replay
from nemotriton.kernels.op import Args, Case, Tile, use_tile
from nemotriton.kernels.ssm_replay import SSM_REPLAY
from nemotriton.kernels.ssm_state import round_state_ref
from tests.conftest import Poison
from tests.interpreter.test_ssd import as_model, within_twice
from tests.test_replay import MAMBA, World
from tests.test_ssd import Inputs, Sizes, inputs

SIZES = Sizes(H=1, P=6, N=12, G=1)


class Near(World):
    """The kernel against the recurrence: states are rounded alike but for a step of a few."""

    config = replace(MAMBA, heads=1)

    def check(self, got: Tensor, want: Tensor) -> None:
        loose = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.int8: 4e-2}[self.format.dtype]
        scale = float(want.abs().max()) + 1
        assert float((got - want).abs().max()) <= loose * scale


@pytest.mark.parametrize("name", ["float32", "int8"])
def test_random_steps_of_requests_that_come_and_go(name: str, poison: Poison) -> None:
    world = Near(ssm_replay.triton, STATE_FORMATS[name], seed=3)
    for _ in range(20):
        world.step()
    assert world.crossed > 2


class Request:
    """One sequence in slot 1 of a pool of three, its tokens fed in any pieces."""

    def __init__(self, a: Inputs, dtype: torch.dtype, most: int) -> None:
        self.a, self.R, self.done, self.held = a, ring_places(16, most), 0, 0
        H, P, N, G = SIZES.H, SIZES.P, SIZES.N, SIZES.G
        h = torch.full((3, H, P, N), torch.nan)
        h[1] = torch.randn(H, P, N, generator=torch.Generator().manual_seed(5))
        self.state, self.scales = round_state_ref(h, dtype)
        shapes = ((3, H, self.R, P), (3, H, self.R), (3, G, self.R, N))
        dtypes = (a.x.dtype, torch.float32, a.x.dtype)
        self.rings = [torch.full(s, torch.nan, dtype=d) for s, d in zip(shapes, dtypes)]
        self.order = torch.arange(self.R, dtype=torch.int32)[None]

    def feed(self, count: int, **options: object) -> Tensor:
        """y of the next tokens, which are kept unless update=False."""
        rows = self.a.rows(slice(self.done, self.done + count))
        ints = [torch.tensor(v, dtype=torch.int32) for v in ([0, count], [1], [self.held])]
        y = ssm_replay.triton(*rows.all(), self.state, *self.rings, *ints, self.order, count,
                              scales=self.scales, **options)  # type: ignore[arg-type]  # fmt: skip
        if options.get("update", True):
            drop = 16 if self.held >= 16 else 0
            self.order = self.order.roll(-drop, 1)
            self.held, self.done = self.held - drop + count, self.done + count
        return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
def test_how_tokens_are_cut_into_calls_changes_no_bit(dtype: torch.dtype, poison: Poison) -> None:
    """One by one, in passes that cross a border, and with rejected passes between."""
    a = as_model(inputs(41, SIZES), torch.bfloat16)
    one = Request(a, dtype, 1)
    want = torch.cat([one.feed(1) for _ in range(40)])
    other = Request(a, dtype, 9)
    got = []
    for count in (1, 7, 9, 2, 9, 3, 9):
        ahead = min(4, 40 - other.done)
        assert torch.equal(other.feed(ahead, update=False), want[other.done :][:ahead])
        got.append(other.feed(count))
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(other.feed(1), one.feed(1))
    assert torch.equal(one.state[1], other.state[1])
    if dtype.is_floating_point:
        assert bool(one.state[[0, 2]].isnan().all())


@pytest.mark.parametrize("tile", [(16, 1, 0), (32, 2, 0), (16, 1, 4)])
def test_the_tile_changes_no_bit(tile: tuple[int, int, int]) -> None:
    a = as_model(inputs(20, SIZES), torch.bfloat16)
    want = Request(a, torch.float32, 10)
    given = {"BLOCK_P": tile[0], "num_warps": tile[1], "num_stages": 1, "SLICE_P": tile[2]}
    with use_tile("ssm_replay", Tile(**given)):
        other = Request(a, torch.float32, 10)
        got = [other.feed(10), other.feed(9), other.feed(1)]
    for y, count in zip(got, (10, 9, 1), strict=True):
        assert torch.equal(y, want.feed(count))
    assert torch.equal(other.state[1], want.state[1])


@pytest.mark.parametrize("held", [0, 12, 14])
@pytest.mark.parametrize("spoilt", ["x", "B", "C", "dt"])
def test_a_sick_row_leaves_the_rows_before_it_alone(spoilt: str, held: int) -> None:
    """Also where the sick row or the rows before it lie beyond a border."""
    worlds = [Request(as_model(inputs(41, SIZES), torch.bfloat16), torch.float32, 5) for _ in "ab"]
    for world in worlds:
        for n in [4] * (held // 4) + [held % 4] * (held % 4 > 0):
            world.feed(n)
    want = worlds[0].feed(5)
    getattr(worlds[1].a, spoilt)[held + 3] = torch.inf if spoilt == "x" else torch.nan
    got = worlds[1].feed(5)
    assert torch.equal(got[:3], want[:3])
    assert not got[3].isfinite().any()
    assert spoilt == "C" or not got[4].isfinite().any()


@pytest.mark.parametrize("held", [0, 13, 14])
def test_a_sick_branch_leaves_the_others_alone(held: int) -> None:
    """Token 1 is sick, and 3 below it; 2 and 4 are another branch."""
    parents, ys = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32), []
    for value in (0.5, torch.inf, torch.nan):
        world = Request(as_model(inputs(41, SIZES), torch.bfloat16), torch.float32, 5)
        for n in [5] * (held // 5) + [held % 5] * (held % 5 > 0):
            world.feed(n)
        for values in (world.a.x, world.a.dt) if value == torch.nan else (world.a.x,):
            values[held + 1] = value
        ys.append(world.feed(5, parents=parents))
    for y in ys[1:]:
        assert torch.equal(y[[0, 2, 4]], ys[0][[0, 2, 4]])
        assert not y[[1, 3]].isfinite().any()


@pytest.mark.parametrize("held", [0, 13, 14])
@pytest.mark.parametrize("update", [True, False])
def test_a_token_of_a_tree_has_the_bits_of_its_path(update: bool, held: int) -> None:
    """Row 2 is not on the way to the rows below 1, which are those of a chain."""
    parents, path = torch.tensor([-1, 0, 0, 1, 3], dtype=torch.int32), [0, 1, 3, 4]
    tree, chain = (
        Request(as_model(inputs(41, SIZES), torch.bfloat16), torch.float32, 5) for _ in range(2)
    )
    for world in (tree, chain):
        for n in [5] * (held // 5) + [held % 5] * (held % 5 > 0):
            world.feed(n)
    for rows in (chain.a.x, chain.a.dt, chain.a.B, chain.a.C):
        rows[held : held + 4] = rows[[held + i for i in path]].clone()
    assert torch.equal(tree.feed(5, update=update, parents=parents)[path],
                       chain.feed(4, update=update))  # fmt: skip


def made(new: int, tree: int, state: str = "fp32", T: int = 12) -> Args:
    case = Case(H=2, P=6, N=12, G=1, STATE=state, NEW=new, TREE=tree)
    rng = torch.Generator().manual_seed(new + tree)
    return SSM_REPLAY.make(case, T, torch.device("cpu"), torch.bfloat16, rng)


def test_a_chain_by_parents_is_the_chain() -> None:
    """The tree's kernel, on trees that are none: to the bit, in every phase of the ring."""
    for counts in (0, 3, 12, 13, 15, 16, 18):
        args = made(4, 0, T=4) | {
            "cu": torch.tensor([0, 4]).int(),
            "slots": torch.tensor([0]).int(),
        }
        args["counts"], args["order"] = torch.tensor([counts]).int(), args["order"][:1]
        args["state"] = torch.randn(args["state"].shape)
        for name in ("x_ring", "dt_ring", "B_ring"):
            args[name] = (torch.rand(args[name].shape) / 9).to(args[name].dtype)
        chain, tree = ({k: v.clone() if torch.is_tensor(v) else v for k, v in args.items()}
                       for _ in range(2))  # fmt: skip
        y = ssm_replay.triton(**chain)
        z = ssm_replay.triton(**tree, parents=torch.tensor([-1, 0, 1, 2]).int())
        assert torch.equal(y, z)
        for name in ("state", "x_ring", "dt_ring", "B_ring"):
            assert torch.equal(chain[name], tree[name]), name


@pytest.mark.parametrize("extreme", [False, True])
def test_steps_and_decays_at_their_extremes(extreme: bool, poison: Poison) -> None:
    sizes = Sizes(H=2, P=6, N=12, G=1)
    a = as_model(inputs(12, sizes, extreme=extreme), torch.bfloat16)
    for limits in ((0.0, float("inf")), (0.001, 0.1)):
        args = made(4, 0) | dict(zip(("x", "dt", "A", "B", "C", "D", "dt_bias"), a.all()))
        args["dt_limit"] = limits
        results = []
        for run, dtype in (("triton", None), ("ref", None), ("ref", torch.float64)):
            mine = {k: v.clone() if torch.is_tensor(v) else v for k, v in args.items()}
            if dtype is not None:
                mine = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
                        for k, v in mine.items()}  # fmt: skip
            results.append(getattr(ssm_replay, run)(**mine))
        within_twice(*results, torch.bfloat16)


@pytest.mark.parametrize("tree", [0, 1])
def test_pads_write_zeros_and_touch_nothing(tree: int, poison: Poison) -> None:
    args = made(4, tree)
    args["slots"] = torch.full_like(args["slots"], -1)
    for name in ("x", "dt", "B", "C"):
        args[name].fill_(torch.nan)
    before = {k: args[k].clone() for k in ("state", "x_ring", "dt_ring", "B_ring")}
    assert not ssm_replay.triton(**args).any()
    for name, value in before.items():
        assert torch.equal(value.nan_to_num(9.0), args[name].nan_to_num(9.0))


def test_refuses_what_it_cannot_do() -> None:
    args = made(4, 0)
    for change, match in (
        ({"max_new": 17}, "in a row"),
        ({"interval": 12}, "power of two"),
        ({"order": args["order"][:, :-1]}, "order"),
        ({"x_ring": args["x_ring"].float()}, "x_ring must be"),
        ({"state": args["state"].to(torch.int8)}, "needs fp32 scales"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            ssm_replay.triton(**(args | change))
