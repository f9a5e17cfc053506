"""The mixers of the family: Mamba-2 (`mamba`), attention, dense MLP, (latent) mixture of experts.

Each takes the normed hidden state x [T, D] of a step's flat tokens (decode rows first, then
prefill rows), the step's metadata and the caches, and returns what is added to the residual. The
`index` of a mixer counts the layers of its kind: it is the mixer's row in its cache.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemotriton.kernels import (
    attend_decode,
    attend_prefill,
    enter_moe,
    matmul,
    route_experts,
    share_expert,
    write_kv,
)
from nemotriton.kernels.dependent import side_by_side
from nemotriton.kernels.fixed_order import DECODE, phase
from nemotriton.kernels.hopper_pack import k_order
from nemotriton.kernels.moe_experts_packed import UNSORTED_PAIRS
from nemotriton.kernels.moe_few import FEW, FEWEST
from nemotriton.kernels.moe_packed_one import count_arrivals
from nemotriton.model.config import AttentionConfig, LayerKind, ModelConfig, MoeConfig
from nemotriton.model.formats import Format
from nemotriton.model.layers import Experts, Linear, Scope, parameter
from nemotriton.model.mamba import MambaMixer, joined


class AttentionMixer(nn.Module):
    """Causal grouped-query attention without any positional encoding, over a paged cache.

    k_proj.k_scale and v_proj.v_scale, where the checkpoint has them, are the scales of fp8 caches:
    a stored key or value times its scale is the number meant. Without them the scale is 1."""

    qkv: torch.Tensor | None

    def __init__(self, config: ModelConfig, index: int, scope: Scope) -> None:
        super().__init__()
        assert config.attention is not None
        a: AttentionConfig = config.attention
        self.attention = a
        self.index = index
        self.scale = a.head_dim**-0.5
        self.q_proj = Linear(a.q_rows, config.width, scope.at("q_proj"), a.bias)
        self.k_proj = Linear(a.kv_rows, config.width, scope.at("k_proj"), a.bias)
        self.v_proj = Linear(a.kv_rows, config.width, scope.at("v_proj"), a.bias)
        self.o_proj = Linear(config.width, a.q_rows, scope.at("o_proj"), a.bias)
        scaled = scope.name in scope.scheme.kv_scaled
        for proj, name in ((self.k_proj, "k_scale"), (self.v_proj, "v_scale")):
            scale = parameter((), torch.float32, scope.device) if scaled else None
            proj.register_parameter(name, scale)
        self.register_buffer("qkv", None, persistent=False)
        self.rows = (a.q_rows, a.kv_rows, a.kv_rows)

    def prepare(self) -> None:
        """Lay the three projections' rows behind each other, where one product can read them."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        plain = all(p.storage is Format.BF16 and p.bias is None for p in parts)
        if plain and self.qkv is None:
            self.qkv = torch.cat([p.weight.detach() for p in parts])
            for part, rows in zip(parts, self.qkv.split(self.rows), strict=True):
                part.weight.data = rows

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, Dh], k and v [T, Hkv, Dh]; the matrices one by one, as training needs it."""
        return self._by_head(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def _by_head(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = self.attention
        return (
            q.unflatten(-1, (a.heads, a.head_dim)),
            k.unflatten(-1, (a.kv_heads, a.head_dim)),
            v.unflatten(-1, (a.kv_heads, a.head_dim)),
        )

    def scales(self, cache: torch.Tensor) -> tuple[Any, Any]:
        """k and v scale of `cache`; None unless it is fp8: wider caches hold the numbers meant."""
        if cache.dtype != torch.float8_e4m3fn:
            return None, None
        return self.k_proj.k_scale, self.v_proj.v_scale

    def forward(self, x: torch.Tensor, batch: Any, caches: Any) -> torch.Tensor:
        if self.qkv is None:
            q, k, v = self.project(x)
        else:
            q, k, v = self._by_head(*matmul(x, self.qkv).split(self.rows, dim=1))
        k_cache, v_cache = caches.kv.layer(self.index)
        scales = self.scales(k_cache)
        write_kv(k, v, k_cache, v_cache, batch.kv_rows, *scales)
        parts = []
        if batch.decode is not None:
            s = batch.decode
            rows = q[: s.end]
            where = (s.pages, s.cu, s.lengths, s.max_new, s.max_length, self.scale, *scales)
            parts.append(attend_decode(rows, k_cache, v_cache, *where, parents=s.parents))
        if batch.prefill is not None:
            s = batch.prefill
            rows = q[s.start :]
            where = (s.pages, s.cu, s.lengths, s.max_new, s.max_length, self.scale, *scales)
            parts.append(attend_prefill(rows, k_cache, v_cache, *where))
        return self.o_proj(joined(parts).flatten(1))


class MlpMixer(nn.Module):
    """down(relu(up(x))^2): two matrices, no gate."""

    def __init__(self, width: int, inner: int, scope: Scope, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = Linear(inner, width, scope.at("up_proj"), bias)
        self.down_proj = Linear(width, inner, scope.at("down_proj"), bias)

    @property
    def code_scale(self) -> torch.Tensor | None:
        """What the norm before this layer may quantise with, see `Linear.code_scale`."""
        return self.up_proj.code_scale

    def forward(
        self,
        x: torch.Tensor,
        batch: Any = None,
        caches: Any = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        h = self.up_proj(x, epilogue="relu2")
        if residual is None:
            return self.down_proj(h)
        return self.down_proj(h, epilogue="residual", residual=residual)


class Gate(nn.Module):
    """The router's weight [E, D] and correction bias [E], in fp32 whatever the file holds."""

    def __init__(self, experts: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((experts, width), torch.float32, device)
        self.e_score_correction_bias = parameter((experts,), torch.float32, device)


class MoeMixer(nn.Module):
    """Routed relu^2 experts, in a latent width where the model has one, plus a shared expert.

    The router and the shared expert read the full-width x; only the routed part goes through
    fc1_latent_proj and fc2_latent_proj."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, scope: Scope) -> None:
        super().__init__()
        self.moe = moe
        width, latent = config.width, moe.latent or config.width
        self.shard = scope.shard
        self.gate = Gate(moe.experts, width, scope.device)
        held = moe.experts // self.shard.ep
        self.experts = Experts(held, moe.width, latent, scope.at("experts"))
        bias, shared = config.mlp_bias, scope.at("shared_experts")
        self.shared_experts = (
            MlpMixer(width, moe.shared_width, shared, bias) if moe.shared_width else None
        )
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.latent:
            self.fc1_latent_proj = Linear(latent, width, scope.at("fc1_latent_proj"), bias)
            self.fc2_latent_proj = Linear(width, latent, scope.at("fc2_latent_proj"), bias)
        self.arrivals: torch.Tensor | None = None

    def prepare(self) -> None:
        """Repack the experts once the weights are in place, where the GPU wants that; a latent
        projection then gives its columns in the order in which their products read them."""
        self.experts.prepare()
        if self.experts.packed and self.arrivals is None:
            where = self.gate.weight.device
            self.arrivals = torch.zeros(1, dtype=torch.int32, device=where)
            columns = self.moe.latent or self.gate.weight.shape[1]
            counts = count_arrivals(FEWEST, self.moe.top_k, columns)
            self.experts.arrivals = torch.zeros(counts, dtype=torch.int32, device=where)
        latent = self.fc1_latent_proj
        if self.experts.packed and not self.experts.ordered and latent is not None:
            width = self.moe.latent
            if width and width % 64 == 0:
                latent.permute_rows(k_order(width, True, latent.weight.device))
                self.experts.ordered = True

    def route(self, x: torch.Tensor) -> Any:
        """The experts and weights of every token of x [T, D] (a `Routing`)."""
        # the ids depend on the last bits: both sides of this product are fp32
        return self._choose(matmul(x, self.gate.weight, out_dtype=torch.float32))

    def _choose(self, logits: torch.Tensor) -> Any:
        bias, m = self.gate.e_score_correction_bias, self.moe
        groups = (m.router_groups, m.top_groups, m.normalize, m.scale)
        few = self.experts.packed and logits.shape[-2] * m.top_k <= UNSORTED_PAIRS
        sort = self.shard.ep > 1 or not few
        routing = route_experts(logits, bias, m.top_k, *groups, sort=sort)
        return self.shard.own_routing(routing, m.experts)

    def forward(self, x: torch.Tensor, batch: Any, caches: Any) -> torch.Tensor:
        """The shared expert's y is rounded before the sum where there is a latent projection, the
        routed experts' where there is none; what is last is added before its own rounding."""
        if self._joins(x):
            return self._forward_joined(x)
        latent, shared = self.fc1_latent_proj, self.shared_experts
        if shared is None:
            routing = self.route(x)
            if latent is None:
                return self.experts(x, routing)
            return self._widen(self.experts(latent(x), routing), None)
        with side_by_side(x) as start:
            if latent is None:
                hidden = start(lambda: shared.up_proj(x, epilogue="relu2"))
                routed = self.experts(x, self.route(x))
                return shared.down_proj(hidden(), epilogue="residual", residual=routed)
            narrow, y = start(lambda: latent(x)), start(lambda: shared(x))
            routing = self.route(x)
            return self._widen(self.experts(narrow(), routing), y)

    def _widen(
        self, routed: torch.Tensor, shared: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor:
        assert self.fc2_latent_proj is not None
        if self.fc2_latent_proj.quantises:  # of rounded parts the sum would be another
            routed = self.shard.add_once(routed)
        if shared is None:
            return self.fc2_latent_proj(routed)
        return self.fc2_latent_proj(routed, epilogue="residual", residual=shared())

    def _joins(self, x: torch.Tensor) -> bool:
        """Whether products of x go together: a few tokens, matrices that nothing is done to. In the
        invariant mode all generated tokens, for the gate's sums have an order of their own."""
        latent = self.fc1_latent_proj
        most = FEWEST if latent is None else FEW
        few = len(x) <= most if phase() is None else phase() == DECODE
        plain = self._shares(x) if latent is None else latent.plain(Format.BF16, Format.FP8)
        return few and plain and x.dtype == torch.bfloat16 and enter_moe.uses_triton((x,), {})

    def _forward_joined(self, x: torch.Tensor) -> torch.Tensor:
        latent, shared, m = self.fc1_latent_proj, self.shared_experts, self.moe
        weight, scale = (None, None) if latent is None else (latent.weight, latent.scale)
        if not self._shares(x):
            with side_by_side(x) as start:
                beside = None if shared is None else start(lambda: shared(x))
                logits, routed, _ = enter_moe(x, self.gate.weight, weight, scale)
                return self._widen(self.experts(routed, self._choose(logits)), beside)
        assert shared is not None
        up, down = shared.up_proj, shared.down_proj
        both = (weight, scale, up.weight, up.scale)
        logits, routed, hidden = enter_moe(x, self.gate.weight, *both)
        assert hidden is not None
        if routed is None:
            return down(hidden, "residual", self.experts(x, self._choose(logits)))
        bias = self.gate.e_score_correction_bias
        groups = (m.top_k, m.router_groups, m.top_groups, m.normalize, m.scale)
        weights = (down.weight, down.scale)
        routing, y = share_expert(logits, bias, *groups, hidden, *weights, self.arrivals)
        return self._widen(self.experts(routed, routing), lambda: y)

    def _shares(self, x: torch.Tensor) -> bool:
        """Whether the shared expert's products are among those that go together; where there is a
        latent projection not in the invariant mode, which takes one way for any number of rows."""
        shared = self.shared_experts
        if shared is None or not shared.up_proj.plain(Format.BF16, Format.FP8):
            return False
        if self.fc1_latent_proj is None:
            return True
        alone = self.experts.packed and self.shard.ep == 1
        alone = alone and len(x) <= FEWEST and phase() is None
        plain = alone and shared.down_proj.plain(Format.BF16, Format.FP8)
        return plain and share_expert.uses_triton((x,), {})


def make_mixer(
    config: ModelConfig,
    kind: LayerKind,
    index: int,
    mlp_width: int,
    moe: MoeConfig | None,
    scope: Scope,
) -> nn.Module:
    """The mixer of a layer; `index` counts the layers of its kind before it in the caches."""
    match kind:
        case LayerKind.MAMBA:
            return MambaMixer(config, index, scope)
        case LayerKind.ATTENTION:
            return AttentionMixer(config, index, scope)
        case LayerKind.MLP:
            return MlpMixer(config.width, mlp_width, scope, config.mlp_bias)
        case LayerKind.MOE:
            assert moe is not None
            return MoeMixer(config, moe, scope)
