"""Write the keys and values of new tokens into the paged cache.

    k_cache[page, offset] = k / k_scale,    rows = page * page_size + offset        (v alike)

k, v [T, Hkv, Dh] with free row strides; caches [pages, page size, Hkv, Dh] in bf16, fp16, fp32 or
fp8 e4m3; rows int64 [T], -1 writes nothing; scales are fp32 tensors of one element, None = 1. The
division is IEEE fp32; e4m3 values saturate at +-448 (NaN stays NaN) and round to nearest even, as
`cvt.rn.satfinite.e4m3x2.f32` does. Two live tokens with the same row are a fault of the caller:
which of them stays is undefined.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    Exact,
    KernelSpec,
    Tile,
    acc_dtype,
    cdiv,
    launch,
    next_pow2,
    op,
)

E4M3_MAX = 448.0
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


# --------------------------------------------------------------------------------------- write_kv
def write_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Twin of `write_kv`."""
    live = rows >= 0
    page_size = k_cache.shape[1]
    pages, offsets = rows[live] // page_size, rows[live] % page_size
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        value = new[live].to(acc_dtype(new))
        if scale is not None:
            value = value / scale.to(value.dtype)
        if cache.dtype == torch.float8_e4m3fn:
            value = value.clamp(-E4M3_MAX, E4M3_MAX)
        cache[pages, offsets] = value.to(cache.dtype)


@triton.jit
def _stored(x, scale_ptr, cache_ptr):
    if scale_ptr is not None:
        x = tl.div_rn(x.to(tl.float32), tl.load(scale_ptr))
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = x.to(tl.float32)
        x = tl.where(x > 448.0, 448.0, x)  # comparisons, so that NaN stays NaN
        x = tl.where(x < -448.0, -448.0, x)
    return x.to(cache_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["T"])
def _write_kv(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    rows_idx,
    k_scale_ptr,
    v_scale_ptr,
    T,
    k_stride,
    k_head,
    v_stride,
    v_head,
    page_stride,
    row_stride,
    head_stride,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, BLOCK_H)[None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows_idx + t, mask=t < T, other=-1).to(tl.int64)
    cell = (row // PAGE) * page_stride + (row % PAGE) * row_stride
    cell = cell[:, None, None] + h * head_stride + d
    live = (row >= 0)[:, None, None] & (h < HEADS) & (d < D)
    t = t[:, None, None]
    k = tl.load(k_ptr + t * k_stride + h * k_head + d, mask=live, other=0.0)
    v = tl.load(v_ptr + t * v_stride + h * v_head + d, mask=live, other=0.0)
    tl.store(k_cache_ptr + cell, _stored(k, k_scale_ptr, k_cache_ptr), mask=live)
    tl.store(v_cache_ptr + cell, _stored(v, v_scale_ptr, v_cache_ptr), mask=live)


@op(ref=write_kv_ref)
def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store k and v [T, Hkv, Dh] at `rows` [T] of the caches, in place; -1 stores nothing.

    Rows are page * page size + offset in int64 and are not checked against the number of pages."""
    require(
        k.ndim == 3 and v.shape == k.shape,
        f"k and v must both be [tokens, KV heads, head width], got {tuple(k.shape)} and "
        f"{tuple(v.shape)}",
    )
    T, heads, width = k.shape
    check_caches(k_cache, v_cache, heads, width)
    require(rows.shape == (T,), f"{tuple(rows.shape)} rows for {T} tokens; one a token is needed")
    require(rows.is_contiguous(), "rows must lie one behind the other; call .contiguous()")
    require(k.stride(2) == 1 and v.stride(2) == 1, "k and v must have unit stride along the head")
    for scale in (k_scale, v_scale):
        require(scale is None or scale.numel() == 1, "a KV scale must have one element")
    axes = {"Hkv": heads, "Dh": width, "fp8": int(k_cache.dtype == torch.float8_e4m3fn)}
    tile = WRITE_KV.tile(T, k, **axes)
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_cache.stride()[:3])
    blocks = {"BLOCK_H": next_pow2(heads), "BLOCK_D": next_pow2(width)}
    shape = {"PAGE": k_cache.shape[1], "HEADS": heads, "D": width}
    tensors = (k, v, k_cache, v_cache, rows, k_scale, v_scale)
    grid = (cdiv(T, int(tile["BLOCK_T"])),)
    launch(_write_kv, grid, *tensors, T, *strides, **shape, **blocks, **as_dependent(k), **tile)


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, heads: int, width: int) -> None:
    """UnsupportedError unless both are [pages, page size, heads, width] of one layout and dtype."""
    shape = tuple(k_cache.shape)
    require(
        len(shape) == 4 and shape[2:] == (heads, width),
        f"a cache of shape {shape} does not hold {heads} heads of width {width}",
    )
    require(
        v_cache.shape == k_cache.shape
        and v_cache.stride() == k_cache.stride()
        and v_cache.dtype == k_cache.dtype,
        "the K and V caches must agree in shape, strides and dtype",
    )
    require(k_cache.stride(3) == 1, "the caches must have unit stride along the head")
    page = shape[1]
    require(
        page >= 16 and page & (page - 1) == 0,
        f"page size {page} is not a power of two of at least 16",
    )
    require(
        k_cache.dtype in CACHE_DTYPES,
        f"KV caches of {k_cache.dtype} are not supported; use bf16, fp16, fp32 or fp8 e4m3",
    )


def _make_write_kv(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    """Rows scattered over all pages with every third token a pad; NaN caches."""
    page = 64
    count = cdiv(T, page) + 2
    rows = [
        -1 if t % 3 == 1 else (count - 1 - t // page) * page + (t * 37 + 5) % page for t in range(T)
    ]
    shape = (T, case.Hkv, case.Dh)
    new = [10 * torch.randn(shape, device=dev, generator=rng) for _ in "kv"]
    kind = torch.float8_e4m3fn if case.fp8 else dtype
    empty = torch.full((count, page, case.Hkv, case.Dh), float("nan"), device=dev)
    scales: list[Any] = [None, None]
    if case.fp8:
        scales = [torch.tensor(s, device=dev) for s in (0.02, 30.0)]
    return {
        "k": new[0].to(dtype),
        "v": new[1].to(dtype),
        "k_cache": empty.to(kind),
        "v_cache": empty.to(kind),
        "rows": torch.tensor(rows, dtype=torch.int64, device=dev),
        "k_scale": scales[0],
        "v_scale": scales[1],
    }


def _write_cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    stored = 1 if case.fp8 else dtype.itemsize
    return Cost(0, T * (2 * case.Hkv * case.Dh * (dtype.itemsize + stored) + 8))


WRITE_KV = KernelSpec(
    op=write_kv,
    kernels=(_write_kv,),
    cases=lambda config: (
        [
            Case(Hkv=config.attention.kv_heads, Dh=config.attention.head_dim, fp8=fp8)
            for fp8 in (0, 1)
        ]
        if config.attention
        else []
    ),
    small=[
        Case(Hkv=2, Dh=32, fp8=0),
        Case(Hkv=1, Dh=37, fp8=1),
        Case(Hkv=3, Dh=128, fp8=0),
        Case(Hkv=2, Dh=16, fp8=1),
    ],
    tokens=(1, 16, 256, 1024, 8192),
    make=_make_write_kv,
    tiles=lambda case: [
        Tile(BLOCK_T=b, num_warps=w, num_stages=1) for b in (1, 4, 8) for w in (1, 4)
    ],
    default=lambda case, tokens: Tile(
        BLOCK_T=1 if tokens <= 256 else 4, num_warps=1 if tokens <= 256 else 4, num_stages=1
    ),
    fixed=UNORDERED,
    cost=_write_cost,
    tolerance=Exact(),
    mutates=("k_cache", "v_cache"),
    strided=("k", "v"),
)
