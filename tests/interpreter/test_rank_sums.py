"""Sums inside the norm, on ranks that share this process's memory: what the others send is there
before one rank runs, since the interpreter runs one at a time."""

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels import add_rms_norm_ref
from nemotriton.kernels.rank_sums import ROWS, RankRows, sum_add_rms_norm
from tests.conftest import Poison
from tests.interpreter.bounds import reaching


class Ranks:
    """The buffers of all ranks, full of NaN, and their flags."""

    def __init__(self, ranks: int, width: int, dtype: torch.dtype) -> None:
        nan = torch.full((ranks, 2, ranks, ROWS, width), float("nan"))
        self.slots, self.flags = nan.to(dtype), torch.zeros(ranks, ROWS, ranks, dtype=torch.int32)
        at = [torch.tensor([m.data_ptr() for m in memory]) for memory in (self.slots, self.flags)]
        self.rows = [
            RankRows(rank, *at, torch.zeros(ROWS, dtype=torch.int32)) for rank in range(ranks)
        ]

    def send(self, to: int, source: int, part: torch.Tensor, count: int) -> None:
        """What rank `source` sends in its count-th sum of these rows."""
        T = part.shape[0]
        self.slots[to, count % 2, source, :T] = part
        self.flags[to, :T, source] = count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("ranks", "width"), [(2, 64), (3, 48)])
def test_every_rank_gets_the_norm_of_the_sum(
    ranks: int, width: int, dtype: torch.dtype, poison: Poison
) -> None:
    shared = Ranks(ranks, width, dtype)
    weight = torch.rand(width).to(dtype) + 0.5
    for count, T in ((1, 3), (2, 3), (3, 3)):
        g = torch.Generator().manual_seed(count)
        parts = torch.randn(ranks, T, width, generator=g).to(dtype)
        residual = torch.randn(T, width, generator=g).to(dtype)
        total = torch.zeros(T, width)
        for part in parts:
            total += part.float()
        wanted = add_rms_norm_ref(total.to(dtype), residual, weight)
        for rank in range(ranks):
            for source in range(ranks):
                if source != rank:
                    shared.send(rank, source, parts[source], count)
            with reaching(shared.slots, shared.flags):
                got = sum_add_rms_norm(parts[rank], residual, weight, 1e-5, shared.rows[rank], 1)
            assert torch.equal(got[1], wanted[1])
            torch.testing.assert_close(got[0].float(), wanted[0].float(), rtol=1e-2, atol=1e-2)
            for to in range(ranks):
                if to != rank:
                    assert torch.equal(shared.slots[to, count % 2, rank, :T], parts[rank])
                    assert shared.flags[to, :T, rank].tolist() == [count] * T
        assert shared.rows[0].counts.tolist() == [count] * T + [0] * (ROWS - T)


def test_a_rank_that_waits_in_vain_gives_up(poison: Poison) -> None:
    shared = Ranks(2, 64, torch.float32)
    part = torch.ones(1, 64)
    with reaching(shared.slots, shared.flags):
        got = sum_add_rms_norm(part, part, torch.ones(64), 1e-5, shared.rows[0], 3)
    assert torch.isnan(got[0]).all()


def test_more_rows_than_there_is_room_for(poison: Poison) -> None:
    shared = Ranks(2, 64, torch.float32)
    part = torch.ones(ROWS + 1, 64)
    with pytest.raises(UnsupportedError, match="65 rows of 64 do not fit"):
        sum_add_rms_norm(part, part, torch.ones(64), 1e-5, shared.rows[0])
