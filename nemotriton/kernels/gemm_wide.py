"""The wide form of y = epilogue(scale * (x W^T) + bias) for FP8 weights and some dozen tokens:
wgmma with the weights on its long side, decoded in the registers from which it reads them.

x is its right operand and comes from shared memory, so x's columns are first copied into the order
in which a lane's words lie (`order_columns`): columns 16 t + 4 q + 2 p + e of 64, of lane t's word
q, at position 16 q + 8 p + 2 t + e. That costs a launch and saves what the plain form
(`gemm_quant`) pays to bring decoded weights to shared memory.

Hopper only. Triton's select after the product makes each step wait for its wgmmas: ptxas before
13.3 lets the next decode overwrite registers that they still read (triton issue 9433).

x [T, K] with a free row stride, bf16 or fp16; W [N, K] e4m3 as int32 [N, K/4]; K a multiple of
SPLITS * BLOCK_K.
"""

import torch
import triton
import triton.language as tl

from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.gemm import sum_splits
from nemotriton.kernels.gemm_direct import aligned, e4m3_words
from nemotriton.kernels.gemm_stream import finish
from nemotriton.kernels.hopper_pack import position_column
from nemotriton.kernels.op import Tile, cdiv, launch, target


@triton.jit
def _order(x_ptr, y_ptr, x_stride, K, W, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
    """BLOCK_K columns of a row of x in wgmma's `k_order`, with zeros up to W columns."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(W, BLOCK_K)
    t, k = pid // blocks, pid % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    column = position_column(k, False)
    x = tl.load(x_ptr + t * x_stride + column, mask=column < K, other=0.0)
    tl.store(y_ptr + t * W + k, x, mask=k < W)


@triton.jit(do_not_specialize=["T"])
def _wide(
    x_ptr, w_ptr, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, y_ptr,
    x_stride, w_stride, r_stride, T, N,
    RELU2: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of outputs over one of SPLITS parts of K, STEPS blocks long; strides in elements of
    x and words of W."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_t, tiles_n = tl.cdiv(T, BLOCK_T), tl.cdiv(N, BLOCK_N)
    split = pid // (tiles_t * tiles_n)
    pid = pid % (tiles_t * tiles_n)
    n = pid // tiles_t * BLOCK_N + tl.arange(0, BLOCK_N)
    t = pid % tiles_t * BLOCK_T + tl.arange(0, BLOCK_T)
    # rows past the end repeat the last one; their sums are not stored
    k0 = split * (STEPS * BLOCK_K)
    x_at = x_ptr + k0 + tl.minimum(t, T - 1)[None, :] * x_stride + tl.arange(0, BLOCK_K)[:, None]
    w_at = w_ptr + k0 // 4 + tl.minimum(n, N - 1)[:, None] * w_stride
    w_at += tl.arange(0, BLOCK_K // 4)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        words = tl.load(w_at)
        x = tl.load(x_at)
        a, b, c, d = e4m3_words(words, x.dtype, ASM)
        w = tl.join(tl.join(a, b), tl.join(c, d))
        w = w.reshape(BLOCK_N, BLOCK_K // 64, 4, 4, 2, 2)  # n, group, t, q, e, p
        w = w.trans(0, 1, 3, 5, 2, 4).reshape(BLOCK_N, BLOCK_K)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        acc = tl.where(step < STEPS, acc, 0.0)
        w_at += BLOCK_K // 4
        x_at += BLOCK_K

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.load(weight_scale_ptr)
    if input_scale_ptr is not None:
        scale *= tl.load(input_scale_ptr)
    y_ptr += split * T * N  # one plane of partial sums a split
    finish(acc * scale, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


def order_columns(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [T, K] in wgmma's `k_order`, [T, width] with zeros at the end."""
    T, K = x.shape
    ordered = torch.empty((T, width), dtype=x.dtype, device=x.device)
    order = (x, ordered, x.stride(0), K, width)
    launch(_order, (T * cdiv(width, 1024),), *order, BLOCK_K=1024, num_warps=4, **as_dependent(x))
    return ordered


def is_wide(tile: Tile, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a tile asks for this form and x, FP8 weights [N, K] as bytes and the GPU allow it."""
    if "WIDE" not in tile or x.dtype == torch.float32 or target(x.device) // 10 not in (0, 9):
        return False
    return x.shape[1] % (int(tile["BLOCK_K"]) * int(tile["SPLITS"])) == 0 and aligned(weight)


def wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor | None],
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch for FP8 weights as bytes [N, K]; scales: the weight's and the input's."""
    (T, K), N = x.shape, weight.shape[0]
    words, splits = weight.view(torch.int32), int(tile["SPLITS"])
    ordered = order_columns(x, K)
    constants = {**tile.without("WIDE"), **as_dependent(x)}
    constants |= {"STEPS": K // (int(tile["BLOCK_K"]) * splits), "STAGES": tile["num_stages"]}
    constants["ASM"] = decodes_by_assembly(x)
    grid = (cdiv(N, int(tile["BLOCK_N"])) * cdiv(T, int(tile["BLOCK_T"])) * splits,)
    shape = (K, words.stride(0), 0 if residual is None else residual.stride(0), T, N)
    if splits == 1:
        args = (ordered, words, *scales, bias, residual, y, *shape)
        launch(_wide, grid, *args, RELU2=squared, **constants)
        return
    parts = torch.empty((splits, T, N), dtype=torch.float32, device=x.device)
    args = (ordered, words, *scales, None, None, parts, *shape)
    launch(_wide, grid, *args, RELU2=False, **constants)
    sum_splits(parts, bias, squared, residual, y)


def wide_tile(t: int, n: int, k: int, warps: int, stages: int, splits: int) -> Tile:
    """BLOCK_T, BLOCK_N, BLOCK_K, num_warps, num_stages, SPLITS."""
    tile = Tile(WIDE=True, BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return tile.but(SPLITS=splits)
