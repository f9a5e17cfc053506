"""The launches of the fused scan's form for Hopper; `ssd_hopper.py` holds its second kernel.

    _prepare_fragments  per chunk, group and half: decays and weights [H, chunks, 2, 128] of each
                        head (fp32 cum and fold; bf16 w = high + low), and C B^T's triangle
                        [chunks, G, 8, 8, 256] bf16; per sequence: a row of the work table
    _scan_roles         y and the final states

The triangle is stored by 16 x 16 blocks [row of blocks, column of blocks], each as the 32 lanes of
a warp hold it: C_m . B_k with m = 16 w + 8 i + r and k = 16 b + 8 j + 2 q + e is element
4 j + 2 i + e of lane 4 r + q. Blocks above the diagonal are not written.

Rows of the work table, longest sequences first: first chunk, chunks, slot, whether the state is
read, whether it is written, first token, token behind the last, 0. A pad has no chunks.
"""

import torch
import triton
import triton.language as tl

from nemotriton import device
from nemotriton.kernels.dependent import as_dependent, dependent
from nemotriton.kernels.described import Described, described
from nemotriton.kernels.op import Tile, cdiv, launch, next_pow2
from nemotriton.kernels.ssd_blocks import _prepare_decays
from nemotriton.kernels.ssd_chunk import chunk_rows
from nemotriton.kernels.ssd_hopper import _scan_roles

SHAPE = (64, 128, 128)  # head_dim, state and chunk it is written for
CHUNK = SHAPE[2]
HEADS = 8  # heads whose decays a program makes
# Up to so many chunks the scan is launched as a dependent, which saves 2 us. Its programs then
# start one by one and where there is room, and with 64 chunks and more it took 3 to 12 % longer.
SHORT = 24
STORED = frozenset((torch.bfloat16, torch.float16, torch.float32))  # formats of the state


@triton.jit
def _plan_sequence(
    work_ptr, fresh_ptr, chunks_idx, cu_idx, slots_idx, s, chunks, S, BLOCK: tl.constexpr
):
    """The row of sequence s in the work table, placed by its length."""
    start = tl.load(cu_idx + s).to(tl.int64)
    stop = tl.load(cu_idx + s + 1).to(tl.int64)
    slot = tl.load(slots_idx + s).to(tl.int64)
    fresh = tl.load(fresh_ptr + s) != 0
    i = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, chunks, BLOCK):
        c = at + i
        of = tl.load(chunks_idx + c * 3, mask=c < chunks, other=-1).to(tl.int64)
        before += ((of >= 0) & (of < s)).to(tl.int32)
        own += (of == s).to(tl.int32)
    ahead = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, S, BLOCK):
        other = at + i
        begin = tl.load(cu_idx + other, mask=other < S, other=0).to(tl.int64)
        end = tl.load(cu_idx + other + 1, mask=other < S, other=0).to(tl.int64)
        longer = (end - begin > stop - start) | ((end - begin == stop - start) & (other < s))
        ahead += (longer & (other < S)).to(tl.int32)
    n = tl.where(slot >= 0, tl.sum(own), 0)
    row = work_ptr + tl.sum(ahead) * 8
    tl.store(row, tl.where(n > 0, tl.sum(before), 0))
    tl.store(row + 1, n)
    tl.store(row + 2, slot.to(tl.int32))
    # what a fresh sequence's slot holds is never read: it may be NaN
    tl.store(row + 3, ((n > 0) & (fresh == 0)).to(tl.int32))
    tl.store(row + 4, ((slot >= 0) & ((n > 0) | fresh)).to(tl.int32))
    tl.store(row + 5, start.to(tl.int32))
    tl.store(row + 6, stop.to(tl.int32))
    tl.store(row + 7, 0)


@triton.jit(do_not_specialize=["chunks", "S"])
def _prepare_fragments(
    dt_ptr, A_ptr, bias_ptr, B_ptr, C_ptr, decays_ptr, weights_ptr, scores_ptr, work_ptr, fresh_ptr,
    chunks_idx, cu_idx, slots_idx,
    dt_t, B_t, B_g, C_t, C_g, chunks, S, G, heads_per_group, low, high,
    N: tl.constexpr, L: tl.constexpr, TILES: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # the scan's programs come when the last of these have started, and wait for their ends
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0).to(tl.int64)
    # halves of a triangle, which wait for memory, between tables of decays, which compute
    cell, kind = pid // (2 + TILES), (pid % (2 + TILES)).to(tl.int32)
    cells = tl.full((), 1, tl.int64) * chunks * G
    c, g = cell // G, cell % G
    if cell >= cells:
        _plan_sequence(
            work_ptr, fresh_ptr, chunks_idx, cu_idx, slots_idx, pid - (2 + TILES) * cells, chunks,
            S, BLOCK=128,
        )  # fmt: skip
    elif kind >= 2:
        first, tokens = chunk_rows(chunks_idx, c)
        r = (kind - 2) * BLOCK_H + tl.arange(0, BLOCK_H)
        h = (g * heads_per_group).to(tl.int32) + r
        _prepare_decays(
            dt_ptr, A_ptr, bias_ptr, decays_ptr, weights_ptr, c, chunks, first, tokens, dt_t,
            h, r < heads_per_group, low, high, L,
        )  # fmt: skip
    else:
        half = kind
        first, tokens = chunk_rows(chunks_idx, c)
        n, k = tl.arange(0, N), tl.arange(0, L)
        m = half * (L // 2) + tl.arange(0, L // 2)
        B_at = B_ptr + first * B_t + g * B_g + k[:, None] * B_t + n[None, :]
        C_at = C_ptr + first * C_t + g * C_g + m[:, None] * C_t + n[None, :]
        last = tl.minimum(tokens, (half + 1) * (L // 2))
        B = tl.load(B_at, mask=(k < last)[:, None], other=0.0)
        C = tl.load(C_at, mask=(m < last)[:, None], other=0.0)
        scores = tl.dot(C, tl.trans(B), input_precision="ieee")
        scores = tl.where(k[None, :] <= m[:, None], scores, 0.0).to(tl.bfloat16)
        scores = tl.reshape(scores, (4, 2, 8, L // 16, 2, 4, 2))
        scores = tl.reshape(tl.permute(scores, (0, 3, 2, 5, 4, 1, 6)), (4, L * 16))
        w, e = half * 4 + tl.arange(0, 4), tl.arange(0, L * 16)
        at = scores_ptr + cell * (L * L) + w[:, None] * (L * 16) + e[None, :]
        tl.store(at, scores, mask=(e // 256)[None, :] <= w[:, None])


def as_second(x: torch.Tensor, chunks: int) -> dict[str, bool]:
    """How a scan over so many chunks is launched behind the first kernel; as `as_dependent`."""
    pdl = chunks <= SHORT and dependent(x)
    return {"PDL": pdl, "launch_pdl": pdl}


def scan_by_roles(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor,
    chunks: torch.Tensor,
    tile: Tile,
) -> torch.Tensor:
    """y [T, H, P] of operands as `ssd_prefill` has them, of which `has_roles` holds."""
    (T, H, P), (G, N), n, S = x.shape, B.shape[1:], chunks.shape[0], slots.shape[0]
    where = x.device
    decays = torch.empty((H, n, 2, CHUNK), dtype=torch.float32, device=where)
    weights = torch.empty((H, n, 2, CHUNK), dtype=torch.bfloat16, device=where)
    scores = torch.empty((n, G, CHUNK // 16, CHUNK // 16, 256), dtype=torch.bfloat16, device=where)
    work = torch.empty((S, 8), dtype=torch.int32, device=where)
    y = torch.empty((T, H, P), dtype=x.dtype, device=where)
    operands = (dt, A, dt_bias, B, C, decays, weights, scores, work, fresh, chunks, cu, slots)
    strides = (dt.stride(0), *B.stride()[:2], *C.stride()[:2])
    block = min(HEADS, next_pow2(H // G))
    tiles = cdiv(H // G, block)
    limits = (float(dt_limit[0]), float(dt_limit[1]))
    launch(
        _prepare_fragments, ((2 + tiles) * n * G + S,), *operands, *strides, n, S, G, H // G,
        *limits, N, CHUNK, TILES=tiles, BLOCK_H=block, num_warps=4, maxnreg=128, **as_dependent(x),
    )  # fmt: skip
    total = S * H
    tables = (
        _rows(x, CHUNK, P), _rows(B, CHUNK, N), _rows(C, CHUNK // 2, N), _flat(decays),
        _flat(weights), _rows(y, CHUNK // 2, P), _rows(state.view(-1, 1, N), P, N),
        scores, decays, D, y, state, work, chunks, total, n, H, G, G if tile["GROUPED"] else 1,
    )  # fmt: skip
    launch(
        _scan_roles, (min(total, device.info(where).sms),), *tables, **as_second(x, n),
        OUTPUT_REGISTERS=112, STATE_REGISTERS=112, LOAD_REGISTERS=32, num_warps=4, maxnreg=96,
    )  # fmt: skip
    return y


def _rows(v: torch.Tensor, rows: int, columns: int) -> Described:
    """v [T, heads, width] as a matrix [T, heads * width] that is moved in tiles."""
    shape = [v.shape[0], v.shape[1] * v.shape[2]]
    return described(v, shape, (v.stride(0), 1), (rows, columns))


def _flat(v: torch.Tensor) -> Described:
    """The two tables of one chunk and head, behind each other."""
    return described(v, (v.numel(),), (1,), (2 * CHUNK,))
