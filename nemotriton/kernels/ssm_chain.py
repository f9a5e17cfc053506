"""The kernel of `ssm_replay` for chains; what it shares with that for trees: `ssm_window.py`."""

import triton
import triton.language as tl

from nemotriton.kernels.ssm_products import k_order, load_rows, scores
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
    _places,
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
def _weights(step, A, D, B, C, place):
    """What of x of entry j is in y of the token at place[t], [L, T], and what of the state, [T]."""
    j, place = tl.arange(0, step.shape[0])[:, None], place[None, :]
    way = tl.cumsum(_decay(step, A), 0)[:, None]
    to_token = tl.sum(tl.where(j == place, way, 0), 0)
    weights = scores(B, C) * step[:, None] * _left(to_token[None, :] - way)
    weights = tl.where(j <= place, weights, 0.0)
    weights = tl.where(j == place, weights + D, weights)
    return weights, _left(to_token)


@triton.jit
def _window(
    ring, at, tokens, strides, limits, A, D, kept, first, count, on, state_ptr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, L: tl.constexpr, BLOCK_T: tl.constexpr,
    DRAFTS: tl.constexpr,
):  # fmt: skip
    """A window of `kept` entries of the ring, at its places `at` [L], and of the tokens from
    `first` on: (new token at each entry [L], whether one is there, step sizes [L]), and for tokens
    [T] of y: (row, whether the window answers it, C [T, N], weights [L, T], left [T], seen)."""
    _, dt_ring, B_ring = ring
    _, dt_ptr, B_ptr, C_ptr = tokens
    _, dt_t, B_t, C_t = strides
    j, t = tl.arange(0, L), tl.arange(0, BLOCK_T)
    row = j - kept + first
    old = j < kept
    new = (j >= kept) & (row < count) & on
    step = _steps(dt_ring, at, dt_ptr, row, dt_t, old, new, limits, on, DRAFTS)
    token, place = first + t, kept + t
    wanted = (token < count) & (place < L)
    C_at, begin = C_ptr + token * C_t, _places(B_ring, at, B_ptr, row, B_t, old, N)
    B = load_rows(begin, old | new, N, BLOCK_N, B_ptr, N == BLOCK_N)
    C = load_rows(C_at, wanted & on, N, BLOCK_N, B_ptr, N == BLOCK_N)
    weights, left = _weights(step, A, D, B, C, place)
    C = _for_state(C, C_at, wanted & on, B_ptr, state_ptr, N, BLOCK_N)
    return (row, old, new, step), (token, wanted, C, weights, left, j[:, None] <= place[None, :])


@triton.jit
def _trial(
    entries, answer, state, ring, at, x_ptr, x_t, order_idx, A, noise, position, p0, held, on,
    y_ptr, y_t, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Outputs of a window a few rows of the state at a time, where nothing is stored."""
    row, old, new, _ = entries
    token, wanted, C, weights, left, seen = answer
    n = tl.arange(0, BLOCK_N)
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        h, scale = _stored(state, p, n, on, P, N)
        h, scale = _behind_ring(
            h, scale, state, ring, order_idx, A, noise, position, p, n, held, P, N, L, BLOCK_N
        )
        x = _entries(ring[0], at, x_ptr, row, x_t, p, old, new, P)
        product = _read(k_order(h, state[0]), scale, state[1], C)
        y = _outputs(product, x, weights, left, seen, True)
        _put(y, y_ptr, token, y_t, p, wanted, P)


@triton.jit
def _beyond(
    entries, state, ring, at, tokens, strides, limits, order_idx, A, D, noise, position, p0, drop,
    held, count, on, y_ptr, y_t, one_tile, one_head,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """The tokens beyond the border that the window of `entries` ends.

    Its state is worked out a few rows at a time, from what is stored. position: of its token."""
    x_ring, dt_ring, B_ring = ring
    x_ptr, _, B_ptr, C_ptr = tokens
    x_t, _, B_t, C_t = strides
    row, old, new, step = entries
    n, j = tl.arange(0, BLOCK_N), tl.arange(0, L)
    inflow, outflow = _inflow(step, A)
    first = L - (held - drop)
    is_new = (first + j < count) & on
    place = tl.load(order_idx + drop + L + j, mask=is_new, other=0).to(tl.int64)
    theirs, answer = _window(
        ring, place, tokens, strides, limits, A, D, first * 0, first, count, on, state[0],
        N, BLOCK_N, L, BLOCK_T, True,
    )  # fmt: skip
    token, wanted, _, weights, left, seen = answer
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        x = _entries(x_ring, at, x_ptr, row, x_t, p, old, new, P)
        product = _read_border(
            state, ring, order_idx, A, noise, position, p, held, on, x, inflow, outflow, entries,
            at, B_ptr, B_t, C_ptr + token * C_t, wanted, P, N, L, BLOCK_N, UPDATE,
        )  # fmt: skip
        x = _rows(x_ptr, first + j, x_t, p, is_new, P)
        _put(_outputs(product, x, weights, left, seen, True), y_ptr, token, y_t, p, wanted, P)
        if UPDATE:
            _keep(x_ring, place, x, p, is_new, P)
    if UPDATE:
        tl.store(dt_ring + place, theirs[3], mask=is_new & one_tile)
        if one_head:
            _keep(B_ring, place, _rows(B_ptr, first + j, B_t, n, is_new, N), n, is_new, N)


@triton.jit
def _replay_chain(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, y_ptr, state_ptr, scales_ptr,
    x_ring, dt_ring, B_ring, seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx, order_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, state_slot, scales_slot, x_slot, dt_slot, B_slot,
    H, heads_per_group, low, high, layer,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    DRAFTS: tl.constexpr, UPDATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T tokens a sequence, each behind the one before it; DRAFTS: more than one."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p0, head, s = (pid % tiles * BLOCK_P).to(tl.int32), pid // tiles % H, pid // tiles // H
    group = head // heads_per_group
    one_tile = p0 == 0
    one_head = one_tile & (head % heads_per_group == 0)
    A, D = tl.load(A_ptr + head).to(tl.float32), tl.load(D_ptr + head).to(tl.float32)
    limits = (tl.load(bias_ptr + head).to(tl.float32), low, high)
    if PDL:
        tl.extra.cuda.gdc_wait()
    p, n, j = p0 + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, L)
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
    filled = ((j < kept) | (j - kept < count)) & on
    at = tl.load(order_idx + drop + j, mask=filled, other=0).to(tl.int64)
    entries, answer = _window(ring, at, tokens, strides, limits, A, D, kept, kept * 0, count, on,
                              state_ptr, N, BLOCK_N, L, BLOCK_T, DRAFTS)  # fmt: skip
    row, old, new, step = entries
    if UPDATE:
        token, wanted, C, weights, left, seen = answer
        x = _entries(ring[0], at, tokens[0], row, x_t, p, old, new, P)
        y = _read(h, scale, state[1], C)
        y = _outputs(y, x, weights, left, seen, DRAFTS)
        _put(y, y_ptr, token, y_t, p, wanted, P)
        _keep(ring[0], at, x, p, new, P)
        tl.store(ring[1] + at, step, mask=new & one_tile)
        if one_head:
            _keep(ring[2], at, _rows(tokens[2], row, B_t, n, new, N), n, new, N)
    else:
        _trial(entries, answer, state, ring, at, tokens[0], x_t, order_idx, A, noise, last, p0,
               held, on, y_ptr, y_t, P, N, L, BLOCK_P, BLOCK_N)  # fmt: skip
    if DRAFTS:  # noqa: SIM102
        if kept + count > L:
            _beyond(entries, state, ring, at, tokens, strides, limits, order_idx, A, D, noise,
                    last + drop, p0, drop, held, count, on, y_ptr, y_t, one_tile, one_head,
                    P, N, L, BLOCK_P, BLOCK_N, BLOCK_T, UPDATE)  # fmt: skip
