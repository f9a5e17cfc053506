"""The sizes of each layer kind: read from JSON, checked, counted, scaled and written back.

Every check stands in `__post_init__`, so it holds whoever builds the object; messages use the JSON
key names. All sizes are numbers of elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from nemotriton.model.json_fields import Fields, positive, refuse
from nemotriton.model.layer_kinds import LayerKind

DTYPES = ("bfloat16", "float16", "float32")
# of the recurrent states: names of kernels.STATE_FORMATS, here since no torch is
STATE_DTYPES = ("float32", "bfloat16", "float16", "float16-sr", "int16", "int8")


def scaled_size(size: int, scale: float) -> int:
    """Return about size * scale, as divisible by powers of two up to 64 as `size` is.

    So NVFP4's groups of 16 and the tiles' alignment stay whole. Zero stays zero.
    """
    step = math.gcd(size, 64)
    return min(size, max(step, round(size * scale / step) * step))


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
            remedy = "Correct either; each group serves the same number of heads."
            refuse("mamba_num_heads", self.heads, problem, remedy)
        if not 2 <= self.conv_width <= 4:
            remedy = "Correct conv_kernel; all releases have 4."
            refuse("conv_kernel", self.conv_width, "widths 2, 3 and 4 are supported", remedy)

    @classmethod
    def read(cls, fields: Fields) -> MambaConfig:
        """Read the Mamba keys; `expand` and the init-only time_step_min/max/floor are not read.

        `use_bias` decides about projection biases, as in transformers; `mamba_proj_bias` only where
        `use_bias` is absent.
        """
        return cls(
            heads=fields.integer("mamba_num_heads"),
            head_dim=fields.integer("mamba_head_dim"),
            state=fields.integer("ssm_state_size"),
            groups=fields.integer("n_groups"),
            conv_width=fields.integer("conv_kernel"),
            chunk=fields.integer("chunk_size", 128),
            conv_bias=fields.flag("use_conv_bias", True),
            proj_bias=fields.flag("use_bias", fields.flag("mamba_proj_bias", False)),
            dt_limit=fields.limits("time_step_limit"),
            state_dtype=fields.choice("mamba_ssm_cache_dtype", "float32", STATE_DTYPES),
        )

    @property
    def inner(self) -> int:
        """Channels of x and of the gate z: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def in_rows(self) -> int:
        """Rows of the in-projection: z, xBC and dt."""
        return self.inner + self.conv_dim + self.heads

    def parameters(self, width: int) -> int:
        """Return the number of parameters of one mixer."""
        projections = (self.in_rows + self.inner) * width
        projections += (self.in_rows + width) if self.proj_bias else 0
        conv = self.conv_dim * (self.conv_width + self.conv_bias)
        return projections + conv + 3 * self.heads + self.inner

    def scaled(self, scale: float) -> MambaConfig:
        """Return the same mixer with fewer heads, at least one for each group."""
        per_group = max(1, round(self.heads // self.groups * scale))
        return replace(self, heads=self.groups * per_group)

    def json(self) -> dict[str, Any]:
        """Return the keys that `read` reads back to an equal object."""
        low, high = self.dt_limit
        data = {
            "mamba_num_heads": self.heads,
            "mamba_head_dim": self.head_dim,
            "ssm_state_size": self.state,
            "n_groups": self.groups,
            "conv_kernel": self.conv_width,
            "chunk_size": self.chunk,
            "use_conv_bias": self.conv_bias,
            "use_bias": self.proj_bias,
            "mamba_proj_bias": self.proj_bias,
            "mamba_ssm_cache_dtype": self.state_dtype,
        }
        if self.dt_limit != (0.0, math.inf):
            written = {"__float__": "Infinity"} if math.isinf(high) else high
            data["time_step_limit"] = [low, written]
        return data


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
            remedy = "Correct either; each KV head serves the same number of query heads."
            refuse("num_attention_heads", self.heads, problem, remedy)

    @classmethod
    def read(cls, fields: Fields) -> AttentionConfig:
        """Read the attention keys; without num_key_value_heads every head has its own K and V."""
        heads = fields.integer("num_attention_heads")
        return cls(
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim"),
            bias=fields.flag("attention_bias", False),
        )

    @property
    def q_rows(self) -> int:
        """Rows of the query projection; need not equal the model's width."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def parameters(self, width: int) -> int:
        """Return the number of parameters of one mixer."""
        bias = self.q_rows + 2 * self.kv_rows + width if self.bias else 0
        return 2 * (self.q_rows + self.kv_rows) * width + bias

    def scaled(self, scale: float) -> AttentionConfig:
        """Return the same mixer with fewer query heads, at least one for each KV head."""
        per_kv_head = max(1, round(self.heads // self.kv_heads * scale))
        return replace(self, heads=self.kv_heads * per_kv_head)

    def json(self) -> dict[str, Any]:
        """Return the keys that `read` reads back to an equal object."""
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": self.bias,
        }


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes of one MoE layer.

    `shared_width` is the width of all shared experts together, 0 for none. `latent` is the width
    the routed experts read and write, None where that is the model's own.
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
            refuse("n_group", self.router_groups, problem, "Correct either; groups are equal.")
        if self.top_groups > self.router_groups:
            problem = f"more than n_group = {self.router_groups}"
            refuse("topk_group", self.top_groups, problem, "Lower it to n_group or less.")
        group = self.experts // self.router_groups
        if self.router_groups > 1 and group < 2:
            problem = "one expert a group, but a group's score is the sum of its best two"
            refuse("n_group", self.router_groups, problem, "Use at most n_routed_experts / 2.")
        if self.top_k > self.top_groups * group:
            problem = f"more than the {self.top_groups * group} experts that can be chosen"
            remedy = "Lower it, or raise n_routed_experts or topk_group."
            refuse("num_experts_per_tok", self.top_k, problem, remedy)

    @classmethod
    def read(cls, fields: Fields) -> MoeConfig:
        """Read the MoE keys; absent group keys mean one group, latent null or 0 means none."""
        shared_width = fields.count("moe_shared_expert_intermediate_size", 0)
        shared_experts = fields.count("n_shared_experts", 1 if shared_width else 0)
        if shared_experts and not shared_width:
            fields.missing("moe_shared_expert_intermediate_size")
        return cls(
            experts=fields.integer("n_routed_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            width=fields.integer("moe_intermediate_size"),
            shared_width=shared_experts * shared_width,
            latent=fields.count("moe_latent_size", 0) or None,
            router_groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
            normalize=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        )

    def parameters(self, width: int, experts: int) -> int:
        """Return the number of parameters of one layer that holds (or uses) `experts` experts."""
        latent = self.latent or width
        projections = 2 * self.latent * width if self.latent else 0
        router = self.experts * (width + 1)
        shared = 2 * self.shared_width * width
        return router + shared + projections + 2 * experts * self.width * latent

    def scaled(self, scale: float) -> MoeConfig:
        """Return a layer with fewer and narrower experts and about the same share chosen."""
        least = 2 if self.router_groups > 1 else 1
        group = max(least, round(self.experts // self.router_groups * scale))
        top_k = max(min(self.top_k, 2), round(self.top_k * scale))
        return replace(
            self,
            experts=self.router_groups * group,
            top_k=min(top_k, self.top_groups * group),
            width=scaled_size(self.width, scale),
            shared_width=scaled_size(self.shared_width, scale),
            latent=scaled_size(self.latent, scale) if self.latent else None,
        )

    def json(self) -> dict[str, Any]:
        """Return the keys that `read` reads back to an equal object."""
        return {
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.width,
            "n_shared_experts": 1 if self.shared_width else 0,
            "moe_shared_expert_intermediate_size": self.shared_width,
            "moe_latent_size": self.latent,
            "n_group": self.router_groups,
            "topk_group": self.top_groups,
            "norm_topk_prob": self.normalize,
            "routed_scaling_factor": self.scale,
        }


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The multi-token-prediction head as declared: `blocks` times the layers of `pattern`.

    The checkpoint decides how many blocks exist; one block may serve several draft steps.
    """

    blocks: int
    pattern: tuple[LayerKind, ...]

    def __post_init__(self) -> None:
        positive("num_nextn_predict_layers", self.blocks)
