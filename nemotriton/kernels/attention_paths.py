"""Attention of draft trees in the invariant mode: every token as if it were decoded alone.

A token of a tree sees its context, its ancestors and itself. `attention_decode` hides its other
relatives by a mask; then the same keys stand at other places of a sum than without the tree, and
last bits differ. Here a program takes one token, and reads behind the context the keys on the way
to it, in order, from wherever the pages hold them. So it does what a step of `attend_decode` does
for a sequence that consists of that path, and gives its bits. Each token reads the context anew.
"""

import torch
import triton
import triton.language as tl

from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.op import Tile, launch, next_pow2
from nemotriton.kernels.paged import LOG2_E, attend_keys, owner


@triton.jit
def split_size(keys, SPLITS: tl.constexpr, GRAIN: tl.constexpr):
    """Keys a split of a token that sees `keys` of them."""
    unit: tl.constexpr = SPLITS * GRAIN
    return tl.maximum((keys + unit // 2) // unit, 1) * GRAIN


@triton.jit
def _depth(parents_idx, token):
    """Tokens on the way to `token` of a tree, itself included; 0 where it is negative."""
    depth = (token >= 0).to(tl.int32)
    up = tl.load(parents_idx + token, mask=token >= 0, other=-1).to(tl.int64)
    for _ in range(token.to(tl.int32)):
        depth += (up >= 0).to(tl.int32)
        up = tl.load(parents_idx + up, mask=up >= 0, other=-1).to(tl.int64)
    return depth


@triton.jit(do_not_specialize=["S", "T", "splits"])
def _attend_paths(
    q_ptr, k_ptr, v_ptr, acc_ptr, stats_ptr, sights_ptr, pages_idx, cu_idx, lengths_idx,
    parents_idx, k_scale_ptr, S, T, splits, scale, q_stride, q_head, pages_stride, page_stride,
    row_stride, head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, GRAIN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One split of one token and KV head; the keys that each token sees go to sights [T]."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0).to(tl.int64)
    h = pid % HEADS
    t = pid // HEADS % T
    j = (pid // HEADS // T).to(tl.int32)
    s = owner(cu_idx, S, t, 1, 0)
    start = tl.load(cu_idx + s).to(tl.int64)
    last = tl.load(cu_idx + s + 1).to(tl.int64)
    length = tl.load(lengths_idx + s).to(tl.int64)
    context = (length - last + start).to(tl.int32)
    leaf = tl.where((t < last) & (length > 0), t - start, -1)  # -1: a pad
    parents_idx += start
    sight = tl.where(leaf >= 0, context + _depth(parents_idx, leaf), 0)
    if (h == 0) & (j == 0):
        tl.store(sights_ptr + t, sight)

    row, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    on = (row < GROUP) & (leaf >= 0)
    head = h * GROUP + row
    at = q_ptr + t * q_stride + (head * q_head)[:, None] + d[None, :]
    q = tl.load(at, mask=on[:, None] & (d < D)[None, :], other=0.0)
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr)
    k_ptr += h * head_stride
    v_ptr += h * head_stride
    pages_idx += s.to(tl.int64) * pages_stride
    size = split_size(sight, SPLITS, GRAIN)
    begin = tl.minimum(j * size, sight)  # behind the last key: empty, looks up no page
    end = tl.minimum(begin + size, sight)
    mine = on & (begin < sight)
    position = tl.where(mine, sight - 1, -1)
    full = tl.maximum(tl.minimum(end, context) // BLOCK_N * BLOCK_N, begin)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, peak, total = attend_keys(
        acc, peak, total, q, k_ptr, v_ptr, pages_idx, begin, full, scale, page_stride, row_stride,
        position, context, None, 0, D, PAGE, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    acc, peak, total = attend_keys(
        acc, peak, total, q, k_ptr, v_ptr, pages_idx, full, end, scale, page_stride, row_stride,
        position, context, None, 0, D, PAGE, BLOCK_N, BLOCK_D, True, parents_idx, leaf,
        sight,
    )  # fmt: skip
    part = (t * (HEADS * GROUP) + head) * splits + j
    tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=mine[:, None] & (d < D)[None, :])
    tl.store(stats_ptr + part * 2, peak, mask=mine)
    tl.store(stats_ptr + part * 2 + 1, total, mask=mine)


def split_paths(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    acc: torch.Tensor,
    stats: torch.Tensor,
    pages: torch.Tensor,
    cu: torch.Tensor,
    lengths: torch.Tensor,
    parents: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    scale: float,
    grain: int,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the scratch acc [T, Hq, splits, Dh] and stats [T, Hq, splits, 2] of all tokens.

    Returns (cu, lengths) of the T sequences that the tokens then stand for."""
    (T, heads, splits, width), S = acc.shape, lengths.shape[0]
    _, page, kv_heads, _ = k_cache.shape
    sights = torch.empty((T,), dtype=torch.int32, device=q.device)
    strides = (q.stride(0), q.stride(1), pages.stride(0), *k_cache.stride()[:3])
    blocks = {k: tile[k] for k in ("BLOCK_M", "BLOCK_N", "SPLITS", "num_warps", "num_stages")}
    launch(
        _attend_paths, (splits * T * kv_heads,), q, k_cache, v_cache, acc, stats, sights, pages, cu,
        lengths, parents, k_scale, S, T, splits, scale * LOG2_E, *strides, HEADS=kv_heads,
        GROUP=heads // kv_heads, D=width, PAGE=page, GRAIN=grain,
        BLOCK_D=max(16, next_pow2(width)), **blocks, **as_dependent(q),
    )  # fmt: skip
    return torch.arange(T + 1, dtype=torch.int32, device=q.device), sights
