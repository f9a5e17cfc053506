"""Keys and values of a paged fp8 cache as 16-bit ones, the sequences behind each other.

Attention over a prompt converts every key once for each block of queries, on a pipe that takes as
long for it as the tensor cores do for the rest. Converting all of them once costs 6 bytes a number.
e4m3 is exact in 16 bits; the caches' scales are not applied here.

caches e4m3 [pages, page size, Hkv, Dh], pages int32 [S, ...], lengths int32 [S] as in `attention`.
"""

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.kv_cache import check_caches
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    Exact,
    KernelSpec,
    Tile,
    cdiv,
    launch,
    next_pow2,
    op,
)
from nemotriton.kernels.paged import attention_case, attention_inputs
from nemotriton.kernels.widen import e4m3_exactly

DTYPES = (torch.bfloat16, torch.float16)
Widened = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def widen_keys_ref(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    dtype: torch.dtype,
) -> Widened:
    """Twin of `widen_keys`."""
    S, page = lengths.shape[0], k_cache.shape[1]
    width = cdiv(max_length, page)
    table = torch.arange(S * width, dtype=torch.int32, device=pages.device).view(S, width)
    wide = [c.new_zeros((S * width, *c.shape[1:]), dtype=dtype) for c in (k_cache, v_cache)]
    for s, length in enumerate(lengths.tolist()):
        used = pages[s, : cdiv(length, page)].long()
        for out, cache in zip(wide, (k_cache, v_cache), strict=True):
            rows = out[s * width : (s + 1) * width].flatten(0, 1)
            rows[:length] = cache[used].flatten(0, 1)[:length].to(dtype)
    return wide[0], wide[1], table


@triton.jit(do_not_specialize=["WIDTH"])
def _widen_keys(
    k_ptr, v_ptr, wide_k_ptr, wide_v_ptr, table_ptr, pages_idx, lengths_idx,
    pages_stride, page_stride, row_stride, head_stride, WIDTH,
    PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_R of the (key, head) rows of page `i` of sequence `s`; zeros behind the last key."""
    PARTS: tl.constexpr = (PAGE * HEADS + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0).to(tl.int64)
    own = pid // PARTS  # the widened page
    s, i = own // WIDTH, own % WIDTH
    left = tl.load(lengths_idx + s).to(tl.int64) - i * PAGE  # keys of this page
    page = tl.load(pages_idx + s * pages_stride + i, mask=left > 0, other=0).to(tl.int64)
    row = (pid % PARTS * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    d = tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK_D), 8), 8)[None, :]
    inside = (row < PAGE * HEADS) & (d < D)
    live = inside & (row // HEADS < left)
    at = page * page_stride + row // HEADS * row_stride + row % HEADS * head_stride + d
    k = tl.load(k_ptr + at, mask=live, other=0)
    v = tl.load(v_ptr + at, mask=live, other=0)
    to = (own * (PAGE * HEADS) + row) * D + d
    tl.store(wide_k_ptr + to, e4m3_exactly(k, wide_k_ptr.dtype.element_ty, ASM), mask=inside)
    tl.store(wide_v_ptr + to, e4m3_exactly(v, wide_v_ptr.dtype.element_ty, ASM), mask=inside)
    tl.store(table_ptr + own, own.to(tl.int32))


@op(ref=widen_keys_ref)
def widen_keys(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    dtype: torch.dtype,
) -> Widened:
    """k and v [S * n, page size, Hkv, Dh] in `dtype`, and their page table int32 [S, n]: n pages
    for each sequence, as many as `max_length`, the largest of lengths or more, needs.

    Memory is taken in powers of two, so that a growing context finds again what it has freed."""
    _, page, heads, width = k_cache.shape
    check_caches(k_cache, v_cache, heads, width)
    require(
        k_cache.dtype == torch.float8_e4m3fn and dtype in DTYPES,
        f"caches of fp8 e4m3 are widened to bf16 or fp16, not {k_cache.dtype} to {dtype}",
    )
    S, n = lengths.shape[0], cdiv(max_length, page)
    shape = (next_pow2(S * n), page, heads, width)
    k, v = (torch.empty(shape, dtype=dtype, device=k_cache.device)[: S * n] for _ in "kv")
    table = torch.empty((S, n), dtype=torch.int32, device=k_cache.device)
    tile = WIDEN_KEYS.tile(S * max_length, k, Hkv=heads, Dh=width, page=page)
    block_d = max(16, next_pow2(width))
    block_r = min(next_pow2(page * heads), max(1, int(tile["BLOCK"]) // block_d))
    constants = {"PAGE": page, "HEADS": heads, "D": width, "ASM": decodes_by_assembly(k_cache)}
    constants |= {"BLOCK_R": block_r, "BLOCK_D": block_d}
    blocks = tile.without("BLOCK")
    codes = (k_cache.view(torch.uint8), v_cache.view(torch.uint8))
    strides = (pages.stride(0), *k_cache.stride()[:3])
    grid = (S * n * cdiv(page * heads, block_r),)
    args = (*codes, k, v, table, pages, lengths, *strides, n)
    launch(_widen_keys, grid, *args, **constants, **blocks)
    return k, v, table


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    """T keys of four sequences, the last of which has fewer and, of a few keys, none: a pad."""
    most = cdiv(T, 4)  # the host knows no more of them than this
    lengths = [min(most, max(T - i * most, 0)) for i in range(4)]
    made = attention_inputs(
        Case(**case, H=case.Hkv, fp8=1), [(0, n) for n in lengths], dev, dtype, rng
    )
    args = {name: made[name] for name in ("k_cache", "v_cache", "pages", "lengths", "max_length")}
    return {**args, "dtype": dtype}


def _cases(config: object) -> list[Case]:
    axes = attention_case(config, 1)
    return [] if axes is None else [Case(**{name: axes[name] for name in ("Hkv", "Dh", "page")})]


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    return Cost(0, 2 * T * case.Hkv * case.Dh * (1 + dtype.itemsize))


WIDEN_KEYS = KernelSpec(
    op=widen_keys,
    kernels=(_widen_keys,),
    cases=_cases,
    small=[Case(Hkv=2, Dh=32, page=16), Case(Hkv=3, Dh=37, page=64), Case(Hkv=1, Dh=128, page=32)],
    tokens=(1024, 8192, 65536),
    make=_make,
    tiles=lambda case: [
        Tile(BLOCK=b, num_warps=w, num_stages=1) for b, w in ((4096, 4), (8192, 8), (2048, 2))
    ],
    default=lambda case, tokens: Tile(BLOCK=4096, num_warps=4, num_stages=1),
    fixed=UNORDERED,
    cost=_cost,
    tolerance=Exact(),
    dtypes=("bf16", "fp16"),
    small_tokens=(1, 5, 200),
)
