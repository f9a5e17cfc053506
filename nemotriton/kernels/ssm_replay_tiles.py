"""Tiles of `ssm_replay`: defaults, as raced on an H200, and the space that a sweep measures.

BLOCK_P   rows of a head's state in a program
SLICE_P   of which so many are in registers at a time; 0: all
AHEAD     the first slice is on its way while the window is worked out, every other one while
          that before it is computed; not for int8
FETCH     a program brings its state into L2 before it needs it
maxnreg   with few registers a thread more programs wait for memory at a time: 128 and 168 are
          four and three warps a scheduler
"""

from nemotriton.kernels.op import Case, Tile, cdiv, next_pow2, on_hopper
from nemotriton.kernels.shared_memory import LARGE, most_shared


def replay_default(case: Case, tokens: int) -> Tile:
    """A warp a program, more where rows are rounded whole; few rows for few sequences, then
    slices of a head's state."""
    sequences, verify = cdiv(tokens, case.NEW), case.NEW > 1
    if case.STATE in ("fp16-sr", "int16"):
        return _rounded_whole(case)
    if case.STATE == "int8":
        warps = 2 if verify else 1
        if sequences <= 4 or case.P <= 16:
            return _whole(case, 16, warps)
        return _sliced(case, 64, warps, registers=0 if verify else _limit(168))
    little = most_shared() < LARGE  # sm_120, whose code needs some registers more
    if case.TREE and case.STATE == "fp32" and little:
        return _whole(case, 16 if sequences <= 1 else 32, warps=2)
    if sequences <= 1 or case.P <= 16:
        return _whole(case, 16, ahead=True)
    if case.TREE:
        return _sliced(case, 64)
    if case.STATE == "bf16":
        return _exact(case, sequences)
    if case.NEW == 1 or sequences <= 8:
        return _whole(case, 32)
    return _sliced(case, 32, ahead=on_hopper() or little)


def _exact(case: Case, sequences: int) -> Tile:
    """States of bf16 are operands as they are."""
    if case.NEW > 1 and sequences > 4:
        return _sliced(case, 64, registers=_limit(168))
    if case.NEW > 1:
        return _whole(case, 32)
    if sequences <= 4:
        return _whole(case, 16, ahead=True)
    if sequences > 128:
        return _sliced(case, 64, ahead=on_hopper(), registers=_limit(168))
    tile = _whole(case, 32, ahead=True)
    return tile.but(maxnreg=168) if on_hopper() else tile


def _limit(registers: int) -> int:
    """Counted on Hopper; elsewhere the compiler may need a few more."""
    return registers if on_hopper() else 0


def _rounded_whole(case: Case) -> Tile:
    if case.TREE and case.STATE == "fp16-sr":
        return _whole(case, 16, warps=2)
    few = (case.STATE == "fp16-sr") == (case.NEW == 1)  # registers are left
    wide = not (few or case.TREE) and (on_hopper() or case.STATE == "int16")
    return _whole(case, 64 if wide else 32, warps=2)


def _whole(case: Case, rows: int, warps: int = 1, ahead: bool = False) -> Tile:
    size = min(rows, max(next_pow2(case.P), 16))
    return Tile(BLOCK_P=size, AHEAD=ahead, num_warps=warps, num_stages=1)


def _sliced(case: Case, rows: int, warps: int = 1, ahead: bool = False, registers: int = 0) -> Tile:
    size = min(rows, next_pow2(case.P))
    tile = Tile(BLOCK_P=size, SLICE_P=16, AHEAD=ahead, FETCH=True, num_warps=warps, num_stages=1)
    return tile.but(maxnreg=registers) if registers else tile


def replay_tiles(case: Case) -> list[Tile]:
    """All of them that a sweep measures."""
    ahead = (False,) if case.STATE == "int8" else (False, True)
    found = [_whole(case, rows, warps) for rows in (16, 32, 64) for warps in (1, 2)]
    found += [_whole(case, rows, 1, True) for rows in (16, 32) if True in ahead]
    if case.P > 16:
        found += [tile.but(maxnreg=168) for tile in found if tile["BLOCK_P"] == 32]
        found += [_sliced(case, 64, warps=2)] if case.STATE == "int8" else []
        found += [
            _sliced(case, rows, ahead=early, registers=registers)
            for rows in (32, 64)
            for early in ahead
            for registers in (0, 128, 168)
        ]
    return list(dict.fromkeys(found))
