"""The model: embedding, a loop of blocks over the pattern, the final norm and the head.

    for each layer:  h = h + mixer(norm(h))          one norm and one mixer a layer, no rotary
    logits = head(norm_f(h))                         embeddings

The residual add of one block and the norm of the next run as one op, so between blocks the model
carries (delta, residual); of several ranks each has a part of delta, which that op adds up first.
`probe`, where given, is called with a name and a tensor at every boundary: "layers.N.norm",
"layers.N.mixer", "layers.N" (the residual after layer N), "norm_f".
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from nemotriton.kernels import fp8_matmul, matmul, quantize_fp8
from nemotriton.model.config import LayerKind, ModelConfig
from nemotriton.model.formats import UNQUANTISED, ActQuant, Format, QuantScheme
from nemotriton.model.layers import Embedding, Linear, RMSNorm, Scope
from nemotriton.model.mamba import MambaMixer
from nemotriton.model.mixers import AttentionMixer, MlpMixer, MoeMixer, make_mixer
from nemotriton.model.mtp import MtpBlock
from nemotriton.model.nvfp4 import fp8_global_scale
from nemotriton.model.packing import copies_head
from nemotriton.model.parallel import ONE, Shard
from nemotriton.model.training import train_embedding, train_mixer, train_norm

Probe = Callable[[str, torch.Tensor], None]


class Block(nn.Module):
    """One layer: a norm and a mixer; the residual add belongs to the norm that follows."""

    def __init__(self, mixer: nn.Module, config: ModelConfig, scope: Scope) -> None:
        super().__init__()
        at = scope.dtype, scope.device, scope.shard
        self.norm = RMSNorm(config.width, config.eps, *at)
        self.mixer = mixer

    @property
    def code_scale(self) -> torch.Tensor | None:
        """The scale of FP8 codes that the norm may give to its one reader; None where it has
        several, or where they read numbers."""
        return self.mixer.code_scale if isinstance(self.mixer, MambaMixer | MlpMixer) else None


class NemotronH(nn.Module):
    """A Nemotron-H trunk on one device, its weights uninitialised until loaded or synthesised.

    dtype: of weights and activations (bf16, fp16 or fp32); the router, A_log, D and dt_bias stay
    fp32. scheme, act_quant: formats of the matrices, see `Scope`. drafting: with the MTP block,
    which the configuration must have. shard: the part of the model that this is, one of several
    that run in step; `config` is then what `shard.local` gives. Call `prepare()` once the weights
    are in place."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        scheme: QuantScheme = UNQUANTISED,
        act_quant: ActQuant = False,
        drafting: bool = False,
        shard: Shard = ONE,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.device, self.shard = config, dtype, device, shard
        self.embeddings = Embedding(config.vocab, config.width, dtype, device, shard)
        scope = Scope(dtype, device, scheme, act_quant, shard=shard)
        counts = dict.fromkeys(LayerKind, 0)
        blocks = []
        for layer, kind in enumerate(config.kinds):
            inside = scope.at(f"layers.{layer}.mixer")
            sizes = config.mlp_widths[layer], config.moes[layer]
            mixer = make_mixer(config, kind, counts[kind], *sizes, inside)
            blocks.append(Block(mixer, config, scope))
            counts[kind] += 1
        self.layers = nn.ModuleList(blocks)
        self.norm_f = RMSNorm(config.width, config.eps, dtype, device, shard)
        head = scope.at("lm_head")
        rows = config.vocab // shard.ranks
        self.lm_head = None if config.tied else Linear(rows, config.width, head)
        self.mtp = MtpBlock(config, dtype, device, scheme, act_quant, shard) if drafting else None
        self.head_copy: tuple[torch.Tensor, torch.Tensor] | None = None  # e4m3, scale

    @property
    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return cast("list[Block]", list(self.layers))

    def prepare(self) -> None:
        """Derive what is computed once from the weights."""
        for name, weight in self.named_parameters():
            if not self.shard.keeps_bias(name):
                weight.data.zero_()
        for module in self.modules():  # a mixer comes before its matrices
            if isinstance(module, MambaMixer | AttentionMixer | MoeMixer | Linear):
                module.prepare()
        head = self.lm_head
        if self.mtp is None or head is None or not head.plain(Format.BF16):
            return
        if copies_head(head.weight.numel(), self.dtype, self.device):
            self.head_copy = e4m3_copy(head.weight.detach())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every weight by its canonical checkpoint name: the destinations of a load."""
        return dict(self.named_parameters())

    @torch.no_grad()
    def forward(self, batch: Any, caches: Any, probe: Probe | None = None) -> torch.Tensor:
        """The hidden states [T, D] after norm_f of one step; states and pages move in place."""
        residual = self._residual(self.embeddings(batch.ids))
        delta: torch.Tensor | None = None
        for i, block in enumerate(self.blocks):
            if delta is None:
                x = block.norm(residual.to(self.dtype))
            else:
                scale = block.code_scale if probe is None else None
                x, residual = block.norm.add(delta, residual, scale)
                if probe is not None:
                    probe(f"layers.{i - 1}", residual)
            delta = block.mixer(x, batch, caches)
            if probe is not None:
                probe(f"layers.{i}.norm", x)
                probe(f"layers.{i}.mixer", delta)
        if delta is None:
            return self.norm_f(residual.to(self.dtype))
        x, residual = self.norm_f.add(delta, residual)
        if probe is not None:
            probe(f"layers.{len(self.layers) - 1}", residual)
            probe("norm_f", x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, V] of hidden states [R, D] that have been through norm_f."""
        if self.lm_head is not None:
            return self.shard.join(self.lm_head(hidden, out_dtype=torch.float32))
        return self.shard.join(matmul(hidden, self.embeddings.weight, out_dtype=torch.float32))

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `logits`, to pick drafts by: from the head's e4m3 copy where there is one."""
        if self.head_copy is None:
            return self.logits(hidden)
        return self.shard.join(fp8_matmul(hidden, *self.head_copy, out_dtype=torch.float32))

    def draft(self, batch: Any, hidden: torch.Tensor, caches: Any) -> torch.Tensor:
        """The MTP block's output [T, D] behind batch.ids, for `draft_logits` and the next draft.

        Row i of hidden [T, D] belongs to the token before batch.ids[i], whose position is the one
        that the batch states: what `forward` gave for it or, of a draft, what this gave. The block
        shares the embedding and the head."""
        assert self.mtp is not None, "the model was made without its MTP block"
        return self.mtp(self.embeddings(batch.ids), hidden, batch, caches)

    def train_forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Differentiable hidden states [B, T, D] after norm_f of whole sequences ids [B, T].

        The twins' results, by `training`'s forms, with no caches; gradients reach every parameter
        whose requires_grad is set. The routing's choice of experts is not differentiated, its
        weights are."""
        h = self._residual(train_embedding(self.embeddings, ids))
        for block in self.blocks:
            h = h + train_mixer(block.mixer, train_norm(block.norm, h.to(self.dtype)))
        return train_norm(self.norm_f, h.to(self.dtype))

    def _residual(self, h: torch.Tensor) -> torch.Tensor:
        return h.float() if self.config.residual_fp32 else h


def e4m3_copy(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [V, D], scale fp32) of a 16-bit matrix, whose largest weight becomes the largest."""
    scale = fp8_global_scale(weight)
    return quantize_fp8(weight, scale), scale
