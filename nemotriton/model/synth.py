"""Seeded random weights for any configuration, scaled so that a deep model behaves like a model.

The rules, for a residual stream whose embedding has unit deviation:

    norms       1 +- 0.1, so that a forgotten weight shows
    matrices    deviation gain / sqrt(columns): an input of unit RMS gives an output of RMS gain
    mixers      each adds 0.5 to a stream of 1, so 100 layers end at an RMS of about 5
    relu^2      E[relu(u)^4] = 3/2 is divided out; rows of the matrix after it sum to zero, so that
                the mean of relu^2 adds nothing common to all tokens: that would favour experts
    head        logits of deviation 2.5
    A, dt       A uniform in [1, 16], softplus(dt_bias) log-uniform in [0.001, 0.1], as Mamba-2's
    router      correction biases differ by about 0.02; `skew` widens that until few experts work
    quantised   uniform codes, block scales in [64, 448], global scales that give the deviation

Every tensor has its own generator keyed by (seed, name): order, other tensors and dtype do not
matter, and a bf16 model holds the fp32 model's weights, rounded. A GPU draws other numbers than a
CPU. Nothing larger than 256 MiB is allocated beside the weights, or one whole tensor where a rank
keeps a part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from nemotriton.errors import ConfigError
from nemotriton.model.checkpoint import (
    Expected,
    Part,
    Role,
    copy,
    cut,
    destination_dtype,
    expected,
)
from nemotriton.model.config import ModelConfig
from nemotriton.model.formats import UNQUANTISED, QuantScheme
from nemotriton.model.writer import CheckpointWriter, export_scheme, stored_names

MIXER_GAIN = 0.5  # what one mixer adds to the residual stream
LOGIT_GAIN = 2.5
_TIED_EMBEDDING = 0.1  # small, so that a token does not mostly predict itself
_RELU2_RMS = math.sqrt(1.5)  # of relu(u)^2 for u of unit deviation
_MEAN_SIGMOID = 0.7  # of the routing score of a chosen expert
_CHUNK = 1 << 26  # elements drawn at a time

# Output RMS of the matrices that are not worked out in `_gain`.
_GAINS = {"q_proj": 1.3, "k_proj": 1.3, "o_proj": 2 * MIXER_GAIN, "out_proj": MIXER_GAIN}
_FP8_RMS = 64.0  # of stored e4m3 values: 448 is seven deviations away
_E2M1_RMS = math.sqrt(68.5 / 8)  # of uniform codes
_SCALE_BYTES = (0x68, 0x7F)  # e4m3 from 64 up to and with 448


def fill(
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    seed: int = 0,
    skew: float = 0.0,
    parts: Mapping[str, tuple[tuple[int, ...], tuple[Part, ...]]] | None = None,
) -> None:
    """Write weights into `tensors`, by canonical name, in place and on their own device.

    Quantised tensors are recognised by their names and dtypes, so any scheme works. skew: width of
    the uniform spread of router correction biases; 0 uses experts evenly, 1 very unevenly. parts:
    by name the whole shape and what of it the tensor is, which then holds that part of what the
    whole would. Raises ConfigError for a name that a model of `config` does not have.
    """
    shapes, parts = expected(config), parts or {}
    with torch.no_grad():
        for name, tensor in tensors.items():
            generator = torch.Generator(tensor.device).manual_seed(_key(seed, name))
            if name not in parts:
                _fill(config, shapes, name, tensor, generator, skew)
                continue
            shape, kept = parts[name]
            whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            _fill(config, shapes, name, whole, generator, skew)
            copy(tensor, cut(whole, shape, kept))


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _fill(
    config: ModelConfig,
    shapes: Mapping[str, Expected],
    name: str,
    tensor: torch.Tensor,
    generator: torch.Generator,
    skew: float,
) -> None:
    module, _, part = name.rpartition(".")
    known = shapes.get(name) or shapes.get(f"{module}.weight")
    if known is None:
        raise ConfigError(f"a model of this configuration has no weight {name}.")
    if known.matrix and part != "bias":
        deviation = _gain(config, shapes, module) / math.sqrt(known.shape[-1])
        _fill_matrix(tensor, module, part, deviation, generator)
    elif part == "A_log":
        tensor.uniform_(1, 16, generator=generator).log_()
    elif part == "D":
        tensor.uniform_(0.5, 1.5, generator=generator)
    elif part == "dt_bias":
        step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        tensor.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    elif part == "e_score_correction_bias":
        spread = torch.empty_like(tensor).uniform_(-0.5, 0.5, generator=generator)
        tensor.normal_(0, 0.02, generator=generator).add_(spread, alpha=skew)
    elif name == "embeddings.weight":
        _normal(tensor, _TIED_EMBEDDING if config.tied else 1.0, generator)
    elif part == "bias":
        _normal(tensor, 0.1, generator)
    elif module.endswith(("conv1d", "gate")):
        _normal(tensor, 1 / math.sqrt(known.shape[-1]), generator)
    else:
        level = _tied_norm(config) if name == "norm_f.weight" else 1.0
        _normal(tensor, 0.1 * level, generator, mean=level)


def _tied_norm(config: ModelConfig) -> float:
    """What the last norm's weight is around, so that a tied head gives the usual logits."""
    if not config.tied:
        return 1.0
    return LOGIT_GAIN / (_TIED_EMBEDDING * math.sqrt(config.width))


def _gain(config: ModelConfig, shapes: Mapping[str, Expected], module: str) -> float:
    """The output RMS wanted of the matrix `module`, for an input of unit RMS (or of relu^2)."""
    tail = module.rpartition(".")[2]
    if module == "lm_head":
        return LOGIT_GAIN
    if tail == "fc2_latent_proj":
        return MIXER_GAIN
    if tail != "down_proj":
        return _GAINS.get(tail, 1.0)
    gain = MIXER_GAIN / _RELU2_RMS
    if not module.endswith(".experts.down_proj"):
        return gain
    moe = config.mtp_moe if module.startswith("mtp.") else config.moes[int(module.split(".")[1])]
    assert moe is not None
    # K experts of independent signs, each weighted scale / K (normalised) or scale * score
    weight = 1 / moe.top_k if moe.normalize else _MEAN_SIGMOID
    combined = moe.scale * weight * math.sqrt(moe.top_k)
    return (1 / _RELU2_RMS if moe.latent else gain) / combined


def _fill_matrix(
    tensor: torch.Tensor, module: str, part: str, deviation: float, generator: torch.Generator
) -> None:
    after_relu2 = module.endswith("down_proj")
    quantised = tensor.dtype.itemsize == 1
    if part == "weight" and tensor.dtype is torch.uint8:
        if after_relu2:  # pairs of opposite codes: the rows sum to zero
            tensor.random_(0, 16, generator=generator).mul_(0x11).bitwise_xor_(0x80)
        else:
            tensor.random_(0, 256, generator=generator)
    elif part == "weight":
        _normal(tensor, _FP8_RMS if quantised else deviation, generator, centred=after_relu2)
    elif part == "weight_scale" and quantised:
        tensor.view(torch.uint8).random_(*_SCALE_BYTES, generator=generator)
    elif part == "weight_scale":
        tensor.fill_(deviation / _FP8_RMS)
    elif part == "weight_scale_2":
        scales = torch.arange(*_SCALE_BYTES, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        tensor.fill_(deviation / (_E2M1_RMS * float(scales.square().mean().sqrt())))
    elif part == "input_scale":
        tensor.fill_((32 if after_relu2 else 8) / 448)
    else:  # k_scale, v_scale
        tensor.fill_(8 / 448)


def _normal(
    tensor: torch.Tensor,
    deviation: float,
    generator: torch.Generator,
    mean: float = 0.0,
    centred: bool = False,
) -> None:
    """Draw in fp32, whatever the dtype; `centred`: make every row's mean zero."""
    rows = tensor.view(-1, tensor.shape[-1])
    for chunk in rows.split(max(1, _CHUNK // rows.shape[-1])):
        drawn = torch.empty(chunk.shape, device=tensor.device)
        drawn.normal_(mean, deviation, generator=generator)
        if centred:
            drawn -= drawn.mean(-1, keepdim=True)
        if tensor.dtype is torch.float8_e4m3fn:
            drawn.clamp_(-448, 448)
        chunk.copy_(drawn)


def write_checkpoint(
    config: ModelConfig,
    path: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    scheme: QuantScheme = UNQUANTISED,
    skew: float = 0.0,
    shard_bytes: int = 5 << 30,
    prefix: str = "backbone.",
    stacked: bool = False,
) -> None:
    """Write the weights that `fill` gives as a checkpoint directory, whole or not at all.

    Names are the release's, under `prefix`; experts one by one, or in one tensor where `stacked`.
    What a model keeps in fp32 is stored in fp32, so loading gives exactly what `fill` gives.
    Raises CheckpointError if `path` exists.
    """
    wanted = expected(config, scheme)
    with CheckpointWriter(path, shard_bytes) as writer:
        modules = {}
        for name, entry in wanted.items():
            tensor = torch.empty(entry.shape, dtype=destination_dtype(entry.role, dtype))
            fill(config, {name: tensor}, seed, skew)
            if name.endswith("conv1d.weight"):
                tensor = tensor.unsqueeze(1)
            names = stored_names(name, 0 if stacked else entry.experts, prefix)
            for index, stored in enumerate(names):
                writer.add(stored, tensor if stacked or not entry.experts else tensor[index])
                if entry.matrix and entry.role is not Role.SCALE:
                    modules[stored.rpartition(".")[0]] = entry.matrix
        named = dataclasses.replace(config, dtype=str(dtype).removeprefix("torch."))
        writer.add_json("config.json", named.to_json())
        if scheme is not UNQUANTISED:
            writer.add_json("hf_quant_config.json", export_scheme(scheme, modules))
