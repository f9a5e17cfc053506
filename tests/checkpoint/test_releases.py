"""The public quantised releases, by their headers and quantisation files: every tensor placed."""

import json
import math
from pathlib import Path

from nemotriton.model.checkpoint import make_plan
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import Expected, Role, expected
from nemotriton.model.formats import Format, QuantScheme
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.shards import DTYPES, Shard, TensorInfo
from nemotriton.model.sources import Source
from nemotriton.model.writer import export_scheme, stored_names

STORED = {
    Role.FP8: "F8_E4M3",
    Role.CODES: "U8",
    Role.BLOCK_SCALE: "F8_E4M3",
    Role.SCALE: "F32",
}


def headers(wanted: dict[str, Expected], directory: Path, gate: str) -> Source:
    """The tensors of a release in one imaginary file: experts one by one, vectors BF16."""
    file, infos, end = directory / "model.safetensors", [], 0
    for name, entry in wanted.items():
        shape = entry.shape[1:] if entry.experts else entry.shape
        dtype = STORED.get(entry.role, "BF16")
        if name.endswith("conv1d.weight"):
            shape = (shape[0], 1, shape[1])
        elif name.endswith("e_score_correction_bias"):
            dtype = "F32"
        elif name.endswith("gate.weight"):
            dtype = gate
        size = math.prod(shape) * DTYPES[dtype].itemsize
        for stored in stored_names(name, entry.experts):
            infos.append(TensorInfo(stored, dtype, shape, file, end, end + size))
            end += size
    return Source(directory, (Shard(file, end, tuple(infos)),))


def modules(wanted: dict[str, Expected]) -> dict[str, str]:
    return {
        stored.rpartition(".")[0]: entry.matrix
        for name, entry in wanted.items()
        if entry.matrix and name.endswith(".weight")
        for stored in stored_names(name, entry.experts)
    }


def release(preset: str, quant: str) -> tuple[ModelConfig, QuantScheme, dict[str, Expected]]:
    config = ModelConfig.preset(preset)
    scheme = release_scheme(config, quant)
    return config, scheme, expected(config, scheme)


def test_super_nvfp4(tmp_path: Path) -> None:
    """MIXED_PRECISION in both files, three formats inside one layer, BF16 MTP, k and v scales."""
    config, scheme, wanted = release("super-120b", "nvfp4")
    exported = export_scheme(scheme, modules(wanted))
    assert len(exported["quantization"]["quantized_layers"]) == 41_100
    inner = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    inner |= {k: v for k, v in exported["quantization"].items() if k != "kv_cache_quant_algo"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(exported))
    (tmp_path / "config.json").write_text(
        json.dumps(config.to_json() | {"quantization_config": inner})
    )
    plan = make_plan(headers(wanted, tmp_path, "BF16"), config, act_quant=True)
    assert len(plan.placements) == 165_860
    assert plan.nbytes == 80_297_329_824
    assert plan.expected == wanted
    assert (plan.mtp, plan.mtp_blocks, plan.ignored, plan.notes) == ("complete", 1, (), ())
    shared = "layers.8.mixer.shared_experts"
    assert plan.scheme.of(f"{shared}.up_proj") is Format.FP8
    assert plan.scheme.of(f"{shared}.down_proj") is Format.BF16
    assert plan.scheme.of("layers.8.mixer.experts.down_proj") is Format.NVFP4
    assert len(plan.scheme.kv_scaled) == 8


def test_nano_nvfp4(tmp_path: Path) -> None:
    """One algorithm and a list of exclusions, in hf_quant_config.json alone; fp32 gates."""
    config, _, wanted = release("nano-30b", "nvfp4")
    attention = (5, 12, 19, 26, 33, 42)
    excluded = ["lm_head"]
    for layer in attention:
        excluded += [f"backbone.layers.{layer}.mixer.{p}_proj" for p in "qkvo"]
        excluded += [f"backbone.layers.{layer - 1}.mixer.{p}_proj" for p in ("in", "out")]
    excluded += [f"backbone.layers.{layer}.mixer.conv1d" for layer in config.mamba_layers]
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    exported = {"quantization": quantization | {"exclude_modules": excluded}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(exported))
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    plan = make_plan(headers(wanted, tmp_path, "F32"), config)
    assert len(plan.placements) == 24_147
    assert plan.nbytes == 19_339_781_632
    assert plan.expected == wanted
    assert plan.mtp == "none"
    assert (plan.notes, plan.scheme.kv, plan.scheme.kv_scaled) == ((), "fp8", frozenset())
