"""A mixture-of-experts layer at a few tokens: seven of its products and steps in two launches.

    enter_moe     logits = gate x                    [T, E]     fp32, for the router
                  narrow = latent x                  [T, L]     for the routed experts, if they are
                  hidden = relu(up_scale * up x)^2   [T, F]     of the shared expert
    share_expert  routing = route_experts(logits), not sorted, but with blocks of pairs
                  shared = down_scale * (down hidden)            [T, D]

Alone each is too short for the memory to reach its rate, and the router reads next to nothing while
it takes microseconds: here it runs beside the shared expert's second product. So does what spares
the experts a second look at the ids: of the programs that route a token each, the last to be
through writes which pairs have one expert (`Routing`'s blocks). Numbers are those of
`matmul`, `fp8_matmul` and `route_experts`: fp32 sums, rounded once to x's dtype. A program takes
BLOCK_N rows of one matrix, each of its warps a slice of every step's columns, as in `gemm_stream`;
the gate's fp32 rows, four times as long as fp8 ones, are shared by SPLITS programs, whose sums the
router adds. A row of x meets the same order of sums whatever the number of rows.

x [T, D] bf16, meant for T <= FEW, with the shared expert's products for T <= FEWEST; gate [E, D]
fp32; latent [L, D] or None, up [F, D] or None, down [D, F]: bf16 without scale, or e4m3 with one.
"""

from typing import Any, NamedTuple

import torch

from nemotriton.errors import require
from nemotriton.kernels.assembly import decodes_by_assembly
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import FixedOrder
from nemotriton.kernels.fp4 import random_fp8
from nemotriton.kernels.gemm import matmul_ref
from nemotriton.kernels.gemm_quant import fp8_matmul_ref
from nemotriton.kernels.moe_products import LINE, _enter, _share
from nemotriton.kernels.moe_route import Routing, group_sizes, route_experts_ref
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
from nemotriton.kernels.quantize import check_scale

FEW = 16  # tokens up to which this pays: more are read too often by so many programs
FEWEST = 8  # and up to which the shared expert's products are among them
FIRST = 3  # tokens from which on blocks pay: of two tokens' 44 pairs two share an expert


class Entered(NamedTuple):
    """What leaves `enter_moe`; logits [T, E], or [parts, T, E] to be added in that order."""

    logits: torch.Tensor
    narrow: torch.Tensor | None
    hidden: torch.Tensor | None


# --------------------------------------------------------------------------------------- enter_moe
def enter_moe_ref(
    x: torch.Tensor,
    gate: torch.Tensor,
    latent: torch.Tensor | None,
    latent_scale: torch.Tensor | None,
    up: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
) -> Entered:
    """Twin of `enter_moe`."""
    logits = matmul_ref(x, gate, out_dtype=torch.float32)
    narrow = None if latent is None else _scaled_ref(x, latent, latent_scale, "none")
    hidden = None if up is None else _scaled_ref(x, up, up_scale, "relu2")
    return Entered(logits, narrow, hidden)


def _scaled_ref(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, epilogue: str
) -> torch.Tensor:
    if scale is None:
        return matmul_ref(x, weight, epilogue=epilogue)
    return fp8_matmul_ref(x, weight, scale, epilogue=epilogue)


@op(ref=enter_moe_ref)
def enter_moe(
    x: torch.Tensor,
    gate: torch.Tensor,
    latent: torch.Tensor | None,
    latent_scale: torch.Tensor | None,
    up: torch.Tensor | None = None,
    up_scale: torch.Tensor | None = None,
) -> Entered:
    """The products of a MoE layer's normed x [T, D]: router logits, latent x, shared hidden, the
    last two where there is a weight.

    Sizes and dtypes as in the module's docstring, weights contiguous, scales fp32 of one value.
    The logits come in parts."""
    T, D = _check_x(x)
    E, (L, narrow_size), (F, up_size) = gate.shape[0], _sides(latent), _sides(up)
    require(gate.dtype == torch.float32, f"the gate must be float32, got {gate.dtype}")
    for name, scale in (("latent_scale", latent_scale), ("up_scale", up_scale)):
        if scale is not None:
            check_scale(scale, name)
    for name, weight in (("gate", gate), ("latent", latent), ("up", up)):
        _check_weight(name, weight, D)
    tile = ENTER_MOE.tile(T, x, E=E, L=L, F=F, D=D, S=up_size)
    row, splits = int(tile["ROW"]), int(tile["SPLITS"])
    gate_steps = cdiv(D, row // 4 * splits)
    logits = torch.empty((splits, T, E), dtype=torch.float32, device=x.device)
    narrow = None if latent is None else torch.empty((T, L), dtype=x.dtype, device=x.device)
    hidden = None if up is None else torch.empty((T, F), dtype=x.dtype, device=x.device)
    n = int(tile["BLOCK_N"])
    few = n // narrow_size if tile["EVEN"] else n  # rows of the latent in a program
    tiles = cdiv(E, n) * splits + cdiv(L, few) + cdiv(F, n)
    grid = (tiles * cdiv(T, int(tile["BLOCK_T"])),)
    weights = (gate, _bytes(latent), latent_scale, _bytes(up), up_scale)
    launch(
        _enter, grid, x, *weights, logits, narrow, hidden, x.stride(0), T,
        D=D, E=E, L=L, F=F, FEW=few, GATE_STEPS=gate_steps,
        LATENT_STEPS=cdiv(D, row // narrow_size), UP_STEPS=cdiv(D, row // up_size),
        EVEN_K=D % (row * splits) == 0,
        LINES=_lines(tile, D * min(up_size, narrow_size, 4 // splits)), **_constants(tile, x),
    )  # fmt: skip
    return Entered(logits, narrow, hidden)


# ------------------------------------------------------------------------------------ share_expert
def share_expert_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
    hidden: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
) -> tuple[Routing, torch.Tensor]:
    """Twin of `share_expert`."""
    groups = (router_groups, top_groups, normalize, scale)
    routing = route_experts_ref(logits, bias, top_k, *groups, sort=False)
    if _has_blocks(hidden.shape[0], arrivals):
        routing = find_blocks_ref(routing)
    return routing, _scaled_ref(hidden, down, down_scale, "none")


def find_blocks_ref(routing: Routing) -> Routing:
    """The routing of up to FEWEST tokens with the blocks of every expert's pairs."""
    T, K = routing.ids.shape
    expert, p = routing.ids.flatten(), torch.arange(T * K, device=routing.ids.device)
    same = routing.ids == expert[:, None, None]
    found = torch.where(same, p.view(T, K), -1).amax(-1)  # [pairs, tokens]
    first = torch.where(found < 0, T * K, found).amin(-1)
    pairs = torch.nn.functional.pad(found, (0, FEWEST - T), value=-1)
    experts = torch.where(first < p, -1, expert)
    return routing._replace(block_experts=experts.int(), block_pairs=pairs.int())


def _has_blocks(tokens: int, arrivals: torch.Tensor | None) -> bool:
    return arrivals is not None and FIRST <= tokens <= FEWEST


@op(ref=share_expert_ref)
def share_expert(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
    hidden: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
) -> tuple[Routing, torch.Tensor]:
    """The router of a few tokens beside the shared expert's second product.

    logits [parts, T, E] and the rest as in `route_experts`; hidden [T, F], down [D, F] and its
    scale as in the module's docstring. arrivals int32 [1]: zero, and zero again afterwards; calls
    that run at the same time must not share it. With it the routing of FIRST to FEWEST tokens has
    the blocks of every expert's pairs. Returns the routing, not sorted, and y [T, D] of the
    shared expert."""
    T, F = _check_x(hidden)
    parts, rows, E = logits.shape
    require(rows == T, f"{T} tokens, but router logits of {rows}")
    _check_weight("down", down, F)
    if down_scale is not None:
        check_scale(down_scale, "down_scale")
    _check_arrivals(arrivals)
    D = down.shape[0]
    groups = {"G": router_groups, "TG": top_groups}
    tile = SHARE_EXPERT.tile(T, hidden, E=E, K=top_k, **groups, F=F, D=D, S=down.element_size())
    row, n = int(tile["ROW"]), int(tile["BLOCK_N"])
    ids = torch.empty((T, top_k), dtype=torch.int32, device=hidden.device)
    weights = torch.empty((T, top_k), dtype=torch.float32, device=hidden.device)
    y = torch.empty((T, D), dtype=hidden.dtype, device=hidden.device)
    nothing = ids.new_empty((0,))
    blocks = _has_blocks(T, arrivals)
    places, experts, pairs = _block_tensors(ids, E) if blocks else (None, None, None)
    columns = row // down.element_size()
    grid = (T + cdiv(D, n) * cdiv(T, int(tile["BLOCK_T"])),)
    strides = (logits.stride(1), logits.stride(0), hidden.stride(0))
    launch(
        _share, grid, logits, bias, ids, weights, places, experts, pairs,
        arrivals if blocks else None, hidden, _bytes(down), down_scale, y, *strides, T, scale,
        ROWS=FEWEST if blocks else 0, BLOCK_P=next_pow2(FEWEST * top_k), D=D, F=F,
        STEPS=cdiv(F, columns), EVEN_K=F % columns == 0, PARTS=parts, K=top_k,
        NORMALIZE=normalize, LINES=_lines(tile, F * down.element_size()),
        **_constants(tile, hidden),
        **group_sizes(Case(E=E, K=top_k, G=router_groups, TG=top_groups)),
    )  # fmt: skip
    return Routing(ids, weights, nothing, nothing, experts, pairs), y


def _block_tensors(ids: torch.Tensor, E: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scratch [T, E] for every token's pair with every expert, and the blocks of pairs."""
    pairs = ids.numel()
    return ids.new_empty((len(ids), E)), ids.new_empty((pairs,)), ids.new_empty((pairs, FEWEST))


def _check_arrivals(arrivals: torch.Tensor | None) -> None:
    require(
        arrivals is None or (arrivals.shape == (1,) and arrivals.dtype == torch.int32),
        "arrivals must be int32 of one element",
    )


def _check_x(x: torch.Tensor) -> tuple[int, int]:
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    require(x.dtype == torch.bfloat16, f"x must be bfloat16, got {x.dtype}")
    require(x.stride(1) == 1, "x must have unit stride along its width; call .contiguous()")
    return x.shape[0], x.shape[1]


def _check_weight(name: str, weight: torch.Tensor | None, K: int) -> None:
    require(
        weight is None or (weight.ndim == 2 and weight.shape[1] == K and weight.is_contiguous()),
        f"{name} must be contiguous and {K} wide",
    )


def _sides(weight: torch.Tensor | None) -> tuple[int, int]:
    """(rows, bytes of an element)."""
    return (0, 2) if weight is None else (weight.shape[0], weight.element_size())


def _bytes(weight: torch.Tensor | None) -> torch.Tensor | None:
    if weight is None or weight.dtype != torch.float8_e4m3fn:
        return weight
    return weight.view(torch.uint8)


def _lines(tile: Tile, row_bytes: int) -> int:
    """Lines of every row to prefetch: as the tile says, within the row."""
    return min(int(tile["AHEAD"]), next_pow2(row_bytes // LINE.value + 1) // 2)


def _constants(tile: Tile, x: torch.Tensor) -> dict[str, Any]:
    """Constants and launch options of both kernels that the tile gives."""
    how = {"ASM": decodes_by_assembly(x), "SLICES": tile["num_warps"]}
    return {**tile.without("AHEAD", "EVEN"), **how, **as_dependent(x)}


# ------------------------------------------------------------------------------------------- specs
def _sizes(config: Any) -> list[Case]:
    """S: bytes of an element of the shared expert's matrices."""
    return [
        Case(
            E=m.experts, K=m.top_k, G=m.router_groups, TG=m.top_groups, L=m.latent or 0,
            F=width, D=config.width, S=size,
        )
        for m in dict.fromkeys((*config.moes, config.mtp_moe))
        if m is not None and m.shared_width
        for width, size in ((m.shared_width, 1), (m.shared_width, 2), (0, 2))
    ]  # fmt: skip


def _axes(names: str, least: int) -> Any:
    """The cases of `_sizes`, of which only these axes count, with F of at least so many."""
    return lambda config: list(
        dict.fromkeys(
            Case(**{k: c[k] for k in names.split()}) for c in _sizes(config) if least <= c.F
        )
    )


def _shared(
    shape: tuple[int, int], size: int, dev: torch.device, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if size == 1:
        return random_fp8(shape, dev, rng), torch.full((), 2 * shape[1] ** -0.5, device=dev)
    weight = torch.randn(shape, generator=rng, device=dev) * shape[1] ** -0.5
    return weight.bfloat16(), None


def _make_enter(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    D = case.D
    gate = torch.randn(case.E, D, generator=rng, device=dev) * D**-0.5
    up, scale = _shared((case.F, D), case.S, dev, rng) if case.F else (None, None)
    latent, narrow = None, None
    if case.L:
        latent, narrow = _shared((case.L, D), case.get("N", 2), dev, rng)
    x = torch.randn(T, D, generator=rng, device=dev).to(dtype)
    rest = {"latent": latent, "latent_scale": narrow, "up": up, "up_scale": scale}
    return {"x": x, "gate": gate, **rest}


def _make_share(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    down, scale = _shared((case.D, case.F), case.S, dev, rng)
    return {
        "logits": torch.randn(4, T, case.E, generator=rng, device=dev),
        "bias": 57 + torch.randn(case.E, generator=rng, device=dev) * 0.05,
        "top_k": case.K,
        "router_groups": case.G,
        "top_groups": case.TG,
        "normalize": True,
        "scale": 2.5,
        "hidden": torch.randn(T, case.F, generator=rng, device=dev).to(dtype),
        "down": down,
        "down_scale": scale,
        "arrivals": torch.zeros(1, dtype=torch.int32, device=dev),
    }


def _default(case: Case, tokens: int) -> Tile:
    """EVEN: a program of the latent takes as many bytes as the others, not as many rows."""
    tile = Tile(BLOCK_T=8, BLOCK_N=16, ROW=512, AHEAD=16, num_warps=4, num_stages=3)
    if "L" not in case:
        return tile.but(num_stages=4)
    tile = tile.but(SPLITS=4, EVEN=True)
    if tokens <= 8:
        return tile
    # without the shared expert's there are few programs: each has more on its way
    return tile.but(BLOCK_T=16, ROW=512 if case.F else 1024)


def _order(tile: Tile) -> Any:
    """What decides the order of sums; of the tiles here it is `gemm_fixed.fixed_stream`'s."""
    return tile["ROW"], tile["num_warps"], tile.get("SPLITS", 1)


def _fixed(case: Case, tokens: int, phase: str) -> Tile:
    """In the invariant mode the products go together whatever the number of tokens."""
    tile = _default(case, 1)
    if tokens <= FEWEST:
        return tile
    return tile.but(BLOCK_T=16 if tokens <= 16 else 32, BLOCK_N=32, num_stages=3)


def _tiles(case: Case) -> list[Tile]:
    tile = _default(case, 1)
    ahead = [tile.but(AHEAD=lines) for lines in (0, 8, 32)]
    shapes = [
        tile.but(ROW=row, num_stages=s) for row, s in ((512, 3), (512, 4), (1024, 3), (1024, 2))
    ]
    wide = [tile.but(num_warps=8, num_stages=s, ROW=row) for row, s in ((512, 4), (1024, 3))]
    uneven = [tile.but(EVEN=False, num_stages=s) for s in (3, 4)] if "L" in case else []
    return list(dict.fromkeys([tile, *ahead, *shapes, *wide, *uneven]))


def _enter_cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    weights = case.D * (4 * case.E + 2 * case.L + case.S * case.F)
    rows = T * (2 * case.D + 4 * case.E + 2 * case.L + 2 * case.F)
    return Cost(2 * T * case.D * (case.E + case.L + case.F), weights + rows)


def _share_cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    rows = T * (4 * case.E + 8 * case.K + 2 * case.F + 2 * case.D)
    return Cost(2 * T * case.D * case.F, case.D * case.F * case.S + rows)


_TOKENS = (1, 2, 4, 8, 16)


ENTER_MOE = KernelSpec(
    terms=lambda case: case.D,
    op=enter_moe,
    kernels=(_enter,),
    cases=_axes("E L F D S", 0),
    small=[
        Case(E=20, L=48, F=80, D=336, S=1, N=1),
        Case(E=8, L=0, F=33, D=64, S=2),
        Case(E=16, L=32, F=32, D=512, S=1),
        Case(E=12, L=20, F=0, D=272, S=2),
    ],
    tokens=_TOKENS,
    make=_make_enter,
    tiles=_tiles,
    default=_default,
    fixed=FixedOrder(_order, _fixed),
    cost=_enter_cost,
    dtypes=("bf16",),
    per_token=("x",),
    strided=("x",),
    meaning=lambda named: {
        k: v.sum(0) if k == "out0" and v.ndim == 3 else v for k, v in named.items()
    },
)

SHARE_EXPERT = KernelSpec(
    terms=lambda case: case.F,
    op=share_expert,
    kernels=(_share,),
    cases=_axes("E K G TG F D S", 1),
    small=[
        Case(E=32, K=6, G=1, TG=1, F=80, D=48, S=1),
        Case(E=40, K=4, G=8, TG=3, F=64, D=37, S=2),
    ],
    tokens=_TOKENS,
    make=_make_share,
    tiles=_tiles,
    default=_default,
    fixed=FixedOrder(_order, _fixed),
    cost=_share_cost,
    dtypes=("bf16",),
    per_token=("hidden",),
    strided=("hidden",),
)
