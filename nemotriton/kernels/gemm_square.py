"""The square form of y = epilogue(scale * (x W^T) + bias): many tokens, both operands by TMA.

Tiles of x and W come through tensor descriptors, which pad with zeros past every edge, and go
straight from shared memory into wgmma or tcgen05. x [T, K] and W [N, K] are both bf16, both fp16
or both e4m3, with rows that start at multiples of 16 bytes.

Hopper's tensor cores sum e4m3 products with about 14 bits. PARTIAL columns are summed so; then they
are added to the sum in fp32. At 128 that costs one addition a sum and step, and the error is that
of rounding each of K / 128 partial sums to 14 bits: about 2^-13 of the largest of them, an eighth
of the rounding to bf16 that follows. Blackwell sums in fp32.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nemotriton.kernels.gemm_stream import finish
from nemotriton.kernels.op import Tile, cdiv, launch, target

PARTIAL = 128


@triton.jit(do_not_specialize=["T"])
def _square(
    x_desc, w_desc, weight_scale_ptr, input_scale_ptr, b_ptr, r_ptr, y_ptr,
    r_stride, T, N, K,
    RELU2: tl.constexpr, PARTIAL: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of outputs, HALVES * BLOCK_N wide; GROUP rows of tiles at a time, column by column.

    With two halves, one's additions to the sum run while the tensor cores have the other."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, HALVES * BLOCK_N)
    tiles_t = tl.cdiv(T, BLOCK_T)
    first = pid // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_t - first, GROUP)
    t0 = (first + pid % rows) * BLOCK_T
    n0 = pid % (GROUP * tiles_n) // rows * (HALVES * BLOCK_N)
    t_at, n_at = t0.to(tl.int32), n0.to(tl.int32)

    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    more = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([t_at, k])
        w = tl.trans(w_desc.load([n_at, k]))
        acc = tl.dot(x, w, acc, input_precision="ieee", max_num_imprecise_acc=PARTIAL)
        if HALVES == 2:
            w = tl.trans(w_desc.load([n_at + BLOCK_N, k]))
            more = tl.dot(x, w, more, input_precision="ieee", max_num_imprecise_acc=PARTIAL)

    if weight_scale_ptr is not None:
        scale = tl.load(weight_scale_ptr)
        if input_scale_ptr is not None:
            scale *= tl.load(input_scale_ptr)
        acc *= scale
        more *= scale
    t, n = (t0 + tl.arange(0, BLOCK_T))[:, None], (n0 + tl.arange(0, BLOCK_N))[None, :]
    finish(acc, b_ptr, r_ptr, y_ptr, t, n, T, N, r_stride, RELU2)
    if HALVES == 2:
        finish(more, b_ptr, r_ptr, y_ptr, t, n + BLOCK_N, T, N, r_stride, RELU2)


def describable(*matrices: torch.Tensor) -> bool:
    """Whether tensor descriptors can stand for these matrices, and the GPU (or the interpreter)
    has them."""
    return target(matrices[0].device) not in range(1, 90) and all(
        m.shape[0] > 0
        and m.data_ptr() % 16 == 0
        and m.stride(1) == 1
        and m.stride(0) * m.element_size() % 16 == 0
        for m in matrices
    )


def square(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    tile: Tile,
) -> None:
    """Launch; x and weight are `describable`; scales: the weight's and the input's, for e4m3."""
    (T, K), N = x.shape, weight.shape[0]
    t, n, k = (int(tile[f"BLOCK_{axis}"]) for axis in "TNK")
    operands = (
        TensorDescriptor(x, [T, K], [x.stride(0), 1], [t, k]),
        TensorDescriptor(weight, [N, K], [weight.stride(0), 1], [n, k]),
    )
    r_stride = 0 if residual is None else residual.stride(0)
    partial = PARTIAL if x.dtype == torch.float8_e4m3fn else None
    blocks = tile.without("TMA")
    args = (*operands, *scales, bias, residual, y, r_stride, T, N, K)
    grid = (cdiv(T, t) * cdiv(N, n * int(tile["HALVES"])),)
    launch(_square, grid, *args, RELU2=squared, PARTIAL=partial, **blocks)


def square_tile(shape: tuple[int, int, int, int, int], halves: int = 1) -> Tile:
    """(BLOCK_T, BLOCK_N, BLOCK_K, num_warps, num_stages) as a tile of this form."""
    t, n, k, warps, stages = shape
    tile = Tile(TMA=True, BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return tile.but(GROUP=8, HALVES=halves)
