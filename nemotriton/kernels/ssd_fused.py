"""The chunked scan of prefill as two launches that keep the state in registers; see `ssd.py` for
the formula and the letters, `ssd_blocks.py` for the kernels.

The five kernels of `ssd_chunk.py` write every chunk's state to memory as fp32 and read it twice;
here no state but the final one leaves the program that owns it. That trades parallelism over chunks
for traffic, and operands in bf16 for everything between: `is_fused` says which calls it takes, and
`ssd_prefill` hands all others to `ssd_prefill_chunked`.
"""

from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.op import (
    Case,
    KernelSpec,
    Tile,
    cdiv,
    launch,
    next_pow2,
    op,
    target,
)
from nemotriton.kernels.ssd import (
    SSD_PREFILL_CHUNKED,
    block_edge,
    make_ssd_prefill,
    ssd_prefill_chunked,
    ssd_prefill_ref,
)
from nemotriton.kernels.ssd_blocks import _prepare_blocks, _scan_blocks
from nemotriton.kernels.ssd_hopper import _scan_roles
from nemotriton.kernels.ssd_roles import (
    HEADS,
    SHAPE,
    STORED,
    _prepare_fragments,
    as_second,
    scan_by_roles,
)
from nemotriton.kernels.ssm_state import StateNoise, check_state
from nemotriton.kernels.ssm_update import check_rows

MOST_STATE = 256  # the widest state whose rows a program's registers hold


@op(ref=ssd_prefill_ref, others={"chunked": ssd_prefill_chunked})
def ssd_prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Scan packed pieces of prompts; returns y [T, H, P] in x's dtype, final states in place.

    x [T, H, P], dt [T, H], B, C [T, G, N]; `cu` int32 [S+1] token starts; `slots` int32 [S], -1 a
    pad, whose y is zeros; `fresh` bool [S]: the slot's contents are ignored, the state begins at
    zero (also of an empty piece, while an empty piece that is not fresh leaves it alone). `chunks`
    int32 [n, 3] as made by `chunk_table`: it must hold every token once, in order, in chunks of at
    most chunk_size tokens; this is not checked. scales fp32 [slots, H, P]: of int16 and int8
    states. noise: for fp16 states with stochastic rounding, at the position of the last token.
    Which kernels run is `is_fused`'s to say."""
    H, P = x.shape[1:]
    G, N = check_rows(x, dt, B, C, state)
    if not is_fused(x, B, C):
        where = (state, cu, slots, fresh, chunks, chunk_size, dt_limit, scales, noise)
        return ssd_prefill_chunked.triton(x, dt, A, B, C, D, dt_bias, *where)
    check_state(state, scales, noise, slots.shape[0])
    tile = SSD_PREFILL.tile(x.shape[0], x, H=H, P=P, N=N, G=G, Q=chunk_size)
    tile = _bearable(tile, target(x.device))
    if tile["ROLES"] and has_roles(x, B, C, state, scales, noise, chunks, chunk_size):
        pieces = (state, cu, slots, fresh, chunks)
        return scan_by_roles(x, dt, A, B, C, D, dt_bias, dt_limit, *pieces, tile)
    L = block_length(chunk_size)
    decays, scores, spans = prepare_blocks(
        dt, A, B, C, dt_bias, dt_limit, chunks, slots, L, chunk_size
    )
    cells = Cells(state, scales, noise, fresh, cu, slots)
    return scan_blocks(x, B, C, D, decays, scores, spans, chunks, chunk_size, cells, tile)


class Cells(NamedTuple):
    """Where the sequences' states lie, how they are stored, and which are read."""

    state: torch.Tensor
    scales: torch.Tensor | None
    noise: StateNoise | None
    fresh: torch.Tensor
    cu: torch.Tensor
    slots: torch.Tensor


def is_fused(x: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> bool:
    """Whether the fused kernels take these operands: x, B and C in bf16 (fp16 and fp32 are
    multiplied as tf32 and fp32 by the five kernels, whose tiles are small enough for that), and a
    state of at most 256 columns, which registers hold. Every size and stride is taken."""
    return all(v.dtype == torch.bfloat16 for v in (x, B, C)) and B.shape[2] <= MOST_STATE


def has_roles(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    scales: torch.Tensor | None,
    noise: StateNoise | None,
    chunks: torch.Tensor,
    chunk_size: int,
) -> bool:
    """Whether a fused call may take the form for Hopper, where the tile asks for it: compute
    capability 9.0, heads of 64 channels, 128 states, chunks of 128 tokens, rows that TMA can read,
    and contiguous states in fp32, bf16 or fp16 that are rounded to the nearest."""
    if target(x.device) != 90 or (x.shape[2], B.shape[2], chunk_size) != SHAPE:
        return False
    plain = scales is None and noise is None and state.dtype in STORED
    aligned = state.is_contiguous() and state.data_ptr() % 16 == 0
    some = x.shape[0] > 0 and chunks.shape[0] > 0
    return some and plain and aligned and are_describable(x, B, C, SHAPE[0], SHAPE[1])


def _bearable(tile: Tile, architecture: int) -> Tile:
    """The tile, cut down where products are a warp's work and shared memory is 100 KB: everywhere
    but on Hopper and datacenter Blackwell."""
    if architecture in (0, 90, 100, 103):
        return tile
    few = min(int(tile["BLOCK_P"]), 32)
    return tile.but(BLOCK_P=few, num_warps=8, num_stages=min(int(tile["num_stages"]), 2))


def block_length(chunk_size: int) -> int:
    """Tokens of a block: the largest power of two from 16 to 64 that tiles a chunk, else one that
    covers as much of it as 64 do, at the price of masks everywhere."""
    tiling = chunk_size & -chunk_size
    return min(64, tiling if tiling >= 16 else max(16, next_pow2(chunk_size)))


def prepare_blocks(
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    chunks: torch.Tensor,
    slots: torch.Tensor,
    L: int,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """decays [H, blocks, 2, L] fp32, scores [blocks, G, L, L] bf16, spans int32 [S, 2]; the span of
    an empty sequence is not written."""
    H, (G, N), n = dt.shape[1], B.shape[1:], chunks.shape[0]
    per_chunk = cdiv(chunk_size, L)
    blocks, where = n * per_chunk, dt.device
    decays = torch.empty((H, blocks, 2, L), dtype=torch.float32, device=where)
    scores = torch.empty((blocks, G, L, L), dtype=torch.bfloat16, device=where)
    spans = torch.empty((slots.shape[0], 2), dtype=torch.int32, device=where)
    operands = (dt, A, dt_bias, B, C, decays, scores, spans, chunks)
    strides = (dt.stride(0), *B.stride()[:2], *C.stride()[:2])
    heads = min(HEADS, next_pow2(H // G))
    tiles = cdiv(H // G, heads)
    launch(
        _prepare_blocks, ((1 + tiles) * blocks * G,), *operands, *strides, n, blocks, G, H // G,
        float(dt_limit[0]), float(dt_limit[1]), N, L, per_chunk,
        TILES=tiles, BLOCK_H=heads, BLOCK_N=block_edge(N, MOST_STATE),
        num_warps=4,
        **as_dependent(B),
    )  # fmt: skip
    return decays, scores, spans


def scan_blocks(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    decays: torch.Tensor,
    scores: torch.Tensor,
    spans: torch.Tensor,
    chunks: torch.Tensor,
    chunk_size: int,
    cells: Cells,
    tile: Tile,
) -> torch.Tensor:
    """y [T, H, P] in x's dtype; the final states are put into their cells."""
    (T, H, P), (G, N), (blocks, L) = x.shape, B.shape[1:], (scores.shape[0], scores.shape[-1])
    y = torch.empty((T, H, P), dtype=x.dtype, device=x.device)
    block_p, block_n = int(tile["BLOCK_P"]), block_edge(N, MOST_STATE)
    described = T > 0 and blocks > 0 and are_describable(x, B, C, block_p, block_n)
    tables: list[TensorDescriptor | None] = [None] * 5
    if described:
        widths = ((x, block_p), (B, block_n), (C, block_n), (y, block_p))
        tables = [rows_of(v, L, width) for v, width in widths]
        tables.append(rows_of(scores.view(-1, 1, L), L, L))
    state, scales = cells.state, cells.scales
    seeds, lengths, layer = (None, None, 0) if cells.noise is None else cells.noise
    launch(
        _scan_blocks, (cells.slots.shape[0] * H * cdiv(P, block_p),), *tables,
        x, B, C, D, y, decays, scores, state, scales, seeds, cells.fresh,
        lengths, spans, chunks, cells.cu, cells.slots,
        *x.stride()[:2], *B.stride()[:2], *C.stride()[:2],
        state.stride(0), 0 if scales is None else scales.stride(0), layer, blocks, H, G, H // G,
        P, N, chunk_size, L, cdiv(chunk_size, L),
        BLOCK_P=block_p, BLOCK_N=block_n, PACKED=tile["PACKED"], DESCRIBED=described,
        STAGES=tile["num_stages"], num_warps=tile["num_warps"], num_stages=tile["num_stages"],
        STEP=G if tile["GROUPED"] else 1, **as_second(x, chunks.shape[0]),
    )  # fmt: skip
    return y


def rows_of(v: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """v [T, heads, width] as a matrix [T, heads * width] that is read in tiles."""
    shape = [v.shape[0], v.shape[1] * v.shape[2]]
    return TensorDescriptor(v, shape, [v.stride(0), 1], [rows, columns])


def are_describable(
    x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, block_p: int, block_n: int
) -> bool:
    """Whether TMA can read the rows: heads and groups side by side, tiles that divide them, and 16
    bytes of alignment. Otherwise they are read through pointers, to the same bits."""
    if x.shape[2] % block_p or B.shape[2] != block_n or block_p < 16:
        return False
    return all(
        v.data_ptr() % 16 == 0 and v.stride(0) % 8 == 0 and v.stride(1) == v.shape[2]
        for v in (x, B, C)
    )


# ------------------------------------------------------------------------------------------- spec
def _default_tile(case: Case, tokens: int) -> Tile:
    wide = case.N > 128
    return Tile(
        BLOCK_P=block_edge(case.P, 32 if wide or (case.P > 64 and case.P % 64) else 64),
        PACKED=True,
        ROLES=(case.P, case.N, case.Q) == SHAPE,
        GROUPED=False,
        num_warps=8 if wide else 4,
        num_stages=2 if wide else 3,
    )


def _tiles(case: Case) -> list[Tile]:
    """Only what changes no bit, the order and depth of loads: how many tokens a batch has picks
    the tile, and must not pick the rounding."""
    default = _default_tile(case, 0)
    if default["ROLES"]:
        return [default.but(GROUPED=grouped) for grouped in (False, True)]
    return [default.but(num_stages=stages) for stages in (2, 3)]


SSD_PREFILL = KernelSpec(
    terms=SSD_PREFILL_CHUNKED.terms,
    op=ssd_prefill,
    kernels=(_prepare_blocks, _scan_blocks, _prepare_fragments, _scan_roles),
    may_spill=("_scan_roles",),
    cases=SSD_PREFILL_CHUNKED.cases,
    small=[
        Case(H=4, P=16, N=16, G=2, Q=16),
        Case(H=3, P=5, N=40, G=1, Q=12),
        Case(H=2, P=24, N=20, G=2, Q=96),
        Case(H=2, P=32, N=16, G=1, Q=16),
    ],
    tokens=(128, 512, 2048, 8192, 32768, 131072),
    make=make_ssd_prefill,
    tiles=_tiles,
    default=_default_tile,
    fixed=UNORDERED,
    cost=SSD_PREFILL_CHUNKED.cost,
    small_tokens=(0, 1, 3, 50),
    mutates=("state",),
    per_token=("x", "dt", "B", "C"),
    strided=("x", "dt", "B", "C"),
)
