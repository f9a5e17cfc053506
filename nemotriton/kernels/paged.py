"""What the attention kernels share: the walk over pages, the online softmax, checks and inputs.

Shapes, dtypes and the meaning of `pages`, `cu`, `lengths` and `parents` are those of `attention`.
"""

import math
import random
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.kv_cache import check_caches
from nemotriton.kernels.op import Args, Case, Tile, cdiv, next_pow2

LOG2_E = math.log2(math.e)


@triton.jit
def owner(cu_idx, S, block, BLOCK_Q: tl.constexpr, EXTRA: tl.constexpr):
    """The last sequence whose first block, cu[s] // BLOCK_Q + s * EXTRA, is not after `block`."""
    count = 0
    for s0 in range(0, S, 128):
        s = s0 + tl.arange(0, 128)
        first = tl.load(cu_idx + s, mask=s < S, other=0).to(tl.int64) // BLOCK_Q + s * EXTRA
        count += tl.sum(((s < S) & (first <= block)).to(tl.int32), 0)
    return count - 1


@triton.jit
def pages_at(pages_idx, n0, end, PAGE: tl.constexpr, ROWS: tl.constexpr):
    """The page of the keys n0..n0 + ROWS, n0 a multiple of ROWS: one number where they share one,
    else one a key [ROWS]. Behind the last key it is the last key's, so one may read ahead."""
    n = n0
    if ROWS > PAGE:
        n += tl.arange(0, ROWS)
    n = tl.minimum(n, end - 1)
    return tl.load(pages_idx + n // PAGE, mask=n >= 0, other=0).to(tl.int64)


@triton.jit
def cells(page, n0, page_stride, row_stride, PAGE: tl.constexpr, ROWS: tl.constexpr):
    """Where those keys lie: a scalar offset, and one a key [ROWS] to add to it. In one page the
    latter do not change: few registers."""
    n = tl.arange(0, ROWS)
    if ROWS <= PAGE:
        base = page * page_stride + (n0 % PAGE) * row_stride
        cell = n * row_stride
    else:
        base = n0 * 0
        cell = page * page_stride + (n % PAGE) * row_stride
    return base, cell


@triton.jit
def path_cells(
    pages_idx, n0, end, context, up_idx, leaf, sight, page_stride, row_stride,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same for a draft of a tree, token `leaf`: behind the context its keys are those of its
    ancestors and its own, in the order of the path, wherever they lie; its own is key sight - 1."""
    n = n0 + tl.arange(0, ROWS)
    lies = n + 0
    token = leaf + 0
    for i in range((leaf + 1).to(tl.int32)):
        lies = tl.where((n == sight - 1 - i) & (token >= 0), context + token.to(tl.int32), lies)
        token = tl.load(up_idx + token, mask=token >= 0, other=-1).to(tl.int64)
    page = tl.load(pages_idx + lies // PAGE, mask=n < end, other=0).to(tl.int64)
    return n0 * 0, page * page_stride + (lies % PAGE) * row_stride


@triton.jit
def key_cells(
    page, pages_idx, n0, end, context, up_idx, leaf, sight, page_stride, row_stride,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`path_cells` where there is a path (up_idx), else `cells`."""
    if up_idx is None:
        base, cell = cells(page, n0, page_stride, row_stride, PAGE, ROWS)
    else:
        base, cell = path_cells(
            pages_idx, n0, end, context, up_idx, leaf, sight, page_stride, row_stride, PAGE, ROWS
        )
    return base, cell


@triton.jit
def fetch(ptr, base, cell, n0, end, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of keys or values [ROWS, Dh], zeros behind the last key: it may be NaN there, and
    0 * NaN must not enter a sum."""
    d = tl.arange(0, BLOCK_D)
    at = ptr + base + cell[:, None] + d[None, :]
    if MASKED:
        n = n0 + tl.arange(0, cell.shape[0])
        return tl.load(at, mask=(d < D)[None, :] & (n < end)[:, None], other=0.0)
    elif D < BLOCK_D:
        return tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def descends(n, position, context, parents_idx, drafts):
    """bool [M, N]: key n is context, or the token at `position` itself, or one of its ancestors."""
    token = (position - context).to(tl.int64)  # index among the new tokens; negative on dead rows
    key = (n - context)[None, :]
    visible = (key < 0) | (key == token[:, None])
    for _ in range(drafts):
        token = tl.load(parents_idx + token, mask=token >= 0, other=-1).to(tl.int64)
        visible = visible | (key == token[:, None])
    return visible


@triton.jit
def scores(
    q, k, n0, position, context, parents_idx, drafts, ROWS: tl.constexpr, MASKED: tl.constexpr
):
    """q k^T [M, ROWS], unscaled; -inf where a row does not see the key."""
    raw = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        n = n0 + tl.arange(0, ROWS)
        visible = n[None, :] <= position[:, None]
        if parents_idx is not None:
            visible = descends(n, position, context, parents_idx, drafts)
        raw = tl.where(visible, raw, float("-inf"))
    return raw


@triton.jit
def attend_keys(
    acc, peak, total, q, k_ptr, v_ptr, pages_idx, begin, end, scale, page_stride, row_stride,
    position, context, parents_idx, drafts, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, up_idx=None,
    leaf=None, sight=None,
):  # fmt: skip
    """Online softmax (Milakov & Gimelshein 2018) of q [M, Dh] over the keys begin..end of a page
    table row; `begin` is a multiple of BLOCK_N, and so is `end` unless MASKED.

    acc [M, Dh], peak [M] (largest scaled score so far), total [M] are carried. Both forms do the
    same arithmetic, so a block of keys adds the same bits whether or not it had to be masked.
    A block wider than a page is read in two halves, which share one step of the softmax. Pages are
    looked up a step ahead and carried: a look-up between the steps' loads would take a stage of
    the pipeline for itself, and halve what is on its way from memory. up_idx, leaf and
    sight: the keys are those on the way to a draft of a tree, see `path_cells`."""
    HALVES: tl.constexpr = 2 if BLOCK_N > PAGE else 1
    ROWS: tl.constexpr = BLOCK_N // HALVES
    page = pages_at(pages_idx, begin, end, PAGE, ROWS)
    if HALVES == 2:
        page2 = pages_at(pages_idx, begin + ROWS, end, PAGE, ROWS)
    STAGES: tl.constexpr = 2 if MASKED else None  # a step or two: not worth a deep pipeline
    for n0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        ahead = pages_at(pages_idx, n0 + BLOCK_N, end, PAGE, ROWS)
        base, cell = key_cells(
            page, pages_idx, n0, end, context, up_idx, leaf, sight, page_stride, row_stride, PAGE,
            ROWS,
        )  # fmt: skip
        k = fetch(k_ptr, base, cell, n0, end, D, BLOCK_D, MASKED).to(q.dtype)
        raw = scores(q, k, n0, position, context, parents_idx, drafts, ROWS, MASKED)
        top = tl.max(raw, 1)
        if HALVES == 2:
            n2 = n0 + ROWS
            ahead2 = pages_at(pages_idx, n2 + BLOCK_N, end, PAGE, ROWS)
            base2, cell2 = key_cells(
                page2, pages_idx, n2, end, context, up_idx, leaf, sight, page_stride, row_stride,
                PAGE, ROWS,
            )  # fmt: skip
            k2 = fetch(k_ptr, base2, cell2, n2, end, D, BLOCK_D, MASKED).to(q.dtype)
            raw2 = scores(q, k2, n2, position, context, parents_idx, drafts, ROWS, MASKED)
            top = tl.maximum(top, tl.max(raw2, 1))
        higher = tl.maximum(peak, top * scale)
        level = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        decay = tl.exp2(peak - level)
        p = tl.exp2(tl.fma(raw, scale, -level[:, None]))
        total = total * decay + tl.sum(p, 1)
        v = fetch(v_ptr, base, cell, n0, end, D, BLOCK_D, MASKED).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
        if HALVES == 2:
            p2 = tl.exp2(tl.fma(raw2, scale, -level[:, None]))
            total += tl.sum(p2, 1)
            v2 = fetch(v_ptr, base2, cell2, n2, end, D, BLOCK_D, MASKED).to(q.dtype)
            acc = tl.dot(p2.to(q.dtype), v2, acc, input_precision="ieee")
            page2 = ahead2
        # Always true; makes Triton wait for this dot before the next step writes p's registers,
        # which an asynchronous wgmma would still be reading (triton#9433).
        acc = tl.where(n0 < end, acc, 0.0)
        peak = higher
        page = ahead
    return acc, peak, total


def check_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    cu: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[int, int]:
    """(KV heads, query heads a KV head); UnsupportedError when the arguments do not fit."""
    require(q.ndim == 3, f"q must be [tokens, heads, head width], got shape {tuple(q.shape)}")
    _, heads, width = q.shape
    kv_heads = k_cache.shape[2] if k_cache.ndim == 4 else 0
    check_caches(k_cache, v_cache, kv_heads, width)
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"{heads} query heads are not a multiple of {kv_heads} KV heads",
    )
    require(q.stride(2) == 1, "q must have unit stride along the head; call .contiguous()")
    require(
        k_cache.dtype in (q.dtype, torch.float8_e4m3fn),
        f"q is {q.dtype}: the caches must be so too, or fp8 e4m3, but are {k_cache.dtype}",
    )
    S = lengths.shape[0]
    require(cu.shape == (S + 1,), f"cu has {cu.numel()} entries for {S} sequences, not {S + 1}")
    require(
        pages.ndim == 2 and pages.shape[0] == S and pages.stride(1) == 1,
        f"the page table must be [{S}, pages] with unit stride, got {tuple(pages.shape)}",
    )
    require(scale > 0, f"the scale of the scores must be positive, got {scale}")
    for kv_scale in (k_scale, v_scale):
        require(kv_scale is None or kv_scale.numel() == 1, "a KV scale must have one element")
    return kv_heads, heads // kv_heads


def attention_axes(q: torch.Tensor, k_cache: torch.Tensor) -> dict[str, int]:
    """The static axes of an attention call, as in `attention_case`; fp32 calls say so besides,
    since IEEE dots are unrolled into scalar instructions and need a tile of their own."""
    axes = {
        "H": q.shape[1],
        "Hkv": k_cache.shape[2],
        "Dh": q.shape[2],
        "page": k_cache.shape[1],
        "fp8": int(k_cache.dtype == torch.float8_e4m3fn),
    }
    return axes | {"fp32": 1} if q.dtype == torch.float32 else axes


def fp32_tile(case: Case) -> Tile:
    """The default of fp32 calls: small, or the compiler takes minutes."""
    rows = max(16, next_pow2(case.H // case.Hkv))
    return Tile(BLOCK_M=rows, BLOCK_N=32, num_warps=4 if rows == 16 else 8, num_stages=1)


def attention_case(config: object, fp8: int) -> dict[str, int] | None:
    """Axes for a ModelConfig; None when it has no attention layer."""
    part = getattr(config, "attention", None)
    if part is None:
        return None
    return {"H": part.heads, "Hkv": part.kv_heads, "Dh": part.head_dim, "page": 64, "fp8": fp8}


def attention_inputs(
    case: Case,
    plan: Sequence[tuple[int, int]],
    dev: torch.device,
    dtype: torch.dtype,
    rng: torch.Generator,
) -> Args:
    """Arguments for sequences of (new tokens, length): shuffled pages, NaN wherever no key lies."""
    used = [cdiv(length, case.page) for _, length in plan]
    order = list(range(sum(used) + 3))
    random.Random(0).shuffle(order)
    table = torch.full((len(plan), max(used, default=0) + 1), -1, dtype=torch.int32)
    owned = torch.zeros(len(order), case.page, dtype=torch.bool)
    for s, (_, length) in enumerate(plan):
        mine = torch.tensor([order.pop() for _ in range(used[s])], dtype=torch.int64)
        table[s, : used[s]] = mine
        last = length - (used[s] - 1) * case.page
        owned[mine[:-1]] = True
        owned[mine[-1:], :last] = True
    shape = (*owned.shape, case.Hkv, case.Dh)
    keys = [torch.randn(shape, device=dev, generator=rng) for _ in "kv"]
    holes = ~owned.to(dev)[:, :, None, None]
    scales = [torch.tensor(x, device=dev) for x in (0.02, 0.3)] if case.fp8 else [None, None]
    kind = torch.float8_e4m3fn if case.fp8 else dtype
    caches = [
        (x if c is None else x / c).clamp(-448, 448).masked_fill(holes, float("nan")).to(kind)
        for x, c in zip(keys, scales, strict=True)
    ]
    news = [new for new, _ in plan]
    starts = torch.tensor([sum(news[:s]) for s in range(len(news) + 1)], dtype=torch.int32)
    return {
        "q": torch.randn(sum(news), case.H, case.Dh, device=dev, generator=rng).to(dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "pages": table.to(dev),
        "cu": starts.to(dev),
        "lengths": torch.tensor([n for _, n in plan], dtype=torch.int32).to(dev),
        "max_new": max(news, default=0),
        "max_length": max((n for _, n in plan), default=0),
        "scale": case.Dh**-0.5,
        "k_scale": scales[0],
        "v_scale": scales[1],
    }
