"""Packed experts where hidden rows and results pass 2^31 elements: every row, against pieces.

In one tile a row's bits do not depend on its company, so pieces that end far below the edge must
give them all.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.kernels import route_experts, run_experts_packed
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.moe_packed_tiles import packed_default
from nemotriton.kernels.op import Case, use_tile
from tests.gpu.sanitize import here

pytestmark = pytest.mark.alone
EDGE = 2**31
SUPER = Case(E=32, F=2688, L=1024, K=22, O=0)  # fewer experts
NANO = Case(E=16, F=1856, L=2688, K=6, O=0)  # whose last tile of F is half full


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "case,ahead",
    [
        pytest.param(SUPER, True, id="a step ahead"),
        pytest.param(SUPER, False, id="plain"),
        pytest.param(NANO, False, id="half a tile"),
    ],
)
def test_every_row_on_both_sides_of_the_edge(case: Case, ahead: bool, cuda: torch.device) -> None:
    if not here(RUN_EXPERTS_PACKED, cuda):
        pytest.skip(f"written for {RUN_EXPERTS_PACKED.arches}")
    tokens = EDGE // (case.K * min(case.F, case.L)) + 700
    default = packed_default(case, tokens)
    assert default["ASYNC"] == (case is SUPER), "what many tokens take by default"
    whole, pieces = compute(case, tokens, 4096, cuda, ahead)
    assert bool(whole.isfinite().all())
    wrong = (whole != pieces).any(1).nonzero().flatten()
    assert not len(wrong), f"{len(wrong)} rows differ, the first is {int(wrong[0])} of {tokens}"


def compute(
    case: Case, tokens: int, piece: int, where: torch.device, ahead: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [tokens, L] of one call, and of a call for every `piece` tokens; in the default tile."""
    rng = parity.generator(3, where)
    args = RUN_EXPERTS_PACKED.make(case, 4, where, torch.bfloat16, rng) | {"arrivals": None}
    x = torch.empty(tokens, case.L, dtype=torch.bfloat16, device=where)
    for part in x.split(piece):
        part.normal_(generator=rng)
    logits = torch.randn(tokens, case.E, generator=rng, device=where)

    def run(rows: slice) -> torch.Tensor:
        routing = route_experts(logits[rows], None, case.K, 1, 1, True, 5.0)
        return run_experts_packed(**args | {"x": x[rows], "routing": routing})

    with use_tile("run_experts_packed", packed_default(case, tokens).but(ASYNC=ahead)):
        whole = run(slice(None))
        pieces = [run(slice(t, t + piece)) for t in range(0, tokens, piece)]
    return whole, torch.cat(pieces)
