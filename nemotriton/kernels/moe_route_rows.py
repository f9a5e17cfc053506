"""The router's choice for many tokens: one warp a token, exact work for the candidates alone.

The exact score, a float64 sigmoid, costs more instructions than everything else a router does, and
only the experts near the K-th place need it. So a warp first ranks all E experts by a float32 score
(`_rough`), finds by bisection a bar that K experts reach and few more, and lowers it by more than
rough and exact choices may be apart: whoever is below it cannot be among the K. The others, mostly
K to WINDOW of them, are written down in ascending order; then the choice of `moe_choice` is made
among them, two to a lane. Ids and weights are those of the other form to the bit.

Where more than WINDOW experts come that near (ties, NaN, K experts of infinite choice), `_narrow`
finds the K exactly, a window of candidates at a time: slow, short, and right for any input.

One group of experts only. The ranks and counts of pairs are those that `moe_route` sorts by.
"""

import torch
import triton
import triton.language as tl

from nemotriton.kernels.moe_choice import ABSENT, _sigmoid, _slots, load_bias
from nemotriton.kernels.op import Case, Tile, launch, next_pow2
from nemotriton.kernels.order import order_bits

WINDOW = tl.constexpr(64)  # candidates that are compared in registers
ENOUGH = tl.constexpr(56)  # the search for a bar ends when no more experts than this reach it
SEARCH = tl.constexpr(16)  # and after so many steps in any case
# rough and exact scores are at most 1e-6 apart; each sum with a bias is off by half an ulp more
APART = tl.constexpr(2e-6)
ULP = tl.constexpr(2.4e-7)


@triton.jit
def _rough(x):
    """sigmoid(x) within 1e-6; NaN stays."""
    r = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return r * r


@triton.jit
def _candidates(choice, guess, K: tl.constexpr):
    """(where an expert may be among the K by the exact choice, given the rough ones; the bar).

    The bar is sought between `low`, which K experts reach, and `high`, which fewer do: first at the
    guess, then in the middle. NaN is below no bar, so it always stays."""
    low, high = tl.min(choice, 0), tl.max(choice, 0)
    room = APART + ULP * tl.maximum(tl.abs(low), tl.abs(high))
    middle = tl.minimum(tl.maximum(guess, low), high)
    reach = choice.shape[0]
    step = 0
    while (reach > ENOUGH) & (step < SEARCH):
        count = tl.sum((choice >= middle).to(tl.int32), 0)
        enough = count >= K
        reach = tl.where(enough, count, reach)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = 0.5 * low + 0.5 * high
        step += 1
    bar = low - 2.0 * room
    return (choice < bar) == 0, low


@triton.jit
def _exact(logits_ptr, bias_ptr, e, inside):
    """(score, order bits of the choice or ABSENT) of experts e."""
    score = _sigmoid(tl.load(logits_ptr + e, mask=inside, other=0.0))
    choice = score
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + e, mask=inside, other=0.0).to(tl.float32)
    return score, tl.where(inside, order_bits(choice), ABSENT)


@triton.jit
def _count_from(keys_ptr, n, middle):
    """How many of n keys are at or above middle."""
    i = tl.arange(0, WINDOW)
    found = tl.zeros([WINDOW], tl.int32)
    for first in range(0, n, WINDOW):
        key = tl.load(keys_ptr + first + i, mask=first + i < n, other=ABSENT)
        found += (key >= middle).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _narrow(logits_ptr, bias_ptr, list_ptr, keys_ptr, n, K: tl.constexpr):
    """Leave in the list, of n candidates, the K that are chosen, in ascending order."""
    i = tl.arange(0, WINDOW)
    for first in range(0, n, WINDOW):
        inside = first + i < n
        e = tl.load(list_ptr + first + i, mask=inside, other=0).to(tl.int64)
        _, key = _exact(logits_ptr, bias_ptr, e, inside)
        tl.store(keys_ptr + first + i, key, mask=inside)
    tl.debug_barrier()
    low = tl.full([], -2147483647, tl.int64)  # the order bits of NaN: all candidates reach them
    high = tl.full([], 2147483647, tl.int64)  # no number has these
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        count = _count_from(keys_ptr, n, middle.to(tl.int32))
        low = tl.where(count >= K, middle, low)
        high = tl.where(count >= K, high, middle)
    bar = low.to(tl.int32)
    room = K - _count_from(keys_ptr, n, bar + 1)  # of those equal to the bar, the first so many
    kept = tl.full([], 0, tl.int32)
    for first in range(0, n, WINDOW):
        key = tl.load(keys_ptr + first + i, mask=first + i < n, other=ABSENT)
        e = tl.load(list_ptr + first + i, mask=first + i < n, other=0)
        equal = (key == bar).to(tl.int32)
        chosen = (key > bar) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        room -= tl.minimum(tl.sum(equal, 0), room)
        place = kept + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.debug_barrier()  # the list is overwritten where it has been read
        tl.store(list_ptr + place, e, mask=chosen)
        kept += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["T"])
def _route_rows(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, ranks_ptr, counts_ptr, list_ptr, keys_ptr,
    logits_stride, T, scale,
    K: tl.constexpr, E: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Route BLOCKS tokens, one after the other, and count their pairs by expert."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    i = tl.arange(0, WINDOW)
    real = e < E
    list_ptr += program * E
    keys_ptr += program * E
    counts_ptr += program * E
    bias = load_bias(bias_ptr, e, real)
    tl.store(counts_ptr + e, tl.zeros([BLOCK_E], tl.int32), mask=real)
    first = program * BLOCKS
    guess = tl.max(bias, 0)  # then the bar of the token before, which is often good enough
    for token in range(tl.minimum(T - first, BLOCKS)):
        t = first + token
        row = logits_ptr + t * logits_stride
        choice = _rough(tl.load(row + e, mask=real, other=0.0)) + bias
        if E < BLOCK_E:
            choice = tl.where(real, choice, float("nan"))  # counts nowhere
        near, guess = _candidates(choice, guess, K)
        near &= real
        place = tl.cumsum(near.to(tl.int32), 0) - 1
        n = tl.sum(near.to(tl.int32), 0)
        tl.debug_barrier()  # the token before has read its list, and stored its counts
        tl.store(list_ptr + place.to(tl.uint32), e, mask=near)
        tl.debug_barrier()
        if n > WINDOW:
            _narrow(row, bias_ptr, list_ptr, keys_ptr, n, K)
        n = tl.where(n > WINDOW, K, n)
        inside = i < n
        expert = tl.load(list_ptr + i, mask=inside, other=0).to(tl.int64)
        score, key = _exact(row, bias_ptr, expert, inside)
        slot = tl.reshape(_slots(tl.reshape(key, [1, WINDOW]), K), [WINDOW])
        chosen = slot >= 0
        weight = tl.where(chosen, score, 0.0)
        if NORMALIZE:
            total = tl.sum(weight.to(tl.float64), 0).to(tl.float32)
            weight = tl.div_rn(weight, total + 1e-20)
        pair = t * K + slot
        tl.store(ids_ptr + pair, expert.to(tl.int32), mask=chosen)
        tl.store(weights_ptr + pair, weight * scale, mask=chosen)
        rank = tl.load(counts_ptr + expert, mask=chosen, other=0)
        tl.store(ranks_ptr + pair, rank, mask=chosen)
        tl.store(counts_ptr + expert, rank + 1, mask=chosen)


def row_tile(blocks: int) -> Tile:
    """Programs of one warp, which route `blocks` tokens each."""
    return Tile(ROWS=True, BLOCK_T=1, BLOCKS=blocks, num_warps=1, num_stages=1)


def suits_rows(logits: torch.Tensor, case: Case) -> bool:
    """Whether this form does what is asked: no limit to groups, no parts to be added."""
    return logits.ndim == 2 and case.TG == case.G and WINDOW.value >= case.K


def route_rows(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    case: Case,
    normalize: bool,
    scale: float,
    tile: Tile,
    pdl: bool,
) -> None:
    """Launch; out: ids, weights, ranks and counts [programs, E] of `moe_route`."""
    ids, weights, ranks, counts = out
    candidates, keys = torch.empty_like(counts), torch.empty_like(counts)
    options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"], "launch_pdl": pdl}
    launch(
        _route_rows, (counts.shape[0],), logits, bias, ids, weights, ranks, counts,
        candidates, keys, logits.stride(0), logits.shape[0], scale,
        K=case.K, E=case.E, NORMALIZE=normalize,
        BLOCKS=tile["BLOCKS"], BLOCK_E=next_pow2(case.E), PDL=pdl, **options,
    )  # fmt: skip
