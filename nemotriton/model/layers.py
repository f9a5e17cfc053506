"""Thin holders of weights: linear maps, the embedding, RMS norms and stacked experts.

Parameters are allocated uninitialised on the device asked for and filled by `checkpoint.load` or
`synth.fill`; their names are those of the checkpoint. Nothing here computes: the ops do.
"""

import torch
from torch import nn

from nemotriton.kernels import add_rms_norm, matmul, rms_norm


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised weight; gradients are switched on only for training."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = epilogue(x W^T + b), weight [rows, cols] as the checkpoint stores it."""

    def __init__(
        self, rows: int, cols: int, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = parameter((rows, cols), dtype, device)
        self.bias = parameter((rows,), dtype, device) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        epilogue: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, cols] -> [T, rows]; epilogue "none", "relu2" or "residual" (adds `residual`)."""
        return matmul(
            x, self.weight, self.bias, epilogue=epilogue, residual=residual, out_dtype=out_dtype
        )


class Embedding(nn.Module):
    """Token ids -> rows of weight [V, D]."""

    def __init__(self, vocab: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((vocab, width), dtype, device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    """RMS norm with weight [D], alone or fused with the residual add before it."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter((width,), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of residual + x, residual + x)."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Experts(nn.Module):
    """The routed experts' two matrices, stacked: up [E, F, L] and down [E, L, F]."""

    def __init__(
        self, experts: int, width: int, latent: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.up_proj = Stacked(experts, width, latent, dtype, device)
        self.down_proj = Stacked(experts, latent, width, dtype, device)


class Stacked(nn.Module):
    """One matrix an expert, weight [E, rows, cols]."""

    def __init__(
        self, experts: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter((experts, rows, cols), dtype, device)
