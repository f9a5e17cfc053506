"""NVFP4 and FP8 numbers against the formats' definitions in plain Python."""

import itertools
import math

import numpy as np
import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.model.nvfp4 import (
    Nvfp4,
    dequantize_fp8,
    dequantize_nvfp4,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    fp8_global_scale,
    nvfp4_global_scale,
    nvfp4_values,
    pack,
    quantize_fp8,
    quantize_nvfp4,
    swizzle_scales,
    unpack,
    unswizzle_scales,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
ALL_CODES = torch.arange(16, dtype=torch.uint8)


def e4m3_number(byte: int) -> float:
    """The format's definition, in doubles."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest(x: float, numbers: list[float]) -> int:
    """Index of the number nearest to |x|, ties to the even index; numbers ascend from zero."""
    gaps = [abs(min(abs(x), 1e9) - n) for n in numbers]
    best = min(gaps)
    close = [i for i, gap in enumerate(gaps) if gap == best]
    return next((i for i in close if i % 2 == 0), close[0])


def fp16_numbers() -> torch.Tensor:
    """Every finite fp16 number and both infinities, as fp32."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = bits.view(torch.float16).float()
    return x[~x.isnan()]


def around(points: list[float]) -> torch.Tensor:
    """The points and their fp32 neighbours, with both signs."""
    p = np.array(points, dtype=np.float32)
    both = np.concatenate([p, np.nextafter(p, np.float32(0)), np.nextafter(p, np.float32(1e9))])
    return torch.from_numpy(np.concatenate([both, -both]))


# ------------------------------------------------------------------------------------- single codes
def test_e2m1_decode_is_the_published_table() -> None:
    assert e2m1_decode(ALL_CODES).tolist() == E2M1 + [-v for v in E2M1]
    assert e2m1_decode(torch.tensor([8], dtype=torch.uint8)).signbit().all()


def test_e2m1_encode_rounds_every_fp16_number_and_all_ties() -> None:
    middles = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    x = torch.cat([fp16_numbers(), around(middles), around(E2M1[1:])])
    wanted = [nearest(v, E2M1) | (8 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert e2m1_encode(x).tolist() == wanted


def test_e2m1_ties_and_extremes_by_hand() -> None:
    x = [
        0.25,
        0.75,
        1.25,
        1.75,
        2.5,
        3.5,
        5.0,
        5.001,
        7,
        math.inf,
        math.nan,
        -0.0,
        -0.25,
        -math.inf,
    ]
    codes = [0, 2, 2, 4, 4, 6, 6, 7, 7, 7, 7, 8, 8, 15]
    assert e2m1_encode(torch.tensor(x)).tolist() == codes


def test_e4m3_decode_is_the_formats_definition() -> None:
    wanted = torch.tensor([e4m3_number(b) for b in range(256)])
    assert torch.equal(e4m3_decode(ALL_BYTES).nan_to_num(-1), wanted.nan_to_num(-1))
    assert torch.equal(e4m3_decode(ALL_BYTES.view(torch.float8_e4m3fn)).isnan(), wanted.isnan())


def test_e4m3_encode_rounds_every_fp16_number_and_all_ties() -> None:
    numbers = [e4m3_number(b) for b in range(0x7F)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    x = torch.cat([fp16_numbers()[::7], around(middles), around([448.0, 464.0, 480.0])])
    table = np.array(numbers)
    # index of the nearest: found from the sorted midpoints, ties to the even index
    magnitude = np.abs(x.double().numpy())
    index = np.searchsorted(np.array(middles), magnitude, side="left")
    tie = (index < len(middles)) & (np.array([*middles, np.inf])[index] == magnitude)
    index = np.where(tie & (index % 2 == 1), index + 1, index)
    signs = np.where(np.signbit(x.numpy()), 0x80, 0)
    assert table[-1] == 448
    assert e4m3_encode(x).view(torch.uint8).tolist() == (index | signs).tolist()


def test_e4m3_extremes_by_hand() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 1e30, -0.0, 2.0**-10, 2.0**-11])
    codes = [0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0x80, 0, 0]
    assert e4m3_encode(x).view(torch.uint8).tolist() == codes


def test_packing_puts_the_even_column_low() -> None:
    assert pack(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]
    assert torch.equal(pack(unpack(ALL_BYTES)), ALL_BYTES)
    pairs = torch.cartesian_prod(ALL_CODES, ALL_CODES)
    assert torch.equal(unpack(pack(pairs)), pairs)
    with pytest.raises(UnsupportedError, match="3 columns cannot be packed"):
        pack(torch.zeros(2, 3, dtype=torch.uint8))


# ------------------------------------------------------------------------------------------- blocks
def test_every_scale_byte_times_every_code_is_exact() -> None:
    codes = pack(ALL_CODES.repeat(256, 1))  # row b: all codes under scale byte b
    values = nvfp4_values(codes, ALL_BYTES[:, None].view(torch.float8_e4m3fn))
    wanted = torch.tensor(
        [
            [
                0.0 if c % 8 == 0 else e4m3_number(b) * (E2M1 + [-v for v in E2M1])[c]
                for c in range(16)
            ]
            for b in range(256)
        ],
        dtype=torch.float64,
    )
    assert torch.equal(values.double().nan_to_num(-1e9), wanted.nan_to_num(-1e9))
    assert values[0x7F, 0] == 0  # a zero code under a NaN scale
    assert bool(values[0x7F, 1:8].isnan().all())
    finite = values[~values.isnan()]
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(finite.to(dtype).float(), finite)


def quantised_by_hand(x: np.ndarray, g: np.float32) -> tuple[int, list[int]]:
    """(scale byte, codes) of one block, in fp32 scalars and the stated order of operations."""
    one, six, largest = np.float32(1), np.float32(6), np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        k = np.minimum(one / g, largest) / six
        amax = np.float32(np.nan) if np.isnan(x).any() else np.abs(x).max()
        target = amax * k
        if np.isnan(target):
            return 0x7F, [7] * 16
        numbers = [e4m3_number(b) for b in range(0x7F)]
        byte = nearest(float(min(target, np.float32(448))), numbers)
        s = np.float32(numbers[byte])
        m = np.minimum(one / (s * g), largest)
        scaled = [float(v * m) for v in x]
    signs = [8 if math.copysign(1, v) < 0 else 0 for v in scaled]
    codes = [nearest(min(abs(v), 6.0), E2M1) | sign for v, sign in zip(scaled, signs, strict=True)]
    return byte, codes if byte else [0] * 16


def blocks() -> tuple[torch.Tensor, list[str]]:
    rng = np.random.default_rng(7)
    named = {
        "normal": rng.normal(size=16),
        "wide": rng.normal(size=16) * np.exp(rng.normal(size=16) * 4),
        "zero": np.zeros(16),
        "minus zero": -np.zeros(16),
        "one value": np.eye(16)[3] * 5,
        "tiny": rng.normal(size=16) * 1e-6,
        "subnormal scale": rng.normal(size=16) * 2e-3,
        "underflow": rng.normal(size=16) * 1e-9,
        "denormal": rng.normal(size=16) * 1e-41,
        "overflow": rng.normal(size=16) * 1e9,
        "ties": np.array(E2M1 + [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0]),
        "infinite": np.where(np.arange(16) == 5, np.inf, rng.normal(size=16)),
        "minus infinite": np.where(np.arange(16) == 5, -np.inf, rng.normal(size=16)),
        "nan": np.where(np.arange(16) == 5, np.nan, rng.normal(size=16)),
    }
    x = np.stack([v.astype(np.float32) for v in named.values()])
    return torch.from_numpy(x), list(named)


@pytest.mark.parametrize("g", [1.0, 1 / 448, 0.00137, 3.7e-7, 1e-40, 123.0])
def test_quantiser_follows_the_stated_order(g: float) -> None:
    x, names = blocks()
    packed, scales, _ = quantize_nvfp4(x, torch.tensor(g))
    codes = unpack(packed)
    for row, name in enumerate(names):
        byte, wanted = quantised_by_hand(x[row].numpy(), np.float32(g))
        assert int(scales.view(torch.uint8)[row, 0]) == byte, name
        assert codes[row].tolist() == wanted, name


def test_special_blocks_decode_as_documented() -> None:
    x, names = blocks()
    weight = quantize_nvfp4(x, torch.tensor(1 / 256))
    largest = 6 * 448 / 256
    decoded = dict(zip(names, dequantize_nvfp4(weight), strict=True))
    bytes_ = dict(zip(names, weight.scales.view(torch.uint8)[:, 0].tolist(), strict=True))
    for name in ("zero", "minus zero", "underflow", "denormal"):
        assert bytes_[name] == 0, name
        assert torch.equal(decoded[name], torch.zeros(16)), name
    coarse = quantize_nvfp4(x[names.index("subnormal scale")][None], torch.tensor(0.05))
    assert 1 <= int(coarse.scales.view(torch.uint8)) <= 7
    assert bytes_["overflow"] == bytes_["infinite"] == 0x7E
    assert float(decoded["infinite"][5]) == largest
    assert float(decoded["minus infinite"][5]) == -largest
    assert float(decoded["overflow"].abs().max()) == largest
    assert bool(decoded["nan"].isnan().all())
    assert not any(d.isnan().any() for name, d in decoded.items() if name != "nan")
    assert decoded["ties"].tolist() == [*E2M1, 0, 1, 1, 2, 2, 4, 4, -4]


def test_values_on_the_grid_survive_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (3, 40, 96), generator=generator, dtype=torch.uint8)
    codes[..., ::16] = 7  # every block uses its full range, so its scale is found again
    scales = torch.randint(1, 0x7F, (3, 40, 6), generator=generator, dtype=torch.uint8)
    g = torch.tensor([2.0**-9, 1.0, 2.0**5])
    weight = Nvfp4(pack(codes), scales.view(torch.float8_e4m3fn), g)
    again = quantize_nvfp4(dequantize_nvfp4(weight), g)
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.scales.view(torch.uint8), scales)


def test_each_leading_matrix_has_its_own_global_scale() -> None:
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1))
    x *= torch.tensor([1.0, 100.0, 0.0, 1e-4])[:, None, None]
    weight = quantize_nvfp4(x)
    assert torch.equal(weight.global_scale, nvfp4_global_scale(x))
    assert float(weight.global_scale[2]) == 1.0  # a matrix of zeros
    assert torch.equal(weight.global_scale[1], x[1].abs().max() / 2688)
    for i in range(4):
        alone = quantize_nvfp4(x[i])
        assert torch.equal(alone.codes, weight.codes[i])
        assert torch.equal(dequantize_nvfp4(alone), dequantize_nvfp4(weight)[i])
    # the widest gap between codes is 2, half of it 1, in units of the block's scale
    step = e4m3_decode(weight.scales) * weight.global_scale[:, None, None]
    error = (dequantize_nvfp4(weight) - x).abs().unflatten(-1, (-1, 16)).amax(-1)
    assert bool((error <= step * 1.07).all())  # 1 + the scale's own rounding, 1/16


@pytest.mark.parametrize("columns", [8, 24, 100])
def test_columns_must_be_whole_groups(columns: int) -> None:
    with pytest.raises(UnsupportedError, match=f"{columns} columns are not whole groups of 16"):
        quantize_nvfp4(torch.zeros(2, columns))


def test_fp8_quantiser() -> None:
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(2))
    x[1] = 0
    weight = quantize_fp8(x)
    assert torch.equal(weight.global_scale, fp8_global_scale(x))
    assert float(weight.global_scale[1]) == 1.0
    for i in (0, 2):
        g = x[i].abs().max() / 448
        assert torch.equal(weight.global_scale[i], g)
        assert torch.equal(weight.codes[i].float(), e4m3_encode(x[i] * (1 / g)).float())
    # three mantissa bits: half a step is 1/16 of a number, or 2^-10 below the normal range
    bound = (x.abs() / 16).clamp(min=float(weight.global_scale.max()) * 2.0**-10)
    assert bool(((dequantize_fp8(weight) - x).abs() <= bound * 1.001).all())
    extremes = torch.tensor([[math.inf, -math.inf, math.nan, 1e9]])
    codes = quantize_fp8(extremes, torch.tensor(0.5)).codes.view(torch.uint8)
    assert codes.tolist() == [[0x7E, 0xFE, 0x7F, 0x7E]]


@pytest.mark.parametrize("rows,cols", [(1, 1), (128, 4), (129, 5), (31, 8), (300, 21), (1856, 3)])
def test_swizzled_scales_are_where_the_layout_says(rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    linear = torch.randint(1, 255, (rows, cols), generator=generator, dtype=torch.uint8)
    tiles = swizzle_scales(linear.view(torch.float8_e4m3fn))
    assert tiles.dtype is torch.float8_e4m3fn
    raw = tiles.view(torch.uint8)
    col_tiles = -(-cols // 4)
    assert raw.numel() == -(-rows // 128) * col_tiles * 512
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    inside = (r % 128 % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    address = ((r // 128) * col_tiles + c // 4) * 512 + inside
    assert torch.equal(raw[address], linear)
    padding = torch.ones_like(raw, dtype=torch.bool)
    padding[address.flatten()] = False
    assert not raw[padding].any()
    assert torch.equal(unswizzle_scales(raw, rows, cols), linear)


def test_swizzling_keeps_experts_apart() -> None:
    scales = torch.randint(0, 255, (3, 130, 6), dtype=torch.uint8)
    tiles = swizzle_scales(scales)
    assert torch.equal(tiles[1], swizzle_scales(scales[1]))
    assert torch.equal(unswizzle_scales(tiles, 130, 6), scales)
