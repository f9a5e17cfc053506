"""The kernel of `causal_conv1d` for prompts: rows of a sequence one after the other, in registers.

What it computes is in `conv1d`. It is bound by instructions as much as by bytes: at the rate of a
copy an H200 has 27 instructions for each element. So four rows are worked on a step, which leaves
no register to be moved from one row to the next, pads are told by zero weights instead of a select,
and SiLU takes six instructions: 16 an element in all.
"""

import triton
import triton.language as tl

from nemotriton.kernels.numerics import silu


@triton.jit
def _row(x_ptr, window_ptr, row_stride, x_stride, at, c, inside, owned, kept, W: tl.constexpr):
    """The row `at` of a sequence's u."""
    new = tl.load(x_ptr + at * x_stride + c, mask=inside & owned & (at >= 0), other=0.0)
    window = window_ptr + (at + (W - 1)) * row_stride + c
    return tl.where(at >= 0, new, tl.load(window, mask=inside & kept & (at < 0), other=0.0))


@triton.jit
def _next_window(x_ptr, window, row_stride, x_stride, n, c, inside, owned, kept, W: tl.constexpr):
    for row in tl.static_range(W - 1):
        at = n - (W - 1) + row
        last = _row(x_ptr, window, row_stride, x_stride, at, c, inside, owned, kept, W)
        tl.store(window + row * row_stride + c, last, mask=inside & owned)


@triton.jit
def _past(
    x_ptr, window_ptr, row_stride, x_stride, first, c, inside, owned, kept,
    back: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The row `back` before the program's first; zeros where the filter does not reach."""
    at, reached = first - back, inside & (back < W)
    u = _row(x_ptr, window_ptr, row_stride, x_stride, at, c, reached, owned, kept, W)
    return u.to(tl.float32)


@triton.jit
def _tap(w_ptr, tap_stride, inside, back: tl.constexpr, W: tl.constexpr):
    """The weights of the tap `back` tokens ago; zeros beyond the filter."""
    return tl.load(w_ptr - back * tap_stride, mask=inside & (back < W), other=0.0).to(tl.float32)


@triton.jit
def _taps(w_ptr, tap_stride, inside, W: tl.constexpr):
    w0 = _tap(w_ptr, tap_stride, inside, 0, W)
    w1 = _tap(w_ptr, tap_stride, inside, 1, W)
    w2 = _tap(w_ptr, tap_stride, inside, 2, W)
    return w0, w1, w2, _tap(w_ptr, tap_stride, inside, 3, W)


@triton.jit
def _four(x_at, x_stride, live, left, PAST: tl.constexpr):
    """Four rows, of `left` from PAST rows before them on; zeros beyond."""
    row0 = tl.load(x_at, mask=live & (left > PAST), other=0.0)
    row1 = tl.load(x_at + x_stride, mask=live & (left > PAST + 1), other=0.0)
    row2 = tl.load(x_at + 2 * x_stride, mask=live & (left > PAST + 2), other=0.0)
    row3 = tl.load(x_at + 3 * x_stride, mask=live & (left > PAST + 3), other=0.0)
    return row0, row1, row2, row3


@triton.jit
def _put(y_ptr, mask, now, past1, past2, past3, w0, w1, w2, w3, bias):
    """Store one row of outputs; sums run from the newest tap to the oldest, as everywhere."""
    acc = tl.fma(past3, w3, tl.fma(past2, w2, tl.fma(past1, w1, now * w0)))
    tl.store(y_ptr, silu(acc + bias).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def _conv1d_rows(
    x_ptr, w_ptr, b_ptr, state_ptr, fresh_ptr, y_ptr, cu_idx, slots_idx,
    x_stride, y_stride, w_stride, tap_stride, slot_stride, row_stride, C, tiles,
    W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of one sequence, four rows a step, for a block of channels; W is at most 4.

    Each row is read once, a step ahead of its use, and the last three stay in registers. Threads
    keep to their channels, so the order of their loads and stores is enough for the window. A pad's
    rows, weights and bias are zeros, and so are its outputs."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    c = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = pid // blocks % tiles * BLOCK_T
    s = pid // blocks // tiles
    start = tl.load(cu_idx + s).to(tl.int64)
    n = tl.load(cu_idx + s + 1).to(tl.int64) - start
    slot = tl.load(slots_idx + s).to(tl.int64)
    owned = slot >= 0
    kept = owned
    if fresh_ptr is not None:
        kept = owned & (tl.load(fresh_ptr + s) == 0)
    if first >= tl.maximum(n, 1):
        return
    inside = c < C
    live = inside & owned
    x_ptr += start * x_stride
    window = state_ptr + slot * slot_stride
    count = tl.minimum(n - first, BLOCK_T).to(tl.int32)
    x_at = x_ptr + first * x_stride + c
    y_at = y_ptr + (start + first) * y_stride + c
    row0, row1, row2, row3 = _four(x_at, x_stride, live, count, 0)
    past1 = _past(x_ptr, window, row_stride, x_stride, first, c, inside, owned, kept, 1, W)
    past2 = _past(x_ptr, window, row_stride, x_stride, first, c, inside, owned, kept, 2, W)
    past3 = _past(x_ptr, window, row_stride, x_stride, first, c, inside, owned, kept, 3, W)
    w0, w1, w2, w3 = _taps(w_ptr + c * w_stride + (W - 1) * tap_stride, tap_stride, live, W)
    bias = tl.zeros([BLOCK_C], tl.float32)
    if b_ptr is not None:
        bias = tl.load(b_ptr + c, mask=live, other=0.0).to(tl.float32)
    for i in range(0, count, 4):
        left = count - i
        x_at += 4 * x_stride
        next0, next1, next2, next3 = _four(x_at, x_stride, live, left, 4)
        now0, now1 = row0.to(tl.float32), row1.to(tl.float32)
        now2, now3 = row2.to(tl.float32), row3.to(tl.float32)
        _put(y_at, inside, now0, past1, past2, past3, w0, w1, w2, w3, bias)
        at = y_at + y_stride
        _put(at, inside & (left > 1), now1, now0, past1, past2, w0, w1, w2, w3, bias)
        at += y_stride
        _put(at, inside & (left > 2), now2, now1, now0, past1, w0, w1, w2, w3, bias)
        at += y_stride
        _put(at, inside & (left > 3), now3, now2, now1, now0, w0, w1, w2, w3, bias)
        y_at += 4 * y_stride
        past1, past2, past3 = now3, now2, now1
        row0, row1, row2, row3 = next0, next1, next2, next3
    if first == 0:
        _next_window(x_ptr, window, row_stride, x_stride, n, c, inside, owned, kept, W)
