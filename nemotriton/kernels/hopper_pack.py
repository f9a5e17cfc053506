"""NVFP4 matrices repacked, without loss, into the register fragments of Hopper's tensor cores.

A matrix [N, K] becomes 128 x 128 tiles (N and K padded with zeros), int32 [N/128, K/128, 2304]:
4.5 bits a weight, as the checkpoint has. A tile is 8 blocks of 16 rows: 2048 code words, then 256
scale words. With g = 0..7 and t = 0..3 (lane 4g + t of a warp):

    code word (block, kb, g, t, kt)   rows 16 block + g and + g + 8, columns 64 kb + 16 t + 4 kt
                                      + 0..3: what the lane feeds to one 16 x 16 fragment
    scale word (block, g, t)          bytes [kb][row half]: the two rows' scales of columns
                                      64 kb + 16 t .. + 15. Byte b stands for the bf16 with the
                                      bits 0x7000 + 16 b, which is the e4m3 scale times 2^119

So a lane owns whole scale blocks, one scale byte for 16 weights. Mask and shift leave pairs of bf16
that are e2m1 * 2^-126; times the scale that is value * 2^-7, exact: `WEIGHT_UNIT` gives the 2^7
back. Columns inside 64 are thereby permuted: `k_order` says which column stands at a position of
the products' K axis, in the order of mma.sync fragments (1 or 2 warps) or of wgmma's (4 or 8).

Decoding exists as inline assembly and in Triton's own operations, bit for bit the same. Assembly
takes one word (pack=1): with more, Triton may run it in a layout that pairs other words.

A block of scale zero keeps no codes (all are zero then), and one of negative scale has its signs in
the codes: values are kept, and where scales are positive every bit is.
"""

import math

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.fp4 import GROUP, pack, unpack

TILE = 128
CODE_WORDS = 2048
WORDS = tl.constexpr(2304)  # of a tile: codes, then scales
WEIGHT_UNIT = tl.constexpr(128.0)  # decoded weights are the stored values over this
SCALE_BASE = 0x7000  # bf16 bits of scale byte 0, and its step
SCALE_STEP = 16
NAN_BYTE = 255
_CHUNK = 1 << 24  # weights packed at a time


# ------------------------------------------------------------------------------------ torch: layout
def tiles_of(n: int) -> int:
    """How many tiles cover n rows or columns."""
    return -(-n // TILE)


def packed_bytes(rows: int, cols: int) -> int:
    """Bytes that a packed matrix takes, padding included."""
    return tiles_of(rows) * tiles_of(cols) * WORDS.value * 4


def k_order(columns: int, mma: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [columns]: the column at every position of the K axis; columns a multiple of 64."""
    require(columns % 64 == 0, f"{columns} columns are not whole groups of 64")
    p = torch.arange(columns, device=device)
    return p // 64 * 64 + _column_in_64(p % 64, mma)


def _column_in_64(q: torch.Tensor, mma: bool) -> torch.Tensor:
    if mma:  # the position's digits are kt's upper bit, column pair, lane, kt's lower bit, column
        lane, kt, pair = q // 4 % 4, q // 32 * 2 + q // 2 % 2, q // 16 % 2
    else:  # kt, column pair, lane, column
        lane, kt, pair = q // 2 % 4, q // 16, q // 8 % 2
    return lane * 16 + kt * 4 + pair * 2 + q % 2


def _scale_bytes(device: torch.device) -> torch.Tensor:
    """uint8 [128]: the packed byte of every e4m3 magnitude; 0 for zero, 255 for NaN."""
    value = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    bits = (value * 2.0**119).bfloat16().view(torch.int16).int()
    byte = (bits - SCALE_BASE) // SCALE_STEP
    byte[0], byte[127] = 0, NAN_BYTE
    return byte.to(torch.uint8).to(device)


def _rotate(x: torch.Tensor, left: int) -> torch.Tensor:
    """int32 words rotated to the left."""
    return (x << left) | ((x >> (32 - left)) & ((1 << left) - 1))


def _signed(bits: int) -> int:
    """The int32 that has these 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits


_FIELDS = _signed(0x81C081C0)  # sign and the three bits of two codes, at their places in bf16
_SIGNS_HIGH, _LOW_BIT = _signed(0x80C080C0), 0x01000100


def pack_hopper(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack canonical NVFP4 matrices, a few megabytes at a time.

    codes uint8 [..., N, K/2], the even column in the low nibble; scales e4m3 (or its bytes)
    [..., N, K/16]. Returns int32 [..., N/128, K/128, 2304], rounded up, on the same device."""
    *lead, N, half = codes.shape
    K = 2 * half
    require(
        K % GROUP == 0 and scales.shape == (*lead, N, K // GROUP),
        f"scales of shape {tuple(scales.shape)} for codes of {tuple(codes.shape)}",
    )
    matrices = math.prod(lead)
    codes, bytes_ = codes.reshape(matrices, N, half), scales.view(torch.uint8)
    bytes_ = bytes_.reshape(matrices, N, K // GROUP)
    size = (matrices, tiles_of(N), tiles_of(K), WORDS.value)
    out = torch.empty(size, dtype=torch.int32, device=codes.device)
    at_once = max(1, _CHUNK // (N * K))
    rows = max(TILE, _CHUNK // K // TILE * TILE)
    for m in range(0, matrices, at_once):
        for n in range(0, N, rows):
            part = (slice(m, m + at_once), slice(n, n + rows))
            tiles = out[m : m + at_once, n // TILE : tiles_of(n + rows)]
            tiles.copy_(_pack(codes[part], bytes_[part]))
    return out.view(*lead, *size[1:])


def _pack(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int32 [M, n, k, 2304] of codes [M, N, K/2] and scale bytes [M, N, K/16]."""
    M, N, K = *packed.shape[:2], 2 * packed.shape[2]
    n, k = tiles_of(N), tiles_of(K)
    below, right = n * TILE - N, k * TILE - K
    codes = unpack(packed).unflatten(-1, (-1, GROUP))
    magnitude = (scales & 0x7F)[..., None]
    codes = torch.where(magnitude == 0, 0, codes ^ (scales >> 7 << 3)[..., None]).flatten(-2)
    codes = torch.nn.functional.pad(codes, (0, right, 0, below))
    # tile, block, row half, g | tile, kb, t, kt, pair, column -> word | pair, row half, column
    codes = codes.view(M, n, 8, 2, 8, k, 2, 4, 4, 2, 2).permute(0, 1, 5, 2, 6, 4, 7, 8, 9, 3, 10)
    halves = codes.to(torch.int32)
    halves = ((halves & 8) << 12) | ((halves & 7) << 6)
    pairs = halves[..., 0] | (halves[..., 1] << 16)
    first, second = pairs[..., 0, 0], pairs[..., 0, 1]
    third, fourth = pairs[..., 1, 0], pairs[..., 1, 1]
    words = first | _rotate(second, 26) | _rotate(third, 20)
    words = words | _rotate(fourth & _SIGNS_HIGH, 30) | ((fourth & _LOW_BIT) << 6)
    bytes_ = _scale_bytes(packed.device)[(scales & 0x7F).long()]
    bytes_ = torch.nn.functional.pad(bytes_, (0, right // GROUP, 0, below))
    bytes_ = bytes_.view(M, n, 8, 2, 8, k, 2, 4).permute(0, 1, 5, 2, 4, 7, 6, 3)
    scale_words = bytes_.reshape(M, n, k, -1).view(torch.int32)
    return torch.cat((words.reshape(M, n, k, CODE_WORDS), scale_words), -1)


def unpack_hopper(words: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The canonical codes uint8 [..., rows, cols/2] and scales e4m3 [..., rows, cols/16]."""
    *lead, n, k, _ = words.shape
    require(
        (n, k) == (tiles_of(rows), tiles_of(cols)) and words.shape[-1] == WORDS.value,
        f"packed words of shape {tuple(words.shape)} are not a matrix [{rows}, {cols}]",
    )
    M = math.prod(lead)
    w = words[..., :CODE_WORDS].reshape(M, n, k, 8, 2, 8, 4, 4)
    fourth = ((w << 2) & _SIGNS_HIGH) | ((w >> 6) & _LOW_BIT)
    pairs = [w & _FIELDS, (w << 6) & _FIELDS, _rotate(w, 12) & _FIELDS, fourth]
    halves = torch.stack([half for p in pairs for half in (p & 0xFFFF, (p >> 16) & 0xFFFF)], -1)
    codes = (((halves >> 12) & 8) | ((halves >> 6) & 7)).to(torch.uint8)
    codes = codes.view(M, n, k, 8, 2, 8, 4, 4, 2, 2, 2).permute(0, 1, 3, 9, 5, 2, 4, 6, 7, 8, 10)
    codes = codes.reshape(*lead, n * TILE, k * TILE)[..., :rows, :cols]
    known = _scale_bytes(words.device)
    inverse = torch.zeros(256, dtype=torch.uint8, device=words.device)
    inverse[known.long()] = torch.arange(128, dtype=torch.uint8, device=words.device)
    bytes_ = words[..., CODE_WORDS:].reshape(-1).view(torch.uint8)
    bytes_ = inverse[bytes_.long()].view(M, n, k, 8, 8, 4, 2, 2).permute(0, 1, 3, 7, 4, 2, 6, 5)
    scales = bytes_.reshape(*lead, n * TILE, k * TILE // GROUP)[..., :rows, : cols // GROUP]
    return pack(codes), scales.contiguous().view(torch.float8_e4m3fn)


# ------------------------------------------------------------------------------------- jit: decode
# a word and its two rows' scales, each twice in 32 bits, as eight bf16: column, row half, pair
DECODE = """{
    .reg .b32 a, b, c, d, first, second, third, fourth;
    and.b32 a, $8, 0x81C081C0;
    mul.rn.bf16x2 first, a, $9;
    shl.b32 b, $8, 6;
    and.b32 b, b, 0x81C081C0;
    mul.rn.bf16x2 second, b, $10;
    shf.l.wrap.b32 c, $8, $8, 12;
    and.b32 c, c, 0x81C081C0;
    mul.rn.bf16x2 third, c, $9;
    shl.b32 d, $8, 2;
    shr.u32 a, $8, 6;
    and.b32 d, d, 0x80C080C0;
    lop3.b32 a, a, 0x01000100, d, 0xEA;
    mul.rn.bf16x2 fourth, a, $10;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
    mov.b32 {$4, $5}, third;
    mov.b32 {$6, $7}, fourth;
    }"""
DECODE_CONSTRAINTS = "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r"
_ASSEMBLY, _CONSTRAINTS = tl.constexpr(DECODE), tl.constexpr(DECODE_CONSTRAINTS)


@triton.jit
def _decode_asm(words, low, high):
    return tl.inline_asm_elementwise(
        _ASSEMBLY,
        _CONSTRAINTS,
        [words, low, high],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _bf16_pair(bits):
    low = (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def _decode_tl(words, low, high):
    FIELDS: tl.constexpr = 0x81C081C0
    s0, s1 = _bf16_pair(low)
    u0, u1 = _bf16_pair(high)
    a0, a1 = _bf16_pair(words & FIELDS)
    b0, b1 = _bf16_pair((words << 6) & FIELDS)
    c0, c1 = _bf16_pair(((words << 12) | (words >> 20)) & FIELDS)
    d0, d1 = _bf16_pair(((words << 2) & 0x80C080C0) | ((words >> 6) & 0x01000100))
    return a0 * s0, a1 * s1, b0 * u0, b1 * u1, c0 * s0, c1 * s1, d0 * u0, d1 * u1


@triton.jit
def fragments(
    words, scale_words, NB: tl.constexpr, KB: tl.constexpr, ASM: tl.constexpr, MMA: tl.constexpr
):
    """bf16 [16 NB, 64 KB], values / WEIGHT_UNIT in `k_order`, as the A fragments they will be.

    words uint32 [NB, 128 KB] of NB blocks of 16 rows; scale_words uint32 [NB, 32], of which KB = 1
    takes the low half."""
    STEP: tl.constexpr = 0x00100010
    BASE: tl.constexpr = 0x70007000
    low = (scale_words & 0xFF) * STEP + BASE
    high = ((scale_words >> 8) & 0xFF) * STEP + BASE
    if KB == 2:
        low_1 = ((scale_words >> 16) & 0xFF) * STEP + BASE
        high_1 = (scale_words >> 24) * STEP + BASE
        low = tl.join(low, low_1).reshape(NB, 8, 4, 2).trans(0, 3, 1, 2)
        high = tl.join(high, high_1).reshape(NB, 8, 4, 2).trans(0, 3, 1, 2)
    low = tl.broadcast_to(low.reshape(NB, KB, 8, 4, 1), (NB, KB, 8, 4, 4))
    high = tl.broadcast_to(high.reshape(NB, KB, 8, 4, 1), (NB, KB, 8, 4, 4))
    w = words.reshape(NB, KB, 8, 4, 4)
    if ASM:
        a0, a1, b0, b1, c0, c1, d0, d1 = _decode_asm(w, low, high)
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = _decode_tl(w, low, high)
    left = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    right = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    v = tl.join(left, right)  # block, kb, g, t, kt | column, row half, pair
    if MMA:
        v = v.reshape(NB, KB, 8, 4, 2, 2, 2, 2, 2)
        v = v.trans(0, 7, 2, 1, 4, 8, 3, 5, 6)
    else:
        v = v.trans(0, 6, 2, 1, 4, 7, 3, 5)
    return v.reshape(NB * 16, KB * 64)


@triton.jit
def position_column(position, MMA: tl.constexpr):
    """`k_order` for positions (a block of consecutive ones from a multiple of 64); pairs of columns
    stay neighbours, which is said to the compiler so that they are loaded together."""
    q = position % 64
    if MMA:
        column = q // 4 % 4 * 16 + q // 32 * 8 + q // 2 % 2 * 4 + q // 16 % 2 * 2 + q % 2
    else:
        column = q // 2 % 4 * 16 + q // 16 * 4 + q // 8 % 2 * 2 + q % 2
    return tl.max_contiguous(tl.multiple_of(position // 64 * 64 + column, 2), 2)


@triton.jit
def to_position_order(y, MMA: tl.constexpr):
    """Rows of y [R, C] (R a multiple of 64) from column order into `k_order`: what is stored so is
    ready to be the next product's right operand."""
    R: tl.constexpr = y.shape[0]
    C: tl.constexpr = y.shape[1]
    if MMA:
        y = y.reshape(R // 64, 4, 2, 2, 2, 2, C).trans(0, 2, 4, 1, 3, 5, 6)
    else:
        y = y.reshape(R // 64, 4, 4, 2, 2, C).trans(0, 2, 3, 1, 4, 5)
    return y.reshape(R, C)


# ------------------------------------------------------------------------------------ jit: product
@triton.jit
def packed_product(
    x_rows, live, words_ptr, tile_n, step_0, width,
    STEPS: tl.constexpr, K_TILES: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_M]: rows tile_n * BLOCK_N.. of a packed matrix times rows of x, over
    STEPS blocks of columns from block step_0, divided by WEIGHT_UNIT.

    x_rows [BLOCK_M]: pointers to the rows' first column, `live` where there is one; words_ptr: the
    matrix, K_TILES tiles wide. x has `width` columns (EVEN: a multiple of BLOCK_K), in `k_order`
    or, NATURAL, as they are. BLOCK_K 64 or 128; step_0 even for 64."""
    NB: tl.constexpr = BLOCK_N // 16
    KB: tl.constexpr = BLOCK_K // 64
    ROW: tl.constexpr = K_TILES * WORDS  # words of a row of tiles
    block = tile_n * NB + tl.arange(0, NB)
    tile = words_ptr + step_0 * KB // 2 * WORDS
    w_at = tile + (block // 8 * ROW + block % 8 * 256)[:, None] + tl.arange(0, KB * 128)[None, :]
    s_at = tile + 2048 + (block // 8 * ROW + block % 8 * 32)[:, None] + tl.arange(0, 32)[None, :]
    k = tl.arange(0, BLOCK_K)
    if NATURAL:
        k = position_column(k, MMA)
    x_at = x_rows[None, :] + (step_0 * BLOCK_K + k)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        words = tl.load(w_at).to(tl.uint32, bitcast=True)
        scales = tl.load(s_at).to(tl.uint32, bitcast=True)
        if EVEN:
            x = tl.load(x_at, mask=live[None, :], other=0.0)
        else:
            inside = (step_0 + step) * BLOCK_K + k < width
            x = tl.load(x_at, mask=live[None, :] & inside[:, None], other=0.0)
        if KB == 1:
            scales = scales >> (step % 2 * 16)
        w = fragments(words, scales, NB, KB, ASM, MMA).to(x.dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if not MMA:
            # makes Triton wait for the wgmmas before the next step: ptxas before 13.3 lets the next
            # decode overwrite registers that they still read (triton issue 9433); folds to nothing
            acc = tl.where(step < STEPS, acc, 0.0)
        if KB == 2:
            w_at += WORDS
            s_at += WORDS
        else:
            w_at += 128 + step % 2 * 2048
            s_at += step % 2 * WORDS
        x_at += BLOCK_K
    return acc
