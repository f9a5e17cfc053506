"""The router of a mixture of experts, and the sort of (token, expert) pairs by expert.

    score  = sigmoid(logits)                                                         [T, E]
    choice = score + bias                      the bias chooses, it never weighs
    group limit (DeepSeek-V3, arXiv 2412.19437): the experts lie in `router_groups` equal groups; a
             group is worth the sum of its two best choices (a group of one: its only one) and the
             experts of the `top_groups` best groups stay
    ids    = the K largest choices, best first                                       [T, K]
    weight = score[ids], then / (sum + 1e-20) if `normalize`, then * scale           [T, K]

Ties, of experts and of groups, go to the lowest index. Choices are compared in fp32, where the
score is the float32 nearest to the true sigmoid (computed in float64 and rounded once): the twin
and the kernel then choose the same experts, which two float32 sigmoids an ulp apart would not.
The twin on float64 inputs (the oracle) chooses from the float32 score too, and weighs in float64.
A NaN choice sorts below every number, so the ids of such a row are valid and its weights NaN.

T tokens, E experts, K experts a token; logits and bias fp32, ids int32, weights fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    acc_dtype,
    cdiv,
    launch,
    next_pow2,
    op,
)
from nemotriton.kernels.order import NOTHING, key_index, order_key, top_indices

# tokens x experts that one program holds in registers: up to here routing and sort are one launch
ONE_PROGRAM = 8192
SCAN_BLOCKS, SCAN_EXPERTS = 64, 32


class Routing(NamedTuple):
    """Where each token goes, and the pairs of each expert.

    ids [T, K] int32 and weights [T, K] fp32 by token, best expert first; order [T*K] int32 holds
    the flat pairs t*K + j sorted by expert, in token order within one; expert e owns
    order[offsets[e]:offsets[e+1]], offsets [E+1] int32."""

    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor


# ---------------------------------------------------------------------------------- route_experts
def route_experts_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Twin of `route_experts`; differentiable from logits to weights."""
    E = _check(logits, bias, top_k, router_groups, top_groups)
    score = torch.sigmoid(logits.double())
    choice = score.float().detach()
    if bias is not None:
        choice = choice + bias.float()
    if router_groups > 1:
        grouped = choice.unflatten(-1, (router_groups, -1))
        two = top_indices(grouped, min(2, grouped.shape[-1]))
        best = top_indices(grouped.gather(-1, two).sum(-1), top_groups).sort(-1).values
        # the experts of the kept groups, ascending, so that ties still go to the lowest index
        size = grouped.shape[-1]
        pool = (best[..., None] * size + torch.arange(size, device=best.device)).flatten(-2)
        ids = pool.gather(-1, top_indices(choice.gather(-1, pool), top_k))
    else:
        ids = top_indices(choice, top_k)
    weights = score.to(acc_dtype(logits)).gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    pairs, order = ids.flatten().sort(stable=True)
    experts = torch.arange(E + 1, device=ids.device)
    offsets = torch.searchsorted(pairs, experts)
    return Routing(ids.int(), weights * scale, order.int(), offsets.int())


def _check(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, groups: int, top_groups: int
) -> int:
    require(logits.ndim == 2, f"logits must be [tokens, experts], got {tuple(logits.shape)}")
    E = logits.shape[1]
    if bias is not None:
        require(bias.shape == (E,), f"a bias of shape {tuple(bias.shape)} for {E} experts")
    require(
        groups >= 1 and E % groups == 0, f"{E} experts cannot be split into {groups} equal groups"
    )
    require(1 <= top_groups <= groups, f"top_groups is {top_groups}, of {groups} router groups")
    reachable = E // groups * top_groups
    require(
        1 <= top_k <= reachable,
        f"top_k is {top_k}, but {top_groups} of {groups} groups hold {reachable} experts",
    )
    return E


@triton.jit
def _sigmoid(x):
    """The float32 nearest to sigmoid(x)."""
    x = x.to(tl.float64)
    e = tl.exp(-tl.abs(x))
    return (tl.where(x >= 0, 1.0, e) / (1.0 + e)).to(tl.float32)


@triton.jit
def _limit_groups(
    keys,
    choice,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """keys [BLOCK_T, BLOCK_G * BLOCK_S] with those outside the best groups set to NOTHING."""
    keys = tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_S])
    choice = tl.reshape(choice, [BLOCK_T, BLOCK_G, BLOCK_S])
    first = tl.max(keys, 2)
    won = keys == first[:, :, None]
    rest = tl.where(won, NOTHING, keys)
    second = tl.max(rest, 2)
    next_won = (rest == second[:, :, None]) & (rest != NOTHING)
    worth = tl.sum(tl.where(won, choice, 0.0), 2) + tl.sum(tl.where(next_won, choice, 0.0), 2)
    g = tl.arange(0, BLOCK_G)
    group_keys = tl.where((g < GROUPS)[None, :], order_key(worth, g[None, :]), NOTHING)
    kept = tl.zeros([BLOCK_T, BLOCK_G], tl.int32)
    for _ in range(TOP_GROUPS):
        hit = group_keys == tl.max(group_keys, 1)[:, None]
        kept = tl.where(hit, 1, kept)
        group_keys = tl.where(hit, NOTHING, group_keys)
    keys = tl.where((kept > 0)[:, :, None], keys, NOTHING)
    return tl.reshape(keys, [BLOCK_T, BLOCK_G * BLOCK_S])


@triton.jit
def _best(keys, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """ids [BLOCK_T, BLOCK_K] of the K largest keys of every row, and slot, as the keys: the j of
    a chosen expert, -1 of the others."""
    j = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    slot = tl.full(keys.shape, -1, tl.int32)
    for r in range(K):
        best = tl.max(keys, 1)
        won = keys == best[:, None]
        ids = tl.where(j[None, :] == r, key_index(best)[:, None], ids)
        slot = tl.where(won, r, slot)
        keys = tl.where(won, NOTHING, keys)
    return ids, slot


@triton.jit
def _place(order_ptr, slot, first, t, K: tl.constexpr):
    """Store the pairs of a block of tokens; slot [BLOCK_T, experts] is j, or -1 where not chosen,
    first [experts] where the block's pairs of each expert begin."""
    chosen = (slot >= 0).to(tl.int32)
    rank = tl.cumsum(chosen, 0) - chosen
    pairs = t[:, None] * K + slot
    tl.store(order_ptr + first[None, :].to(tl.int64) + rank, pairs.to(tl.int32), mask=slot >= 0)


@triton.jit(do_not_specialize=["T"])
def _route(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    order_ptr,
    offsets_ptr,
    counts_ptr,
    logits_stride,
    T,
    scale,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SORT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Route a block of tokens; then sort the pairs (one block), or count them by expert."""
    block = tl.program_id(0).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = t < T
    column = tl.arange(0, BLOCK_G * BLOCK_S)  # groups padded to BLOCK_S experts, BLOCK_G groups
    e = column // BLOCK_S * SIZE + column % BLOCK_S
    real = (column // BLOCK_S < GROUPS) & (column % BLOCK_S < SIZE)
    logits = logits_ptr + t * logits_stride
    inside = live[:, None] & real[None, :]
    choice = _sigmoid(tl.load(logits[:, None] + e[None, :], mask=inside, other=0.0))
    if HAS_BIAS:
        choice += tl.load(bias_ptr + e, mask=real, other=0.0).to(tl.float32)[None, :]
    keys = tl.where(real[None, :], order_key(choice, e[None, :]), NOTHING)
    if TOP_GROUPS < GROUPS:
        keys = _limit_groups(keys, choice, GROUPS, TOP_GROUPS, BLOCK_T, BLOCK_G, BLOCK_S)

    ids, slot = _best(keys, K, BLOCK_T, BLOCK_K)
    j = tl.arange(0, BLOCK_K)
    pairs = live[:, None] & (j < K)[None, :]
    weight = _sigmoid(tl.load(logits[:, None] + ids, mask=pairs, other=0.0))
    weight = tl.where(pairs, weight, 0.0)
    if NORMALIZE:
        weight = tl.div_rn(weight, (tl.sum(weight, 1) + 1e-20)[:, None])
    row = t[:, None] * K + j[None, :]
    tl.store(ids_ptr + row, ids, mask=pairs)
    tl.store(weights_ptr + row, weight * scale, mask=pairs)

    slot = tl.where(live[:, None], slot, -1)
    count = tl.sum((slot >= 0).to(tl.int32), 0)
    if SORT:
        end = tl.cumsum(count, 0)
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + e, end, mask=real)
        _place(order_ptr, slot, end - count, t, K)
    else:
        tl.store(counts_ptr + block * (GROUPS * SIZE) + e, count, mask=real)


@triton.jit(do_not_specialize=["blocks"])
def _scan_counts(counts_ptr, totals_ptr, blocks, E, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts [blocks, E] become exclusive sums down the blocks; totals [E] their ends."""
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    b = tl.arange(0, BLOCK_B).to(tl.int64)
    total = tl.zeros([BLOCK_E], tl.int32)
    for b0 in range(0, blocks, BLOCK_B):
        inside = (b0 + b < blocks)[:, None] & (e < E)[None, :]
        at = counts_ptr + (b0 + b)[:, None] * E + e[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(totals_ptr + e, total, mask=e < E)


@triton.jit(do_not_specialize=["T"])
def _place_blocks(
    ids_idx,
    counts_ptr,
    totals_ptr,
    order_ptr,
    offsets_ptr,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Store a block's pairs behind those of the experts and blocks before it."""
    block = tl.program_id(0).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    slot = tl.full([BLOCK_T, BLOCK_E], -1, tl.int32)
    for r in range(K):
        expert = tl.load(ids_idx + t * K + r, mask=t < T, other=-1).to(tl.int64)
        slot = tl.where(expert[:, None] == e[None, :], r, slot)
    total = tl.load(totals_ptr + e, mask=e < E, other=0)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + e, end, mask=e < E)
    before = tl.load(counts_ptr + block * E + e, mask=e < E, other=0)
    _place(order_ptr, slot, end - total + before, t, K)


@op(ref=route_experts_ref)
def route_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose and weigh K experts a token, and sort the pairs by expert.

    logits [T, E] fp32, bias [E] fp32 or None; see the module's docstring and `Routing`. One launch
    while one block holds all tokens, else three."""
    T, E, K = logits.shape[0], _check(logits, bias, top_k, router_groups, top_groups), top_k
    require(logits.dtype == torch.float32, f"router logits must be float32, got {logits.dtype}")
    require(logits.stride(1) == 1, "logits must have unit stride along the experts")

    def new(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    out = Routing(new((T, K)), new((T, K), torch.float32), new((T * K,)), new((E + 1,)))
    size = E // router_groups
    tile = ROUTE_EXPERTS.tile(T, logits, E=E, K=K, G=router_groups, TG=top_groups)
    block_t, warps = int(tile["BLOCK_T"]), int(tile["num_warps"])
    tile = tile.but(SORT=tile["SORT"] and block_t >= T)
    blocks = max(1, cdiv(T, block_t))  # with no tokens one block still writes the offsets
    counts, totals = new((0 if tile["SORT"] else blocks, E)), new((E,))
    launch(
        _route, (blocks,), logits, bias, *out, counts, logits.stride(0), T, scale,
        K=K, GROUPS=router_groups, TOP_GROUPS=top_groups, SIZE=size, NORMALIZE=normalize,
        HAS_BIAS=bias is not None, BLOCK_K=next_pow2(K),
        BLOCK_G=next_pow2(router_groups), BLOCK_S=next_pow2(size), **tile,
    )  # fmt: skip
    if not tile["SORT"]:
        launch(
            _scan_counts, (cdiv(E, SCAN_EXPERTS),), counts, totals, blocks, E,
            BLOCK_B=SCAN_BLOCKS, BLOCK_E=SCAN_EXPERTS, num_warps=4,
        )  # fmt: skip
        launch(
            _place_blocks, (blocks,), out.ids, counts, totals, out.order, out.offsets, T,
            E=E, K=K, BLOCK_T=block_t, BLOCK_E=next_pow2(E), num_warps=warps,
        )  # fmt: skip
    return out


def _columns(case: Case) -> int:
    return next_pow2(case.G) * next_pow2(case.E // case.G)


def _tiles(case: Case) -> list[Tile]:
    """SORT: the one program that holds all tokens also sorts; else blocks, a scan, and placing."""
    return [
        Tile(BLOCK_T=b, SORT=sort, num_warps=w, num_stages=1)
        for b in (1, 2, 4, 8, 16, 32, 64)
        for w in (1, 2, 4, 8, 16)
        for sort in (True, False)
        if 128 <= b * _columns(case) // w <= 1024 and b * _columns(case) <= ONE_PROGRAM
    ]


def _default(case: Case, tokens: int) -> Tile:
    """Sixteen keys a lane: rows stay inside a warp, so that the K maxima need no barrier."""
    most = max(1, ONE_PROGRAM // _columns(case))
    sort = next_pow2(tokens) <= most
    block = next_pow2(tokens) if sort else min(8, most)
    warps = max(1, block * _columns(case) // 512)
    return Tile(BLOCK_T=block, SORT=sort, num_warps=warps, num_stages=1)


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    """Logits on the bf16 grid, as a bf16 product gives them, so that exact ties occur; biases near
    57, as trained ones are, that differ by less than a bf16 step."""
    logits = torch.randn(T, case.E, device=dev, generator=rng) * 1.5
    bias = 57 + torch.randn(case.E, device=dev, generator=rng) * 0.05
    return {
        "logits": logits.bfloat16().float(),
        "bias": bias if case.K % 2 == 0 else None,
        "top_k": case.K,
        "router_groups": case.G,
        "top_groups": case.TG,
        "normalize": case.E % 5 != 0,
        "scale": 2.5,
    }


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    return Cost(T * case.E * case.K, 4 * T * case.E + 12 * T * case.K + 4 * case.E)


ROUTE_EXPERTS = KernelSpec(
    op=route_experts,
    kernels=(_route, _scan_counts, _place_blocks),
    cases=lambda config: [
        Case(E=m.experts, K=m.top_k, G=m.router_groups, TG=m.top_groups)
        for m in dict.fromkeys((*config.moes, config.mtp_moe))
        if m is not None
    ],
    small=[
        Case(E=32, K=6, G=1, TG=1),
        Case(E=5, K=1, G=1, TG=1),
        Case(E=29, K=22, G=1, TG=1),
        Case(E=40, K=4, G=8, TG=3),
        Case(E=6, K=2, G=6, TG=2),
        Case(E=96, K=6, G=3, TG=2),
    ],
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192, 65536),
    make=_make,
    tiles=_tiles,
    default=_default,
    cost=_cost,
    dtypes=("fp32",),
    per_token=("logits",),
    strided=("logits",),
)
