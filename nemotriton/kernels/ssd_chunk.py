"""The five kernels of the chunked scan; `ssd.py` holds the formula, the twin and the launches.

    _chunk_steps    dt -> step sizes and the running sums s of dt A log2(e) within each chunk
    _chunk_scores   C_i . B_j of each chunk and group
    _chunk_states   sum_j 2^(s_Q - s_j) dt_j x_j B_j^T of each chunk and head
    _pass_states    runs through the chunks of a sequence: what stood in a chunk's place is added
                    to the state, and the state before the chunk is left there instead
    _chunk_scan     y from the scores, the state before the chunk, and D x

Between them, all fp32: steps and sums [H, T]; spans int32 [S, 2], the chunks of each sequence;
scores [chunks, G, Q, Q]; states [chunks, H, P, N]. A chunk of a pad (slot -1) is computed like any
other, but its y is zeros and its state goes nowhere. Rows of the chunk table with no tokens, or
with sequence -1, do nothing.

Matrix products take bf16 operands where x is bf16, else fp32 ones: in full where x is fp32, and as
tf32 where x is fp16, whose ten bits of mantissa it has without the overflow at 65,504.

Of a tensor `foo`, foo_t is the stride of tokens, foo_h of heads, foo_g of groups. Offsets inside a
chunk and a head are int32, everything they are added to is int64.
"""

import math

import torch
import triton
import triton.language as tl

from nemotriton.kernels.op import Tile, cdiv, launch, next_pow2
from nemotriton.kernels.ssm_state import (
    StateNoise,
    load_state,
    round_state,
    state_noise,
    store_state,
)
from nemotriton.kernels.ssm_step import step_size

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def chunk_rows(chunks_idx, c):
    """First token (int64) and number of tokens (int32) of chunk c."""
    first = tl.load(chunks_idx + c * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_idx + c * 3 + 2).to(tl.int64)
    return first, tokens.to(tl.int32)


@triton.jit(do_not_specialize=["T", "chunks"])
def _chunk_steps(
    dt_ptr, A_ptr, bias_ptr, step_ptr, sum_ptr, spans_ptr, chunks_idx,
    dt_t, T, chunks, H, low, high,
    BLOCK_H: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(H, BLOCK_H)
    c = pid // blocks
    h = (pid % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    q = tl.arange(0, BLOCK_Q)
    s = tl.load(chunks_idx + c * 3).to(tl.int64)
    first, tokens = chunk_rows(chunks_idx, c)
    mask = (h < H)[:, None] & (q < tokens)[None, :]
    A = tl.load(A_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    dt_at = dt_ptr + first * dt_t + h[:, None] + q[None, :] * dt_t
    dt = tl.load(dt_at, mask=mask, other=0.0)
    step = step_size(dt.to(tl.float32), bias[:, None], low, high)
    step = tl.where(mask, step, 0.0)  # [BLOCK_H, BLOCK_Q]
    at = h[:, None] * T + first + q[None, :]
    # Later only differences of the sums count, which may be far smaller than the sums: they are
    # added up in fp64 (a few operations a token and head) and rounded once.
    log_decay = step.to(tl.float64) * (A.to(tl.float64) * LOG2_E)[:, None]
    tl.store(step_ptr + at, step, mask=mask)
    tl.store(sum_ptr + at, tl.cumsum(log_decay, 1).to(tl.float32), mask=mask)
    # a sequence's chunks stand behind each other: the first and the last know it by their neighbour
    before = tl.load(chunks_idx + c * 3 - 3, mask=c > 0, other=-1).to(tl.int64)
    after = tl.load(chunks_idx + c * 3 + 3, mask=c + 1 < chunks, other=-1).to(tl.int64)
    one = (pid % blocks == 0) & (s >= 0) & (tokens > 0)
    tl.store(spans_ptr + s * 2, c.to(tl.int32), mask=one & (before != s))
    tl.store(spans_ptr + s * 2 + 1, (c + 1).to(tl.int32), mask=one & (after != s))


@triton.jit
def _chunk_scores(
    B_ptr, C_ptr, scores_ptr, chunks_idx,
    B_t, B_g, C_t, C_g, G,
    N: tl.constexpr, Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    tiles_k: tl.constexpr = (Q + BLOCK_K - 1) // BLOCK_K
    tiles_m: tl.constexpr = (Q + BLOCK_M - 1) // BLOCK_M
    k0 = (pid % tiles_k * BLOCK_K).to(tl.int32)
    m0 = (pid // tiles_k % tiles_m * BLOCK_M).to(tl.int32)
    group = pid // (tiles_k * tiles_m)
    c, g = group // G, group % G
    first, tokens = chunk_rows(chunks_idx, c)
    if (m0 < tokens) & (k0 < tokens) & (k0 < m0 + BLOCK_M):  # on or below the diagonal
        m, k = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K)
        n = tl.arange(0, BLOCK_N)
        C_at = C_ptr + first * C_t + g * C_g + m[:, None] * C_t + n[None, :]
        B_at = B_ptr + first * B_t + g * B_g + k[None, :] * B_t + n[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for n0 in range(0, N, BLOCK_N):
            left = n < N - n0
            C = tl.load(C_at + n0, mask=(m < tokens)[:, None] & left[None, :], other=0.0)
            B = tl.load(B_at + n0, mask=(k < tokens)[None, :] & left[:, None], other=0.0)
            acc = tl.dot(C, B, acc, input_precision=PRECISION)
        at = scores_ptr + group * Q * Q + m[:, None] * Q + k[None, :]
        tl.store(at, acc, mask=(m < tokens)[:, None] & (k < tokens)[None, :])


@triton.jit(do_not_specialize=["T"])
def _chunk_states(
    x_ptr, B_ptr, step_ptr, sum_ptr, states_ptr, chunks_idx,
    x_t, x_h, B_t, B_g, T, H, heads_per_group,
    P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    n = (pid % tiles_n * BLOCK_N).to(tl.int32) + tl.arange(0, BLOCK_N)
    p = (pid // tiles_n % tiles_p * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    head = pid // (tiles_n * tiles_p)
    c, h = head // H, head % H
    first, tokens = chunk_rows(chunks_idx, c)
    if tokens > 0:
        row = h * T + first
        total = tl.load(sum_ptr + row + tokens - 1)
        k = tl.arange(0, BLOCK_K)
        x_at = x_ptr + first * x_t + h * x_h + p[:, None]
        B_at = B_ptr + first * B_t + h // heads_per_group * B_g + n[None, :]
        acc = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
        for k0 in range(0, Q, BLOCK_K):
            j = k0 + k
            live = j < tokens
            s = tl.load(sum_ptr + row + j, mask=live, other=0.0)
            step = tl.load(step_ptr + row + j, mask=live, other=0.0)
            weight = tl.exp2(tl.minimum(total - s, 0.0)) * step  # [BLOCK_K]
            x = tl.load(x_at + j[None, :] * x_t, mask=(p < P)[:, None] & live[None, :], other=0.0)
            B = tl.load(B_at + j[:, None] * B_t, mask=live[:, None] & (n < N)[None, :], other=0.0)
            B = (B.to(tl.float32) * weight[:, None]).to(OPERAND)
            acc = tl.dot(x.to(OPERAND), B, acc, input_precision=PRECISION)
        at = states_ptr + head * P * N + p[:, None] * N + n[None, :]
        tl.store(at, acc, mask=(p < P)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["T", "layer"])
def _pass_states(
    states_ptr, state_ptr, scales_ptr, seeds_ptr, sum_ptr, fresh_ptr, lengths_idx, spans_idx,
    chunks_idx, cu_idx, slots_idx,
    layer, state_slot, scales_slot, T, H,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    p = (pid % tiles * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    head = pid // tiles
    s, h = head // H, head % H
    slot = tl.load(slots_idx + s).to(tl.int64)
    start = tl.load(cu_idx + s).to(tl.int64)
    filled = tl.load(cu_idx + s + 1).to(tl.int64) > start
    fresh = tl.load(fresh_ptr + s) != 0
    live = (slot >= 0) & (filled | fresh)
    rows = h * P + p
    inner = p[:, None] * N + n[None, :]
    state_at = state_ptr + slot * state_slot + h * P * N + inner
    scale_at = slot * scales_slot + rows
    inside = (p < P)[:, None] & (n < N)[None, :]
    # what a fresh sequence's slot holds is never read: it may be NaN
    kept = live & (fresh == 0)
    v = load_state(state_at, scales_ptr, scale_at, inside & kept, (p < P) & kept)
    begin = tl.load(spans_idx + s * 2, mask=live & filled, other=0).to(tl.int64)
    end = tl.load(spans_idx + s * 2 + 1, mask=live & filled, other=0).to(tl.int64)
    for c in range(begin, end):
        first, tokens = chunk_rows(chunks_idx, c)
        total = tl.load(sum_ptr + h * T + first + tokens - 1)
        place = states_ptr + (c * H + h) * P * N + inner
        own = tl.load(place, mask=inside, other=0.0)
        tl.store(place, v, mask=inside)
        v = v * tl.exp2(total) + own
    if seeds_ptr is None:
        stored, scale = round_state(v, state_ptr, scales_ptr, None)
    else:
        position = tl.load(lengths_idx + s).to(tl.int64) - 1
        noise = state_noise(tl.load(seeds_ptr + s), position, layer, rows, N, BLOCK_N)
        stored, scale = round_state(v, state_ptr, scales_ptr, noise)
    store_state(stored, scale, state_at, scales_ptr, scale_at, inside & live, (p < P) & live)


@triton.jit(do_not_specialize=["T"])
def _chunk_scan(
    x_ptr, C_ptr, D_ptr, step_ptr, sum_ptr, scores_ptr, states_ptr, y_ptr, chunks_idx, slots_idx,
    x_t, x_h, C_t, C_g, T, H, heads_per_group,
    P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    tiles_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    tiles_m: tl.constexpr = (Q + BLOCK_M - 1) // BLOCK_M
    p = (pid % tiles_p * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    h = pid // tiles_p % H
    tile = pid // (tiles_p * H)
    c, m0 = tile // tiles_m, (tile % tiles_m * BLOCK_M).to(tl.int32)
    g = h // heads_per_group
    seq = tl.load(chunks_idx + c * 3).to(tl.int64)
    first, tokens = chunk_rows(chunks_idx, c)
    if m0 < tokens:
        m = m0 + tl.arange(0, BLOCK_M)
        slot = tl.load(slots_idx + seq).to(tl.int64)
        live = tl.where(slot >= 0, tokens, 0)  # rows that are read: none of a pad
        row = h * T + first
        sum_m = tl.load(sum_ptr + row + m, mask=m < live, other=0.0)
        n = tl.arange(0, BLOCK_N)
        C_at = C_ptr + first * C_t + g * C_g + m[:, None] * C_t + n[None, :]
        h_at = states_ptr + (c * H + h) * P * N + p[None, :] * N + n[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
        for n0 in range(0, N, BLOCK_N):
            left = n < N - n0
            C = tl.load(C_at + n0, mask=(m < live)[:, None] & left[None, :], other=0.0)
            before = (p < P)[None, :] & left[:, None] & (slot >= 0)
            state = tl.load(h_at + n0, mask=before, other=0.0)
            acc = tl.dot(C.to(OPERAND), state.to(OPERAND), acc, input_precision=PRECISION)
        # The computed factor is the right operand: on Hopper a left one stays in registers, and
        # this compiler's assembler lets the next step overwrite them under the running product.
        scores_at = scores_ptr + (c * (H // heads_per_group) + g) * Q * Q + m[None, :] * Q
        k = tl.arange(0, BLOCK_K)
        x_base = x_ptr + first * x_t + h * x_h
        inner = tl.zeros((BLOCK_P, BLOCK_M), tl.float32)
        for k0 in range(0, tl.minimum(m0 + BLOCK_M, live), BLOCK_K):
            j = k0 + k
            sum_j = tl.load(sum_ptr + row + j, mask=j < live, other=0.0)
            step = tl.load(step_ptr + row + j, mask=j < live, other=0.0)
            causal = (j[:, None] <= m[None, :]) & (m < live)[None, :]
            w = tl.load(scores_at + j[:, None], mask=causal, other=0.0)  # [BLOCK_K, BLOCK_M]
            w *= tl.exp2(tl.minimum(sum_m[None, :] - sum_j[:, None], 0.0)) * step[:, None]
            mask = (p < P)[:, None] & (j < live)[None, :]
            x = tl.load(x_base + j[None, :] * x_t + p[:, None], mask=mask, other=0.0)
            inner = tl.dot(x.to(OPERAND), w.to(OPERAND), inner, input_precision=PRECISION)
        mask = (m < live)[:, None] & (p < P)[None, :]
        x = tl.load(x_base + m[:, None] * x_t + p[None, :], mask=mask, other=0.0).to(tl.float32)
        y = acc * tl.exp2(sum_m)[:, None] + tl.trans(inner) + tl.load(D_ptr + h).to(tl.float32) * x
        y_at = y_ptr + (first * H + h) * P + m[:, None] * (H * P) + p[None, :]
        # the rows of a pad are zeros
        mask = (m < tokens)[:, None] & (p < P)[None, :]
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


# --------------------------------------------------------------------------------------- launches
def chunk_steps(
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    chunks: torch.Tensor,
    slots: torch.Tensor,
    Q: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Step sizes and sums [H, T], spans [S, 2]; the span of an empty sequence is not written."""
    (T, H), n, S = dt.shape, chunks.shape[0], slots.shape[0]
    steps = torch.empty((H, T), dtype=torch.float32, device=dt.device)
    sums = torch.empty((H, T), dtype=torch.float32, device=dt.device)
    spans = torch.empty((S, 2), dtype=torch.int32, device=dt.device)
    low, high = float(dt_limit[0]), float(dt_limit[1])
    block = min(16, next_pow2(H))
    operands = (dt, A, dt_bias, steps, sums, spans, chunks, dt.stride(0), T, n, H, low, high)
    launch(_chunk_steps, (n * cdiv(H, block),), *operands, BLOCK_H=block, BLOCK_Q=next_pow2(Q))
    return steps, sums, spans


def chunk_scores(
    B: torch.Tensor, C: torch.Tensor, chunks: torch.Tensor, Q: int, tile: Tile
) -> torch.Tensor:
    """Scores [chunks, G, Q, Q] fp32; what lies above the tiles of the diagonal is not written."""
    n, (G, N) = chunks.shape[0], B.shape[1:]
    scores = torch.empty((n, G, Q, Q), dtype=torch.float32, device=B.device)
    grid = (n * G * cdiv(Q, tile["BLOCK_M"]) * cdiv(Q, tile["BLOCK_K"]),)
    operands = (B, C, scores, chunks, *B.stride()[:2], *C.stride()[:2], G, N, Q)
    launch(
        _chunk_scores, grid, *operands,
        BLOCK_M=tile["BLOCK_M"], BLOCK_K=tile["BLOCK_K"], BLOCK_N=tile["BLOCK_N"],
        PRECISION=_operands(B.dtype)[1],
        num_warps=tile["num_warps"], num_stages=tile["num_stages"],
    )  # fmt: skip
    return scores


def chunk_states(
    x: torch.Tensor,
    B: torch.Tensor,
    steps: torch.Tensor,
    sums: torch.Tensor,
    chunks: torch.Tensor,
    Q: int,
    tile: Tile,
) -> torch.Tensor:
    """What each chunk adds to the state [chunks, H, P, N] fp32."""
    (T, H, P), (G, N), n = x.shape, B.shape[1:], chunks.shape[0]
    states = torch.empty((n, H, P, N), dtype=torch.float32, device=x.device)
    grid = (n * H * cdiv(P, tile["BLOCK_P"]) * cdiv(N, tile["BLOCK_N"]),)
    strides = (*x.stride()[:2], *B.stride()[:2])
    OPERAND, PRECISION = _operands(x.dtype)
    launch(
        _chunk_states, grid, x, B, steps, sums, states, chunks, *strides, T, H, H // G, P, N, Q,
        BLOCK_P=tile["BLOCK_P"], BLOCK_N=tile["BLOCK_N"], BLOCK_K=tile["BLOCK_K"],
        OPERAND=OPERAND, PRECISION=PRECISION,
        num_warps=tile["num_warps"], num_stages=tile["num_stages"],
    )  # fmt: skip
    return states


def pass_states(
    states: torch.Tensor,
    state: torch.Tensor,
    sums: torch.Tensor,
    spans: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor,
    chunks: torch.Tensor,
    scales: torch.Tensor | None,
    noise: StateNoise | None,
) -> None:
    """Turn what chunks add into the states before them, and store the final ones in `state`."""
    H, P, N = state.shape[1:]
    width = next_pow2(N)
    block = max(1, min(1024 // width, next_pow2(P)))
    grid = (slots.shape[0] * H * cdiv(P, block),)
    seeds, lengths, layer = (None, None, 0) if noise is None else noise
    tensors = (states, state, scales, seeds, sums, fresh, lengths, spans, chunks, cu, slots)
    ints = (layer, state.stride(0), 0 if scales is None else scales.stride(0), sums.shape[1], H)
    launch(_pass_states, grid, *tensors, *ints, P=P, N=N, BLOCK_P=block, BLOCK_N=width)


def chunk_scan(
    x: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    steps: torch.Tensor,
    sums: torch.Tensor,
    scores: torch.Tensor,
    states: torch.Tensor,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    tile: Tile,
) -> torch.Tensor:
    """y [T, H, P] in x's dtype, from the scores and the states before each chunk."""
    (T, H, P), (G, N), Q = x.shape, C.shape[1:], scores.shape[-1]
    y = torch.empty((T, H, P), dtype=x.dtype, device=x.device)
    grid = (chunks.shape[0] * H * cdiv(Q, tile["BLOCK_M"]) * cdiv(P, tile["BLOCK_P"]),)
    operands = (x, C, D, steps, sums, scores, states, y, chunks, slots)
    strides = (*x.stride()[:2], *C.stride()[:2])
    OPERAND, PRECISION = _operands(x.dtype)
    sizes = (T, H, H // G, P, N, Q)
    launch(
        _chunk_scan, grid, *operands, *strides, *sizes, **tile,
        OPERAND=OPERAND, PRECISION=PRECISION,
    )  # fmt: skip
    return y


def _operands(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """Type and precision of matrix operands for x of `dtype` (see above)."""
    if dtype == torch.bfloat16:
        return tl.bfloat16, "ieee"
    return tl.float32, "ieee" if dtype == torch.float32 else "tf32"
