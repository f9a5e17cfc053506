"""Kernels of a mixture-of-experts layer at a few tokens; `moe_few` has their ops.

A program's number says which matrix it takes rows of, or which token it routes. All wait for the
kernel before them with lines of their weights on the way (see `dependent`). Programs read the same
x: with ROTATE neighbours begin at different columns and go round, so that they do not ask the few
memory banks that hold the next ones all at once.
"""

import triton
import triton.language as tl

from nemotriton.kernels.dependent import prefetch
from nemotriton.kernels.gemm_stream import dot_parts, e4m3_to, finish
from nemotriton.kernels.moe_choice import expert_columns, load_bias, route_tokens

LINE = tl.constexpr(128)  # bytes that come from memory together


@triton.jit
def _ahead(
    w_ptr, row, turn,
    ROWS: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    ROW: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Prefetch LINES lines of each of ROWS rows from `row` on, of N rows STRIDE elements apart,
    beginning with step `turn` of COLUMNS columns, in steps of ROW bytes."""
    if LINES > 0:
        SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        ALL: tl.constexpr = COLUMNS * SIZE // LINE
        i = tl.arange(0, ROWS * LINES)
        line = turn * (ROW // LINE) + i % LINES
        line = tl.where(line < ALL, line, line - ALL)
        rows = tl.minimum(row + i // LINES, N - 1)
        prefetch(w_ptr + rows * STRIDE + line * (LINE // SIZE))


@triton.jit
def _product(
    x_ptr, w_ptr, x_stride, T, t, tile, k_0, turn,
    N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, ROW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, tokens t] of a tile of rows of W [N, K] over STEPS steps from column k_0, each
    of ROW bytes of every row, round from step `turn`."""
    SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    BLOCK_K: tl.constexpr = ROW // SIZE // SLICES
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = k_0 + tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    live = (t < T)[None, None, :]
    x_at = x_ptr + t[None, None, :] * x_stride + k[:, :, None]  # [SLICES, BLOCK_K, BLOCK_T]
    w_at = w_ptr + (tl.minimum(n, N - 1) * K)[None, :, None] + k[:, None, :]
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_T), tl.float32)
    for step in range(STEPS):
        at = turn + step
        at = tl.where(at < STEPS, at, at - STEPS) * (SLICES * BLOCK_K)
        if EVEN_K:
            w = tl.load(w_at + at)
            x = tl.load(x_at + at, mask=live, other=0.0)
        else:
            left = k + at < K
            w = tl.load(w_at + at, mask=left[:, None, :], other=0)
            x = tl.load(x_at + at, mask=live & left[:, :, None], other=0.0)
        if w_ptr.dtype.element_ty == tl.uint8:
            w = e4m3_to(w, x_ptr.dtype.element_ty, ASM)
        if w_ptr.dtype.element_ty == tl.float32:
            acc = dot_parts(w, x, acc, True)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
    return tl.sum(acc, 0)


@triton.jit
def _turn(program, STEPS: tl.constexpr, ROTATE: tl.constexpr):
    """The step that a program begins with."""
    return (program % STEPS if ROTATE else program * 0).to(tl.int32)


@triton.jit
def _multiply(
    x_ptr, w_ptr, scale_ptr, y_ptr, x_stride, T, t, tile, k_0, turn,
    N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, RELU2: tl.constexpr,
    EVEN_K: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    ROW: tl.constexpr, ASM: tl.constexpr, LET_GO: tl.constexpr,
):  # fmt: skip
    """Store a tile of y = x W^T, times W's scale where it has one."""
    acc = _product(
        x_ptr, w_ptr, x_stride, T, t, tile, k_0, turn, N, K, STEPS, EVEN_K, SLICES,
        BLOCK_T, BLOCK_N, ROW, ASM,
    )  # fmt: skip
    if LET_GO:
        tl.extra.cuda.gdc_launch_dependents()
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    finish(acc, None, None, y_ptr, t[None, :], n[:, None], T, N, 0, RELU2)


@triton.jit(do_not_specialize=["T"])
def _enter(
    x_ptr, gate_ptr, latent_ptr, up_ptr, scale_ptr, logits_ptr, narrow_ptr, hidden_ptr, x_stride, T,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, F: tl.constexpr,
    SPLITS: tl.constexpr, GATE_STEPS: tl.constexpr, LATENT_STEPS: tl.constexpr,
    UP_STEPS: tl.constexpr, EVEN_K: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, ROW: tl.constexpr, ROTATE: tl.constexpr, LINES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gate's programs first, for theirs take longest; then the latent's, then the expert's."""
    pid = tl.program_id(0).to(tl.int64)
    PART: tl.constexpr = GATE_STEPS * (ROW // 4)  # columns of the gate in one program
    GATES: tl.constexpr = (E + BLOCK_N - 1) // BLOCK_N * SPLITS
    LATENTS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
    ALL: tl.constexpr = GATES + LATENTS + (F + BLOCK_N - 1) // BLOCK_N
    t = pid // ALL * BLOCK_T + tl.arange(0, BLOCK_T)
    pid = pid % ALL
    split = pid % SPLITS
    gate_turn = _turn(pid, GATE_STEPS, ROTATE)
    latent_turn, up_turn = _turn(pid, LATENT_STEPS, ROTATE), _turn(pid, UP_STEPS, ROTATE)
    if PDL:
        if pid < GATES:
            row = pid // SPLITS * BLOCK_N
            _ahead(gate_ptr + split * PART, row, gate_turn, BLOCK_N, E, D, PART, ROW, LINES)
        elif pid < GATES + LATENTS:
            if L > 0:
                row = (pid - GATES) * BLOCK_N
                _ahead(latent_ptr, row, latent_turn, BLOCK_N, L, D, D, ROW, LINES)
        else:
            row = (pid - GATES - LATENTS) * BLOCK_N
            _ahead(up_ptr, row, up_turn, BLOCK_N, F, D, D, ROW, LINES)
        tl.extra.cuda.gdc_wait()
    if pid < GATES:
        plane = logits_ptr + split * T * E
        _multiply(
            x_ptr, gate_ptr, None, plane, x_stride, T, t, pid // SPLITS, split * PART, gate_turn,
            E, D, GATE_STEPS, False, EVEN_K, SLICES, BLOCK_T, BLOCK_N, ROW, ASM, PDL,
        )  # fmt: skip
    elif pid < GATES + LATENTS:
        if L > 0:
            _multiply(
                x_ptr, latent_ptr, None, narrow_ptr, x_stride, T, t, pid - GATES, 0, latent_turn,
                L, D, LATENT_STEPS, False, EVEN_K, SLICES, BLOCK_T, BLOCK_N, ROW, ASM, PDL,
            )  # fmt: skip
    else:
        _multiply(
            x_ptr, up_ptr, scale_ptr, hidden_ptr, x_stride, T, t, pid - GATES - LATENTS, 0, up_turn,
            F, D, UP_STEPS, True, EVEN_K, SLICES, BLOCK_T, BLOCK_N, ROW, ASM, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "part_stride"])
def _share(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, h_ptr, down_ptr, scale_ptr, y_ptr,
    logits_stride, part_stride, h_stride, T, factor,
    D: tl.constexpr, F: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, ROW: tl.constexpr,
    ROTATE: tl.constexpr, LINES: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first T programs route a token each, the others multiply."""
    TILES: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid - T) % TILES
    turn = _turn(tile, STEPS, ROTATE)
    if PDL:
        if pid >= T:
            _ahead(down_ptr, tile * BLOCK_N, turn, BLOCK_N, D, F, F, ROW, LINES)
        elif bias_ptr is not None:
            prefetch(bias_ptr + tl.minimum(tl.arange(0, BLOCK_G * BLOCK_S), GROUPS * SIZE - 1))
        tl.extra.cuda.gdc_wait()
    if pid < T:
        e, real = expert_columns(GROUPS, SIZE, BLOCK_G, BLOCK_S)
        bias = load_bias(bias_ptr, e, real)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        token = pid + tl.arange(0, 1)
        slot, weight = route_tokens(
            logits_ptr, bias, token, T, e, real, logits_stride, part_stride, factor,
            PARTS, K, GROUPS, TOP_GROUPS, NORMALIZE, 1, BLOCK_G, BLOCK_S,
        )  # fmt: skip
        place = (token * K)[:, None] + slot
        tl.store(ids_ptr + place, tl.broadcast_to(e[None, :], slot.shape), mask=slot >= 0)
        tl.store(weights_ptr + place, weight, mask=slot >= 0)
    else:
        t = (pid - T) // TILES * BLOCK_T + tl.arange(0, BLOCK_T)
        _multiply(
            h_ptr, down_ptr, scale_ptr, y_ptr, h_stride, T, t, tile, 0, turn, D, F, STEPS, False,
            EVEN_K, SLICES, BLOCK_T, BLOCK_N, ROW, ASM, PDL,
        )  # fmt: skip
