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
import triton
import triton.language as tl
from einops import rearrange

from nemotriton.errors import require
from nemotriton.kernels.attention_hopper import _attend_roles
from nemotriton.kernels.attention_roles import (
    _plan_items,
    attend_by_roles,
    has_roles,
    suits_roles,
)
from nemotriton.kernels.fixed_order import FixedOrder, phase
from nemotriton.kernels.op import (
    Case,
    Cost,
    KernelSpec,
    Tile,
    acc_dtype,
    launch,
    next_pow2,
    on_hopper,
    op,
)
from nemotriton.kernels.paged import (
    LOG2_E,
    attend_keys,
    attention_axes,
    attention_case,
    attention_inputs,
    check_attention,
    fp32_tile,
    owner,
)
from nemotriton.kernels.shared_memory import LARGE, most_shared
from nemotriton.kernels.widen_keys import widen_keys


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
    return attend_paged_ref(q, k_cache, v_cache, pages, cu, lengths, scale, k_scale, v_scale, None)


def attend_paged_ref(
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
    alone: bool = False,
) -> torch.Tensor:
    """Sequence by sequence: gather its keys from the pages, attend; pads stay zero.

    alone: query by query, over the keys that it sees and no others."""
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
        if not alone:
            out[start:end] = masked_attention_ref(q[start:end], k, v, visible, scale)
            continue
        for i, seen in enumerate(visible.unbind()):
            one, every = q[start + i : start + i + 1].clone(), seen[seen][None]
            out[start + i] = masked_attention_ref(one, k[seen], v[seen], every, scale)[0]
    return out


def attend_alone_ref(
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
    """Twin of both ops in the invariant mode."""
    caches, where = (k_cache, v_cache), (pages, cu, lengths)
    return attend_paged_ref(q, *caches, *where, scale, k_scale, v_scale, parents, alone=True)


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


@triton.jit(do_not_specialize=["S", "T"])
def _attend_prefill(
    q_ptr, k_ptr, v_ptr, out_ptr, pages_idx, cu_idx, lengths_idx, k_scale_ptr, v_scale_ptr, S, T,
    scale, q_stride, q_head, out_stride, pages_stride, page_stride, row_stride, head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP  # tokens a block; its rows are (token, head) pairs
    # The last blocks of a sequence have the most keys: start them first.
    pid = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0).to(tl.int64)
    h = pid % HEADS
    block = pid // HEADS
    s = owner(cu_idx, S, block, BLOCK_Q, 1)
    start = tl.load(cu_idx + s).to(tl.int64)
    new = tl.load(cu_idx + s + 1).to(tl.int64) - start
    length = tl.load(lengths_idx + s).to(tl.int64)
    first = (block - start // BLOCK_Q - s) * BLOCK_Q  # this block's first token in its sequence
    context = (length - new).to(tl.int32)  # the keys of one sequence fit in 32 bits

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first + m // GROUP
    live = (token < new) & (length > 0)
    inside = (m // GROUP < BLOCK_Q)[:, None] & (d < D)[None, :]
    q_ptr += (start + first) * q_stride + h * GROUP * q_head
    at = (m // GROUP * q_stride + m % GROUP * q_head)[:, None] + d[None, :]
    q = tl.load(q_ptr + at, mask=inside & live[:, None], other=0.0)

    position = tl.where(live, context + token, -1).to(tl.int32)
    last = tl.minimum(first + BLOCK_Q, new) + context
    end = tl.where((first < new) & (length > 0), last, 0).to(tl.int32)
    common = tl.minimum(context + first + 1, end)  # keys that every row sees
    full = tl.maximum(common, 0).to(tl.int32) // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr)
    k_ptr += h * head_stride
    v_ptr += h * head_stride
    pages_idx += s.to(tl.int64) * pages_stride
    acc, peak, total = attend_keys(
        acc, peak, total, q, k_ptr, v_ptr, pages_idx, 0, full, scale, page_stride, row_stride,
        position, context, None, 0, D, PAGE, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    acc, peak, total = attend_keys(
        acc, peak, total, q, k_ptr, v_ptr, pages_idx, full, end, scale, page_stride, row_stride,
        position, context, None, 0, D, PAGE, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr)
    out = tl.where(live[:, None], acc / tl.where(total == 0.0, 1.0, total)[:, None], 0.0)
    # The last sequence's blocks go on to the end of q: rows that belong to no sequence get zeros.
    mine = tl.where(s == S - 1, T - start, new)
    out_ptr += (start + first) * out_stride + h * GROUP * D
    at = (m // GROUP * out_stride + m % GROUP * D)[:, None] + d[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=inside & (token < mine)[:, None])


@op(ref=attend_prefill_ref)
def attend_prefill(
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
    """Attention of the new tokens of packed prompts, flash style; returns [T, Hq, Dh] like q.

    Keys are summed in blocks of BLOCK_N counted from the sequence's first, so that how a prompt
    is cut into pieces, or what else is in the batch, changes no bit for a given tile. `scale` and
    k_scale are positive. fp8 contexts may be widened first (`_widens`): then no length may be
    larger than `max_length`. Where the tile asks for it and `has_roles` holds, the form for Hopper
    is taken, but not in the invariant mode; of fp8 caches, if they are widened, whatever the
    length, which many sequences in one batch are not. `max_new` is not needed here."""
    heads, group = check_attention(q, k_cache, v_cache, pages, cu, lengths, scale, k_scale, v_scale)
    T, _, width = q.shape
    S, page = lengths.shape[0], k_cache.shape[1]
    if S == 0:
        return torch.zeros_like(q)
    tile = ATTEND_PREFILL.tile(T, q, **attention_axes(q, k_cache))
    roles = tile.get("ROLES", False) and phase() is None and has_roles(q, k_cache, v_cache)
    if _widens(q, k_cache, S, max_length, bool(roles)):
        k_cache, v_cache, pages = widen_keys.triton(
            k_cache, v_cache, pages, lengths, max_length, q.dtype
        )
        tile = ATTEND_PREFILL.tile(T, q, **attention_axes(q, k_cache))
    if roles and k_cache.dtype == q.dtype:
        return attend_by_roles(q, k_cache, v_cache, pages, cu, lengths, scale, k_scale, v_scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    require(
        group <= int(tile["BLOCK_M"]),
        f"{group} query heads a KV head do not fit a block of {tile['BLOCK_M']} rows",
    )
    blocks = T // (int(tile["BLOCK_M"]) // group) + S
    tensors = (q, k_cache, v_cache, out, pages, cu, lengths, k_scale, v_scale)
    strides = (q.stride(0), q.stride(1), out.stride(0), pages.stride(0), *k_cache.stride()[:3])
    shape = {"HEADS": heads, "GROUP": group, "D": width, "PAGE": page}
    shape["BLOCK_D"] = max(16, next_pow2(width))
    launch(
        _attend_prefill,
        (blocks * heads,),
        *tensors,
        S,
        T,
        scale * LOG2_E,
        *strides,
        **shape,
        **tile.without("ROLES"),
    )
    return out


def _widens(
    q: torch.Tensor, k_cache: torch.Tensor, S: int, max_length: int, roles: bool = False
) -> bool:
    """Whether fp8 keys are converted once for all queries: where that pays, and where the memory
    for it is small (which `CachePlan` counts). Not in the invariant mode: other sequences count.
    For the form by roles always, or a prompt's short pieces would have other bits."""
    if k_cache.dtype != torch.float8_e4m3fn or q.dtype == torch.float32 or phase() is not None:
        return False
    few = S == 1 or S * max_length <= WIDE_KEYS
    return few and (roles or q.shape[0] * max_length >= WIDE_WORK)


WIDE_WORK = 1 << 20  # new tokens times keys: some ten microseconds of conversions saved
WIDE_KEYS = 1 << 18  # of all sequences; one alone may have more


def _prefill_plan(case: Case, T: int) -> list[tuple[int, int]]:
    """(new tokens, length) of a step: fresh prompts, later pieces, an empty piece and a pad."""
    if T < 4:
        return [(T, T + case.page + 3)]
    pieces = [T // 2, 0, T // 3]
    pad = min(2, T - sum(pieces) - 1)
    last = T - sum(pieces) - pad
    contexts = (0, 5, case.page + 1)
    return [*((n, n + c) for n, c in zip(pieces, contexts, strict=True)), (pad, 0), (last, last)]


def _prefill_cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    plan = _prefill_plan(case, T)
    pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in plan if length)
    stored = 1 if case.fp8 else dtype.itemsize
    keys = sum(length for _, length in plan) * 2 * case.Hkv * case.Dh * stored
    return Cost(4 * pairs * case.H * case.Dh, 2 * T * case.H * case.Dh * dtype.itemsize + keys)


def _prefill_default(case: Case, tokens: int) -> Tile:
    """One tile whatever the tokens: the bits of a prompt must not depend on how it is cut."""
    if "fp32" in case:
        return fp32_tile(case)
    rows = max(next_pow2(case.H // case.Hkv), 128 if case.Dh <= 128 else 64)
    # on sm_120 the conversion of 64 fp8 keys a step takes registers that there are not
    keys = 32 if case.fp8 and most_shared() < LARGE else 64
    tile = Tile(BLOCK_M=rows, BLOCK_N=keys, num_warps=8, num_stages=2)
    return tile.but(ROLES=True) if on_hopper() and suits_roles(case) else tile


ATTEND_PREFILL = KernelSpec(
    op=attend_prefill,
    kernels=(_attend_prefill, _plan_items, _attend_roles),
    cases=lambda config: [
        Case(**axes) for fp8 in (0, 1) if (axes := attention_case(config, fp8)) is not None
    ],
    small=[
        Case(H=8, Hkv=2, Dh=32, page=16, fp8=0),
        Case(H=3, Hkv=3, Dh=24, page=128, fp8=0),
        Case(H=32, Hkv=1, Dh=16, page=32, fp8=1),
        Case(H=32, Hkv=2, Dh=64, page=64, fp8=0),
        Case(H=5, Hkv=1, Dh=37, page=16, fp8=1),
    ],
    tokens=(16, 128, 1024, 4096, 16384),
    make=lambda case, T, dev, dtype, rng: attention_inputs(
        case, _prefill_plan(case, T), dev, dtype, rng
    ),
    tiles=lambda case: (
        [
            Tile(BLOCK_M=m, BLOCK_N=n, num_warps=w, num_stages=s)
            for m, w in ((64, 4), (128, 8))
            for n in (32, 64, 128)
            for s in (2, 3)
            if m >= case.H // case.Hkv
        ]
        + [Tile(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2, ROLES=True)]
        * (on_hopper() and suits_roles(case))
    ),
    default=_prefill_default,
    one_tile=True,
    fixed=FixedOrder(lambda tile: tile.but(num_stages=0), twin=attend_alone_ref),
    cost=_prefill_cost,
    small_tokens=(0, 1, 3, 17, 70),
    per_token=("q",),
    strided=("q",),
)
