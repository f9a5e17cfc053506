"""Which mixer each layer holds, and every way configuration files spell it."""

from __future__ import annotations

import enum
from typing import Any

from nemotriton.errors import ConfigError
from nemotriton.model.json_fields import Fields, refuse


class LayerKind(enum.StrEnum):
    """The mixer of one layer; the value is its letter in a pattern."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"
    MOE = "E"

    @property
    def word(self) -> str:
        """The kind as `layers_block_type` names it: mamba, attention, mlp or moe."""
        return self.name.lower()


# The names of the releases, and those transformers writes since 5.15.
_KIND_LETTERS = {kind.word: kind.value for kind in LayerKind} | {
    "linear_attention": "M",
    "full_attention": "*",
}
_LETTERS = "".join(LayerKind)
_LAYOUT_KEYS = (
    "hybrid_override_pattern",
    "layers_block_type",
    "layer_types",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "mtp_layer_types",
)


def _letters(key: str, pattern: Any) -> list[str]:
    """Split a pattern string at `/` into letters; `|` and white space carry no meaning."""
    if not isinstance(pattern, str):
        refuse(key, pattern, "must be a string of M, *, - and E", 'Write it as e.g. "M*-E".')
    parts = [""]
    for position, letter in enumerate(pattern):
        if letter == "/":
            parts.append("")
        elif letter in _LETTERS:
            parts[-1] += letter
        elif letter != "|" and not letter.isspace():
            refuse(
                key,
                pattern,
                f"unknown layer letter {letter!r} at position {position} (counted from 0)",
                "Layers are M (mamba), * (attention), - (mlp) and E (moe); / starts the MTP part.",
            )
    return parts


def _named_kinds(key: str, names: Any) -> str:
    """Turn a list of layer names, in either vocabulary, into pattern letters; "" for None."""
    if names is None:
        return ""
    if not isinstance(names, (list, tuple)):
        refuse(key, names, "must be a list of layer names", f"Use {sorted(_KIND_LETTERS)}.")
    for position, name in enumerate(names):
        if not isinstance(name, str) or name not in _KIND_LETTERS:
            known = ", ".join(_KIND_LETTERS)
            refuse(f"{key}[{position}]", name, "unknown layer name", f"Use one of: {known}.")
    return "".join(_KIND_LETTERS[name] for name in names)


def _block_kinds(key: str, blocks: list[dict[str, Any]] | None) -> str:
    """Return the letters that `block_type` gives, or "" where no entry names its kind."""
    names = [block.get("block_type") for block in blocks or ()]
    return "" if all(name is None for name in names) else _named_kinds(key, names)


def _agreed(readings: dict[str, str]) -> str:
    """Return the one pattern that all keys spell, "" if none is given; refuse disagreement."""
    given = {key: letters for key, letters in readings.items() if letters}
    if not given:
        return ""
    first_key, first = next(iter(given.items()))
    for key, letters in given.items():
        if letters != first:
            lengths = f"{len(letters)} layers against {len(first)}"
            refuse(
                key,
                letters,
                f"disagrees with {first_key} = {first!r} ({lengths})",
                "Remove the key that is wrong.",
            )
    return first


def _read_mtp(fields: Fields, data: dict[str, Any], parts: list[str]) -> tuple[str, int]:
    """Return the letters of one MTP block and the number of blocks declared."""
    text = data["mtp_hybrid_override_pattern"]
    mtp_parts = _letters("mtp_hybrid_override_pattern", text) if text is not None else [""]
    if len(mtp_parts) > 1:
        refuse("mtp_hybrid_override_pattern", text, "holds a /", 'Give one block, e.g. "*E".')
    readings = {f"hybrid_override_pattern, part {i + 1}": part for i, part in enumerate(parts)}
    blocks = fields.blocks("mtp_block_configs")
    readings |= {
        "mtp_hybrid_override_pattern": mtp_parts[0],
        "mtp_layers_block_type": _named_kinds(
            "mtp_layers_block_type", data["mtp_layers_block_type"]
        ),
        "mtp_layer_types": _named_kinds("mtp_layer_types", data["mtp_layer_types"]),
        "mtp_block_configs": _block_kinds("mtp_block_configs", blocks),
    }
    count = fields.count("num_nextn_predict_layers", default=len(parts))
    if count == 0:
        return "", 0
    kinds = _agreed(readings)
    if not kinds:
        refuse(
            "num_nextn_predict_layers",
            count,
            "no key says which layers an MTP block has",
            'Add mtp_hybrid_override_pattern, e.g. "*E", or set num_nextn_predict_layers to 0.',
        )
    if blocks is not None and len(blocks) != len(kinds):
        problem = f"disagrees with the {len(kinds)} layers of the MTP pattern {kinds!r}"
        refuse("mtp_block_configs", len(blocks), problem, "Give one entry for each MTP layer.")
    if len(parts) > 1 and len(parts) != count:
        problem = f"the pattern holds {len(parts)} MTP parts after /"
        refuse("num_nextn_predict_layers", count, problem, "Make the two agree.")
    return kinds, count


def read_kinds(
    fields: Fields,
) -> tuple[tuple[LayerKind, ...], tuple[LayerKind, ...], int]:
    """Return (layers, layers of one MTP block, MTP blocks), from whichever keys are there.

    `hybrid_override_pattern` may carry MTP parts after `/`; every key that is present must agree.
    Without MTP the last two are () and 0: a declared count of zero wins over a leftover pattern,
    which transformers always writes.
    """
    data = {key: found[1] if (found := fields.find(key)) else None for key in _LAYOUT_KEYS}
    pattern = data["hybrid_override_pattern"]
    parts = _letters("hybrid_override_pattern", pattern) if pattern is not None else [""]
    blocks = fields.blocks("block_configs")
    kinds = _agreed(
        {
            "hybrid_override_pattern": parts[0],
            "layers_block_type": _named_kinds("layers_block_type", data["layers_block_type"]),
            "layer_types": _named_kinds("layer_types", data["layer_types"]),
            "block_configs": _block_kinds("block_configs", blocks),
        }
    )
    if not kinds:
        raise ConfigError(
            "hybrid_override_pattern is missing or empty, so are layers_block_type and layer_types:"
            ' no layer is declared. Add one of them, e.g. hybrid_override_pattern "M*-E".'
        )
    layers = fields.integer("num_hidden_layers", default=len(kinds))
    for key, declared in (("num_hidden_layers", layers), ("block_configs", len(blocks or kinds))):
        if declared != len(kinds):
            refuse(
                key,
                declared,
                f"disagrees with the {len(kinds)} layers of the pattern {kinds!r}",
                f"Remove {key} or correct the pattern.",
            )
    mtp_kinds, mtp_blocks = _read_mtp(fields, data, parts[1:])
    return tuple(map(LayerKind, kinds)), tuple(map(LayerKind, mtp_kinds)), mtp_blocks
