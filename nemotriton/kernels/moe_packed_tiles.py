"""Tiles of `run_experts_packed`: defaults, as raced on an H200, and the space that sweeps measure.

What their keys mean is said in `moe_experts_packed`.
"""

from typing import Any

from nemotriton.kernels.fixed_order import DECODE
from nemotriton.kernels.hopper_pack import TILE
from nemotriton.kernels.op import Case, Tile


def packed_tile(
    up: tuple[int, int, int, int, int],
    down: tuple[int, int, int, int, int],
    split: int = 1,
    blocks: int = 2,
    narrow: bool = False,
    ahead: bool = False,
) -> Tile:
    """A tile of (BLOCK_M, BLOCK_N, BLOCK_K, stages, warps) of each product."""
    keys = ("M", "N", "K", "STAGES", "WARPS")
    both = {
        f"{name}_{key}": size
        for name, sizes in (("UP", up), ("DOWN", down))
        for key, size in zip(keys, sizes, strict=True)
    }
    how = {"PDL": False, "ASM": True, "ASYNC": ahead, "ONE": False}
    return Tile(**both, SPLIT=split, BLOCKS=blocks, NARROW=narrow, **how)


ONE, TWO, WIDE = (8, 64, 128, 3, 1), (8, 64, 128, 3, 2), (8, 128, 128, 3, 2)
DEEP = (8, 128, 128, 4, 2)
M16, M32 = (16, 128, 128, 4, 4), (32, 128, 128, 3, 4)
M64, M64W, M128 = (64, 128, 128, 3, 4), (64, 128, 128, 3, 8), (128, 64, 64, 4, 4)
M128W = (128, 128, 64, 3, 8)
_FEW = [
    (TWO, ONE, 3), (ONE, ONE, 3), (TWO, ONE, 1), (WIDE, ONE, 3), (WIDE, ONE, 1),
    (WIDE, DEEP, 1),
]  # fmt: skip
_MANY = [
    *((size, size) for size in (M16, M32, M64, M64W, M128, M128W)),
    (M128W, M64),
    # half the rows of weights: more programs at once, to decode while others multiply
    *((size, size) for size in ((16, 64, 128, 4, 4), (32, 64, 128, 3, 4))),
    *((size, size) for size in ((64, 64, 128, 3, 4), (64, 64, 64, 4, 4))),
]
STEP_AHEAD = [(size, size) for size in (M16, M32, M64W, M128W)]


def packed_tiles(case: Case) -> list[Tile]:
    pairs = [packed_tile(up, down, s, blocks=b) for up, down, s in _FEW[:2] for b in (0, 1)]
    few = [packed_tile(up, down, s) for up, down, s in _FEW]
    ones = [one_launch(size, size) for size in ((64, 6), (64, 4), (128, 4))]
    late = [tile.but(PDL=True) for tile in (*pairs[:2], few[0], few[2], few[4], few[5])]
    many = [packed_tile(up, down, narrow=True) for up, down in _MANY]
    many += [packed_tile(up, down, narrow=True, ahead=True) for up, down in STEP_AHEAD]
    plain = [few[0].but(ASM=False), few[4].but(ASM=False), many[0].but(ASM=False)]
    if case.F % 128:  # what `packed_default` takes there
        few += [packed_tile(TWO, TWO, s) for s in (1, 3)] + [packed_tile(WIDE, TWO)]
    return [*pairs, *few, *ones, *late, *many, *plain, many[0].but(NARROW=False)]


def packed_suits(tile: Tile, tokens: int) -> bool:
    """Pairs for a few tokens, mma.sync while an expert has a few, high tiles for many."""
    if tile["BLOCKS"] < 2:
        return tokens <= 8
    height = max(int(tile["UP_M"]), int(tile["DOWN_M"]))
    return tokens <= 256 if height == 8 else tokens >= {16: 64, 32: 256, 64: 512, 128: 1024}[height]


def one_launch(up: tuple[int, int], down: tuple[int, int], split: int = 3, blocks: int = 0) -> Tile:
    """A tile of (rows of weights, stages) of each product; by two warps."""
    first, second = ((8, rows, 128, stages, 2) for rows, stages in (up, down))
    return packed_tile(first, second, split, blocks).but(PDL=True, ONE=True)


def three_launches(F: int, tile: Tile) -> Tile:
    """Instead of a tile of one launch, where there cannot be one: the sizes that suit three."""
    down = TWO if F % 128 else ONE
    return packed_tile(TWO, down, int(tile["SPLIT"]), int(tile["BLOCKS"])).but(PDL=tile["PDL"])


def _blocks(pairs: int, tokens: int) -> int:
    """One pair a block at a few tokens: the few experts that they share cost less to read twice
    than every program's look at all ids, or a launch that writes tables."""
    return 0 if pairs <= 48 or (tokens <= 8 and pairs <= 192) else 2


def packed_default(case: Case, tokens: int) -> Tile:
    """By pairs while they are few, then by the pairs of a mean expert."""
    pairs, per_expert = tokens * case.K, tokens * case.K / case.E
    down = TWO if case.F % 128 else ONE  # masks of a last, half block make one warp spill
    if pairs <= 192:  # dependent launches gain a little here, and cost 3 % at 128 tokens
        if tokens <= 8:
            both = (64, 4) if tokens <= 2 else (128, 4)
            return one_launch(both, both)
        return packed_tile(TWO, down, 3, _blocks(pairs, tokens)).but(PDL=True)
    if pairs <= 384:
        return packed_tile(TWO, down)
    if per_expert <= 3:
        return packed_tile(WIDE, down)
    if per_expert <= 7:
        return packed_tile(WIDE, DEEP)
    if per_expert <= 14:
        return packed_tile(M16, M16, narrow=True)
    if per_expert <= 30:
        return packed_tile(M32, M32, narrow=True)
    if case.F % TILE == 0 and case.L % TILE == 0:
        size = M64W if per_expert <= 66 else M128W
        return packed_tile(size, size, narrow=True, ahead=True)
    if per_expert <= 66:
        return packed_tile(M64W, M64W, narrow=True)
    last = (M128, M128) if per_expert <= 132 else (M128W, M64)
    return packed_tile(*last, narrow=True)


def packed_order(tile: Tile) -> Any:
    """What decides the order of all three sums: by mma.sync or wgmma, whose positions of columns
    differ, parts of the second product, and what they are rounded to. How many columns a step
    takes does not: tensor cores add them 16 at a time."""
    mma, split = (int(tile["UP_WARPS"]) < 4, int(tile["DOWN_WARPS"]) < 4), tile["SPLIT"]
    rows = tile["NARROW"], tile["ONE"]
    return *mma, *rows, split, split > 1 and tile["DOWN_K"]


def packed_fixed(case: Case, tokens: int, phase: str) -> Tile:
    """Generated tokens by mma.sync in three parts, which one token wants; prompts by wgmma."""
    pairs, per_expert = tokens * case.K, tokens * case.K / case.E
    if phase == DECODE:
        down = TWO if case.F % 128 else ONE
        if pairs <= 384:
            return packed_tile(TWO, down, 3, _blocks(pairs, tokens))
        return packed_tile(WIDE, down if per_expert <= 3 else DEEP, 3)
    fewest = max(7 * case.E, 384) // case.K + 1  # that take wgmma by default
    return packed_default(case, max(tokens, fewest))
