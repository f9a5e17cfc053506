"""Which drafts the model itself would have said: the longest path of drafts that it agrees with.

A verify pass runs the last known token of a sequence (row 0) and its drafts (the rows behind). On
each row `sample_tokens` has picked the token that follows, from the model's own distribution and
with the noise of that position. The walk starts at row 0 and goes on to the row that follows the
one it is on and holds the token picked there, as long as there is one:

    at = 0;  while a row r has parents[r] = at and ids[r] = picked[at]:  at = r

The tokens gained are those picked along the path: the accepted drafts and one token more. Each is
what plain sampling picks at that position with that seed, so drafts change neither the distribution
nor a single token, whoever made them, at any temperature. A draft d that is made with the same
noise from a distribution q is accepted with probability P(argmax(log p + g) = argmax(log q + g)),
which is at least (1 - TV(p, q)) / (1 + TV(p, q)), and 1 where p = q; the best that any lossless
rule can do, min(1, p / q) with a resampled residual, is 1 - TV(p, q), but there the tokens depend
on the drafts. For a q that is a point mass both accept with p(d). Source: Daliri, Musco and Suresh
2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".

ids, picked int64 [T], rows of packed sequences; cu int32 [S+1]. A row whose pick is negative (its
logits were broken) is never walked onto.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.op import Args, Case, Cost, Exact, KernelSpec, Tile, launch, next_pow2, op


class Verdict(NamedTuple):
    """path int32 [T]: of each sequence the rows walked, counted within it, from its first row (0)
    on, then -1; accepted int32 [S]: drafts among them; last int32 [S]: the row it ended on. A
    sequence without rows has 0 and -1."""

    path: torch.Tensor
    accepted: torch.Tensor
    last: torch.Tensor


# ---------------------------------------------------------------------------------- verify_drafts
def verify_drafts_ref(
    ids: torch.Tensor,
    picked: torch.Tensor,
    cu: torch.Tensor,
    max_new: int,
    parents: torch.Tensor | None = None,
) -> Verdict:
    """Twin of `verify_drafts`."""
    path, accepted, last = [], [], []
    bounds, held, wanted = cu.tolist(), ids.tolist(), picked.tolist()
    above = None if parents is None else parents.tolist()
    for start, end in pairwise(bounds):
        walked = [0] if end > start else []
        for row in range(start + 1, end):
            at = walked[-1]
            parent = row - start - 1 if above is None else above[row]
            if parent == at and held[row] == wanted[start + at] and wanted[row] >= 0:
                walked.append(row - start)
        path += walked + [-1] * (end - start - len(walked))
        accepted.append(max(len(walked) - 1, 0))
        last.append(walked[-1] if walked else -1)
    found = (torch.tensor(x, dtype=torch.int32) for x in (path, accepted, last))
    return Verdict(*(x.to(ids.device) for x in found))


@triton.jit
def _verify_drafts(
    ids_idx, picked_ptr, cu_idx, parents_idx, path_ptr, accepted_ptr, last_ptr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    s = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_idx + s).to(tl.int64)
    n = (tl.load(cu_idx + s + 1).to(tl.int64) - start).to(tl.int32)
    r = tl.arange(0, BLOCK_R)
    inside = r < n
    held = tl.load(ids_idx + start + r, mask=inside, other=-1).to(tl.int64)
    wanted = tl.load(picked_ptr + start + r, mask=inside, other=-1)
    parent = r - 1
    if parents_idx is not None:
        parent = tl.load(parents_idx + start + r, mask=inside, other=-1).to(tl.int64).to(tl.int32)
    open_to = inside & (wanted >= 0)
    path = tl.where(r == 0, 0, -1)
    at = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for i in range(1, BLOCK_R):
        token = tl.sum(tl.where(r == at, wanted, 0), 0)
        found = tl.min(tl.where(open_to & (parent == at) & (held == token), r, BLOCK_R), 0)
        # the walk has ended for good once a step finds nothing: `at` then stays
        path = tl.where((r == i) & (found < BLOCK_R), found, path)
        count += (found < BLOCK_R).to(tl.int32)
        at = tl.where(found < BLOCK_R, found, at)
    tl.store(path_ptr + start + r, path, mask=inside)
    tl.store(accepted_ptr + s, count)
    tl.store(last_ptr + s, tl.where(n > 0, at, -1))


@op(ref=verify_drafts_ref)
def verify_drafts(
    ids: torch.Tensor,
    picked: torch.Tensor,
    cu: torch.Tensor,
    max_new: int,
    parents: torch.Tensor | None = None,
) -> Verdict:
    """How far the drafts agree with the picks; see the module's docstring.

    ids int64 [T]: the token on each row; picked int64 [T]: the token picked to follow it. max_new
    bounds the rows of a sequence. parents int32 [T]: the row, counted within its sequence, that
    each follows, -1 for the first; None: each follows the one before it. Parents stand before
    their children; of equal drafts behind one row the first counts."""
    T, S = ids.shape[0], cu.shape[0] - 1
    require(
        ids.shape == picked.shape == (T,) and ids.dtype == picked.dtype == torch.int64,
        f"ids and picked must be int64 of one length, got {ids.dtype} {tuple(ids.shape)} and "
        f"{picked.dtype} {tuple(picked.shape)}",
    )
    require(
        parents is None or parents.shape == (T,),
        f"parents must name one parent for each of {T} rows",
    )
    path = torch.empty((T,), dtype=torch.int32, device=ids.device)
    accepted = torch.empty((S,), dtype=torch.int32, device=ids.device)
    last = torch.empty((S,), dtype=torch.int32, device=ids.device)
    tile = VERIFY_DRAFTS.tile(T, ids, NEW=next_pow2(max_new), TREE=int(parents is not None))
    out = (path, accepted, last)
    launch(_verify_drafts, (S,), ids, picked, cu, parents, *out, BLOCK_R=next_pow2(max_new), **tile)
    return Verdict(*out)


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    """Sequences of NEW, 0, 1, NEW - 1, ... rows over three token ids, so that many agree; some
    picks are broken."""
    lengths: list[int] = []
    left = T
    while left > 0:
        lengths.append(min(left, (case.NEW, 0, 1, max(1, case.NEW - 1))[len(lengths) % 4]))
        left -= lengths[-1]
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tree = [(r - 1) // 2 if r else -1 for n in lengths for r in range(n)]
    ids, picked = (torch.randint(0, 3, (T,), generator=rng, device=dev) for _ in range(2))
    if not case.TREE:
        follows = torch.rand(T, generator=rng, device=dev) < 0.7
        picked = torch.where(follows, ids.roll(-1), picked)
    picked[5::7] = -1
    return {
        "ids": ids,
        "picked": picked,
        "cu": cu.to(dev),
        "max_new": case.NEW,
        "parents": torch.tensor(tree, dtype=torch.int32, device=dev) if case.TREE else None,
    }


VERIFY_DRAFTS = KernelSpec(
    op=verify_drafts,
    kernels=(_verify_drafts,),
    cases=lambda config: [Case(NEW=4, TREE=0), Case(NEW=8, TREE=1)],
    small=[Case(NEW=4, TREE=0), Case(NEW=7, TREE=1), Case(NEW=1, TREE=0), Case(NEW=16, TREE=1)],
    small_tokens=(0, 1, 3, 40),
    tokens=(4, 64, 1024),
    make=_make,
    tiles=lambda case: [Tile(num_warps=1, num_stages=1)],
    default=lambda case, tokens: Tile(num_warps=1, num_stages=1),
    fixed=UNORDERED,
    cost=lambda case, T, dtype: Cost(T, 20 * T),
    tolerance=Exact(),
    dtypes=("fp32",),
)
