"""What runs in which format on this device: decided once when a model is loaded, and said once.

    weights   as stored, always. bf16 and fp32 activations by default (w8a16, w4a16); with
              act_quant, and where the checkpoint was made for it, activations are rounded to FP8
              (w8a8) or to NVFP4 (w4a4, emulated: the rounded numbers are multiplied in bf16);
              with act_quant="fp8" only those in front of FP8 matrices are.
    K and V   "fp8": e4m3 times a scale a layer; "bf16": the activations' own dtype, whichever that
              is; "auto": fp8 if the checkpoint was calibrated for it and has the scales of every
              attention layer, else bf16.
    states    one of STATE_FORMATS: as asked for, else config.json's mamba_ssm_cache_dtype, else
              fp32.

FP8 caches need e4m3 in hardware: compute capability 8.9, or the twins on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from nemotriton import device as devices
from nemotriton.errors import ConfigError, require
from nemotriton.kernels import STATE_FORMATS, StateFormat
from nemotriton.kernels.ssm_state import NOISE_GROUP
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import Expected
from nemotriton.model.formats import ActQuant, Algorithm, QuantScheme
from nemotriton.model.layers import Experts, Linear, Matrix
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.packing import tiles_for_blackwell

KV_DTYPES = ("auto", "bf16", "fp8")
Dtype = str | torch.dtype | None
_HAS_E4M3 = (8, 9)  # compute capability
_SHOWN = 5


def find_kv_dtype(
    wanted: str | None,
    scheme: QuantScheme,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.dtype:
    """The dtype of cached keys and values; ConfigError or UnsupportedError for what cannot be."""
    wanted = "auto" if wanted is None else wanted
    if wanted not in KV_DTYPES:
        raise ConfigError(f"kv_dtype={wanted!r}: use one of {', '.join(KV_DTYPES)}.")
    able = has_e4m3(device)
    if wanted == "auto":
        trunk = {f"layers.{index}.mixer" for index in config.attention_layers}
        calibrated = scheme.kv == "fp8" and trunk <= scheme.kv_scaled
        wanted = "fp8" if calibrated and able else "bf16"
    require(
        able or wanted != "fp8",
        f"kv_dtype='fp8' needs a GPU of compute capability 8.9, {devices.info(device).name} is "
        f"{'.'.join(map(str, devices.info(device).capability))}: use 'bf16'",
    )
    return torch.float8_e4m3fn if wanted == "fp8" else dtype


def has_e4m3(device: torch.device) -> bool:
    """Whether the device converts e4m3 numbers itself; on a CPU the twins do."""
    return device.type != "cuda" or devices.info(device).capability >= _HAS_E4M3


def kv_notes(
    wanted: str | None, scheme: QuantScheme, expected: Mapping[str, Expected], kv: torch.dtype
) -> list[str]:
    """What a reader should know of the choice for keys and values, the MTP block's included."""
    tail = ".k_proj.weight"
    mixers = [name.removesuffix(tail) for name in expected if name.endswith(tail)]
    lacking = [mixer for mixer in mixers if mixer not in scheme.kv_scaled]
    if not mixers:
        return []
    if kv == torch.float8_e4m3fn:
        if not lacking:
            return ["keys and values are stored as fp8, with the checkpoint's scales"]
        return [
            f"keys and values are stored as fp8; {len(lacking)} of {len(mixers)} attention layers "
            f"have no k and v scales, 1.0 is used: {_first(lacking)}"
        ]
    if scheme.kv_scaled:
        return [f"keys and values stay {_name(kv)}: the checkpoint's k and v scales are not used"]
    if scheme.kv == "fp8" and wanted in (None, "auto"):
        return [
            f"keys and values stay {_name(kv)}: the checkpoint was made for fp8, but has no k and "
            "v scales"
        ]
    return []


def find_state_format(wanted: Dtype, config: ModelConfig) -> StateFormat:
    """How recurrent states are stored; None or "auto" is the checkpoint's. ConfigError otherwise.

    A dtype of torch means the format that rounds to its nearest number."""
    if wanted is None or wanted == "auto":
        wanted = config.mamba.state_dtype if config.mamba is not None else "float32"
    name = _name(wanted) if isinstance(wanted, torch.dtype) else wanted
    if name not in STATE_FORMATS:
        raise ConfigError(f"state_dtype={wanted!r}: use one of {', '.join(STATE_FORMATS)}.")
    found = STATE_FORMATS[name]
    require(
        not found.stochastic or config.mamba is None or config.mamba.state >= NOISE_GROUP.value,
        f"state_dtype={name!r} is for states of at least {NOISE_GROUP.value} columns "
        "(ssm_state_size): use 'float16'",
    )
    return found


def state_notes(wanted: Dtype, config: ModelConfig, states: StateFormat) -> list[str]:
    """One line on the format of recurrent states, for a model that has any."""
    m = config.mamba
    if m is None:
        return []
    how = " with an fp32 scale a row" if states.scaled else ""
    how = ", rounded stochastically" if states.stochastic else how
    whose = "the model's" if wanted in (None, "auto") else "as asked for"
    size = len(config.mamba_layers) * m.inner * states.row_bytes(m.state)
    shown = f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
    return [f"recurrent states are {_name(states.dtype)}{how} ({whose}): {shown} a request"]


def context_notes(wanted: int | None, config: ModelConfig) -> list[str]:
    """One line where more context is asked for than the configuration states. Nothing encodes
    positions, so nothing ends there; the public MoE models state a quarter of what they serve."""
    if wanted is None or wanted <= config.max_context:
        return []
    stated = f"{config.max_context:,} (max_position_embeddings)"
    return [f"max_context={wanted:,} is beyond the {stated} that the configuration states"]


def weight_notes(
    expected: Mapping[str, Expected],
    scheme: QuantScheme,
    act_quant: ActQuant,
    dtype: torch.dtype,
    device: torch.device,
) -> list[str]:
    """One line for each stored format: how many matrices, and how they are multiplied."""
    counts: dict[Algorithm, int] = {}
    without = 0
    for name, entry in expected.items():
        if entry.matrix and name.endswith(".weight"):
            algorithm = scheme.algorithm(entry.matrix)
            counts[algorithm] = counts.get(algorithm, 0) + max(1, entry.experts)
            if algorithm is Algorithm.FP8 and not scheme.quantises(entry.matrix, act_quant):
                without += max(1, entry.experts)
    if set(counts) <= {Algorithm.NONE}:
        return ["act_quant has no effect: nothing is quantised"] if act_quant else []
    plain = f"activations stay {_name(dtype)}"
    how = {
        Algorithm.NONE: f"are not quantised and run as {_name(dtype)}",
        Algorithm.FP8: f"run as w8a16: {plain}, input scales are not used",
        Algorithm.NVFP4: f"run as w4a16: {plain}, input scales are not used",
        Algorithm.W4A16_NVFP4: f"run as w4a16, as they are labelled: {plain}",
    }
    if act_quant:
        how[Algorithm.FP8] = "run as w8a8: activations are rounded to FP8 by their input scales"
        if without:
            how[Algorithm.FP8] += f"; {without:,} have none and run as w8a16"
    if act_quant is True:
        how[Algorithm.NVFP4] = (
            "run as w4a4: activations are rounded to NVFP4, and codes multiplied by codes"
            if tiles_for_blackwell(dtype, device)
            else f"run as w4a4, emulated: activations are rounded to NVFP4 and multiplied as "
            f"{_name(dtype)}"
        )
    if not has_e4m3(device):
        integers = "; e4m3 is decoded by integers, as this GPU has no such type"
        how = {a: t + integers * (a is not Algorithm.NONE) for a, t in how.items()}
    named = {a: f"{a} " for a in Algorithm} | {Algorithm.NONE: ""}
    return [f"{counts[a]:,} {named[a]}matrices {how[a]}" for a in how if a in counts]


def packing_notes(model: NemotronH) -> list[str]:
    """A line where matrices have left the checkpoint's layout, and one where a head has a copy."""
    matrices: list[Matrix] = []
    notes = []
    if model.head_copy is not None:
        size = model.head_copy[0].nbytes / 1e6
        notes.append(f"drafts are picked by an e4m3 copy of the head, {size:,.1f} MB")
    for module in model.modules():
        if isinstance(module, Experts) and module.packed:
            matrices += [module.up_proj, module.down_proj]
        elif isinstance(module, Linear) and module.packed:
            matrices.append(module)
    if not matrices:
        return notes
    count = sum(m.words.shape[0] if m.words.ndim == 4 else 1 for m in matrices)
    nbytes = sum(m.words.nbytes for m in matrices)
    return [
        f"{count:,} NVFP4 matrices are repacked for Hopper, {nbytes / 1e9:,.1f} GB, and decoded in "
        "registers",
        *notes,
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
