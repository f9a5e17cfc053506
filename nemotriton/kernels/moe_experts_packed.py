"""Routed NVFP4 experts from words packed for Hopper (`hopper_pack`), activations in 16 bits.

What is computed is `run_experts_nvfp4` without input scales, from the same numbers:

    h[p]   = relu(up_global[e] * (V_up[e] x[t]))^2              fp32, rounded once         [F]
    row[p] = w[p] * down_global[e] * (V_down[e] h[p])           fp32 (*)                   [L]
    y[t]   = the K rows of a token, summed in fp32 in one fixed order, rounded once

for pair p = t*K + j of token t and expert e = ids[t, j]. (*) With NARROW, for many tokens, rows are
rounded to x's dtype before the sum. By option rows are added as they come (`moe_combine`). The
kernels are in `moe_packed`; a tile names the blocks of
both products:

    BLOCKS    0: a block is one pair; 1: the pairs of one expert, found among the ids, one a token:
              up to UP_M tokens; 2: up to UP_M (DOWN_M) pairs of one expert, by tables that a launch
              of their own writes out of the sorted pairs, which the others do without. Where the
              routing has tables of its own and they fit, they are taken whatever the tile says
    SPLIT     so many programs share the columns of a down tile, where the grid is short
    *_WARPS   1 or 2 multiply with mma.sync, 4 or 8 with wgmma; both products alike
    PDL       dependent launches
    ASYNC     blocks of 16 to 128 pairs by `moe_packed_async` (bf16, whole tiles, Hopper, ASM), to
              the same bits; elsewhere by the tile's other sizes
    ONE       both products and the sum in one launch (`moe_packed_one`), of blocks of one height
              and by mma.sync. Rows are summed one after the other, so that three launches give the
              same bits
    ASM       weights are decoded by inline assembly, else by Triton's operations (`assembly`)

x [T, L]; up words int32 [E, F/128, L/128, 2304] (rounded up), down words [E, L/128, F/128, 2304];
globals fp32 [E].
"""

from typing import Any

import torch

from nemotriton.errors import require
from nemotriton.kernels.assembly import decodes_by_assembly, wants_assembly
from nemotriton.kernels.dependent import dependent
from nemotriton.kernels.fixed_order import FixedOrder
from nemotriton.kernels.fp4 import nvfp4_round_ref, nvfp4_values_ref
from nemotriton.kernels.hopper_pack import (
    TILE,
    WORDS,
    k_order,
    pack_hopper,
    tiles_of,
    unpack_hopper,
)
from nemotriton.kernels.moe_combine import adds_atomically, combine, token_rows
from nemotriton.kernels.moe_experts import most_blocks
from nemotriton.kernels.moe_experts_quant import RUN_EXPERTS_NVFP4, _experts_ref
from nemotriton.kernels.moe_fixed import by_token
from nemotriton.kernels.moe_packed import _packed_combine, _packed_down, _packed_up, _prepare
from nemotriton.kernels.moe_packed_async import _async_down, _async_up, multiply_ahead
from nemotriton.kernels.moe_packed_one import (
    _packed_experts,
    check_arrivals,
    count_arrivals,
    counts_fit,
    multiply_at_once,
)
from nemotriton.kernels.moe_packed_tiles import (
    packed_default,
    packed_fixed,
    packed_order,
    packed_suits,
    packed_tiles,
    three_launches,
)
from nemotriton.kernels.moe_route import OwnRouting, Routing, pair_rows, sort_pairs_ref
from nemotriton.kernels.op import (
    Args,
    Case,
    KernelSpec,
    Tile,
    acc_dtype,
    cdiv,
    launch,
    next_pow2,
    op,
    target,
)
from nemotriton.kernels.quantize import check_scale

DTYPES = (torch.bfloat16, torch.float16)
TABLE_BLOCKS = 8  # blocks of a program that writes tables
TABLE_PAIRS = 4  # or pairs, where they are not sorted
UNSORTED_PAIRS = 768  # every program compares its pairs with all
ORDER_COLUMNS = 1024  # columns of a program that orders x


# --------------------------------------------------------------------------------------------- twin
def run_experts_packed_ref(
    x: torch.Tensor,
    up_words: torch.Tensor,
    up_global: torch.Tensor,
    down_words: torch.Tensor,
    down_global: torch.Tensor,
    width: int,
    routing: Routing,
    ordered: bool = False,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `run_experts_packed`: the words unpacked, then `run_experts_nvfp4`'s twin."""
    f, L = acc_dtype(x), x.shape[1]
    if ordered:
        x = torch.empty_like(x).index_copy_(1, k_order(L, True, x.device), x)
    if routing.offsets.shape[0] == 0:
        routing = sort_pairs_ref(routing, up_words.shape[0])
    return _experts_ref(
        x,
        lambda e: nvfp4_values_ref(*unpack_hopper(up_words[e], width, L), f),
        lambda e: nvfp4_values_ref(*unpack_hopper(down_words[e], L, width), f),
        (up_global, None),
        (down_global, None),
        routing,
        nvfp4_round_ref,
    )


# ---------------------------------------------------------------------------------------------- op
@op(ref=run_experts_packed_ref)
def run_experts_packed(
    x: torch.Tensor,
    up_words: torch.Tensor,
    up_global: torch.Tensor,
    down_words: torch.Tensor,
    down_global: torch.Tensor,
    width: int,
    routing: Routing,
    ordered: bool = False,
    arrivals: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run every routed expert on its tokens and sum them by weight; words packed for Hopper.

    x [T, L] bf16 or fp16; words and globals as in the module's docstring; width: F. ordered: x's
    columns stand in `k_order(L, mma=True)`, which spares a launch at a few tokens; y's never do.
    The pairs need not be sorted: up to UNSORTED_PAIRS that is the faster way. arrivals int32
    [`count_arrivals` or more]: zeros, and zeros again afterwards; calls that run at the same time
    must not share it. With it a few tokens take one launch. Returns [T, L] in x's dtype."""
    E = _check(x, up_words, up_global, down_words, down_global, width, routing, ordered)
    check_arrivals(arrivals)
    (T, L), K = x.shape, routing.ids.shape[1]
    tile = RUN_EXPERTS_PACKED.tile(T, x, E=E, F=width, L=L, K=K, O=int(ordered))
    if tile["ONE"] and isinstance(routing, OwnRouting):
        tile = three_launches(width, tile)
    plan = _Plan(tile, x, width, routing, arrivals)
    h = torch.empty((T * K, plan.h_width), dtype=x.dtype, device=x.device)
    if plan.atomic:
        parts = token_rows(T, L, x.device)
    else:
        kept = x.dtype if tile["NARROW"] else torch.float32
        parts = pair_rows(routing, plan.split, L, dtype=kept)
    y = torch.empty((T, L), dtype=x.dtype, device=x.device)
    matrices = (up_words, up_global, down_words, down_global)
    up_table, down_table, rows, x_width = _tables(x, routing, tile, plan, E, ordered)
    natural = rows is x and not ordered
    if plan.at_once:
        assert arrivals is not None
        multiply_at_once(
            rows, x_width, matrices, routing, up_table, (h, parts), y, arrivals, plan, natural
        )
        return y
    if plan.ahead:
        made = (up_table.tensors, down_table.tensors)
        multiply_ahead(rows, *matrices, routing.weights, (h, parts), made)
    else:
        tables = (up_table, down_table)
        _multiply(rows, x_width, matrices, routing, tables, (h, parts), plan, natural)
    count = 1 if plan.atomic else K * plan.split
    combine(parts, y, count, bool(tile["NARROW"]), bool(tile["ONE"]), plan.pdl)
    return y


def _multiply(
    x: torch.Tensor,
    x_width: int,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    routing: Routing,
    tables: "tuple[_Table, _Table]",
    scratch: tuple[torch.Tensor, torch.Tensor],
    plan: "_Plan",
    natural: bool,
) -> None:
    """Launch one product, then the other; arguments as of `multiply_at_once`."""
    (T, K), L, tile = routing.ids.shape, scratch[1].shape[-1], plan.tile
    up_words, up_global, down_words, down_global = matrices
    (up_table, down_table), (h, parts) = tables, scratch
    chosen = {"K": K, "BLOCK_J": next_pow2(K), "H": plan.h_width}
    launch(
        _packed_up, (up_table.blocks * plan.up_tiles,), x, up_words, up_global, h,
        *up_table.tensors, T * K, x.stride(0), x_width, **chosen, N_TILES=tiles_of(plan.width),
        K_TILES=tiles_of(L), STEPS=cdiv(x_width, int(tile["UP_K"])), NATURAL=natural,
        EVEN=x_width % tile["UP_K"] == 0, launch_pdl=plan.pdl, **plan.meta("UP"),
    )  # fmt: skip
    launch(
        _packed_down, (down_table.blocks * plan.down_tiles * plan.split,), h, down_words,
        down_global, routing.weights, parts, *down_table.tensors, T * K, L=L, **chosen,
        N_TILES=tiles_of(L), K_TILES=tiles_of(plan.width), STEPS=plan.down_steps // plan.split,
        SPLIT=plan.split, ATOMIC=plan.atomic, EVEN=plan.h_width % tile["DOWN_K"] == 0,
        launch_pdl=plan.pdl, **plan.meta("DOWN"),
    )  # fmt: skip


class _Plan:
    """The sizes that follow from a tile: widths, tiles of rows, steps, and launch options."""

    def __init__(
        self,
        tile: Tile,
        x: torch.Tensor,
        F: int,
        routing: Routing,
        arrivals: torch.Tensor | None,
    ) -> None:
        (T, L), self.tile, self.width, given = x.shape, tile, F, routing.block_pairs
        one_block = min(int(tile["UP_M"]), int(tile["DOWN_M"])) >= T
        self.blocks = 2 if tile["BLOCKS"] == 1 and not one_block else int(tile["BLOCKS"])
        self.mma = int(tile["UP_WARPS"]) < 4
        # the routing's own tables are taken, and x as it is
        height = given is not None and given.shape[1]
        self.given = self.mma and tile["UP_M"] == tile["DOWN_M"] == height
        self.blocks = 2 if self.given else self.blocks
        self.asm = decodes_by_assembly(x, bool(tile["ASM"]))
        whole = F % TILE == 0 and L % TILE == 0 and x.dtype == torch.bfloat16
        # it has no form without assembly
        ahead = bool(tile["ASYNC"]) and wants_assembly(bool(tile["ASM"]))
        self.ahead = ahead and whole and target(x.device) // 10 == 9
        self.atomic = adds_atomically() and not self.ahead
        self.pdl = bool(tile["PDL"]) and dependent(x)
        self.up_tiles = cdiv(F, int(tile["UP_N"]))
        self.h_width = self.up_tiles * int(tile["UP_N"])
        self.down_tiles = cdiv(L, int(tile["DOWN_N"]))
        self.down_steps = cdiv(self.h_width, int(tile["DOWN_K"]))
        self.split = int(tile["SPLIT"])
        while self.down_steps % self.split:
            self.split -= 1
        alike = all(tile[f"UP_{key}"] == tile[f"DOWN_{key}"] for key in ("M", "WARPS"))
        self.at_once = bool(tile["ONE"]) and alike and self.mma and not self.atomic
        self.at_once = self.at_once and counts_fit(arrivals, routing, L)

    def meta(self, name: str) -> dict[str, int | bool]:
        """Constexprs and options of the up ("UP") or down ("DOWN") product."""
        tile = self.tile
        sizes = {f"BLOCK_{axis}": tile[f"{name}_{axis}"] for axis in "MNK"}
        options = {"STAGES": tile[f"{name}_STAGES"], "num_warps": tile[f"{name}_WARPS"]}
        how = {"BLOCKS": self.blocks, "ASM": self.asm, "MMA": self.mma, "PDL": self.pdl}
        return {**sizes, **options, **how}


class _Table:
    """Which block has which rows and expert, in one of the three ways of `_find_rows`."""

    def __init__(self, rows: torch.Tensor, experts: torch.Tensor, blocks: int) -> None:
        self.tensors, self.blocks = (rows, experts), blocks


def _tables(
    x: torch.Tensor, routing: Routing, tile: Tile, plan: _Plan, E: int, ordered: bool
) -> tuple[_Table, _Table, torch.Tensor, int]:
    """Tables of both products, x as the first one reads it, and how many columns that has."""
    (T, L), K = x.shape, routing.ids.shape[1]
    if plan.given:
        assert routing.block_pairs is not None
        assert routing.block_experts is not None
        table = _Table(routing.block_pairs, routing.block_experts, T * K)
        return table, table, x, L
    if plan.blocks < 2:
        table = _Table(routing.ids, routing.ids, T * K)
        return table, table, x, L
    in_order = routing.offsets.shape[0] > 0
    width = cdiv(L, 64) * 64
    rows = x
    if not (ordered and plan.mma):
        rows = torch.empty((T, width), dtype=x.dtype, device=x.device)
    tables: dict[int, _Table] = {}
    for block_m in (int(tile["UP_M"]), int(tile["DOWN_M"])):
        if block_m in tables:
            continue
        blocks = most_blocks(T * K, E, block_m)
        made = torch.empty((blocks, block_m), dtype=torch.int32, device=x.device)
        experts = torch.empty((blocks,), dtype=torch.int32, device=x.device)
        programs = cdiv(blocks, TABLE_BLOCKS) if in_order else cdiv(T * K, TABLE_PAIRS)
        # x is ordered in the first launch only
        extra = T * cdiv(width, ORDER_COLUMNS) if rows is not x and not tables else 0
        launch(
            _prepare, (programs + extra,), routing.offsets, routing.order, routing.ids, experts,
            made, programs, T * K, blocks, x, rows, x.stride(0), L, width, E=E, BLOCK_M=block_m,
            BLOCK_E=next_pow2(E), BLOCK_P=min(512, next_pow2(T * K)),
            BLOCK_B=TABLE_BLOCKS if in_order else TABLE_PAIRS, SORTED=in_order, MMA=plan.mma,
            FROM_MMA=ordered, BLOCK_L=min(ORDER_COLUMNS, next_pow2(width)), PDL=plan.pdl,
            launch_pdl=plan.pdl, num_warps=4,
        )  # fmt: skip
        tables[block_m] = _Table(made, experts, blocks)
    return tables[int(tile["UP_M"])], tables[int(tile["DOWN_M"])], rows, width


def _check(
    x: torch.Tensor,
    up_words: torch.Tensor,
    up_global: torch.Tensor,
    down_words: torch.Tensor,
    down_global: torch.Tensor,
    width: int,
    routing: Routing,
    ordered: bool,
) -> int:
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    require(x.stride(1) == 1, "x must have unit stride along its width; call .contiguous()")
    require(x.dtype in DTYPES, f"packed experts take bf16 or fp16 activations, got {x.dtype}")
    (T, L), E = x.shape, up_words.shape[0]
    require(not ordered or L % 64 == 0, f"{L} columns have no order: it permutes groups of 64")
    for name, words, n, k in (("up", up_words, width, L), ("down", down_words, L, width)):
        fits = words.shape == (E, tiles_of(n), tiles_of(k), WORDS.value)
        require(
            fits and words.dtype == torch.int32 and words.is_contiguous(),
            f"{name} words of shape {tuple(words.shape)} are not {E} packed matrices [{n}, {k}]",
        )
    require(routing.ids.shape[0] == T, f"{T} tokens, but a routing of {routing.ids.shape[0]}")
    require(
        routing.offsets.shape in ((0,), (E + 1,)),
        f"the routing is over {routing.offsets.shape[0] - 1} experts, the weights have {E}",
    )
    blocks, pairs = routing.block_experts, routing.block_pairs
    require(
        pairs is None or (blocks is not None and len(pairs) == len(blocks) == routing.ids.numel()),
        f"a routing of {routing.ids.numel()} pairs has as many blocks, or none",
    )
    for scale in (up_global, down_global):
        check_scale(scale, "the experts' scales", (E,))
    return E


# ------------------------------------------------------------------------------------------- spec
def _cases(config: Any) -> list[Case]:
    """O: whether a latent projection in front of the experts gives x in order."""
    return [
        Case(
            E=m.experts, F=m.width, L=m.latent or config.width, K=m.top_k,
            O=int(bool(m.latent) and m.latent % 64 == 0),
        )
        for m in dict.fromkeys((*config.moes, config.mtp_moe))
        if m is not None
    ]  # fmt: skip


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    args = RUN_EXPERTS_NVFP4.make(Case(**{**case, "Q": 0}), T, dev, dtype, rng)
    kept = {name: args[name] for name in ("x", "routing", "up_global", "down_global")}
    words = {
        f"{name}_words": pack_hopper(args[f"{name}_codes"], args[f"{name}_scales"])
        for name in ("up", "down")
    }
    counts = torch.zeros(count_arrivals(T, case.K, case.L), dtype=torch.int32, device=dev)
    return kept | words | {"width": case.F, "ordered": bool(case.O), "arrivals": counts}


RUN_EXPERTS_PACKED = KernelSpec(
    terms=lambda case: case.F + case.L,
    op=run_experts_packed,
    kernels=(
        _prepare,
        _packed_up,
        _packed_down,
        _async_up,
        _async_down,
        _packed_experts,
        _packed_combine,
    ),
    cases=_cases,
    small=[
        Case(E=11, F=64, L=192, K=4, O=1),
        Case(E=4, F=48, L=144, K=1, O=0),
        Case(E=6, F=80, L=48, K=6, O=0),
    ],
    tokens=RUN_EXPERTS_NVFP4.tokens,
    dtypes=("bf16", "fp16"),
    small_tokens=(0, 1, 9),
    make=_make,
    tiles=packed_tiles,
    default=packed_default,
    fixed=FixedOrder(packed_order, packed_fixed, twin=by_token(run_experts_packed_ref)),
    cost=RUN_EXPERTS_NVFP4.cost,
    per_token=("x",),
    strided=("x",),
    suits=packed_suits,
    arches=(90,),
)
