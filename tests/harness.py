"""Driving a model by hand, below the engine: one sequence, any pieces, poisoned caches."""

from collections.abc import Sequence

import torch

from nemotriton.engine.batch import build_batch
from nemotriton.engine.caches import PAGE_SIZE, Caches, MambaStates, PagedKV
from nemotriton.engine.request import Piece, Request
from nemotriton.engine.sampling import SamplingParams
from nemotriton.model.nemotron_h import NemotronH, Probe


def poisoned_caches(model: NemotronH, slots: int = 3, pages: int = 16, lanes: int = 1) -> Caches:
    """Caches full of NaN: whatever is read before it is written shows."""
    config, kv, mamba = model.config, None, None
    if config.attention is not None:
        a = config.attention
        layers = len(config.attention_layers)
        kv = PagedKV(layers, pages, a.kv_heads, a.head_dim, model.dtype, model.device)
        kv.k.fill_(float("nan"))
        kv.v.fill_(float("nan"))
    if config.mamba is not None:
        layers = len(config.mamba_layers)
        mamba = MambaStates(config.mamba, layers, slots, model.dtype, model.device, lanes=lanes)
        for t in (mamba.ssm, mamba.conv, mamba.conv_lanes):
            if t is not None:
                t.fill_(float("nan"))
    return Caches(kv, mamba)


def request(ids: Sequence[int], pages: int, slot: int = 1) -> Request:
    r = Request("r", 0, list(ids), SamplingParams(), seed=0, limit=1)
    needed = -(-len(ids) // PAGE_SIZE)
    # pages in no particular order, and never page 0
    r.pages = [pages - 1 - i for i in range(needed)]
    r.slot = slot
    return r


def run(
    model: NemotronH,
    ids: Sequence[int],
    pieces: Sequence[int] | None = None,
    probe: Probe | None = None,
    caches: Caches | None = None,
) -> tuple[torch.Tensor, Caches]:
    """fp32 logits [T, V] of `ids`, prefilled in `pieces` (default: whole), and the caches left.

    A piece of -1 stands for one token through the decode path."""
    caches = caches or poisoned_caches(model)
    r = request(ids, pages=caches.kv.k.shape[1] if caches.kv else 16)
    rows, start = [], 0
    for count in pieces or [len(ids)]:
        piece = Piece(r, start, abs(count))
        spans = ([piece], []) if count < 0 else ([], [piece])
        batch = build_batch(
            *spans,
            list(range(piece.count)),
            page_size=PAGE_SIZE,
            chunk=model.config.mamba.chunk if model.config.mamba else None,
            device=model.device,
        )
        rows.append(model.logits(model(batch, caches, probe)))
        start = piece.end
    assert start == len(ids), f"pieces cover {start} of {len(ids)} tokens"
    return torch.cat(rows), caches
