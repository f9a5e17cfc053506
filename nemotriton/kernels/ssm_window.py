"""The kernels of the selective state update by replay; `ssm_replay.py` holds formula and twin.

One program is one sequence, one head and BLOCK_P rows of its state. A window is L entries: inputs
(x, step size, B) behind a stored state, first those in the ring, then new tokens, then zeros. All
products over it are [L, L], [L, P] and [L, N] matrices on the tensor cores, so a few tokens cost
what one costs. Entry j of a window has the same place in every sum, whether it comes from the ring
or is new, so how tokens are cut into calls changes no bit.

Of a tensor `foo`, foo_t is the stride of tokens, foo_h of heads, foo_g of groups, foo_slot of
slots. A pad (slot -1) reads nothing and writes zeros to y. No entry of a ring is read and written
in one launch, and of a state each program touches its own part alone.
"""

import triton
import triton.language as tl

from nemotriton.kernels.ssm_state import restore_state, round_state, state_noise, store_state
from nemotriton.kernels.ssm_step import step_size

SLICE = tl.constexpr(16)  # rows of a state that are rounded at a time


# --------------------------------------------------------------------------------------- products
@triton.jit
def _times(a, b, TERMS: tl.constexpr):
    """a b for fp32 a [M, K]: as TERMS bf16 terms (8 bits each) where b is bf16, else 3xTF32."""
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        low = rest.to(tl.bfloat16)
        product = tl.dot(low, b, input_precision="ieee")
        if TERMS == 3:
            product = tl.dot(
                (rest - low.to(tl.float32)).to(tl.bfloat16), b, acc=product, input_precision="ieee"
            )
        return tl.dot(high, b, acc=product, input_precision="ieee")
    else:
        return tl.dot(a, b.to(tl.float32), input_precision="tf32x3")


@triton.jit
def _read(C, h, scale, scales_ptr):
    """C h^T [M, P] for C [M, N] and a stored state h [P, N], scale [P]; bf16 operands are exact."""
    if C.dtype == tl.bfloat16:
        high = h.to(tl.bfloat16)
        product = tl.dot(C, tl.trans(high), input_precision="ieee")
        if h.dtype != tl.bfloat16 and h.dtype != tl.int8:  # y has 8 bits: 16 of the state do
            low = (h.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
            product = tl.dot(C, tl.trans(low), acc=product, input_precision="ieee")
    else:
        wide = tl.trans(h.to(tl.float32))
        product = tl.dot(C.to(tl.float32), wide, input_precision="tf32x3")
    if scales_ptr is not None:
        product *= scale[None, :]
    return product


@triton.jit
def _scores(C, B):
    """C B^T."""
    if B.dtype == tl.bfloat16:
        return tl.dot(C, tl.trans(B), input_precision="ieee")
    else:
        wide = tl.trans(B.to(tl.float32))
        return tl.dot(C.to(tl.float32), wide, input_precision="tf32x3")


# ------------------------------------------------------------------------------------------ loads
@triton.jit
def _sequence(s, cu_idx, slots_idx, counts_idx, seeds_ptr, lengths_idx):
    """First row, number of rows, slot, whether there is anything to read, committed entries of the
    ring, and the tokens in the stored state (0 where no noise needs them)."""
    start = tl.load(cu_idx + s).to(tl.int64)
    count = (tl.load(cu_idx + s + 1).to(tl.int64) - start).to(tl.int32)
    slot = tl.load(slots_idx + s).to(tl.int64)
    on = (slot >= 0) & (count > 0)
    held = tl.load(counts_idx + s, mask=on, other=0).to(tl.int64).to(tl.int32)
    position = tl.zeros((), tl.int32)
    if seeds_ptr is not None:
        position = tl.load(lengths_idx + s).to(tl.int64).to(tl.int32) - count - held
    return start, count, slot, on, held, position


@triton.jit
def _stored(state, p, n, on, P: tl.constexpr, N: tl.constexpr):
    """Rows p of a head's state as they are stored, and their scales, where the format has any."""
    state_ptr, scales_ptr = state
    wanted = on & (p < P)
    h_at = state_ptr + p[:, None] * N + n[None, :]
    h = tl.load(h_at, mask=wanted[:, None] & (n < N)[None, :], other=0)
    scale = tl.full((), 1.0, tl.float32)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + p, mask=wanted, other=0.0)
    return h, scale


@triton.jit
def _rows(ptr, row, stride, c, wanted, WIDTH: tl.constexpr):
    """Columns c of rows [L]; zeros where not wanted."""
    mask = wanted[:, None] & (c < WIDTH)[None, :]
    return tl.load(ptr + row[:, None] * stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def _entries(ring, at, new_ptr, row, stride, c, old, new, WIDTH: tl.constexpr):
    """Columns c of entries [L]: of the ring where `old`, of new tokens where `new`, else zeros."""
    held = _rows(ring, at, WIDTH, c, old, WIDTH)
    return tl.where(old[:, None], held, _rows(new_ptr, row, stride, c, new, WIDTH))


@triton.jit
def _steps(ring, at, dt_ptr, row, stride, old, new, limits):
    """Step sizes of entries [L], which the ring holds ready; zeros where there is none."""
    bias, low, high = limits
    held = tl.load(ring + at, mask=old, other=0.0)
    dt = tl.load(dt_ptr + row * stride, mask=new, other=0.0).to(tl.float32)
    return tl.where(old, held, tl.where(new, step_size(dt, bias, low, high), 0.0))


@triton.jit
def _keep(ptr, at, values, c, wanted, WIDTH: tl.constexpr):
    """Write new entries to their places in a ring."""
    mask = wanted[:, None] & (c < WIDTH)[None, :]
    tl.store(ptr + at[:, None] * WIDTH + c[None, :], values, mask=mask)


# ----------------------------------------------------------------------------- states and outputs
@triton.jit
def _inflow(step, A):
    """How much of each entry of a full window is left behind it [L], and of the state before."""
    decay = step * A
    left = tl.minimum(tl.cumsum(decay, 0, reverse=True) - decay, 0.0)
    return step * tl.exp(left), tl.exp(tl.sum(decay, 0))


@triton.jit
def _fold(
    h, scale, x, inflow, left, B, state, noise, position, p, N: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The state behind a full window as it is stored, (h, scale): h [P, N], x [L, P], B [L, N].

    position: of the window's last token; p: the rows within the head."""
    state_ptr, scales_ptr = state
    seeds_ptr, s, layer, first_row = noise
    added = _times(tl.trans(x.to(tl.float32) * inflow[:, None]), B, 3)
    h = tl.fma(restore_state(h, scale, scales_ptr), left, added)
    bits = None
    if seeds_ptr is not None:
        bits = state_noise(tl.load(seeds_ptr + s), position, layer, first_row + p, N, BLOCK_N)
    return round_state(h, state_ptr, scales_ptr, bits)


@triton.jit
def _weights(step, A, B, C, D, L: tl.constexpr):
    """What of x of entry k is in y of entry j, [L, L], and what of the state before them, [L]."""
    j = tl.arange(0, L)
    decay = step * A
    # sums of their own: a difference of two long ones would have lost the digits of a short one
    between = tl.cumsum(tl.where(j[:, None] > j[None, :], decay[:, None], 0.0), 0)
    weights = _scores(C, B) * step[None, :] * tl.exp(between)
    weights = tl.where(j[None, :] <= j[:, None], weights, 0.0)
    weights = tl.where(j[None, :] == j[:, None], weights + D, weights)
    return weights, tl.exp(tl.cumsum(decay, 0))


@triton.jit
def _emit(
    h, scale, scales_ptr, x, weights, left, C, y_ptr, row, stride, p, wanted, P: tl.constexpr
):  # fmt: skip
    """Write y = left C h^T + weights x of a window's entries where wanted."""
    y = tl.fma(_read(C, h, scale, scales_ptr), left[:, None], _times(weights, x, 2))
    mask = wanted[:, None] & (p < P)[None, :]
    tl.store(y_ptr + row[:, None] * stride + p[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_border(
    state, ring, order_idx, A, noise, position, p0,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the state behind the ring's first L entries, a few rows at a time, in place."""
    state_ptr, scales_ptr = state
    x_ring, dt_ring, B_ring = ring
    n, j = tl.arange(0, BLOCK_N), tl.arange(0, L)
    at = tl.load(order_idx + j).to(tl.int64)
    B = _rows(B_ring, at, N, n, j >= 0, N)
    inflow, left = _inflow(tl.load(dt_ring + at), A)
    for i in range(0, tl.minimum(P - p0, BLOCK_P), SLICE):
        p = p0 + i + tl.arange(0, SLICE)
        h, scale = _stored(state, p, n, True, P, N)
        x = _rows(x_ring, at, P, p, j >= 0, P)
        h, scale = _fold(h, scale, x, inflow, left, B, state, noise, position, p, N, BLOCK_N)
        h_at, in_p = state_ptr + p[:, None] * N + n[None, :], p < P
        store_state(h, scale, h_at, scales_ptr, p, in_p[:, None] & (n < N)[None, :], in_p)
    tl.debug_barrier()  # what other threads have written is read next


@triton.jit
def _settled(
    state, ring, order_idx, A, noise, position, p0, held, on,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """The stored state (h, scale), behind the ring's first L entries where it has so many, and how
    many entries that leaves out. position: tokens in the state that was stored before."""
    p, n, j = p0 + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, L)
    last = position + (L - 1)
    if UPDATE:  # noqa: SIM102 (a constant)
        if held >= L:
            _store_border(state, ring, order_idx, A, noise, last, p0, P, N, L, BLOCK_P, BLOCK_N)
    h, scale = _stored(state, p, n, on, P, N)
    if not UPDATE:  # noqa: SIM102
        if held >= L:
            x_ring, dt_ring, B_ring = ring
            at = tl.load(order_idx + j).to(tl.int64)
            inflow, left = _inflow(tl.load(dt_ring + at), A)
            x, B = _rows(x_ring, at, P, p, j >= 0, P), _rows(B_ring, at, N, n, j >= 0, N)
            h, scale = _fold(h, scale, x, inflow, left, B, state, noise, last, p, N, BLOCK_N)
    return h, scale, tl.where(held >= L, L, 0)


@triton.jit
def _beyond(
    h, scale, state, ring, tokens, strides, limits, order_idx, A, D, noise, position, p0, kept,
    drop, count, on, y_ptr, y_t, at, step, B, one_tile, one_head,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """The tokens beyond a border: at, step and B are the entries of the window that it ends.

    Its state is worked out a few rows at a time, from what is stored; h is used if nothing is."""
    x_ring, dt_ring, B_ring = ring
    x_ptr, dt_ptr, B_ptr, C_ptr = tokens
    x_t, dt_t, B_t, C_t = strides
    n, j = tl.arange(0, BLOCK_N), tl.arange(0, L)
    inflow, outflow = _inflow(step, A)
    row = j + (L - kept)
    is_row, none = row < count, j < 0
    new = is_row & on
    place = tl.load(order_idx + drop + L + j, mask=new, other=0).to(tl.int64)
    step = _steps(dt_ring, place, dt_ptr, row, dt_t, none, new, limits)
    B_new = _rows(B_ptr, row, B_t, n, new, N)
    C = _rows(C_ptr, row, C_t, n, new, N)
    weights, left = _weights(step, A, B_new, C, D, L)
    WIDE: tl.constexpr = SLICE if UPDATE else BLOCK_P
    for i in range(0, tl.minimum(P - p0, BLOCK_P), WIDE):
        p = p0 + i + tl.arange(0, WIDE)
        if UPDATE:
            before, before_scale = _stored(state, p, n, on, P, N)
        else:
            before, before_scale = h, scale
        x = _entries(x_ring, at, x_ptr, j - kept, x_t, p, j < kept, (j >= kept) & on, P)
        border, border_scale = _fold(
            before, before_scale, x, inflow, outflow, B, state, noise, position, p, N, BLOCK_N
        )
        x = _rows(x_ptr, row, x_t, p, new, P)
        _emit(border, border_scale, state[1], x, weights, left, C, y_ptr, row, y_t, p, is_row, P)
        if UPDATE:
            _keep(x_ring, place, x, p, new, P)
    if UPDATE:
        tl.store(dt_ring + place, step, mask=new & one_tile)
        _keep(B_ring, place, B_new, n, new & one_head, N)


# ----------------------------------------------------------------------------------------- kernels
@triton.jit
def _replay_chain(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, y_ptr, state_ptr, scales_ptr,
    x_ring, dt_ring, B_ring, seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx, order_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, state_slot, scales_slot, x_slot, dt_slot, B_slot,
    H, heads_per_group, low, high, layer,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, CROSS: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Up to L tokens a sequence, each behind the one before it; CROSS: they may cross a border."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p0, head, s = (pid % tiles * BLOCK_P).to(tl.int32), pid // tiles % H, pid // tiles // H
    g = head // heads_per_group
    one_tile = p0 == 0
    one_head = one_tile & (head % heads_per_group == 0)
    p, n, j = p0 + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N), tl.arange(0, L)
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
    ring = (x_ring, dt_ring, B_ring)
    y_ptr, y_t = y_ptr + (start * H + head) * P, H * P
    order_idx += s * R

    h, scale, drop = _settled(state, ring, order_idx, A, noise, position, p0, held, on,
                              P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
    kept = held - drop
    row = j - kept
    is_row = (row >= 0) & (row < count)
    old, new = j < kept, is_row & on
    at = tl.load(order_idx + drop + j, mask=old | new, other=0).to(tl.int64)
    step = _steps(dt_ring, at, dt_ptr, row, dt_t, old, new, limits)
    B = _entries(B_ring, at, B_ptr, row, B_t, n, old, new, N)
    C = _rows(C_ptr, row, C_t, n, new, N)
    x = _entries(x_ring, at, x_ptr, row, x_t, p, old, new, P)
    weights, left = _weights(step, A, B, C, D, L)
    _emit(h, scale, state[1], x, weights, left, C, y_ptr, row, y_t, p, is_row, P)
    if UPDATE:
        _keep(x_ring, at, x, p, new, P)
        tl.store(dt_ring + at, step, mask=new & one_tile)
        _keep(B_ring, at, B, n, new & one_head, N)
    if CROSS:  # noqa: SIM102
        if kept + count > L:
            tokens, strides = (x_ptr, dt_ptr, B_ptr, C_ptr), (x_t, dt_t, B_t, C_t)
            _beyond(h, scale, state, ring, tokens, strides, limits, order_idx, A, D, noise,
                    position + drop + (L - 1), p0, kept, drop, count, on, y_ptr, y_t, at, step, B,
                    one_tile, one_head, P, N, L, BLOCK_P, BLOCK_N, UPDATE)  # fmt: skip
