"""Attention of prompts on Hopper: the kernel by warp roles, in Triton's Gluon dialect.

In the plain form (`attention.py`) eight warps multiply and take exponentials in turn. Here, in the
manner of FlashAttention-3 (Shah et al. 2024), a persistent program walks over items, a block of
rows times a KV head each, with roles that meet at mbarriers only:

    rows     4 warps, three times: 64 rows of the block, which are (token, query head) pairs of the
             KV head's group. A step asks for the scores of block j of keys and for the sum of block
             j - 1 together; the softmax of j runs while the latter is still under way. With an
             item's last sum go the first scores of the next one, so that its rows are stored
             meanwhile
    loads K  1 warp: TMA of the rows of q, and of the keys
    loads V  1 warp: TMA of the values
    tails    1 warp: zeros behind an item's last key (0 times NaN is not 0)

The rows of q have one slot: of two, ptxas 12.8 reads the wrong one in the second loop unless the
slot's number is hidden from it (bench/README.md, compiler hazards).

Keys are summed in blocks of BLOCK_N from the sequence's first; a block that a row does not see
changes no bit of it, so how a prompt is cut does not either. Sums are scaled to a row's largest
score when that has grown by more than RISE since they last were, as in FlashAttention-4: seldom.

Keys come in boxes of 64, which lie in one page. Rows of the work table, most keys first
(`attention_roles._plan_items`): first token's row in q, its position, keys, sequence, tokens, 0, 0,
0. Barriers are named for the tile they guard, then _full (producer arrives) or _free (consumers
arrive).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nemotriton.kernels.attention_loads import (
    ROWS,
    item_count,
    item_row,
    load_k_role,
    load_v_role,
    parity,
    tail_role,
)

RISE = gl.constexpr(8.0)  # powers of two: weights of up to 256, which fp16 holds
ROUND_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
ROUND_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
FUSED = gl.constexpr("fma.rn.f32 $0, $1, $2, $3;")
# of a thread's 64 sums, of two rows (elements 0, 1 and 2, 3 of every four), times those rows'
# decays, which operands 128 and up hold; nothing, where no row of the warp has another than 1
SCALE = gl.constexpr(
    "{ .reg .pred p; setp.neu.f32 p, $128, 0f3F800000; @!p setp.neu.f32 p, $130, 0f3F800000; "
    "vote.sync.any.pred p, p, -1; @!p bra KEPT; "
    + " ".join(f"mul.f32 ${i}, ${i}, ${128 + i};" for i in range(64))
    + " KEPT: }"
)
SCALE_CONSTRAINTS = gl.constexpr(",".join(["=f"] * 64 + [str(i) for i in range(64)] + ["f"] * 64))


# ------------------------------------------------------------------------------------ role of rows
@gluon.jit
def _folded(v):
    """v [64, N] as [64, 4, N / 4]: four chains of dependent instructions instead of one."""
    N: gl.constexpr = v.shape[1]
    return v.reshape((ROWS, 4, N // 4))


@gluon.jit
def _rounded(p, kind: gl.constexpr):
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            ROUND_BF16, "=r,f,f", [p], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            ROUND_FP16, "=r,f,f", [p], dtype=gl.float16, is_pure=False, pack=2
        )


@gluon.jit
def _softmax(
    raw, peak, total, scale, n0, position, MASKED: gl.constexpr, kind: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """A step of the online softmax: weights, peak, total, decay of what was.

    As assembly with side effects (`is_pure`) its ends stay before the wait that follows: compilers
    would rather have them behind the product that runs meanwhile."""
    rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    N: gl.constexpr = raw.shape[1]
    if MASKED:
        n = n0 + gl.arange(0, N, layout=gl.SliceLayout(0, SCORES))
        raw = gl.where(n[None, :] <= position[:, None], raw, float("-inf"))
    top = gl.convert_layout(gl.max(gl.max(_folded(raw), 1), 1), rows) * scale
    higher = gl.where(top > peak + RISE, top, peak)
    decay = gl.exp2(peak - higher)
    p = gl.exp2(gl.fma(raw, scale, -higher[:, None]))
    own = gl.convert_layout(gl.sum(gl.sum(_folded(p), 1), 1), rows)
    total = gl.inline_asm_elementwise(
        FUSED, "=f,f,f,f", [total, decay, own], dtype=gl.float32, is_pure=False, pack=1
    )
    return _rounded(p, kind), higher, total, decay


@gluon.jit
def _scaled(acc, decay):
    acc, decay = gl.broadcast(acc, decay[:, None])
    return gl.inline_asm_elementwise(
        SCALE, SCALE_CONSTRAINTS, [acc, decay], dtype=gl.float32, is_pure=False, pack=64
    )


@gluon.jit
def _step(
    acc, p, peak, total, scale, q, block, n0, position, k_tiles, v_tiles, bars,
    MASKED: gl.constexpr, SCORES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Scores of `block`, sum of the one before, whose weights are p."""
    k_full, k_free, v_full, v_free = bars
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    K_STAGES: gl.constexpr = k_tiles.shape[0]
    V_STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    stage, before = block % K_STAGES, (block - 1) % V_STAGES
    mbarrier.wait(k_full.index(stage), parity(block, K_STAGES))
    raw = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    k = k_tiles.index(stage).permute((1, 0))
    raw = warpgroup_mma(q, k, raw, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), parity(block - 1, V_STAGES))
    acc = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
    raw = warpgroup_mma_wait(1, deps=(raw,))
    mbarrier.arrive(k_free.index(stage))
    weights, peak, total, decay = _softmax(
        raw, peak, total, scale, n0, position, MASKED, k_tiles.dtype, SCORES
    )
    # passes at once; the assembler moves nothing over it, so that the softmax stays before the wait
    mbarrier.wait(v_full.index(before), parity(block - 1, V_STAGES))
    # operands in registers stay named until their product is over, or they may be overwritten
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(v_free.index(before))
    acc = _scaled(acc, gl.convert_layout(decay, gl.SliceLayout(1, ACC)))
    return acc, gl.convert_layout(weights, LEFT), peak, total  # renames registers


@gluon.jit
def _attend_item(
    raw, q, done, blocks, whole, position, scale, k_tiles, v_tiles, bars, SCORES: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Sums [64, D] but for the last block's, whose weights are p, and totals, over the keys of an
    item, of which `raw` are the first block's scores; all rows see its first `whole` blocks."""
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    D: gl.constexpr = k_tiles.shape[2]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    peak = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    weights, peak, total, _ = _softmax(
        raw, peak, total, scale, 0, position, True, k_tiles.dtype, SCORES
    )
    p = gl.convert_layout(weights, LEFT)
    acc = gl.zeros((ROWS, D), gl.float32, ACC)
    whole = gl.maximum(gl.minimum(whole, blocks), 1)
    for j in range(1, whole):
        acc, p, peak, total = _step(
            acc, p, peak, total, scale, q, done + j, j * BLOCK_N, position, k_tiles, v_tiles, bars,
            False, SCORES, ACC,
        )  # fmt: skip
    for j in range(whole, blocks):
        acc, p, peak, total = _step(
            acc, p, peak, total, scale, q, done + j, j * BLOCK_N, position, k_tiles, v_tiles, bars,
            True, SCORES, ACC,
        )  # fmt: skip
    return acc, p, gl.convert_layout(total, gl.SliceLayout(1, ACC))


@gluon.jit
def _store(
    out, out_ptr, first, h, tokens, me: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Rows of one role, tokens behind the sequence's last left out."""
    D: gl.constexpr = out.shape[1]
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, ACC))
    token = me * (ROWS // GROUP) + m // GROUP
    out_ptr += (first.to(gl.int64) * HEADS + h) * (GROUP * D)
    at = token * (HEADS * GROUP * D) + m % GROUP * D
    out = out.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + at[:, None] + d[None, :], out, mask=(token < tokens)[:, None])


@gluon.jit
def _item_fields(at):
    """First token's row and position, keys, tokens."""
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 4)


@gluon.jit
def _row_role(me: gl.constexpr, where, tiles, bars, GROUP: gl.constexpr, HEADS: gl.constexpr):
    work_idx, count_idx, out_ptr, scale, v_scale = where
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    D: gl.constexpr = k_tiles.shape[2]
    K_STAGES: gl.constexpr = k_tiles.shape[0]
    V_STAGES: gl.constexpr = v_tiles.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    token = me * (ROWS // GROUP) + m // GROUP
    q = q_tiles.index(me).reshape((ROWS, D))
    raw = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
    done = 0  # blocks of keys
    at, h = item_row(work_idx, 0, HEADS)
    first, begin, end, tokens = _item_fields(at)
    turns = item_count(count_idx, HEADS)
    if turns > 0:
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(k_full.index(0), 0)
        raw = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), raw, use_acc=False)
        mbarrier.arrive(k_free.index(0))
    for turn in range(turns):
        more = turn + 1 < turns
        # one item ahead: what is looked up where it is needed would be waited for
        at, next_h = item_row(work_idx, gl.minimum(turn + 1, turns - 1), HEADS)
        next_first, next_begin, next_end, next_tokens = _item_fields(at)
        blocks = (end + BLOCK_N - 1) // BLOCK_N
        acc, p, total = _attend_item(
            raw, q, done, blocks, (begin + 1) // BLOCK_N, begin + token, scale, k_tiles, v_tiles,
            (k_full, k_free, v_full, v_free), SCORES, ACC,
        )  # fmt: skip
        mbarrier.arrive(q_free.index(0))
        done += blocks
        # the last block's sum, and the next item's first scores while this one's rows are stored
        v_stage, k_stage = (done - 1) % V_STAGES, done % K_STAGES
        mbarrier.wait(v_full.index(v_stage), parity(done - 1, V_STAGES))
        acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
        if more:
            mbarrier.wait(q_full.index(0), (turn + 1) & 1)
            mbarrier.wait(k_full.index(k_stage), parity(done, K_STAGES))
        raw = gl.zeros((ROWS, BLOCK_N), gl.float32, SCORES)
        k = k_tiles.index(k_stage).permute((1, 0))  # behind the last item, whatever lies there
        raw = warpgroup_mma(q, k, raw, use_acc=False, is_async=True)
        acc, p = warpgroup_mma_wait(1, deps=(acc, p))
        mbarrier.arrive(v_free.index(v_stage))
        acc = acc * (v_scale / total)[:, None]
        _store(acc, out_ptr, first, h, tokens, me, GROUP, HEADS, ACC)
        raw = warpgroup_mma_wait(0, deps=(raw,))
        if more:
            mbarrier.arrive(k_free.index(k_stage))
        first, begin, end, tokens = next_first, next_begin, next_end, next_tokens
        h = next_h


# ------------------------------------------------------------------------------------- the program
@gluon.jit
def _barriers(slots: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(slots):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(do_not_specialize=["scale"])
def _attend_roles(
    q_desc, k_desc, v_desc, out_ptr, work_idx, count_idx, pages_idx, k_scale_ptr, v_scale_ptr,
    scale, pages_stride, HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, ROLES: gl.constexpr,
    ROW_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = k_desc.dtype
    q_tiles = gl.allocate_shared_memory(kind, [ROLES, ROWS // GROUP, GROUP, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, D], v_desc.layout)
    q_full, q_free = _barriers(1, 1), _barriers(1, ROLES)
    k_full, k_free = _barriers(STAGES, 1), _barriers(STAGES, ROLES)
    v_full, v_free = _barriers(STAGES, 1), _barriers(STAGES, ROLES)
    v_short = _barriers(STAGES, 1)
    fence_async_shared()
    if k_scale_ptr is not None:
        scale = scale * gl.load(k_scale_ptr)
    v_scale = scale * 0.0 + 1.0
    if v_scale_ptr is not None:
        v_scale = gl.load(v_scale_ptr)
    rows = (work_idx, count_idx, out_ptr, scale, v_scale)
    tiles = (q_tiles, k_tiles, v_tiles)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free)
    keys = (work_idx, count_idx, pages_idx, pages_stride)
    tables, k_bars = (q_desc, k_desc), (q_full, q_free, k_full, k_free)
    gl.warp_specialize(
        [
            (_row_role, (0, rows, tiles, bars, GROUP, HEADS)),
            (_row_role, (1, rows, tiles, bars, GROUP, HEADS)),
            (_row_role, (2, rows, tiles, bars, GROUP, HEADS)),
            (load_k_role, (keys, tables, (q_tiles, k_tiles), k_bars, GROUP, HEADS, PAGE)),
            (load_v_role, (keys, v_desc, v_tiles, (v_full, v_free, v_short), HEADS, PAGE)),
            (tail_role, ((work_idx, count_idx), v_tiles, (v_full, v_short), HEADS)),
        ],
        [4, 4, 1, 1, 1],
        [ROW_REGISTERS, ROW_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS],
    )  # fmt: skip
