"""The kernel of `ssm_replay` for draft trees: the window's mask is each token's ancestors.

Rows t are the new tokens of a sequence, columns a the same as ancestors. Up to the border all
continue from the stored state and the ring; beyond it every token that stands on the border has a
state of its own, which is folded along its own path for the rows below it. Names as in
`ssm_window.py`.
"""

import triton
import triton.language as tl

from nemotriton.kernels.ssm_window import (
    SLICE,
    _entries,
    _fold,
    _inflow,
    _keep,
    _read,
    _rows,
    _scores,
    _sequence,
    _settled,
    _steps,
    _stored,
    _times,
)


@triton.jit
def _ancestors(parents_idx, t, count):
    """int32 [T, T]: 1 where column a lies on the way to row t, which is its own last stop."""
    on_way = (t[:, None] == t[None, :]).to(tl.int32)
    up = tl.load(parents_idx + t, mask=t < count, other=-1).to(tl.int64)
    for _ in range(count - 1):
        on_way = tl.where(up[:, None] == t[None, :], 1, on_way)
        up = tl.load(parents_idx + up, mask=up >= 0, other=-1).to(tl.int64)
    return on_way


@triton.jit
def _weights_of(step, A, B, C, D, on_way, t):
    """What of x of row a is in y of row t, and the decay [T] since the ring's last entry."""
    way = tl.sum(tl.where(on_way != 0, (step * A)[None, :], 0.0), 1)
    between = tl.minimum(way[:, None] - way[None, :], 0.0)
    weights = _scores(C, B) * step[None, :] * tl.exp(between)
    weights = tl.where(on_way != 0, weights, 0.0)
    return tl.where(t[None, :] == t[:, None], weights + D, weights), way


@triton.jit
def _put(y, y_ptr, t, stride, p, wanted, P: tl.constexpr):
    mask = wanted[:, None] & (p < P)[None, :]
    tl.store(y_ptr + t[:, None] * stride + p[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _below(
    b, h, scale, state, ring, tokens, strides, limits, at, A, noise, position, p0, kept, on,
    on_way, index, way, weights, C, y_ptr, y_t, t,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """The rows below row b, which stands on the border, from the state behind it."""
    x_ring, dt_ring, B_ring = ring
    x_ptr, dt_ptr, B_ptr = tokens
    x_t, dt_t, B_t = strides
    n, j = tl.arange(0, BLOCK_N), tl.arange(0, L)
    path = tl.sum(tl.where(t[:, None] == b, on_way, 0), 0)  # [a]: on the way to b
    places = tl.sum(tl.where(t[:, None] == t[None, :], index[:, None], 0), 0)
    stop = (path[None, :] != 0) & (places[None, :] == j[:, None])
    row = tl.sum(tl.where(stop, t[None, :], 0), 1)  # [j]: the new token at entry j
    old = j < kept
    new = (j >= kept) & on
    step = _steps(dt_ring, at, dt_ptr, row, dt_t, old, new, limits)
    B = _entries(B_ring, at, B_ptr, row, B_t, n, old, new, N)
    inflow, outflow = _inflow(step, A)
    under = tl.sum(tl.where(t[None, :] == b, on_way, 0), 1)
    wanted = (under != 0) & (index >= L)
    left = tl.exp(tl.minimum(way - tl.sum(tl.where(t == b, way, 0.0), 0), 0.0))
    weights = tl.where((places >= L)[None, :], weights, 0.0)
    WIDE: tl.constexpr = SLICE if UPDATE else BLOCK_P
    for i in range(0, tl.minimum(P - p0, BLOCK_P), WIDE):
        p = p0 + i + tl.arange(0, WIDE)
        if UPDATE:
            before, before_scale = _stored(state, p, n, on, P, N)
        else:
            before, before_scale = h, scale
        x = _entries(x_ring, at, x_ptr, row, x_t, p, old, new, P)
        border, border_scale = _fold(
            before, before_scale, x, inflow, outflow, B, state, noise, position, p, N, BLOCK_N
        )
        x = _rows(x_ptr, t, x_t, p, wanted | (index >= L), P)
        y = _read(C, border, border_scale, state[1]) * left[:, None] + _times(weights, x, 2)
        _put(y, y_ptr, t, y_t, p, wanted, P)


@triton.jit
def _until(
    h, scale, scales_ptr, ring, at, old, x, weights, way, C, A, y_ptr, y_t, t, p, wanted,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The rows up to the border, from the stored state and the ring's entries `at`."""
    x_ring, dt_ring, B_ring = ring
    n = tl.arange(0, BLOCK_N)
    decay_step = tl.load(dt_ring + at, mask=old, other=0.0)
    inflow, outflow = _inflow(decay_step, A)
    old_weights = _scores(C, _rows(B_ring, at, N, n, old, N)) * inflow[None, :]
    old_weights *= tl.exp(tl.minimum(way, 0.0))[:, None]
    y = _times(weights, x, 2) + _times(old_weights, _rows(x_ring, at, P, p, old, P), 2)
    y = tl.fma(_read(C, h, scale, scales_ptr), (outflow * tl.exp(way))[:, None], y)
    _put(y, y_ptr, t, y_t, p, wanted, P)


@triton.jit
def _replay_tree(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, y_ptr, state_ptr, scales_ptr,
    x_ring, dt_ring, B_ring, seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx, order_idx,
    parents_idx, x_t, x_h, dt_t, B_t, B_g, C_t, C_g,
    state_slot, scales_slot, x_slot, dt_slot, B_slot, H, heads_per_group, low, high, layer,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T tokens a sequence, up to L in a row, each behind any earlier one."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p0, head, s = (pid % tiles * BLOCK_P).to(tl.int32), pid // tiles % H, pid // tiles // H
    g = head // heads_per_group
    p, n, j = p0 + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, L)
    t = tl.arange(0, BLOCK_T)
    start, count, slot, on, held, position = _sequence(
        s, cu_idx, slots_idx, counts_idx, seeds_ptr, lengths_idx
    )
    A, D = tl.load(A_ptr + head).to(tl.float32), tl.load(D_ptr + head).to(tl.float32)
    limits = (tl.load(bias_ptr + head).to(tl.float32), low, high)
    noise = (seeds_ptr, s, layer, head * P)
    state_ptr += slot * state_slot + head * P * N
    if scales_ptr is not None:
        scales_ptr += slot * scales_slot + head * P
    state = (state_ptr, scales_ptr)
    x_ptr, dt_ptr = x_ptr + start * x_t + head * x_h, dt_ptr + start * dt_t + head
    B_ptr, C_ptr = B_ptr + start * B_t + g * B_g, C_ptr + start * C_t + g * C_g
    x_ring, dt_ring = x_ring + slot * x_slot + head * R * P, dt_ring + slot * dt_slot + head * R
    B_ring += slot * B_slot + g * R * N
    ring, tokens, strides = (x_ring, dt_ring, B_ring), (x_ptr, dt_ptr, B_ptr), (x_t, dt_t, B_t)
    y_ptr, y_t = y_ptr + (start * H + head) * P, H * P
    order_idx += s * R

    h, scale, drop = _settled(state, ring, order_idx, A, noise, position, p0, held, on,
                              P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
    kept = held - drop
    is_row, none, nowhere = t < count, t < 0, t.to(tl.int64)
    new = is_row & on
    step = _steps(dt_ring, nowhere, dt_ptr, t, dt_t, none, new, limits)
    B, C = _rows(B_ptr, t, B_t, n, new, N), _rows(C_ptr, t, C_t, n, new, N)
    x = _rows(x_ptr, t, x_t, p, new, P)
    on_way = _ancestors(parents_idx + start, t, count)
    index = kept + tl.sum(on_way, 1) - 1  # the place behind the stored state
    weights, way = _weights_of(step, A, B, C, D, on_way, t)
    at = tl.load(order_idx + drop + j, mask=j < kept, other=0).to(tl.int64)
    _until(h, scale, scales_ptr, ring, at, j < kept, x, weights, way, C, A, y_ptr, y_t, t, p,
           is_row & (index < L), P, N, L, BLOCK_N)  # fmt: skip
    last = position + drop + (L - 1)
    for b in range(count):
        if (tl.sum(tl.where(t == b, index, 0), 0) == L - 1) & on:
            _below(b, h, scale, state, ring, tokens, strides, limits, at, A, noise, last, p0, kept,
                   on, on_way, index, way, weights, C, y_ptr, y_t, t,
                   P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
    if UPDATE:
        place = tl.load(order_idx + held + t, mask=new, other=0).to(tl.int64)
        _keep(x_ring, place, x, p, new, P)
        tl.store(dt_ring + place, step, mask=new & (p0 == 0))
        _keep(B_ring, place, B, n, new & (p0 == 0) & (head % heads_per_group == 0), N)
