"""The kernels of the selective state update; `ssm_update.py` holds formula, twin and launches.

One program is one sequence, one head and BLOCK_P rows of its state, kept in registers [BLOCK_P,
BLOCK_N] from the first token to the last. Of a tensor `foo`, foo_t is the stride of tokens, foo_h
of heads, foo_g of groups, foo_slot of slots. A pad (slot -1) reads nothing and writes zeros to y.
Lanes may lie over the stored state: a program reads its part of that once, before it writes any.
"""

import triton
import triton.language as tl

from nemotriton.kernels.numerics import silu, softplus


@triton.jit
def step_size(dt, bias, low, high):
    """clamp(softplus(dt + bias), low, high) in fp32; NaN stays NaN."""
    step = softplus(dt + bias)
    step = tl.where(step < low, low, step)
    return tl.where(step > high, high, step)


@triton.jit
def _token(x_at, dt_at, B_at, bias, low, high, on, on_p, on_n):
    """x [BLOCK_P], step size and B [BLOCK_N] of one token; zeros where masked."""
    x = tl.load(x_at, mask=on_p, other=0.0).to(tl.float32)
    B = tl.load(B_at, mask=on_n, other=0.0).to(tl.float32)
    dt = tl.load(dt_at, mask=on, other=0.0).to(tl.float32)
    return x, step_size(dt, bias, low, high), B


@triton.jit
def _advance(h, x, step, A, B):
    """exp(step A) h + (step x) B^T; one explicit fma, so that every kernel rounds alike."""
    return tl.fma(h, tl.exp(step * A), (x * step)[:, None] * B[None, :])


@triton.jit
def _emit(h, x, C_at, D, z_ptr, z_offset, y_at, on_p, on_n, in_p):
    C = tl.load(C_at, mask=on_n, other=0.0).to(tl.float32)
    y = tl.sum(h * C[None, :], 1) + D * x
    if z_ptr is not None:
        y *= silu(tl.load(z_ptr + z_offset, mask=on_p, other=0.0).to(tl.float32))
    tl.store(y_at, y.to(y_at.dtype.element_ty), mask=in_p)


@triton.jit
def _ssm_update(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, z_ptr, y_ptr, state_ptr, cu_idx, slots_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, z_t, z_h, state_slot, H, heads_per_group, low, high,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """At most one token a sequence: _update_chain without its loop."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p = (pid % tiles * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head, s = pid // tiles % H, pid // tiles // H
    g = head // heads_per_group
    row = tl.load(cu_idx + s).to(tl.int64)
    filled = tl.load(cu_idx + s + 1).to(tl.int64) > row
    slot = tl.load(slots_idx + s).to(tl.int64)
    on = filled & (slot >= 0)  # of a pad nothing is read, and its y is zeros
    on_p, on_n = on & (p < P), on & (n < N)
    h_at = state_ptr + slot * state_slot + head * P * N + p[:, None] * N + n[None, :]
    mask = on_p[:, None] & (n < N)[None, :]
    h = tl.load(h_at, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_P, BLOCK_N]
    A, D = tl.load(A_ptr + head).to(tl.float32), tl.load(D_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    x_at, dt_at = x_ptr + row * x_t + head * x_h + p, dt_ptr + row * dt_t + head
    B_at, C_at = B_ptr + row * B_t + g * B_g + n, C_ptr + row * C_t + g * C_g + n
    x, step, B = _token(x_at, dt_at, B_at, bias, low, high, on, on_p, on_n)
    h = _advance(h, x, step, A, B)
    y_at, z_offset = y_ptr + (row * H + head) * P + p, row * z_t + head * z_h + p
    _emit(h, x, C_at, D, z_ptr, z_offset, y_at, on_p, on_n, filled & (p < P))
    if UPDATE:
        tl.store(h_at, h.to(state_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _update_chain(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, z_ptr, y_ptr, state_ptr, lanes_ptr,
    cu_idx, slots_idx, lane_slots_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, z_t, z_h, state_slot, lanes_slot, H, heads_per_group,
    low, high,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Any number of tokens a sequence, each continuing from the one before it."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p = (pid % tiles * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head, s = pid // tiles % H, pid // tiles // H
    g = head // heads_per_group
    row = tl.load(cu_idx + s).to(tl.int64)
    count = (tl.load(cu_idx + s + 1).to(tl.int64) - row).to(tl.int32)
    slot = tl.load(slots_idx + s).to(tl.int64)
    on = slot >= 0
    on_p, on_n = on & (p < P), on & (n < N)
    inner = head * P * N + p[:, None] * N + n[None, :]
    lane = tl.full((), P * N, tl.int64) * H
    home = slot
    if lane_slots_idx is not None:
        home = tl.load(lane_slots_idx + s).to(tl.int64)
    mask = (on_p & (count > 0))[:, None] & (n < N)[None, :]
    h = tl.load(state_ptr + slot * state_slot + inner, mask=mask, other=0.0).to(tl.float32)
    A, D = tl.load(A_ptr + head).to(tl.float32), tl.load(D_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    x_at, dt_at = x_ptr + row * x_t + head * x_h + p, dt_ptr + row * dt_t + head
    B_at, C_at = B_ptr + row * B_t + g * B_g + n, C_ptr + row * C_t + g * C_g + n
    y_at, z_offset = y_ptr + (row * H + head) * P + p, row * z_t + head * z_h + p
    for t in range(count):
        x, step, B = _token(
            x_at + t * x_t, dt_at + t * dt_t, B_at + t * B_t, bias, low, high, on, on_p, on_n
        )
        h = _advance(h, x, step, A, B)
        z_t_offset = z_offset + t * z_t
        _emit(h, x, C_at + t * C_t, D, z_ptr, z_t_offset, y_at + t * H * P, on_p, on_n, p < P)
        kept = h.to(state_ptr.dtype.element_ty)
        h = kept.to(tl.float32)
        if lanes_ptr is not None:
            tl.store(lanes_ptr + home * lanes_slot + t * lane + inner, kept, mask=mask)
    if UPDATE:
        kept = h.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + slot * state_slot + inner, kept, mask=mask)


@triton.jit
def _path(parents_idx, t):
    """Bit i: token i lies on the way from the stored state to token t."""
    one = tl.full((), 1, tl.int64)
    bits = tl.full((), 0, tl.int64)
    up = tl.load(parents_idx + t).to(tl.int64)
    for _ in range(t):
        bits = bits | tl.where(up >= 0, one << tl.maximum(up, 0), 0)
        up = tl.load(parents_idx + up, mask=up >= 0, other=-1).to(tl.int64)
    return bits


@triton.jit
def _update_tree(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, z_ptr, y_ptr, state_ptr, lanes_ptr,
    cu_idx, slots_idx, lane_slots_idx, parents_idx,
    x_t, x_h, dt_t, B_t, B_g, C_t, C_g, z_t, z_h, state_slot, lanes_slot, H, heads_per_group,
    low, high,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens that continue from any earlier one; the stored state stays."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p = (pid % tiles * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head, s = pid // tiles % H, pid // tiles // H
    g = head // heads_per_group
    row = tl.load(cu_idx + s).to(tl.int64)
    count = (tl.load(cu_idx + s + 1).to(tl.int64) - row).to(tl.int32)
    slot = tl.load(slots_idx + s).to(tl.int64)
    on = slot >= 0
    on_p, on_n = on & (p < P), on & (n < N)
    inner = head * P * N + p[:, None] * N + n[None, :]
    lane = tl.full((), P * N, tl.int64) * H
    home = slot
    if lane_slots_idx is not None:
        home = tl.load(lane_slots_idx + s).to(tl.int64)
    mask = (on_p & (count > 0))[:, None] & (n < N)[None, :]
    stored = tl.load(state_ptr + slot * state_slot + inner, mask=mask, other=0.0).to(tl.float32)
    A, D = tl.load(A_ptr + head).to(tl.float32), tl.load(D_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    x_at, dt_at = x_ptr + row * x_t + head * x_h + p, dt_ptr + row * dt_t + head
    B_at, C_at = B_ptr + row * B_t + g * B_g + n, C_ptr + row * C_t + g * C_g + n
    y_at, z_offset = y_ptr + (row * H + head) * P + p, row * z_t + head * z_h + p
    for t in range(count):
        path = _path(parents_idx + row, t)
        h = stored
        for i in range(t):
            x, step, B = _token(
                x_at + i * x_t, dt_at + i * dt_t, B_at + i * B_t, bias, low, high, on, on_p, on_n
            )
            after = _advance(h, x, step, A, B).to(state_ptr.dtype.element_ty).to(tl.float32)
            h = tl.where((path >> i) & 1 != 0, after, h)
        x, step, B = _token(
            x_at + t * x_t, dt_at + t * dt_t, B_at + t * B_t, bias, low, high, on, on_p, on_n
        )
        h = _advance(h, x, step, A, B)
        z_t_offset = z_offset + t * z_t
        _emit(h, x, C_at + t * C_t, D, z_ptr, z_t_offset, y_at + t * H * P, on_p, on_n, p < P)
        if lanes_ptr is not None:
            kept = h.to(lanes_ptr.dtype.element_ty)
            tl.store(lanes_ptr + home * lanes_slot + t * lane + inner, kept, mask=mask)
