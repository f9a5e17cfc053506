"""A training run on the disk: the state to go on from, the model it has reached, log and curve."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tools.tiny_model import write_model

_PARTS = ("master", "momentum", "variance")
_SMALL = ("tokenizer.json",)


def save_run(
    out: Path,
    trainer: Any,
    step: int,
    log: list[dict[str, float]],
    averaged: bool = True,
    results: dict[str, Any] | None = None,
) -> None:
    """Write everything to `out`; a run killed midway leaves the files of the save before.

    averaged: model/ holds the average of the last steps' weights, else the last ones. Whether a
    step has been made is told by the same number in all parts."""
    out.mkdir(parents=True, exist_ok=True)
    flat, optimizer = trainer.flat, trainer.optimizer
    biases = torch.stack([m.gate.e_score_correction_bias.detach() for m in trainer.routers()])
    parts = {
        "master": {"master": flat.master, "biases": biases, "count": optimizer.count},
        "momentum": {"momentum": optimizer.momentum},
        "variance": {"variance": optimizer.variance},
    }
    for name, tensors in parts.items():
        new = out / f"{name}.new"
        save_file({k: t.detach().cpu() for k, t in tensors.items()}, new, {"step": str(step)})
        os.replace(new, out / f"{name}.safetensors")
    master = flat.master.clone()
    if averaged:
        flat.master.copy_(trainer.average)
    shutil.rmtree(out / "model.new", ignore_errors=True)
    write_model(trainer.model, out / "model.new")
    flat.master.copy_(master)
    shutil.rmtree(out / "model", ignore_errors=True)
    (out / "model.new").rename(out / "model")
    lines = [json.dumps(row) for row in log]
    if results is not None:
        lines.append(json.dumps({"step": step, "averaged": averaged, "results": results}))
    (out / "log.jsonl").write_text("\n".join(lines) + "\n")


def load_state(run: Path, trainer: Any) -> tuple[int, list[dict[str, float]]]:
    """Put a run's state into `trainer`; its step and its log."""
    steps = set()
    for name in _PARTS:
        with safe_open(run / f"{name}.safetensors", "pt") as file:
            steps.add(int(file.metadata()["step"]))
    if len(steps) != 1:
        raise SystemExit(f"{run}: parts of different steps {sorted(steps)}; the save was cut off.")
    state = {k: t for name in _PARTS for k, t in load_file(run / f"{name}.safetensors").items()}
    optimizer = trainer.optimizer
    trainer.flat.master.copy_(state["master"])
    trainer.average.copy_(state["master"])
    optimizer.momentum.copy_(state["momentum"])
    optimizer.variance.copy_(state["variance"])
    optimizer.count.copy_(state["count"])
    for mixer, bias in zip(trainer.routers(), state["biases"], strict=True):
        mixer.gate.e_score_correction_bias.copy_(bias)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return steps.pop(), [row for row in log if "results" not in row]


def draw_curve(log: list[dict[str, float]], path: Path) -> None:
    """The losses over the steps, as a picture, where matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no curve.png (tools.eval_tiny --curve draws it from log.jsonl)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    steps = [row["step"] for row in log]
    for key in ("text", "draft1", "draft2", "recall_loss", "copy_loss", "depth_loss"):
        left.plot(steps, [row[key] for row in log], label=key, linewidth=1)
    left.set(xlabel="step", ylabel="cross-entropy, nats a token", ylim=(0, 5))
    left.legend()
    for key in ("recall_right", "copy_right", "depth_right", "agree1", "agree2"):
        right.plot(steps, [row[key] for row in log], label=key, linewidth=1)
    right.set(xlabel="step", ylabel="share", ylim=(0, 1))
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
