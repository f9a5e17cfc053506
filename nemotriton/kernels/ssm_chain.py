"""The kernel of `ssm_replay` for chains, of which a tree's paths are made too (`ssm_tree.py`).

How states and inputs are read and stored: `ssm_window.py`.
"""

import triton
import triton.language as tl

from nemotriton.kernels.dependent import prefetch
from nemotriton.kernels.ssm_products import in_order, k_order, load_tiles, scores
from nemotriton.kernels.ssm_window import (
    SLICE,
    _begin,
    _behind_ring,
    _decay,
    _entries,
    _fetch,
    _inflow,
    _keep,
    _keep_steps,
    _left,
    _load_steps,
    _order,
    _outputs,
    _places,
    _program,
    _put,
    _read,
    _read_border,
    _settled,
    _steps,
    _stored,
    _stored_tiles,
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
def _load_window(
    ring, at, entries, answered, tokens, strides, limits, A_at, D_at, on, state_ptr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """All that `_window` reads, on its way: what steps are made of, A, D, B, C, and C again where
    products with the state take other columns at a time than those with B."""
    _, dt_ring, B_ring = ring
    _, dt_ptr, B_ptr, C_ptr = tokens
    _, dt_t, B_t, C_t = strides
    row, old, new = entries
    token, _, wanted = answered
    B_at, C_at = _places(B_ring, at, B_ptr, row, B_t, old, N), C_ptr + token * C_t
    steps = _load_steps(dt_ring, at, dt_ptr, row, dt_t, old, new, limits, on, DRAFTS)
    A, D = tl.load(A_at), tl.load(D_at)
    B = load_tiles(B_at, old | new, N, BLOCK_N, B_ptr, N == BLOCK_N)
    C = load_tiles(C_at, wanted & on, N, BLOCK_N, B_ptr, N == BLOCK_N)
    for_state = C
    STATE: tl.constexpr = state_ptr.dtype.element_ty.primitive_bitwidth
    if B_ptr.dtype.element_ty.primitive_bitwidth != STATE:
        for_state = load_tiles(C_at, wanted & on, N, BLOCK_N, state_ptr, N == BLOCK_N)
    return steps, A, D, B, C, for_state


@triton.jit
def _window(loaded, entries, answered, tokens, limits, state_ptr):
    """A window of entries (new token at each [L], whether the ring has it, whether it is new), for
    tokens answered (which [T], their places in it, whether it answers them): the step sizes [L],
    and of y (token, whether answered, C [T, N], weights [L, T], left [T], seen)."""
    steps, A, D, B, C, for_state = loaded
    row, old, new = entries
    token, place, wanted = answered
    step = _steps(steps, old, new, limits)
    A, D = A.to(tl.float32), D.to(tl.float32)
    weights, left = _weights(step, A, D, in_order(B, tokens[2]), in_order(C, tokens[2]), place)
    seen = tl.arange(0, row.shape[0])[:, None] <= place[None, :]
    return step, (token, wanted, in_order(for_state, state_ptr), weights, left, seen)


@triton.jit
def _load_slice(
    p, entries, at, state, ring, tokens, x_t, on,
    P: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows p of a stored state, their scales, and x of a window's entries [L, rows]."""
    row, old, new = entries
    h, scale = _stored_tiles(state, p, on, P, N, BLOCK_N)
    return h, scale, _entries(ring[0], at, tokens[0], row, x_t, p, old & on, new & on, P)


@triton.jit
def _trial_slice(
    p, entries, at, state, ring, tokens, x_t, on, order_idx, A_at, noise, held, position,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same where nothing is stored, of the state behind the ring's first window."""
    row, old, new = entries
    n = tl.arange(0, BLOCK_N)
    h, scale = _stored(state, p, n, on, P, N)
    h, scale = _behind_ring(
        h, scale, state, ring, order_idx, A_at, noise, position, p, n, held, P, N, L, BLOCK_N
    )
    x = _entries(ring[0], at, tokens[0], row, x_t, p, old, new, P)
    return k_order(h, state[0]), scale, x


@triton.jit
def _answer_slices(
    first, entries, at, state, ring, tokens, x_t, on, answer, order_idx, A_at, noise, held,
    position, p0, y_ptr, y_t, keep,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICE_P: tl.constexpr, AHEAD: tl.constexpr, DRAFTS: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Outputs from the stored state, SLICE_P rows at a time: what little a program holds leaves
    room for more of them. AHEAD: a slice is on its way while the one before it is computed."""
    token, wanted, C, weights, left, seen = answer
    here = (entries, at, state, ring, tokens, x_t)
    rows, r = tl.minimum(P - p0, BLOCK_P), tl.arange(0, SLICE_P)
    if AHEAD:
        tiles, scale, x = first
    for i in range(0, rows, SLICE_P):
        p = p0 + i + r
        if AHEAD and SLICE_P < BLOCK_P:
            more = on & (i + SLICE_P < rows)
            next_tiles, next_scale, next_x = _load_slice(p + SLICE_P, *here, more, P, N, BLOCK_N)
        elif UPDATE and not AHEAD:
            tiles, scale, x = _load_slice(p, *here, on, P, N, BLOCK_N)
        if UPDATE:
            h = in_order(tiles, state[0])
        else:
            behind = (order_idx, A_at, noise, held, position)
            h, scale, x = _trial_slice(p, *here, on, *behind, P, N, L, BLOCK_N)
        product = _read(h, scale, state, C, tokens[2])
        y = _outputs(product, x, weights, left, seen, DRAFTS)
        _put(y, y_ptr, token, y_t, p, wanted, P)
        if keep:
            _keep(ring[0], at, x, p, entries[2], P)
        if AHEAD and SLICE_P < BLOCK_P:
            tiles, scale, x = next_tiles, next_scale, next_x


@triton.jit
def _answer_beyond(
    entries, at, state, ring, tokens, x_t, on, answer, before, drop, strides, limits,
    order_idx, A_at, noise, held, position, p0, y_ptr, y_t, keep,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Outputs from the state of the border behind the window `before`, a few rows at a time."""
    token, wanted, _, weights, left, seen = answer
    row, old, new = entries
    there = order_idx + drop + tl.arange(0, L)
    at_before = tl.load(there, mask=before[1], other=0).to(tl.int64)
    steps = _load_steps(ring[1], at_before, tokens[1], before[0], strides[1], before[1], before[2],
                        limits, on, True)  # fmt: skip
    inflow, outflow = _inflow(_steps(steps, before[1], before[2], limits), A_at)
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        product = _read_border(
            state, ring, order_idx, A_at, noise, position, p, held, on, inflow, outflow, before,
            at_before, tokens, strides, token, wanted, P, N, L, BLOCK_N, UPDATE,
        )  # fmt: skip
        x = _entries(ring[0], at, tokens[0], row, x_t, p, old, new, P)
        _put(_outputs(product, x, weights, left, seen, True), y_ptr, token, y_t, p, wanted, P)
        if keep:
            _keep(ring[0], at, x, p, new, P)


@triton.jit
def _answer_window(
    entries, at, answered, ready, beyond, before, drop, keep, state, ring, tokens, strides,
    limits, order_idx, A_at, D_at, noise, position, p0, held, on, y_ptr, y_t, one_tile, one_head,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SLICE_P: tl.constexpr, AHEAD: tl.constexpr, DRAFTS: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Outputs of the tokens answered from a window of `entries`.

    The state is the stored one or, `beyond`, that behind the window `before`, position being that
    window's last. ready: true, but not for the compiler. AHEAD: the first slice of the state is on
    its way while the window is worked out. keep: whether new entries go to the ring, at `at`."""
    row, _, new = entries
    x_t, _, B_t, _ = strides
    here = (entries, at, state, ring, tokens, x_t, on)
    window = _load_window(
        ring,
        at,
        entries,
        answered,
        tokens,
        strides,
        limits,
        A_at,
        D_at,
        on,
        state[0],
        N,
        BLOCK_N,
        DRAFTS,
    )
    first = None
    if AHEAD:
        first = _load_slice(p0 + tl.arange(0, SLICE_P), *here, P, N, BLOCK_N)
    # The compiler would put off what is loaded until it is needed, a wait for each: loads stay in
    # front of a barrier, and what needs them behind a branch.
    tl.debug_barrier()
    if ready:
        step, answer = _window(window, entries, answered, tokens, limits, state[0])
        behind = (order_idx, A_at, noise, held)
        out = (y_ptr, y_t, keep)
        if DRAFTS:
            if beyond:
                _answer_beyond(
                    *here, answer, before, drop, strides, limits, *behind, position, p0, *out,
                    P, N, L, BLOCK_P, BLOCK_N, UPDATE,
                )  # fmt: skip
            else:
                _answer_slices(
                    first, *here, answer, *behind, position - L, p0, *out,
                    P, N, L, BLOCK_P, BLOCK_N, SLICE_P, AHEAD, DRAFTS, UPDATE,
                )  # fmt: skip
        else:
            _answer_slices(
                first, *here, answer, *behind, position - L, p0, *out,
                P, N, L, BLOCK_P, BLOCK_N, SLICE_P, AHEAD, DRAFTS, UPDATE,
            )  # fmt: skip
        if keep:
            _keep_steps(ring, at, step, row, new, tokens[2], B_t, one_tile, one_head, N, BLOCK_N)


@triton.jit(do_not_specialize=["heads_per_group", "layer"])
def _replay_chain(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, y_ptr, state_ptr, scales_ptr,
    x_ring, dt_ring, B_ring, seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx, order_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, state_slot, scales_slot, x_slot, dt_slot, B_slot,
    H, heads_per_group, low, high, layer,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    DRAFTS: tl.constexpr, UPDATE: tl.constexpr, SLICE_P: tl.constexpr, AHEAD: tl.constexpr,
    FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T tokens a sequence, each behind the one before it; DRAFTS: more than one."""
    s, head, p0, A_at, D_at, bias_at = _program(A_ptr, D_ptr, bias_ptr, H, P, BLOCK_P)
    if PDL:
        tl.extra.cuda.gdc_wait()
    order_idx += s * R
    order = _order(order_idx, R, L)
    found, ring, tokens = _begin(
        s, head, head // heads_per_group, x_ptr, dt_ptr, B_ptr, C_ptr, x_ring, dt_ring, B_ring,
        seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx,
        x_t, x_h, dt_t, B_t, B_g, C_t, C_g, x_slot, dt_slot, B_slot, P, N, R,
    )  # fmt: skip
    start, count, slot, on, held, position = found
    limits, strides = (bias_at, low, high), (x_t, dt_t, B_t, C_t)
    noise, last = (seeds_ptr, s, layer, head * P), position + (L - 1)  # of the first window
    if scales_ptr is not None:
        scales_ptr += slot * scales_slot + head * P
    state = (state_ptr + slot * state_slot + head * P * N, scales_ptr)
    y_ptr, y_t = y_ptr + (start * H + head) * P, H * P
    j, t = tl.arange(0, L), tl.arange(0, BLOCK_T)
    one_tile, one_head = p0 == 0, (p0 == 0) & (head % heads_per_group == 0)
    if FETCH:
        _fetch(state[0] + p0 * N, ring[1], on, tl.minimum(P - p0, BLOCK_P), N, R, BLOCK_P)
    drop = _settled(
        state, ring, order_idx, A_at, noise, last, p0, held, P, N, L, BLOCK_P, BLOCK_N, UPDATE
    )
    kept = held - drop
    places = tl.where(drop > 0, order[1], order[0])
    windows = 1
    if DRAFTS:  # those behind a border are answered from a second one
        windows = tl.where(kept + count > L, 2, 1)
    for w in tl.range(0, windows, disable_licm=True):
        entry = w * L + j
        row, old = entry - kept, entry < kept
        new = (entry >= kept) & (row < count) & on
        at = tl.where(old | new, places, 0).to(tl.int64)
        if FETCH:
            prefetch(_places(ring[0], at, tokens[0], tl.where(new, row, 0), x_t, old, P) + p0)
        place = kept + t - w * L
        answered = (t, place, (t < count) & (place >= 0) & (place < L))
        before = (row - L, entry < kept + L, entry >= kept + L)
        _answer_window(
            (row, old, new), at, answered, count + w >= 0, w > 0, before, drop, UPDATE, state,
            ring, tokens, strides, limits, order_idx, A_at, D_at, noise, last + drop, p0, held, on,
            y_ptr, y_t, one_tile, one_head,
            P, N, L, BLOCK_P, BLOCK_N, SLICE_P, AHEAD, DRAFTS, UPDATE,
        )  # fmt: skip
        if DRAFTS:
            there = drop + entry + L
            more = (w + 1 < windows) & (there < R)
            places = tl.load(order_idx + there, mask=more, other=0).to(tl.int64).to(tl.int32)
