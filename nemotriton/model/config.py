"""What a Nemotron-H model is: layer kinds, sizes, and the numbers that follow from them.

`ModelConfig` is built once, from `config.json` or a preset, and is frozen. All sizes are numbers of
elements. Every check is made here, whoever builds the object; messages use the JSON key names.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nemotriton.errors import ConfigError
from nemotriton.model.config_json import Fields, load_config, positive, read_kinds, refuse
from nemotriton.model.presets import PRESETS

_DTYPES = ("bfloat16", "float16", "float32")
_Part = TypeVar("_Part", "MambaConfig", "AttentionConfig")


class LayerKind(enum.StrEnum):
    """The mixer of one layer; the value is its letter in a pattern."""

    MAMBA = "M"
    ATTENTION = "*"
    MLP = "-"
    MOE = "E"


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes of the Mamba-2 mixers; `dt_limit` clamps softplus(dt), `state_dtype` is the cache's."""

    heads: int
    head_dim: int
    state: int
    groups: int
    conv_width: int
    chunk: int
    conv_bias: bool
    proj_bias: bool
    dt_limit: tuple[float, float]
    state_dtype: str

    def __post_init__(self) -> None:
        positive("mamba_num_heads", self.heads)
        positive("mamba_head_dim", self.head_dim)
        positive("ssm_state_size", self.state)
        positive("n_groups", self.groups)
        positive("conv_kernel", self.conv_width)
        positive("chunk_size", self.chunk)
        if self.heads % self.groups:
            problem = f"not divisible by n_groups = {self.groups}"
            refuse("mamba_num_heads", self.heads, problem, "Every group serves as many heads.")
        if not 2 <= self.conv_width <= 4:
            remedy = "Correct conv_kernel; all releases have 4."
            refuse("conv_kernel", self.conv_width, "widths 2, 3 and 4 are supported", remedy)

    @property
    def inner(self) -> int:
        """Channels of x and of the gate z: heads * head_dim (the `expand` key plays no part)."""
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def in_rows(self) -> int:
        """Rows of the in-projection: z, xBC and dt."""
        return self.inner + self.conv_dim + self.heads


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes of the attention mixers: grouped queries, no positions."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool

    def __post_init__(self) -> None:
        positive("num_attention_heads", self.heads)
        positive("num_key_value_heads", self.kv_heads)
        positive("head_dim", self.head_dim)
        if self.heads % self.kv_heads:
            problem = f"not divisible by num_key_value_heads = {self.kv_heads}"
            refuse("num_attention_heads", self.heads, problem, "Every KV head serves as many.")

    @property
    def q_rows(self) -> int:
        """Rows of the query projection; need not equal the model width."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of one MoE layer.

    `shared_width` is the width of all shared experts together, 0 for none. `latent` is the width
    experts read and write, None where that is the model's own.
    """

    experts: int
    top_k: int
    width: int
    shared_width: int
    latent: int | None
    router_groups: int
    top_groups: int
    normalize: bool
    scale: float

    def __post_init__(self) -> None:
        positive("n_routed_experts", self.experts)
        positive("num_experts_per_tok", self.top_k)
        positive("moe_intermediate_size", self.width)
        positive("n_group", self.router_groups)
        positive("topk_group", self.top_groups)
        if self.experts % self.router_groups:
            problem = f"does not divide n_routed_experts = {self.experts}"
            refuse("n_group", self.router_groups, problem, "Router groups are of equal size.")
        if self.top_groups > self.router_groups:
            problem = f"more than n_group = {self.router_groups}"
            refuse("topk_group", self.top_groups, problem, "Choose at most all groups.")
        group = self.experts // self.router_groups
        if self.router_groups > 1 and group < 2:
            problem = "one expert a group, but a group's score is the sum of its best two"
            refuse("n_group", self.router_groups, problem, "Use at most n_routed_experts / 2.")
        if self.top_k > self.top_groups * group:
            problem = f"more than the {self.top_groups * group} experts that can be chosen"
            remedy = "Lower it, or raise n_routed_experts or topk_group."
            refuse("num_experts_per_tok", self.top_k, problem, remedy)


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The multi-token-prediction head as declared: `blocks` times the layers of `pattern`.

    The checkpoint decides how many blocks exist; one block may be used for several draft steps.
    """

    blocks: int
    pattern: tuple[LayerKind, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole model. `mlp_widths` and `moes` have one entry for each layer of `kinds`.

    `name` is a label and plays no part in equality. Raises ConfigError for any impossible size.
    """

    name: str = field(compare=False)
    width: int
    vocab: int
    kinds: tuple[LayerKind, ...]
    eps: float
    tied: bool
    residual_fp32: bool
    max_context: int
    dtype: str
    mamba: MambaConfig | None
    attention: AttentionConfig | None
    mlp_bias: bool
    mlp_widths: tuple[int, ...]
    moes: tuple[MoeConfig | None, ...]
    mtp: MtpConfig | None
    mtp_moe: MoeConfig | None
    mtp_mlp_width: int
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None

    def __post_init__(self) -> None:
        positive("hidden_size", self.width)
        positive("vocab_size", self.vocab)
        positive("max_position_embeddings", self.max_context)
        everything = self.kinds + (self.mtp.pattern if self.mtp else ())
        if self.mlp_bias and LayerKind.MOE in everything:
            problem = "biases inside MoE layers are not supported"
            refuse("mlp_bias", True, problem, "No release has them; set mlp_bias to false.")
        per_layer = len(self.mlp_widths) == len(self.moes) == len(self.kinds)
        parts = [
            (self.mamba is not None) == (LayerKind.MAMBA in everything),
            (self.attention is not None) == (LayerKind.ATTENTION in everything),
            *((m is not None) == (k == LayerKind.MOE) for m, k in zip(self.moes, self.kinds)),
            *((w > 0) == (k == LayerKind.MLP) for w, k in zip(self.mlp_widths, self.kinds)),
        ]
        if not (self.kinds and per_layer and all(parts)):
            remedy = "Give every layer the sizes of its kind, and no others (see ModelConfig)."
            refuse("hybrid_override_pattern", self.pattern, "does not match the sizes", remedy)

    # ---- building -----------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """Return a public model's configuration by name (see PRESETS)."""
        if name not in PRESETS:
            close = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"no preset {name!r}.{hint} Known: {', '.join(PRESETS)}.")
        return cls.from_json(PRESETS[name], name=name)

    @classmethod
    def from_json(cls, source: dict[str, Any] | str | Path, name: str = "") -> ModelConfig:
        """Read a configuration from a dict, JSON text, a JSON file or a directory's config.json.

        Raises ConfigError for a missing, unknown, contradictory or impossible value. Keys without
        meaning for inference (rope_*, expand, time_step_min, initializer_range, ...) are not read.
        """
        fields, found_name = load_config(source)
        letters, mtp_letters, mtp_blocks = read_kinds(fields)
        kinds = tuple(map(LayerKind, letters))
        mtp_kinds = tuple(map(LayerKind, mtp_letters))
        _refuse_unsupported(fields)
        layers = [fields.within("block_configs", i) for i in range(len(kinds))]
        mtp_layers = [fields.within("mtp_block_configs", i) for i in range(len(mtp_kinds))]
        placed = list(zip(kinds + mtp_kinds, layers + mtp_layers, strict=True))
        mtp_parts = list(zip(mtp_kinds, mtp_layers, strict=True))
        vocab = fields.integer("vocab_size")
        bos, pad = (fields.token_ids(key, vocab)[:1] for key in ("bos_token_id", "pad_token_id"))
        return cls(
            name=name or found_name,
            width=fields.integer("hidden_size"),
            vocab=vocab,
            kinds=kinds,
            eps=fields.number("layer_norm_epsilon", 1e-5),
            tied=fields.flag("tie_word_embeddings", False),
            residual_fp32=fields.flag("residual_in_fp32", False),
            max_context=fields.integer("max_position_embeddings"),
            dtype=fields.choice("dtype", "bfloat16", _DTYPES),
            mamba=_one([_read_mamba(at) for k, at in placed if k == LayerKind.MAMBA]),
            attention=_one([_read_attention(at) for k, at in placed if k == LayerKind.ATTENTION]),
            mlp_bias=fields.flag("mlp_bias", False),
            mlp_widths=_read_mlp_widths(kinds, layers),
            moes=tuple(
                _read_moe(at) if kind == LayerKind.MOE else None
                for kind, at in zip(kinds, layers, strict=True)
            ),
            mtp=MtpConfig(mtp_blocks, mtp_kinds) if mtp_blocks else None,
            mtp_moe=_one([_read_moe(at) for k, at in mtp_parts if k == LayerKind.MOE]),
            mtp_mlp_width=max(_read_mlp_widths(mtp_kinds, mtp_layers), default=0),
            bos=bos[0] if bos else None,
            eos=fields.token_ids("eos_token_id", vocab),
            pad=pad[0] if pad else None,
        )
