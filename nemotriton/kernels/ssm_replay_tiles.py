"""Tiles of `ssm_replay`: defaults, as raced on an H200, and the space that a sweep measures."""

from nemotriton.kernels.op import Case, Tile, next_pow2, on_hopper
from nemotriton.kernels.shared_memory import LARGE, most_shared

# sequences that leave too few programs for slices
_FEW = {"fp16": 0, "fp32": 1, "bf16": 16, "int8": 16}


def replay_default(case: Case, tokens: int) -> Tile:
    """A warp a program, whose rows fill its registers; few rows for few sequences; more warps where
    rows are rounded whole. Slices where there are programs enough to fill a GPU."""
    rows, warps = 64 if case.STATE in ("bf16", "int8") else 32, 1
    if case.STATE in ("fp16-sr", "int16"):
        few = (case.STATE == "fp16-sr") == (case.NEW == 1)  # registers are left
        rows, warps = 32 if few or case.TREE else 64, 2
        if case.TREE and case.STATE == "fp16-sr":
            rows = 16
    elif case.STATE == "fp16" and case.NEW > 1:
        rows, warps = 64, 2
    elif case.TREE:
        rows = 32
    elif case.P > 16 and case.STATE in _FEW and tokens > case.NEW * _FEW[case.STATE]:
        own = case.STATE == "fp32" and case.NEW == 1 and on_hopper()
        return _limited(case) if own else _sliced(case)
    elif tokens <= case.NEW:
        rows = 16
    elif case.STATE == "int8" and case.NEW > 1 and most_shared() < LARGE:
        rows = 32  # sm_120's code for 64 needs a few registers more than there are
    elif case.STATE == "bf16" and tokens <= 16 * case.NEW:
        rows = 32
    return Tile(BLOCK_P=min(rows, max(next_pow2(case.P), 16)), num_warps=warps, num_stages=1)


def _sliced(case: Case) -> Tile:
    """16 rows of the state in registers at a time; a limit on registers brings more programs, as
    long as nothing is spilled."""
    tile = _slices(case)
    if case.STATE == "bf16":
        return tile.but(maxnreg=168 if case.NEW == 1 else 184)
    return tile.but(maxnreg=184) if (case.STATE, case.NEW) == ("int8", 1) and on_hopper() else tile


def _slices(case: Case) -> Tile:
    return Tile(BLOCK_P=min(next_pow2(case.P), 64), SLICE_P=16, num_warps=1, num_stages=1)


def _limited(case: Case) -> Tile:
    """Half a head's rows, in as few registers as do not spill: fp32 states fill L2 too soon for
    more to be under way."""
    rows = min(next_pow2(case.P), 32)
    return Tile(BLOCK_P=rows, num_warps=1, num_stages=1, maxnreg=168)


def replay_tiles(case: Case) -> list[Tile]:
    """With few registers a thread (maxnreg) more programs wait for memory at a time; so they do
    where a program has few rows of the state in registers at a time (SLICE_P)."""
    found = [
        Tile(BLOCK_P=p, num_warps=w, num_stages=1)
        for p, w in ((16, 1), (32, 1), (64, 1), (16, 2), (32, 2), (64, 2))
        if p <= max(next_pow2(case.P), 16)
    ]
    if case.STATE in ("bf16", "fp32") and case.NEW == 1 and case.P > 16:
        tile = _limited(case)
        found.append(tile.but(maxnreg=128) if case.STATE == "bf16" else tile)
    if not case.TREE and case.P > 16:
        found += [_slices(case), *(_slices(case).but(maxnreg=r) for r in (128, 168, 184))]
    return list(dict.fromkeys(found))
