"""What the kernels of replay share; `ssm_replay.py` holds formula and twin.

One program is one sequence, one head and BLOCK_P rows of its state. A window is L entries: inputs
(x, step size, B) behind a stored state, first those in the ring, then new tokens, then zeros.
Tokens [T] are columns and stand at places of the window. Products over it are small matrices on the
tensor cores, see `ssm_products.py`, so a few tokens cost what one costs. Entry j of a window has
the same place in every sum, whether it comes from the ring or is new, and a token sees itself and
what lies before it, so the formula gives neither how tokens are cut into calls, nor their number,
nor the tile a way to change a bit; `tests/test_replay_offline.py` watches what the compiler makes
of it. What a token's entry holds, a NaN say, is nowhere in the sums of the tokens before it.

Of a tensor `foo`, foo_t is the stride of tokens, foo_h of heads, foo_g of groups, foo_slot of
slots. A pad (slot -1) reads nothing and writes zeros to y. No entry of a ring is read and written
in one launch, and of a state each program touches its own part alone.
"""

import triton
import triton.language as tl

from nemotriton.kernels.dependent import prefetch
from nemotriton.kernels.ssm_products import (
    in_order,
    joined,
    k_order,
    load_rows,
    load_tiles,
    read_state,
    store_rows,
    times,
    weighted,
)
from nemotriton.kernels.ssm_state import restore_state, round_state, state_noise, store_state
from nemotriton.kernels.ssm_step import step_size

SLICE = tl.constexpr(16)  # rows of a state that are rounded at a time
# logarithms of decays as integers, in units of 2^-40: any sum of them is exact in any order, and
# the difference of two long sums has the digits of a short one. exp of the lowest is 0.
_UNIT, _UNITS = tl.constexpr(2.0**-40), tl.constexpr(2.0**40)
_LOWEST = tl.constexpr(-4096.0)


# ------------------------------------------------------------------------------------------ loads
@triton.jit
def _sequence(s, cu_idx, slots_idx, counts_idx, seeds_ptr, lengths_idx):
    """First row, number of rows, slot, whether there is anything to read, committed entries of the
    ring, and the tokens in the stored state (0 where no noise needs them)."""
    start = tl.load(cu_idx + s).to(tl.int64)
    count = (tl.load(cu_idx + s + 1).to(tl.int64) - start).to(tl.int32)
    slot = tl.load(slots_idx + s).to(tl.int64)
    held = tl.load(counts_idx + s).to(tl.int64).to(tl.int32)
    on = (slot >= 0) & (count > 0)
    held = tl.where(on, held, 0)
    position = tl.zeros((), tl.int32)
    if seeds_ptr is not None:
        position = tl.load(lengths_idx + s).to(tl.int64).to(tl.int32) - count - held
    return start, count, slot, on, held, position


@triton.jit
def _order(order_idx, R: tl.constexpr, L: tl.constexpr):
    """The places of a ring's first entries and of those behind its first border, [L] each."""
    j = tl.arange(0, L)
    first = tl.load(order_idx + j).to(tl.int64)
    second = tl.load(order_idx + L + j, mask=L + j < R, other=0).to(tl.int64)
    return first.to(tl.int32), second.to(tl.int32)  # half the registers until they are needed


@triton.jit
def _scale(scales_ptr, p, wanted):
    scale = tl.full((), 1.0, tl.float32)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + p, mask=wanted, other=0.0)
    return scale


@triton.jit
def _stored(state, p, n, on, P: tl.constexpr, N: tl.constexpr):
    """Rows p of a head's state as they are stored, and their scales, where the format has any."""
    state_ptr, scales_ptr = state
    wanted = on & (p < P)
    h_at = state_ptr + p[:, None] * N + n[None, :]
    h = tl.load(h_at, mask=wanted[:, None] & (n < N)[None, :], other=0)
    return h, _scale(scales_ptr, p, wanted)


@triton.jit
def _stored_tiles(state, p, on, P: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same in `load_tiles`' form, of which `in_order` makes rows for products."""
    state_ptr, scales_ptr = state
    wanted = on & (p < P)
    h = load_tiles(state_ptr + p * N, wanted, N, BLOCK_N, state_ptr, N == BLOCK_N)
    return h, _scale(scales_ptr, p, wanted)


@triton.jit
def _rows(ptr, row, stride, c, wanted, WIDTH: tl.constexpr):
    """Columns c of rows [L]; zeros where not wanted."""
    mask = wanted[:, None] & (c < WIDTH)[None, :]
    return tl.load(ptr + row[:, None] * stride + c[None, :], mask=mask, other=0.0)


@triton.jit
def _places(ring, at, new_ptr, row, stride, old, WIDTH: tl.constexpr):
    """Where entries [L] begin: in the ring where `old`, else among the new tokens."""
    return tl.where(old, ring + at * WIDTH, new_ptr + row * stride)


@triton.jit
def _entries(ring, at, new_ptr, row, stride, c, old, new, WIDTH: tl.constexpr):
    """Columns c of entries [L]: of the ring where `old`, of new tokens where `new`, else zeros."""
    begin = _places(ring, at, new_ptr, row, stride, old, WIDTH)
    mask = (old | new)[:, None] & (c < WIDTH)[None, :]
    return tl.load(begin[:, None] + c[None, :], mask=mask, other=0.0)


@triton.jit
def _load_steps(
    ring, at, dt_ptr, row, stride, old, new, limits, on, DRAFTS: tl.constexpr
):  # fmt: skip
    """What `_steps` makes step sizes of: those in the ring [L], dt of new entries, and the bias."""
    held = tl.load(ring + at, mask=old, other=0.0)
    if DRAFTS:
        dt = tl.load(dt_ptr + row * stride, mask=new, other=0.0)
    else:
        dt = tl.load(dt_ptr, mask=on, other=0.0)
    return held, dt, tl.load(limits[0])


@triton.jit
def _steps(loaded, old, new, limits):
    """Step sizes of entries [L], which the ring holds ready; zeros where there is none."""
    _, low, high = limits
    held, dt, bias = loaded
    fresh = step_size(dt.to(tl.float32), bias.to(tl.float32), low, high)
    return tl.where(old, held, tl.where(new, fresh, 0.0))


@triton.jit
def _keep(ptr, at, values, c, wanted, WIDTH: tl.constexpr):
    """Write new entries to their places in a ring."""
    mask = wanted[:, None] & (c < WIDTH)[None, :]
    tl.store(ptr + at[:, None] * WIDTH + c[None, :], values, mask=mask)


@triton.jit
def _keep_steps(
    ring, at, step, row, new, B_ptr, B_t, one_tile, one_head, N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write step sizes and B of new entries, of which one program has those of a head, a group."""
    tl.store(ring[1] + at, step, mask=new & one_tile)
    if one_head:
        n = tl.arange(0, BLOCK_N)
        _keep(ring[2], at, _rows(B_ptr, row, B_t, n, new, N), n, new, N)


@triton.jit
def _fetch(state_ptr, dt_ring, on, rows, N: tl.constexpr, R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Bring `rows` of a stored state near, and the step sizes that a head's ring holds."""
    LINE: tl.constexpr = 1024 // state_ptr.dtype.element_ty.primitive_bitwidth
    if on:
        prefetch(state_ptr + tl.minimum(tl.arange(0, BLOCK_P * N // LINE) * LINE, rows * N - 1))
        prefetch(dt_ring + tl.arange(0, 2) * (R - 1))


# ----------------------------------------------------------------------------- states and outputs
@triton.jit
def _decay(step, A):
    """Logarithm of what a step leaves of a state, in units; 0 for NaN, which the step itself is."""
    decay = tl.maximum(tl.where(step == step, step * A, 0.0), _LOWEST)
    return (decay * _UNITS).to(tl.int64)


@triton.jit
def _left(decay):
    """What a sum of decays leaves; the sum is not above 0."""
    return tl.exp(tl.minimum(decay, 0).to(tl.float32) * _UNIT)


@triton.jit
def _inflow(step, A_at):
    """How much of each entry of a full window is left behind it [L], and of the state before."""
    decay = _decay(step, tl.load(A_at).to(tl.float32))
    all = tl.sum(decay, 0)
    return step * _left(all - tl.cumsum(decay, 0)), _left(all)


@triton.jit
def _fold(
    h, scale, x, inflow, left, B, state, noise, position, p, N: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The state behind a full window as it is stored, (h, scale): h [P, N], x [L, P], B [L, N].

    position: of the window's last token; p: the rows within the head."""
    state_ptr, scales_ptr = state
    seeds_ptr, s, layer, first_row = noise
    added = times(tl.trans(x.to(tl.float32) * inflow[:, None]), B)
    h = tl.fma(restore_state(h, scale, scales_ptr), left, added)
    bits = None
    if seeds_ptr is not None:
        # always so; behind a branch since by the joins in the noise the compiler would order the
        # terms of the product that reads this state
        bits = tl.zeros(h.shape, tl.int32)
        if position >= 0:
            bits = state_noise(tl.load(seeds_ptr + s), position, layer, first_row + p, N, BLOCK_N)
    return round_state(h, state_ptr, scales_ptr, bits)


@triton.jit
def _read(h, scale, state, C, C_ptr):
    """h C^T [P, T] of a stored state in the order of products, C [T, N] alike."""
    zero = tl.zeros([h.shape[0], C.shape[0]], tl.float32)
    high, low = read_state(h, C, zero, zero)
    return joined(high, low, scale, state, C_ptr)


@triton.jit
def _outputs(product, x, weights, left, seen, DRAFTS: tl.constexpr):
    """y [P, T] = left h C^T + x^T weights, with the product of the state.

    DRAFTS: a token may not see every entry (`seen` [L, T]), and what is not finite in one that it
    does not see must not reach it: 0 * NaN would."""
    sick = x.to(tl.float32) - x.to(tl.float32) != 0.0
    if DRAFTS:
        x = tl.where(sick, 0.0, x).to(x.dtype)
    y = tl.fma(product, left[None, :], weighted(x, weights))
    if DRAFTS:
        ill = tl.dot(tl.trans(sick.to(tl.bfloat16)), seen.to(tl.bfloat16), input_precision="ieee")
        y = tl.where(ill > 0.0, float("nan"), y)
    return y


@triton.jit
def _put(y, y_ptr, row, stride, p, wanted, P: tl.constexpr):
    """Write y [P, T] to rows [T] where wanted."""
    mask = (p < P)[:, None] & wanted[None, :]
    at = y_ptr + row[None, :] * stride + p[:, None]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _advance(tiles, x, inflow, left, B_at, entered, state, width, FULL: tl.constexpr):
    """Columns of rows of the state behind a full window, rounded as it is stored, in the order of
    products, as they lie in registers.

    tiles: what `load_tiles` gave of the state before; x [L, P]; B_at [L] where B's columns begin,
    `width` of them, of entries that there are (`entered` [L])."""
    h = in_order(tiles, state[0])
    B = load_rows(B_at, entered, width, h.shape[1], state[0], FULL)
    added = times(tl.trans(x.to(tl.float32) * inflow[:, None]), B)
    h, _ = round_state(tl.fma(h.to(tl.float32), left, added), state[0], None, None)
    return h


@triton.jit
def _part(
    state_ptr, p0, rows, k, N: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Part k of rows p0 .. p0 + rows of a state: SLICE rows, BLOCK_N / PARTS columns."""
    COLUMNS: tl.constexpr = BLOCK_N // PARTS
    i, first = tl.arange(0, SLICE) + k // PARTS * SLICE, k % PARTS * COLUMNS
    at = state_ptr + (p0 + i) * N + first
    return load_tiles(at, i < rows, N - first, COLUMNS, state_ptr, N == BLOCK_N)


@triton.jit
def _store_border(
    state, ring, order_idx, A_at, noise, position, p0,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the state behind the ring's first L entries, SLICE rows at a time, in place."""
    state_ptr, scales_ptr = state
    x_ring, dt_ring, B_ring = ring
    IN_ORDER: tl.constexpr = (scales_ptr is None) and (noise[0] is None) and (BLOCK_N >= 64)
    PARTS: tl.constexpr = 4 if state_ptr.dtype.element_ty == tl.float32 else 2
    COLUMNS: tl.constexpr = BLOCK_N // PARTS
    j, n = tl.arange(0, L), tl.arange(0, BLOCK_N)
    at = tl.load(order_idx + j).to(tl.int64)
    inflow, left = _inflow(tl.load(dt_ring + at), A_at)
    rows = tl.minimum(P - p0, BLOCK_P)
    if IN_ORDER:
        tiles = _part(state_ptr, p0, rows, 0, N, BLOCK_N, PARTS)
        for k in range((rows + SLICE - 1) // SLICE * PARTS):
            # the next part is on its way while one is computed
            next_tiles = _part(state_ptr, p0, rows, k + 1, N, BLOCK_N, PARTS)
            p, first = p0 + k // PARTS * SLICE + tl.arange(0, SLICE), k % PARTS * COLUMNS
            x = _rows(x_ring, at, P, p, j >= 0, P)
            h = _advance(tiles, x, inflow, left, B_ring + at * N + first, j >= 0, state, N - first,
                         N == BLOCK_N)  # fmt: skip
            to = state_ptr + p * N + first
            store_rows(to, h, p < P, N - first, state_ptr, N == BLOCK_N)
            tiles = next_tiles
    else:
        for i in range(0, rows, SLICE):
            p = p0 + i + tl.arange(0, SLICE)
            in_p = p < P
            x = _rows(x_ring, at, P, p, j >= 0, P)
            h, scale = _stored(state, p, n, in_p, P, N)
            B = _rows(B_ring, at, N, n, j >= 0, N)
            h, scale = _fold(h, scale, x, inflow, left, B, state, noise, position, p, N, BLOCK_N)
            h_at = state_ptr + p[:, None] * N + n[None, :]
            store_state(h, scale, h_at, scales_ptr, p, in_p[:, None] & (n < N)[None, :], in_p)
    tl.debug_barrier()  # what other threads have written is read next


@triton.jit
def _settled(
    state, ring, order_idx, A_at, noise, position, p0, held,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """How many entries of the ring lie behind a border; the state there is stored if UPDATE."""
    if UPDATE:  # noqa: SIM102 (a constant)
        if held >= L:
            _store_border(
                state, ring, order_idx, A_at, noise, position, p0, P, N, L, BLOCK_P, BLOCK_N
            )
    return tl.where(held >= L, L, 0)


@triton.jit
def _behind_ring(
    h, scale, state, ring, order_idx, A_at, noise, position, p, n, held,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Columns n of a stored state (h, scale), or what would be stored behind the ring's first L
    entries where it has so many."""
    loaded = h
    if held >= L:
        x_ring, dt_ring, B_ring = ring
        j = tl.arange(0, L)
        at = tl.load(order_idx + j).to(tl.int64)
        inflow, left = _inflow(tl.load(dt_ring + at), A_at)
        x, B = _rows(x_ring, at, P, p, j >= 0, P), _rows(B_ring, at, N, n, j >= 0, N)
        h, scale = _fold(h, scale, x, inflow, left, B, state, noise, position, p, N, BLOCK_N)
    if loaded.dtype == tl.int8:
        # the compiler orders a product's terms by the width of what its operands were loaded as
        h = tl.where(held >= L, h, loaded)
    return h, scale


@triton.jit
def _program(A_ptr, D_ptr, bias_ptr, H, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """Sequence, head and first row within it that the program is for; where A, D and bias lie."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p0, head, s = (pid % tiles * BLOCK_P).to(tl.int32), pid // tiles % H, pid // tiles // H
    return s, head, p0, A_ptr + head, D_ptr + head, bias_ptr + head


@triton.jit
def _begin(
    s, head, group, x_ptr, dt_ptr, B_ptr, C_ptr, x_ring, dt_ring, B_ring,
    seeds_ptr, lengths_idx, cu_idx, slots_idx, counts_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, x_slot, dt_slot, B_slot,
    P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What `_sequence` returns, and a sequence's part of the rings and of x, dt, B and C."""
    found = _sequence(s, cu_idx, slots_idx, counts_idx, seeds_ptr, lengths_idx)
    start, _, slot, _, _, _ = found
    x_ptr, dt_ptr = x_ptr + start * x_t + head * x_h, dt_ptr + start * dt_t + head
    B_ptr, C_ptr = B_ptr + start * B_t + group * B_g, C_ptr + start * C_t + group * C_g
    x_ring, dt_ring = x_ring + slot * x_slot + head * R * P, dt_ring + slot * dt_slot + head * R
    B_ring += slot * B_slot + group * R * N
    return found, (x_ring, dt_ring, B_ring), (x_ptr, dt_ptr, B_ptr, C_ptr)


@triton.jit
def _read_border(
    state, ring, order_idx, A_at, noise, position, p, held, on, inflow, outflow, entries, at,
    tokens, strides, token, answered,
    P: tl.constexpr, N: tl.constexpr, L: tl.constexpr, BLOCK_N: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """h C^T [P, T] for the state of the border behind a window, rounded as it would be stored.

    `entries` are the window's, token [T] those that are answered."""
    IN_ORDER: tl.constexpr = (
        UPDATE and (state[1] is None) and (noise[0] is None) and (BLOCK_N >= 64)
    )
    FEW: tl.constexpr = 4 if state[0].dtype.element_ty == tl.float32 else 2
    PARTS: tl.constexpr = FEW if IN_ORDER else 1
    COLUMNS: tl.constexpr = BLOCK_N // PARTS
    row, old, new = entries
    x_ptr, _, B_ptr, C_ptr = tokens
    x_t, _, B_t, C_t = strides
    x, C_at = _entries(ring[0], at, x_ptr, row, x_t, p, old, new, P), C_ptr + token * C_t
    high = tl.zeros([p.shape[0], token.shape[0]], tl.float32)
    low = tl.zeros([p.shape[0], token.shape[0]], tl.float32)
    scale = _scale(state[1], p, on & (p < P))
    B_at = _places(ring[2], at, B_ptr, row, B_t, old, N)
    for part in range(PARTS):
        first = part * COLUMNS
        if IN_ORDER:
            tiles = load_tiles(
                state[0] + p * N + first, on & (p < P), N - first, COLUMNS, state[0], N == BLOCK_N
            )
            h = _advance(tiles, x, inflow, outflow, B_at + first, old | new, state, N - first,
                         N == BLOCK_N)  # fmt: skip
        else:
            n = tl.arange(0, BLOCK_N)
            h, scale = _stored(state, p, n, on, P, N)
            if not UPDATE:
                h, scale = _behind_ring(
                    h, scale, state, ring, order_idx, A_at, noise, position - L, p, n, held,
                    P, N, L, BLOCK_N,
                )  # fmt: skip
            B = _entries(ring[2], at, B_ptr, row, B_t, n, old, new, N)
            h, scale = _fold(h, scale, x, inflow, outflow, B, state, noise, position, p, N, BLOCK_N)
            h = k_order(h, state[0])
        C = load_rows(C_at + first, answered & on, N - first, COLUMNS, state[0], N == BLOCK_N)
        high, low = read_state(h, C, high, low)
    return joined(high, low, scale, state, B_ptr)  # with scales there is one part
