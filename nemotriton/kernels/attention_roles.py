"""The launches of attention's form for Hopper; `attention_hopper.py` holds its second kernel.

_plan_items     the work table: blocks of rows, those with most keys first
_attend_roles   the rest
"""

import torch
import triton
import triton.language as tl

from nemotriton import device
from nemotriton.kernels.attention_hopper import _attend_roles
from nemotriton.kernels.attention_loads import BOX, ROWS, WORK
from nemotriton.kernels.described import Described, described
from nemotriton.kernels.op import Case, launch, target
from nemotriton.kernels.paged import LOG2_E, owner

WIDTH = 128  # of a head
DTYPES = (torch.bfloat16, torch.float16)
ROLES = 3  # of rows
BLOCK_N = 64  # keys a step
STAGES = 4  # of keys, and of values
ROW_REGISTERS, LOAD_REGISTERS = 160, 32


@triton.jit
def _plan_items(
    work_ptr, count_ptr, out_ptr, cu_idx, lengths_idx, S, T, WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Block `b` of rows of the packed sequences, placed by how many of the others have more keys,
    or as many and come first. Rows of a pad, and those behind the last sequence, as which they are
    counted here, are zeros."""
    b = tl.program_id(0).to(tl.int64)
    s = owner(cu_idx, S + 1, b, BLOCK_Q, 1)
    start = tl.load(cu_idx + s).to(tl.int64)
    stop = tl.load(cu_idx + s + 1, mask=s < S, other=T).to(tl.int64)
    length = tl.load(lengths_idx + s, mask=s < S, other=0).to(tl.int64)
    own = b - start // BLOCK_Q - s
    first, context = own * BLOCK_Q, length - (stop - start)
    tokens = tl.minimum(stop - start - first, BLOCK_Q)
    end = tl.where(length > 0, context + first + tokens, 0)
    place = tl.zeros((BLOCK_S,), tl.int64)
    count = tl.zeros((BLOCK_S,), tl.int64)
    for at in range(0, S + 1, BLOCK_S):
        i = at + tl.arange(0, BLOCK_S)
        before = tl.load(cu_idx + i, mask=i <= S, other=T).to(tl.int64)
        after = tl.load(cu_idx + i + 1, mask=i < S, other=T).to(tl.int64)
        keys = tl.load(lengths_idx + i, mask=i < S, other=0).to(tl.int64)
        new = after - before
        blocks = (new + BLOCK_Q - 1) // BLOCK_Q
        seen = end - (keys - new)  # this block's last key, as a number of the other's new tokens
        more = tl.where(seen < 0, blocks, tl.where(seen < new, blocks - seen // BLOCK_Q, 0))
        same = (seen > 0) & ((seen == new) | ((seen < new) & (seen % BLOCK_Q == 0)))
        place += tl.where(keys > 0, more + ((i < s) & same).to(tl.int64), 0)
        count += tl.where(keys > 0, blocks, 0)
    if (tokens > 0) & (length > 0):
        row = work_ptr + tl.sum(place) * 8
        tl.store(row, (start + first).to(tl.int32))
        tl.store(row + 1, (context + first).to(tl.int32))
        tl.store(row + 2, (context + first + tokens).to(tl.int32))
        tl.store(row + 3, s.to(tl.int32))
        tl.store(row + 4, tokens.to(tl.int32))
    else:
        column = tl.arange(0, 1024)
        for begin in range(0, tl.maximum(tokens, 0).to(tl.int32) * WIDTH, 1024):
            zeros = tl.zeros((1024,), out_ptr.dtype.element_ty)
            there = (start + first) * WIDTH + begin + column
            tl.store(out_ptr + there, zeros, mask=begin + column < tokens * WIDTH)
    if b == 0:
        tl.store(count_ptr, tl.sum(count).to(tl.int32))


def suits_roles(case: Case) -> bool:
    """Whether calls of these axes have this form; `has_roles` decides."""
    whole = case.page % BOX.value == 0 and ROWS.value % (case.H // case.Hkv) == 0
    return whole and case.Dh == WIDTH and "fp32" not in case


def has_roles(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether a call may take this form, where the tile asks for it: compute capability 9.0, heads
    of 128 numbers in bf16 or fp16, 1 to 64 of them a KV head and a power of two, pages of a
    multiple of 64 keys behind each other, and what TMA can read. fp8 caches as they are widened."""
    if target(q.device) != 90 or q.shape[0] == 0 or q.dtype not in DTYPES:
        return False
    (_, heads, width), (_, page, kv_heads, _) = q.shape, k_cache.shape
    fits = suits_roles(Case(H=heads, Hkv=kv_heads, Dh=width, page=page))
    if not fits or not _is_readable(q, *q.stride()[:2]):
        return False
    return k_cache.dtype != q.dtype or all(
        c.stride(0) == page * c.stride(1) and c.stride(2) == WIDTH and _is_readable(c, c.stride(1))
        for c in (k_cache, v_cache)
    )


def _is_readable(v: torch.Tensor, *strides: int) -> bool:
    """By TMA: 16 bytes of alignment."""
    return v.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)


def attend_by_roles(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    pages: torch.Tensor,
    cu: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """out [T, Hq, Dh] of operands as `attend_prefill` has them, of which `has_roles` holds."""
    (T, Hq, D), (_, page, heads, _), S = q.shape, k_cache.shape, lengths.shape[0]
    group, where = Hq // heads, q.device
    tokens = ROWS.value // group  # of a role
    rows = T // (ROLES * tokens) + S + 1
    work = torch.empty((rows, WORK.value), dtype=torch.int32, device=where)
    count = torch.empty((1,), dtype=torch.int32, device=where)
    out = torch.empty(q.shape, dtype=q.dtype, device=where)
    launch(
        _plan_items, (rows,), work, count, out, cu, lengths, S, T, WIDTH=Hq * D,
        BLOCK_Q=ROLES * tokens, BLOCK_S=128, num_warps=1,
    )  # fmt: skip
    q_desc = described(q, q.shape, q.stride(), (tokens, group, D))
    launch(
        _attend_roles, (min(rows * heads, device.info(where).sms),), q_desc, _keys(k_cache),
        _keys(v_cache), out, work, count, pages, k_scale, v_scale, scale * LOG2_E, pages.stride(0),
        HEADS=heads, GROUP=group, D=D, PAGE=page, BLOCK_N=BLOCK_N, STAGES=STAGES, ROLES=ROLES,
        ROW_REGISTERS=ROW_REGISTERS, LOAD_REGISTERS=LOAD_REGISTERS, num_warps=4, maxnreg=128,
    )  # fmt: skip
    return out


def _keys(cache: torch.Tensor) -> Described:
    """A cache as a matrix [keys, heads * width] that is read in boxes of one head."""
    pages, page, heads, width = cache.shape
    shape = (pages * page, heads * width)
    return described(cache, shape, (cache.stride(1), 1), (BOX.value, width))
