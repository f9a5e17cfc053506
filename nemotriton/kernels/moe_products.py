"""Kernels of a mixture-of-experts layer at a few tokens; `moe_few` has their ops.

A program's number says which matrix it takes rows of, or which token it routes. All wait for the
kernel before them with lines of their weights on the way (see `dependent`).
"""

import triton
import triton.language as tl

from nemotriton.kernels.dependent import prefetch
from nemotriton.kernels.gemm_stream import dot_parts, e4m3_to, finish
from nemotriton.kernels.moe_choice import expert_columns, load_bias, route_tokens

LINE = tl.constexpr(128)  # bytes that come from memory together


@triton.jit
def _ahead(
    w_ptr, row,
    ROWS: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Prefetch LINES lines of each of ROWS rows from `row` on, of N rows STRIDE elements apart."""
    if LINES > 0:
        SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        i = tl.arange(0, ROWS * LINES)
        rows = tl.minimum(row + i // LINES, N - 1)
        prefetch(w_ptr + rows * STRIDE + i % LINES * (LINE // SIZE))


@triton.jit
def _product(
    x_ptr, w_ptr, x_stride, T, t, n, k_0,
    N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    SLICES: tl.constexpr, ROW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """fp32 [rows n, tokens t]: rows n of W [N, K] times x over STEPS steps from column k_0, each of
    ROW bytes of every row. Rows behind N are not read; EVEN: nor are there any, and the steps are
    whole."""
    SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    BLOCK_K: tl.constexpr = ROW // SIZE // SLICES
    k = k_0 + tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    live, own = (t < T)[None, None, :], (n < N)[None, :, None]
    x_at = x_ptr + t[None, None, :] * x_stride + k[:, :, None]  # [SLICES, columns, tokens]
    w_at = w_ptr + (n * K)[None, :, None] + k[:, None, :]
    acc = tl.zeros((SLICES, n.shape[0], t.shape[0]), tl.float32)
    for step in range(STEPS):
        if EVEN:
            w = tl.load(w_at)
            x = tl.load(x_at, mask=live, other=0.0)
        else:
            left = k + step * (SLICES * BLOCK_K) < K
            w = tl.load(w_at, mask=own & left[:, None, :], other=0)
            x = tl.load(x_at, mask=live & left[:, :, None], other=0.0)
        if w_ptr.dtype.element_ty == tl.uint8:
            w = e4m3_to(w, x_ptr.dtype.element_ty, ASM)
        if w_ptr.dtype.element_ty == tl.float32:
            acc = dot_parts(w, x, acc, True)
        else:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        w_at += SLICES * BLOCK_K
        x_at += SLICES * BLOCK_K
    return tl.sum(acc, 0)


@triton.jit
def _multiply(
    x_ptr, w_ptr, scale_ptr, y_ptr, x_stride, T, t, tile, k_0, ROWS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, RELU2: tl.constexpr,
    EVEN_K: tl.constexpr, SLICES: tl.constexpr, BLOCK_N: tl.constexpr, ROW: tl.constexpr,
    ASM: tl.constexpr, LET_GO: tl.constexpr,
):  # fmt: skip
    """Store ROWS <= BLOCK_N rows of y = x W^T, times W's scale where it has one."""
    EVEN: tl.constexpr = EVEN_K and ROWS == BLOCK_N and N % BLOCK_N == 0
    i = tl.arange(0, BLOCK_N)
    n = tl.where(i < ROWS, tile * ROWS + i, N)
    acc = _product(x_ptr, w_ptr, x_stride, T, t, n, k_0, N, K, STEPS, EVEN, SLICES, ROW, ASM)
    if LET_GO:
        tl.extra.cuda.gdc_launch_dependents()
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr)
    finish(acc, None, None, y_ptr, t[None, :], n[:, None], T, N, 0, RELU2)


@triton.jit(do_not_specialize=["T"])
def _enter(
    x_ptr, gate_ptr, latent_ptr, latent_scale_ptr, up_ptr, up_scale_ptr,
    logits_ptr, narrow_ptr, hidden_ptr, x_stride, T,
    D: tl.constexpr, E: tl.constexpr, L: tl.constexpr, F: tl.constexpr, FEW: tl.constexpr,
    SPLITS: tl.constexpr, GATE_STEPS: tl.constexpr, LATENT_STEPS: tl.constexpr,
    UP_STEPS: tl.constexpr, EVEN_K: tl.constexpr, SLICES: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, ROW: tl.constexpr, LINES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gate's programs, then those of FEW rows of the latent each, then the shared expert's."""
    PART: tl.constexpr = GATE_STEPS * (ROW // 4)  # columns of the gate in one program
    GATES: tl.constexpr = (E + BLOCK_N - 1) // BLOCK_N * SPLITS
    LATENTS: tl.constexpr = (L + FEW - 1) // FEW
    ALL: tl.constexpr = GATES + LATENTS + (F + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    t = pid // ALL * BLOCK_T + tl.arange(0, BLOCK_T)
    pid = pid % ALL
    split, tile = pid % SPLITS, pid // SPLITS  # of the gate
    narrow_tile, up_tile = pid - GATES, pid - GATES - LATENTS
    if PDL:
        if pid < GATES:
            _ahead(gate_ptr + split * PART, tile * BLOCK_N, BLOCK_N, E, D, LINES)
        elif pid < GATES + LATENTS:
            if L > 0:
                _ahead(latent_ptr, narrow_tile * FEW, FEW, L, D, LINES)
        elif F > 0:
            _ahead(up_ptr, up_tile * BLOCK_N, BLOCK_N, F, D, LINES)
        tl.extra.cuda.gdc_wait()
    if pid < GATES:
        plane = logits_ptr + split * T * E
        _multiply(
            x_ptr, gate_ptr, None, plane, x_stride, T, t, tile, split * PART, BLOCK_N,
            E, D, GATE_STEPS, False, EVEN_K, SLICES, BLOCK_N, ROW, ASM, PDL,
        )  # fmt: skip
    elif pid < GATES + LATENTS:
        if L > 0:
            _multiply(
                x_ptr, latent_ptr, latent_scale_ptr, narrow_ptr, x_stride, T, t, narrow_tile, 0,
                FEW, L, D, LATENT_STEPS, False, EVEN_K, SLICES, BLOCK_N, ROW, ASM, PDL,
            )  # fmt: skip
    elif F > 0:
        _multiply(
            x_ptr, up_ptr, up_scale_ptr, hidden_ptr, x_stride, T, t, up_tile, 0, BLOCK_N,
            F, D, UP_STEPS, True, EVEN_K, SLICES, BLOCK_N, ROW, ASM, PDL,
        )  # fmt: skip


@triton.jit
def _write_blocks(
    ids_idx, places_ptr, experts_ptr, pairs_ptr, T,
    K: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The blocks of T <= ROWS tokens' pairs, see `Routing`: places [T, E] have a token's pair with
    an expert, or -1; they and the ids were written by other multiprocessors a moment ago."""
    p, m = tl.arange(0, BLOCK_P), tl.arange(0, ROWS)
    live = p < T * K
    expert = tl.load(ids_idx + p, mask=live, other=0, cache_modifier=".cg").to(tl.int64)
    mask = live[:, None] & (m < T)[None, :]
    at = places_ptr + m[None, :] * E + expert[:, None]
    pairs = tl.load(at, mask=mask, other=-1, cache_modifier=".cg")
    first = tl.min(tl.where(pairs < 0, p[:, None], pairs), 1)
    tl.store(experts_ptr + p, tl.where(first < p, -1, expert).to(tl.int32), mask=live)
    tl.store(pairs_ptr + p[:, None] * ROWS + m[None, :], pairs, mask=live[:, None])


@triton.jit(do_not_specialize=["T", "part_stride"])
def _share(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, places_ptr, experts_ptr, pairs_ptr, arrivals_ptr,
    h_ptr, down_ptr, scale_ptr, y_ptr, logits_stride, part_stride, h_stride, T, factor,
    D: tl.constexpr, F: tl.constexpr, STEPS: tl.constexpr, EVEN_K: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, ROW: tl.constexpr,
    LINES: tl.constexpr, ASM: tl.constexpr, PARTS: tl.constexpr,
    K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first T programs route a token each, and the last of them to be through writes the blocks
    of ROWS pairs, if there are to be any; the other programs multiply."""
    TILES: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0).to(tl.int64)
    tile = (pid - T) % TILES
    if PDL:
        if pid >= T:
            _ahead(down_ptr, tile * BLOCK_N, BLOCK_N, D, F, LINES)
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
        if ROWS > 0:
            E: tl.constexpr = GROUPS * SIZE
            at = places_ptr + (token * E)[:, None] + e[None, :]
            tl.store(at, tl.where(slot >= 0, place, -1).to(tl.int32), mask=real[None, :])
            tl.debug_barrier()  # all threads have stored their part
            if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == T - 1:
                tl.store(arrivals_ptr, 0)
                _write_blocks(ids_ptr, places_ptr, experts_ptr, pairs_ptr, T, K, E, ROWS, BLOCK_P)
    else:
        t = (pid - T) // TILES * BLOCK_T + tl.arange(0, BLOCK_T)
        _multiply(
            h_ptr, down_ptr, scale_ptr, y_ptr, h_stride, T, t, tile, 0, BLOCK_N, D, F, STEPS,
            False, EVEN_K, SLICES, BLOCK_N, ROW, ASM, PDL,
        )  # fmt: skip
