"""How the names in files become canonical names: one table, applied to every tensor alike.

    prefixes      backbone.  model.  language_model.*  (formats.TRUNK_PREFIXES), removed first
    embedding     embeddings | embedding | embed_tokens | word_embeddings
    final norm    norm_f | norm | final_norm | final_layernorm
    experts       experts.K.up_proj.weight is row K of experts.up_proj.weight; stacked in one
                  tensor they may lack ".weight", as in transformers' memory
    compressed-tensors   weight_packed, and global scales that divide where modelopt's multiply
    kv scales     mixer.k_scale, mixer.attn.k_scale and mixer.k_proj.k_scale are the same

The convolution's [channels, 1, width] and scalars stored as [1] are matters of shape, not of name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nemotriton.model.formats import TRUNK_PREFIXES

# Whole names outside the layers.
_TOP = {
    "embedding.weight": "embeddings.weight",
    "embed_tokens.weight": "embeddings.weight",
    "word_embeddings.weight": "embeddings.weight",
    "norm.weight": "norm_f.weight",
    "final_norm.weight": "norm_f.weight",
    "final_layernorm.weight": "norm_f.weight",
}
# Rules for names inside layers: what the name ends with, what that becomes, and whether the value
# must be inverted.
_ENDINGS: tuple[tuple[str, str, bool], ...] = (
    (".experts.up_proj", ".experts.up_proj.weight", False),
    (".experts.down_proj", ".experts.down_proj.weight", False),
    (".experts.up_proj_weight_scale", ".experts.up_proj.weight_scale", False),
    (".experts.up_proj_weight_scale_2", ".experts.up_proj.weight_scale_2", False),
    (".experts.up_proj_input_scale", ".experts.up_proj.input_scale", False),
    (".experts.down_proj_weight_scale", ".experts.down_proj.weight_scale", False),
    (".experts.down_proj_weight_scale_2", ".experts.down_proj.weight_scale_2", False),
    (".experts.down_proj_input_scale", ".experts.down_proj.input_scale", False),
    (".weight_packed", ".weight", False),
    (".weight_global_scale", ".weight_scale_2", True),
    (".input_global_scale", ".input_scale", True),
    (".mixer.k_scale", ".mixer.k_proj.k_scale", False),
    (".mixer.v_scale", ".mixer.v_proj.v_scale", False),
    (".mixer.attn.k_scale", ".mixer.k_proj.k_scale", False),
    (".mixer.attn.v_scale", ".mixer.v_proj.v_scale", False),
)
_LAST_PARTS = {ending.rpartition(".")[2] for ending, _, _ in _ENDINGS}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Renamed(NamedTuple):
    """A tensor's canonical name, the expert it is of (None: all or no experts), whether its value
    is to be inverted, and the prefix that was removed."""

    name: str
    expert: int | None
    inverted: bool
    prefix: str


def rename(name: str) -> Renamed:
    """Return where the tensor `name` of a file belongs; unknown names pass through unchanged."""
    prefix = next((p for p in TRUNK_PREFIXES if name.startswith(p)), "")
    rest = name[len(prefix) :]
    if rest in _TOP:
        return Renamed(_TOP[rest], None, False, prefix)
    expert, inverted = None, False
    match = _EXPERT.search(rest)
    if match:
        expert = int(match[1])
        rest = f"{rest[: match.start()]}.experts.{rest[match.end() :]}"
    if rest.rpartition(".")[2] in _LAST_PARTS:
        for ending, canonical, invert in _ENDINGS:
            if rest.endswith(ending):
                rest, inverted = rest.removesuffix(ending) + canonical, invert
                break
    return Renamed(rest, expert, inverted, prefix)
