"""The model in training: its first weights, its losses, and files of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from nemotriton.model.checkpoint import destination_dtype
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.training import train_embedding
from nemotriton.model.writer import CheckpointWriter, stored_names
from tools.tiny_batches import AHEAD

DRAFTS = AHEAD - 1
DRAFT_WEIGHTS = (0.3, 0.15)  # of the MTP block's losses, first guess first
_RESIDUAL = ("out_proj", "o_proj", "down_proj", "fc2_latent_proj")


def new_model(config: ModelConfig, device: torch.device, seed: int) -> NemotronH:
    """An fp32 model with its MTP block. Decays and step sizes are spread so that some heads forget
    within a few tokens and some keep what they read for thousands."""
    model = NemotronH(config, torch.float32, device, drafting=True)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        p.data.copy_(_first(name, tuple(p.shape), config.layer_count, generator))
    return model


def _first(
    name: str, shape: tuple[int, ...], layers: int, generator: torch.Generator
) -> torch.Tensor:
    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(shape).uniform_(low, high, generator=generator)

    module, _, part = name.rpartition(".")
    if part == "A_log":
        return uniform(math.log(0.05), math.log(16))
    if part == "dt_bias":
        step = uniform(math.log(1e-3), math.log(1e-1)).exp()
        return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    if part in ("e_score_correction_bias", "bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # norms, D
        return torch.ones(shape)
    deviation = 0.6 / math.sqrt(shape[-1])
    if module == "embeddings":
        deviation = 0.1
    elif module == "lm_head":
        deviation = 0.3 / math.sqrt(shape[-1])
    elif module.endswith(_RESIDUAL):
        deviation /= math.sqrt(layers)
    return torch.empty(shape).normal_(0, deviation, generator=generator)


def head(model: NemotronH, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V]."""
    assert model.lm_head is not None
    return F.linear(hidden, model.lm_head.weight)


def predictions(model: NemotronH, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits [B, T, V] of the next token, and of the two after it as drafts guess them.

    ids [B, T + AHEAD]. The block's K/V of its second pass come from its own first outputs, where
    drafting would find the trunk's in the positions before: an approximation, as published."""
    T = ids.shape[1] - AHEAD
    assert model.mtp is not None
    hidden = model.train_forward(ids[:, :T])
    logits = [head(model, hidden)]
    for depth in range(1, DRAFTS + 1):
        embedded = train_embedding(model.embeddings, ids[:, depth : depth + T])
        hidden = model.mtp.train_forward(embedded, hidden)
        logits.append(head(model, hidden))
    return logits


def losses(
    logits: list[torch.Tensor], ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss to go down, and the next token's and drafts' cross-entropies [B, T], unweighted."""
    T = ids.shape[1] - AHEAD
    total, each = torch.zeros((), device=ids.device), []
    for depth, rows in enumerate(logits):
        place = slice(depth + 1, depth + 1 + T)
        entropy = F.cross_entropy(
            rows.flatten(0, 1).float(), ids[:, place].flatten(), reduction="none"
        ).view(ids.shape[0], T)
        w = weights[:, place]
        share = 1.0 if depth == 0 else DRAFT_WEIGHTS[depth - 1]
        total = total + share * (entropy * w).sum() / w.sum()
        each.append(entropy.detach())
    return total, each


def write_model(model: NemotronH, out: Path, companions: list[Path] | None = None) -> None:
    """A bf16 checkpoint directory under the releases' names, as `LLM` and transformers read it.

    out: must not exist. companions: files to put beside the weights."""
    config = replace(model.config, dtype="bfloat16")
    tensors = model.named_tensors()
    with CheckpointWriter(out) as writer:
        for name, entry in expected(config, mtp_blocks=1).items():
            tensor = tensors[name].detach().to(destination_dtype(entry.role, torch.bfloat16))
            if name.endswith("conv1d.weight"):
                tensor = tensor.unsqueeze(1)
            for index, stored in enumerate(stored_names(name, entry.experts)):
                writer.add(stored, tensor[index] if entry.experts else tensor)
        # transformers would clamp step sizes from below while it reads a prompt
        writer.add_json("config.json", config.to_json() | {"time_step_min": 0.0})
        for file in companions or []:
            writer.add_file(file)
