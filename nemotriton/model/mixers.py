"""The four mixers of the family: Mamba-2, attention, dense MLP and (latent) mixture of experts.

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
    causal_conv1d,
    causal_conv1d_update,
    enter_moe,
    gated_rms_norm,
    mamba_step,
    matmul,
    route_experts,
    share_expert,
    ssd_prefill,
    ssm_replay,
    ssm_update,
    write_kv,
)
from nemotriton.kernels.dependent import beside
from nemotriton.kernels.fixed_order import DECODE, phase
from nemotriton.kernels.hopper_pack import k_order
from nemotriton.kernels.mamba_step import WIDEST
from nemotriton.kernels.moe_experts_packed import UNSORTED_PAIRS
from nemotriton.kernels.moe_few import FEW
from nemotriton.model.config import AttentionConfig, LayerKind, MambaConfig, ModelConfig, MoeConfig
from nemotriton.model.formats import Format
from nemotriton.model.layers import Experts, Linear, RMSNorm, Scope, parameter


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of a step's spans, decode first; no copy where there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Conv1d(nn.Module):
    """Weights of the depth-wise causal convolution: weight [conv_dim, W], bias [conv_dim].

    The weight lies transposed in memory, for the kernels read a tap of neighbouring channels."""

    def __init__(self, mamba: MambaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        taps = parameter((mamba.conv_width, mamba.conv_dim), dtype, device)
        self.weight = nn.Parameter(taps.data.t(), requires_grad=taps.requires_grad)
        self.bias = parameter((mamba.conv_dim,), dtype, device) if mamba.conv_bias else None


class MambaMixer(nn.Module):
    """Mamba-2: in-projection -> causal conv + SiLU -> selective scan -> gated norm -> out.

    A_log, D and dt_bias [H] are kept in fp32, since the recurrence depends on them."""

    def __init__(self, config: ModelConfig, index: int, scope: Scope) -> None:
        super().__init__()
        assert config.mamba is not None
        m = self.mamba = config.mamba
        dtype, device = scope.dtype, scope.device
        self.index = index
        self.in_proj = Linear(m.in_rows, config.width, scope.at("in_proj"), m.proj_bias)
        self.conv1d = Conv1d(m, dtype, device)
        self.A_log = parameter((m.heads,), torch.float32, device)
        self.D = parameter((m.heads,), torch.float32, device)
        self.dt_bias = parameter((m.heads,), torch.float32, device)
        self.norm = RMSNorm(m.inner, config.eps, dtype, device)
        self.out_proj = Linear(config.width, m.inner, scope.at("out_proj"), m.proj_bias)
        self.register_buffer("A", None, persistent=False)

    def prepare(self) -> None:
        """Compute A = -exp(A_log) once the weights are in place."""
        self.A = -torch.exp(self.A_log.detach())

    def split(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The in-projection's z [T, inner], xBC [T, conv_dim] and dt [T, H], as views."""
        m = self.mamba
        z, xBC, dt = p.split([m.inner, m.conv_dim, m.heads], dim=-1)
        return z, xBC, dt

    def heads(self, xBC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H, P], B [T, G, N] and C [T, G, N] as views of the convolved columns."""
        m = self.mamba
        n = m.groups * m.state
        x, B, C = xBC.split([m.inner, n, n], dim=-1)
        return (
            x.unflatten(-1, (m.heads, m.head_dim)),
            B.unflatten(-1, (m.groups, m.state)),
            C.unflatten(-1, (m.groups, m.state)),
        )

    def forward(self, x: torch.Tensor, batch: Any, caches: Any) -> torch.Tensor:
        z, xBC, dt = self.split(self.in_proj(x))
        parts = []
        if batch.decode is not None:
            span, n = batch.decode, batch.decode.end
            if self._one_launch(xBC, span, caches.mamba):
                parts.append(self._step(z[:n], xBC[:n], dt[:n], span, caches.mamba))
            else:
                parts.append(self._gate(self._decode(xBC[:n], dt[:n], span, caches.mamba), z[:n]))
        if batch.prefill is not None:
            span, n = batch.prefill, batch.prefill.start
            parts.append(self._gate(self._prefill(xBC[n:], dt[n:], span, caches.mamba), z[n:]))
        return self.out_proj(joined(parts))

    def _one_launch(self, xBC: torch.Tensor, span: Any, states: Any) -> bool:
        """Whether the decode rows take `mamba_step`; the twins run one by one, to be told apart."""
        one = span.max_new == 1 and not (span.verify or span.trial) and states.rings is None
        return one and self.mamba.conv_width <= WIDEST and mamba_step.uses_triton((xBC,), {})

    def _gate(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        norm = self.norm
        return gated_rms_norm(y.flatten(1), z, norm.weight, norm.eps, self.mamba.groups)

    def _step(
        self, z: torch.Tensor, xBC: torch.Tensor, dt: torch.Tensor, span: Any, states: Any
    ) -> torch.Tensor:
        """One token a sequence, normed."""
        i = self.index
        return mamba_step(
            xBC,
            dt,
            z,
            self.conv1d.weight,
            self.conv1d.bias,
            states.conv[i],
            self.A,
            self.D,
            self.dt_bias,
            states.ssm[i],
            self.norm.weight,
            self.mamba.groups,
            states.arrivals,
            span.cu,
            span.slots,
            states.cells(span),
            eps=self.norm.eps,
            dt_limit=self.mamba.dt_limit,
            scales=states.layer_scales(i)[0],
            noise=states.noise(span, i),
        )

    def _decode(self, xBC: torch.Tensor, dt: torch.Tensor, span: Any, states: Any) -> torch.Tensor:
        """1..max_new tokens a sequence; with drafts the states stay and every step is a lane, or
        its inputs are in the ring, whichever way the states roll back."""
        i, w, b = self.index, self.conv1d.weight, self.conv1d.bias
        conv_lanes = states.conv_lanes[i] if span.verify else None
        update = not (span.verify or span.trial)
        xBC = causal_conv1d_update(
            xBC,
            w,
            b,
            states.conv[i],
            span.cu,
            span.slots,
            span.max_new,
            lanes=conv_lanes,
            update_state=update,
            parents=span.parents,
        )
        x, B, C = self.heads(xBC)
        if states.rings is not None:
            return self._replay(x, dt, B, C, span, states)
        scales, lane_scales = states.layer_scales(i)
        ssm_lanes = states.layer_lanes(i)[1] if span.verify else None
        return ssm_update(
            x,
            dt,
            self.A,
            B,
            C,
            self.D,
            self.dt_bias,
            states.ssm[i],
            span.cu,
            states.cells(span),
            span.max_new,
            dt_limit=self.mamba.dt_limit,
            lanes=ssm_lanes,
            update_state=update,
            parents=span.parents,
            lane_slots=span.slots if span.verify else None,
            scales=scales,
            lane_scales=lane_scales if span.verify else None,
            noise=states.noise(span, i),
        )

    def _replay(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        span: Any,
        states: Any,
    ) -> torch.Tensor:
        """The same from the states stored last and the inputs since."""
        i = self.index
        x_ring, dt_ring, B_ring = (ring[i] for ring in states.rings)
        counts, order = states.cursors(span)
        return ssm_replay(
            x,
            dt,
            self.A,
            B,
            C,
            self.D,
            self.dt_bias,
            states.ssm[i],
            x_ring,
            dt_ring,
            B_ring,
            span.cu,
            states.cells(span),
            counts,
            order,
            span.max_new,
            dt_limit=self.mamba.dt_limit,
            update=not span.trial,
            parents=span.parents,
            scales=states.layer_scales(i)[0],
            noise=states.noise(span, i),
        )

    def _prefill(self, xBC: torch.Tensor, dt: torch.Tensor, span: Any, states: Any) -> torch.Tensor:
        i = self.index
        where = (span.cu, span.slots, span.fresh)
        xBC = causal_conv1d(
            xBC, self.conv1d.weight, self.conv1d.bias, states.conv[i], *where, span.max_new
        )
        where = (span.cu, states.cells(span), span.fresh)
        x, B, C = self.heads(xBC)
        return ssd_prefill(
            x,
            dt,
            self.A,
            B,
            C,
            self.D,
            self.dt_bias,
            states.ssm[i],
            *where,
            span.chunks,
            self.mamba.chunk,
            dt_limit=self.mamba.dt_limit,
            scales=states.layer_scales(i)[0],
            noise=states.noise(span, i),
        )


class AttentionMixer(nn.Module):
    """Causal grouped-query attention without any positional encoding, over a paged cache.

    k_proj.k_scale and v_proj.v_scale, where the checkpoint has them, are the scales of fp8 caches:
    a stored key or value times its scale is the number meant. Without them the scale is 1."""

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

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, Hq, Dh], k and v [T, Hkv, Dh]."""
        a = self.attention
        return (
            self.q_proj(x).unflatten(-1, (a.heads, a.head_dim)),
            self.k_proj(x).unflatten(-1, (a.kv_heads, a.head_dim)),
            self.v_proj(x).unflatten(-1, (a.kv_heads, a.head_dim)),
        )

    def scales(self, cache: torch.Tensor) -> tuple[Any, Any]:
        """k and v scale of `cache`; None unless it is fp8: wider caches hold the numbers meant."""
        if cache.dtype != torch.float8_e4m3fn:
            return None, None
        return self.k_proj.k_scale, self.v_proj.v_scale

    def forward(self, x: torch.Tensor, batch: Any, caches: Any) -> torch.Tensor:
        q, k, v = self.project(x)
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

    def prepare(self) -> None:
        """Repack the experts once the weights are in place, where the GPU wants that; a latent
        projection then gives its columns in the order in which their products read them."""
        self.experts.prepare()
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
        if latent is None:
            routed = self.experts(x, self.route(x))
            return routed if shared is None else shared(x, residual=routed)
        y = None if shared is None else beside(lambda: shared(x), x)
        routing = self.route(x)
        return self._widen(self.experts(latent(x), routing), y)

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
        """Whether the products of x go together: a few tokens, matrices that nothing is done to. In
        the invariant mode all generated tokens, for the gate's sums have an order of their own."""
        shared, latent = self.shared_experts, self.fc1_latent_proj
        few = len(x) <= FEW if phase() is None else phase() == DECODE
        if shared is None or not few or x.dtype != torch.bfloat16:
            return False
        plain = latent is None or latent.plain(Format.BF16)
        plain = plain and shared.up_proj.plain(Format.BF16, Format.FP8)
        return plain and enter_moe.uses_triton((x,), {})

    def _forward_joined(self, x: torch.Tensor) -> torch.Tensor:
        latent, shared, m = self.fc1_latent_proj, self.shared_experts, self.moe
        assert shared is not None
        up, down = shared.up_proj, shared.down_proj
        narrow = None if latent is None else latent.weight
        logits, routed, hidden = enter_moe(x, self.gate.weight, narrow, up.weight, up.scale)
        alone = latent is None or not self.experts.packed or self.shard.ep > 1 or len(x) > FEW
        if alone or not down.plain(Format.BF16, Format.FP8):
            routing = self._choose(logits)
            if routed is None:
                return down(hidden, "residual", self.experts(x, routing))
            return self._widen(self.experts(routed, routing), lambda: down(hidden))
        bias = self.gate.e_score_correction_bias
        groups = (m.top_k, m.router_groups, m.top_groups, m.normalize, m.scale)
        routing, y = share_expert(logits, bias, *groups, hidden, down.weight, down.scale)
        return self._widen(self.experts(routed, routing), lambda: y)


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
