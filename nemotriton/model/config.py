"""What a Nemotron-H model is: its layers, its sizes, and the numbers that follow from them.

`ModelConfig` is built once, from `config.json` or a preset, and is frozen. Nothing else reads the
raw JSON. All sizes are numbers of elements unless a name says bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from nemotriton.errors import ConfigError, nearest
from nemotriton.model.json_fields import Fields, load_config, positive, refuse
from nemotriton.model.layer_config import (
    DTYPES,
    AttentionConfig,
    MambaConfig,
    MoeConfig,
    MtpConfig,
    scaled_size,
)
from nemotriton.model.layer_kinds import LayerKind, read_kinds
from nemotriton.model.presets import PRESETS

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "LayerKind",
    "MambaConfig",
    "ModelConfig",
    "MoeConfig",
    "MtpConfig",
]

_Part = TypeVar("_Part", MambaConfig, AttentionConfig, MoeConfig)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole model; `mlp_widths` and `moes` have one entry for each layer of `kinds`.

    `name` is a label and plays no part in equality. `mamba` and `attention` serve all layers of
    their kind, the MTP block's included. Raises ConfigError for any impossible size.
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
        mtp_kinds = self.mtp.pattern if self.mtp else ()
        everything = self.kinds + mtp_kinds
        if self.mlp_bias and LayerKind.MOE in everything:
            problem = "biases inside MoE layers are not supported"
            refuse("mlp_bias", True, problem, "No release has them; set mlp_bias to false.")
        moe_layers = self.moes + (self.mtp_moe,)
        moe_places = self.kinds + (LayerKind.MOE if LayerKind.MOE in mtp_kinds else LayerKind.MLP,)
        mlp_layers = self.mlp_widths + (self.mtp_mlp_width,)
        mlp_places = self.kinds + (LayerKind.MLP if LayerKind.MLP in mtp_kinds else LayerKind.MOE,)
        fits = (
            bool(self.kinds)
            and (self.mamba is not None) == (LayerKind.MAMBA in everything)
            and (self.attention is not None) == (LayerKind.ATTENTION in everything)
            and [moe is not None for moe in moe_layers] == [k == LayerKind.MOE for k in moe_places]
            and [size > 0 for size in mlp_layers] == [k == LayerKind.MLP for k in mlp_places]
        )
        if not fits:
            remedy = "Give every layer the sizes of its kind and no others; see ModelConfig."
            refuse("hybrid_override_pattern", self.pattern, "does not match the sizes", remedy)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """Return a public model's configuration by name (the keys of PRESETS)."""
        if name not in PRESETS:
            close = nearest(name, PRESETS)
            hint = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"preset {name!r} is unknown.{hint} Known: {', '.join(PRESETS)}.")
        return cls.from_json(PRESETS[name], name=name)

    @classmethod
    def from_json(cls, data: dict[str, Any] | str | Path, name: str = "") -> ModelConfig:
        """Read a configuration from a dict, JSON text, a JSON file or a directory's config.json.

        Raises ConfigError for a missing, unknown, contradictory or impossible value. Keys without
        meaning for inference (rope_*, expand, time_step_min, initializer_range, ...) are not read.
        """
        fields, found_name = load_config(data)
        kinds, mtp_kinds, mtp_blocks = read_kinds(fields)
        _refuse_unsupported(fields)
        layers = list(zip(kinds, fields.layers("block_configs", len(kinds)), strict=True))
        mtp_layers = list(
            zip(mtp_kinds, fields.layers("mtp_block_configs", len(mtp_kinds)), strict=True)
        )
        both = layers + mtp_layers
        vocab = fields.integer("vocab_size")
        return cls(
            name=name or found_name,
            width=fields.integer("hidden_size"),
            vocab=vocab,
            kinds=kinds,
            eps=fields.number("layer_norm_epsilon", 1e-5),
            tied=fields.flag("tie_word_embeddings", False),
            residual_fp32=fields.flag("residual_in_fp32", False),
            max_context=fields.integer("max_position_embeddings"),
            dtype=fields.choice("dtype", "bfloat16", DTYPES),
            mamba=_one([MambaConfig.read(at) for kind, at in both if kind is LayerKind.MAMBA]),
            attention=_one(
                [AttentionConfig.read(at) for kind, at in both if kind is LayerKind.ATTENTION]
            ),
            mlp_bias=fields.flag("mlp_bias", False),
            mlp_widths=_mlp_widths(layers),
            moes=tuple(MoeConfig.read(at) if k is LayerKind.MOE else None for k, at in layers),
            mtp=MtpConfig(mtp_blocks, mtp_kinds) if mtp_blocks else None,
            mtp_moe=_one([MoeConfig.read(at) for kind, at in mtp_layers if kind is LayerKind.MOE]),
            mtp_mlp_width=_mtp_mlp_width(mtp_layers),
            bos=fields.token_id("bos_token_id", vocab),
            eos=fields.token_ids("eos_token_id", vocab),
            pad=fields.token_id("pad_token_id", vocab),
        )

    @property
    def pattern(self) -> str:
        """The layers as letters, e.g. "M*-E"."""
        return "".join(self.kinds)

    @property
    def layer_count(self) -> int:
        """Layers of the main model (MTP not counted)."""
        return len(self.kinds)

    @property
    def mamba_layers(self) -> tuple[int, ...]:
        """Indices of the Mamba layers."""
        return self._layers_of(LayerKind.MAMBA)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the attention layers."""
        return self._layers_of(LayerKind.ATTENTION)

    @property
    def mlp_layers(self) -> tuple[int, ...]:
        """Indices of the dense MLP layers."""
        return self._layers_of(LayerKind.MLP)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers."""
        return self._layers_of(LayerKind.MOE)

    @property
    def moe(self) -> MoeConfig | None:
        """The first MoE layer's sizes, None without MoE layers."""
        return next((moe for moe in self.moes if moe is not None), None)

    def _layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        return tuple(index for index, each in enumerate(self.kinds) if each is kind)

    def describe(self) -> str:
        """Return one line such as `52 layers M23 E23 *6 · MTP 0`."""
        counts = " ".join(f"{kind}{self.kinds.count(kind)}" for kind in dict.fromkeys(self.kinds))
        mtp = f"{self.mtp.blocks} ({''.join(self.mtp.pattern)})" if self.mtp else "0"
        return f"{self.layer_count} layers {counts} · MTP {mtp}"

    def parameter_count(self, mtp: bool = False) -> int:
        """Return the number of parameters, router correction biases included.

        With `mtp`, one MTP block is added: the file holds one, however often it is applied.
        """
        layers = zip(self.kinds, self.moes, self.mlp_widths, strict=True)
        total = sum(self._layer_parameters(*layer) for layer in layers)
        total += self.vocab * self.width * (1 if self.tied else 2) + self.width
        return total + (self._mtp_parameters() if mtp else 0)

    def active_parameter_count(self) -> int:
        """Return the parameters one token uses: all but the experts it is not sent to, no MTP.

        Embedding and head count in full; this is the definition behind the models' names.
        """
        idle = 0
        for moe in self.moes:
            if moe is not None:
                all_experts = moe.parameters(self.width, moe.experts)
                idle += all_experts - moe.parameters(self.width, moe.top_k)
        return self.parameter_count() - idle

    def bf16_checkpoint_bytes(self, mtp: bool = True, gate_fp32: bool = False) -> int:
        """Return the tensor bytes of a BF16 release: correction biases fp32, all else bf16.

        Router gates are bf16 in Super and Ultra, fp32 in Nano (`gate_fp32`): no key says which.
        """
        moes = [*self.moes, *((self.mtp_moe,) * self._mtp_moe_layers() if mtp else ())]
        experts = sum(moe.experts for moe in moes if moe is not None)
        fp32_elements = experts * (1 + self.width * gate_fp32)
        return 2 * self.parameter_count(mtp=mtp) + 2 * fp32_elements

    def _mtp_moe_layers(self) -> int:
        return self.mtp.pattern.count(LayerKind.MOE) if self.mtp else 0

    def _mtp_parameters(self) -> int:
        if self.mtp is None:
            return 0
        layers = sum(
            self._layer_parameters(kind, self.mtp_moe, self.mtp_mlp_width)
            for kind in self.mtp.pattern
        )
        return layers + 2 * self.width * self.width + 3 * self.width  # eh_proj and three norms

    def _layer_parameters(self, kind: LayerKind, moe: MoeConfig | None, mlp_width: int) -> int:
        norm = self.width
        if kind is LayerKind.MLP:
            bias = mlp_width + self.width if self.mlp_bias else 0
            return norm + 2 * mlp_width * self.width + bias
        if kind is LayerKind.MOE:
            assert moe is not None
            return norm + moe.parameters(self.width, moe.experts)
        part = self.mamba if kind is LayerKind.MAMBA else self.attention
        assert part is not None
        return norm + part.parameters(self.width)

    def cut(self, layers: int | None = None, width_scale: float | None = None) -> ModelConfig:
        """Return a legal smaller model, for random weights; the vocabulary and MTP block stay.

        `layers`: the contiguous run of that many layers holding the most kinds, the earliest such
        run: the first layers, unless only a later run has every kind that fits.
        `width_scale` in (0, 1]: width, heads, experts, experts a token and all ffn widths shrink;
        groups, KV heads, head sizes, state and conv width stay, and with them divisibility.
        """
        small = self
        if layers is not None:
            positive("layers", layers)
            if layers > self.layer_count:
                problem = f"the model has only {self.layer_count} layers"
                refuse("layers", layers, problem, f"Ask for 1 to {self.layer_count}.")
            small = small._run(layers)
        if width_scale is not None:
            number = isinstance(width_scale, (int, float)) and not isinstance(width_scale, bool)
            if not (number and 0 < width_scale <= 1):
                remedy = "Use e.g. 0.25 for a quarter of the width."
                refuse("width_scale", width_scale, "must be above 0 and at most 1", remedy)
            small = small._narrowed(width_scale)
        return small

    def _run(self, length: int) -> ModelConfig:
        starts = range(self.layer_count - length + 1)
        start = max(starts, key=lambda at: (len(set(self.kinds[at : at + length])), -at))
        run = slice(start, start + length)
        used = self.kinds[run] + (self.mtp.pattern if self.mtp else ())
        return replace(
            self,
            kinds=self.kinds[run],
            mlp_widths=self.mlp_widths[run],
            moes=self.moes[run],
            mamba=self.mamba if LayerKind.MAMBA in used else None,
            attention=self.attention if LayerKind.ATTENTION in used else None,
        )

    def _narrowed(self, scale: float) -> ModelConfig:
        return replace(
            self,
            width=scaled_size(self.width, scale),
            mamba=self.mamba.scaled(scale) if self.mamba else None,
            attention=self.attention.scaled(scale) if self.attention else None,
            mlp_widths=tuple(scaled_size(size, scale) for size in self.mlp_widths),
            moes=tuple(moe.scaled(scale) if moe else None for moe in self.moes),
            mtp_moe=self.mtp_moe.scaled(scale) if self.mtp_moe else None,
            mtp_mlp_width=scaled_size(self.mtp_mlp_width, scale),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a `config.json` that from_json reads back to an equal object.

        MoE layers of different sizes are written as Puzzle's `block_configs`; different MLP widths
        as a list.
        """
        moes = [moe for moe in self.moes if moe is not None]
        uniform = all(moe == moes[0] for moe in moes)
        shared_moe = self.moe or self.mtp_moe
        data: dict[str, Any] = {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h" if uniform else "nemotron_h_puzzle",
            "hidden_size": self.width,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layer_count,
            "hybrid_override_pattern": self.pattern,
            "layer_norm_epsilon": self.eps,
            "tie_word_embeddings": self.tied,
            "residual_in_fp32": self.residual_fp32,
            "max_position_embeddings": self.max_context,
            "dtype": self.dtype,
            "mlp_bias": self.mlp_bias,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "bos_token_id": self.bos,
            "eos_token_id": self.eos[0] if len(self.eos) == 1 else list(self.eos) or None,
            "pad_token_id": self.pad,
            "num_nextn_predict_layers": self.mtp.blocks if self.mtp else 0,
        }
        for part in (self.mamba, self.attention, shared_moe):
            data |= part.json() if part else {}
        widths = [width for width in self.mlp_widths if width]
        if len({*widths, self.mtp_mlp_width or max(widths, default=0)}) > 1:
            data["intermediate_size"] = widths
        elif widths or self.mtp_mlp_width:
            data["intermediate_size"] = max(*widths, self.mtp_mlp_width, 0)
        if not uniform:
            data["block_configs"] = [
                _block(*layer) for layer in zip(self.kinds, self.moes, self.mlp_widths, strict=True)
            ]
        if self.mtp is not None:
            data["mtp_hybrid_override_pattern"] = "".join(self.mtp.pattern)
            other_moe = self.mtp_moe is not None and self.mtp_moe != shared_moe
            if other_moe or (self.mtp_mlp_width and len({*widths, self.mtp_mlp_width}) > 1):
                data["mtp_block_configs"] = [
                    _block(kind, self.mtp_moe, self.mtp_mlp_width) for kind in self.mtp.pattern
                ]
        return data


def _block(kind: LayerKind, moe: MoeConfig | None, mlp_width: int) -> dict[str, Any]:
    """Return one entry of `block_configs`."""
    block: dict[str, Any] = {"block_type": kind.word}
    if kind is LayerKind.MOE and moe is not None:
        # Null would mean "as in the whole file"; 0 says that this layer has none.
        block |= {key: 0 if value is None else value for key, value in moe.json().items()}
    if kind is LayerKind.MLP:
        block["intermediate_size"] = mlp_width
    return block


def _one(parts: Sequence[_Part]) -> _Part | None:
    """Return the sizes that all layers of a kind share, None without such layers."""
    for part in parts[1:]:
        ours, first = part.json(), parts[0].json()
        for key in ours:
            if ours[key] != first.get(key):
                problem = f"differs between layers of one kind (another layer has {first.get(key)})"
                remedy = "Only MoE layers and MLPs may differ from layer to layer."
                refuse(f"block_configs: {key}", ours[key], problem, remedy)
    return parts[0] if parts else None


def _mlp_widths(layers: Sequence[tuple[LayerKind, Fields]]) -> tuple[int, ...]:
    """Return every layer's MLP width, 0 where it is no MLP.

    `intermediate_size` is one number, a list with one entry for each MLP layer, or a list of one.
    """
    count = sum(kind is LayerKind.MLP for kind, _ in layers)
    widths: list[int] = []
    seen = 0
    for kind, fields in layers:
        if kind is not LayerKind.MLP:
            widths.append(0)
            continue
        key, value = fields.find("intermediate_size") or fields.missing("intermediate_size")
        if isinstance(value, list):
            if len(value) not in (1, count):
                problem = f"{len(value)} entries for {count} MLP layers"
                refuse(key, value, problem, "Give one number, or one for each '-' layer.")
            key, value = f"{key}[{seen % len(value)}]", value[seen % len(value)]
        widths.append(positive(key, value))
        seen += 1
    return tuple(widths)


def _mtp_mlp_width(layers: Sequence[tuple[LayerKind, Fields]]) -> int:
    """Return the MLP width of an MTP block, 0 if it has no MLP."""
    widths = {width for width in _mlp_widths(layers) if width}
    if len(widths) > 1:
        remedy = "Give every MLP of the MTP block one width."
        refuse("mtp_block_configs: intermediate_size", sorted(widths), "differs", remedy)
    return max(widths, default=0)


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse the few keys that would change the arithmetic if they held anything else."""
    fields.choice("mlp_hidden_act", "relu2", ("relu2",))
    fields.choice("mamba_hidden_act", "silu", ("silu", "swish"))
    window = fields.find("sliding_window")
    if window is not None:
        remedy = "Set it to null if the checkpoint was trained without a window."
        refuse(*window, "sliding-window attention is not part of Nemotron-H", remedy)
