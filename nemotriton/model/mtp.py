"""The multi-token-prediction block: guesses the token after next from the trunk's hidden state.

    h = eh_proj([enorm(embed(next token)) | hnorm(hidden)])      embedding first, hidden second
    for each layer of the pattern:  h = h + mixer(norm(h))
    h = final_layernorm(h)                                       feeds the head, and the next draft

`hidden` is the trunk's after `norm_f` for the first draft and this block's own output, after
`final_layernorm`, for later ones. The token embedding and the head are the trunk's own storage.
One physical block is applied again for every further draft. Sources: the public vLLM, SGLang and
TensorRT-LLM implementations and Megatron's exporter agree on order, norms and alignment.
"""

from typing import Any, cast

import torch
from torch import nn

from nemotriton.model.config import LayerKind, ModelConfig
from nemotriton.model.formats import UNQUANTISED, ActQuant, QuantScheme
from nemotriton.model.layers import Linear, RMSNorm, Scope
from nemotriton.model.mixers import make_mixer
from nemotriton.model.parallel import ONE, Shard
from nemotriton.model.training import train_linear, train_mixer, train_norm


class MtpLayer(nn.Module):
    """One layer of the block; the first also merges its inputs, the last also norms its output."""

    def __init__(
        self,
        mixer: nn.Module,
        config: ModelConfig,
        first: bool,
        last: bool,
        scope: Scope,
    ) -> None:
        super().__init__()
        width, eps = config.width, config.eps
        dtype, device, shard = scope.dtype, scope.device, scope.shard
        self.enorm = RMSNorm(width, eps, dtype, device) if first else None
        self.hnorm = RMSNorm(width, eps, dtype, device) if first else None
        self.eh_proj = Linear(width, 2 * width, scope.at("eh_proj")) if first else None
        self.norm = RMSNorm(width, eps, dtype, device, shard)
        self.mixer = mixer
        self.final_layernorm = RMSNorm(width, eps, dtype, device, shard) if last else None


class MtpBlock(nn.Module):
    """The draft block of a checkpoint; its caches are the rows behind the trunk's."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        scheme: QuantScheme = UNQUANTISED,
        act_quant: ActQuant = False,
        shard: Shard = ONE,
    ) -> None:
        super().__init__()
        assert config.mtp is not None
        self.dtype, self.shard = dtype, shard
        scope = Scope(dtype, device, scheme, act_quant, "mtp.layers", shard)
        counts = {
            LayerKind.MAMBA: len(config.mamba_layers),
            LayerKind.ATTENTION: len(config.attention_layers),
        }
        pattern = config.mtp.pattern
        layers = []
        for j, kind in enumerate(pattern):
            inside = scope.at(str(j))
            sizes = config.mtp_mlp_width, config.mtp_moe
            mixer = make_mixer(config, kind, counts.get(kind, 0), *sizes, inside.at("mixer"))
            if kind in counts:
                counts[kind] += 1
            first, last = j == 0, j == len(pattern) - 1
            layers.append(MtpLayer(mixer, config, first, last, inside))
        self.layers = nn.ModuleList(layers)

    @property
    def steps(self) -> list[MtpLayer]:
        """The layers, typed."""
        return cast("list[MtpLayer]", list(self.layers))

    def merge(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The block's input [T, D] from the next tokens' embeddings and the hidden states."""
        first: Any = self.steps[0]
        return first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], dim=-1))

    @torch.no_grad()
    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: Any, caches: Any
    ) -> torch.Tensor:
        """Hidden states [T, D] after final_layernorm; row i drafts the token after batch.ids[i].

        embedded [T, D]: the trunk's embedding of batch.ids; hidden [T, D]: see the module."""
        residual = self.merge(embedded, hidden)
        delta: torch.Tensor | None = None
        for layer in self.steps:
            if delta is None:
                x = layer.norm(residual)
            else:
                x, residual = layer.norm.add(delta, residual)
            delta = layer.mixer(x, batch, caches)
        last: Any = self.steps[-1]
        assert delta is not None
        return last.final_layernorm.add(delta, residual)[0]

    def train_forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Differentiable output [B, T, D] for whole sequences, with no caches."""
        first: Any = self.steps[0]
        merged = [train_norm(first.enorm, embedded), train_norm(first.hnorm, hidden)]
        h = train_linear(first.eh_proj, torch.cat(merged, dim=-1)).to(embedded.dtype)
        for layer in self.steps:
            h = h + train_mixer(layer.mixer, train_norm(layer.norm, h))
        last: Any = self.steps[-1]
        return train_norm(last.final_layernorm, h)
