"""What a model in training can do, by teacher-forced passes: no engine, so it is quick anywhere."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from nemotriton.model.mixers import MoeMixer
from nemotriton.model.nemotron_h import NemotronH
from tools.tiny_batches import AHEAD
from tools.tiny_model import head, predictions
from tools.tiny_tasks import TASKS, Symbols, examples

LENGTHS = (64, 128, 256, 512, 1000)


@torch.no_grad()
def measure(
    model: NemotronH, data: Path, rows: int = 16, width: int = 2048, most: int = 64
) -> dict[str, float]:
    """Losses on held-out text in nats a token, agreement of the drafts, evenness of the experts,
    accuracy of the tasks by length. most: rows of each text, and examples of each task."""
    found: dict[str, float] = {}
    symbols = Symbols.read(data / "symbols.json")
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    with np.load(data / "text.npz") as text, torch.autocast(device.type, torch.bfloat16, cuda):
        for part in ("code", "docs"):
            ids = torch.from_numpy(text[f"heldout_{part}"].astype(np.int64))
            size = width + AHEAD
            count = min(most, len(ids) // size)
            windows = ids[: count * size].view(count, size)
            found |= {f"{part}_{k}": v for k, v in _text(model, windows, rows, device).items()}
        for task in TASKS:
            for length in LENGTHS:
                if length * 2 <= width:
                    found[f"{task}_{length}"] = _task(model, symbols, task, length, most, device)
    return found


def _text(
    model: NemotronH, windows: torch.Tensor, rows: int, device: torch.device
) -> dict[str, float]:
    sums, loads, tokens = np.zeros(3), [], 0
    for ids in windows.split(rows):
        ids = ids.to(device)
        logits = predictions(model, ids)
        target = ids[:, 1 : logits[0].shape[1] + 1]
        loss = F.cross_entropy(logits[0].flatten(0, 1).float(), target.flatten(), reduction="sum")
        best = [rows.argmax(-1) for rows in logits]
        first = best[1][:, :-2] == best[0][:, 1:-1]
        second = first & (best[2][:, :-2] == best[0][:, 2:])
        scale = target.shape[1] / first.shape[1]
        sums += [float(loss), float(first.sum()) * scale, float(second.sum()) * scale]
        tokens += target.numel()
        loads.append(torch.stack([m.load for m in model.modules() if isinstance(m, MoeMixer)]))
    load = torch.stack(loads).mean(0)
    share = load / load.sum(-1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-9).log()).sum(-1) / math.log(share.shape[-1])
    loss, first, second = sums / tokens
    return {"loss": loss, "agree1": first, "agree2": second, "experts": float(entropy.min())}


def _task(
    model: NemotronH, symbols: Symbols, task: str, length: int, count: int, device: torch.device
) -> float:
    """Share of examples whose whole answer comes, each token being the likeliest."""
    pairs = examples(symbols, task, length, count, seed=length)
    answers = torch.tensor([answer for _, answer in pairs], device=device)
    ids = torch.tensor([prompt + answer for prompt, answer in pairs], device=device)
    right = 0
    for some, wanted in zip(ids.split(32), answers.split(32), strict=True):
        n = wanted.shape[1]
        best = head(model, model.train_forward(some[:, :-1])[:, -n:]).argmax(-1)
        right += int((best == wanted).all(1).sum())
    return right / count
