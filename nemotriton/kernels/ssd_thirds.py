"""The fused scan for Hopper with three output roles, in Triton's Gluon dialect.

Like `ssd_hopper.py`, whose tiles, tables and barriers it shares, but what an output role takes is
half a chunk: a task. Its number T = 2 turn + half, counted over all items of the program, says who
does it: role T % 3. So a role holds one accumulator and one triangle at a time, in 112 registers
without a spill, and three roles hide what two could not: the chains of dependent instructions.

    load x, B   1 warp    TMA of x, B and the tables, three and two deep; initial states
    load C      1 warp    TMA of the half tile of C of each task, a slot for each output role
    tails       1 warp    zeros behind short chunks, while the loads go on
    state       4 warps   as before; (x w)^T B in PARTS steps, whose left operands are few registers
    output      4 warps   three times: y = 2^cum (C h^T) + (C B^T . decay) x + D x of a task

Whoever waits on a barrier meets every phase of it: stage s of x is read by the same two output
roles each time (T % 3 and turn % 3 have one period); h_full is by T % 6, for a role may have two
states before it that it has not looked at.
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

from nemotriton.kernels.ssd_blocks import WEIGHTED
from nemotriton.kernels.ssd_hopper import (
    ACC,
    B_STAGES,
    HALF,
    STATE,
    STATE_LEFT,
    WORK,
    X_STAGES,
    L,
    N,
    P,
    _barriers,
    _decayed_rows,
    _item,
    _parity,
    _store_rows,
    _triangle,
    _zero_pad,
    _zero_tail,
)

PARTS = gl.constexpr(4)


@gluon.jit
def _following(work_idx, item, total, H):
    """As `_item`, of the program's next item, or of the last one there is."""
    return _item(work_idx, gl.minimum(item + gl.num_programs(0), total - 1), H)


# ------------------------------------------------------------------------------------- output role
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
    mbarrier.wait(C_full.index(me), _parity(T, 3))
    mbarrier.wait(h_full.index(T % 6), _parity(T, 6))
    hT = h_tiles.index(turn & 1).permute((1, 0))
    acc = gl.zeros((HALF, P), gl.float32, ACC)
    acc = warpgroup_mma(C_tiles.index(me), hT, acc, use_acc=False, is_async=True)
    mbarrier.wait(x_full.index(stage), _parity(turn, X_STAGES))
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
def _output_role(me: gl.constexpr, where, tiles, bars, H: gl.constexpr, G: gl.constexpr):
    """Tasks T of which T % 3 is `me`."""
    work_idx, chunks_idx, scores_ptr, D_ptr, y_desc, y_ptr, total = where
    done = 0
    c0, n, h = _item(work_idx, gl.program_id(0), H)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        next_c0, next_n, next_h = _following(work_idx, item, total, H)
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
        for T in range(begin, end, 3):
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
    mbarrier.wait(x_full.index(stage), _parity(turn, X_STAGES))
    xw = _weighted_part(x, weights, 0)
    state = state * gl.exp2(total_decay)
    mbarrier.wait(B_full.index(B_stage), _parity(taken, B_STAGES))
    state = warpgroup_mma(xw, B.slice(0, size), state, is_async=True)
    for part in gl.static_range(1, PARTS):
        following = _weighted_part(x, weights, part)
        state, xw = warpgroup_mma_wait(0, deps=(state, xw))
        state = warpgroup_mma(following, B.slice(part * size, size), state, is_async=True)
        xw = following
    mbarrier.arrive(x_free.index(stage))
    state, xw = warpgroup_mma_wait(0, deps=(state, xw))
    mbarrier.arrive(B_free.index(B_stage))
    return state


@gluon.jit
def _state_role(where, tiles, bars, H: gl.constexpr):
    work_idx, decays_ptr, state_desc, state_ptr, total, chunks = where
    x_tiles, weight_tiles, B_tiles, h_tiles = tiles
    x_full, x_free, B_full, B_free, h_full, h_free = bars
    done = 0
    taken = 0  # stages of B: chunks and initial states
    c0, n, h = _item(work_idx, gl.program_id(0), H)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        next_c0, next_n, next_h = _following(work_idx, item, total, H)
        at = work_idx + item // H * WORK
        slot, reads, writes = gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)
        table = decays_ptr + (h.to(gl.int64) * chunks * (2 * L) + (L - 1))
        state = gl.zeros((P, N), gl.float32, STATE)
        if reads > 0:
            stage = taken % B_STAGES
            mbarrier.wait(B_full.index(stage), _parity(taken, B_STAGES))
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
            mbarrier.wait(h_free.index(mine), _parity(turn, 2) ^ 1)
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


# ------------------------------------------------------------------------------------------ loaders
@gluon.jit
def _load_role(where, tables, tiles, bars, H: gl.constexpr, G: gl.constexpr):
    """x, B and the tables; of a short chunk to the barrier that `_tail_role` waits on."""
    work_idx, chunks_idx, state_desc, total, chunks = where
    x_desc, B_desc, decays_desc, weights_desc = tables
    x_tiles, decay_tiles, weight_tiles, B_tiles = tiles
    x_full, x_free, B_full, B_free, short_full = bars
    x_bytes: gl.constexpr = L * P * 2 + 3 * L * 4
    B_bytes: gl.constexpr = L * N * 2
    done = 0
    taken = 0
    shorts = 0
    c0, n, h = _item(work_idx, gl.program_id(0), H)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        next_c0, next_n, next_h = _following(work_idx, item, total, H)
        at = work_idx + item // H * WORK
        slot, reads = gl.load(at + 2), gl.load(at + 3)
        g = h // (H // G)
        if reads > 0:
            stage = taken % B_STAGES
            mbarrier.wait(B_free.index(stage), _parity(taken, B_STAGES) ^ 1)
            mbarrier.expect(B_full.index(stage), state_desc.block_type.nbytes)
            tile = B_tiles.index(stage)._reinterpret(state_desc.dtype, [P, N], state_desc.layout)
            row = (slot * H + h) * P
            tma.async_copy_global_to_shared(state_desc, [row, 0], B_full.index(stage), tile)
            taken += 1
        for i in range(n):
            c, turn = c0 + i, done + i
            first, tokens = gl.load(chunks_idx + c * 3 + 1), gl.load(chunks_idx + c * 3 + 2)
            stage, B_stage, row = turn % X_STAGES, taken % B_STAGES, (h * chunks + c) * (2 * L)
            x_bar, B_bar = x_full.index(stage), B_full.index(B_stage)
            if tokens < L:
                x_bar = short_full.index(shorts % X_STAGES)
                B_bar = x_bar
                shorts += 1
                mbarrier.wait(B_free.index(B_stage), _parity(taken, B_STAGES) ^ 1)
                mbarrier.expect(x_bar, x_bytes + B_bytes)
            mbarrier.wait(x_free.index(stage), _parity(turn, X_STAGES) ^ 1)
            if tokens == L:
                mbarrier.expect(x_bar, x_bytes)
            tma.async_copy_global_to_shared(x_desc, [first, h * P], x_bar, x_tiles.index(stage))
            tma.async_copy_global_to_shared(decays_desc, [row], x_bar, decay_tiles.index(stage))
            tma.async_copy_global_to_shared(weights_desc, [row], x_bar, weight_tiles.index(stage))
            if tokens == L:
                mbarrier.wait(B_free.index(B_stage), _parity(taken, B_STAGES) ^ 1)
                mbarrier.expect(B_bar, B_bytes)
            tma.async_copy_global_to_shared(B_desc, [first, g * N], B_bar, B_tiles.index(B_stage))
            taken += 1
        done += n
        c0, n, h = next_c0, next_n, next_h


@gluon.jit
def _tail_role(where, tiles, bars, H: gl.constexpr):
    """Zeros behind the last token of short chunks: what lies there is another sequence's, and 0
    times NaN is not 0."""
    work_idx, chunks_idx, total = where
    x_tiles, B_tiles = tiles
    x_full, B_full, short_full = bars
    done = 0
    taken = 0
    shorts = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        c0, n, _ = _item(work_idx, item, H)
        taken += gl.load(work_idx + item // H * WORK + 3)
        for i in range(n):
            tokens = gl.load(chunks_idx + (c0 + i) * 3 + 2)
            if tokens < L:
                stage, B_stage = (done + i) % X_STAGES, (taken + i) % B_STAGES
                mbarrier.wait(short_full.index(shorts % X_STAGES), _parity(shorts, X_STAGES))
                _zero_tail(x_tiles.index(stage), L, P, tokens)
                _zero_tail(B_tiles.index(B_stage), L, N, tokens)
                fence_async_shared()
                mbarrier.arrive(B_full.index(B_stage))
                mbarrier.arrive(x_full.index(stage))
                shorts += 1
        done += n
        taken += n


@gluon.jit
def _load_C_role(where, C_desc, C_tiles, C_full, C_free, H: gl.constexpr, G: gl.constexpr):
    work_idx, chunks_idx, total = where
    task = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        c0, n, h = _item(work_idx, item, H)
        g = h // (H // G)
        for i in range(n):
            first = gl.load(chunks_idx + (c0 + i) * 3 + 1)
            for half in gl.static_range(2):
                T = task + 2 * i + half
                slot = T % 3
                mbarrier.wait(C_free.index(slot), _parity(T, 3) ^ 1)
                mbarrier.expect(C_full.index(slot), HALF * N * 2)
                tma.async_copy_global_to_shared(
                    C_desc, [first + half * HALF, g * N], C_full.index(slot), C_tiles.index(slot)
                )
        task += 2 * n


# ------------------------------------------------------------------------------------- the program
@gluon.jit
def _wait_for_tables():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["total", "chunks"])
def _scan_thirds(
    x_desc, B_desc, C_desc, decays_desc, weights_desc, y_desc, state_desc,
    scores_ptr, decays_ptr, D_ptr, y_ptr, state_ptr, work_idx, chunks_idx,
    total, chunks, H: gl.constexpr, G: gl.constexpr, PDL: gl.constexpr,
    OUTPUT_REGISTERS: gl.constexpr, STATE_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
):  # fmt: skip
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P, N], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, L, P], x_desc.layout)
    decay_tiles = gl.allocate_shared_memory(gl.float32, [X_STAGES, 2 * L], decays_desc.layout)
    weight_tiles = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, 2 * L], weights_desc.layout)
    B_tiles = gl.allocate_shared_memory(gl.bfloat16, [B_STAGES, L, N], B_desc.layout)
    C_tiles = gl.allocate_shared_memory(gl.bfloat16, [3, HALF, N], C_desc.layout)
    h_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, P, N], h_layout)
    y0 = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    y1 = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    y2 = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    x_full, x_free = _barriers(X_STAGES, 1), _barriers(X_STAGES, 3)
    B_full, B_free = _barriers(B_STAGES, 1), _barriers(B_STAGES, 1)
    C_full, C_free = _barriers(3, 1), _barriers(3, 1)
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
            (_output_role, (0, output, tiles0, output_bars, H, G)),
            (_output_role, (1, output, tiles1, output_bars, H, G)),
            (_output_role, (2, output, tiles2, output_bars, H, G)),
            (_state_role, (state, state_tiles, state_bars, H)),
            (_load_role, (load, tables, load_tiles, load_bars, H, G)),
            (_load_C_role, (tail, C_desc, C_tiles, C_full, C_free, H, G)),
            (_tail_role, (tail, (x_tiles, B_tiles), (x_full, B_full, short_full), H)),
        ],
        [4, 4, 4, 1, 1, 1],
        [
            OUTPUT_REGISTERS, OUTPUT_REGISTERS, STATE_REGISTERS,
            LOAD_REGISTERS, LOAD_REGISTERS, LOAD_REGISTERS,
        ],
    )  # fmt: skip
