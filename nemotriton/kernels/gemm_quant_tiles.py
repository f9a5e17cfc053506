"""Tiles of the linear layers with FP8 or NVFP4 weights (`gemm_quant`): defaults, and the space that
a sweep measures.

What limits them for 16 to 64 tokens on Hopper is x: every block of BLOCK_N outputs reads all of it
from L2, at 5.5 TB/s together with W. So blocks are wide, and K is split where there are few.
"""

from nemotriton.kernels.gemm import SQUARE
from nemotriton.kernels.gemm_codes import codes_tile
from nemotriton.kernels.gemm_direct import direct_tile
from nemotriton.kernels.gemm_roles import CODES, NUMBERS, roles_tile
from nemotriton.kernels.gemm_square import square_tile
from nemotriton.kernels.gemm_stream import (
    PROCESSORS,
    STREAM_TOKENS,
    WIDE,
    stream_suits,
    stream_tile,
    stream_tiles,
)
from nemotriton.kernels.gemm_wide import wide_tile
from nemotriton.kernels.op import Case, Tile, cdiv, next_pow2, on_hopper


def generic_tile(case: Case, tokens: int, widest: int = 128) -> Tile:
    """Good on Hopper, sane on Blackwell without tuning; `widest` block of N over 128 columns."""
    if tokens > 256:
        t, n, k, warps, most = 128, 128, 64, 8, 1
    elif tokens > 64:
        t, n, k, warps, most = (128, 64, 64, 8, 1) if case.N >= 5000 else (64, 128, 128, 4, 2)
    elif tokens > 16:
        t, n, k, warps, most = 64, 128 if case.N >= 5000 else 64, 128, 4, 4
    else:
        t, n, k, warps, most = 16, 64, 128, 4, 2 if case.N >= WIDE else 4
    n = min(n, widest) if k == 128 else n
    splits, tiles = 1, cdiv(case.N, n) * cdiv(tokens, t)
    while splits < most and tiles * splits < 512 and 1024 * splits <= case.K:
        splits *= 2
    return _few_tile(t, n, k, warps, 3, splits)


def _few_fp8(case: Case, tokens: int) -> Tile | None:
    """A tile of Hopper's own forms for up to 256 tokens whose activations stay as they are, where
    one was measured to be the best."""
    if not on_hopper():
        return None
    wide, shares = case.N >= WIDE, cdiv(cdiv(case.N, 16), PROCESSORS)
    if tokens <= 8 and wide and case.K % 512 == 0:
        return DIRECT_FP8[0 if tokens > 1 else -1]
    if tokens <= 16 and shares <= 3 and case.K % 1024 == 0 and case.N >= 2048:
        if shares == 3:
            return DIRECT_FP8[2] if tokens <= 8 else None
        return DIRECT_FP8[1 if tokens <= 8 else 3]
    if tokens <= 8 or not (wide or tokens > 16):
        return None
    if tokens > 64:
        return _some_fp8(case, tokens) if tokens <= 256 else None
    t, splits = max(16, next_pow2(tokens)), 1
    if wide:
        tile = _WIDE_OUTPUTS[t]
    else:
        while cdiv(case.N, 64) * splits <= PROCESSORS and 1024 * splits < case.K:
            splits *= 2
        tile = wide_tile(t, 64, 128, 4, 4, splits)
    return tile if case.K % (int(tile["BLOCK_K"]) * int(tile["SPLITS"])) == 0 else None


def _some_fp8(case: Case, tokens: int) -> Tile | None:
    """Blocks of 128 tokens, of which a multiprocessor holds two; K in parts to have as many."""
    splits, programs = 1, cdiv(case.N, 64) * cdiv(tokens, 128)
    while programs * splits <= PROCESSORS and case.K % (256 * splits) == 0:
        splits *= 2
    return wide_tile(128, 64, 128, 4, 3, splits) if case.K % 128 == 0 else None


def _coded_fp8(case: Case, tokens: int) -> Tile | None:
    """A tile that multiplies codes for up to 256 tokens, on Hopper.

    All programs are on the GPU at once: three a multiprocessor of many outputs; of fewer two, with
    K in parts that are equal where they can be; one, with room for most of what it reads, where
    that occupies more than half of the GPU, or the parts' sums would be many."""
    if not on_hopper() or tokens > 256:
        return None
    t = min(128, max(16, next_pow2(tokens)))
    if case.N >= WIDE:
        return _CODES_MANY[t]
    programs = cdiv(case.N, 64) * cdiv(tokens, t)
    if t == 128 or programs > PROCESSORS // 2:
        splits = max(1, min(PROCESSORS // programs, 4))
        alone = programs * splits <= PROCESSORS
        k, stages = (_CODES_ALONE if alone else _CODES_PAIR)[t]
    else:
        k, stages = _CODES_PAIR[t]
        most = max(1, min(2 * PROCESSORS // programs, 4, case.K // 1024))
        equal = (s for s in range(most, 1, -1) if cdiv(case.K, k) % s == 0)
        splits = next(equal, most)
    return codes_tile(t, 64, k, 4, stages, splits)


def fp8_default(case: Case, tokens: int) -> Tile:
    tile = _coded_fp8(case, tokens) if case.Q else _few_fp8(case, tokens)
    if tile is not None:
        return tile
    if tokens <= 8 or (tokens <= STREAM_TOKENS and case.N < WIDE):
        return stream_tile(case.N, tokens, 1)
    if not case.Q and tokens >= WIDEN_TOKENS:
        return widened_tile()
    if tokens <= STREAM_TOKENS or not case.Q:
        return generic_tile(case, tokens)
    if tokens <= 64:
        n = next((b for b in (128, 64) if b * 128 <= case.N), 32)
        return square_tile((64, n, 128, 4, 3))
    if tokens <= 256 and case.N < WIDE:
        return square_tile(SQUARE_FP8[3 if case.N >= 5000 else 2])
    return CODES if on_hopper() else square_tile(SQUARE_FP8[0])


# Tokens from which an FP8 weight is decoded once for all of them, into memory: 3 bytes a weight
# moved, at what 16-bit operands by TMA gain over decoding in the product.
WIDEN_TOKENS = 512
WIDENED = [NUMBERS, *map(square_tile, SQUARE)]  # of a widened weight


def widened_tile() -> Tile:
    return WIDENED[0] if on_hopper() else WIDENED[1]


_ROLES_FP8 = [CODES, roles_tile(256, 128, 128, group=8)]
_HALVES_FP8 = [square_tile((128, 128, 128, 8, stages), halves=2) for stages in (4, 3)]
SQUARE_FP8 = (
    (128, 128, 128, 4, 3),
    (128, 128, 128, 8, 3),
    (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 4),
    (64, 32, 128, 4, 4),
)


DIRECT_FP8 = (
    direct_tile(8, 16, 4, 2).but(EARLY=True),
    direct_tile(8, 16, 2, 8, registers=96).but(EARLY=True),
    direct_tile(8, 16, 2, 8, registers=80).but(EARLY=True),
    direct_tile(16, 16, 2, 8, registers=128),
    direct_tile(8, 16, 4, 2),
    direct_tile(8, 16, 4, 2, registers=112).but(EARLY=True),
    direct_tile(8, 16, 2, 2, registers=112).but(EARLY=True),
    direct_tile(8, 16, 2, 2, asm=False),
    direct_tile(8, 16, 2, 8, registers=96),
    direct_tile(8, 16, 2, 8, registers=80),
    direct_tile(16, 32, 2, 2),
    direct_tile(8, 32, 1, 4, registers=96).but(EARLY=True),
)
_WIDE_OUTPUTS = {  # the best of many outputs, by the block of tokens
    16: wide_tile(16, 64, 256, 4, 3, 1),
    32: wide_tile(32, 128, 128, 4, 3, 2),
    64: wide_tile(64, 64, 128, 4, 4, 1),
}
_WIDE_FP8 = (
    *_WIDE_OUTPUTS.values(),
    wide_tile(16, 64, 128, 4, 4, 1),
    wide_tile(16, 128, 128, 4, 3, 2),
    wide_tile(32, 64, 128, 4, 4, 4),
    wide_tile(64, 64, 128, 4, 4, 4),
    wide_tile(64, 128, 128, 4, 3, 1),
    wide_tile(64, 128, 128, 4, 3, 8),
    wide_tile(128, 64, 128, 4, 3, 1),
    wide_tile(128, 64, 128, 4, 3, 2),
    wide_tile(128, 64, 128, 4, 3, 4),
)
_CODES_MANY = {  # by the block of tokens
    t: codes_tile(t, 64, k, 4, stages, 1, ahead=2)
    for t, k, stages in ((16, 256, 3), (32, 256, 3), (64, 128, 4), (128, 128, 3))
}
# (BLOCK_K, num_stages) by the block of tokens, of programs in pairs and alone
_CODES_PAIR = {16: (256, 5), 32: (256, 4), 64: (128, 6), 128: (128, 4)}
_CODES_ALONE = {16: (256, 5), 32: (256, 8), 64: (256, 6), 128: (256, 4)}
CODES_FP8 = (
    *_CODES_MANY.values(),
    *(
        codes_tile(t, 64, *shape)
        for t in _CODES_PAIR
        for k, stages in dict.fromkeys((_CODES_PAIR[t], _CODES_ALONE[t]))
        for shape in ((k, 4, stages, splits) for splits in (1, 2, 3, 4))
    ),
)


def quant_tiles(case: Case) -> list[Tile]:
    few = [
        _few_tile(t, n, 128, 4, 3, s)
        for t, n in ((16, 64), (64, 64), (64, 128))
        for s in (1, 2, 4)
        if 256 * s <= case.K
    ]
    many = [_few_tile(t, n, 64, 8, 3, 1) for t, n in ((64, 128), (128, 128), (128, 64))]
    return few + many


def fp8_tiles(case: Case) -> list[Tile]:
    squares = [*_ROLES_FP8, *_HALVES_FP8, *map(square_tile, SQUARE_FP8)] if case.Q else WIDENED
    few = [_few_tile(*shape) for shape in _FEW_FP8 if 256 * shape[-1] <= case.K]
    own = [*DIRECT_FP8, *(CODES_FP8 if case.Q else ()), *_WIDE_FP8]
    return [*stream_tiles(1), *own, *squares, *few, *quant_tiles(case)[: 3 if case.Q else None]]


_FEW_FP8 = (  # (BLOCK_T, BLOCK_N, BLOCK_K, num_warps, num_stages, SPLITS)
    (16, 128, 128, 4, 3, 2),
    (16, 128, 128, 4, 3, 4),
    (16, 64, 128, 4, 4, 2),
    (64, 128, 128, 8, 3, 1),
    (64, 128, 128, 8, 3, 2),
    (64, 128, 64, 8, 4, 1),
    (64, 128, 64, 8, 4, 2),
    (64, 64, 64, 4, 4, 2),
    (64, 256, 64, 8, 3, 2),
    (64, 256, 64, 8, 3, 4),
)


def _few_tile(t: int, n: int, k: int, warps: int, stages: int, splits: int) -> Tile:
    tile = Tile(BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return tile.but(SPLITS=splits, GROUP=8)


def quant_suits(tile: Tile, tokens: int) -> bool:
    """Whether the sweep measures a tile at this many tokens."""
    if "STREAM" in tile:
        return stream_suits(tile, tokens)
    if "GROUPS" in tile:
        return tokens <= 16 and tile["BLOCK_T"] == max(8, next_pow2(tokens))
    if "CODES" in tile:
        return tokens <= 256 and tile["BLOCK_T"] == min(128, max(16, next_pow2(tokens)))
    if "WIDE" in tile:
        return 8 < tokens <= 64 and tile["BLOCK_T"] == max(16, next_pow2(tokens))
    if tile in WIDENED:
        return tokens >= WIDEN_TOKENS
    if tokens <= 16:
        return tile["BLOCK_T"] == 16
    return tile["BLOCK_T"] == 64 if tokens <= 64 else tile["BLOCK_T"] >= 64
