"""The formats of the public quantised releases, matrix by matrix, and the same mixes for any model.

Super NVFP4's lists are the outcome of a search (AutoQuantize at 4.75 bits), so they follow no rule.
Sources: the releases' own quantisation files and documentation; the totals of bytes and tensors
confirm Super and Nano, those of Ultra and Lightning are described but unconfirmed.
"""

from __future__ import annotations

from nemotriton.errors import ConfigError
from nemotriton.model.config import LayerKind, ModelConfig
from nemotriton.model.expected import matrices
from nemotriton.model.formats import UNQUANTISED, Algorithm, QuantScheme

QUANTS = ("bf16", "fp8", "nvfp4", "super-mixed")

# Presets with an NVFP4 release; the others were only published in bf16, or quantised otherwise.
_RELEASED = ("super-120b", "nano-30b", "ultra-550b", "lightning-30b", "9b-v2")

# Super NVFP4, revision 4f0cf9da: the layers whose matrix is FP8.
_SUPER_FP8 = {
    "in_proj": "0 2 4 6 9 11 13 15 18 20 27 29 31 40 49 51 53 55 57 60 62 66 68 71 73 82 84 86",
    "out_proj": (
        "0 2 4 9 11 13 18 38 40 42 44 49 51 53 55 57 60 62 64 66 68 71 73 75 77 80 82 84 86"
    ),
    "fc1_latent_proj": "1 3 5",
    "fc2_latent_proj": "3",
    "o_proj": "69 78",
}
# The exceptions among the shared experts, which are otherwise all FP8.
_SUPER_SHARED = {
    "layers.1.mixer.shared_experts.down_proj": Algorithm.NVFP4,
    "layers.8.mixer.shared_experts.down_proj": Algorithm.NONE,
    "layers.41.mixer.shared_experts.up_proj": Algorithm.NONE,
    "layers.76.mixer.shared_experts.down_proj": Algorithm.NONE,
}


def release_scheme(config: ModelConfig, quant: str) -> QuantScheme:
    """Return the scheme of `config`'s release in `quant`, or the same mix for another model.

    bf16: nothing quantised. fp8: experts, shared experts, MLPs and Mamba projections, as in Super
    FP8. nvfp4: the release's own mix for Super, Ultra and Lightning; for all others Nano's rule,
    everything but attention, the Mamba layer before each attention layer, lm_head and MTP (9b-v2:
    everything but attention, lm_head and MTP). super-mixed: Super's own, elsewhere NVFP4 experts
    among FP8 shared experts, MLPs and Mamba projections. release: nvfp4 where there is such a
    release of the preset, else bf16. Raises ConfigError for another word.
    """
    if quant == "release":
        quant = "nvfp4" if config.name in _RELEASED else "bf16"
    if quant not in QUANTS:
        raise ConfigError(f"quant is {quant!r}; use one of {', '.join(QUANTS)}, release.")
    if quant == "bf16":
        return UNQUANTISED
    trunk = [matrix for matrix in matrices(config) if matrix.startswith("layers.")]
    mixers = frozenset(f"layers.{index}.mixer" for index in config.attention_layers)
    if quant == "fp8":
        listed = _mixed(trunk, Algorithm.FP8)
        return QuantScheme(listed=listed, kv="fp8", kv_scaled=mixers | _mtp_attention(config))
    name = config.name
    if name.startswith("super-120b"):
        return QuantScheme(listed=_super(trunk), kv="fp8", kv_scaled=mixers)
    if quant == "super-mixed" or name.startswith("ultra-550b"):
        return QuantScheme(listed=_mixed(trunk, Algorithm.NVFP4), kv="fp8", kv_scaled=mixers)
    if name.startswith("lightning-30b"):
        return QuantScheme(listed=_lightning(trunk), kv="fp8")
    return QuantScheme(listed=_nano(config, trunk), kv="fp8")


def _tail(matrix: str) -> str:
    """The part of a trunk matrix's name after "layers.N.mixer."."""
    return matrix.split(".", 3)[3]


def _mixed(trunk: list[str], experts: Algorithm) -> dict[str, Algorithm]:
    """Routed experts in `experts`; shared experts, MLPs and Mamba projections in FP8."""
    fp8 = ("shared_experts", "up_proj", "down_proj", "in_proj", "out_proj")
    listed = {m: Algorithm.FP8 for m in trunk if _tail(m).startswith(fp8)}
    return listed | {m: experts for m in trunk if _tail(m).startswith("experts")}


def _super(trunk: list[str]) -> dict[str, Algorithm]:
    listed = {m: Algorithm.NVFP4 for m in trunk if _tail(m).startswith("experts")}
    listed |= {m: Algorithm.FP8 for m in trunk if _tail(m).startswith("shared_experts")}
    listed |= _SUPER_SHARED
    for matrix, layers in _SUPER_FP8.items():
        listed |= {f"layers.{layer}.mixer.{matrix}": Algorithm.FP8 for layer in layers.split()}
    return {m: listed[m] for m in trunk if m in listed}


def _lightning(trunk: list[str]) -> dict[str, Algorithm]:
    four_bits = ("experts", "shared_experts")
    listed = {m: Algorithm.W4A16_NVFP4 for m in trunk if _tail(m).startswith(four_bits)}
    listed |= {m: Algorithm.FP8 for m in trunk if _tail(m) in ("in_proj", "out_proj")}
    return listed | {"lm_head": Algorithm.W4A16_NVFP4}


def _nano(config: ModelConfig, trunk: list[str]) -> dict[str, Algorithm]:
    plain = set(config.attention_layers)
    if config.name != "9b-v2":
        plain |= {i - 1 for i in plain if i and config.kinds[i - 1] is LayerKind.MAMBA}
    return {m: Algorithm.NVFP4 for m in trunk if int(m.split(".")[1]) not in plain}


def _mtp_attention(config: ModelConfig) -> frozenset[str]:
    if config.mtp is None:
        return frozenset()
    flat = config.mtp.pattern * config.mtp.blocks
    return frozenset(
        f"mtp.layers.{i}.mixer" for i, kind in enumerate(flat) if kind is LayerKind.ATTENTION
    )
