"""How far two tensors of one boundary are apart, and how far rounding alone may bring them.

A row's error is |a - b| / |b| over that token's values, so that a fault in one token of thousands
is as large as one in all. The bound is measured, not set: how much the twins' own result moves when
every input moves by a rounding of the model's dtype (times what one layer's roundings in a row may
add up to), and at least a few roundings of the result itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotriton.model.config import ModelConfig
from nemotriton.model.nemotron_h import NemotronH

ROUNDINGS = 2.0  # times; of a layer's in-between results, each like the one of the inputs
_LAYERS = 1000  # more than any model has: from the seeds of one pass to those of the next
_EPS32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class Distance:
    """Of all values together: rms of the difference over rms, its largest, cosine of the two."""

    rms: float
    largest: float
    cosine: float


def distance(a: Tensor, b: Tensor) -> Distance:
    """Of a from b."""
    x, y = a.double().flatten(), b.double().flatten()
    size, gap = y.norm(), (x - y).norm()
    rms = float(gap / size) if size > 0 else float(gap > 0)
    cosine = float(torch.dot(x, y) / (x.norm() * size)) if size > 0 and x.norm() > 0 else 1.0
    return Distance(rms, float((x - y).abs().max()) if x.numel() else 0.0, cosine)


def row_error(a: Tensor, b: Tensor, rows: Tensor | None = None) -> float:
    """The largest error of a row [T, ...]; rows: bool [T], those compared. inf for NaN."""
    if rows is not None:
        a, b = a[rows], b[rows]
    if a.numel() == 0:
        return 0.0
    x, y = a.double().flatten(1), b.double().flatten(1)
    size = y.norm(dim=1)
    usual = size.square().mean().sqrt()  # a row that happens to be tiny counts as a small usual one
    error = (x - y).norm(dim=1) / size.clamp_min(float(usual) / 8).clamp_min(1e-30)
    return float(torch.nan_to_num(error, nan=torch.inf).max())


def nudged(x: Tensor, share: float, seed: int) -> Tensor:
    """x with every value moved at random by up to that share of itself."""
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(x.shape, generator=g).to(x.device) * 2 - 1
    return (x.float() * (1 + share * u)).to(x.dtype)


def floor(dtype: torch.dtype, terms: int) -> float:
    """What is rounding whatever the inputs: two roundings of the result, and the order of its sums
    of up to `terms` terms in fp32 (Higham: sqrt(n) half roundings for each of two orders)."""
    return 2 * torch.finfo(dtype).eps + 4 * _EPS32 * terms**0.5


def terms(config: ModelConfig) -> int:
    """Of the longest sum over a row of activations."""
    widths = [config.width, *config.mlp_widths]
    widths += [config.mamba.inner] if config.mamba else []
    widths += [moe.top_k * moe.width for moe in config.moes if moe is not None]
    return max(widths)


@contextmanager
def rounding(model: NemotronH, seed: int = 0) -> Iterator[None]:
    """Inside the block embeddings and every layer's result are off by half the `floor`: what a pass
    makes of that is as far from the plain one as another right way to sum may be.

    In 16 bits that is as much as eight roundings to the nearest, of which a layer on its way from
    norm to result has six or seven."""
    share = floor(model.dtype, terms(model.config)) / 2

    def nudge(number: int) -> Callable[..., Tensor]:
        return lambda _module, _given, out: nudged(out, share, _LAYERS * seed + number)

    modules = [model.embeddings, *(block.mixer for block in model.blocks)]
    hooks = [m.register_forward_hook(nudge(i)) for i, m in enumerate(modules)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
