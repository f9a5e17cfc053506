"""Paged attention of the last 1..n tokens of each sequence: decode, and verification of drafts.

The formula, shapes and dtypes are those of `attention`. The keys are cut into splits, each summed
by a program of its own (flash decoding, Dao et al. 2023); a second kernel merges the splits of a
query by their log-sum-exp, in order. How the keys of a token are cut depends on its position alone:
a token that sees n keys has splits of

    GRAIN * max(1, round(n / (SPLITS * GRAIN))) keys,

so there are about SPLITS of them, at most 3/2 SPLITS, and each is large enough to keep a
multiprocessor's loads in flight. Neither the batch, nor the drafts behind a token, nor `max_length`
changes the order in which its keys are summed; with the same tile and `max_new` the bits are the
same too. The few steps whose tokens straddle a change of the size walk the keys once for each of
the two sizes. Scratch: T * Hq * splits * (Dh + 2) floats. Both are dependent launches: the merging
programs wait beside the splits instead of starting behind them.
"""

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.attention import attend_alone_ref, attend_paged_ref
from nemotriton.kernels.attention_paths import _attend_paths, split_paths, split_size
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import FixedOrder, phase
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    cdiv,
    launch,
    next_pow2,
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

GRAIN = 128  # keys: a split is a multiple of it, and so of every BLOCK_N
FINEST = 128  # the largest SPLITS of a tile
ROOM = 224  # registers: left to itself, ptxas spills some to fit one more block beside two
MERGE_D = 32  # columns of one head that a merging program takes: at batch 1 it fills the card


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
    return attend_paged_ref(
        q, k_cache, v_cache, pages, cu, lengths, scale, k_scale, v_scale, parents
    )


def most_splits(keys: int, target: int = FINEST) -> int:
    """The largest number of splits of any token that sees up to so many keys."""
    return min(cdiv(max(keys, 0), GRAIN), target * 3 // 2)


@triton.jit(do_not_specialize=["S", "blocks", "splits"])
def _attend_split(
    q_ptr, k_ptr, v_ptr, acc_ptr, stats_ptr, pages_idx, cu_idx, lengths_idx, parents_idx,
    k_scale_ptr, S, blocks, splits, scale, q_stride, q_head, pages_stride, page_stride, row_stride,
    head_stride, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    SPLITS: tl.constexpr, GRAIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # the merging programs may come as soon as all of these have started
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0).to(tl.int64)
    h = pid % HEADS
    block = pid // HEADS % blocks
    s = pid // HEADS // blocks % S
    j = (pid // HEADS // blocks // S).to(tl.int32)
    start = tl.load(cu_idx + s).to(tl.int64)
    new = tl.load(cu_idx + s + 1).to(tl.int64) - start
    length = tl.load(lengths_idx + s).to(tl.int64)
    context = (length - new).to(tl.int32)  # the keys of one sequence fit in 32 bits
    d = tl.arange(0, BLOCK_D)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)  # (token, head) pairs of this KV head
    token = row // GROUP
    live = (token < new) & (length > 0)
    inside = live[:, None] & (d < D)[None, :]
    at = (start + token) * q_stride + (h * GROUP + row % GROUP) * q_head
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=inside, other=0.0)
    sight = tl.where(live, context + token + 1, 0).to(tl.int32)  # keys that each row may see
    part = ((start + token) * (HEADS * GROUP) + h * GROUP + row % GROUP) * splits + j

    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr)
    if parents_idx is not None:
        parents_idx += start
    k_ptr += h * head_stride
    v_ptr += h * head_stride
    pages_idx += s * pages_stride
    small = split_size(context + 1, SPLITS, GRAIN)  # the first token's, then the last one's
    large = split_size(length.to(tl.int32), SPLITS, GRAIN)
    for turn in tl.range(0, tl.where(small == large, 1, 2), disable_licm=True):
        size = tl.where(turn == 0, small, large)
        begin = tl.minimum(j * size, length).to(tl.int32)  # behind the last key: looks no page up
        end = tl.minimum(begin + size, length).to(tl.int32)
        mine = (split_size(sight, SPLITS, GRAIN) == size) & (begin < sight)
        position = tl.where(mine, sight - 1, -1)
        full = tl.maximum(tl.minimum(end, context) // BLOCK_N * BLOCK_N, begin)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc, peak, total = attend_keys(
            acc, peak, total, q, k_ptr, v_ptr, pages_idx, begin, full, scale, page_stride,
            row_stride, position, context, parents_idx, new, D, PAGE, BLOCK_N, BLOCK_D, False,
        )  # fmt: skip
        acc, peak, total = attend_keys(
            acc, peak, total, q, k_ptr, v_ptr, pages_idx, full, end, scale, page_stride,
            row_stride, position, context, parents_idx, new, D, PAGE, BLOCK_N, BLOCK_D, True,
        )  # fmt: skip
        stored = mine[:, None] & (d < D)[None, :]
        tl.store(acc_ptr + part[:, None] * D + d[None, :], acc, mask=stored)
        tl.store(stats_ptr + part * 2, peak, mask=mine)
        tl.store(stats_ptr + part * 2 + 1, total, mask=mine)


@triton.jit(do_not_specialize=["S", "splits"])
def _merge_splits(
    acc_ptr, stats_ptr, out_ptr, cu_idx, lengths_idx, v_scale_ptr, S, splits, HEADS: tl.constexpr,
    D: tl.constexpr, SPLITS: tl.constexpr, GRAIN: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0).to(tl.int64)  # (token * HEADS + head) * CHUNKS + BLOCK_D columns of it
    row = pid // CHUNKS
    token = row // HEADS
    s = owner(cu_idx, S, token, 1, 0)
    end = tl.load(cu_idx + s + 1).to(tl.int64)
    length = tl.load(lengths_idx + s).to(tl.int64)
    # rows after cu[S] get zeros, like pads
    sight = tl.where((token < end) & (length > 0), length - end + token + 1, 0).to(tl.int32)
    size = split_size(sight, SPLITS, GRAIN)
    d = pid % CHUNKS * BLOCK_D + tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_J)
    live = j * size < sight  # splits behind the last key were never written
    part = row * splits + j
    inside = live[:, None] & (d < D)[None, :]
    if PDL:  # nothing so far was read from what the splits write
        tl.extra.cuda.gdc_wait()
    parts = tl.load(acc_ptr + part[:, None] * D + d[None, :], mask=inside, other=0.0)
    peaks = tl.load(stats_ptr + part * 2, mask=live, other=float("-inf"))
    totals = tl.load(stats_ptr + part * 2 + 1, mask=live, other=0.0)
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak))
    acc = tl.sum(weights[:, None] * parts, 0)
    total = tl.sum(weights * totals, 0)
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr)
    out = (acc / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + d, out, mask=d < D)


@op(ref=attend_decode_ref)
def attend_decode(
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
    """Attention of the last few tokens of each sequence, split over keys; returns [T, Hq, Dh].

    `max_new` and `max_length` bound the new tokens and the keys of one sequence: larger bounds cost
    empty programs and scratch, smaller ones leave tokens or keys out. `parents` int32 [T] (-1 =
    root) makes the new tokens a tree. `scale` and k_scale are positive."""
    heads, group = check_attention(q, k_cache, v_cache, pages, cu, lengths, scale, k_scale, v_scale)
    T, q_heads, width = q.shape
    S = lengths.shape[0]
    if S == 0:
        return torch.zeros_like(q)
    axes = attention_axes(q, k_cache) | {
        "new": next_pow2(max_new),
        "tree": int(parents is not None),
    }
    tile = ATTEND_DECODE.tile(T, q, **axes)
    target, rows = int(tile["SPLITS"]), max(_fewest_rows(tile), next_pow2(max_new * group))
    _check_new(T, max_new, target * GRAIN, parents)
    splits, rows = most_splits(max_length, target), min(int(tile["BLOCK_M"]), rows)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    acc = torch.empty((T, q_heads, splits, width), dtype=torch.float32, device=q.device)
    stats = torch.empty((T, q_heads, splits, 2), dtype=torch.float32, device=q.device)
    blocks = cdiv(max_new * group, rows)
    tensors = (q, k_cache, v_cache, acc, stats, pages, cu, lengths, parents, k_scale)
    strides = (q.stride(0), q.stride(1), pages.stride(0), *k_cache.stride()[:3])
    late = as_dependent(q)
    if parents is not None and phase() is not None:
        S, (cu, lengths) = T, split_paths(*tensors, scale, GRAIN, tile)
        late = {"PDL": False, "launch_pdl": False}  # merging begins with what was just written
    else:
        launch(
            _attend_split, (splits * S * blocks * heads,), *tensors, S, blocks, splits,
            scale * LOG2_E, *strides, HEADS=heads, GROUP=group, PAGE=k_cache.shape[1], D=width,
            BLOCK_D=max(16, next_pow2(width)), GRAIN=GRAIN, **tile.but(BLOCK_M=rows),
            **late,
        )  # fmt: skip
    merged = (acc, stats, out, cu, lengths, v_scale)
    columns = min(MERGE_D, next_pow2(width))
    launch(
        _merge_splits, (T * q_heads * cdiv(width, columns),), *merged, S, splits, HEADS=q_heads,
        D=width, SPLITS=target, GRAIN=GRAIN, BLOCK_J=next_pow2(target * 3 // 2), BLOCK_D=columns,
        num_warps=4 if target <= 64 else 8, **late,
    )  # fmt: skip
    return out


def _check_new(T: int, max_new: int, most: int, parents: torch.Tensor | None) -> None:
    require(
        parents is None or parents.shape == (T,),
        f"parents must name one parent for each of {T} tokens",
    )
    require(
        max_new <= most,
        f"{max_new} new tokens of one sequence are too many; attend_prefill takes any number",
    )


def _fewest_rows(tile: Tile) -> int:
    """Rows of a block, however few there are: lower ones are multiplied by other instructions."""
    return 16 if phase() is None else int(tile["BLOCK_M"])


def _decode_plan(case: Case, T: int) -> list[tuple[int, int]]:
    """(new tokens, length) of sequences with up to `new` tokens over contexts of up to page^2 keys;
    the third is a pad."""
    plan: list[tuple[int, int]] = []
    left = T
    while left > 0:
        new = min(left, (case.new, 1, max(1, case.new - 1))[len(plan) % 3])
        context = (case.page**2, case.page, 0, case.page**2 - 3, 1)[len(plan) % 5]
        plan.append((new, 0 if len(plan) == 2 else context + new))
        left -= new
    return plan or [(0, 7)]


def _make_decode(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    plan = _decode_plan(case, T)
    args = attention_inputs(case, plan, dev, dtype, rng)
    tree = [(i - 1) // 2 if i else -1 for new, _ in plan for i in range(new)]
    args["parents"] = torch.tensor(tree, dtype=torch.int32).to(dev) if case.tree else None
    return args | {"max_new": case.new}


def _decode_cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    plan = _decode_plan(case, T)
    stored = 1 if case.fp8 else dtype.itemsize
    keys = sum(length for _, length in plan) * 2 * case.Hkv * case.Dh * stored
    pairs = sum(new * length for new, length in plan)
    return Cost(4 * pairs * case.H * case.Dh, 2 * T * case.H * case.Dh * dtype.itemsize + keys)


def _wide(case: Case) -> bool:
    """True where a block has 64 rows: their partial results are a good part of the traffic."""
    return bool(case.new * (case.H // case.Hkv) > 32)


def _tiles(case: Case) -> list[Tile]:
    shapes = ((64, 4, 3), (64, 4, 4), (64, 4, 5), (64, 8, 3), (64, 8, 4), (128, 4, 3))
    found = [
        Tile(BLOCK_M=64, BLOCK_N=n, num_warps=w, num_stages=s, SPLITS=splits)
        for n, w, s in shapes
        for splits in (64, FINEST)
    ]
    if _wide(case):
        return found
    return [tile.but(maxnreg=ROOM) if tile["num_warps"] == 4 else tile for tile in found]


def _decode_default(case: Case, tokens: int) -> Tile:
    """One tile whatever the tokens: the batch must not change a sequence's bits."""
    if "fp32" in case:
        return fp32_tile(case).but(SPLITS=64)
    base, little = Tile(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3), most_shared() < LARGE
    if not _wide(case):
        return base.but(SPLITS=64, num_stages=3 if little else 4, maxnreg=ROOM)
    # the look-up of ancestors takes registers that four warps do not have on sm_100, nor do they
    # have those of fp8's conversion on sm_120
    return base.but(SPLITS=64, num_warps=8 if case.tree or (case.fp8 and little) else 4)


def _order(tile: Tile) -> tuple[int | bool, ...]:
    """What decides the order of a query's sums."""
    return tuple(tile[name] for name in ("BLOCK_M", "BLOCK_N", "SPLITS", "num_warps"))


def _fixed(case: Case, tokens: int, phase: str) -> Tile:
    """The invariant mode's: one for all numbers of drafts, trees too."""
    if "fp32" in case:
        return fp32_tile(case).but(SPLITS=64)
    return Tile(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3, SPLITS=64)


ATTEND_DECODE = KernelSpec(
    op=attend_decode,
    kernels=(_attend_split, _attend_paths, _merge_splits),
    cases=lambda config: [
        Case(**axes, new=new, tree=tree)
        for fp8 in (0, 1)
        for new, tree in ((1, 0), (4, 0), (4, 1))
        if (axes := attention_case(config, fp8)) is not None
    ],
    small=[
        Case(H=8, Hkv=2, Dh=32, page=16, fp8=0, new=2, tree=0),
        Case(H=3, Hkv=3, Dh=24, page=16, fp8=0, new=1, tree=0),
        Case(H=32, Hkv=1, Dh=16, page=16, fp8=1, new=5, tree=1),
        Case(H=16, Hkv=1, Dh=64, page=16, fp8=0, new=4, tree=1),
        Case(H=5, Hkv=1, Dh=37, page=16, fp8=1, new=3, tree=0),
    ],
    tokens=(1, 4, 16, 64, 256),
    make=_make_decode,
    tiles=_tiles,
    default=_decode_default,
    one_tile=True,
    fixed=FixedOrder(_order, _fixed, twin=attend_alone_ref),
    cost=_decode_cost,
    small_tokens=(0, 1, 3, 10),
    per_token=("q",),
    strided=("q",),
)
