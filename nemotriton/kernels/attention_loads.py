"""What the roles of attention for Hopper share, and those of them that load; see
`attention_hopper.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

ROWS = gl.constexpr(64)  # of a role
BOX = gl.constexpr(64)  # keys of a copy
WORK = gl.constexpr(8)  # entries of a row of the work table


@gluon.jit
def parity(turn, stages: gl.constexpr):
    return (turn // stages) & 1


@gluon.jit
def item_row(work_idx, turn, HEADS: gl.constexpr):
    """The program's item of a turn: its row in the table, and its KV head. Every second turn goes
    backwards, so that no program has the longer item each time."""
    programs, me = gl.num_programs(0), gl.program_id(0)
    i = turn * programs + gl.where(turn % 2 == 0, me, programs - 1 - me)
    return work_idx + i // HEADS * WORK, i % HEADS


@gluon.jit
def item_count(count_idx, HEADS: gl.constexpr):
    """How many items the program has."""
    programs, me = gl.num_programs(0), gl.program_id(0)
    total = gl.load(count_idx) * HEADS
    whole, rest = total // programs, total % programs
    place = gl.where(whole % 2 == 0, me, programs - 1 - me)
    return whole + (place < rest).to(gl.int32)


# ------------------------------------------------------------------------------------------ loaders
@gluon.jit
def _cell(table_idx, n, end, PAGE: gl.constexpr):
    """The row of the cache where keys n..n + BOX lie; behind the last key, those of its box."""
    n = gl.maximum(gl.minimum(n, (end - 1) // BOX * BOX), 0)
    return gl.load(table_idx + n // PAGE) * PAGE + n % PAGE


@gluon.jit
def load_k_role(
    where, tables, tiles, bars, GROUP: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr
):
    work_idx, count_idx, pages_idx, pages_stride = where
    q_desc, k_desc = tables
    q_tiles, k_tiles = tiles
    q_full, q_free, k_full, k_free = bars
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    D: gl.constexpr = k_tiles.shape[2]
    ROLES: gl.constexpr = q_tiles.shape[0]
    done = 0
    for turn in range(item_count(count_idx, HEADS)):
        at, h = item_row(work_idx, turn, HEADS)
        first, end, s = gl.load(at), gl.load(at + 2), gl.load(at + 3)
        mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(0), ROLES * q_desc.block_type.nbytes)
        for i in gl.static_range(ROLES):
            tma.async_copy_global_to_shared(
                q_desc, [first + i * (ROWS // GROUP), h * GROUP, 0], q_full.index(0),
                q_tiles.index(i),
            )  # fmt: skip
        table_idx = pages_idx + s.to(gl.int64) * pages_stride
        _load_keys(table_idx, end, h * D, done, k_desc, k_tiles, k_full, k_free, PAGE, STAGES)
        done += (end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _load_keys(
    table_idx, end, column, done, desc, tiles, full, free, PAGE: gl.constexpr, STAGES: gl.constexpr
):
    """Blocks `done`.. of a role's loads: the keys before `end` of a sequence."""
    BLOCK_N: gl.constexpr = tiles.shape[1]
    cell = _cell(table_idx, 0, end, PAGE)
    other = _cell(table_idx, BOX, end, PAGE)
    for j in range((end + BLOCK_N - 1) // BLOCK_N):
        # one step ahead: what is looked up where it is needed would be waited for
        next_cell = _cell(table_idx, (j + 1) * BLOCK_N, end, PAGE)
        next_other = _cell(table_idx, (j + 1) * BLOCK_N + BOX, end, PAGE)
        stage = (done + j) % STAGES
        bar, tile = full.index(stage), tiles.index(stage)
        mbarrier.wait(free.index(stage), parity(done + j, STAGES) ^ 1)
        mbarrier.expect(bar, BLOCK_N // BOX * desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, [cell, column], bar, tile.slice(0, BOX))
        if BLOCK_N > BOX:
            tma.async_copy_global_to_shared(desc, [other, column], bar, tile.slice(BOX, BOX))
        cell, other = next_cell, next_other


@gluon.jit
def load_v_role(where, v_desc, v_tiles, bars, HEADS: gl.constexpr, PAGE: gl.constexpr):
    """The last block of an item, if it is short, to the barrier that `_tail_role` waits on."""
    work_idx, count_idx, pages_idx, pages_stride = where
    v_full, v_free, v_short = bars
    STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = v_tiles.shape[1]
    D: gl.constexpr = v_tiles.shape[2]
    done = 0
    shorts = 0
    for turn in range(item_count(count_idx, HEADS)):
        at, h = item_row(work_idx, turn, HEADS)
        end, s = gl.load(at + 2), gl.load(at + 3)
        table_idx = pages_idx + s.to(gl.int64) * pages_stride
        whole = end // BLOCK_N * BLOCK_N
        _load_keys(table_idx, whole, h * D, done, v_desc, v_tiles, v_full, v_free, PAGE, STAGES)
        done += end // BLOCK_N
        if whole < end:
            stage = done % STAGES
            bar, tile = v_short.index(shorts % STAGES), v_tiles.index(stage)
            mbarrier.wait(v_free.index(stage), parity(done, STAGES) ^ 1)
            mbarrier.expect(bar, BLOCK_N // BOX * v_desc.block_type.nbytes)
            for i in gl.static_range(BLOCK_N // BOX):
                tma.async_copy_global_to_shared(
                    v_desc, [_cell(table_idx, whole + i * BOX, end, PAGE), h * D], bar,
                    tile.slice(i * BOX, BOX),
                )  # fmt: skip
            done += 1
            shorts += 1


@gluon.jit
def _zero_rows(tile, rows):
    """Zeros in the rows from `rows` on of a tile in shared memory; one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    height: gl.constexpr = tile.shape[0]
    width: gl.constexpr = tile.shape[1]
    zeros = gl.zeros((8, width), tile.dtype, layout)
    for first in gl.static_range(0, height, 8):
        part = tile.slice(first, 8)
        if first >= rows:
            part.store(zeros)
        else:
            if first + 8 > rows:
                row = first + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
                part.store(gl.where((row < rows)[:, None], part.load(layout), zeros))


@gluon.jit
def tail_role(where, v_tiles, bars, HEADS: gl.constexpr):
    work_idx, count_idx = where
    v_full, v_short = bars
    STAGES: gl.constexpr = v_tiles.shape[0]
    BLOCK_N: gl.constexpr = v_tiles.shape[1]
    done = 0
    shorts = 0
    for turn in range(item_count(count_idx, HEADS)):
        at, _ = item_row(work_idx, turn, HEADS)
        end = gl.load(at + 2)
        done += (end + BLOCK_N - 1) // BLOCK_N
        if end % BLOCK_N > 0:
            stage = (done - 1) % STAGES
            mbarrier.wait(v_short.index(shorts % STAGES), parity(shorts, STAGES))
            _zero_rows(v_tiles.index(stage), end % BLOCK_N)
            fence_async_shared()
            mbarrier.arrive(v_full.index(stage))
            shorts += 1
