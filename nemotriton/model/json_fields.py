"""Reading of `config.json`: every spelling becomes one typed value, or an error that names it.

The file is read as plain JSON: no remote code and no AutoConfig. Spellings follow the public
configurations of the Nemotron-H family and the classes of transformers, vLLM and Megatron-Bridge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemotriton.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("nemotron_h", "nemotron_h_puzzle")

# Multimodal releases keep the language model's own configuration under one of these keys.
_WRAPPER_KEYS = ("text_config", "llm_config", "language_config")

# Canonical key -> the other names released files use for the same value.
_ALIASES: dict[str, tuple[str, ...]] = {
    "chunk_size": ("mamba_chunk_size",),
    "conv_kernel": ("mamba_d_conv",),
    "dtype": ("torch_dtype",),
    "head_dim": ("attention_head_dim",),
    "layer_norm_epsilon": ("norm_eps", "rms_norm_eps"),
    "mamba_ssm_cache_dtype": ("mamba_ssm_dtype",),
    "n_groups": ("mamba_n_groups", "mamba_num_groups"),
    "n_routed_experts": ("num_local_experts", "num_experts"),
    "ssm_state_size": ("mamba_state_dim",),
    "time_step_limit": ("mamba_dt_limit",),
    "use_conv_bias": ("mamba_conv_bias",),
}

# What an entry of `block_configs` (Puzzle: sizes that differ from layer to layer) may set.
_BLOCK_SIZES = (
    "attention_bias",
    "chunk_size",
    "conv_kernel",
    "head_dim",
    "intermediate_size",
    "mamba_head_dim",
    "mamba_num_heads",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "n_groups",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_key_value_heads",
    "routed_scaling_factor",
    "ssm_state_size",
    "topk_group",
)
_BLOCK_KEYS = {"block_type", *_BLOCK_SIZES}.union(*(_ALIASES.get(key, ()) for key in _BLOCK_SIZES))
_BLOCK_HELP = "block_type, " + ", ".join(_BLOCK_SIZES) + "."

_FLOAT_WORDS = {
    "Infinity": math.inf,
    "inf": math.inf,
    "-Infinity": -math.inf,
    "-inf": -math.inf,
    "NaN": math.nan,
    "nan": math.nan,
}


def refuse(key: str, value: object, problem: str, remedy: str) -> NoReturn:
    """Raise ConfigError that names the key, the value seen, what is wrong and what to do."""
    raise ConfigError(f"{key} is {_shown(value)}: {problem}. {remedy}")


def positive(key: str, value: object) -> int:
    """Return `value` if it is a whole number above zero, else refuse it."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(key, value, "must be a whole number", f"Write {key} as an integer, e.g. 128.")
    if value <= 0:
        refuse(key, value, "must be above zero", f"Set {key} to the size the checkpoint has.")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value) if isinstance(value, (bool, str, type(None))) else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _plain(value: Any) -> Any:
    """Turn the ways JSON files write non-finite numbers into floats, inside lists too."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return _plain(value["__float__"])
    if isinstance(value, str):
        return _FLOAT_WORDS.get(value, value)
    return value


class Fields:
    """Typed access to one JSON object by canonical key, aliases included.

    A key whose value is null counts as absent. Two spellings of one key must agree. `parent` holds
    the values that apply where this object is silent (the whole file, for one layer's entry).
    """

    def __init__(
        self, data: dict[str, Any], parent: Fields | None = None, prefix: str = ""
    ) -> None:
        self._data, self._parent, self._prefix = data, parent, prefix

    def find(self, key: str) -> tuple[str, Any] | None:
        """Return (spelling used, value) or None; disagreeing spellings are refused."""
        seen: tuple[str, Any] | None = None
        for spelling in (key, *_ALIASES.get(key, ())):
            value = _plain(self._data.get(spelling))
            if value is None:
                continue
            if seen is None:
                seen = (self._prefix + spelling, value)
            elif seen[1] != value:
                refuse(
                    f"{self._prefix}{spelling}",
                    value,
                    f"disagrees with {seen[0]} = {_shown(seen[1])}, another name of the same value",
                    "Keep the one that is right.",
                )
        if seen is None and self._parent is not None:
            return self._parent.find(key)
        return seen

    def missing(self, key: str) -> NoReturn:
        """Refuse the file because `key` is needed and absent."""
        names = " or ".join((key, *_ALIASES.get(key, ())))
        raise ConfigError(
            f"{self._prefix}{key} is missing (null or absent): a size cannot be guessed. "
            f"Add {names} to the configuration."
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number above zero; without a default the key is required."""
        found = self.find(key)
        if found is not None:
            return positive(*found)
        return self.missing(key) if default is None else default

    def count(self, key: str, default: int) -> int:
        """Return a whole number that may be zero."""
        found = self.find(key)
        if found is None:
            return default
        return 0 if _is_zero(found[1]) else positive(*found)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero; without a default the key is required."""
        found = self.find(key)
        if found is None:
            return self.missing(key) if default is None else default
        name, value = found
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse(name, value, "must be a number", f"Write {name} as a number, e.g. 1e-5.")
        if not (math.isfinite(value) and value > 0):
            refuse(name, value, "must be finite and above zero", f"Correct {name}.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; 0, 1 and strings are refused."""
        found = self.find(key)
        if found is None:
            return default
        name, value = found
        if not isinstance(value, bool):
            refuse(name, value, "must be true or false", f"Write {name} as a JSON boolean.")
        return value

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """Return one of a few strings (a `torch.` prefix is dropped)."""
        found = self.find(key)
        if found is None:
            return default
        name, value = found
        word = value.removeprefix("torch.") if isinstance(value, str) else value
        if word not in choices:
            refuse(name, value, "is not supported", f"Use one of: {', '.join(choices)}.")
        return str(word)

    def limits(self, key: str) -> tuple[float, float]:
        """Return a (low, high) range, by default (0, inf); high may be infinite, NaN is refused."""
        found = self.find(key)
        if found is None:
            return (0.0, math.inf)
        name, value = found
        numbers = isinstance(value, (list, tuple)) and all(
            isinstance(item, (int, float)) and not isinstance(item, bool) for item in value
        )
        if not numbers or len(value) != 2:
            refuse(name, value, "must be two numbers", "Write it as [0.0, Infinity].")
        low, high = float(value[0]), float(value[1])
        if not 0.0 <= low < high or math.isinf(low):
            refuse(name, value, "must be 0 <= low < high", "Write it as [0.0, Infinity].")
        return (low, high)

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """Return token ids given as null, one number or a list; each lies inside the vocabulary."""
        found = self.find(key)
        if found is None:
            return ()
        name, value = found
        ids = list(value) if isinstance(value, (list, tuple)) else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
                problem = f"token ids are whole numbers in 0..{vocab - 1} (vocab_size {vocab})"
                refuse(name, value, problem, f"Correct {name} or vocab_size.")
        return tuple(dict.fromkeys(ids))

    def token_id(self, key: str, vocab: int) -> int | None:
        """Return one token id inside the vocabulary, or None."""
        found = self.find(key)
        if found is not None and isinstance(found[1], (list, tuple)):
            refuse(*found, "must be one token id", f"Write {key} as a number or null.")
        return next(iter(self.token_ids(key, vocab)), None)

    def blocks(self, key: str) -> list[dict[str, Any]] | None:
        """Return the per-layer entries of a Puzzle configuration, or None."""
        found = self.find(key)
        if found is None or found[1] == []:
            return None
        name, value = found
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            refuse(name, value, "must be a list of objects", "Give one object for each layer.")
        for index, block in enumerate(value):
            for inner, setting in block.items():
                if inner not in _BLOCK_KEYS and setting not in (None, False):
                    problem = "not understood as a property of one layer"
                    refuse(f"{name}[{index}].{inner}", setting, problem, "Known: " + _BLOCK_HELP)
        return value

    def layers(self, key: str, count: int) -> list[Fields]:
        """Return the fields of each of `count` layers: its own entry first, then the whole file."""
        blocks = self.blocks(key) if count else None
        if blocks is None:
            return [self] * count
        return [Fields(block, self, f"{key}[{index}].") for index, block in enumerate(blocks)]


def _is_zero(value: object) -> bool:
    return value == 0 and isinstance(value, int) and not isinstance(value, bool)


def load_config(source: dict[str, Any] | str | Path) -> tuple[Fields, str]:
    """Return the language model's fields and a name, from a dict, JSON text or a path.

    A path is a JSON file or a directory with `config.json`. A multimodal wrapper is opened at its
    language model. Anything that is not a Nemotron-H model is refused by its `model_type`.
    """
    name = ""
    if isinstance(source, dict):
        data = source
    elif isinstance(source, str) and source.lstrip().startswith("{"):
        data = _parse(source, "the JSON text")
    else:
        path = Path(source)
        name = (path if path.is_dir() else path.parent).name
        data = _read_file(path)
    return Fields(_language_model(data)), name


def _read_file(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        where = path if path.is_dir() else path.parent
        near = sorted(str(found.parent) for found in where.glob("*/config.json"))
        near += sorted(str(found.parent) for found in where.glob("snapshots/*/config.json"))
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"no config.json in {path}.{hint} For a hub id use owner/name.")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}. Fetch the file again.") from error
    return _parse(text, str(file))


def _parse(text: str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            values = [value for key, value in pairs if key == twice]
            refuse(twice, values, f"written more than once in {where}", "Keep one of them.")
        return data

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}. Fetch the file again.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} holds {_shown(data)}, not a JSON object. Is it the right file?")
    return data


def _language_model(data: dict[str, Any]) -> dict[str, Any]:
    model_type = data.get("model_type")
    if model_type in SUPPORTED_MODEL_TYPES:
        return data
    for key in _WRAPPER_KEYS:
        inner = data.get(key)
        if isinstance(inner, dict) and inner.get("model_type") in SUPPORTED_MODEL_TYPES:
            return inner
    seen = f"model_type {model_type!r}" if model_type is not None else "model_type None (missing)"
    raise ConfigError(
        f"{seen} is not a Nemotron-H model. Supported: {', '.join(SUPPORTED_MODEL_TYPES)}. "
        "Nothing was loaded."
    )
