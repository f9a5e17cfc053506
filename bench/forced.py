"""Accepted drafts as told: random weights guess badly, and a benchmark must not hang on a text.

While `Forced.installed` is entered, every verify pass works as ever and then keeps what the table
says. The table lies on the device and is read anew each pass, so steps that are recorded inside the
block follow it as well; its dozen small launches count in the step's time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nemotriton.engine import runner, static_step
from nemotriton.kernels import Verdict, verify_drafts

GOLDEN = (5**0.5 - 1) / 2
TURNS = 997  # passes until the table repeats; a prime, so that no pattern of the load meets it


class Forced:
    """Numbers of drafts that verify passes accept, int64 `table` [TURNS, sequences]."""

    def __init__(self, sequences: int, drafts: int, device: torch.device | str) -> None:
        self.drafts = drafts
        self.table = torch.zeros((TURNS, sequences), dtype=torch.int64, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)

    def always(self, accepted: int) -> None:
        """Accept so many, or all that there are."""
        self.table.fill_(accepted)

    def at_rate(self, share: float, seed: int = 0) -> None:
        """Accept each draft in so large a `share`, as long as all before it were.

        A sequence's passes take multiples of the golden ratio, modulo 1, for their luck: any few
        dozen of them accept what the share says, so that no figure hangs on a draw."""
        rng = torch.Generator().manual_seed(seed)
        turns = torch.arange(self.table.shape[0], dtype=torch.float64)[:, None]
        luck = (turns * GOLDEN + torch.rand(self.table.shape[1], generator=rng)) % 1
        at_least = torch.tensor([share ** (i + 1) for i in range(self.drafts)])
        self.table.copy_((luck[..., None] < at_least).sum(-1))

    def verify(
        self,
        ids: torch.Tensor,
        picked: torch.Tensor,
        cu: torch.Tensor,
        max_new: int,
        parents: torch.Tensor | None = None,
    ) -> Verdict:
        """In place of `verify_drafts`, for chains."""
        assert parents is None, "acceptance is forced on chains only"
        verify_drafts(ids, picked, cu, max_new, parents)
        S = cu.shape[0] - 1
        rows = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
        owner = torch.searchsorted(cu[1:], rows, right=True)
        at = rows - cu[owner]
        limit = self.table.index_select(0, self.turn)[0]
        self.turn.add_(1).remainder_(TURNS)
        on = (at <= limit[owner]) & (ids >= 0)  # a negative id is a draft that does not count
        count = torch.zeros(S, dtype=torch.int32, device=ids.device)
        last = count.index_add_(0, owner, on.int()) - 1
        return Verdict(torch.where(on, at, -1), last.clamp_min(0), last)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Force acceptance in the steps that run or are recorded inside the block."""
        places = (runner, static_step)
        own = [place.verify_drafts for place in places]
        for place in places:
            place.verify_drafts = self.verify  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for place, kept in zip(places, own, strict=True):
                place.verify_drafts = kept  # type: ignore[attr-defined]


def expected_tokens(share: float | None, drafts: int) -> float:
    """Tokens of a step a sequence, where each draft is accepted with probability `share`."""
    return 1.0 if share is None else sum(share**i for i in range(drafts + 1))
