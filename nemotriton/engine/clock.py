"""How long the parts of a step take where they run, without making the host wait for them."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks the end of each part of a step; read once the step's results are on the host.

    On a GPU the marks are events in the stream, so a part's time is the GPU's, not the host's.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Begin a step."""
        self._marks = [("", self._now())]

    def mark(self, part: str) -> None:
        """What ran since the last mark belongs to `part`."""
        self._marks.append((part, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by part since `start`."""
        found: dict[str, float] = {}
        for (_, before), (part, after) in zip(self._marks, self._marks[1:]):
            found[part] = found.get(part, 0.0) + self._between(before, after)
        return found

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, before: Any, after: Any) -> float:
        if not self._on_gpu:
            return float(after - before)
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000
