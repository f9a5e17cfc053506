"""The fused scan for Hopper: the second launch by warp roles, in Triton's Gluon dialect.

The plain form (`ssd_blocks.py`) is bound by latency: four warps do everything one after the other.
Here a persistent program of 19 warps walks over (sequence, head) items with roles that meet at
mbarriers only:

    output   4 warps, three times: y = 2^cum (C h^T) + (C B^T . decay) x + D x of half a chunk
    state    4 warps: h <- 2^total h + (x w)^T B in fp32 registers; before each chunk h goes to
             shared memory as bf16; runs ahead of the outputs
    loads    1 warp: TMA of x, B and the tables of each chunk, three and two deep; before an item,
             its initial state through a stage of B
    loads C  1 warp: TMA of the rows of C of each half chunk, a slot for each output role
    tails    1 warp: zeros behind the last token of short chunks, while the loads go on

Half a chunk is a task. Its number T = 2 turn + half, counted over all items of the program, says
who does it: output role T % 3. So a role holds one accumulator and one triangle at a time, in 112
registers without a spill, and three roles hide behind each other what is a chain of dependent
instructions in each: with whole chunks and two roles the scan took 1.5 times as long.

Chunks have 128 tokens, their triangle of 16 x 16 blocks is stored in the order in which a warp
holds the left operand of a product (`_prepare_fragments`), so that it goes from memory into operand
registers without shared memory, masks or conversions. `x w` takes w as the sum of two bf16.

Rows of the chunk table with fewer tokens are loaded whole, too: their foreign rows are zeroed in
shared memory (0 times NaN is not 0), and their y is stored by masked stores. Names of barriers: the
tile they guard, then _full (producer arrives) or _free (consumers arrive). Waits alternate in
parity, so whoever waits on a barrier must meet every phase of it: stage s of x is read by the same
two output roles each time (T % 3 and turn % 3 have one period), and h_full is by T % 6, for a role
may have two states before it that it has not looked at.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nemotriton.kernels.ssd_blocks import DECAYED, WEIGHTED
from nemotriton.kernels.ssd_loads import (
    B_STAGES,
    HALF,
    OUTPUTS,
    PARTS,
    WORK,
    X_STAGES,
    L,
    N,
    P,
    following_row,
    item_row,
    load_C_role,
    load_role,
    parity,
    tail_role,
)

# accumulators of y [64, P] and of the state [P, N], and the left operands of their products
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC_LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
STATE_LEFT = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))


# ------------------------------------------------------------------------------------- output role
@gluon.jit
def _triangle(scores_ptr, cell, half: gl.constexpr, blocks: gl.constexpr):
    """Rows 64 half .. + 64 of the triangle in fragment order, [4 warps, blocks * 256]."""
    order: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    w = half * 4 + gl.arange(0, 4, layout=gl.SliceLayout(1, order))
    e = gl.arange(0, blocks * 256, layout=gl.SliceLayout(0, order))
    at = scores_ptr + cell.to(gl.int64) * (L * L) + w[:, None] * (L * 16) + e[None, :]
    return gl.load(at, mask=(e // 256)[None, :] <= w[:, None], other=0.0)


@gluon.jit
def _decayed_rows(scores, decays, half: gl.constexpr, blocks: gl.constexpr):
    """The triangle times 2^(cum - fold) as the left operand [64, blocks * 16]."""
    scores = scores.reshape((4, blocks, 8, 4, 2, 2, 2)).permute((0, 5, 2, 1, 4, 3, 6))
    scores = gl.convert_layout(scores.reshape((64, blocks * 16)), ACC_LEFT)  # renames registers
    cum = decays.slice(half * HALF, HALF).load(gl.SliceLayout(1, ACC_LEFT))
    fold = decays.slice(L, blocks * 16).load(gl.SliceLayout(0, ACC_LEFT))
    return gl.inline_asm_elementwise(
        DECAYED,
        "=r,r,f,f,f,f",
        [scores, cum[:, None], fold[None, :]],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _store_rows(acc, tile, y_desc, y_ptr, first, tokens, h, half: gl.constexpr, H: gl.constexpr):
    """Half a chunk's y: by TMA, or masked where a TMA store would reach the next sequence."""
    y = acc.to(gl.bfloat16)
    if tokens == L:
        tma.store_wait(0)  # the tile's previous store has been read
        tile.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [first + half * HALF, h * P], tile)
    else:
        m = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ACC))
        p = gl.arange(0, P, layout=gl.SliceLayout(0, ACC))
        at = y_ptr + (first + m).to(gl.int64)[:, None] * (H * P) + h * P + p[None, :]
        gl.store(at, y, mask=(m < tokens)[:, None])


@gluon.jit
def _zero_pad(y_ptr, start, stop, h, H: gl.constexpr):
    """Zeros in the rows of a pad."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, HALF, layout=gl.SliceLayout(1, rows))
    p = gl.arange(0, P, layout=gl.SliceLayout(0, rows))
    for first in range(start, stop, HALF):
        at = y_ptr + (first + m).to(gl.int64)[:, None] * (H * P) + h * P + p[None, :]
        zeros = gl.zeros((HALF, P), gl.bfloat16, rows)
        gl.store(at, zeros, mask=(first + m < stop)[:, None])


@gluon.jit
def _task(
    me: gl.constexpr, half: gl.constexpr, T, cell, scores_ptr, D, y_desc, y_ptr, first, tokens, h,
    tiles, bars, H: gl.constexpr,
):  # fmt: skip
    """y of half a chunk."""
    x_tiles, decay_tiles, C_tiles, h_tiles, y_tile = tiles
    x_full, x_free, C_full, C_free, h_full, h_free = bars
    blocks: gl.constexpr = 4 * (1 + half)
    turn = T // 2
    stage = turn % X_STAGES
    scores = _triangle(scores_ptr, cell, half, blocks)
    mbarrier.wait(C_full.index(me), parity(T, OUTPUTS))
    mbarrier.wait(h_full.index(T % 6), parity(T, 6))
    hT = h_tiles.index(turn & 1).permute((1, 0))
    acc = gl.zeros((HALF, P), gl.float32, ACC)
    acc = warpgroup_mma(C_tiles.index(me), hT, acc, use_acc=False, is_async=True)
    mbarrier.wait(x_full.index(stage), parity(turn, X_STAGES))
    x, decays = x_tiles.index(stage), decay_tiles.index(stage)
    s = _decayed_rows(scores, decays, half, blocks)
    scale = gl.exp2(decays.slice(half * HALF, HALF).load(gl.SliceLayout(1, ACC)))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(C_free.index(me))
    mbarrier.arrive(h_free.index(turn & 1))
    acc = warpgroup_mma(s, x.slice(0, blocks * 16), acc * scale[:, None], is_async=True)
    skip = x.slice(half * HALF, HALF).load(ACC)
    # operands in registers stay named until their product is over, or they may be overwritten
    acc, s = warpgroup_mma_wait(0, deps=(acc, s))
    mbarrier.arrive(x_free.index(stage))
    acc += skip.to(gl.float32) * D
    _store_rows(acc, y_tile, y_desc, y_ptr, first, tokens, h, half, H)


@gluon.jit
def _output_role(
    me: gl.constexpr, where, tiles, bars, H: gl.constexpr, G: gl.constexpr, STEP: gl.constexpr
):
    """Tasks T of which T % 3 is `me`."""
    work_idx, chunks_idx, scores_ptr, D_ptr, y_desc, y_ptr, total = where
    done = 0
    c0, n, h = item_row(work_idx, gl.program_id(0), H, STEP)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        next_c0, next_n, next_h = following_row(work_idx, item, total, H, STEP)
        if me == 0:
            at = work_idx + item // H * WORK
            if gl.load(at + 2) < 0:
                _zero_pad(y_ptr, gl.load(at + 5), gl.load(at + 6), h, H)
        g = h // (H // G)
        D = gl.load(D_ptr + h).to(gl.float32)
        begin, end = 2 * done + (done + me) % 3, 2 * (done + n)
        # one task ahead: what is loaded where it is needed would be waited for
        at = chunks_idx + 3 * (c0 + gl.minimum(begin // 2 - done, gl.maximum(n - 1, 0)))
        first, tokens = gl.load(at + 1), gl.load(at + 2)
        for T in range(begin, end, OUTPUTS):
            cell = (c0 + (T // 2 - done)) * G + g
            at = chunks_idx + 3 * (c0 + gl.minimum((T + 3) // 2 - done, n - 1))
            next_first, next_tokens = gl.load(at + 1), gl.load(at + 2)
            if T % 2 == 0:
                _task(
                    me, 0, T, cell, scores_ptr, D, y_desc, y_ptr, first, tokens, h, tiles, bars, H
                )
            else:
                _task(
                    me, 1, T, cell, scores_ptr, D, y_desc, y_ptr, first, tokens, h, tiles, bars, H
                )
            first, tokens = next_first, next_tokens
        done += n
        c0, n, h = next_c0, next_n, next_h
    tma.store_wait(0)


# -------------------------------------------------------------------------------------- state role
@gluon.jit
def _weighted_part(x, weights, part: gl.constexpr):
    """(x w)^T of a part of a chunk as the left operand [P, L / PARTS]."""
    size: gl.constexpr = L // PARTS
    xt = x.slice(part * size, size).permute((1, 0)).load(STATE_LEFT)
    high = weights.slice(part * size, size).load(gl.SliceLayout(0, STATE_LEFT))
    low = weights.slice(L + part * size, size).load(gl.SliceLayout(0, STATE_LEFT))
    return gl.inline_asm_elementwise(
        WEIGHTED,
        "=r,r,r,r",
        [xt, high[None, :], low[None, :]],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _advance(state, turn, taken, total_decay, x_tiles, weight_tiles, B_tiles, bars):
    """The state behind a chunk."""
    x_full, x_free, B_full, B_free = bars
    size: gl.constexpr = L // PARTS
    stage, B_stage = turn % X_STAGES, taken % B_STAGES
    x, weights, B = x_tiles.index(stage), weight_tiles.index(stage), B_tiles.index(B_stage)
    mbarrier.wait(x_full.index(stage), parity(turn, X_STAGES))
    xw = _weighted_part(x, weights, 0)
    state = state * gl.exp2(total_decay)
    mbarrier.wait(B_full.index(B_stage), parity(taken, B_STAGES))
    state = warpgroup_mma(xw, B.slice(0, size), state, is_async=True)
    for part in gl.static_range(1, PARTS):
        following = _weighted_part(x, weights, part)
        state = warpgroup_mma(following, B.slice(part * size, size), state, is_async=True)
        state, xw = warpgroup_mma_wait(1, deps=(state, xw))  # the part before has been multiplied
        xw = following
    mbarrier.arrive(x_free.index(stage))
    state, xw = warpgroup_mma_wait(0, deps=(state, xw))
    mbarrier.arrive(B_free.index(B_stage))
    return state


@gluon.jit
def _state_role(where, tiles, bars, H: gl.constexpr, STEP: gl.constexpr):
    work_idx, decays_ptr, state_desc, state_ptr, total, chunks = where
    x_tiles, weight_tiles, B_tiles, h_tiles = tiles
    x_full, x_free, B_full, B_free, h_full, h_free = bars
    done = 0
    taken = 0  # stages of B: chunks and initial states
    c0, n, h = item_row(work_idx, gl.program_id(0), H, STEP)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        next_c0, next_n, next_h = following_row(work_idx, item, total, H, STEP)
        at = work_idx + item // H * WORK
        slot, reads, writes = gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)
        table = decays_ptr + (h.to(gl.int64) * chunks * (2 * L) + (L - 1))
        state = gl.zeros((P, N), gl.float32, STATE)
        if reads > 0:
            stage = taken % B_STAGES
            mbarrier.wait(B_full.index(stage), parity(taken, B_STAGES))
            tile = B_tiles.index(stage)._reinterpret(state_desc.dtype, [P, N], state_desc.layout)
            state = tile.load(STATE).to(gl.float32)
            fence_async_shared()
            mbarrier.arrive(B_free.index(stage))
            taken += 1
        total_decay = gl.load(table + c0 * (2 * L))
        for i in range(n):
            turn = done + i
            mine = turn & 1
            following = gl.load(table + (c0 + gl.minimum(i + 1, n - 1)) * (2 * L))
            mbarrier.wait(h_free.index(mine), parity(turn, 2) ^ 1)
            h_tiles.index(mine).store(state.to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(h_full.index(2 * turn % 6))
            mbarrier.arrive(h_full.index((2 * turn + 1) % 6))
            state = _advance(
                state, turn, taken, total_decay, x_tiles, weight_tiles, B_tiles,
                (x_full, x_free, B_full, B_free),
            )  # fmt: skip
            total_decay = following
            taken += 1
        if writes > 0:
            p = gl.arange(0, P, layout=gl.SliceLayout(1, STATE))
            q = gl.arange(0, N, layout=gl.SliceLayout(0, STATE))
            cell = state_ptr + (slot.to(gl.int64) * H + h) * (P * N)
            inner = p[:, None] * N + q[None, :]
            gl.store(cell + inner, state.to(state_ptr.dtype.element_ty))
        done += n
        c0, n, h = next_c0, next_n, next_h


# ------------------------------------------------------------------------------------- the program
@gluon.jit
def _barriers(slots: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(slots):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def _wait_for_tables():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["total", "chunks"])
def _scan_roles(
    x_desc, B_desc, C_desc, decays_desc, weights_desc, y_desc, state_desc,
    scores_ptr, decays_ptr, D_ptr, y_ptr, state_ptr, work_idx, chunks_idx,
    total, chunks, H: gl.constexpr, G: gl.constexpr, STEP: gl.constexpr, PDL: gl.constexpr,
    OUTPUT_REGISTERS: gl.constexpr, STATE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P, N], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, L, P], x_desc.layout)
    decay_tiles = gl.allocate_shared_memory(gl.float32, [X_STAGES, 2 * L], decays_desc.layout)
    weight_tiles = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, 2 * L], weights_desc.layout)
    B_tiles = gl.allocate_shared_memory(gl.bfloat16, [B_STAGES, L, N], B_desc.layout)
    C_tiles = gl.allocate_shared_memory(gl.bfloat16, [OUTPUTS, HALF, N], C_desc.layout)
    h_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, P, N], h_layout)
    y0 = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    y1 = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    y2 = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    x_full, x_free = _barriers(X_STAGES, 1), _barriers(X_STAGES, 3)
    B_full, B_free = _barriers(B_STAGES, 1), _barriers(B_STAGES, 1)
    C_full, C_free = _barriers(OUTPUTS, 1), _barriers(OUTPUTS, 1)
    h_full, h_free = _barriers(6, 1), _barriers(2, 2)
    short_full = _barriers(X_STAGES, 1)
    fence_async_shared()
    if PDL:
        _wait_for_tables()
    output = (work_idx, chunks_idx, scores_ptr, D_ptr, y_desc, y_ptr, total)
    output_bars = (x_full, x_free, C_full, C_free, h_full, h_free)
    tiles0 = (x_tiles, decay_tiles, C_tiles, h_tiles, y0)
    tiles1 = (x_tiles, decay_tiles, C_tiles, h_tiles, y1)
    tiles2 = (x_tiles, decay_tiles, C_tiles, h_tiles, y2)
    state = (work_idx, decays_ptr, state_desc, state_ptr, total, chunks)
    state_tiles = (x_tiles, weight_tiles, B_tiles, h_tiles)
    state_bars = (x_full, x_free, B_full, B_free, h_full, h_free)
    tail = (work_idx, chunks_idx, total)
    load = (work_idx, chunks_idx, state_desc, total, chunks)
    tables = (x_desc, B_desc, decays_desc, weights_desc)
    load_tiles = (x_tiles, decay_tiles, weight_tiles, B_tiles)
    load_bars = (x_full, x_free, B_full, B_free, short_full)
    gl.warp_specialize(
        [
            (_output_role, (0, output, tiles0, output_bars, H, G, STEP)),
            (_output_role, (1, output, tiles1, output_bars, H, G, STEP)),
            (_output_role, (2, output, tiles2, output_bars, H, G, STEP)),
            (_state_role, (state, state_tiles, state_bars, H, STEP)),
            (load_role, (load, tables, load_tiles, load_bars, H, G, STEP)),
            (load_C_role, (tail, C_desc, C_tiles, C_full, C_free, H, G, STEP)),
            (tail_role, (tail, (x_tiles, B_tiles), (x_full, B_full, short_full), H, STEP)),
        ],
        [4, 4, 4, 1, 1, 1],
        [
            OUTPUT_REGISTERS, OUTPUT_REGISTERS, STATE_REGISTERS,
            LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS,
        ],
    )  # fmt: skip
