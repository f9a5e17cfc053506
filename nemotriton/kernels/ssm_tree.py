"""The kernel of `ssm_replay` for draft trees: a token sees its ancestors alone.

Columns t are the new tokens of a sequence, rows a the same as ancestors. Up to the border all
continue from the stored state and the ring; beyond it every token that stands on the border has a
state of its own, which is folded along its own path for the tokens below it. The ring and the new
tokens are products of their own, since tokens of one depth share a place of the window: otherwise
as in `ssm_window.py`, and at nearly its price.
"""

import triton
import triton.language as tl

from nemotriton.kernels.ssm_products import k_order, load_rows, scores, weighted
from nemotriton.kernels.ssm_window import (
    SLICE,
    _behind_ring,
    _decay,
    _entries,
    _for_state,
    _head,
    _inflow,
    _keep,
    _left,
    _outputs,
    _put,
    _read,
    _read_border,
    _rows,
    _sequence,
    _settled,
    _steps,
    _stored,
    _stored_in_order,
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
def _turned(values, a, t):
    """values [T] of tokens as a vector [A] of rows."""
    return tl.sum(tl.where(a[:, None] == t[None, :], values[None, :], 0), 1)


@triton.jit
def _tree(
    ring, at, tokens, strides, limits, A, D, on_way, a, t, kept, count, on, state_ptr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Step sizes of the new tokens [A]; the decay on the way to each, in units, [T]; and (C, what
    y takes of the new tokens [A, T], of the ring's entries [L, T] and of the state [T], on_way)."""
    _, dt_ring, B_ring = ring
    _, dt_ptr, B_ptr, C_ptr = tokens
    _, dt_t, B_t, C_t = strides
    j = tl.arange(0, L)
    new, none = (a < count) & on, a < 0
    step = _steps(dt_ring, a.to(tl.int64), dt_ptr, a, dt_t, none, new, limits, on, True)
    way = tl.sum(tl.where(on_way, _decay(step, A)[:, None], 0), 0)
    way_here = _turned(way, a, t)
    C = load_rows(C_ptr + t * C_t, (t < count) & on, N, BLOCK_N, B_ptr, N == BLOCK_N)
    B = load_rows(B_ptr + a * B_t, new, N, BLOCK_N, B_ptr, N == BLOCK_N)
    weights = scores(B, C) * step[:, None] * _left(way[None, :] - way_here[:, None])
    weights = tl.where(on_way, weights, 0.0)
    weights = tl.where(a[:, None] == t[None, :], weights + D, weights)
    old_step = tl.load(dt_ring + at, mask=j < kept, other=0.0)
    decay = _decay(old_step, A)
    all = tl.sum(decay, 0)
    later = all - tl.cumsum(decay, 0)
    B = load_rows(B_ring + at * N, j < kept, N, BLOCK_N, B_ptr, N == BLOCK_N)
    old_weights = scores(B, C) * old_step[:, None] * _left(later[:, None] + way[None, :])
    C = _for_state(C, C_ptr + t * C_t, (t < count) & on, B_ptr, state_ptr, N, BLOCK_N)
    return step, way, (C, weights, old_weights, _left(all + way), on_way)


@triton.jit
def _until(
    h, scale, scales_ptr, ring, at, tokens, strides, p, answer, y_ptr, y_t, a, t, index, kept,
    count, on, P: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Write rows p of y up to the border, from the stored state and the ring's entries `at`."""
    C, weights, old_weights, left, on_way = answer
    j = tl.arange(0, L)
    x = _rows(tokens[0], a, strides[0], p, (a < count) & on, P)
    y = _outputs(_read(h, scale, scales_ptr, C), x, weights, left, on_way, True)
    y += weighted(_rows(ring[0], at, P, p, j < kept, P), old_weights)
    _put(y, y_ptr, t, y_t, p, (t < count) & (index < L), P)


@triton.jit
def _trial(
    state, ring, at, tokens, strides, order_idx, A, noise, position, p0, held, on, answer,
    y_ptr, y_t, a, t, index, kept, count, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same where nothing is stored, a few rows of the state at a time."""
    n = tl.arange(0, BLOCK_N)
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        h, scale = _stored(state, p, n, on, P, N)
        h, scale = _behind_ring(
            h, scale, state, ring, order_idx, A, noise, position, p, n, held, P, N, L, BLOCK_N
        )
        _until(k_order(h, state[0]), scale, state[1], ring, at, tokens, strides, p, answer,
               y_ptr, y_t, a, t, index, kept, count, on, P, L)  # fmt: skip


@triton.jit
def _below(
    b, state, ring, at, tokens, strides, limits, order_idx, A, noise, position, p0, held, kept,
    on, a, t, index, way, on_way, answer, y_ptr, y_t, count,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """The tokens below token b, which stands on the border, from the state behind it."""
    x_ring, dt_ring, _ = ring
    x_ptr, dt_ptr, B_ptr, C_ptr = tokens
    x_t, dt_t, B_t, C_t = strides
    weights, j, here = answer[1], tl.arange(0, L), _turned(index, a, t)
    path = tl.sum(tl.where((t[None, :] == b) & on_way, 1, 0), 1)  # [A]: on the way to b
    stop = (path[:, None] != 0) & (here[:, None] == j[None, :])
    row = tl.sum(tl.where(stop, a[:, None], 0), 0)  # [L]: the new token at entry j
    old, new = j < kept, (j >= kept) & on
    step = _steps(dt_ring, at, dt_ptr, row, dt_t, old, new, limits, on, True)
    inflow, outflow = _inflow(step, A)
    under = tl.sum(tl.where((a[:, None] == b) & on_way, 1, 0), 0)  # [T]: below b
    wanted = (under != 0) & (index >= L) & (t < count)
    left = _left(way - tl.sum(tl.where(t == b, way, 0), 0))
    seen = on_way & (here >= L)[:, None]
    weights = tl.where(seen, weights, 0.0)
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        x = _entries(x_ring, at, x_ptr, row, x_t, p, old, new, P)
        product = _read_border(
            state, ring, order_idx, A, noise, position, p, held, on, x, inflow, outflow,
            (row, old, new, step), at, B_ptr, B_t, C_ptr + t * C_t, wanted, P, N, L, BLOCK_N,
            UPDATE,
        )  # fmt: skip
        x = _rows(x_ptr, a, x_t, p, (a < count) & on, P)
        _put(_outputs(product, x, weights, left, seen, True), y_ptr, t, y_t, p, wanted, P)


@triton.jit
def _replay_tree(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, y_ptr, state_ptr, scales_ptr,
    x_ring, dt_ring, B_ring, seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx, order_idx,
    parents_idx, x_t, x_h, dt_t, B_t, B_g, C_t, C_g,
    state_slot, scales_slot, x_slot, dt_slot, B_slot, H, heads_per_group, low, high, layer,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    UPDATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T tokens a sequence, up to L in a row, each behind any earlier one."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p0, head, s = (pid % tiles * BLOCK_P).to(tl.int32), pid // tiles % H, pid // tiles // H
    group = head // heads_per_group
    A, D = tl.load(A_ptr + head).to(tl.float32), tl.load(D_ptr + head).to(tl.float32)
    limits = (tl.load(bias_ptr + head).to(tl.float32), low, high)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p, n, j = p0 + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, L)
    a, t = tl.arange(0, BLOCK_T if BLOCK_T > 16 else 16), tl.arange(0, BLOCK_T)
    start, count, slot, on, held, position = _sequence(s, cu_idx, slots_idx, counts_idx, seeds_ptr,
                                                       lengths_idx)  # fmt: skip
    ring, tokens = _head(head, group, slot, start, x_ptr, dt_ptr, B_ptr, C_ptr, x_ring, dt_ring,
                         B_ring, x_t, x_h, dt_t, B_t, B_g, C_t, C_g, x_slot, dt_slot, B_slot,
                         P, N, R)  # fmt: skip
    if scales_ptr is not None:
        scales_ptr += slot * scales_slot + head * P
    state = (state_ptr + slot * state_slot + head * P * N, scales_ptr)
    strides, noise = (x_t, dt_t, B_t, C_t), (seeds_ptr, s, layer, head * P)
    y_ptr, y_t, order_idx = y_ptr + (start * H + head) * P, H * P, order_idx + s * R
    last = position + (L - 1)  # of the tokens of the ring's first window
    drop = _settled(state, ring, order_idx, A, noise, last, p0, held,
                    P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
    kept = held - drop
    if UPDATE:
        h, scale = _stored_in_order(state, p, on, P, N, BLOCK_N)
    at = tl.load(order_idx + drop + j, mask=j < kept, other=0).to(tl.int64)
    on_way = _ancestors(parents_idx + start, a, t, count)
    index = kept + tl.sum(on_way.to(tl.int32), 0) - 1  # the place behind the stored state
    step, way, answer = _tree(ring, at, tokens, strides, limits, A, D, on_way, a, t, kept, count,
                              on, state_ptr, N, BLOCK_N, L)  # fmt: skip
    if UPDATE:
        _until(h, scale, state[1], ring, at, tokens, strides, p, answer, y_ptr, y_t, a, t, index,
               kept, count, on, P, L)  # fmt: skip
        new = (a < count) & on
        place = tl.load(order_idx + held + a, mask=new, other=0).to(tl.int64)
        _keep(ring[0], place, _rows(tokens[0], a, x_t, p, new, P), p, new, P)
        tl.store(ring[1] + place, step, mask=new & (p0 == 0))
        if (p0 == 0) & (head % heads_per_group == 0):
            _keep(ring[2], place, _rows(tokens[2], a, B_t, n, new, N), n, new, N)
    else:
        _trial(state, ring, at, tokens, strides, order_idx, A, noise, last, p0, held, on, answer,
               y_ptr, y_t, a, t, index, kept, count, P, N, L, BLOCK_P, BLOCK_N)  # fmt: skip
    if kept + count > L:
        for b in range(count):
            if (tl.sum(tl.where(t == b, index, 0), 0) == L - 1) & on:
                _below(b, state, ring, at, tokens, strides, limits, order_idx, A, noise,
                       last + drop, p0, held, kept, on, a, t, index, way, on_way,
                       answer, y_ptr, y_t, count, P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
