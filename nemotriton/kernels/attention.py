"""Grouped-query attention, causal, without positions: prefill and decode over the paged KV cache.

    out[i, h] = sum_n p[n] v[n, h // R] * v_scale,   R = Hq / Hkv  query heads share a KV head
    p = softmax over the visible n of  scale * k_scale * <q[i, h], k[n, h // R]>

Sequence s has n_s = cu[s+1] - cu[s] new tokens in rows cu[s]..cu[s+1] of q [T, Hq, Dh]; their K and
V are already in the caches [pages, page size, Hkv, Dh]. `lengths[s]` counts its keys, new ones
included, and key n lies in page pages[s, n // page size]. Query i sits at position lengths[s] - n_s
+ i and sees the keys up to itself; with `parents` a draft token sees the context, its ancestors
among the new tokens and itself (Miao et al. 2023, tree attention). Length 0 marks a pad sequence:
its rows, and those after cu[S], are zeros. Scores and sums are fp32; q and the caches share a
dtype, or the caches are fp8 e4m3 with fp32 scales of one element (None = 1). No window, sinks or
softcap.
"""

import torch
from einops import rearrange

from nemotriton.kernels.op import acc_dtype


# ------------------------------------------------------------------------------------- attention
def attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Causal attention over dense q [B, T, Hq, Dh] and k, v [B, T, Hkv, Dh], differentiable.

    Returns [B, T, Hq, Dh] in q's dtype; scale None = 1 / sqrt(Dh). Holds all T x T scores."""
    T = q.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    return masked_attention_ref(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)


def masked_attention_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """The core: q [..., T, Hq, Dh] over k, v [..., N, Hkv, Dh] where `visible` [T, N] is true."""
    f = acc_dtype(q)
    heads = rearrange(q.to(f), "... t (g r) d -> ... g r t d", g=k.shape[-2])
    keys = rearrange(k.to(f), "... n g d -> ... g 1 d n")
    values = rearrange(v.to(f), "... n g d -> ... g 1 n d")
    scores = (heads @ keys * scale).masked_fill(~visible, float("-inf"))
    out = scores.softmax(-1) @ values
    return rearrange(out, "... g r t d -> ... t (g r) d").to(q.dtype)


# --------------------------------------------------------------------------------- attend_prefill
def attend_prefill_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    cu: torch.Tensor,
    lengths: torch.Tensor,
    max_new: int,
    max_length: int,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `attend_prefill`."""
    return _attend_paged_ref(q, k_cache, v_cache, pages, cu, lengths, scale, k_scale, v_scale, None)


def _attend_paged_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    cu: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    f = acc_dtype(q)
    out = torch.zeros_like(q)
    bounds = cu.tolist()
    for s, length in enumerate(lengths.tolist()):
        start, end = bounds[s], bounds[s + 1]
        if length == 0 or start == end:
            continue
        used = pages[s, : -(-length // k_cache.shape[1])].long()
        k, v = (c[used].flatten(0, 1)[:length].to(f) for c in (k_cache, v_cache))
        k = k if k_scale is None else k * k_scale.to(f)
        v = v if v_scale is None else v * v_scale.to(f)
        visible = _visible_ref(end - start, length, parents, start).to(q.device)
        out[start:end] = masked_attention_ref(q[start:end], k, v, visible, scale)
    return out


def _visible_ref(new: int, length: int, parents: torch.Tensor | None, start: int) -> torch.Tensor:
    """bool [new, length]: which keys each of the last `new` tokens sees."""
    context = length - new
    visible = torch.ones(new, length, dtype=torch.bool).tril(context)
    if parents is not None:
        visible[:, context:] = torch.eye(new, dtype=torch.bool)
        for i, parent in enumerate(parents[start : start + new].tolist()):
            if parent >= 0:  # parents come before their children
                visible[i] |= visible[parent]
    return visible


# ---------------------------------------------------------------------------------- attend_decode
def attend_decode_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    cu: torch.Tensor,
    lengths: torch.Tensor,
    max_new: int,
    max_length: int,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `attend_decode`."""
    return _attend_paged_ref(
        q, k_cache, v_cache, pages, cu, lengths, scale, k_scale, v_scale, parents
    )
