"""The Mamba-2 mixer: what stands between its two projections, at decode and over prompts."""

from typing import Any

import torch
from torch import nn

from nemotriton.kernels import (
    causal_conv1d,
    causal_conv1d_update,
    fixed_order,
    gated_rms_norm,
    gated_rms_norm_fp8,
    mamba_step,
    ssd_prefill,
    ssm_replay,
    ssm_update,
)
from nemotriton.kernels.mamba_step import FEW, WIDEST
from nemotriton.model.config import MambaConfig, ModelConfig
from nemotriton.model.layers import Linear, RMSNorm, Scope, parameter


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

    @property
    def code_scale(self) -> torch.Tensor | None:
        """What the norm before this layer may quantise with, see `Linear.code_scale`."""
        return self.in_proj.code_scale

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
        one = batch.decode is not None and self._one_launch(xBC, batch.decode, caches.mamba)
        scale = None if one else self.out_proj.code_scale
        if batch.decode is not None:
            span, n = batch.decode, batch.decode.end
            if one:
                parts.append(self._step(z[:n], xBC[:n], dt[:n], span, caches.mamba))
            else:
                y = self._decode(xBC[:n], dt[:n], span, caches.mamba)
                parts.append(self._gate(y, z[:n], scale))
        if batch.prefill is not None:
            span, n = batch.prefill, batch.prefill.start
            y = self._prefill(xBC[n:], dt[n:], span, caches.mamba)
            parts.append(self._gate(y, z[n:], scale))
        return self.out_proj(joined(parts))

    def _one_launch(self, xBC: torch.Tensor, span: Any, states: Any) -> bool:
        """Whether the decode rows take `mamba_step`. The twins run one by one, to be told apart; so
        do the kernels in the invariant mode, where drafts, whose windows and states are kept, must
        give the same bits."""
        if fixed_order.phase() is not None:
            return False
        one = span.max_new == 1 and not (span.verify or span.trial) and states.rings is None
        fits = self.mamba.conv_width <= WIDEST and span.slots.shape[0] <= FEW
        return one and fits and mamba_step.uses_triton((xBC,), {})

    def _gate(
        self, y: torch.Tensor, z: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gated norm [T, inner]; with a scale as FP8 codes."""
        norm, groups = self.norm, self.mamba.groups
        if scale is None:
            return gated_rms_norm(y.flatten(1), z, norm.weight, norm.eps, groups)
        return gated_rms_norm_fp8(y.flatten(1), z, norm.weight, scale, norm.eps, groups)

    def _step(
        self, z: torch.Tensor, xBC: torch.Tensor, dt: torch.Tensor, span: Any, states: Any
    ) -> torch.Tensor:
        """One token a sequence, normed."""
        i, conv = self.index, self.conv1d
        layer = (conv.weight, conv.bias, states.conv[i], self.A, self.D, self.dt_bias)
        norm = (self.norm.weight, self.mamba.groups, states.arrivals)
        return mamba_step(
            xBC,
            dt,
            z,
            *layer,
            states.ssm[i],
            *norm,
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
