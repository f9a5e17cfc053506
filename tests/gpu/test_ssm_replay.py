"""Replay at Super's width: a token's bits, however its sequence is cut and whatever follows."""

import pytest
import torch

from nemotriton.kernels import STATE_FORMATS, ring_places, ssm_replay
from nemotriton.kernels.op import Args, Tile, use_tile
from nemotriton.kernels.ssm_state import StateNoise, round_state_ref
from tests.test_replay import World

H, P, N, G, S = 32, 64, 128, 4, 3


class Requests:
    """S sequences in slots of their own, whose tokens are fed in any pieces."""

    def __init__(self, name: str, where: torch.device, most: int, seed: int = 1) -> None:
        g = torch.Generator(device=where).manual_seed(seed)
        self.format, self.R, self.done, self.held = STATE_FORMATS[name], ring_places(16, most), 0, 0
        self.where = where
        T = 64
        wide = torch.randn(S, T, H * P + 2 * G * N + H, generator=g, device=where).bfloat16()
        self.rows = list(wide.split([H * P, G * N, G * N, H], dim=2))
        self.head = (
            -1 - 15 * torch.rand(H, generator=g, device=where),
            torch.randn(H, generator=g, device=where),
            torch.randn(H, generator=g, device=where) - 4,
        )
        h = torch.randn(S, H, P, N, generator=g, device=where)
        self.state, self.scales = round_state_ref(h, self.format.dtype)
        nan = float("nan")
        self.rings = [
            torch.full((S, H, self.R, P), nan, dtype=torch.bfloat16, device=where),
            torch.full((S, H, self.R), nan, device=where),
            torch.full((S, G, self.R, N), nan, dtype=torch.bfloat16, device=where),
        ]
        self.order = torch.arange(self.R, dtype=torch.int32, device=where).repeat(S, 1)

    def feed(
        self,
        count: int,
        update: bool = True,
        spoilt: int | None = None,
        parents: list[int] | None = None,
    ) -> torch.Tensor:
        """y [S, count, H, P] of the next tokens; row `spoilt` of them is not finite."""
        x, B, C, dt = (r[:, self.done : self.done + count].flatten(0, 1) for r in self.rows)
        if spoilt is not None:
            x, B, C, dt = (t.clone() for t in (x, B, C, dt))
            for t, value in zip((x, B, C, dt), (float("inf"), *3 * [float("nan")])):
                t.unflatten(0, (S, count))[:, spoilt] = value
        ints = [[count * s for s in range(S + 1)], list(range(S)), [self.held] * S]
        cu, slots, counts = (torch.tensor(v, dtype=torch.int32, device=self.where) for v in ints)
        A, D, bias = self.head
        args: Args = {
            "x": x.unflatten(1, (H, P)), "dt": dt, "A": A, "B": B.unflatten(1, (G, N)),
            "C": C.unflatten(1, (G, N)), "D": D, "dt_bias": bias, "state": self.state,
            "x_ring": self.rings[0], "dt_ring": self.rings[1], "B_ring": self.rings[2],
            "cu": cu, "slots": slots, "counts": counts, "order": self.order, "max_new": count,
            "scales": self.scales, "update": update,
        }  # fmt: skip
        if self.format.stochastic:
            seeds = torch.arange(S, device=self.where) + 7
            lengths = torch.full((S,), self.done + count, dtype=torch.int32, device=self.where)
            args["noise"] = StateNoise(seeds, lengths, 3)
        if parents is not None:
            args["parents"] = torch.tensor(parents * S, dtype=torch.int32, device=self.where)
        y = ssm_replay.triton(**args)
        if update:
            drop = 16 if self.held >= 16 else 0
            self.order = self.order.roll(-drop, 1)
            self.held, self.done = self.held - drop + count, self.done + count
        return y.unflatten(0, (S, count))


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits of y [S, tokens, H, P]; else which tokens differ, and by how much."""
    off = (got.float() - want.float()).abs()
    where = (got != want).any(3).any(2).any(0).nonzero().flatten().tolist()
    assert not where, f"tokens {where} differ by {float(off.nan_to_num(9e9).max())}"


@pytest.mark.parametrize("name", STATE_FORMATS)
def test_how_tokens_are_cut_into_calls_changes_no_bit(name: str, cuda: torch.device) -> None:
    one = Requests(name, cuda, 1)
    want = torch.cat([one.feed(1) for _ in range(41)], 1)
    other, got = Requests(name, cuda, 7), []
    for count in (1, 7, 4, 7, 2, 7, 6, 7):
        ahead = min(4, 41 - other.done)
        same(other.feed(ahead, update=False), want[:, other.done : other.done + ahead])
        got.append(other.feed(count))
    same(torch.cat(got, 1), want)
    assert torch.equal(other.state, one.state)
    if one.scales is not None:
        assert torch.equal(other.scales, one.scales)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_neither_the_tile_nor_more_rows_change_a_bit(name: str, cuda: torch.device) -> None:
    want = Requests(name, cuda, 12)
    wanted = [want.feed(n) for n in (9, 12, 3)]
    for rows, warps, few in ((16, 1, 0), (32, 1, 0), (64, 1, 0), (64, 2, 0), (64, 1, 16)):
        tile = Tile(BLOCK_P=rows, num_warps=warps, num_stages=1, SLICE_P=few)
        with use_tile("ssm_replay", tile):
            other = Requests(name, cuda, 12)
            for n, y in zip((9, 12, 3), wanted):
                same(other.feed(n), y)


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("name", STATE_FORMATS)
def test_a_token_of_a_tree_has_the_bits_of_its_path(
    name: str, update: bool, cuda: torch.device
) -> None:
    """Row 2 is not on the way to the rows below 1, which are those of a chain."""
    parents, path = [-1, 0, 0, 1, 3, 2, 4], [0, 1, 3, 4, 6]
    for held in (0, 9, 12, 13, 15):
        chain, tree = Requests(name, cuda, 7), Requests(name, cuda, 7)
        for world in (chain, tree):
            for n in [7] * (held // 7) + [held % 7] * (held % 7 > 0):
                world.feed(n)
        rows = chain.rows
        chain.rows = [r.clone() for r in rows]
        for r, all_rows in zip(chain.rows, rows):
            r[:, held : held + 5] = all_rows[:, [held + i for i in path]]
        got = tree.feed(7, update, parents=parents)
        same(got[:, path], chain.feed(5, update))


@pytest.mark.parametrize("held", [0, 9, 13])
def test_a_sick_row_leaves_the_rows_before_it_alone(held: int, cuda: torch.device) -> None:
    well, sick = Requests("float32", cuda, 6), Requests("float32", cuda, 6)
    for world in (well, sick):
        for n in [6] * (held // 6) + [held % 6] * (held % 6 > 0):
            world.feed(n)
    want, got = well.feed(6), sick.feed(6, spoilt=4)
    same(got[:, :4], want[:, :4])
    assert not got[:, 4:].isfinite().any()


class Near(World):
    """The kernel against the recurrence: states are rounded alike but for a step of a few."""

    where = "cuda"

    def check(self, got: torch.Tensor, want: torch.Tensor) -> None:
        loose = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.int8: 4e-2}[self.format.dtype]
        scale = float(want.abs().max()) + 1
        assert float((got - want).abs().max()) <= loose * scale


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_random_steps_of_requests_that_come_and_go(name: str, cuda: torch.device) -> None:
    """Accepted, rejected, alternative and trial rows, slots that change hands, requests that are
    moved, and NaN in all that is not committed."""
    world = Near(ssm_replay.triton, STATE_FORMATS[name], seed=5)
    for _ in range(150):
        world.step()
    assert world.crossed > 20
