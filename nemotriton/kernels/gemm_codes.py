"""Up to 256 tokens of y = epilogue(scale * (x W^T) + bias), x and W as e4m3 codes: wgmma with the
weights on its long side, both operands by TMA.

Nothing is decoded, so this form only has to keep memory busy. A program's tile of W is read once,
by few programs that all run at the same time; x, which each of them reads whole, comes from L2 and
is a byte an element. Where outputs are few K is split, and a second kernel adds the parts.

Of e4m3 products Hopper keeps 14 bits of a sum; PARTIAL columns are summed so, see `gemm_square`.

x [T, K] and W [N, K] e4m3, rows that start at multiples of 16 bytes; any T, N and K: descriptors
pad with zeros.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nemotriton.kernels.dependent import as_dependent, prefetch
from nemotriton.kernels.gemm import sum_splits
from nemotriton.kernels.gemm_square import PARTIAL
from nemotriton.kernels.gemm_stream import finish
from nemotriton.kernels.op import Tile, cdiv, launch

LINE = tl.constexpr(128)  # bytes that a prefetch brings near


@triton.jit(do_not_specialize=["T", "steps"])
def _codes(
    w_desc, x_desc, w_ptr, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, y_ptr,
    w_stride, r_stride, T, N, K, steps,
    RELU2: tl.constexpr, PARTIAL: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of outputs over one part of K, `steps` blocks long; parts of K are last in the grid.

    AHEAD: lines of W that each row prefetches before x is there."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_t, tiles_n = tl.cdiv(T, BLOCK_T), tl.cdiv(N, BLOCK_N)
    split = pid // (tiles_t * tiles_n)
    pid = pid % (tiles_t * tiles_n)
    n0, t0 = pid // tiles_t * BLOCK_N, pid % tiles_t * BLOCK_T
    k0 = split * steps * BLOCK_K
    n = n0 + tl.arange(0, BLOCK_N)
    if PDL:
        if AHEAD > 0:
            line = tl.minimum(k0 + tl.arange(0, AHEAD) * LINE, K - 1)
            prefetch(w_ptr + tl.minimum(n, N - 1)[:, None] * w_stride + line[None, :])
        tl.extra.cuda.gdc_wait()

    n_at, t_at, k_at = n0.to(tl.int32), t0.to(tl.int32), k0.to(tl.int32)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in range(steps):
        k = k_at + step * BLOCK_K
        for part in tl.static_range(BLOCK_K // PARTIAL):
            w = w_desc.load([n_at, k + part * PARTIAL])
            x = tl.trans(x_desc.load([t_at, k + part * PARTIAL]))
            acc += tl.dot(w, x, input_precision="ieee", max_num_imprecise_acc=PARTIAL)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    acc *= tl.load(weight_scale_ptr) * tl.load(input_scale_ptr)
    t = t0 + tl.arange(0, BLOCK_T)
    y_ptr += split * T * N  # one plane of partial sums a part of K
    finish(acc, b_ptr, r_ptr, y_ptr, t[None, :], n[:, None], T, N, r_stride, RELU2)


def codes(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch; x and weight are e4m3 and `describable`; scales: the weight's and the input's."""
    (T, K), N = x.shape, weight.shape[0]
    t, n, k = (int(tile[f"BLOCK_{axis}"]) for axis in "TNK")
    splits = min(int(tile["SPLITS"]), cdiv(K, k))
    operands = (
        TensorDescriptor(weight, [N, K], [weight.stride(0), 1], [n, PARTIAL]),
        TensorDescriptor(x, [T, K], [x.stride(0), 1], [t, PARTIAL]),
        weight.view(torch.uint8),
    )
    r_stride = 0 if residual is None else residual.stride(0)
    shape = (weight.stride(0), r_stride, T, N, K, cdiv(K, k * splits))
    constants = {**tile.without("CODES", "SPLITS"), "PARTIAL": PARTIAL, **as_dependent(x)}
    grid = (cdiv(N, n) * cdiv(T, t) * splits,)
    if splits == 1:
        args = (*operands, *scales, bias, residual, y, *shape)
        launch(_codes, grid, *args, RELU2=squared, **constants)
        return
    parts = torch.empty((splits, T, N), dtype=torch.float32, device=x.device)
    args = (*operands, *scales, None, None, parts, *shape)
    launch(_codes, grid, *args, RELU2=False, **constants)
    sum_splits(parts, bias, squared, residual, y)


def codes_tile(
    t: int, n: int, k: int, warps: int, stages: int, splits: int, ahead: int = 4
) -> Tile:
    """BLOCK_T, BLOCK_N, BLOCK_K, num_warps, num_stages, SPLITS, AHEAD."""
    tile = Tile(CODES=True, BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return tile.but(SPLITS=splits, AHEAD=ahead)
