"""Quantisation schemes as files declare them, and NVFP4 / FP8 arithmetic against plain numbers."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nemotriton.errors import ConfigError, UnsupportedError
from nemotriton.model.config import PRESETS, ModelConfig
from nemotriton.model.expected import expected, matrices, release_size
from nemotriton.model.formats import (
    UNQUANTISED,
    Algorithm,
    Format,
    QuantScheme,
    parse_config,
    parse_hf_quant,
    read_scheme,
)
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
from nemotriton.model.release_schemes import QUANTS, release_scheme
from nemotriton.model.writer import export_scheme, stored_names

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


# --------------------------------------------------------------------------------- declared schemes
TINY = ModelConfig.preset("tiny")
TINY_MATRICES = matrices(TINY)


def hf_quant(algo: object, kv: object = None, **more: object) -> dict:
    return {"quantization": {"quant_algo": algo, "kv_cache_quant_algo": kv, **more}}


def group(bits: int, inputs: bool, **more: object) -> dict:
    weights = {"num_bits": bits, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    return {
        "targets": ["Linear"],
        "weights": weights | more,
        "input_activations": {"num_bits": bits} if inputs else None,
    }


def compressed(groups: dict, ignore: list[str] = []) -> dict:  # noqa: B006
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}


def test_nothing_said_is_bf16(tmp_path: Path) -> None:
    assert read_scheme(tmp_path, TINY_MATRICES) is UNQUANTISED
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(hf_quant(None)))
    scheme = read_scheme(tmp_path, TINY_MATRICES)
    assert scheme.counts(TINY_MATRICES) == {Format.BF16: len(TINY_MATRICES)}
    assert scheme.kv == "bf16"


def test_nano_style_exclusions() -> None:
    config = ModelConfig.preset("nano-30b")
    attention = [f"backbone.layers.{i}.mixer.{p}_proj" for i in (5, 12) for p in "qkvo"]
    excluded = [
        "lm_head",
        *attention,
        "backbone.layers.4.mixer.in_proj",
        "*.conv1d",
        "*layers.11.*",
    ]
    scheme = parse_hf_quant(hf_quant("NVFP4", "FP8", group_size=16, exclude_modules=excluded))
    plain = {m for m in matrices(config) if scheme.of(m) is Format.BF16}
    assert plain == {
        "lm_head",
        *(f"layers.{i}.mixer.{p}_proj" for i in (5, 12) for p in "qkvo"),
        "layers.4.mixer.in_proj",
        "layers.11.mixer.in_proj",
        "layers.11.mixer.out_proj",
    }
    assert scheme.kv == "fp8"
    assert not scheme.weight_only("layers.4.mixer.out_proj")


@pytest.mark.parametrize(
    "pattern",
    [
        "backbone.layers.3.mixer.experts*",
        "model.layers.3.mixer.experts",
        "backbone.layers.3.mixer.experts.*.up_proj",
        "backbone.layers.3.mixer.experts.0.up_proj",
        "*.3.mixer.experts.*",
        "language_model.backbone.layers.3.*",
        "layers.3",
        "re:.*layers\\.3\\.mixer\\.experts\\.\\d+\\.up_proj",
    ],
)
def test_exclusions_find_stacked_experts(pattern: str) -> None:
    scheme = parse_hf_quant(hf_quant("FP8", exclude_modules=[pattern]))
    assert scheme.of("layers.3.mixer.experts.up_proj") is Format.BF16
    assert scheme.of("layers.5.mixer.experts.up_proj") is Format.FP8
    assert scheme.of("layers.1.mixer.q_proj") is Format.FP8


def test_prefix_patterns_reach_the_trunk_and_mtp_its_own() -> None:
    scheme = parse_hf_quant(hf_quant("FP8", exclude_modules=["mtp*"]))
    assert scheme.of("mtp.layers.0.mixer.q_proj") is Format.BF16
    assert scheme.of("layers.1.mixer.q_proj") is Format.FP8
    scheme = parse_hf_quant(hf_quant("FP8", exclude_modules=["backbone*"]))
    assert scheme.of("layers.1.mixer.q_proj") is Format.BF16


def test_mixed_precision_entries_by_matrix_module_and_wildcard() -> None:
    table = {
        "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
        "backbone.layers.3.mixer.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "backbone.layers.5.mixer.experts.*": {"quant_algo": "NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "nvfp4"},
    }
    for experts in range(4):
        name = f"backbone.layers.8.mixer.experts.{experts}.up_proj"
        table[name] = {"quant_algo": "NVFP4"}
    scheme = parse_hf_quant(hf_quant("MIXED_PRECISION", quantized_layers=table))
    found = {m: scheme.algorithm(m) for m in TINY_MATRICES if scheme.of(m) is not Format.BF16}
    assert found == {
        "layers.0.mixer.in_proj": Algorithm.FP8,
        "layers.3.mixer.experts.up_proj": Algorithm.W4A16_NVFP4,
        "layers.3.mixer.experts.down_proj": Algorithm.W4A16_NVFP4,
        "layers.5.mixer.experts.up_proj": Algorithm.NVFP4,
        "layers.5.mixer.experts.down_proj": Algorithm.NVFP4,
        "layers.8.mixer.experts.up_proj": Algorithm.NVFP4,
        "lm_head": Algorithm.NVFP4,
    }
    assert scheme.weight_only("layers.3.mixer.experts.up_proj")
    assert not scheme.weight_only("lm_head")
    assert scheme.weight_only("layers.0.mixer.out_proj")  # bf16


def test_modelopt_groups_without_input_quantisation_are_weight_only() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    both = parse_config(config | {"config_groups": {"group_0": group(4, True)}})
    weights = parse_config(config | {"config_groups": {"group_0": group(4, False)}})
    assert both.algorithm("layers.1.mixer.q_proj") is Algorithm.NVFP4
    assert weights.algorithm("layers.1.mixer.q_proj") is Algorithm.W4A16_NVFP4
    assert weights.of("lm_head") is Format.BF16
    without_algo = {k: v for k, v in config.items() if k != "quant_algo"}
    only_groups = parse_config(without_algo | {"config_groups": {"group_0": group(4, False)}})
    assert only_groups.algorithm("layers.1.mixer.q_proj") is Algorithm.W4A16_NVFP4
    assert only_groups.of("lm_head") is Format.BF16


def test_compressed_tensors_spelling() -> None:
    mixed = compressed(
        {
            "group_0": group(4, True) | {"targets": ["re:.*experts.*"]},
            "group_1": group(8, True, strategy="tensor") | {"targets": ["Linear"]},
        },
        ["lm_head", "re:.*\\.(q|k|v|o)_proj$"],
    )
    scheme = parse_config(mixed | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert scheme.algorithm("layers.3.mixer.experts.down_proj") is Algorithm.NVFP4
    assert scheme.algorithm("layers.0.mixer.in_proj") is Algorithm.FP8
    assert scheme.algorithm("layers.1.mixer.k_proj") is Algorithm.NONE
    assert scheme.algorithm("lm_head") is Algorithm.NONE
    assert scheme.kv == "fp8"
    weight_only = parse_config(compressed({"group_0": group(4, False)}))
    assert weight_only.algorithm("layers.0.mixer.in_proj") is Algorithm.W4A16_NVFP4


def test_both_files_alike_and_in_conflict(tmp_path: Path) -> None:
    table = {"backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"}}
    inner = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table}
    exported = hf_quant("MIXED_PRECISION", "FP8", quantized_layers=table)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": inner}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(exported))
    scheme = read_scheme(tmp_path, TINY_MATRICES)
    assert scheme.notes == ()
    assert scheme.kv == "fp8"  # only one of the files speaks of it
    exported["quantization"]["quantized_layers"] = {"lm_head": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(exported))
    inner["kv_cache_scheme"] = None
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"quantization_config": inner}})
    )
    scheme = read_scheme(tmp_path, TINY_MATRICES)
    assert scheme.of("layers.0.mixer.in_proj") is Format.FP8
    assert scheme.of("lm_head") is Format.BF16
    assert scheme.kv == "bf16"
    assert len(scheme.notes) == 2
    assert "disagree about 2 matrices" in scheme.notes[0]
    assert "layers.0.mixer.in_proj (FP8 against none)" in scheme.notes[0]
    assert "lm_head (none against NVFP4)" in scheme.notes[0]
    assert "bf16 keys and values" in scheme.notes[1]


UNKNOWN = "MXFP8"
MIXED = "MIXED_PRECISION"
MALFORMED = {
    "unknown algorithm": (parse_hf_quant, hf_quant(UNKNOWN), "'MXFP8' of the whole model"),
    "unknown entry": (
        parse_hf_quant,
        hf_quant(MIXED, quantized_layers={"backbone.layers.2.x": {"quant_algo": UNKNOWN}}),
        "quant_algo 'MXFP8' of backbone.layers.2.x is not supported. Supported: FP8, NVFP4",
    ),
    "mixed without table": (parse_hf_quant, hf_quant(MIXED), "without quantized_layers"),
    "table of strings": (
        parse_hf_quant,
        hf_quant(MIXED, quantized_layers={"a.b": "FP8"}),
        r"quantized_layers\['a.b'\] is 'FP8', not an object",
    ),
    "experts that differ": (
        parse_hf_quant,
        hf_quant(
            MIXED,
            quantized_layers={
                "backbone.layers.1.mixer.experts.0.up_proj": {"quant_algo": "FP8"},
                "backbone.layers.1.mixer.experts.1.up_proj": {"quant_algo": "NVFP4"},
            },
        ),
        r"experts.1.up_proj is NVFP4, but another expert of layers.1.mixer.experts.up_proj is FP8",
    ),
    "group size": (parse_hf_quant, hf_quant("NVFP4", group_size=32), "group_size 32"),
    "entry's group size": (
        parse_hf_quant,
        hf_quant(MIXED, quantized_layers={"lm_head": {"quant_algo": "NVFP4", "group_size": 128}}),
        "group_size 128 of lm_head",
    ),
    "kv algorithm": (parse_hf_quant, hf_quant("FP8", "INT8"), "kv_cache_quant_algo 'INT8'"),
    "no quantization": (parse_hf_quant, {"quant": 1}, "no object 'quantization'"),
    "method": (parse_config, {"quant_method": "awq"}, "quant_method 'awq' is not supported"),
    "config algorithm": (parse_config, {"quant_algo": "INT4_AWQ"}, "'INT4_AWQ' of the whole model"),
    "int4 group": (
        parse_config,
        compressed({"g": group(4, False, type="int")}),
        r"config_groups.g: weights \{'type': 'int', 'num_bits': 4",
    ),
    "fp4 in groups of 32": (parse_config, compressed({"g": group(4, True, group_size=32)}), "32"),
    "fp8 by channel": (
        parse_config,
        compressed({"g": group(8, True, strategy="channel")}),
        "channel",
    ),
    "groups missing": (
        parse_config,
        {"quant_method": "compressed-tensors"},
        "config_groups is None",
    ),
    "regex": (
        parse_config,
        compressed({"g": group(4, True)}, ["re:(x"]),
        "not a regular expression",
    ),
    "kv scheme": (
        parse_config,
        {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4}},
        "kv_cache_scheme",
    ),
    "no object": (parse_config, ["FP8"], "must be an object"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_declarations_stop_at_once(name: str) -> None:
    parse, data, message = MALFORMED[name]
    with pytest.raises(ConfigError, match=message):
        parse(data)


@pytest.mark.parametrize("text,message", [("{", "not valid JSON"), ("[1]", "holds a list")])
def test_unreadable_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_scheme(tmp_path, TINY_MATRICES)


# --------------------------------------------------------------------------------- public releases
@pytest.mark.parametrize(
    "preset,quant,gate_fp32,nbytes,tensors",
    [
        ("super-120b", "bf16", False, 247_222_108_160, 42_683),
        ("super-120b", "fp8", False, 128_334_890_312, None),
        ("super-120b", "nvfp4", False, 80_297_329_824, 165_860),
        ("nano-30b", "nvfp4", True, 19_339_781_632, 24_147),
        ("ultra-550b", "bf16", False, 1_121_049_257_984, None),
    ],
)
def test_release_totals(
    preset: str, quant: str, gate_fp32: bool, nbytes: int, tensors: int | None
) -> None:
    config = ModelConfig.preset(preset)
    found = release_size(expected(config, release_scheme(config, quant)), gate_fp32)
    assert found[0] == nbytes
    assert tensors in (None, found[1])


def test_super_nvfp4_counts() -> None:
    config = ModelConfig.preset("super-120b")
    scheme = release_scheme(config, "nvfp4")
    counts = scheme.counts(matrices(config))
    assert counts[Format.FP8] == 139
    assert counts[Format.NVFP4] == 2 * 40 + 1  # 40,960 routed matrices in 80 stacks, one shared


@pytest.mark.parametrize("preset", PRESETS)
def test_bf16_totals_agree_with_the_config(preset: str) -> None:
    config = ModelConfig.preset(preset)
    assert release_size(expected(config))[0] == config.bf16_checkpoint_bytes()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("preset", ["super-120b", "nano-30b", "lightning-30b", "tiny"])
def test_an_exported_scheme_reads_back(preset: str, quant: str) -> None:
    config = ModelConfig.preset(preset)
    scheme = release_scheme(config, quant)
    names = {
        name.rpartition(".")[0]: m
        for m in matrices(config)
        for name in stored_names(f"{m}.weight", 2)
    }
    again = parse_hf_quant(export_scheme(scheme, names))
    for matrix in matrices(config):
        assert again.algorithm(matrix) is scheme.algorithm(matrix)
    assert again.kv == scheme.kv


def test_an_unknown_quant_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="quant is 'int4'; use one of bf16, fp8, nvfp4"):
        release_scheme(TINY, "int4")


def test_columns_that_nvfp4_cannot_hold_are_refused() -> None:
    narrow = ModelConfig.from_json(
        ModelConfig.preset("tiny").to_json() | {"hidden_size": 120, "moe_latent_size": 64}
    )
    with pytest.raises(ConfigError, match=r"layers.0.mixer.in_proj has 120 columns"):
        expected(narrow, QuantScheme(default=Algorithm.NVFP4))
