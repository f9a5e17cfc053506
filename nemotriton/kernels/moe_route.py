"""The router of a mixture of experts, and the sort of (token, expert) pairs by expert.

    score  = sigmoid(logits)                                                         [T, E]
    choice = score + bias                      the bias chooses, it never weighs
    group limit (DeepSeek-V3, arXiv 2412.19437): the experts lie in `router_groups` equal groups; a
             group is worth the sum of its two best choices (a group of one: its only one) and the
             experts of the `top_groups` best groups stay
    ids    = the K largest choices, in ascending order of expert                     [T, K]
    weight = score[ids], then / (sum + 1e-20) if `normalize`, then * scale           [T, K]

Ties, of experts and of groups, go to the lowest index. Choices are compared in fp32, where the
score is the float32 nearest to the true sigmoid (computed in float64 and rounded once): the twin
and the kernel then choose the same experts, which two float32 sigmoids an ulp apart would not.
The twin on float64 inputs (the oracle) chooses from the float32 score too, and weighs in float64.
A NaN choice sorts below every number, so the ids of such a row are valid and its weights NaN.

T tokens, E experts, K experts a token; logits and bias fp32, ids int32, weights fp32.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import dependent
from nemotriton.kernels.fixed_order import UNORDERED, per_row
from nemotriton.kernels.moe_choice import expert_columns, load_bias, route_tokens
from nemotriton.kernels.moe_route_rows import _route_rows, route_rows, row_tile, suits_rows
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
from nemotriton.kernels.order import top_indices

# tokens x experts that one program holds in registers: up to here routing and sort are one launch
ONE_PROGRAM = 8192
# up to so many programs their counts are added in blocks of (programs, experts), by warps
SCANS = ((512, 256, 8, 4), (2**31, 1024, 4, 8))


class Routing(NamedTuple):
    """Where each token goes, and the pairs of each expert.

    ids [T, K] int32, ascending, and their weights [T, K] fp32; order [T*K] int32 holds the flat
    pairs t*K + j sorted by expert, in token order within one; expert e owns
    order[offsets[e]:offsets[e+1]], offsets [E+1] int32. Both are empty
    where nobody asked for them.

    block_experts [T*K] and block_pairs [T*K, rows] int32, of a few tokens whose router made them,
    are the blocks of one expert's pairs: block p has the expert of pair p, or -1 where that has an
    earlier pair and so a block already; its row m is token m's pair with the expert, or -1."""

    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor
    block_experts: torch.Tensor | None = None
    block_pairs: torch.Tensor | None = None


class OwnRouting(Routing):
    """A routing over some of the experts: pairs of others have the id -1 and stand before the
    first offset or behind the last; their part of a token's sum is zero."""

    __slots__ = ()

    @classmethod
    def of(cls, whole: Routing, first: int, end: int) -> "OwnRouting":
        """What of `whole` concerns the experts first .. end - 1, numbered from 0."""
        ids = torch.where((whole.ids >= first) & (whole.ids < end), whole.ids - first, -1)
        return cls(ids, whole.weights, whole.order, whole.offsets[first : end + 1])


def pair_rows(routing: Routing, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Scratch for the experts' results, a row a pair; zeros where no expert may write a row."""
    ids = routing.ids
    make = torch.zeros if isinstance(routing, OwnRouting) else torch.empty
    return make((ids.numel(), *shape), dtype=dtype, device=ids.device)


# ---------------------------------------------------------------------------------- route_experts
def route_experts_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    sort: bool = True,
) -> Routing:
    """Twin of `route_experts`; differentiable from logits to weights."""
    E = _check(logits, bias, top_k, router_groups, top_groups)
    if logits.ndim == 3:
        logits = functools.reduce(torch.add, logits)
    score = per_row(torch.sigmoid, logits.double())
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
    ids = ids.sort(-1).values
    weights = score.to(acc_dtype(logits)).gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    nothing = torch.zeros(0, dtype=torch.int32, device=ids.device)
    routing = Routing(ids.int(), weights * scale, nothing, nothing)
    return sort_pairs_ref(routing, E) if sort else routing


def sort_pairs_ref(routing: Routing, E: int) -> Routing:
    """The routing with its pairs sorted."""
    pairs, order = routing.ids.flatten().sort(stable=True)
    offsets = torch.searchsorted(pairs, torch.arange(E + 1, device=pairs.device, dtype=pairs.dtype))
    return routing._replace(order=order.int(), offsets=offsets.int())


def _check(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, groups: int, top_groups: int
) -> int:
    require(
        logits.ndim == 2 or (logits.ndim == 3 and logits.shape[0] > 0),
        f"logits must be [tokens, experts], or parts of them, got {tuple(logits.shape)}",
    )
    E = logits.shape[-1]
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


@triton.jit(do_not_specialize=["T", "part_stride"])
def _route(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, order_ptr, offsets_ptr, ranks_ptr, counts_ptr,
    logits_stride, part_stride, T, scale,
    PARTS: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr, NORMALIZE: tl.constexpr, SORT: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Route BLOCKS blocks of tokens; SORT: then sort the pairs (one program); COUNT: or count them
    by expert."""
    program = tl.program_id(0).to(tl.int64)
    e, real = expert_columns(GROUPS, SIZE, BLOCK_G, BLOCK_S)
    bias = load_bias(bias_ptr, e, real)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # few programs take little room from the next ones
    seen = tl.zeros([BLOCK_G * BLOCK_S], tl.int32)  # pairs of each expert in this program so far
    for block in range(BLOCKS):
        t = (program * BLOCKS + block) * BLOCK_T + tl.arange(0, BLOCK_T)
        slot, weight = route_tokens(
            logits_ptr, bias, t, T, e, real, logits_stride, part_stride, scale,
            PARTS, K, GROUPS, TOP_GROUPS, NORMALIZE, BLOCK_T, BLOCK_G, BLOCK_S,
        )  # fmt: skip
        chosen = slot >= 0
        place = (t * K)[:, None] + slot
        tl.store(ids_ptr + place, tl.broadcast_to(e[None, :], slot.shape), mask=chosen)
        tl.store(weights_ptr + place, weight, mask=chosen)
        if SORT or COUNT:
            one = chosen.to(tl.int32)
            rank = tl.cumsum(one, 0) - one + seen[None, :]
            seen += tl.sum(one, 0)
        if SORT:
            end = tl.cumsum(seen, 0)
            tl.store(offsets_ptr, 0)
            tl.store(offsets_ptr + 1 + e, end, mask=real)
            pair = order_ptr + (end - seen)[None, :].to(tl.int64) + rank
            tl.store(pair, place.to(tl.int32), mask=chosen)
        if COUNT:
            tl.store(ranks_ptr + place, rank, mask=chosen)
    if COUNT:
        tl.store(counts_ptr + program * (GROUPS * SIZE) + e, seen, mask=real)


@triton.jit(do_not_specialize=["programs"])
def _scan_counts(
    counts_ptr, totals_ptr, programs, E,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts [programs, E] become exclusive sums down the programs; totals [E] their ends."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    e = tl.program_id(0).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    b = tl.arange(0, BLOCK_B).to(tl.int64)
    total = tl.zeros([BLOCK_E], tl.int32)
    for b0 in range(0, programs, BLOCK_B):
        inside = (b0 + b < programs)[:, None] & (e < E)[None, :]
        at = counts_ptr + (b0 + b)[:, None] * E + e[None, :]
        count = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(totals_ptr + e, total, mask=e < E)


@triton.jit(do_not_specialize=["pairs"])
def _place_pairs(
    ids_idx, ranks_idx, counts_ptr, totals_ptr, order_ptr, offsets_ptr, pairs,
    E: tl.constexpr, OWN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Store the OWN pairs of a `_route` program behind those of the experts and programs before."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    total = tl.load(totals_ptr + e, mask=e < E, other=0)
    end = tl.cumsum(total, 0)
    if program == 0:
        tl.store(offsets_ptr, 0)
        tl.store(offsets_ptr + 1 + e, end, mask=e < E)
    starts = counts_ptr + program * E
    before = tl.load(starts + e, mask=e < E, other=0)
    tl.store(starts + e, end - total + before, mask=e < E)
    tl.debug_barrier()  # they are read again by other threads
    for p0 in range(0, OWN, BLOCK_P):
        i = p0 + tl.arange(0, BLOCK_P)
        pair = program * OWN + i
        inside = (i < OWN) & (pair < pairs)
        expert = tl.load(ids_idx + pair, mask=inside, other=0).to(tl.int64)
        rank = tl.load(ranks_idx + pair, mask=inside, other=0).to(tl.int64)
        first = tl.load(starts + expert, mask=inside, other=0)
        tl.store(order_ptr + first + rank, pair.to(tl.int32), mask=inside)


@op(ref=route_experts_ref)
def route_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    sort: bool = True,
) -> Routing:
    """Choose and weigh K experts a token, and sort the pairs by expert.

    logits [T, E] fp32, or [parts, T, E] to be added in that order; bias [E] fp32 or None; see the
    module's docstring and `Routing`. One launch while one block holds all tokens, or where `sort`
    is not wanted (then `order` and `offsets` are empty), else three."""
    (T, E), K = logits.shape[-2:], top_k
    _check(logits, bias, top_k, router_groups, top_groups)
    require(logits.dtype == torch.float32, f"router logits must be float32, got {logits.dtype}")
    require(logits.stride(-1) == 1, "logits must have unit stride along the experts")
    require(E < 2**15, f"{E} experts are more than a row's counters hold")

    def new(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    pairs, bounds = (T * K, E + 1) if sort else (0, 0)
    out = Routing(new((T, K)), new((T, K), torch.float32), new((pairs,)), new((bounds,)))
    case = Case(E=E, K=K, G=router_groups, TG=top_groups)
    tile = ROUTE_EXPERTS.tile(T, logits, **case) if sort else _default(case, 1)
    if "ROWS" in tile and not suits_rows(logits, case):
        tile = _blocks_default(case, T)
    own = int(tile["BLOCK_T"]) * int(tile["BLOCKS"])
    programs = max(cdiv(T, own), int(sort))  # with no tokens one program still writes the offsets
    alone = sort and programs == 1 and tile["BLOCKS"] == 1 and "ROWS" not in tile
    count = sort and not alone
    counts, totals, ranks = new((programs if count else 0, E)), new((E,)), new((T * count, K))
    pdl = dependent(logits)
    late = {"PDL": pdl, "launch_pdl": pdl}
    parts, part_stride = (logits.shape[0], logits.stride(0)) if logits.ndim == 3 else (1, 0)
    if "ROWS" in tile:
        to = (out.ids, out.weights, ranks, counts)
        route_rows(logits, bias, to, case, normalize, scale, tile, pdl)
    else:
        launch(
            _route, (programs,), logits, bias, out.ids, out.weights, out.order, out.offsets, ranks,
            counts, logits.stride(-2), part_stride, T, scale, PARTS=parts, K=K,
            NORMALIZE=normalize, SORT=alone, COUNT=count, **group_sizes(case), **tile, **late,
        )  # fmt: skip
    if count:
        block_b, block_e, warps = next(scan for most, *scan in SCANS if programs <= most)
        launch(
            _scan_counts, (cdiv(E, block_e),), counts, totals, programs, E,
            BLOCK_B=block_b, BLOCK_E=block_e, num_warps=warps, **late,
        )  # fmt: skip
        launch(
            _place_pairs, (programs,), out.ids, ranks, counts, totals, out.order, out.offsets,
            T * K, E=E, OWN=own * K, BLOCK_P=min(1024, next_pow2(own * K)), BLOCK_E=next_pow2(E),
            num_warps=4, **late,
        )  # fmt: skip
    return out


def group_sizes(case: Case) -> dict[str, int]:
    """The kernels' constants that say how experts lie in columns, and how many groups stay."""
    size = case.E // case.G
    blocks = {"BLOCK_G": next_pow2(case.G), "BLOCK_S": next_pow2(size)}
    return {"GROUPS": case.G, "TOP_GROUPS": case.TG, "SIZE": size, **blocks}


def _columns(case: Case) -> int:
    return next_pow2(case.G) * next_pow2(case.E // case.G)


def _tiles(case: Case) -> list[Tile]:
    """A program routes BLOCKS blocks of BLOCK_T tokens; one that holds all tokens also sorts."""
    blocks = [
        Tile(BLOCK_T=b, BLOCKS=blocks, num_warps=w, num_stages=1)
        for b in (1, 2, 4, 8, 16)
        for w in (1, 2, 4, 8, 16)
        for blocks in ((1, 8) if b <= 2 else (1, 4))
        if 128 <= b * _columns(case) // w <= 512 and b * _columns(case) <= ONE_PROGRAM
    ]
    return [*blocks, *map(row_tile, (1, 2, 4, 8, 16, 32))]


def _suits(tile: Tile, tokens: int) -> bool:
    """Whether the sweep measures a tile at this many tokens."""
    if "ROWS" in tile:
        return tokens >= 64 * int(tile["BLOCKS"])
    return tile["BLOCK_T"] <= tokens and (tokens >= 2048 or tile["BLOCKS"] == 1)


def _default(case: Case, tokens: int) -> Tile:
    """From 512 tokens on a warp a token."""
    if tokens > 512 and case.TG == case.G:
        return row_tile(2 if tokens <= 2048 else 4 if tokens <= 8192 else 16)
    return _blocks_default(case, tokens)


def _blocks_default(case: Case, tokens: int) -> Tile:
    """Eight keys a lane, for more would spill; a few tokens in one program, many in many."""
    few = next_pow2(tokens) * _columns(case) <= ONE_PROGRAM // 2
    block = next_pow2(tokens) if few else 1
    block = 2 if 512 < tokens <= 2048 else block
    blocks = 1 if tokens <= 2048 else 8
    lane = 128 if block == 1 and tokens <= 16 else 256  # keys of a warp
    warps = min(16, max(1, block * _columns(case) // lane))
    return Tile(BLOCK_T=block, BLOCKS=blocks, num_warps=warps, num_stages=1)


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
    fixed=UNORDERED,  # K scores add up without rounding in fp64, within 2^24 of each other
    kernels=(_route, _route_rows, _scan_counts, _place_pairs),
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
    suits=_suits,
    default=_default,
    cost=_cost,
    dtypes=("fp32",),
    per_token=("logits",),
    strided=("logits",),
)
