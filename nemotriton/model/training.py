"""The mixers without caches, differentiable: whole sequences through the twins' pure cores.

Used to train small models; the caller forces the ops to their twins. Experts are chosen without
gradient, their weights carry one.
"""

import torch
from torch import nn

from nemotriton.kernels import gated_rms_norm
from nemotriton.kernels.attention import attention_ref
from nemotriton.kernels.conv1d import conv_ref
from nemotriton.kernels.ssd import ssd_scan_ref
from nemotriton.kernels.ssm_update import time_step_ref
from nemotriton.model.mixers import AttentionMixer, MambaMixer, MlpMixer, MoeMixer


def train_mixer(mixer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x [B, T, D] -> what the mixer adds to the residual, [B, T, D]."""
    B, T, D = x.shape
    match mixer:
        case MambaMixer():
            return _mamba(mixer, x)
        case AttentionMixer():
            q, k, v = (p.view(B, T, *p.shape[1:]) for p in mixer.project(x.reshape(B * T, D)))
            y = attention_ref(q, k, v, mixer.scale)
            return mixer.o_proj(y.reshape(B * T, -1)).view(B, T, D)
        case MlpMixer() | MoeMixer():
            return mixer(x.reshape(B * T, D), None, None).view(B, T, D)
    raise TypeError(f"no training forward for {type(mixer).__name__}")


def _mamba(mixer: MambaMixer, x: torch.Tensor) -> torch.Tensor:
    B, T, D = x.shape
    z, xBC, dt = mixer.split(mixer.in_proj(x.reshape(B * T, D)))
    window = xBC.new_zeros(B, mixer.mamba.conv_width - 1, mixer.mamba.conv_dim)
    cu = torch.arange(0, B * T + 1, T)
    xBC, _ = conv_ref(xBC, mixer.conv1d.weight, mixer.conv1d.bias, window, cu)
    xs, Bs, Cs = mixer.heads(xBC.view(B, T, -1))
    dt = time_step_ref(dt.view(B, T, -1), mixer.dt_bias, mixer.mamba.dt_limit)
    A = -torch.exp(mixer.A_log)
    y, _ = ssd_scan_ref(xs, dt, A, Bs, Cs, mixer.D, chunk_size=mixer.mamba.chunk)
    y = y.reshape(B * T, -1)
    y = gated_rms_norm(y, z, mixer.norm.weight, mixer.norm.eps, mixer.mamba.groups)
    return mixer.out_proj(y).view(B, T, D)
