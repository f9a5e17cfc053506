"""Quantised matrices as 16-bit ones: FP8, and NVFP4 packed for Hopper.

A product of many tokens decodes every weight once for each block of tokens. From some hundred
tokens on it is cheaper to write the decoded matrix once and to multiply that: e4m3, and e2m1 times
its block scale, are exact in 16 bits, so no bit of the result changes by it. A matrix's one fp32
scale is not applied here.

weight e4m3 [N, K] with a free row stride; words int32 [N/128, K/128, 2304] of `hopper_pack`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.fp4 import nvfp4_values_ref, random_fp8, random_nvfp4
from nemotriton.kernels.gemm_stream import e4m3_to
from nemotriton.kernels.hopper_pack import (
    WEIGHT_UNIT,
    WORDS,
    fragments,
    pack_hopper,
    tiles_of,
    unpack_hopper,
)
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    Exact,
    KernelSpec,
    Make,
    Tile,
    cdiv,
    launch,
    op,
)
from nemotriton.kernels.quantize import quantised_sizes

DTYPES = (torch.bfloat16, torch.float16)


def widen_fp8_ref(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Twin of `widen_fp8`."""
    return weight.to(dtype)


def widen_packed_ref(words: torch.Tensor, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Twin of `widen_packed`."""
    stored = unpack_hopper(words, rows, cols)
    return nvfp4_values_ref(*stored, torch.float32).to(dtype)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def e4m3_exactly(byte, dtype: tl.constexpr, ASM: tl.constexpr):
    """`e4m3_to` that keeps NaN, which the assembly takes for a number."""
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), e4m3_to(byte, dtype, ASM))


@triton.jit(do_not_specialize=["N"])
def _widen_fp8(
    w_ptr, y_ptr, w_stride, N, K,
    ASM: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K columns of BLOCK_N rows; eight of a lane, so that it stores 16 bytes in a row."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(K, BLOCK_K)
    n = (pid // blocks * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = pid % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
    k = tl.max_contiguous(tl.multiple_of(k, 8), 8)[None, :]
    live = n < N
    if not EVEN_K:
        live &= k < K
    byte = tl.load(w_ptr + n * w_stride + k, mask=live, other=0)
    tl.store(y_ptr + n * K + k, e4m3_exactly(byte, y_ptr.dtype.element_ty, ASM), mask=live)


@triton.jit(do_not_specialize=["N"])
def _widen_packed(
    words_ptr, y_ptr, N, K, K_TILES: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr
):
    """BLOCK_N rows of a tile's 128 columns, brought from wgmma's `k_order` back into their own."""
    NB: tl.constexpr = BLOCK_N // 16
    pid = tl.program_id(0).to(tl.int64)
    block = pid // K_TILES * NB + tl.arange(0, NB)
    at = words_ptr + block // 8 * (K_TILES * WORDS) + pid % K_TILES * WORDS
    words = tl.load((at + block % 8 * 256)[:, None] + tl.arange(0, 256)[None, :])
    scales = tl.load((at + 2048 + block % 8 * 32)[:, None] + tl.arange(0, 32)[None, :])
    words, scales = words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True)
    w = fragments(words, scales, NB, 2, ASM, False)
    # 64 | column quarter, pair, lane, column -> 64 | lane, column quarter, pair, column
    w = w.reshape(BLOCK_N, 2, 4, 2, 4, 2).trans(0, 1, 4, 2, 3, 5).reshape(BLOCK_N, 128)
    w = w.to(tl.float32) * WEIGHT_UNIT
    n = (pid // K_TILES * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (pid % K_TILES * 128 + tl.arange(0, 128))[None, :]
    tl.store(y_ptr + n * K + k, w.to(y_ptr.dtype.element_ty), mask=(n < N) & (k < K))


# -------------------------------------------------------------------------------------------- ops
@op(ref=widen_fp8_ref)
def widen_fp8(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of an e4m3 matrix [N, K] in bf16 or fp16, exactly; NaN stays NaN."""
    require(
        weight.ndim == 2 and weight.dtype == torch.float8_e4m3fn and weight.stride(1) == 1,
        f"weight must be float8_e4m3fn [N, K] with unit stride along K, got {weight.dtype}",
    )
    _check(dtype)
    N, K = weight.shape
    y = torch.empty((N, K), dtype=dtype, device=weight.device)
    tile = WIDEN_FP8.tile(N, y, K=K)
    block_n, block_k = int(tile["BLOCK_N"]), int(tile["BLOCK_K"])
    constants = {"ASM": decodes_by_assembly(weight), "EVEN_K": K % block_k == 0}
    grid = (cdiv(N, block_n) * cdiv(K, block_k),)
    args = (weight.view(torch.uint8), y, weight.stride(0), N, K)
    launch(_widen_fp8, grid, *args, **constants, **tile)
    return y


@op(ref=widen_packed_ref)
def widen_packed(words: torch.Tensor, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """What a packed NVFP4 matrix [rows, cols] holds but for its global scale, in bf16 or fp16."""
    shape = (tiles_of(rows), tiles_of(cols), WORDS.value)
    require(
        words.shape == shape and words.dtype == torch.int32 and words.is_contiguous(),
        f"words of shape {tuple(words.shape)} are not a packed matrix [{rows}, {cols}]",
    )
    _check(dtype)
    y = torch.empty((rows, cols), dtype=dtype, device=words.device)
    tile = WIDEN_PACKED.tile(rows, y, K=cols)
    k_tiles = words.shape[1]
    grid = (cdiv(rows, int(tile["BLOCK_N"])) * k_tiles,)
    constants = {"K_TILES": k_tiles, "ASM": decodes_by_assembly(words)}
    launch(_widen_packed, grid, words, y, rows, cols, **constants, **tile)
    return y


def _check(dtype: torch.dtype) -> None:
    require(dtype in DTYPES, f"matrices are widened to bf16 or fp16, not {dtype}")


# ------------------------------------------------------------------------------------------- specs
def _make_fp8(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    return {"weight": random_fp8((T, case.K), dev, rng), "dtype": dtype}


def _make_packed(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    words = pack_hopper(*random_nvfp4((T, case.K), dev, rng))
    return {"words": words, "rows": T, "cols": case.K, "dtype": dtype}


def _spec(wrapper: Any, kernel: Any, make: Make, stored: float, tiles: list[Tile]) -> KernelSpec:
    """The token axis is that of the matrix's rows."""
    return KernelSpec(
        op=wrapper,
        kernels=(kernel,),
        cases=lambda config: [
            Case(K=k) for k in dict.fromkeys(k for _, k in quantised_sizes(config))
        ],
        small=[Case(K=336), Case(K=1040)],
        tokens=(1024, 4096, 16384),
        make=make,
        tiles=lambda case: tiles,
        default=lambda case, tokens: tiles[0],
        fixed=UNORDERED,
        cost=lambda case, T, dtype: Cost(0, int(T * case.K * (stored + dtype.itemsize))),
        tolerance=Exact(),
        dtypes=("bf16", "fp16"),
        small_tokens=(1, 17, 150),
        strided=("weight",) if wrapper is widen_fp8 else (),
        arches=() if wrapper is widen_fp8 else (90,),
    )


_FP8 = [Tile(BLOCK_N=n, BLOCK_K=1024, num_warps=4, num_stages=1) for n in (4, 2, 8)]
_PACKED = [Tile(BLOCK_N=n, num_warps=w, num_stages=1) for n, w in ((64, 4), (32, 4), (128, 8))]
WIDEN_FP8 = _spec(widen_fp8, _widen_fp8, _make_fp8, 1.0, _FP8)
WIDEN_PACKED = _spec(widen_packed, _widen_packed, _make_packed, 0.5625, _PACKED)
