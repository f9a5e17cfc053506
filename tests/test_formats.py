"""Quantisation schemes as files declare them, and the totals of the public releases."""

import json
from pathlib import Path

import pytest

from nemotriton.errors import ConfigError
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
from nemotriton.model.release_schemes import QUANTS, release_scheme
from nemotriton.model.writer import export_scheme, stored_names

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
