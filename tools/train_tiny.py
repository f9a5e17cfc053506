"""Train the embedded model on one GPU, in runs that go on from each other.

    python -m tools.train_tiny --minutes 8 --out RUN1
    python -m tools.train_tiny --minutes 5 --resume RUN1 --decay 1 --out RUN2

Reads what `tools.tiny_text` wrote (--data). The learning rate warms up, stays, and over the last
share --decay of a run's time goes down to zero. --minutes is the time of the whole process; an
interrupt ends it early in good order. OUT receives model/ (a bf16 checkpoint directory), the state
(master, momentum, variance), log.jsonl and curve.png, every minute and a half and at the end.

A step (forward, backward, optimizer, balance of the experts) is one CUDA graph; where it cannot be
captured the steps run eagerly, and that is said.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from pathlib import Path
from typing import Any

import torch

from nemotriton.model.config import ModelConfig
from nemotriton.model.mixers import MoeMixer
from nemotriton.model.training import balance
from tools.tiny_batches import AHEAD, Batches, Shape
from tools.tiny_measure import measure
from tools.tiny_model import losses, new_model, predictions
from tools.tiny_optimizer import Flat, Optimizer
from tools.tiny_state import draw_curve, load_state, save_run
from tools.tiny_tasks import TASKS

BALANCE_RATE = 1e-3  # of the experts' correction biases, at the full learning rate
SAVE_EVERY = 90.0  # seconds
AVERAGE = 0.998  # a step's share in the averaged weights is what this lacks to one
METRICS = (
    *("loss", "text", "draft1", "draft2", "agree1", "agree2", "norm"),
    *(f"{task}_loss" for task in TASKS),
    *(f"{task}_right" for task in TASKS),
)


class Trainer:
    """The model, its optimizer, and one step of training on static tensors."""

    def __init__(self, config: ModelConfig, shape: Shape, device: torch.device, given: Any) -> None:
        self.device, self.shape, self.base_lr = device, shape, given.lr
        self.model = new_model(config, device, given.seed)
        self.flat = Flat(self.model)
        self.optimizer = Optimizer(self.flat, given.weight_decay, clip=1.0)
        self.average = self.flat.master.clone()
        self.ids = torch.zeros(shape.rows, shape.width + AHEAD, dtype=torch.long, device=device)
        self.weights = torch.ones(self.ids.shape, device=device)
        self.sums = torch.zeros(len(METRICS), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self) -> None:
        """One step on what `ids` and `weights` hold, at the optimizer's `lr`."""
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            logits = predictions(self.model, self.ids)
            loss, each = losses(logits, self.ids, self.weights)
        loss.backward()
        self.optimizer.step()
        balance(self.model, BALANCE_RATE / self.base_lr * self.optimizer.lr)
        with torch.no_grad():
            steps = self.optimizer.count
            share = ((1 + steps) / (10 + steps)).clamp(max=AVERAGE)
            self.average.lerp_(self.flat.master, 1 - share)
            self.sums += self._metrics(loss.detach(), each, [rows.detach() for rows in logits])

    def _metrics(
        self, loss: torch.Tensor, each: list[torch.Tensor], logits: list[torch.Tensor]
    ) -> torch.Tensor:
        spans, T = self.shape.spans(), self.shape.width
        text = spans["text"]
        best = [rows[text].argmax(-1) for rows in logits]
        first = best[1][:, :-2] == best[0][:, 1:-1]
        second = first & (best[2][:, :-2] == best[0][:, 2:])
        found = [loss, *(e[text].mean() for e in each), first.float().mean()]
        found += [second.float().mean(), self.optimizer.norm]
        wrong = []
        for task in TASKS:
            rows = spans[task]
            asked = (self.weights[rows, 1 : T + 1] > 0).float()
            total = asked.sum().clamp_min(1)
            found.append((each[0][rows] * asked).sum() / total)
            right = logits[0][rows].argmax(-1) == self.ids[rows, 1 : T + 1]
            wrong.append((right * asked).sum() / total)
        return torch.stack([*found, *wrong])

    def capture(self) -> None:
        """Record a step; the weights and the optimizer end as they began."""
        kept = [t.clone() for t in self.state()]
        biases = {m: m.gate.e_score_correction_bias.clone() for m in self.routers()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        for tensor, was in zip(self.state(), kept, strict=True):
            tensor.copy_(was)
        for mixer, bias in biases.items():
            mixer.gate.e_score_correction_bias.copy_(bias)
        self.graph = graph

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()

    def state(self) -> list[torch.Tensor]:
        """What a step changes, but for the correction biases."""
        o = self.optimizer
        return [self.flat.master, self.average, o.momentum, o.variance, o.count, self.sums]

    def routers(self) -> list[MoeMixer]:
        return [m for m in self.model.modules() if isinstance(m, MoeMixer)]


def lr_share(step: int, elapsed: float, limit: float, decay: float, warmup: int) -> float:
    """The share of the full learning rate: up over `warmup` steps, down over the time's end."""
    share = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if decay:
        share *= min(1.0, max(0.0, (limit - elapsed) / (decay * limit)))
    return share


def train(given: Any) -> None:
    began = time.monotonic() - given.spent
    stopping: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: stopping.append(number))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig.from_json(given.config) if given.config else ModelConfig.preset("tiny")
    shape = Shape(*given.rows, given.width)
    trainer = Trainer(config, shape, device, given)
    start, log = load_state(given.resume, trainer) if given.resume else (0, [])
    batches = Batches(given.data, shape, given.block, given.seed, given.ramp)
    limit = 60 * given.minutes - given.reserve
    blocks = given.steps // given.block if given.steps else 1 << 30
    print(
        f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters, {shape.rows} x "
        f"{shape.width} tokens a step on {device}, from step {start}",
        flush=True,
    )
    block = batches.block(start // given.block)
    trainer.ids.copy_(block[0][0])
    trainer.weights.copy_(block[1][0])
    if device.type == "cuda":
        try:
            trainer.capture()
        except Exception as problem:  # slower, but a run must not be lost
            print(f"no CUDA graph ({problem!r}): eager steps", flush=True)
            torch.cuda.synchronize()
            trainer.flat.gradient.zero_()
    step, saved, first = start, time.monotonic(), True
    for index in range(start // given.block, start // given.block + blocks):
        now = time.monotonic()
        ids, weights = (t.to(device) for t in block)
        trainer.sums.zero_()
        share = 0.0
        for i in range(given.block):
            share = lr_share(step, now - began, limit, given.decay, given.warmup)
            trainer.optimizer.lr.fill_(share * given.lr)
            trainer.ids.copy_(ids[i])
            trainer.weights.copy_(weights[i])
            trainer.run()
            step += 1
        block = batches.block(index + 1)  # while the device works
        made = time.monotonic() - now
        row = dict(zip(METRICS, (trainer.sums / given.block).tolist(), strict=True))
        taken = time.monotonic() - now
        row |= {"step": step, "seconds": now - began + taken, "lr": share * given.lr}
        row |= {"ms": 1000 * taken / given.block, "host_ms": 1000 * made / given.block}
        log.append(row)
        if first or index % given.show == 0:
            print(" ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        first = False
        if stopping or time.monotonic() - began > limit:
            break
        if time.monotonic() - saved > SAVE_EVERY:
            save_run(given.out, trainer, step, log)
            saved = time.monotonic()
    finish(given, trainer, step, log)


def finish(given: Any, trainer: Trainer, step: int, log: list[dict[str, float]]) -> None:
    """Save, measure the weights and their average, and leave the better as the model."""
    save_run(given.out, trainer, step, log)
    results = {"weights": measure(trainer.model, given.data, most=given.measured)}
    print(json.dumps({"step": step, "weights": results["weights"]}), flush=True)
    master = trainer.flat.master.clone()
    trainer.flat.master.copy_(trainer.average)
    results["average"] = measure(trainer.model, given.data, most=given.measured)
    print(json.dumps({"step": step, "average": results["average"]}), flush=True)
    best = min(results, key=lambda name: results[name]["code_loss"])
    trainer.flat.master.copy_(master)
    save_run(given.out, trainer, step, log, averaged=best == "average", results=results)
    draw_curve(log, given.out / "curve.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--config", type=Path, help="a config.json; default: preset tiny")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=0, help="at most so many, 0: as time allows")
    parser.add_argument("--reserve", type=float, default=25.0, help="seconds kept for the end")
    parser.add_argument("--decay", type=float, default=0.0, help="share of the time, at its end")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--rows", type=int, nargs=4, default=(11, 2, 1, 2), metavar="N",
                        help="of text, recall, copy and depth in a batch")  # fmt: skip
    parser.add_argument("--width", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--block", type=int, default=40, help="steps between looks at the clock")
    parser.add_argument("--show", type=int, default=10, help="blocks between lines")
    parser.add_argument("--ramp", type=int, default=4000, help="steps until tasks are longest")
    parser.add_argument("--measured", type=int, default=64, help="rows and examples, at the end")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.spent = time.process_time()  # imports, roughly
    torch.set_flush_denormal(True)  # decays become ones, which a CPU is slow with
    before = signal.getsignal(signal.SIGINT)
    try:
        train(given)
    finally:
        signal.signal(signal.SIGINT, before)
        torch.set_flush_denormal(False)


if __name__ == "__main__":
    main()
