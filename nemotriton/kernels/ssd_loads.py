"""What the roles of the scan for Hopper share, and those of them that load; see `ssd_hopper.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

L = gl.constexpr(128)  # tokens of a chunk
HALF = gl.constexpr(64)
P = gl.constexpr(64)
N = gl.constexpr(128)
X_STAGES = gl.constexpr(3)
B_STAGES = gl.constexpr(2)
OUTPUTS = gl.constexpr(3)  # roles, and slots of C
PARTS = gl.constexpr(4)  # steps of the state's product: few registers for the left operand
WORK = gl.constexpr(8)  # entries of a row of the work table


@gluon.jit
def item_row(work_idx, item, H: gl.constexpr, STEP: gl.constexpr):
    """First chunk, number of chunks and head of an item.

    Programs STEP apart, one group of processors if programs are dealt out to STEP of those in turn,
    have heads side by side, which read the same B and C at the same time; STEP divides H."""
    at = work_idx + item // H * WORK
    i = item % H
    return gl.load(at), gl.load(at + 1), i % STEP * (H // STEP) + i // STEP


@gluon.jit
def parity(turn, stages: gl.constexpr):
    return (turn // stages) & 1


@gluon.jit
def following_row(work_idx, item, total, H: gl.constexpr, STEP: gl.constexpr):
    """As `item_row`, of the program's next item, or of the last one there is."""
    return item_row(work_idx, gl.minimum(item + gl.num_programs(0), total - 1), H, STEP)


# ------------------------------------------------------------------------------------------ loaders
@gluon.jit
def load_role(where, tables, tiles, bars, H: gl.constexpr, G: gl.constexpr, STEP: gl.constexpr):
    """x, B and the tables; of a short chunk to the barrier that `tail_role` waits on."""
    work_idx, chunks_idx, state_desc, total, chunks = where
    x_desc, B_desc, decays_desc, weights_desc = tables
    x_tiles, decay_tiles, weight_tiles, B_tiles = tiles
    x_full, x_free, B_full, B_free, short_full = bars
    x_bytes: gl.constexpr = L * P * 2 + 3 * L * 4
    B_bytes: gl.constexpr = L * N * 2
    done = 0
    taken = 0
    shorts = 0
    c0, n, h = item_row(work_idx, gl.program_id(0), H, STEP)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        next_c0, next_n, next_h = following_row(work_idx, item, total, H, STEP)
        at = work_idx + item // H * WORK
        slot, reads = gl.load(at + 2), gl.load(at + 3)
        g = h // (H // G)
        if reads > 0:
            stage = taken % B_STAGES
            mbarrier.wait(B_free.index(stage), parity(taken, B_STAGES) ^ 1)
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
                mbarrier.wait(B_free.index(B_stage), parity(taken, B_STAGES) ^ 1)
                mbarrier.expect(x_bar, x_bytes + B_bytes)
            mbarrier.wait(x_free.index(stage), parity(turn, X_STAGES) ^ 1)
            if tokens == L:
                mbarrier.expect(x_bar, x_bytes)
            tma.async_copy_global_to_shared(x_desc, [first, h * P], x_bar, x_tiles.index(stage))
            tma.async_copy_global_to_shared(decays_desc, [row], x_bar, decay_tiles.index(stage))
            tma.async_copy_global_to_shared(weights_desc, [row], x_bar, weight_tiles.index(stage))
            if tokens == L:
                mbarrier.wait(B_free.index(B_stage), parity(taken, B_STAGES) ^ 1)
                mbarrier.expect(B_bar, B_bytes)
            tma.async_copy_global_to_shared(B_desc, [first, g * N], B_bar, B_tiles.index(B_stage))
            taken += 1
        done += n
        c0, n, h = next_c0, next_n, next_h


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
def tail_role(where, tiles, bars, H: gl.constexpr, STEP: gl.constexpr):
    """Zeros behind the last token of short chunks: what lies there is another sequence's, and 0
    times NaN is not 0."""
    work_idx, chunks_idx, total = where
    x_tiles, B_tiles = tiles
    x_full, B_full, short_full = bars
    done = 0
    taken = 0
    shorts = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        c0, n, _ = item_row(work_idx, item, H, STEP)
        taken += gl.load(work_idx + item // H * WORK + 3)
        for i in range(n):
            tokens = gl.load(chunks_idx + (c0 + i) * 3 + 2)
            if tokens < L:
                stage, B_stage = (done + i) % X_STAGES, (taken + i) % B_STAGES
                mbarrier.wait(short_full.index(shorts % X_STAGES), parity(shorts, X_STAGES))
                _zero_tail(x_tiles.index(stage), L, P, tokens)
                _zero_tail(B_tiles.index(B_stage), L, N, tokens)
                fence_async_shared()
                mbarrier.arrive(B_full.index(B_stage))
                mbarrier.arrive(x_full.index(stage))
                shorts += 1
        done += n
        taken += n


@gluon.jit
def load_C_role(
    where, C_desc, C_tiles, C_full, C_free, H: gl.constexpr, G: gl.constexpr, STEP: gl.constexpr
):
    work_idx, chunks_idx, total = where
    task = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        c0, n, h = item_row(work_idx, item, H, STEP)
        g = h // (H // G)
        for i in range(n):
            first = gl.load(chunks_idx + (c0 + i) * 3 + 1)
            for half in gl.static_range(2):
                T = task + 2 * i + half
                slot = T % OUTPUTS
                mbarrier.wait(C_free.index(slot), parity(T, OUTPUTS) ^ 1)
                mbarrier.expect(C_full.index(slot), HALF * N * 2)
                tma.async_copy_global_to_shared(
                    C_desc, [first + half * HALF, g * N], C_full.index(slot), C_tiles.index(slot)
                )
        task += 2 * n
