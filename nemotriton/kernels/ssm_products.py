"""Products with a stored state on the tensor cores: few tokens against many rows of it.

A state h [P, N] is the left operand, its rows as they lie in memory; tokens are columns, eight of
them a tile, so that one token and eight cost the same. Every lane of a warp gets its fragment of h
by loads of 16 bytes and the products read it where it is: a sum over N takes its terms in
`k_order`, the order in which they come. So which terms meet in one instruction depends on the
format of the state alone, never on a tile's size or on the number of tokens.

bf16 operands are exact. A number of more bits is two or three bf16 terms of 8 bits each.
"""

import triton
import triton.language as tl


@triton.jit
def k_order(rows, like):
    """rows [R, BLOCK_N] with columns in the order of products with what `like` points at.

    In memory a block of columns is the vectors of four lanes, 16 bytes each (8 of codes of a
    byte); a product takes the lanes' first pairs, then their second ones. (Of codes of a byte it
    takes fours, since that is what Triton gives a lane of operands that were bytes.)"""
    VECTOR: tl.constexpr = 4 if like.dtype.element_ty == tl.float32 else 8
    TAKEN: tl.constexpr = 4 if like.dtype.element_ty == tl.int8 else 2
    R: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = rows.shape[1]
    WIDE: tl.constexpr = 4 * VECTOR if 4 * VECTOR < BLOCK_N else BLOCK_N
    parts = tl.reshape(rows, [R, BLOCK_N // WIDE, 4, WIDE // (4 * TAKEN), TAKEN])
    return tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), [R, BLOCK_N])


@triton.jit
def load_tiles(at, wanted, width, BLOCK_N: tl.constexpr, like, FULL: tl.constexpr):
    """`width` numbers from each pointer of `at` [R] on, as they come, [BLOCK_N / WIDE, R, WIDE];
    zeros where not `wanted` [R] and beyond width. FULL: width is BLOCK_N or more."""
    VECTOR: tl.constexpr = 4 if like.dtype.element_ty == tl.float32 else 8
    WIDE: tl.constexpr = 4 * VECTOR if 4 * VECTOR < BLOCK_N else BLOCK_N
    c, i = tl.arange(0, BLOCK_N // WIDE), tl.arange(0, WIDE)
    n = c[:, None, None] * WIDE + i[None, None, :]
    mask = wanted[None, :, None]
    if not FULL:
        mask = mask & (n < width)
    # hints: a lane's vector, so that four lanes share a row of a block; the other lanes take other
    # rows rather than blocks, as in a fragment (the 2 ranks these dimensions, it says no more)
    return tl.load(tl.max_contiguous(at[None, :, None] + n, [1, 2, VECTOR]), mask=mask, other=0)


@triton.jit
def in_order(tiles, like):
    """What `load_tiles` gave as rows [R, BLOCK_N] in `k_order`."""
    C: tl.constexpr = tiles.shape[0]
    R: tl.constexpr = tiles.shape[1]
    WIDE: tl.constexpr = tiles.shape[2]
    return k_order(tl.reshape(tl.permute(tiles, (1, 0, 2)), [R, C * WIDE]), like)


@triton.jit
def load_rows(at, wanted, width, BLOCK_N: tl.constexpr, like, FULL: tl.constexpr):
    """Both: rows [R, BLOCK_N] in `k_order`."""
    return in_order(load_tiles(at, wanted, width, BLOCK_N, like, FULL), like)


@triton.jit
def store_rows(at, rows, wanted, width, like, FULL: tl.constexpr):
    """Write rows [R, BLOCK_N], whose columns stand in `k_order`, to `width` numbers from each
    pointer of `at` [R] on, where `wanted` [R]: the way back of `load_rows`, lane by lane."""
    VECTOR: tl.constexpr = 4 if like.dtype.element_ty == tl.float32 else 8
    TAKEN: tl.constexpr = 4 if like.dtype.element_ty == tl.int8 else 2
    R: tl.constexpr = rows.shape[0]
    BLOCK_N: tl.constexpr = rows.shape[1]
    WIDE: tl.constexpr = 4 * VECTOR if 4 * VECTOR < BLOCK_N else BLOCK_N
    C: tl.constexpr = BLOCK_N // WIDE
    c, i = tl.arange(0, C), tl.arange(0, WIDE)
    n = c[:, None, None] * WIDE + i[None, None, :]
    mask = wanted[None, :, None]
    if not FULL:
        mask = mask & (n < width)
    parts = tl.reshape(rows, [R, C, WIDE // (4 * TAKEN), 4, TAKEN])
    rows = tl.reshape(tl.permute(parts, (0, 1, 3, 2, 4)), [R, C, WIDE])
    to = tl.max_contiguous(at[None, :, None] + n, [1, 2, VECTOR])
    tl.store(to, tl.permute(rows, (1, 0, 2)), mask=mask)


@triton.jit
def leading(value):
    """An fp32 number's first 8 bits, cut off: exact in bf16, and so is what is left in fp32.

    By a mask, since conversions of single numbers to bf16 are slow where pairs are not."""
    return (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def times(a, b):
    """a b for fp32 a [M, K]: all 24 bits of it, as bf16 terms, where b is bf16, else 3xTF32."""
    if b.dtype == tl.bfloat16:
        high = leading(a)
        middle = leading(a - high)
        low = (a - high) - middle
        product = tl.dot(low.to(tl.bfloat16), b, input_precision="ieee")
        product = tl.dot(middle.to(tl.bfloat16), b, acc=product, input_precision="ieee")
        return tl.dot(high.to(tl.bfloat16), b, acc=product, input_precision="ieee")
    else:
        return tl.dot(a, b.to(tl.float32), input_precision="tf32x3")


@triton.jit
def weighted(x, weights):
    """x^T weights for x [K, P] and fp32 weights [K, T], 16 bits of them where x is bf16."""
    if x.dtype == tl.bfloat16:
        high, x = leading(weights), tl.trans(x)
        product = tl.dot(x, (weights - high).to(tl.bfloat16), input_precision="ieee")
        return tl.dot(x, high.to(tl.bfloat16), acc=product, input_precision="ieee")
    else:
        return tl.dot(tl.trans(x.to(tl.float32)), weights, input_precision="tf32x3")


@triton.jit
def scores(B, C):
    """B C^T [M, T] of rows in the same order."""
    if B.dtype == tl.bfloat16:
        return tl.dot(B, tl.trans(C), input_precision="ieee")
    else:
        wide = tl.trans(C.to(tl.float32))
        return tl.dot(B.to(tl.float32), wide, input_precision="tf32x3")


@triton.jit
def read_state(h, C, high, low):
    """high + low + h C^T [P, T], in two parts, for a stored state h [P, N] and C [T, N].

    Each part adds up its own terms, so that columns may come a few blocks at a time; `joined` makes
    one number of them. States of bf16 and of codes of a byte, and all where C is fp32, have no low
    part."""
    if C.dtype == tl.bfloat16:
        C = tl.trans(C)
        if h.dtype == tl.bfloat16 or h.dtype == tl.int8:
            high = tl.dot(h.to(tl.bfloat16), C, acc=high, input_precision="ieee")
        else:  # y has 8 bits: 16 of the state do
            first = leading(h.to(tl.float32))
            rest = (h.to(tl.float32) - first).to(tl.bfloat16)
            low = tl.dot(rest, C, acc=low, input_precision="ieee")
            high = tl.dot(first.to(tl.bfloat16), C, acc=high, input_precision="ieee")
    else:
        wide = tl.trans(C.to(tl.float32))
        high = tl.dot(h.to(tl.float32), wide, acc=high, input_precision="tf32x3")
    return high, low


@triton.jit
def joined(high, low, scale, state, C_ptr):
    """What both parts of `read_state` come to, in fp32; state: (its pointer, that of its scales).

    Not by a plain sum: of that and a product right before it the compiler makes one product that
    starts from the other part, which adds in another order."""
    state_ptr, scales_ptr = state
    ONE: tl.constexpr = state_ptr.dtype.element_ty == tl.bfloat16
    BYTE: tl.constexpr = state_ptr.dtype.element_ty == tl.int8
    product = high
    if C_ptr.dtype.element_ty == tl.bfloat16 and not (ONE or BYTE):
        product = tl.fma(high, 1.0, low)
    if scales_ptr is not None:
        product *= scale[:, None]
    return product
