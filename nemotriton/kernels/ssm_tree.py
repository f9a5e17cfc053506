"""The kernel of `ssm_replay` for draft trees: a token sees its ancestors alone.

Columns t are the new tokens of a sequence, rows a the same as ancestors. Each path from the root to
a leaf is a chain, computed as `ssm_chain.py` does, so that a token has the bits that it has in a
chain. One that is on several paths is written by each, with the same bits.
"""

import triton
import triton.language as tl

from nemotriton.kernels.ssm_chain import _answer_window
from nemotriton.kernels.ssm_window import (
    _begin,
    _fetch,
    _keep,
    _keep_steps,
    _load_steps,
    _program,
    _rows,
    _settled,
    _steps,
)


@triton.jit
def _ancestors(parents_idx, a, t, count):
    """Whether row a [A] lies on the way to column t [T], which is its own last stop."""
    on_way = a[:, None] == t[None, :]
    up = tl.load(parents_idx + t, mask=t < count, other=-1).to(tl.int64)
    for _ in range(count - 1):
        on_way = on_way | (a[:, None] == up[None, :])
        up = tl.load(parents_idx + up, mask=up >= 0, other=-1).to(tl.int64)
    return on_way


@triton.jit
def _on_path(path, here, a, place):
    """Which token of a path stands at each place [L]; 0 where none does."""
    stop = path[:, None] & (here[:, None] == place[None, :])
    return tl.sum(tl.where(stop, a[:, None], 0), 0)


@triton.jit
def _answer_path(
    b, on_way, index, here, state, ring, tokens, strides, limits, order_idx, A_at, D_at, noise,
    position, p0, held, drop, on, y_ptr, y_t,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, SLICE_P: tl.constexpr, AHEAD: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Outputs of the tokens on the way to token b, which no other follows."""
    j, t, a = tl.arange(0, L), tl.arange(0, BLOCK_T), tl.arange(0, here.shape[0])
    kept = held - drop
    path = tl.sum(tl.where(on_way & (t == b)[None, :], 1, 0), 1) > 0  # [A]
    mine = tl.sum(tl.where((a[:, None] == t[None, :]) & path[:, None], 1, 0), 0) > 0  # [T]
    end = tl.sum(tl.where(t == b, index, 0), 0)
    for w in tl.range(0, tl.where(end >= L, 2, 1), disable_licm=True):
        entry, place = w * L + j, index - w * L
        entries = _path_entries(entry, kept, end, on, path, here, a)
        at = tl.load(order_idx + drop + entry, mask=entry < kept, other=0).to(tl.int64)
        answered = (t, place, mine & (place >= 0) & (place < L))
        before = _path_entries(j, kept, end, on & (w > 0), path, here, a)
        _answer_window(
            entries, at, answered, end + w >= 0, w > 0, before, drop, False, state, ring, tokens,
            strides, limits, order_idx, A_at, D_at, noise, position, p0, held, on, y_ptr, y_t,
            False, False, P, N, L, BLOCK_P, BLOCK_N, SLICE_P, AHEAD, True, UPDATE,
        )  # fmt: skip


@triton.jit
def _path_entries(entry, kept, end, on, path, here, a):
    """Entries of a path's window: their token, whether the ring has them, whether they are new."""
    return _on_path(path, here, a, entry), entry < kept, (entry >= kept) & (entry <= end) & on


@triton.jit(do_not_specialize=["heads_per_group", "layer"])
def _replay_tree(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, y_ptr, state_ptr, scales_ptr,
    x_ring, dt_ring, B_ring, seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx, order_idx,
    parents_idx, x_t, x_h, dt_t, B_t, B_g, C_t, C_g,
    state_slot, scales_slot, x_slot, dt_slot, B_slot, H, heads_per_group, low, high, layer,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    UPDATE: tl.constexpr, SLICE_P: tl.constexpr, AHEAD: tl.constexpr, FETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T tokens a sequence, up to L in a row, each behind any earlier one."""
    s, head, p0, A_at, D_at, bias_at = _program(A_ptr, D_ptr, bias_ptr, H, P, BLOCK_P)
    if PDL:
        tl.extra.cuda.gdc_wait()
    found, ring, tokens = _begin(
        s, head, head // heads_per_group, x_ptr, dt_ptr, B_ptr, C_ptr, x_ring, dt_ring, B_ring,
        seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx,
        x_t, x_h, dt_t, B_t, B_g, C_t, C_g, x_slot, dt_slot, B_slot, P, N, R,
    )  # fmt: skip
    start, count, slot, on, held, position = found
    limits, strides = (bias_at, low, high), (x_t, dt_t, B_t, C_t)
    noise = (seeds_ptr, s, layer, head * P)
    if scales_ptr is not None:
        scales_ptr += slot * scales_slot + head * P
    state = (state_ptr + slot * state_slot + head * P * N, scales_ptr)
    y_ptr, y_t, order_idx = y_ptr + (start * H + head) * P, H * P, order_idx + s * R
    p = p0 + tl.arange(0, BLOCK_P)
    a, t = tl.arange(0, BLOCK_T if BLOCK_T > 16 else 16), tl.arange(0, BLOCK_T)
    last = position + (L - 1)  # of the tokens of the ring's first window
    if FETCH:
        _fetch(state[0] + p0 * N, ring[1], on, tl.minimum(P - p0, BLOCK_P), N, R, BLOCK_P)
    drop = _settled(state, ring, order_idx, A_at, noise, last, p0, held,
                    P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
    kept = held - drop
    on_way = _ancestors(parents_idx + start, a, t, count)
    index = kept + tl.sum(on_way.to(tl.int32), 0) - 1  # the place behind the stored state, [T]
    here = tl.sum(tl.where(a[:, None] == t[None, :], index[None, :], 0), 1)  # the same, [A]
    below = tl.sum(on_way.to(tl.int32), 1)  # [A]: of tokens, itself one of them
    for b in tl.range(0, count, disable_licm=True):
        if tl.sum(tl.where(a == b, below, 0), 0) == 1:
            _answer_path(b, on_way, index, here, state, ring, tokens, strides, limits, order_idx,
                         A_at, D_at, noise, last + drop, p0, held, drop, on, y_ptr, y_t,
                         P, N, L, BLOCK_P, BLOCK_N, BLOCK_T, SLICE_P, AHEAD, UPDATE)  # fmt: skip
    if UPDATE:
        new = (a < count) & on
        place = tl.load(order_idx + held + a, mask=new, other=0).to(tl.int64)
        _keep(ring[0], place, _rows(tokens[0], a, x_t, p, new, P), p, new, P)
        if p0 == 0:
            steps = _load_steps(ring[1], place, tokens[1], a, dt_t, a < 0, new, limits, on, True)
            step = _steps(steps, a < 0, new, limits)
            one_head = head % heads_per_group == 0
            _keep_steps(ring, place, step, a, new, tokens[2], B_t, True, one_head, N, BLOCK_N)
