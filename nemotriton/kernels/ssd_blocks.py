"""The two kernels of the fused chunked scan; `ssd_fused.py` holds the op and the launches.

Chunks are walked in blocks of L <= 64 tokens, PER_CHUNK of them a row of the chunk table; block b
belongs to row b // PER_CHUNK. All exponents are of two: a_j = max(dt_j A log2(e), -160) and
cum_m = a_1 + .. + a_m within a block. A token's step size is folded into the exponent,
fold_k = cum_k - log2(dt_k), +inf where there is no token, so that 2^(cum_m - fold_k) is the decay
from k to m times dt_k, and 0 for a k that is not there. -160 is 0 as a factor of fp32 all the same;
without it one huge step would leave the sums no digits for its neighbours.

    _prepare_blocks  decays [H, blocks, 2, L] fp32 = (cum, fold); scores [blocks, G, L, L] bf16 with
                     scores[k, m] = B_k . C_m for k <= m, else 0; spans [S, 2], each sequence's rows
    _scan_blocks     one program a sequence, head and BLOCK_P of its channels keeps the state
                     [BLOCK_P, BLOCK_N] in registers from the first block to the last:
                     y^T = h C^T 2^cum + x^T (scores * 2^(cum - fold)) + D x^T
                     h   = 2^total h + (x 2^(total - fold))^T B

The column form (y^T, not y) makes the decayed scores the right operand of their product, which goes
through shared memory: a left operand made in registers is where Hopper's compiler has its race.

Of a sequence's rows only the first and the last may be short if its table comes from `chunk_table`.
The full ones between are read without masks, by TMA where DESCRIBED; short ones, and every row of a
sequence whose table is otherwise, by masked loads: what lies behind a row may be another sequence.
"""

import math

import triton
import triton.language as tl

from nemotriton.kernels.numerics import SOFTPLUS_LINEAR
from nemotriton.kernels.ssd_chunk import chunk_rows
from nemotriton.kernels.ssm_state import load_state, round_state, state_noise, store_state

LOG2_E = tl.constexpr(math.log2(math.e))
VANISHED = tl.constexpr(-160.0)  # 2^-160 is below the smallest subnormal of fp32
# e = 2^(cum - fold) as bf16 times a score. Above the diagonal, where scores are 0, e may overflow:
# satfinite keeps it from being 0 * inf. The fma with -0 is a product that sm_80 has, too.
DECAYED = tl.constexpr("""{
    .reg .f32 a, b;
    .reg .b32 e, z;
    sub.f32 a, $2, $4;
    sub.f32 b, $3, $5;
    ex2.approx.ftz.f32 a, a;
    ex2.approx.ftz.f32 b, b;
    cvt.rn.satfinite.bf16x2.f32 e, b, a;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, e, $1, z;
}""")
# x times a weight given as the sum of two bf16: one rounding more than in fp32, of a small part
WEIGHTED = tl.constexpr("""{
    .reg .b32 t, z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 t, $1, $3, z;
    fma.rn.bf16x2 $0, $1, $2, t;
}""")


LOG2 = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")


@triton.jit
def log2_approx(x):
    """log2(x) within 2^-22 of it, or of 1; tl.log2 is exact to an ulp, at twenty instructions more.
    Subnormals count as 0, negative numbers give NaN."""
    return tl.inline_asm_elementwise(LOG2, "=f,f", [x], tl.float32, True, 1)


@triton.jit
def softplus_approx(x):
    """`numerics.softplus` within 1e-6 of it in a third of the instructions, which bind the first
    launch: a polynomial for log(1 + e) / e where e < 1/4, for the logarithm has no digits there."""
    e = tl.exp2(tl.where(x > SOFTPLUS_LINEAR, 0.0, x) * LOG2_E)
    p = -0.09238353 * e + 0.18173121
    p = p * e - 0.24778602
    p = p * e + 0.33320868
    p = p * e - 0.4999974
    log1p = tl.where(e < 0.25, p * e * e + e, log2_approx(1.0 + e) * (1.0 / LOG2_E))
    return tl.where(x > SOFTPLUS_LINEAR, x, log1p)


@triton.jit
def block_rows(chunks_idx, b, L: tl.constexpr, PER_CHUNK: tl.constexpr):
    """First token and number of tokens (0 to L) of block b."""
    first, tokens = chunk_rows(chunks_idx, b // PER_CHUNK)
    skip = b % PER_CHUNK * L
    return first + skip, tl.minimum(tl.maximum(tokens - skip, 0), L)


@triton.jit
def unknown_zero(count):
    """0 for a `count` of at least 0, which the compiler cannot know: offsets and masks built on it
    are built where they are used, not kept in registers through the loop that needs them all."""
    return tl.multiple_of(tl.minimum(count, 0).to(tl.int32), 64)


@triton.jit
def _prepare_decays(
    dt_ptr, A_ptr, bias_ptr, decays_ptr, weights_ptr, b, blocks, first, tokens, dt_t, h, on,
    low, high, L: tl.constexpr,
):  # fmt: skip
    """cum and fold of heads h [BLOCK_H] (where `on`) of one block; into `weights`, if there are
    any, 2^(total - fold) as the sum of two bf16."""
    q = tl.arange(0, L)
    live = q[None, :] < tokens
    A = tl.load(A_ptr + h, mask=on, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + h, mask=on, other=0.0).to(tl.float32)
    dt_at = dt_ptr + first * dt_t + h[:, None] + q[None, :] * dt_t
    dt = tl.load(dt_at, mask=on[:, None] & live, other=0.0).to(tl.float32)
    step = softplus_approx(dt + bias[:, None])
    step = tl.maximum(step, low, propagate_nan=tl.PropagateNan.ALL)
    step = tl.minimum(step, high, propagate_nan=tl.PropagateNan.ALL)
    step = tl.where(live, step, 0.0)
    log_decay = step * (A * LOG2_E)[:, None]
    log_decay = tl.maximum(log_decay, VANISHED, propagate_nan=tl.PropagateNan.ALL)
    cum = tl.cumsum(log_decay, 1)
    fold = cum - log2_approx(step)
    at = (h.to(tl.int64) * blocks + b)[:, None] * (2 * L) + q[None, :]
    tl.store(decays_ptr + at, cum, mask=on[:, None])
    tl.store(decays_ptr + at + L, fold, mask=on[:, None])
    if weights_ptr is not None:
        total = tl.sum(tl.where(q[None, :] == L - 1, cum, 0.0), 1)
        w = tl.exp2(total[:, None] - fold)
        w_high = w.to(tl.bfloat16)
        tl.store(weights_ptr + at, w_high, mask=on[:, None])
        w_low = (w - w_high.to(tl.float32)).to(tl.bfloat16)
        tl.store(weights_ptr + at + L, w_low, mask=on[:, None])


@triton.jit(do_not_specialize=["chunks", "blocks"])
def _prepare_blocks(
    dt_ptr, A_ptr, bias_ptr, B_ptr, C_ptr, decays_ptr, scores_ptr, spans_ptr, chunks_idx,
    dt_t, B_t, B_g, C_t, C_g, chunks, blocks, G, heads_per_group, low, high,
    N: tl.constexpr, L: tl.constexpr, PER_CHUNK: tl.constexpr,
    TILES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # the scan's programs come when the last of these have started, and wait for their ends
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0).to(tl.int64)
    # triangles, which wait for memory, between tables of decays, which compute
    cell, kind = pid // (1 + TILES), (pid % (1 + TILES)).to(tl.int32)
    b, g = cell // G, cell % G
    first, tokens = block_rows(chunks_idx, b, L, PER_CHUNK)
    if kind > 0:
        r = (kind - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        h = (g * heads_per_group).to(tl.int32) + r
        _prepare_decays(
            dt_ptr, A_ptr, bias_ptr, decays_ptr, None, b, blocks, first, tokens, dt_t, h,
            r < heads_per_group, low, high, L,
        )  # fmt: skip
    else:
        n, q = tl.arange(0, BLOCK_N), tl.arange(0, L)
        mask = (q < tokens)[:, None] & (n < N)[None, :]
        B_at = B_ptr + first * B_t + g * B_g + q[:, None] * B_t + n[None, :]
        C_at = C_ptr + first * C_t + g * C_g + q[:, None] * C_t + n[None, :]
        B = tl.load(B_at, mask=mask, other=0.0)
        C = tl.load(C_at, mask=mask, other=0.0)
        scores = tl.dot(B, tl.trans(C), input_precision="ieee")
        scores = tl.where(q[:, None] <= q[None, :], scores, 0.0)
        at = scores_ptr + cell * (L * L) + q[:, None] * L + q[None, :]
        tl.store(at, scores.to(tl.bfloat16))
        # a sequence's rows stand behind each other: first and last know it by their neighbour
        c = b // PER_CHUNK
        s = tl.load(chunks_idx + c * 3).to(tl.int64)
        before = tl.load(chunks_idx + c * 3 - 3, mask=c > 0, other=-1).to(tl.int64)
        after = tl.load(chunks_idx + c * 3 + 3, mask=c + 1 < chunks, other=-1).to(tl.int64)
        one = (g == 0) & (b % PER_CHUNK == 0) & (s >= 0) & (tokens > 0)
        tl.store(spans_ptr + s * 2, c.to(tl.int32), mask=one & (before != s))
        tl.store(spans_ptr + s * 2 + 1, (c + 1).to(tl.int32), mask=one & (after != s))


@triton.jit
def _decayed(scores, cum, fold, PACKED: tl.constexpr):
    """scores [k, m] times 2^(cum_m - fold_k), in bf16."""
    if PACKED:
        s = tl.inline_asm_elementwise(
            DECAYED, "=r,r,f,f,f,f", [scores, cum[None, :], fold[:, None]], tl.bfloat16, True, 2
        )
    else:
        # what is above 100 lies above the diagonal, where scores are 0: it has only to be finite
        e = tl.exp2(tl.minimum(cum[None, :] - fold[:, None], 100.0))
        s = (scores.to(tl.float32) * e).to(tl.bfloat16)
    return s


@triton.jit
def _weighted(xt, w, PACKED: tl.constexpr):
    """xt [BLOCK_P, L] times w [L], in bf16."""
    if PACKED:
        high = w.to(tl.bfloat16)
        low = (w - high.to(tl.float32)).to(tl.bfloat16)
        xw = tl.inline_asm_elementwise(
            WEIGHTED, "=r,r,r,r", [xt, high[None, :], low[None, :]], tl.bfloat16, True, 2
        )
    else:
        xw = (xt.to(tl.float32) * w[None, :]).to(tl.bfloat16)
    return xw


@triton.jit
def _advance(x, B, C, scores, cum, fold, total, h, D, PACKED: tl.constexpr):
    """One block: y [L, BLOCK_P] in fp32 and the next state."""
    xt = tl.trans(x)
    s = _decayed(scores, cum, fold, PACKED)
    acc = tl.dot(h.to(tl.bfloat16), tl.trans(C), input_precision="ieee") * tl.exp2(cum)[None, :]
    acc = tl.dot(xt, s, acc, input_precision="ieee") + D * xt.to(tl.float32)
    weighted = _weighted(xt, tl.exp2(total - fold), PACKED)
    h = tl.dot(weighted, B, h * tl.exp2(total), input_precision="ieee")
    return tl.trans(acc), h


@triton.jit
def _masked_blocks(
    x_ptr, B_ptr, C_ptr, y_ptr, scores_ptr, decay_at, chunks_idx,
    x_t, B_t, C_t, y_t, G, D, h, begin, end, left,
    N: tl.constexpr, L: tl.constexpr, PER_CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) row by row; returns the state behind them. The pointers are those of the
    program's group, head and channels, of which `left` there are."""
    for b in tl.range(begin, end, num_stages=2):
        first, tokens = block_rows(chunks_idx, b, L, PER_CHUNK)
        zero = unknown_zero(first)
        q, p, n = zero + tl.arange(0, L), zero + tl.arange(0, BLOCK_P), zero + tl.arange(0, BLOCK_N)
        live = q < tokens
        in_p, in_n = live[:, None] & (p < left)[None, :], live[:, None] & (n < N)[None, :]
        x_at = x_ptr + first * x_t + (q[:, None] * x_t + p[None, :])
        x = tl.load(x_at, mask=in_p, other=0.0)
        B = tl.load(B_ptr + first * B_t + (q[:, None] * B_t + n[None, :]), mask=in_n, other=0.0)
        C = tl.load(C_ptr + first * C_t + (q[:, None] * C_t + n[None, :]), mask=in_n, other=0.0)
        scores = tl.load(scores_ptr + b * G * (L * L) + q[:, None] * L + q[None, :])
        cum, fold = tl.load(decay_at + b * (2 * L) + q), tl.load(decay_at + b * (2 * L) + L + q)
        total = tl.load(decay_at + b * (2 * L) + L - 1)
        y, h = _advance(x, B, C, scores, cum, fold, total, h, D, PACKED)
        y_at = y_ptr + first * y_t + (q[:, None] * y_t + p[None, :])
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=in_p)
    return h


@triton.jit
def _whole_blocks(
    x_desc, B_desc, C_desc, y_desc, scores_desc, x_ptr, B_ptr, C_ptr, y_ptr, scores_ptr, decay_at,
    x_t, B_t, C_t, y_t, x_col, B_col, G, g, D, h, first, begin, count, left,
    N: tl.constexpr, L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr, DESCRIBED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`count` blocks of L tokens each, from block `begin` at token `first`; as `_masked_blocks`."""
    q, p, n = tl.arange(0, L), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    last = begin + count - 1
    # one block ahead: a scalar that is loaded where it is needed would be waited for
    total = tl.load(decay_at + begin * (2 * L) + L - 1, mask=count > 0, other=0.0)
    for i in tl.range(0, count, num_stages=STAGES):
        b, row = begin + i, first + i * L
        if DESCRIBED:
            t = row.to(tl.int32)
            x, C = x_desc.load([t, x_col]), C_desc.load([t, B_col])
            B = B_desc.load([t, B_col])
            scores = scores_desc.load([((b * G + g) * L).to(tl.int32), 0])
        else:
            in_p, in_n = (p < left)[None, :], (n < N)[None, :]
            x_at = x_ptr + row * x_t + (q[:, None] * x_t + p[None, :])
            x = tl.load(x_at, mask=in_p, other=0.0)
            C = tl.load(C_ptr + row * C_t + (q[:, None] * C_t + n[None, :]), mask=in_n, other=0.0)
            B = tl.load(B_ptr + row * B_t + (q[:, None] * B_t + n[None, :]), mask=in_n, other=0.0)
            scores = tl.load(scores_ptr + b * G * (L * L) + q[:, None] * L + q[None, :])
        cum, fold = tl.load(decay_at + b * (2 * L) + q), tl.load(decay_at + b * (2 * L) + L + q)
        y, h = _advance(x, B, C, scores, cum, fold, total, h, D, PACKED)
        y = y.to(y_ptr.dtype.element_ty)
        if DESCRIBED:
            y_desc.store([t, x_col], y)
        else:
            y_at = y_ptr + row * y_t + (q[:, None] * y_t + p[None, :])
            tl.store(y_at, y, mask=(p < left)[None, :])
        total = tl.load(decay_at + tl.minimum(b + 1, last) * (2 * L) + L - 1)
    return h


@triton.jit
def _zero_rows(y_ptr, y_t, row, end, left, L: tl.constexpr, BLOCK_P: tl.constexpr):
    """Zeros in rows [row, end) of y."""
    q, p = tl.arange(0, L), tl.arange(0, BLOCK_P)
    for first in range(row, end, L):
        at = first + q
        mask = (at < end)[:, None] & (p < left)[None, :]
        zeros = tl.zeros((L, BLOCK_P), y_ptr.dtype.element_ty)
        tl.store(y_ptr + at[:, None] * y_t + p[None, :], zeros, mask=mask)


@triton.jit
def _sections(
    chunks_idx, spans_idx, s, length, Q: tl.constexpr, L: tl.constexpr, PER_CHUNK: tl.constexpr
):
    """How the rows of sequence s are walked: its first block, then the numbers of blocks that are
    masked, whole (from token `at`), and masked again."""
    begin = tl.load(spans_idx + s * 2, mask=length > 0, other=0).to(tl.int64)
    end = tl.load(spans_idx + s * 2 + 1, mask=length > 0, other=0).to(tl.int64)
    rows = end - begin
    start = tl.load(chunks_idx + begin * 3 + 1, mask=rows > 0, other=0).to(tl.int64)
    head = tl.load(chunks_idx + begin * 3 + 2, mask=rows > 0, other=0).to(tl.int64)
    tail = tl.load(chunks_idx + end * 3 - 1, mask=rows > 0, other=0).to(tl.int64)
    short_head = (head < Q).to(tl.int64)
    short_tail = ((tail < Q) & (rows > 1)).to(tl.int64)
    whole = rows - short_head - short_tail
    # no row is longer than Q: the sum is the length only where those between are all full
    regular = short_head * head + whole * Q + short_tail * tail == length
    if Q % L != 0:  # blocks do not tile a full row
        regular = length < 0
    before = tl.where(regular, short_head, rows) * PER_CHUNK
    whole = tl.where(regular, whole, 0) * PER_CHUNK
    after = tl.where(regular, short_tail, 0) * PER_CHUNK
    return begin * PER_CHUNK, before, whole, after, start + short_head * head


@triton.jit
def _state_tile(
    count, slot, head, p0, left, state_slot, scales_slot,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of a state tile [BLOCK_P, BLOCK_N]: its rows' numbers, the offsets of its elements and of its
    rows' scales, and which elements and rows there are."""
    p, n = unknown_zero(count) + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    rows = head * P + p0 + p
    offsets = slot * state_slot + (head * P + p0) * N + (p[:, None] * N + n[None, :])
    inside = (p < left)[:, None] & (n < N)[None, :]
    return rows, offsets, slot * scales_slot + rows, inside, p < left


@triton.jit
def _as_stored(
    h, state_ptr, scales_ptr, seeds_ptr, lengths_idx, s, rows, layer,
    N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The final state of sequence s in the format of its cell."""
    if seeds_ptr is None:
        stored, scale = round_state(h, state_ptr, scales_ptr, None)
    else:
        position = tl.load(lengths_idx + s).to(tl.int64) - 1
        noise = state_noise(tl.load(seeds_ptr + s), position, layer, rows, N, BLOCK_N)
        stored, scale = round_state(h, state_ptr, scales_ptr, noise)
    return stored, scale


@triton.jit(do_not_specialize=["blocks", "layer"])
def _scan_blocks(
    x_desc, B_desc, C_desc, y_desc, scores_desc, x_ptr, B_ptr, C_ptr, D_ptr, y_ptr, decays_ptr,
    scores_ptr, state_ptr, scales_ptr, seeds_ptr, fresh_ptr, lengths_idx, spans_idx, chunks_idx,
    cu_idx, slots_idx,
    x_t, x_h, B_t, B_g, C_t, C_g, state_slot, scales_slot, layer, blocks, H, G, heads_per_group,
    P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, L: tl.constexpr, PER_CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr, DESCRIBED: tl.constexpr,
    STAGES: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0).to(tl.int64)
    p0 = (pid % tiles * BLOCK_P).to(tl.int32)
    i, s = pid // tiles % H, pid // tiles // H
    head = i % STEP * (H // STEP) + i // STEP  # see `ssd_loads.item_row`
    g = head // heads_per_group
    slot = tl.load(slots_idx + s).to(tl.int64)
    start = tl.load(cu_idx + s).to(tl.int64)
    stop = tl.load(cu_idx + s + 1).to(tl.int64)
    fresh = tl.load(fresh_ptr + s) != 0
    live = (slot >= 0) & ((stop > start) | fresh)
    y_t, y_col, left = H * P, head * P + p0, P - p0
    _zero_rows(y_ptr + y_col, y_t, start, tl.where(slot < 0, stop, start), left, L, BLOCK_P)
    length = tl.where(slot < 0, 0, stop - start)
    b, before, whole, after, at = _sections(chunks_idx, spans_idx, s, length, Q, L, PER_CHUNK)
    rows, offsets, row_offsets, inside, in_rows = _state_tile(
        start, slot, head, p0, left, state_slot, scales_slot, P, N, BLOCK_P, BLOCK_N
    )
    # what a fresh sequence's slot holds is never read: it may be NaN
    kept = live & (fresh == 0)
    h = load_state(state_ptr + offsets, scales_ptr, row_offsets, inside & kept, in_rows & kept)
    D = tl.load(D_ptr + head).to(tl.float32)
    x_at, B_at, C_at = x_ptr + head * x_h + p0, B_ptr + g * B_g, C_ptr + g * C_g
    scores_at, decay_at = scores_ptr + g * (L * L), decays_ptr + head * blocks * (2 * L)
    h = _masked_blocks(
        x_at, B_at, C_at, y_ptr + y_col, scores_at, decay_at, chunks_idx,
        x_t, B_t, C_t, y_t, G, D, h, b, b + before, left,
        N, L, PER_CHUNK, BLOCK_P, BLOCK_N, PACKED,
    )  # fmt: skip
    h = _whole_blocks(
        x_desc, B_desc, C_desc, y_desc, scores_desc, x_at, B_at, C_at, y_ptr + y_col, scores_at,
        decay_at, x_t, B_t, C_t, y_t, y_col.to(tl.int32), (g * N).to(tl.int32), G, g, D, h,
        at, b + before, whole.to(tl.int32), left,
        N, L, BLOCK_P, BLOCK_N, PACKED, DESCRIBED, STAGES,
    )  # fmt: skip
    h = _masked_blocks(
        x_at, B_at, C_at, y_ptr + y_col, scores_at, decay_at, chunks_idx,
        x_t, B_t, C_t, y_t, G, D, h, b + before + whole, b + before + whole + after, left,
        N, L, PER_CHUNK, BLOCK_P, BLOCK_N, PACKED,
    )  # fmt: skip
    rows, offsets, row_offsets, inside, in_rows = _state_tile(
        stop, slot, head, p0, left, state_slot, scales_slot, P, N, BLOCK_P, BLOCK_N
    )
    stored, scale = _as_stored(
        h, state_ptr, scales_ptr, seeds_ptr, lengths_idx, s, rows, layer, N, BLOCK_N
    )
    store_state(
        stored, scale, state_ptr + offsets, scales_ptr, row_offsets, inside & live, in_rows & live
    )
