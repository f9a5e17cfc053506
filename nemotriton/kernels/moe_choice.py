"""The choice of experts for a block of tokens, as the router's kernels make it in registers.

Nothing is sorted: the K-th largest key of a row is found by bisection over the bits of the float32
choice, which ends as soon as exactly K keys are at or above the middle; then the lowest indices of
those equal to it are taken. A chosen expert's place among the ids is the number of chosen ones
before it. The sum behind `normalize` is taken in float64, where K float32 scores add exactly in any
order, so that no tile changes a weight. What is computed is in `moe_route`.
"""

import triton
import triton.language as tl

from nemotriton.kernels.order import NOTHING, order_bits, order_key

ABSENT = tl.constexpr(-(2**31))  # order bits of no expert: below those of NaN


@triton.jit
def _sigmoid(x):
    """The float32 nearest to sigmoid(x)."""
    x = x.to(tl.float64)
    e = tl.exp(-tl.abs(x))
    return (tl.where(x >= 0, 1.0, e) / (1.0 + e)).to(tl.float32)


@triton.jit
def _limit_groups(
    keys,
    choice,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """keys [BLOCK_T, BLOCK_G * BLOCK_S] with those outside the best groups set to ABSENT."""
    keys = tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_S])
    choice = tl.reshape(choice, [BLOCK_T, BLOCK_G, BLOCK_S])
    down = BLOCK_S - tl.arange(0, BLOCK_S)[None, None, :]
    ranked = (keys.to(tl.int64) << 32) + down  # no two are equal
    first = tl.max(ranked, 2)
    won = ranked == first[:, :, None]
    rest = tl.where(won, NOTHING, ranked)
    next_won = (rest == tl.max(rest, 2)[:, :, None]) & (keys != ABSENT)
    worth = tl.sum(tl.where(won, choice, 0.0), 2) + tl.sum(tl.where(next_won, choice, 0.0), 2)
    g = tl.arange(0, BLOCK_G)
    group_keys = tl.where((g < GROUPS)[None, :], order_key(worth, g[None, :]), NOTHING)
    kept = tl.zeros([BLOCK_T, BLOCK_G], tl.int32)
    for _ in range(TOP_GROUPS):
        hit = group_keys == tl.max(group_keys, 1)[:, None]
        kept = tl.where(hit, 1, kept)
        group_keys = tl.where(hit, NOTHING, group_keys)
    keys = tl.where((kept > 0)[:, :, None], keys, ABSENT)
    return tl.reshape(keys, [BLOCK_T, BLOCK_G * BLOCK_S])


@triton.jit
def _threshold(keys, K: tl.constexpr):
    """int32 [BLOCK_T]: in each row at least K keys are at or above it, and fewer above it.

    Between `low`, which K keys reach, and `high`, which fewer do, three bars are tried at a time:
    one sum counts for all of them. Where exactly K keys reach one, the row's search is over."""
    SMALL: tl.constexpr = keys.shape[1] < 1024
    BITS: tl.constexpr = 10 if SMALL else 16  # of a count
    COUNTS: tl.constexpr = tl.int32 if SMALL else tl.int64
    MASK: tl.constexpr = (1 << BITS) - 1
    low = tl.min(tl.where(keys == ABSENT, 2147483647, keys), 1).to(tl.int64)
    high = tl.max(keys, 1).to(tl.int64) + 1
    while tl.max(high - low, 0) > 1:
        step = tl.maximum((high - low) >> 2, 1)
        a = tl.minimum(low + step, high - 1)
        b = tl.minimum(low + 2 * step, high - 1)
        c = tl.minimum(low + 3 * step, high - 1)
        reached = (keys >= a.to(tl.int32)[:, None]).to(COUNTS)
        reached += (keys >= b.to(tl.int32)[:, None]).to(COUNTS) << BITS
        reached += (keys >= c.to(tl.int32)[:, None]).to(COUNTS) << (2 * BITS)
        counts = tl.sum(reached, 1)
        at_a, at_b, at_c = counts & MASK, (counts >> BITS) & MASK, counts >> (2 * BITS)
        high = tl.where(at_a < K, a, tl.where(at_b < K, b, tl.where(at_c < K, c, high)))
        low = tl.where(at_c >= K, c, tl.where(at_b >= K, b, tl.where(at_a >= K, a, low)))
        exact = (at_a == K) | (at_b == K) | (at_c == K)  # then the highest bar that K reach is one
        high = tl.where(exact, low + 1, high)
    return low.to(tl.int32)


@triton.jit
def _slots(keys, K: tl.constexpr):
    """The place j of each of the K largest keys among the ids of its row; -1 of the others."""
    bar = _threshold(keys, K)[:, None]
    above, equal = (keys > bar).to(tl.int32), (keys == bar).to(tl.int32)
    counts = above + (equal << 16)  # both are counted in one scan
    before = tl.cumsum(counts, 1) - counts
    room = K - tl.sum(above, 1)[:, None]
    chosen = (above > 0) | ((equal > 0) & ((before >> 16) < room))
    return tl.where(chosen, (before & 0xFFFF) + tl.minimum(before >> 16, room), -1)


@triton.jit
def load_bias(bias_ptr, e, real):
    """fp32 biases of experts e; zeros without bias."""
    bias = tl.zeros(e.shape, tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + e, mask=real, other=0.0).to(tl.float32)
    return bias


@triton.jit
def expert_columns(
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr
):
    """(the expert in every column, whether there is one): groups of BLOCK_S columns, BLOCK_G."""
    column = tl.arange(0, BLOCK_G * BLOCK_S)
    e = column // BLOCK_S * SIZE + column % BLOCK_S
    return e, (column // BLOCK_S < GROUPS) & (column % BLOCK_S < SIZE)


@triton.jit
def route_tokens(
    logits_ptr, bias, t, T, e, real, logits_stride, part_stride, scale,
    PARTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(place among the ids or -1, weight), [BLOCK_T, columns], of tokens t; `real` columns hold
    experts e with these biases; logits are PARTS planes to be added."""
    live = t < T
    inside = live[:, None] & real[None, :]
    at = logits_ptr + (t * logits_stride)[:, None] + e[None, :]
    logits = tl.load(at, mask=inside, other=0.0)
    for _ in tl.static_range(PARTS - 1):
        at += part_stride
        logits += tl.load(at, mask=inside, other=0.0)
    score = _sigmoid(logits)
    choice = score + bias[None, :]
    keys = tl.where(real[None, :], order_bits(choice), ABSENT)
    if TOP_GROUPS < GROUPS:
        keys = _limit_groups(keys, choice, GROUPS, TOP_GROUPS, BLOCK_T, BLOCK_G, BLOCK_S)
    slot = tl.where(live[:, None], _slots(keys, K), -1)
    weight = tl.where(slot >= 0, score, 0.0)
    if NORMALIZE:
        total = tl.sum(weight.to(tl.float64), 1).to(tl.float32)
        weight = tl.div_rn(weight, (total + 1e-20)[:, None])
    return slot, weight * scale
