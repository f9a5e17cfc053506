"""Muon for the matrices, AdamW for everything else, over one flat buffer of fp32 parameters.

    Muon     m = beta m + (1 - beta) g ; u = orthogonal((1 - beta) g + beta m)
             w = w - lr (0.2 sqrt(max(rows, cols)) u + decay w)
    AdamW    as published, with bias correction

Muon: Jordan et al. 2024, five Newton-Schulz steps; the factor that gives its updates AdamW's RMS,
so that both share a learning rate, from Liu et al. 2025, "Muon is scalable for LLM training". The
experts of a layer are as many matrices. Every number that changes between steps is a tensor, so a
step can be recorded in a CUDA graph.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

BETA = 0.95
ADAM = (0.9, 0.95, 1e-8)
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NOT_MATRICES = ("embeddings", "lm_head", "conv1d", "gate")


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is Muon's."""
    return parameter.ndim >= 2 and not any(part in name for part in _NOT_MATRICES)


class Flat:
    """The trained parameters of a model, moved into one buffer: matrices first, then the rest.

    `master`, `gradient` [n] fp32; the parameters and their gradients are views of them."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if "correction_bias" not in name]
        named.sort(key=lambda item: not is_matrix(*item))
        self.names = [name for name, _ in named]
        size = sum(p.numel() for _, p in named)
        device = named[0][1].device
        self.master = torch.empty(size, device=device)
        self.gradient = torch.zeros(size, device=device)
        self.shapes: list[tuple[int, torch.Size]] = []
        self.matrices, start = 0, 0
        for name, p in named:
            place = slice(start, start + p.numel())
            self.master[place] = p.detach().reshape(-1)
            p.data = self.master[place].view(p.shape)
            p.grad = self.gradient[place].view(p.shape)
            p.requires_grad_(True)
            self.shapes.append((start, p.shape))
            start = place.stop
            if is_matrix(name, p):
                self.matrices = start


class Optimizer:
    """One step at a time. `momentum` [n], `variance` [what is not matrices], `count` are its state;
    `lr` is set from outside."""

    def __init__(self, flat: Flat, decay: float, clip: float) -> None:
        self.flat, self.decay, self.clip = flat, decay, clip
        self.momentum = torch.zeros_like(flat.master)
        self.variance = torch.zeros_like(flat.master[flat.matrices :])
        device = flat.master.device
        self.count = torch.zeros((), device=device)
        self.lr = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        groups: dict[tuple[int, int], list[tuple[int, torch.Size]]] = defaultdict(list)
        for start, shape in flat.shapes:
            if start < flat.matrices:
                rows, cols = sorted(shape[-2:])
                groups[rows, cols].append((start, shape))
        self.groups = dict(groups)

    @torch.no_grad()
    def step(self) -> None:
        """Use up the gradient: it is zero afterwards."""
        flat, m = self.flat, self.flat.matrices
        g = flat.gradient
        g.nan_to_num_(0.0, 0.0, 0.0)
        self.norm.copy_(torch.linalg.vector_norm(g))
        g *= (self.clip / (self.norm + 1e-6)).clamp(max=1.0)
        self.count += 1
        self._adam(flat.master[m:], g[m:], self.momentum[m:])
        self.momentum[:m].lerp_(g[:m], 1 - BETA)
        ahead = torch.lerp(g[:m], self.momentum[:m], BETA)
        flat.master[:m] *= 1 - self.lr * self.decay
        for (rows, cols), members in self.groups.items():
            self._muon(ahead, rows, cols, members)
        g.zero_()

    def _adam(self, w: torch.Tensor, g: torch.Tensor, momentum: torch.Tensor) -> None:
        b1, b2, eps = ADAM
        momentum.lerp_(g, 1 - b1)
        self.variance.lerp_(g.square(), 1 - b2)
        mean = momentum / (1 - b1**self.count)
        root = (self.variance / (1 - b2**self.count)).sqrt_()
        w -= self.lr * mean / (root + eps)

    def _muon(
        self, ahead: torch.Tensor, rows: int, cols: int, members: list[tuple[int, torch.Size]]
    ) -> None:
        """All matrices [rows, cols] or [cols, rows], as one batch."""
        batch = []
        for start, shape in members:
            u = ahead[start : start + shape.numel()].view(-1, *shape[-2:])
            batch.append(u if shape[-2] <= shape[-1] else u.mT)
        update = orthogonal(torch.cat(batch)) * (self.lr * 0.2 * cols**0.5)
        first = 0
        for start, shape in members:
            count = shape.numel() // (rows * cols)
            u = update[first : first + count]
            w = self.flat.master[start : start + shape.numel()].view(-1, *shape[-2:])
            w -= u if shape[-2] <= shape[-1] else u.mT
            first += count


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """About U V^T of every matrix U S V^T in g [n, rows <= cols]; bf16 where the device is fast."""
    a, b, c = _NEWTON_SCHULZ
    x = g.bfloat16() if g.is_cuda else g
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()
