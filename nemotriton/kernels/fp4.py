"""NVFP4 and FP8 numbers, exactly: encoders, decoders, the quantisers, jit functions beside twins.

    e2m1    code = sign << 3 | index into 0, .5, 1, 1.5, 2, 3, 4, 6; no infinity, no NaN
    e4m3    sign, 4 exponent bits (bias 7), 3 mantissa bits; largest 448, NaN is 0x7f and 0xff
    NVFP4   16 consecutive columns share an e4m3 scale s, the matrix an fp32 scale g:
            w = e2m1 * s * g. e2m1 * s has at most six significant bits and is exact in bf16.
    FP8     w = e4m3 * g

Both encoders round to the nearest, ties to the even code, and saturate: infinities become the
largest number. NaN becomes e4m3's 0x7f, and e2m1's 6 (as the hardware's cvt.satfinite does).

The NVFP4 quantiser, in fp32, every operation rounded once, in this order, for a block x of 16:
    k = min(1 / g, FLT_MAX) / 6;  s = e4m3(max|x| * k)
    m = min(1 / (s * g), FLT_MAX);  code = e2m1(x * m)
and where s is 0 all codes are 0. So an all-zero block has s = 0; a block whose scale underflows
becomes zero; one that holds a NaN decodes to NaN throughout; one with an infinity has s = 448. A
block too large for g saturates at s = 448 and codes of 6. The FP8 quantiser: with m = min(1 / g,
FLT_MAX), code = e4m3(x * m).

The jit functions take and give bytes as int32 and work on bits alone, without the e4m3 type, which
needs compute capability 8.9. Their results are the twins' to the bit.

Sources: OCP MX and FP8 formats, the order of operations of Transformer Engine's quantiser.
"""

import torch
import triton
import triton.language as tl

from nemotriton.errors import require

GROUP = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Between magnitude i and i + 1; a tie goes to the even index.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
FLT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
INF_BITS = tl.constexpr(0x7F800000)
ABS_BITS = tl.constexpr(0x7FFFFFFF)


# ------------------------------------------------------------------------------------ torch: codes
def e2m1_encode_ref(x: torch.Tensor) -> torch.Tensor:
    """The codes 0..15 (uint8) nearest to x; the sign of zero is kept."""
    magnitude = x.float().abs()
    index = torch.zeros_like(magnitude, dtype=torch.uint8)
    for i, midpoint in enumerate(_MIDPOINTS):
        index += magnitude >= midpoint if i % 2 else magnitude > midpoint
    index[magnitude.isnan()] = 7
    negative = x.float().signbit() & ~x.isnan()
    return index | negative.to(torch.uint8) << 3


def e2m1_decode_ref(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of codes 0..15; code 8 is minus zero."""
    values = [sign * magnitude for sign in (1.0, -1.0) for magnitude in _MAGNITUDES]
    return torch.tensor(values, device=codes.device)[codes.long()]


def e4m3_encode_ref(x: torch.Tensor) -> torch.Tensor:
    """The e4m3 numbers nearest to x; out of range becomes +-448, NaN becomes 0x7f."""
    codes = x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, 0x7F), codes).view(torch.float8_e4m3fn)


def e4m3_decode_ref(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of e4m3 numbers, given as such or as bytes."""
    return codes.view(torch.float8_e4m3fn).float()


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [..., K] -> bytes [..., K/2], the even column in the low nibble."""
    require(codes.shape[-1] % 2 == 0, f"{codes.shape[-1]} columns cannot be packed in pairs")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


# ----------------------------------------------------------------------------------- torch: blocks
def reciprocal_ref(x: torch.Tensor) -> torch.Tensor:
    """1 / x, but finite: x may be zero or, as small global scales are, subnormal."""
    return (1 / x).clamp(max=FLT_MAX.value)


def nvfp4_codes_ref(x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes uint8 [..., K/2] and scales e4m3 [..., K/16] of x [..., K].

    g: the global scale, fp32, of a shape that broadcasts to the scales'. UnsupportedError where K
    is not a multiple of 16."""
    columns = x.shape[-1]
    require(
        columns % GROUP == 0,
        f"{columns} columns are not whole groups of {GROUP}; keep this matrix in bf16",
    )
    g = g.float()
    blocks = x.float().unflatten(-1, (-1, GROUP))  # [..., K/16, 16]
    scales = e4m3_encode_ref(blocks.abs().amax(-1) * (reciprocal_ref(g) / E2M1_MAX))
    s = scales.float()
    multiplier = reciprocal_ref(s * g)[..., None]
    codes = e2m1_encode_ref(blocks * multiplier)
    codes = torch.where(s[..., None] == 0, torch.zeros_like(codes), codes)
    return pack(codes.flatten(-2)), scales


def nvfp4_values_ref(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """e2m1 * s in `dtype` [..., N, K], without the global scale: exact from 16 bits on.

    scales: e4m3, or its values in a wider type. A zero code is zero whatever its scale, NaN
    included."""
    values = e2m1_decode_ref(unpack(codes)).to(dtype).unflatten(-1, (-1, GROUP))
    product = values * scales.to(dtype)[..., None]
    return torch.where(values == 0, values, product).flatten(-2)


def nvfp4_round_ref(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The numbers e2m1 * s, fp32, that quantising x with the global scale g leaves of x / g."""
    return nvfp4_values_ref(*nvfp4_codes_ref(x, g))


def fp8_codes_ref(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """e4m3(x / g) for a scale g fp32 that broadcasts to x."""
    return e4m3_encode_ref(x.float() * reciprocal_ref(g.float()))


# ---------------------------------------------------------------------------------- torch: inputs
def random_nvfp4(
    shape: tuple[int, ...], dev: torch.device, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of a matrix [..., K] whose values have a size of about 3; blocks of
    scale zero, subnormal and negative zero are among them."""
    *lead, K = shape
    codes = torch.randint(0, 256, (*lead, K // 2), dtype=torch.uint8, device=dev, generator=rng)
    scales = torch.randint(
        0x30, 0x41, (*lead, K // GROUP), dtype=torch.uint8, device=dev, generator=rng
    )
    scales[..., ::7] = torch.randint(0, 8, scales[..., ::7].shape, device=dev, generator=rng).to(
        torch.uint8
    )
    return codes, scales.view(torch.float8_e4m3fn)


def random_fp8(shape: tuple[int, ...], dev: torch.device, rng: torch.Generator) -> torch.Tensor:
    """e4m3 numbers of every exponent up to 1.875, of both signs, never NaN."""
    byte = torch.randint(0, 0x40, shape, dtype=torch.uint8, device=dev, generator=rng)
    sign = torch.randint(0, 2, shape, dtype=torch.uint8, device=dev, generator=rng)
    return (byte | sign << 7).view(torch.float8_e4m3fn)


# ------------------------------------------------------------------------------------- jit: codes
@triton.jit
def _encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Codes (int32, no sign) of the magnitudes of fp32 x, to the nearest, ties to even.

    Below 2^(1 - BIAS) a number loses one more bit of its significand for each power of two."""
    u = tl.minimum(x.to(tl.int32, bitcast=True) & ABS_BITS, INF_BITS)
    exponent = u >> 23
    above = exponent - (128 - BIAS)  # the smallest normal number's exponent is 0
    significand = (u & 0x7FFFFF) | 0x800000
    shift = tl.minimum(23 - MANTISSA + tl.maximum(-above, 0), 25)
    odd = (significand >> shift) & 1
    rounded = (significand + (1 << (shift - 1)) - 1 + odd) >> shift
    return tl.minimum(rounded + (tl.maximum(above, 0) << MANTISSA), LARGEST)


@triton.jit
def e2m1_encode(x):
    """Codes 0..15 (int32) of fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    code = _encode(x, 1, 1, 7) | ((bits >> 28) & 8)
    return tl.where((bits & ABS_BITS) > INF_BITS, 7, code)


@triton.jit
def e2m1_decode(code):
    """fp32 of codes 0..15: the code's bits as the head of a float, a factor of 2^126 too small."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3_encode(x):
    """e4m3 bytes (int32) of fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    code = _encode(x, 3, 7, 0x7E) | ((bits >> 24) & 0x80)
    return tl.where((bits & ABS_BITS) > INF_BITS, 0x7F, code)


@triton.jit
def e4m3_decode(byte):
    """fp32 of e4m3 bytes: the byte's bits as the head of a float, a factor of 2^120 too small."""
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


# ------------------------------------------------------------------------------------ jit: blocks
@triton.jit
def reciprocal(x):
    """1 / x rounded to nearest, but finite; NaN stays."""
    r = tl.div_rn(1.0, x)
    return tl.where(r > FLT_MAX, FLT_MAX, r)


@triton.jit
def nvfp4_codes(x, g):
    """Codes [R, C, 16] and scale bytes [R, C], int32, of fp32 blocks x [R, C, 16].

    g: the global scale, a scalar. The maximum is taken of bits, so that NaN wins it."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & ABS_BITS, 2)
    scale = e4m3_encode(bits.to(tl.float32, bitcast=True) * tl.div_rn(reciprocal(g), 6.0))
    codes = e2m1_encode(x * reciprocal(e4m3_decode(scale) * g)[:, :, None])
    return tl.where((scale == 0)[:, :, None], 0, codes), scale


@triton.jit
def nvfp4_values(codes, scale):
    """fp32 e2m1 * s of codes [R, C, 16] under scale bytes [R, C]; a zero code stays zero."""
    value = e2m1_decode(codes)
    return tl.where(value == 0.0, value, value * e4m3_decode(scale)[:, :, None])


@triton.jit
def fp8_round(x, g):
    """The numbers that the e4m3 codes of fp32 x under scale g stand for; x / g but for rounding."""
    return e4m3_decode(e4m3_encode(x * reciprocal(g)))


@triton.jit
def nvfp4_round(x, g):
    """The numbers e2m1 * s that NVFP4 codes of fp32 x [R, D] stand for; x / g but for rounding."""
    codes, scale = nvfp4_codes(tl.reshape(x, [x.shape[0], x.shape[1] // 16, 16]), g)
    return tl.reshape(nvfp4_values(codes, scale), x.shape)


# ------------------------------------------------------------------------------------ jit: memory
@triton.jit
def load_fp8(w_ptr, rows, k0, K, stride, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """fp32 values [rows, BLOCK_K] from column k0 of an e4m3 matrix, given as bytes."""
    k = k0 + tl.arange(0, BLOCK_K)
    at = w_ptr + rows[:, None] * stride + k[None, :]
    if EVEN_K:
        byte = tl.load(at)
    else:
        byte = tl.load(at, mask=(k < K)[None, :], other=0)
    return e4m3_decode(byte.to(tl.int32))


@triton.jit
def load_nvfp4(
    w_ptr, s_ptr, rows, k0, K, w_stride, s_stride, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """fp32 values e2m1 * s [rows, BLOCK_K] from column k0 of an NVFP4 matrix, scales as bytes."""
    pair = k0 // 2 + tl.arange(0, BLOCK_K // 2)
    block = k0 // 16 + tl.arange(0, BLOCK_K // 16)
    w_at = w_ptr + rows[:, None] * w_stride + pair[None, :]
    s_at = s_ptr + rows[:, None] * s_stride + block[None, :]
    if EVEN_K:
        byte = tl.load(w_at).to(tl.int32)
        scale = tl.load(s_at).to(tl.int32)
    else:
        byte = tl.load(w_at, mask=(pair * 2 < K)[None, :], other=0).to(tl.int32)
        scale = tl.load(s_at, mask=(block * 16 < K)[None, :], other=0).to(tl.int32)
    codes = tl.interleave(byte & 0xF, byte >> 4)  # [rows, BLOCK_K]
    codes = tl.reshape(codes, [codes.shape[0], BLOCK_K // 16, 16])
    values = nvfp4_values(codes, scale)
    return tl.reshape(values, [codes.shape[0], BLOCK_K])


@triton.jit
def store_codes(y, g, codes_ptr, scales_ptr, first, left, FP4: tl.constexpr, BLOCK_D: tl.constexpr):
    """Quantise fp32 y [BLOCK_D], of which `left` columns are real, and store the bytes.

    first: where the columns begin, counted in elements of a contiguous matrix. NVFP4 needs `first`
    and `left` in whole groups of 16, and zeros in the columns that are not real."""
    if FP4:
        codes, scale = nvfp4_codes(tl.reshape(y, [1, BLOCK_D // 16, 16]), g)
        low, high = tl.split(tl.reshape(codes, [BLOCK_D // 2, 2]))
        pair = tl.arange(0, BLOCK_D // 2)
        byte = (low | (high << 4)).to(tl.uint8)
        tl.store(codes_ptr + first // 2 + pair, byte, mask=pair * 2 < left)
        block = tl.arange(0, BLOCK_D // 16)
        scale = tl.reshape(scale, [BLOCK_D // 16]).to(tl.uint8)
        tl.store(scales_ptr + first // 16 + block, scale, mask=block * 16 < left)
    else:
        # in rows: bytes stored in the shape of y would widen the layout of y's loads, and with it
        # change the order of a sum over y, so that a fused norm were no longer the plain one
        WIDTH: tl.constexpr = 16 if BLOCK_D >= 16 else BLOCK_D
        d = tl.arange(0, BLOCK_D // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        byte = e4m3_encode(tl.reshape(y, d.shape) * reciprocal(g)).to(tl.uint8)
        tl.store(codes_ptr + first + d, byte, mask=d < left)
