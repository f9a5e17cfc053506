"""What a checkpoint says about sampling and ends: `generation_config.json`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotriton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Values the file states; None where it says nothing. `eos_ids` may be empty.

    `temperature` is 0 where the file says `do_sample: false`, as Hugging Face's generate does.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, directory: Path | None) -> "GenerationConfig":
        """The file of `directory`, or nothing at all. ConfigError names key, value and remedy."""
        data = read_json(directory, "generation_config.json")
        temperature = _number(data, "temperature")
        if data.get("do_sample") is False:
            temperature = 0.0
        return cls(
            temperature=temperature,
            top_p=_number(data, "top_p"),
            top_k=_integer(data, "top_k"),
            min_p=_number(data, "min_p"),
            repetition_penalty=_number(data, "repetition_penalty"),
            bos_id=_integer(data, "bos_token_id"),
            eos_ids=token_ids(data, "eos_token_id"),
        )


def read_json(directory: Path | None, name: str) -> dict[str, Any]:
    """A JSON object beside the weights; empty where there is no such file."""
    if directory is None or not (directory / name).is_file():
        return {}
    try:
        data = json.loads((directory / name).read_text(encoding="utf-8"))
    except (ValueError, OSError) as problem:
        raise ConfigError(f"{directory / name} cannot be read: {problem}. Copy it anew.") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise ConfigError(f"{directory / name} holds a {kind}, not an object. Copy it anew.")
    return data


def token_ids(data: dict[str, Any], key: str) -> tuple[int, ...]:
    """One token id, a list of them, or nothing."""
    value = data.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    for token in found:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            _refuse(key, value, "a token id or a list of token ids")
    return tuple(found)


def _integer(data: dict[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        _refuse(key, value, "an integer")
    return value


def _number(data: dict[str, Any], key: str) -> float | None:
    value = data.get(key)
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        _refuse(key, value, "a number")
    return value


def _refuse(key: str, value: object, wanted: str) -> None:
    raise ConfigError(
        f"generation_config.json: {key} = {value!r} is not {wanted}. Correct or remove the key."
    )
