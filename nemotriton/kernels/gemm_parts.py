"""y = x W^T of a fp32 W [N, K] and bf16 x [T, K], many tokens: the router of a long prompt.

W is split into three bf16 matrices, each what the ones before it leave of its 24 bits, in a launch
of its own (20 bytes an element once, where every block of tokens would split again); then all come
through tensor descriptors. Products are exact.

Hopper's tensor cores cut their sums off, and it is the number of additions to a large sum that the
error grows with. Every part has an accumulator of its own, so that what the others lose is below
2^-8 of what the first does; each half of K has, too: with one, 4,096 columns were off by 1.3 times
what the gate allows a fp32 sum. That also lets the three products of a step run on: two on one
accumulator would wait for each other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nemotriton.errors import require
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.gemm_square import describable
from nemotriton.kernels.gemm_stream import finish
from nemotriton.kernels.op import Args, Case, Cost, KernelSpec, Tile, acc_dtype, cdiv, launch, op

PARTS = 3
SPLIT_BLOCK = 2048
LEAST_TOKENS = 1024  # below, K has to be split for there to be programs enough


def parts_matmul_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Twin of `parts_matmul`."""
    f = acc_dtype(x)
    return x.to(f) @ weight.to(f).T


@triton.jit
def _split_parts(w_ptr, parts_ptr, count, BLOCK: tl.constexpr):
    """Parts [3, N, K] of W [N, K], which has `count` elements; an infinite one leaves NaN."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + i, mask=i < count, other=0.0)
    for part in tl.static_range(3):
        high = w.to(tl.bfloat16)
        tl.store(parts_ptr + part * count + i, high, mask=i < count)
        w -= high.to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def _square_parts(
    x_desc, parts_desc, y_ptr, T, N, K,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of y [T, N] from parts [3 N, K]; BLOCK_N divides N."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = N // BLOCK_N
    t0, n0 = pid // tiles_n * BLOCK_T, pid % tiles_n * BLOCK_N
    t_at, n_at = t0.to(tl.int32), n0.to(tl.int32)
    y = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    half = tl.cdiv(K, 2 * BLOCK_K) * BLOCK_K
    for i in tl.static_range(2):  # halves of K
        first = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        second = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        third = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for k in range(i * half, (i + 1) * half, BLOCK_K):
            x = x_desc.load([t_at, k])
            first = tl.dot(x, tl.trans(parts_desc.load([n_at, k])), first, input_precision="ieee")
            w = tl.trans(parts_desc.load([n_at + N, k]))
            second = tl.dot(x, w, second, input_precision="ieee")
            w = tl.trans(parts_desc.load([n_at + 2 * N, k]))
            third = tl.dot(x, w, third, input_precision="ieee")
        y += first + (second + third)
    t, n = (t0 + tl.arange(0, BLOCK_T))[:, None], (n0 + tl.arange(0, BLOCK_N))[None, :]
    finish(y, None, None, y_ptr, t, n, T, N, 0, False)


@op(ref=parts_matmul_ref)
def parts_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T for x bf16 [T, K] and weight fp32 [N, K], contiguous; returns fp32 [T, N].

    N and K as `divides` has them; an x that is not `describable` is copied first."""
    (T, K), N = x.shape, weight.shape[0]
    require(
        x.dtype == torch.bfloat16 and weight.dtype == torch.float32 and weight.is_contiguous(),
        f"parts are taken of contiguous fp32 weights beside bf16 x, got {weight.dtype}, {x.dtype}",
    )
    require(divides(N, K), f"{N} outputs of {K} columns are not whole tiles: use matmul")
    y = torch.empty((T, N), dtype=torch.float32, device=x.device)
    if T == 0:
        return y
    if not describable(x):
        x = x.contiguous()
    tile = PARTS_MATMUL.tile(T, x, N=N, K=K)
    t, n, k = (int(tile[f"BLOCK_{axis}"]) for axis in "TNK")
    parts = torch.empty((PARTS * N, K), dtype=torch.bfloat16, device=x.device)
    count = weight.numel()
    launch(
        _split_parts, (cdiv(count, SPLIT_BLOCK),), weight, parts, count, BLOCK=SPLIT_BLOCK,
        num_warps=4,
    )  # fmt: skip
    operands = (
        TensorDescriptor(x, [T, K], [x.stride(0), 1], [t, k]),
        TensorDescriptor(parts, [PARTS * N, K], [K, 1], [n, k]),
    )
    launch(_square_parts, (cdiv(T, t) * (N // n),), *operands, y, T, N, K, **tile)
    return y


def divides(N: int, K: int) -> bool:
    """Whether outputs are whole tiles of every size here, and rows multiples of 16 bytes."""
    return N % 128 == 0 and K % 8 == 0


def takes_parts(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether `parts_matmul` is the way to make y of x and weight, where y is their product."""
    whole = weight.is_contiguous() and divides(*weight.shape)
    many = x.shape[0] >= LEAST_TOKENS
    return whole and many and y.dtype == torch.float32 and describable(x, weight)


# ------------------------------------------------------------------------------------------- spec
def _tile(shape: tuple[int, int, int, int, int]) -> Tile:
    t, n, k, warps, stages = shape
    return Tile(BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)


# of 128 x 128 and eight warps ptxas makes every wgmma wait (C7515)
_TILES = [_tile(shape) for shape in ((128, 64, 64, 8, 4), (64, 64, 64, 4, 3))]


def _cases(config: Any) -> list[Case]:
    """The routers that come in whole tiles."""
    moes = dict.fromkeys(m.experts for m in (*config.moes, config.mtp_moe) if m is not None)
    return [Case(N=experts, K=config.width) for experts in moes if divides(experts, config.width)]


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    return {
        "x": torch.randn(T, case.K, generator=rng, device=dev).to(dtype),
        "weight": torch.randn(case.N, case.K, generator=rng, device=dev) * case.K**-0.5,
    }


PARTS_MATMUL = KernelSpec(
    terms=lambda case: case.K,
    op=parts_matmul,
    kernels=(_split_parts, _square_parts),
    cases=_cases,
    small=[Case(N=128, K=72)],
    tokens=(1024, 2048, 8192, 32768),
    dtypes=("bf16",),
    small_tokens=(0, 1, 70),
    make=_make,
    tiles=lambda case: _TILES,
    default=lambda case, tokens: _TILES[0],
    fixed=UNORDERED,
    cost=lambda case, T, dtype: Cost(
        2 * T * case.N * case.K, case.N * case.K * 4 + T * (case.K * 2 + case.N * 4)
    ),
    per_token=("x",),
    strided=("x",),
    arches=(90,),
)
