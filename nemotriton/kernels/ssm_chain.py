"""The kernel of `ssm_replay` for chains, of which a tree's paths are made too (`ssm_tree.py`).

How states and inputs are read and stored: `ssm_window.py`.
"""

import triton
import triton.language as tl

from nemotriton.kernels.dependent import prefetch
from nemotriton.kernels.ssm_products import k_order, load_rows, scores
from nemotriton.kernels.ssm_window import (
    SLICE,
    _begin,
    _behind_ring,
    _decay,
    _entries,
    _for_state,
    _inflow,
    _keep,
    _keep_steps,
    _left,
    _outputs,
    _places,
    _program,
    _put,
    _read,
    _read_border,
    _rows,
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
    ring, at, entries, answered, tokens, strides, limits, A, D, on, state_ptr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """A window of entries (new token at each [L], whether the ring has it at `at`, whether it is
    new), for tokens answered (which [T], their places in it, whether it answers them): the step
    sizes [L], and of y (token, whether answered, C [T, N], weights [L, T], left [T], seen)."""
    _, dt_ring, B_ring = ring
    _, dt_ptr, B_ptr, C_ptr = tokens
    _, dt_t, B_t, C_t = strides
    row, old, new = entries
    token, place, wanted = answered
    j = tl.arange(0, row.shape[0])
    step = _steps(dt_ring, at, dt_ptr, row, dt_t, old, new, limits, on, DRAFTS)
    C_at, begin = C_ptr + token * C_t, _places(B_ring, at, B_ptr, row, B_t, old, N)
    B = load_rows(begin, old | new, N, BLOCK_N, B_ptr, N == BLOCK_N)
    C = load_rows(C_at, wanted & on, N, BLOCK_N, B_ptr, N == BLOCK_N)
    weights, left = _weights(step, A, D, B, C, place)
    C = _for_state(C, C_at, wanted & on, B_ptr, state_ptr, N, BLOCK_N)
    return step, (token, wanted, C, weights, left, j[:, None] <= place[None, :])


@triton.jit
def _fetch(state_ptr, dt_ring, slot, rows, N: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Bring `rows` of a stored state near, and the step sizes that a head's ring holds."""
    LINE: tl.constexpr = 1024 // state_ptr.dtype.element_ty.primitive_bitwidth
    if slot >= 0:
        prefetch(state_ptr + tl.minimum(tl.arange(0, BLOCK_P * N // LINE) * LINE, rows * N - 1))
        prefetch(dt_ring + tl.arange(0, 2) * (R - 1))


@triton.jit
def _answer(
    h, scale, entries, answer, state, ring, at, tokens, x_t, p, y_ptr, y_t,
    P: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Rows p of a window's outputs from those of the stored state, and of x to the ring."""
    row, old, new = entries
    token, wanted, C, weights, left, seen = answer
    x = _entries(ring[0], at, tokens[0], row, x_t, p, old, new, P)
    y = _read(h, scale, state, C, tokens[2])
    y = _outputs(y, x, weights, left, seen, DRAFTS)
    _put(y, y_ptr, token, y_t, p, wanted, P)
    _keep(ring[0], at, x, p, new, P)


@triton.jit
def _answers(
    h, scale, entries, answer, state, ring, at, tokens, x_t, p0, on, y_ptr, y_t,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICE_P: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """All rows of the program at once, or SLICE_P at a time, which are then read here: what little
    a program holds leaves room for more of them."""
    if SLICE_P:
        for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE_P):
            p = p0 + i + tl.arange(0, SLICE_P)
            some, its_scale = _stored_in_order(state, p, on, P, N, BLOCK_N)
            _answer(some, its_scale, entries, answer, state, ring, at, tokens, x_t, p, y_ptr, y_t,
                    P, DRAFTS)  # fmt: skip
    else:
        p = p0 + tl.arange(0, BLOCK_P)
        _answer(h, scale, entries, answer, state, ring, at, tokens, x_t, p, y_ptr, y_t, P, DRAFTS)


@triton.jit
def _trial(
    entries, answer, state, ring, at, tokens, strides, order_idx, A, noise, position, p0, held, on,
    y_ptr, y_t, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Outputs of a window a few rows of the state at a time, where nothing is stored."""
    row, old, new = entries
    token, wanted, C, weights, left, seen = answer
    n = tl.arange(0, BLOCK_N)
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        h, scale = _stored(state, p, n, on, P, N)
        h, scale = _behind_ring(
            h, scale, state, ring, order_idx, A, noise, position, p, n, held, P, N, L, BLOCK_N
        )
        x = _entries(ring[0], at, tokens[0], row, strides[0], p, old, new, P)
        product = _read(k_order(h, state[0]), scale, state, C, tokens[2])
        y = _outputs(product, x, weights, left, seen, True)
        _put(y, y_ptr, token, y_t, p, wanted, P)


@triton.jit
def _beyond(
    entries, step, theirs, answered, state, ring, at, place, tokens, strides, limits, order_idx, A,
    D, noise, position, p0, held, on, y_ptr, y_t, one_tile, one_head,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """The tokens beyond the border that the window of `entries` ends, a window of `theirs`.

    Its state is worked out a few rows at a time, from what is stored. position: of its token.
    place: where the ring keeps theirs, or None where it is not to."""
    x_ring, _, _ = ring
    x_ptr, _, B_ptr, C_ptr = tokens
    x_t, _, B_t, C_t = strides
    row, old, new = entries
    rows, _, are_new = theirs
    inflow, outflow = _inflow(step, A)
    steps, answer = _window(
        ring, at, theirs, answered, tokens, strides, limits, A, D, on, state[0], N, BLOCK_N, True
    )
    token, wanted, _, weights, left, seen = answer
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        x = _entries(x_ring, at, x_ptr, row, x_t, p, old, new, P)
        product = _read_border(
            state, ring, order_idx, A, noise, position, p, held, on, x, inflow, outflow, entries,
            at, B_ptr, B_t, C_ptr + token * C_t, wanted, P, N, L, BLOCK_N, UPDATE,
        )  # fmt: skip
        x = _rows(x_ptr, rows, x_t, p, are_new, P)
        _put(_outputs(product, x, weights, left, seen, True), y_ptr, token, y_t, p, wanted, P)
        if place is not None:
            _keep(x_ring, place, x, p, are_new, P)
    if place is not None:
        _keep_steps(ring, place, steps, rows, are_new, B_ptr, B_t, one_tile, one_head, N, BLOCK_N)


@triton.jit
def _replay_chain(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, y_ptr, state_ptr, scales_ptr,
    x_ring, dt_ring, B_ring, seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx, order_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, state_slot, scales_slot, x_slot, dt_slot, B_slot,
    H, heads_per_group, low, high, layer,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    DRAFTS: tl.constexpr, UPDATE: tl.constexpr, SLICE_P: tl.constexpr, FETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T tokens a sequence, each behind the one before it; DRAFTS: more than one."""
    s, head, p0, A, D, bias = _program(A_ptr, D_ptr, bias_ptr, H, P, BLOCK_P)
    if PDL:
        tl.extra.cuda.gdc_wait()
    found, ring, tokens = _begin(
        s, head, head // heads_per_group, x_ptr, dt_ptr, B_ptr, C_ptr, x_ring, dt_ring, B_ring,
        seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx,
        x_t, x_h, dt_t, B_t, B_g, C_t, C_g, x_slot, dt_slot, B_slot, P, N, R,
    )  # fmt: skip
    start, count, slot, on, held, position = found
    limits, strides = (bias, low, high), (x_t, dt_t, B_t, C_t)
    noise, last = (seeds_ptr, s, layer, head * P), position + (L - 1)  # of the first window
    if scales_ptr is not None:
        scales_ptr += slot * scales_slot + head * P
    state = (state_ptr + slot * state_slot + head * P * N, scales_ptr)
    y_ptr, y_t, order_idx = y_ptr + (start * H + head) * P, H * P, order_idx + s * R
    j, one_tile, one_head = tl.arange(0, L), p0 == 0, (p0 == 0) & (head % heads_per_group == 0)
    if FETCH:
        _fetch(state[0] + p0 * N, ring[1], slot, tl.minimum(P - p0, BLOCK_P), N, R, BLOCK_P)
    drop = _settled(
        state, ring, order_idx, A, noise, last, p0, held, P, N, L, BLOCK_P, BLOCK_N, UPDATE
    )
    kept = held - drop
    h, scale = None, None
    if UPDATE and not SLICE_P:
        h, scale = _stored_in_order(state, p0 + tl.arange(0, BLOCK_P), on, P, N, BLOCK_N)
    t, row, old = tl.arange(0, BLOCK_T), j - kept, j < kept
    new = (j >= kept) & (row < count) & on
    at = tl.load(order_idx + drop + j, mask=(old | (row < count)) & on, other=0).to(tl.int64)
    entries, answered = (row, old, new), (t, kept + t, (t < count) & (kept + t < L))
    if FETCH:
        prefetch(_places(ring[0], at, tokens[0], tl.where(new, row, 0), x_t, old, P) + p0)
    step, answer = _window(ring, at, entries, answered, tokens, strides, limits, A, D, on,
                           state_ptr, N, BLOCK_N, DRAFTS)  # fmt: skip
    if UPDATE:
        _answers(h, scale, entries, answer, state, ring, at, tokens, x_t, p0, on, y_ptr, y_t,
                 P, N, BLOCK_P, BLOCK_N, SLICE_P, DRAFTS)  # fmt: skip
        _keep_steps(ring, at, step, row, new, tokens[2], B_t, one_tile, one_head, N, BLOCK_N)
    else:
        _trial(entries, answer, state, ring, at, tokens, strides, order_idx, A, noise, last, p0,
               held, on, y_ptr, y_t, P, N, L, BLOCK_P, BLOCK_N)  # fmt: skip
    if DRAFTS:  # noqa: SIM102
        if kept + count > L:
            first = L - kept  # of the tokens beyond the border
            row, new = first + j, (first + j < count) & on
            theirs, answered = (row, j < 0, new), (first + t, t, first + t < count)
            place = tl.load(order_idx + drop + L + j, mask=new, other=0).to(tl.int64)
            _beyond(entries, step, theirs, answered, state, ring, at, place if UPDATE else None,
                    tokens, strides, limits, order_idx, A, D, noise, last + drop, p0, held, on,
                    y_ptr, y_t, one_tile, one_head, P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
