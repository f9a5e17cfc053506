"""Routed experts in NVFP4 throughout (w4a4) on Blackwell's block-scaled tensor cores.

    h[p]   = relu(up_scale[e] * (V_up[e] x'[t]))^2                                       [F]
    row[p] = w[p] * down_scale[e] * (V_down[e] h'[p])              fp32, not rounded     [L]
    y[t]   = sum of row[t*K + j] over j = 0..K-1 in that order, fp32, rounded to x's dtype

x' and h' are what the NVFP4 codes of x and h under their expert's input scale stand for, V the
stored values of the weights; both scales are the product of the weight's and the input's. h is
quantised in the epilogue of the first product, straight from fp32, and only its codes are stored.
Numbers are those of `moe_experts_quant.run_experts_nvfp4` with input scales.

Expert-major, as there. The weight is the left operand of `tl.dot_scaled`, 128 rows of it, so that
an expert's few tokens fill only the other side (see `gemm_scaled`). Weights' scales lie in tiles,
one set an expert; those of x and h in rows, for an expert's first row falls anywhere in a tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.fp4 import GROUP, nvfp4_codes
from nemotriton.kernels.gemm_scaled import (
    NATIVE,
    ROWS,
    X_DTYPES,
    fitting,
    load_codes,
    load_scale_rows,
)
from nemotriton.kernels.moe_experts import _combine, _find_block, most_blocks
from nemotriton.kernels.moe_experts_quant import RUN_EXPERTS_NVFP4, run_experts_nvfp4_ref
from nemotriton.kernels.moe_route import Routing, pair_rows
from nemotriton.kernels.numerics import relu2
from nemotriton.kernels.op import Args, Case, KernelSpec, Tile, cdiv, launch, next_pow2, op
from nemotriton.kernels.quantize import check_scale
from nemotriton.kernels.scale_tiles import (
    load_scale_tiles,
    swizzle_scales,
    tile_bytes,
    tiles_of,
    unswizzle_scales,
)

Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes, scales in tiles, global scales


def run_experts_scaled_ref(
    x: torch.Tensor,
    up_codes: torch.Tensor,
    up_tiles: torch.Tensor,
    up_global: torch.Tensor,
    down_codes: torch.Tensor,
    down_tiles: torch.Tensor,
    down_global: torch.Tensor,
    routing: Routing,
    up_input_scale: torch.Tensor,
    down_input_scale: torch.Tensor,
) -> torch.Tensor:
    """Twin of `run_experts_scaled`."""
    F, L = up_codes.shape[1], x.shape[1]
    up = (up_codes, unswizzle_scales(up_tiles, F, L // GROUP), up_global)
    down = (down_codes, unswizzle_scales(down_tiles, L, F // GROUP), down_global)
    return run_experts_nvfp4_ref(x, *up, *down, routing, up_input_scale, down_input_scale)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _store_rows(y, scale, codes_ptr, scales_ptr, rows, n, N, live, BLOCK_N: tl.constexpr):
    """Quantise fp32 y [rows, BLOCK_N], columns n of N, and store codes and scales in rows."""
    M: tl.constexpr = y.shape[0]
    codes, block = nvfp4_codes(tl.reshape(y, [M, BLOCK_N // 16, 16]), scale)
    low, high = tl.split(tl.reshape(codes, [M, BLOCK_N // 2, 2]))
    pair = n // 2 + tl.arange(0, BLOCK_N // 2)
    at = codes_ptr + rows[:, None] * (N // 2) + pair[None, :]
    inside = live[:, None] & (pair * 2 < N)[None, :]
    tl.store(at, (low | (high << 4)).to(tl.uint8), mask=inside)
    c = n // 16 + tl.arange(0, BLOCK_N // 16)
    at = scales_ptr + rows[:, None] * (N // 16) + c[None, :]
    tl.store(at, block.to(tl.uint8), mask=live[:, None] & (c * 16 < N)[None, :])


@triton.jit
def _quantize_pairs(
    x_ptr, scale_ptr, codes_ptr, scales_ptr, order_idx, ids_idx, x_stride, D, K,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_D columns of the row of pair order[i], under the scale of its expert, as row i."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(D, BLOCK_D)
    i, first = pid // blocks, pid % blocks * BLOCK_D
    pair = tl.load(order_idx + i).to(tl.int64)
    expert = tl.load(ids_idx + pair).to(tl.int64)
    scale = tl.load(scale_ptr + tl.maximum(expert, 0))  # -1: another rank's, which nobody reads
    d = first + tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + pair // K * x_stride + d, mask=d < D, other=0.0).to(tl.float32)
    rows = i + tl.arange(0, 1)
    x = tl.reshape(x, [1, BLOCK_D])
    _store_rows(x, scale, codes_ptr, scales_ptr, rows, first, D, rows >= 0, BLOCK_D)


@triton.jit
def _product(
    x_ptr, xs_ptr, rows, w_ptr, ws_ptr, tile_n, n, DEPTH, code_stride, scale_stride, COLUMNS,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: rows n of an expert's matrix [N, DEPTH] times rows of codes."""
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(tl.cdiv(DEPTH, BLOCK_K)):
        w = load_codes(w_ptr, n, step, DEPTH, code_stride, EVEN_K, BLOCK_K)
        ws = load_scale_tiles(ws_ptr, tile_n, step, COLUMNS, BLOCK_N, BLOCK_K)
        x = load_codes(x_ptr, rows, step, DEPTH, code_stride, EVEN_K, BLOCK_K)
        xs = load_scale_rows(xs_ptr, rows, step, DEPTH, scale_stride, EVEN_K, BLOCK_K)
        acc = tl.dot_scaled(w, ws, "e2m1", tl.trans(x), xs, "e2m1", acc)
    return acc


@triton.jit
def _up_scaled(
    x_ptr, xs_ptr, w_ptr, ws_ptr, scale_ptr, x_scale_ptr, h_scale_ptr, h_ptr, hs_ptr, offsets_idx,
    code_stride, scale_stride, tiles_stride, F, L, COLUMNS,
    E: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Codes [T*K, F/2] and scales [T*K, F/16] of h, in the order of `order`, as x's are."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(F, BLOCK_N)
    expert, first, last = _find_block(offsets_idx, pid // tiles, E, BLOCK_M, BLOCK_E)
    if first < last:
        tile_n = pid % tiles
        i = first + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows past the end repeat the last one; they are not stored
        i_in, n_in = tl.minimum(i, last - 1), tl.minimum(n, F - 1)
        scale = tl.load(scale_ptr + expert) * tl.load(x_scale_ptr + expert)
        w, ws = w_ptr + expert * F * code_stride, ws_ptr + expert * tiles_stride
        acc = _product(
            x_ptr, xs_ptr, i_in, w, ws, tile_n, n_in, L, code_stride, scale_stride, COLUMNS,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        h = tl.trans(relu2(acc * scale))
        h_scale = tl.load(h_scale_ptr + expert)
        _store_rows(h, h_scale, h_ptr, hs_ptr, i, tile_n * BLOCK_N, F, i < last, BLOCK_N)


@triton.jit
def _down_scaled(
    h_ptr, hs_ptr, w_ptr, ws_ptr, scale_ptr, h_scale_ptr, rows_ptr, weights_ptr,
    order_idx, offsets_idx, code_stride, scale_stride, tiles_stride, F, L, COLUMNS,
    E: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Weighted rows [T*K, L] fp32 in the order of the pairs."""
    pid = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(L, BLOCK_N)
    expert, first, last = _find_block(offsets_idx, pid // tiles, E, BLOCK_M, BLOCK_E)
    if first < last:
        tile_n = pid % tiles
        i = first + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        live = i < last
        i_in, n_in = tl.minimum(i, last - 1), tl.minimum(n, L - 1)
        pair = tl.load(order_idx + i_in).to(tl.int64)
        scale = tl.load(scale_ptr + expert) * tl.load(h_scale_ptr + expert)
        w, ws = w_ptr + expert * L * code_stride, ws_ptr + expert * tiles_stride
        acc = _product(
            h_ptr, hs_ptr, i_in, w, ws, tile_n, n_in, F, code_stride, scale_stride, COLUMNS,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        row = acc * scale * tl.load(weights_ptr + pair)[None, :]
        mask = (n < L)[:, None] & live[None, :]
        tl.store(rows_ptr + pair[None, :] * L + n[:, None], row, mask=mask)


# --------------------------------------------------------------------------------------------- op
@op(ref=run_experts_scaled_ref)
def run_experts_scaled(
    x: torch.Tensor,
    up_codes: torch.Tensor,
    up_tiles: torch.Tensor,
    up_global: torch.Tensor,
    down_codes: torch.Tensor,
    down_tiles: torch.Tensor,
    down_global: torch.Tensor,
    routing: Routing,
    up_input_scale: torch.Tensor,
    down_input_scale: torch.Tensor,
) -> torch.Tensor:
    """Run every routed expert on its tokens and sum them by weight; NVFP4 weights and activations.

    x [T, L]; up_codes uint8 [E, F, L/2], up_tiles e4m3 [E, tiles * 512], up_global fp32 [E]; down_*
    of [L, F]; *_input_scale fp32 [E]. Returns [T, L] in x's dtype. Scratch: T*K rows of codes of x
    and h, and T*K*L*4 bytes."""
    up, down = (up_codes, up_tiles, up_global), (down_codes, down_tiles, down_global)
    E, F, L = _check(x, up, down, (up_input_scale, down_input_scale), routing)
    T, K = routing.ids.shape
    P = T * K

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=x.device)

    xs, h, hs = new(P, L // GROUP), new(P, F // 2), new(P, F // GROUP)
    codes = new(P, L // 2)
    rows = pair_rows(routing, L, dtype=torch.float32)
    y = torch.empty((T, L), dtype=x.dtype, device=x.device)
    tile = RUN_EXPERTS_SCALED.tile(T, x, E=E, F=F, L=L, K=K)
    block = max(GROUP, min(1024, next_pow2(L)))
    launch(
        _quantize_pairs, (P * cdiv(L, block),), x, up_input_scale, codes, xs, routing.order,
        routing.ids, x.stride(0), L, K, BLOCK_D=block, num_warps=4,
    )  # fmt: skip
    blocks = most_blocks(P, E, int(tile["BLOCK_M"]))
    up_tile, down_tile = fitting(tile, L), fitting(tile, F)
    size = {"E": E, "BLOCK_E": next_pow2(E)}
    e4m3 = torch.float8_e4m3fn
    shape = (L // 2, L // GROUP, up_tiles.stride(0), F, L, tiles_of(F, L)[1])
    launch(
        _up_scaled, (blocks * cdiv(F, ROWS),), codes, xs.view(e4m3), *up, up_input_scale,
        down_input_scale, h, hs, routing.offsets, *shape, EVEN_K=L % int(up_tile["BLOCK_K"]) == 0,
        **up_tile, **size,
    )  # fmt: skip
    shape = (F // 2, F // GROUP, down_tiles.stride(0), F, L, tiles_of(L, F)[1])
    launch(
        _down_scaled, (blocks * cdiv(L, ROWS),), h, hs.view(e4m3), *down, down_input_scale, rows,
        routing.weights, routing.order, routing.offsets, *shape,
        EVEN_K=F % int(down_tile["BLOCK_K"]) == 0, **down_tile, **size,
    )  # fmt: skip
    width = min(1024, next_pow2(L))
    launch(_combine, (T * cdiv(L, width),), rows, y, L, K, BLOCK_L=width, PDL=False, num_warps=4)
    return y


def _check(
    x: torch.Tensor,
    up: Matrix,
    down: Matrix,
    inputs: tuple[torch.Tensor, torch.Tensor],
    routing: Routing,
) -> tuple[int, int, int]:
    require(x.ndim == 2 and x.stride(1) == 1, f"x must be [tokens, width], got {tuple(x.shape)}")
    require(x.dtype in X_DTYPES, f"x must be bf16 or fp16, got {x.dtype}")
    (T, L), (E, F) = x.shape, up[0].shape[:2]
    for name, (codes, tiles, scale), n, k in (("up", up, F, L), ("down", down, L, F)):
        require(
            codes.dtype == torch.uint8 and codes.shape == (E, n, k // 2) and k % GROUP == 0,
            f"{name} codes of shape {tuple(codes.shape)} do not match {E} matrices [{n}, {k}]",
        )
        require(
            tiles.dtype == torch.float8_e4m3fn and tiles.shape == (E, tile_bytes(n, k)),
            f"{name} scales of shape {tuple(tiles.shape)} are not the tiles of [{n}, {k}]",
        )
        require(codes.is_contiguous() and tiles.is_contiguous(), f"{name} must be contiguous")
        check_scale(scale, "the experts' scales", (E,))
    for scale in inputs:
        check_scale(scale, "the experts' input scales", (E,))
    require(routing.ids.shape[0] == T, f"{T} tokens, but a routing of {routing.ids.shape[0]}")
    require(
        routing.offsets.shape == (E + 1,),
        f"the routing is over {routing.offsets.shape[0] - 1} experts, the weights have {E}",
    )
    return E, F, L


# ------------------------------------------------------------------------------------------- spec
def _tile(m: int, k: int, warps: int, stages: int) -> Tile:
    return Tile(BLOCK_M=m, BLOCK_N=ROWS, BLOCK_K=k, num_warps=warps, num_stages=stages)


_SHAPES = (
    *((16, 128, 4, s) for s in (4, 6)),
    *((m, 256, 4, s) for m in (16, 32) for s in (3, 4)),
    *((64, 256, w, s) for w in (4, 8) for s in (3, 4)),
    (128, 256, 8, 3),
)


def _suits(tile: Tile, tokens: int) -> bool:
    """Whether the sweep measures a tile at this many tokens: blocks of about an expert's rows."""
    fits = {16: (0, 512), 32: (256, 1024), 64: (512, 2048), 128: (1024, 1 << 20)}
    low, high = fits[int(tile["BLOCK_M"])]
    return low < tokens <= high


def _default(case: Case, tokens: int) -> Tile:
    """The block that the tokens of a mean expert fill, as it compiles for sm_100: nobody has
    measured it."""
    per_expert = tokens * case.K / case.E
    rows = 16 if per_expert <= 16 else 64 if per_expert <= 96 else 128
    return _tile(rows, 256, 4 if rows < 128 else 8, 4 if rows < 128 else 3)


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    args = RUN_EXPERTS_NVFP4.make(Case(**{**case, "Q": 1}), T, dev, dtype, rng)
    for name in ("up", "down"):
        args[f"{name}_tiles"] = swizzle_scales(args.pop(f"{name}_scales"))
    return args


def _cases(config: Any) -> list[Case]:
    return [Case(**case) for case in RUN_EXPERTS_NVFP4.cases(config)]


RUN_EXPERTS_SCALED = KernelSpec(
    terms=lambda case: case.F + case.L,
    op=run_experts_scaled,
    kernels=(_quantize_pairs, _up_scaled, _down_scaled, _combine),
    cases=_cases,
    small=[Case(E=3, F=48, L=80, K=2), Case(E=2, F=144, L=64, K=1)],
    tokens=RUN_EXPERTS_NVFP4.tokens,
    dtypes=("bf16", "fp16"),
    small_tokens=(0, 5),
    make=_make,
    tiles=lambda case: [_tile(*shape) for shape in _SHAPES],
    default=_default,
    cost=RUN_EXPERTS_NVFP4.cost,
    per_token=("x",),
    strided=("x",),
    suits=_suits,
    arches=(100, 103),
    native={"_up_scaled": NATIVE, "_down_scaled": NATIVE},
)
