"""The kernels of the selective state update; `ssm_update.py` holds formula, twin and launches.

One program is one sequence, one head and BLOCK_P rows of its state, kept in registers [BLOCK_P,
BLOCK_N] from the first token to the last. Of a tensor `foo`, foo_t is the stride of tokens, foo_h
of heads, foo_g of groups, foo_slot of slots. A pad (slot -1) reads nothing and writes zeros to y.
Lanes may lie over the stored state: a program reads its part of that once, before it writes any.
Scales and noise of the state's format are None where it has none, see `ssm_state.py`.

What a token needs is a few hundred bytes from the L2 cache, and all it has to wait for: the chain
asks for the next token's before it computes with this one's.
"""

import triton
import triton.language as tl

from nemotriton.kernels.numerics import silu, softplus
from nemotriton.kernels.ssm_state import (
    load_state,
    restore_state,
    round_state,
    state_noise,
    store_state,
)


@triton.jit
def step_size(dt, bias, low, high):
    """clamp(softplus(dt + bias), low, high) in fp32; NaN stays NaN."""
    step = softplus(dt + bias)
    step = tl.where(step < low, low, step)
    return tl.where(step > high, high, step)


@triton.jit
def _load_head(A_at, D_at, bias_at):
    A, D = tl.load(A_at).to(tl.float32), tl.load(D_at).to(tl.float32)
    return A, D, tl.load(bias_at).to(tl.float32)


@triton.jit
def _load_token(x_at, dt_at, B_at, C_at, on, on_p, on_n):
    """x [BLOCK_P], dt, B and C [BLOCK_N] of one token as they are; zeros where masked."""
    x = tl.load(x_at, mask=on_p & on, other=0.0)
    dt = tl.load(dt_at, mask=on, other=0.0)
    B = tl.load(B_at, mask=on_n & on, other=0.0)
    C = tl.load(C_at, mask=on_n & on, other=0.0)
    return x, dt, B, C


@triton.jit
def _advance(h, x, dt, B, A, bias, low, high):
    """exp(step A) h + (step x) B^T; one explicit fma, so that every kernel rounds alike."""
    step = step_size(dt.to(tl.float32), bias, low, high)
    input = (x.to(tl.float32) * step)[:, None] * B.to(tl.float32)[None, :]
    return tl.fma(h, tl.exp(step * A), input)


@triton.jit
def _emit(h, x, C, D, z_ptr, z_offset, y_at, on_p, in_p):
    y = tl.sum(h * C.to(tl.float32)[None, :], 1) + D * x.to(tl.float32)
    if z_ptr is not None:
        y *= silu(tl.load(z_ptr + z_offset, mask=on_p, other=0.0).to(tl.float32))
    tl.store(y_at, y.to(y_at.dtype.element_ty), mask=in_p)


@triton.jit
def _rounded(
    h, state_ptr, scales_ptr, seeds_ptr, seed, position, layer, rows,
    N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """h as it is stored behind the token at `position`, and its scales."""
    if seeds_ptr is None:
        stored, scale = round_state(h, state_ptr, scales_ptr, None)
    else:
        noise = state_noise(seed, position, layer, rows, N, BLOCK_N)
        stored, scale = round_state(h, state_ptr, scales_ptr, noise)
    return stored, scale


@triton.jit
def _noise_key(seeds_ptr, lengths_idx, s, count):
    """Seed of sequence s, and the position of the first of its `count` new tokens; both int64."""
    seed = tl.full((), 0, tl.int64)
    position = tl.full((), 0, tl.int64)
    if seeds_ptr is not None:
        seed = tl.load(seeds_ptr + s)
        position = tl.load(lengths_idx + s).to(tl.int64) - count
    return seed, position


@triton.jit(do_not_specialize=["heads_per_group", "layer"])
def _ssm_update(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, z_ptr, y_ptr, state_ptr, scales_ptr,
    seeds_ptr, lengths_idx, cu_idx, slots_idx,
    layer, x_t, x_h, dt_t, B_t, B_g, C_t, C_g, z_t, z_h, state_slot, scales_slot,
    H, heads_per_group, low, high,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    EACH: tl.constexpr, UPDATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """At most one token a sequence: _update_chain without its loop. A program takes EACH blocks of
    rows, and asks for the next one's state before it computes with this one's."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P * EACH - 1) // (BLOCK_P * EACH)
    first = (pid % tiles * (BLOCK_P * EACH)).to(tl.int32)
    p = first + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head, s = pid // tiles % H, pid // tiles // H
    g = head // heads_per_group
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(cu_idx + s).to(tl.int64)
    filled = tl.load(cu_idx + s + 1).to(tl.int64) > row
    slot = tl.load(slots_idx + s).to(tl.int64)
    on = filled & (slot >= 0)  # of a pad nothing is read, and its y is zeros
    on_p, on_n = on & (p < P), on & (n < N)
    rows = head * P + p
    h_at = state_ptr + slot * state_slot + rows[:, None] * N + n[None, :]
    scale_at = slot * scales_slot + rows
    mask = on_p[:, None] & (n < N)[None, :]
    h = load_state(h_at, scales_ptr, scale_at, mask, on_p)  # [BLOCK_P, BLOCK_N]
    A, D, bias = _load_head(A_ptr + head, D_ptr + head, bias_ptr + head)
    x_at, dt_at = x_ptr + row * x_t + head * x_h + p, dt_ptr + row * dt_t + head
    B_at, C_at = B_ptr + row * B_t + g * B_g + n, C_ptr + row * C_t + g * C_g + n
    x, dt, B, C = _load_token(x_at, dt_at, B_at, C_at, on, on_p, on_n)
    y_at, z_offset = y_ptr + (row * H + head) * P + p, row * z_t + head * z_h + p
    seed, position = _noise_key(seeds_ptr, lengths_idx, s, 1)
    for i in tl.static_range(EACH):
        at, at_scale, there, there_p = h_at, scale_at, mask, on_p  # of this block
        own, own_x = h, x
        if i + 1 < EACH:
            h_at += BLOCK_P * N
            scale_at += BLOCK_P
            on_p = on & (p + (i + 1) * BLOCK_P < P)
            mask = on_p[:, None] & (n < N)[None, :]
            h = load_state(h_at, scales_ptr, scale_at, mask, on_p)
            x = tl.load(x_at + (i + 1) * BLOCK_P, mask=on_p, other=0.0)
        own = _advance(own, own_x, dt, B, A, bias, low, high)
        inside = filled & (p + i * BLOCK_P < P)
        _emit(own, own_x, C, D, z_ptr, z_offset + i * BLOCK_P, y_at + i * BLOCK_P, there_p, inside)
        if UPDATE:
            stored, scale = _rounded(
                own, state_ptr, scales_ptr, seeds_ptr, seed, position, layer, rows + i * BLOCK_P,
                N, BLOCK_N,
            )  # fmt: skip
            store_state(stored, scale, at, scales_ptr, at_scale, there, there_p)


@triton.jit(do_not_specialize=["heads_per_group", "layer"])
def _update_chain(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, z_ptr, y_ptr, state_ptr, scales_ptr,
    seeds_ptr, lengths_idx, lanes_ptr, lane_scales_ptr, cu_idx, slots_idx, lane_slots_idx,
    layer, x_t, x_h, dt_t, B_t, B_g, C_t, C_g, z_t, z_h, state_slot, scales_slot,
    lanes_slot, lane_scales_slot, H, heads_per_group, low, high,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    UPDATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Any number of tokens a sequence, each continuing from the one before it."""
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p = (pid % tiles * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head, s = pid // tiles % H, pid // tiles // H
    g = head // heads_per_group
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(cu_idx + s).to(tl.int64)
    count = (tl.load(cu_idx + s + 1).to(tl.int64) - row).to(tl.int32)
    slot = tl.load(slots_idx + s).to(tl.int64)
    on = slot >= 0
    on_p, on_n = on & (p < P), on & (n < N)
    rows = head * P + p
    inner = rows[:, None] * N + n[None, :]
    all_rows = tl.full((), P, tl.int64) * H  # of a lane
    home = slot
    if lane_slots_idx is not None:
        home = tl.load(lane_slots_idx + s).to(tl.int64)
    kept_p = on_p & (count > 0)
    mask = kept_p[:, None] & (n < N)[None, :]
    state_at, scale_at = state_ptr + slot * state_slot + inner, slot * scales_slot + rows
    h = load_state(state_at, scales_ptr, scale_at, mask, kept_p)
    A, D, bias = _load_head(A_ptr + head, D_ptr + head, bias_ptr + head)
    seed, position = _noise_key(seeds_ptr, lengths_idx, s, count)
    x_at, dt_at = x_ptr + row * x_t + head * x_h + p, dt_ptr + row * dt_t + head
    B_at, C_at = B_ptr + row * B_t + g * B_g + n, C_ptr + row * C_t + g * C_g + n
    y_at, z_offset = y_ptr + (row * H + head) * P + p, row * z_t + head * z_h + p
    x, dt, B, C = _load_token(x_at, dt_at, B_at, C_at, on & (count > 0), on_p, on_n)
    for t in range(count):
        x_at, dt_at, B_at, C_at = x_at + x_t, dt_at + dt_t, B_at + B_t, C_at + C_t
        next_x, next_dt, next_B, next_C = _load_token(
            x_at, dt_at, B_at, C_at, on & (t + 1 < count), on_p, on_n
        )
        h = _advance(h, x, dt, B, A, bias, low, high)
        _emit(h, x, C, D, z_ptr, z_offset + t * z_t, y_at + t * H * P, on_p, p < P)
        stored, scale = _rounded(
            h, state_ptr, scales_ptr, seeds_ptr, seed, position + t, layer, rows, N, BLOCK_N
        )
        if lanes_ptr is not None:
            lane_at = lanes_ptr + home * lanes_slot + t * all_rows * N + inner
            lane_scale_at = home * lane_scales_slot + t * all_rows + rows
            store_state(stored, scale, lane_at, lane_scales_ptr, lane_scale_at, mask, kept_p)
        if UPDATE:
            last_p = kept_p & (t + 1 == count)
            last = last_p[:, None] & (n < N)[None, :]
            store_state(stored, scale, state_at, scales_ptr, scale_at, last, last_p)
        h = restore_state(stored, scale, scales_ptr)
        x, dt, B, C = next_x, next_dt, next_B, next_C


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


@triton.jit(do_not_specialize=["heads_per_group", "layer"])
def _update_tree(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, bias_ptr, z_ptr, y_ptr, state_ptr, scales_ptr,
    seeds_ptr, lengths_idx, lanes_ptr, lane_scales_ptr, cu_idx, slots_idx, lane_slots_idx, up_idx,
    layer, x_t, x_h, dt_t, B_t, B_g, C_t, C_g, z_t, z_h, state_slot, scales_slot,
    lanes_slot, lane_scales_slot, H, heads_per_group, low, high,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tokens that continue from any earlier one; each rounds as the chain of its path does."""
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
    rows = head * P + p
    inner = rows[:, None] * N + n[None, :]
    all_rows = tl.full((), P, tl.int64) * H  # of a lane
    home = slot
    if lane_slots_idx is not None:
        home = tl.load(lane_slots_idx + s).to(tl.int64)
    kept_p = on_p & (count > 0)
    mask = kept_p[:, None] & (n < N)[None, :]
    state_at = state_ptr + slot * state_slot + inner
    before = load_state(state_at, scales_ptr, slot * scales_slot + rows, mask, kept_p)
    A, D, bias = _load_head(A_ptr + head, D_ptr + head, bias_ptr + head)
    seed, first = _noise_key(seeds_ptr, lengths_idx, s, count)
    x_at, dt_at = x_ptr + row * x_t + head * x_h + p, dt_ptr + row * dt_t + head
    B_at, C_at = B_ptr + row * B_t + g * B_g + n, C_ptr + row * C_t + g * C_g + n
    y_at, z_offset = y_ptr + (row * H + head) * P + p, row * z_t + head * z_h + p
    for t in range(count):
        path = _path(up_idx + row, t)
        position, h = first, before
        for i in range(t):
            if (path >> i) & 1 != 0:
                x, dt, B, _ = _load_token(
                    x_at + i * x_t, dt_at + i * dt_t, B_at + i * B_t, C_at, on, on_p, on_n
                )
                h = _advance(h, x, dt, B, A, bias, low, high)
                stored, scale = _rounded(
                    h, state_ptr, scales_ptr, seeds_ptr, seed, position, layer, rows, N, BLOCK_N
                )
                h = restore_state(stored, scale, scales_ptr)
                position += 1
        x, dt, B, C = _load_token(
            x_at + t * x_t, dt_at + t * dt_t, B_at + t * B_t, C_at + t * C_t, on, on_p, on_n
        )
        h = _advance(h, x, dt, B, A, bias, low, high)
        _emit(h, x, C, D, z_ptr, z_offset + t * z_t, y_at + t * H * P, on_p, p < P)
        if lanes_ptr is not None:
            stored, scale = _rounded(
                h, state_ptr, scales_ptr, seeds_ptr, seed, position, layer, rows, N, BLOCK_N
            )
            lane_at = lanes_ptr + home * lanes_slot + t * all_rows * N + inner
            lane_scale_at = home * lane_scales_slot + t * all_rows + rows
            store_state(stored, scale, lane_at, lane_scales_ptr, lane_scale_at, mask, kept_p)
