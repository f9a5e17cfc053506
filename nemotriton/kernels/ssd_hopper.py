"""The fused scan for Hopper: the second launch by warp roles, in Triton's Gluon dialect.

The plain form (`ssd_blocks.py`) is bound by latency: four warps do everything one after the other.
Here a persistent program of 13 warps walks over (sequence, head) items with four roles, which meet
at mbarriers only:

    loader   1 warp   TMA of x, B, C and the tables of each chunk, three, two and 1.5 deep; before
                      an item, its initial state through a stage of B
    state    4 warps  h <- 2^total h + (x w)^T B in fp32 registers; before each chunk h goes to
                      shared memory as bf16, one tile for each output role; runs ahead of them
    output   4 warps  twice, on alternate chunks: y = 2^cum (C h^T) + (C B^T . decay) x + D x

Chunks have 128 tokens, their triangle of 16 x 16 blocks is stored in the order in which a warp
holds the left operand of a product (`_prepare_fragments`), so that it goes from memory into operand
registers without shared memory, masks or conversions. `x w` takes w as the sum of two bf16.

Rows of the chunk table with fewer tokens are loaded whole, too: their foreign rows are zeroed in
shared memory (0 times NaN is not 0), and their y is stored by masked stores. Names of barriers: the
tile they guard, then _full (producer arrives) or _free (consumers arrive); waits alternate in
parity, so whoever waits on a barrier never skips a phase: full_c is by output role, not by slot.
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

L = gl.constexpr(128)  # tokens of a chunk
HALF = gl.constexpr(64)
P = gl.constexpr(64)
N = gl.constexpr(128)
X_STAGES = gl.constexpr(3)
B_STAGES = gl.constexpr(2)
C_STAGES = gl.constexpr(3)  # half tiles
WORK = gl.constexpr(8)  # entries of a row of the work table
# accumulators of y [64, P] and of the state [P, N], and the left operands of their products
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC_LEFT = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
STATE_LEFT = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))


@gluon.jit
def _item(work_idx, item, H):
    """First chunk, number of chunks and head of an item."""
    at = work_idx + item // H * WORK
    return gl.load(at), gl.load(at + 1), item % H


@gluon.jit
def _parity(turn, stages: gl.constexpr):
    return (turn // stages) & 1


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
def _output_chunk(
    me: gl.constexpr, turn, scores0, cell, scores_ptr, D, y_desc, y_ptr, first, tokens, h,
    tiles, bars, H: gl.constexpr,
):  # fmt: skip
    """y of one chunk: rows 0 to 63, then 64 to 127, whose triangle is made under their products."""
    x_tiles, decay_tiles, C_tiles, h_tiles, y_tile = tiles
    x_full, x_free, C_full, C_free, h_full, h_free = bars
    stage, upper, lower = turn % X_STAGES, 2 * turn % C_STAGES, (2 * turn + 1) % C_STAGES
    hT = h_tiles.index(me).permute((1, 0))
    scores1 = _triangle(scores_ptr, cell, 1, 8)
    mbarrier.wait(C_full.index(2 * me), _parity(turn, 2))
    mbarrier.wait(h_full.index(me), _parity(turn, 2))
    acc = gl.zeros((HALF, P), gl.float32, ACC)
    acc = warpgroup_mma(C_tiles.index(upper), hT, acc, use_acc=False, is_async=True)
    mbarrier.wait(x_full.index(stage), _parity(turn, X_STAGES))
    x, decays = x_tiles.index(stage), decay_tiles.index(stage)
    s = _decayed_rows(scores0, decays, 0, 4)
    scale = gl.exp2(decays.slice(0, HALF).load(gl.SliceLayout(1, ACC)))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(C_free.index(upper))
    acc = warpgroup_mma(s, x.slice(0, HALF), acc * scale[:, None], is_async=True)
    mbarrier.wait(C_full.index(2 * me + 1), _parity(turn, 2))
    acc1 = gl.zeros((HALF, P), gl.float32, ACC)
    acc1 = warpgroup_mma(C_tiles.index(lower), hT, acc1, use_acc=False, is_async=True)
    s1 = _decayed_rows(scores1, decays, 1, 8)
    # operands in registers stay named until their product is over, or they may be overwritten
    acc, s = warpgroup_mma_wait(1, deps=(acc, s))
    acc += x.slice(0, HALF).load(ACC).to(gl.float32) * D
    _store_rows(acc, y_tile, y_desc, y_ptr, first, tokens, h, 0, H)
    scale = gl.exp2(decays.slice(HALF, HALF).load(gl.SliceLayout(1, ACC)))
    acc1 = warpgroup_mma_wait(0, deps=(acc1,))
    mbarrier.arrive(C_free.index(lower))
    mbarrier.arrive(h_free.index(me))
    acc1 = warpgroup_mma(s1, x, acc1 * scale[:, None], is_async=True)
    acc1, s1 = warpgroup_mma_wait(0, deps=(acc1, s1))
    acc1 += x.slice(HALF, HALF).load(ACC).to(gl.float32) * D
    fence_async_shared()
    mbarrier.arrive(x_free.index(stage))
    _store_rows(acc1, y_tile, y_desc, y_ptr, first, tokens, h, 1, H)


@gluon.jit
def _output_role(
    me: gl.constexpr, where, tiles, bars, H: gl.constexpr, G: gl.constexpr, AHEAD: gl.constexpr
):
    """Chunks whose number, counted over all items of the program, has parity `me`."""
    work_idx, chunks_idx, scores_ptr, D_ptr, y_desc, y_ptr, total = where
    done = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        c0, n, h = _item(work_idx, item, H)
        if me == 0:
            pad = gl.load(work_idx + item // H * WORK + 2) < 0
            if pad:
                at = work_idx + item // H * WORK
                _zero_pad(y_ptr, gl.load(at + 5), gl.load(at + 6), h, H)
        g = h // (H // G)
        D = gl.load(D_ptr + h).to(gl.float32)
        begin = (done + me) & 1
        last = gl.maximum(c0 + n - 1, 0)
        scores0 = _triangle(scores_ptr, gl.minimum(c0 + begin, last) * G + g, 0, 4)
        for i in range(begin, n, 2):
            c = c0 + i
            first, tokens = gl.load(chunks_idx + c * 3 + 1), gl.load(chunks_idx + c * 3 + 2)
            if not AHEAD:
                scores0 = _triangle(scores_ptr, c * G + g, 0, 4)
            _output_chunk(
                me, done + i, scores0, c * G + g, scores_ptr, D, y_desc, y_ptr, first, tokens, h,
                tiles, bars, H,
            )  # fmt: skip
            if AHEAD:
                scores0 = _triangle(scores_ptr, gl.minimum(c + 2, last) * G + g, 0, 4)
        done += n
    tma.store_wait(0)


# -------------------------------------------------------------------------------------- state role
@gluon.jit
def _weighted_rows(turn, x_tiles, weight_tiles, x_full, x_free):
    """(x w)^T of a chunk as the left operand [P, L]."""
    stage = turn % X_STAGES
    mbarrier.wait(x_full.index(stage), _parity(turn, X_STAGES))
    xt = x_tiles.index(stage).permute((1, 0)).load(STATE_LEFT)
    high = weight_tiles.index(stage).slice(0, L).load(gl.SliceLayout(0, STATE_LEFT))
    low = weight_tiles.index(stage).slice(L, L).load(gl.SliceLayout(0, STATE_LEFT))
    xw = gl.inline_asm_elementwise(
        WEIGHTED,
        "=r,r,r,r",
        [xt, high[None, :], low[None, :]],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )
    fence_async_shared()
    mbarrier.arrive(x_free.index(stage))
    return xw


@gluon.jit
def _state_role(where, tiles, bars, H: gl.constexpr):
    work_idx, decays_ptr, state_desc, state_ptr, total, chunks = where
    x_tiles, weight_tiles, B_tiles, h_tiles = tiles
    x_full, x_free, B_full, B_free, h_full, h_free = bars
    p = gl.arange(0, P, layout=gl.SliceLayout(1, STATE))
    q = gl.arange(0, N, layout=gl.SliceLayout(0, STATE))
    done = 0
    taken = 0  # stages of B: chunks and initial states
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        c0, n, h = _item(work_idx, item, H)
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
            mbarrier.arrive(h_full.index(mine))
            xw = _weighted_rows(turn, x_tiles, weight_tiles, x_full, x_free)
            state = state * gl.exp2(total_decay)
            stage = taken % B_STAGES
            mbarrier.wait(B_full.index(stage), _parity(taken, B_STAGES))
            state = warpgroup_mma(xw, B_tiles.index(stage), state, is_async=True)
            state, xw = warpgroup_mma_wait(0, deps=(state, xw))
            mbarrier.arrive(B_free.index(stage))
            total_decay = following
            taken += 1
        if writes > 0:
            cell = state_ptr + (slot.to(gl.int64) * H + h) * (P * N)
            inner = p[:, None] * N + q[None, :]
            gl.store(cell + inner, state.to(state_ptr.dtype.element_ty))
        done += n


# ------------------------------------------------------------------------------------- loader role
@gluon.jit
def _zero_tail(tile, height: gl.constexpr, width: gl.constexpr, tokens):
    """Zeros in the rows from `tokens` on of a tile in shared memory; one warp."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for first in gl.static_range(0, height, 8):
        part = tile.slice(first, 8)
        if first >= tokens:
            part.store(gl.zeros((8, width), gl.bfloat16, rows))
        else:
            if first + 8 > tokens:
                row = first + gl.arange(0, 8, layout=gl.SliceLayout(1, rows))
                value = part.load(rows)
                part.store(gl.where((row < tokens)[:, None], value, gl.zeros_like(value)))


@gluon.jit
def _load_x_and_B(
    turn, taken, shorts, first, tokens, row, h, g, x_desc, B_desc, decays_desc, weights_desc,
    tiles, bars,
):  # fmt: skip
    """x, tables and B of a chunk; returns the number of short chunks so far."""
    x_tiles, decay_tiles, weight_tiles, B_tiles = tiles
    x_full, x_free, B_full, B_free, short_full = bars
    stage, B_stage = turn % X_STAGES, taken % B_STAGES
    x_bytes: gl.constexpr = L * P * 2 + 3 * L * 4
    B_bytes: gl.constexpr = L * N * 2
    mbarrier.wait(x_free.index(stage), _parity(turn, X_STAGES) ^ 1)
    if tokens == L:
        x_bar, B_bar = x_full.index(stage), B_full.index(B_stage)
        mbarrier.expect(x_bar, x_bytes)
        tma.async_copy_global_to_shared(x_desc, [first, h * P], x_bar, x_tiles.index(stage))
        tma.async_copy_global_to_shared(decays_desc, [row], x_bar, decay_tiles.index(stage))
        tma.async_copy_global_to_shared(weights_desc, [row], x_bar, weight_tiles.index(stage))
        mbarrier.wait(B_free.index(B_stage), _parity(taken, B_STAGES) ^ 1)
        mbarrier.expect(B_bar, B_bytes)
        tma.async_copy_global_to_shared(B_desc, [first, g * N], B_bar, B_tiles.index(B_stage))
    else:
        bar = short_full.index(0)
        mbarrier.wait(B_free.index(B_stage), _parity(taken, B_STAGES) ^ 1)
        mbarrier.expect(bar, x_bytes + B_bytes)
        tma.async_copy_global_to_shared(x_desc, [first, h * P], bar, x_tiles.index(stage))
        tma.async_copy_global_to_shared(decays_desc, [row], bar, decay_tiles.index(stage))
        tma.async_copy_global_to_shared(weights_desc, [row], bar, weight_tiles.index(stage))
        tma.async_copy_global_to_shared(B_desc, [first, g * N], bar, B_tiles.index(B_stage))
        mbarrier.wait(bar, shorts & 1)
        shorts += 1
        _zero_tail(x_tiles.index(stage), L, P, tokens)
        _zero_tail(B_tiles.index(B_stage), L, N, tokens)
        fence_async_shared()
        mbarrier.arrive(B_full.index(B_stage))
        mbarrier.arrive(x_full.index(stage))
    return shorts


@gluon.jit
def _load_role(where, tables, tiles, bars, H: gl.constexpr, G: gl.constexpr):
    work_idx, chunks_idx, state_desc, total, chunks = where
    x_desc, B_desc, C_desc, decays_desc, weights_desc = tables
    x_tiles, decay_tiles, weight_tiles, B_tiles, C_tiles = tiles
    x_full, x_free, B_full, B_free, C_full, C_free, short_full = bars
    done = 0
    taken = 0
    shorts = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        c0, n, h = _item(work_idx, item, H)
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
            c = c0 + i
            turn = done + i
            first, tokens = gl.load(chunks_idx + c * 3 + 1), gl.load(chunks_idx + c * 3 + 2)
            shorts = _load_x_and_B(
                turn, taken, shorts, first, tokens, (h * chunks + c) * (2 * L), h, g,
                x_desc, B_desc, decays_desc, weights_desc,
                (x_tiles, decay_tiles, weight_tiles, B_tiles),
                (x_full, x_free, B_full, B_free, short_full),
            )  # fmt: skip
            taken += 1
            for half in gl.static_range(2):
                place = 2 * turn + half
                bar = C_full.index(2 * (turn & 1) + half)
                mbarrier.wait(C_free.index(place % C_STAGES), _parity(place, C_STAGES) ^ 1)
                mbarrier.expect(bar, HALF * N * 2)
                tma.async_copy_global_to_shared(
                    C_desc, [first + half * HALF, g * N], bar, C_tiles.index(place % C_STAGES)
                )
        done += n


# ------------------------------------------------------------------------------------- the program
@gluon.jit
def _barriers(slots: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(slots):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(do_not_specialize=["total", "chunks"])
def _scan_roles(
    x_desc, B_desc, C_desc, decays_desc, weights_desc, y_desc, state_desc,
    scores_ptr, decays_ptr, D_ptr, y_ptr, state_ptr, work_idx, chunks_idx,
    total, chunks, H: gl.constexpr, G: gl.constexpr, AHEAD: gl.constexpr,
    OUTPUT_REGISTERS: gl.constexpr, STATE_REGISTERS: gl.constexpr,
):  # fmt: skip
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P, N], gl.bfloat16)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, L, P], x_desc.layout)
    decay_tiles = gl.allocate_shared_memory(gl.float32, [X_STAGES, 2 * L], decays_desc.layout)
    weight_tiles = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, 2 * L], weights_desc.layout)
    B_tiles = gl.allocate_shared_memory(gl.bfloat16, [B_STAGES, L, N], B_desc.layout)
    C_tiles = gl.allocate_shared_memory(gl.bfloat16, [C_STAGES, HALF, N], C_desc.layout)
    h_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, P, N], h_layout)
    even_y = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    odd_y = gl.allocate_shared_memory(gl.bfloat16, [HALF, P], y_desc.layout)
    x_full, x_free = _barriers(X_STAGES, 1), _barriers(X_STAGES, 2)
    B_full, B_free = _barriers(B_STAGES, 1), _barriers(B_STAGES, 1)
    C_full, C_free = _barriers(4, 1), _barriers(C_STAGES, 1)
    h_full, h_free = _barriers(2, 1), _barriers(2, 1)
    short_full = _barriers(1, 1)
    fence_async_shared()
    output = (work_idx, chunks_idx, scores_ptr, D_ptr, y_desc, y_ptr, total)
    output_bars = (x_full, x_free, C_full, C_free, h_full, h_free)
    even_tiles = (x_tiles, decay_tiles, C_tiles, h_tiles, even_y)
    odd_tiles = (x_tiles, decay_tiles, C_tiles, h_tiles, odd_y)
    state = (work_idx, decays_ptr, state_desc, state_ptr, total, chunks)
    state_tiles = (x_tiles, weight_tiles, B_tiles, h_tiles)
    state_bars = (x_full, x_free, B_full, B_free, h_full, h_free)
    load = (work_idx, chunks_idx, state_desc, total, chunks)
    tables = (x_desc, B_desc, C_desc, decays_desc, weights_desc)
    load_tiles = (x_tiles, decay_tiles, weight_tiles, B_tiles, C_tiles)
    load_bars = (x_full, x_free, B_full, B_free, C_full, C_free, short_full)
    gl.warp_specialize(
        [
            (_output_role, (0, output, even_tiles, output_bars, H, G, AHEAD)),
            (_output_role, (1, output, odd_tiles, output_bars, H, G, AHEAD)),
            (_state_role, (state, state_tiles, state_bars, H)),
            (_load_role, (load, tables, load_tiles, load_bars, H, G)),
        ],
        [4, 4, 1],
        [OUTPUT_REGISTERS, STATE_REGISTERS, 32],
    )
