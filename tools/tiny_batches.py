"""Training batches: windows of the text and rows of tasks, drawn from (seed, block) alone.

A block is the batches of a few dozen steps, made on the host while the device works off the one
before. So a run that goes on from a checkpoint draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tools.tiny_tasks import TASKS, Symbols, rows_of

SHARES = {"recall": 0.14, "copy": 0.08, "depth": 0.14}  # of the text's weight
HEAVIEST = 25.0
_LENGTHS = 2  # lengths of every task that a block has
AHEAD = 3  # tokens behind a row's inputs: the next, and those that two drafts guess


@dataclass(frozen=True)
class Shape:
    """Rows of text, then of each task; all of `width` tokens."""

    text: int
    recall: int
    copy: int
    depth: int
    width: int

    @property
    def rows(self) -> int:
        return self.text + self.recall + self.copy + self.depth

    def spans(self) -> dict[str, slice]:
        """The rows of every source."""
        found, start = {}, 0
        for name in ("text", *TASKS):
            found[name] = slice(start, start + getattr(self, name))
            start += getattr(self, name)
        return found


class Batches:
    """Blocks of `steps` batches: ids int64 [steps, rows, width + AHEAD] and weights of the same
    shape, what the loss of predicting each token is worth.

    ramp: steps until tasks are as long as they get. Tokens of the text weigh 1; those of a task's
    answers weigh together the task's SHARES of the text, 25 each at most, and its other tokens,
    which nobody can know, nothing."""

    def __init__(self, folder: Path, shape: Shape, steps: int, seed: int, ramp: int) -> None:
        self.tokens = np.load(folder / "text.npz")["train"]
        self.symbols = Symbols.read(folder / "symbols.json")
        self.shape, self.steps, self.seed = shape, steps, seed
        self.ramp = ramp

    def block(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = np.random.default_rng([self.seed, index])
        shape, width = self.shape, self.shape.width + AHEAD
        ids = np.empty((self.steps, shape.rows, width), np.int64)
        weights = np.ones((self.steps, shape.rows, width), np.float32)
        starts = rng.integers(0, len(self.tokens) - width, (self.steps, shape.text))
        for step, row in np.ndindex(starts.shape):
            start = starts[step, row]
            ids[step, row] = self.tokens[start : start + width]
        for task, rows in list(shape.spans().items())[1:]:
            for some in np.array_split(np.arange(self.steps), _LENGTHS):
                done = min(1.0, (index * self.steps + int(some[0])) / self.ramp)
                count = rows.stop - rows.start
                drawn = rows_of(
                    self.symbols, task, rng, count * len(some), width, 0.05 + 0.95 * done
                )
                ids[some, rows] = drawn[0].reshape(len(some), count, width)
                share = SHARES[task] * shape.text * width * len(some)
                worth = min(HEAVIEST, share / max(1.0, drawn[1].sum()))
                weights[some, rows] = (drawn[1] * worth).reshape(len(some), count, width)
        return torch.from_numpy(ids), torch.from_numpy(weights)
