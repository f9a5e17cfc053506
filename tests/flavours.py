"""Small checkpoints in every way that quantised releases are stored, and the same model decoded.

The decoding here is written from the format's description, in fp64, and shares no code with the
package.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import matrices
from nemotriton.model.formats import Algorithm, QuantScheme
from nemotriton.model.mtp import MtpBlock
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.synth import write_checkpoint
from nemotriton.model.writer import quantization_config
from tests.checkpoint.files import BASE, Tensors, rewritten

CONFIG = ModelConfig.from_json(BASE | {"vocab_size": 320})
NO_LATENT = ModelConfig.from_json(BASE | {"vocab_size": 320, "moe_latent_size": None})
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return float("nan") if byte & 0x7F == 0x7F else sign * (8 + mantissa) * 2.0 ** (exponent - 10)


FP4_TABLE = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
FP8_TABLE = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)


def decoded(module: nn.Module) -> torch.Tensor:
    """The fp32 weight of a matrix in any format, by tables in fp64."""
    part = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
    weight = part["weight"]
    if weight.dtype == torch.uint8:
        codes = torch.stack((weight % 16, weight // 16), -1).flatten(-2)
        blocks = FP8_TABLE[part["weight_scale"].view(torch.uint8).long()]
        values = FP4_TABLE[codes.long()] * blocks.repeat_interleave(16, -1)
        return (values * part["weight_scale_2"].double()[..., None, None]).float()
    if weight.dtype == torch.float8_e4m3fn:
        values = FP8_TABLE[weight.view(torch.uint8).long()]
        return (values * part["weight_scale"].double()[..., None, None]).float()
    return weight


def plain(model: NemotronH | MtpBlock, config: ModelConfig) -> NemotronH | MtpBlock:
    """The same model with no quantised matrix: those are decoded and held in fp32."""
    twin = type(model)(config, model.dtype, torch.device("cpu"))
    for name, parameter in list(twin.named_parameters()):
        module, _, part = name.rpartition(".")
        source = model.get_submodule(module)
        value = decoded(source) if part == "weight" else getattr(source, part).detach()
        if value.dtype == parameter.dtype:
            parameter.copy_(value)
        else:
            wide = nn.Parameter(value.clone(), requires_grad=False)
            setattr(twin.get_submodule(module), part, wide)
    if isinstance(twin, NemotronH):
        twin.prepare()
    return twin


# ------------------------------------------------------------------------------------ the flavours
def edit_json(path: Path, name: str, change: Callable[[dict], dict]) -> None:
    file = path / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def super_mixed(path: Path) -> ModelConfig:
    """MIXED_PRECISION, said in both files alike."""
    write_checkpoint(CONFIG, path, scheme=release_scheme(CONFIG, "super-mixed"))
    exported = json.loads((path / "hf_quant_config.json").read_text())
    inner = {"quantization_config": quantization_config(exported)}
    edit_json(path, "config.json", lambda data: data | inner)
    return CONFIG


def nano_nvfp4(path: Path) -> ModelConfig:
    """One algorithm and a list of exclusions, in hf_quant_config.json alone."""
    scheme = release_scheme(CONFIG, "nvfp4")
    write_checkpoint(CONFIG, path, scheme=scheme)
    left = [m for m in matrices(CONFIG) if scheme.algorithm(m) is Algorithm.NONE]
    excluded = [m if m.startswith(("mtp.", "lm_head")) else f"backbone.{m}" for m in left]
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    said = {"quantization": quantization | {"exclude_modules": excluded}}
    edit_json(path, "hf_quant_config.json", lambda _: said)
    return CONFIG


def fp8(path: Path) -> ModelConfig:
    """Experts and Mamba in FP8."""
    write_checkpoint(CONFIG, path, scheme=release_scheme(CONFIG, "fp8"))
    return CONFIG


def compressed_tensors(path: Path) -> ModelConfig:
    """weight_packed and divisors for globals; groups of targets in config.json alone."""
    scheme = release_scheme(CONFIG, "super-mixed")
    write_checkpoint(CONFIG, path.with_name("modelopt"), scheme=scheme)

    def change(tensors: Tensors) -> Tensors:
        out = {}
        for name, tensor in tensors.items():
            base, _, part = name.rpartition(".")
            four_bits = f"{base}.weight_scale_2" in tensors
            if four_bits and part in ("weight_scale_2", "input_scale"):
                spelled = {"weight_scale_2": "weight_global_scale"}.get(part, "input_global_scale")
                out[f"{base}.{spelled}"] = tensor.reciprocal().view(1)
            else:
                out[f"{base}.weight_packed" if four_bits and part == "weight" else name] = tensor
        return out

    def group(algorithm: Algorithm, **weights: object) -> dict[str, object]:
        names = [m for m in matrices(CONFIG) if scheme.algorithm(m) is algorithm]
        targets = [f"re:.*{re.escape(m).replace('experts', 'experts.*')}$" for m in names]
        return {"weights": {"type": "float"} | weights, "input_activations": {}, "targets": targets}

    groups = {
        "group_0": group(Algorithm.NVFP4, num_bits=4, group_size=16),
        "group_1": group(Algorithm.FP8, num_bits=8, strategy="tensor"),
    }
    said = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    rewritten(path.with_name("modelopt"), path, change, quantization_config=said)
    (path / "hf_quant_config.json").unlink()
    return CONFIG


def stacked(path: Path, config: ModelConfig = CONFIG) -> ModelConfig:
    """Experts and their scales in one tensor a matrix."""
    scheme = release_scheme(config, "super-mixed")
    write_checkpoint(config, path, scheme=scheme, stacked=True)
    return config


def head(path: Path, algorithm: Algorithm) -> ModelConfig:
    """A quantised lm_head, and nothing else."""
    write_checkpoint(CONFIG, path, scheme=QuantScheme(listed={"lm_head": algorithm}))
    return CONFIG


def everything(path: Path, algorithm: Algorithm) -> ModelConfig:
    """All matrices there are, attention, latent projections and MTP too."""
    write_checkpoint(CONFIG, path, scheme=replace(QuantScheme(), default=algorithm))
    return CONFIG


FLAVOURS: dict[str, Callable[[Path], ModelConfig]] = {
    "super-mixed": super_mixed,
    "nano-nvfp4": nano_nvfp4,
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "stacked": stacked,
    "stacked without latent": lambda path: stacked(path, NO_LATENT),
    "lm_head nvfp4": lambda path: head(path, Algorithm.NVFP4),
    "lm_head fp8": lambda path: head(path, Algorithm.FP8),
    "all nvfp4": lambda path: everything(path, Algorithm.NVFP4),
    "all fp8": lambda path: everything(path, Algorithm.FP8),
    "weight only": lambda path: everything(path, Algorithm.W4A16_NVFP4),
}
