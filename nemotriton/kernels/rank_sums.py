"""The sum of all ranks' parts of a mixer's output, the residual add and the norm, in one launch.

    x' = x of rank 0 + x of rank 1 + ...   (fp32, in this order, rounded to x's dtype: on every rank
                                            the same bits)
    r' = r + x', y = rms_norm(r')          (as `add_rms_norm`)

Every rank writes its rows into a buffer on each other rank, which all of them reach (`RankRows`),
raises a flag there behind each row, waits for the others' flags, and adds up what has come. A row's
flag counts its sums, so nothing has to be reset, and rows use the two halves of the buffer in turn:
who finds the flag of a row's next sum knows that its last one has been read. A row is a program of
its own; all ranks must come with as many rows, in the same order of calls, on one stream each.

There is no twin: on one rank it is `add_rms_norm`, which is also what the ranks' results are
compared with (`model.sums`). x, y [T, D]; T at most ROWS, D at most WIDTH_BYTES wide.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.op import launch, next_pow2
from nemotriton.kernels.rms_norm import FEW, check_rows

ROWS = 64
WIDTH_BYTES = 16384
_NEVER = -1  # turns of a wait without an end


class RankRows(NamedTuple):
    """What a rank knows of the shared buffers. slots, flags: int64 [ranks], the addresses here of
    every rank's buffer [2, ranks, ROWS, D] and of its flags, int32 [ROWS, ranks]; counts int32
    [ROWS], this rank's own. Flags and counts begin with zeros."""

    rank: int
    slots: torch.Tensor
    flags: torch.Tensor
    counts: torch.Tensor


def slot_bytes(ranks: int) -> int:
    """Bytes of a rank's buffer."""
    return 2 * ranks * ROWS * WIDTH_BYTES


@triton.jit
def _sum_add_rms_norm(
    x_ptr, r_ptr, w_ptr, y_ptr, s_ptr, buffers_ptr, flags_ptr, counts_ptr, x_stride, r_stride,
    D, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    w = tl.load(w_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + t * x_stride + d, mask=mask, other=0.0)  # [BLOCK_D]
    r = tl.load(r_ptr + t * r_stride + d, mask=mask, other=0.0).to(tl.float32)
    count = tl.load(counts_ptr + t) + 1
    half = (count & 1).to(tl.int64) * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.multiple_of(tl.load(buffers_ptr + peer).to(x_ptr.dtype), 16)
            tl.store(theirs + ((half + RANK) * ROWS + t) * D + d, x, mask=mask)
    tl.debug_barrier()  # the whole row is on its way before one thread says so
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            flags = tl.load(flags_ptr + peer).to(counts_ptr.dtype)
            tl.atomic_xchg(flags + t * RANKS + RANK, count, sem="release", scope="sys")
    own = tl.multiple_of(tl.load(buffers_ptr + RANK).to(x_ptr.dtype), 16)
    own_flags = tl.load(flags_ptr + RANK).to(counts_ptr.dtype)
    total = tl.zeros([BLOCK_D], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += x.to(tl.float32)
        else:
            flag = own_flags + t * RANKS + peer
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            left = tl.full([], TURNS, tl.int32)
            while (seen - count < 0) & (left != 0):
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                left -= 1
            tl.debug_barrier()
            at = own + ((half + peer) * ROWS + t) * D + d
            total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(counts_ptr + t, count)
    s = (r + total.to(x_ptr.dtype.element_ty).to(tl.float32)).to(s_ptr.dtype.element_ty)
    tl.store(s_ptr + t * D + d, s, mask=mask)
    u = s.to(tl.float32)
    y = u * tl.rsqrt(tl.sum(u * u, 0) / D + eps) * w
    tl.store(y_ptr + t * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)


def sums_rows(x: torch.Tensor) -> bool:
    """Whether parts like x are few and narrow enough."""
    T, D = x.shape
    return 0 < T <= ROWS and D * x.element_size() <= WIDTH_BYTES and x.stride(1) == 1


def sum_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    shared: RankRows,
    turns: int = _NEVER,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of the new residual, the new residual) as `add_rms_norm` gives them for the sum.

    x [T, D] this rank's part; residual [T, D], fp32 or x's dtype, equal on all ranks; weight [D].
    turns: looks at a flag until the sum is given up and comes out wrong, for a first try."""
    T, D = check_rows(x, weight)
    require(sums_rows(x), f"{T} rows of {D} do not fit the buffers for sums over the ranks")
    require(residual.shape == x.shape and residual.stride(1) == 1, "residual must be as x")
    y = torch.empty((T, D), dtype=x.dtype, device=x.device)
    total = torch.empty((T, D), dtype=residual.dtype, device=x.device)
    block, strides = next_pow2(D), (x.stride(0), residual.stride(0))
    launch(
        _sum_add_rms_norm, (T,), x, residual, weight, y, total, shared.slots, shared.flags,
        shared.counts, *strides, D, eps, RANK=shared.rank, RANKS=shared.slots.shape[0], ROWS=ROWS,
        TURNS=turns, BLOCK_D=block, EARLY=T <= FEW, **as_dependent(x),
        num_warps=min(8, max(1, block // 512)), num_stages=1,
    )  # fmt: skip
    return y, total
