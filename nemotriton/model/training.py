"""The mixers without caches, differentiable: whole sequences, every shape static.

Used to train small models and as a second opinion on the engine. Each form below equals the twins'
up to rounding and is written so that a training step can be recorded in a CUDA graph: no loop over
chunks or sequences, no index taken from data. Works under autocast; what must be fp32 stays fp32.

    scan      all chunks of SSD at once; the states between them by one product with their decays
              (Dao & Gu 2024, section 6, the "state passing" step written as a matrix)
    conv      W shifted products
    experts   every expert for every token, weighted by zero where it is not chosen: exact, and for
              few narrow experts faster than sorting tokens

Experts are chosen without gradient, their weights carry one. `balance` moves the correction biases
instead (Wang et al. 2024, "Auxiliary-loss-free load balancing", as DeepSeek-V3 trains).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nemotriton.kernels.op import acc_dtype, use
from nemotriton.kernels.ssm_update import time_step_ref
from nemotriton.model.config import MoeConfig
from nemotriton.model.formats import Format
from nemotriton.model.layers import Embedding, Linear, RMSNorm
from nemotriton.model.mamba import MambaMixer
from nemotriton.model.mixers import AttentionMixer, MlpMixer, MoeMixer

TRAINING_CHUNK = 64  # tokens of a chunk of the scan; any number gives the same result


def train_mixer(mixer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x [B, T, D] -> what the mixer adds to the residual, [B, T, D]."""
    match mixer:
        case MambaMixer():
            return _mamba(mixer, x)
        case AttentionMixer():
            return _attention(mixer, x)
        case MlpMixer():
            return _mlp(mixer, x)
        case MoeMixer():
            return _moe(mixer, x)
    raise TypeError(f"no training forward for {type(mixer).__name__}")


def train_embedding(embedding: Embedding, ids: torch.Tensor) -> torch.Tensor:
    """ids [B, T] -> rows [B, T, D]; the gradient is added up row by row, with no sort."""
    return embedding.weight.index_select(0, ids.flatten()).view(*ids.shape, -1)


def train_norm(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """RMS norm over the last dimension of x."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def train_linear(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """x [..., cols] -> [..., rows]; quantised weights go through the twins, with no gradient."""
    if linear.storage is Format.BF16:
        return F.linear(x, linear.weight, linear.bias)
    with use({"*": "ref"}):
        return linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def _attention(mixer: AttentionMixer, x: torch.Tensor) -> torch.Tensor:
    a = mixer.attention
    q, k, v = (
        train_linear(p, x).unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    k, v = (t.repeat_interleave(a.heads // a.kv_heads, 1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=mixer.scale)
    return train_linear(mixer.o_proj, y.transpose(1, 2).flatten(2))


def _mlp(mixer: MlpMixer, x: torch.Tensor) -> torch.Tensor:
    return train_linear(mixer.down_proj, train_linear(mixer.up_proj, x).relu().square())


# ------------------------------------------------------------------------------------------ mamba
def _mamba(mixer: MambaMixer, x: torch.Tensor) -> torch.Tensor:
    m = mixer.mamba
    z, xBC, dt = mixer.split(train_linear(mixer.in_proj, x))
    xs, Bs, Cs = mixer.heads(parallel_conv(xBC, mixer.conv1d.weight, mixer.conv1d.bias))
    steps = time_step_ref(dt, mixer.dt_bias, m.dt_limit)
    A = -torch.exp(mixer.A_log)
    y = parallel_scan(xs, steps, A, Bs, Cs, mixer.D, TRAINING_CHUNK).flatten(2)
    u = (y * F.silu(z)).unflatten(-1, (m.groups, -1))
    u = F.rms_norm(u, u.shape[-1:], eps=mixer.norm.eps).flatten(2)
    return train_linear(mixer.out_proj, u * mixer.norm.weight)


def parallel_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu of the causal depth-wise convolution of x [B, T, C], weight [C, W]."""
    T, W = x.shape[1], weight.shape[1]
    padded, weight = F.pad(x, (0, 0, W - 1, 0)), weight.to(x.dtype)
    y = sum(
        (padded[:, w : w + T] * weight[:, w] for w in range(1, W)), padded[:, :T] * weight[:, 0]
    )
    return F.silu(y if bias is None else y + bias.to(x.dtype))


def parallel_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """`ssd_scan_ref` from a zero state, all chunks at once: x [b, T, H, P], step sizes [b, T, H],
    B, C [b, T, G, N] -> [b, T, H, P]."""
    f, (b, T, H, P), (G, N) = acc_dtype(steps), x.shape, B.shape[2:]
    r, pad = H // G, -T % chunk
    skip = x * D[:, None]
    if pad:  # steps of zero move no state
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (x, B, C))
        steps = F.pad(steps, (0, 0, 0, pad))
    c = (T + pad) // chunk
    s = (steps * A).view(b, c, chunk, H).transpose(2, 3).cumsum(-1)  # [b, c, H, Q]
    B, C = (t.reshape(b, c, chunk, G, N).transpose(2, 3) for t in (B, C))  # [b, c, G, Q, N]
    u = (x * steps[..., None]).to(x.dtype).view(b, c, chunk, G, r, P).permute(0, 1, 3, 4, 2, 5)
    # within a chunk
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    gap = (s[..., :, None] - s[..., None, :]).masked_fill(later, -torch.inf)
    mixed = (C @ B.mT)[:, :, :, None] * gap.exp().to(C.dtype).view(b, c, G, r, chunk, chunk)
    y = mixed @ u  # [b, c, G, r, Q, P]
    # what every chunk leaves behind, and what enters every chunk
    left = u * (s[..., -1:] - s).exp().to(u.dtype).view(b, c, G, r, chunk, 1)
    left = left.transpose(3, 4).flatten(4).mT @ B  # [b, c, G, r P, N]
    total = s[..., -1].cumsum(1)  # [b, c, H]
    apart = (total - s[..., -1])[:, :, None] - total[:, None]  # [b, to, from, H]
    earlier = torch.ones(c, c, dtype=torch.bool, device=x.device).tril(-1)[..., None]
    decay = apart.masked_fill(~earlier, -torch.inf).exp().permute(0, 3, 1, 2)
    with torch.autocast(x.device.type, enabled=False):
        held = left.to(f).view(b, c, H, P * N).transpose(1, 2)
        entering = (decay.to(f) @ held).transpose(1, 2).reshape(b, c, G, r * P, N)
    far = (C @ entering.to(C.dtype).mT).unflatten(-1, (r, P)).transpose(3, 4)
    y = y + far * s.exp().view(b, c, G, r, chunk, 1)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(b, c * chunk, H, P)[:, :T]
    return (y + skip).to(x.dtype)


# -------------------------------------------------------------------------------------------- moe
def _moe(mixer: MoeMixer, x: torch.Tensor) -> torch.Tensor:
    experts, latent = mixer.experts, mixer.fc1_latent_proj
    a = x if latent is None else train_linear(latent, x)
    if experts.up_proj.storage is Format.BF16:
        weights, chosen = choose_experts(mixer, x)
        routed = _every_expert(mixer, a, weights)
        mixer.load = chosen.flatten(0, -2).float().mean(0)  # for `balance`
    else:
        with use({"*": "ref"}):
            routing = mixer.route(x.flatten(0, 1))
            routed = experts(a.flatten(0, 1), routing).unflatten(0, x.shape[:2])
    if mixer.fc2_latent_proj is not None:
        routed = train_linear(mixer.fc2_latent_proj, routed)
    if mixer.shared_experts is None:
        return routed
    return routed + _mlp(mixer.shared_experts, x)


def choose_experts(mixer: MoeMixer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, T, E], zero for experts that are not chosen, and which are, boolean.

    The lowest expert wins ties, as in `route_experts`."""
    gate = mixer.gate
    with torch.autocast(x.device.type, enabled=False):
        f = acc_dtype(x)
        score = F.linear(x.to(f), gate.weight.to(f)).sigmoid()
        chosen = chosen_experts(score.detach() + gate.e_score_correction_bias, mixer.moe)
        weights = score * chosen
        if mixer.moe.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * mixer.moe.scale, chosen


def chosen_experts(choice: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """Which experts of choice [..., E] are among the best, boolean [..., E]."""
    if moe.router_groups > 1:
        grouped = choice.unflatten(-1, (moe.router_groups, -1))
        best = _best(grouped.topk(2, -1).values.sum(-1), moe.top_groups)
        choice = grouped.masked_fill(~best[..., None], -torch.inf).flatten(-2)
    return _best(choice, moe.top_k)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of the last dimension, the lowest index first where they are equal."""
    n = values.shape[-1]
    lower = torch.ones(n, n, dtype=torch.bool, device=values.device).tril(-1)  # [j before i]
    mine, other = values[..., :, None], values[..., None, :]
    ahead = (other > mine) | ((other == mine) & lower)
    return ahead.sum(-1) < count


def _every_expert(mixer: MoeMixer, a: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_e w_e down_e(relu(up_e a)^2) over all experts, a [B, T, L] -> [B, T, L]."""
    up, down = mixer.experts.up_proj.weight, mixer.experts.down_proj.weight
    h = F.linear(a, up.flatten(0, 1)).relu().square()
    h = h.unflatten(-1, up.shape[:2]) * weights[..., None].to(h.dtype)
    return F.linear(h.flatten(-2), down.transpose(0, 1).flatten(1))


@torch.no_grad()
def balance(model: nn.Module, rate: torch.Tensor | float) -> None:
    """Move every router's correction biases by `rate` towards an even load.

    An expert that the last training forward chose more often than the average loses `rate`, one it
    chose less often gains it. The mean of the biases stays zero."""
    for mixer in model.modules():
        if isinstance(mixer, MoeMixer):
            bias: torch.Tensor = mixer.gate.e_score_correction_bias
            load: Any = mixer.load
            moved = bias + rate * torch.sign(load.mean() - load)
            bias.copy_(moved - moved.mean())
