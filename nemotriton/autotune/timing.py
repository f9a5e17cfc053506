"""Timing on a GPU: cold caches, CUDA graphs, a settled clock, candidates in turn.

A measured number is the median over replays of a CUDA graph that calls an op once for each of
several input sets. L2 is flushed by reading before each replay, and the sets together exceed twice
the L2 before any of them is used again within a replay, so every call finds its inputs in device
memory, as a layer of a model does. Candidates take turns within each round: a clock that drifts
drifts for all. `race` and `rotation` are plain arithmetic; only `CudaStopwatch` touches a device.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemotriton import device
from nemotriton.kernels.op import cdiv

Call = Callable[[], Any]
Replay = Callable[[], float]  # runs what was prepared once; microseconds a call

SETS_LEAST, SETS_MOST = 3, 128  # three draws of routing and lengths; a graph of 128 small launches
GRAPH_US = 500.0  # a shorter graph would time the events around it as well
FLUSH_BYTES = (
    1 << 30
)  # read before each replay: about 250 us on an H200, in which the host runs ahead


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a call: the median, and the quantiles at 20 and 80 % of the samples."""

    us: float
    p20: float
    p80: float
    samples: int


class Stopwatch(Protocol):
    """How calls are timed on a device; the tests have one without a device."""

    def capture(self, calls: Sequence[Call], repeat: bool) -> Replay:
        """Prepare a replay of all `calls`, several times over where `repeat` allows it."""

    def single(self, calls: Sequence[Call]) -> Replay:
        """Prepare single launches of `calls` in turn: quick to make, about 2 us too long."""


def race(replays: Sequence[Replay], samples: int = 15, warm_up: int = 60) -> list[Timing]:
    """Time the candidates in turn until each has `samples`, after `settle`.

    The order shifts by one every round, so that no candidate always follows the same other."""
    settle(replays, warm_up)
    seen: list[list[float]] = [[] for _ in replays]
    for i in range(samples):
        for j in range(len(replays)):
            k = (i + j) % len(replays)
            seen[k].append(replays[k]())
    return [summary(s) for s in seen]


def settle(replays: Sequence[Replay], most: int, window: int = 4, within: float = 0.01) -> int:
    """Replay until two successive windows of rounds agree, at most `most` rounds; the count.

    Clocks and power take a while to settle under a load; only a steady state can be repeated."""
    before = math.inf
    rounds = 0
    while rounds + window <= most:
        took = 0.0
        for _ in range(window):
            took += sum(replay() for replay in replays)
            rounds += 1
        if abs(took - before) <= within * took:
            break
        before = took
    return rounds


def summary(samples: Sequence[float]) -> Timing:
    """Median and spread of samples."""
    s = sorted(samples)
    return Timing(quantile(s, 0.5), quantile(s, 0.2), quantile(s, 0.8), len(s))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between the two nearest of the ordered samples."""
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Rotation:
    """How many input sets to build, and whether a replay may use them more than once."""

    sets: int
    repeat: bool


def rotation(touched: int, held: int, l2: int, room: int) -> Rotation:
    """Input sets for calls that move `touched` bytes of inputs that hold `held` bytes.

    `l2` bytes of cache, `room` bytes that all sets may take. Small inputs would need thousands of
    sets to fill the cache: there each is used once a replay, after the flush."""
    wanted = min(max(cdiv(2 * l2, max(touched, 1)), SETS_LEAST), SETS_MOST)
    sets = max(1, min(wanted, room // max(held, 1)))
    return Rotation(sets, sets * touched >= 2 * l2)


class CudaStopwatch:
    """CUDA events round work that is queued behind a flush of L2, so that no launch gap is seen."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        l2 = device.info(where).l2 or 64 << 20
        self.buffer = torch.ones(2 * l2 // 4, dtype=torch.float32, device=where)
        self.passes = cdiv(FLUSH_BYTES, self.buffer.nbytes)
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.latest: weakref.ref[Any] | None = None

    def capture(self, calls: Sequence[Call], repeat: bool) -> Replay:
        """Capture `calls` as one graph, with as many rounds as fill `GRAPH_US` if it may repeat."""
        warm(self.where, calls)
        once = min(self._timed(calls[0]) for _ in range(3)) * len(calls)
        return self._graph(calls, math.ceil(GRAPH_US / max(once, 1.0)) if repeat else 1)

    def single(self, calls: Sequence[Call]) -> Replay:
        warm(self.where, calls[:1])
        turn = 0

        def replay() -> float:
            nonlocal turn
            call = calls[turn % len(calls)]
            turn += 1
            return self._timed(call)

        return replay

    def _graph(self, calls: Sequence[Call], rounds: int) -> Replay:
        n = len(calls)
        # Outputs live until the same set's next call: one buffer for all would be written in L2.
        kept: list[Any] = [None] * n
        # Candidates that are alive together share one pool: nobody reads their outputs.
        alive = self.latest() if self.latest is not None else None
        pool = alive.pool() if alive is not None else None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.where), torch.cuda.graph(graph, pool=pool):
            for i in range(rounds * n):
                kept[i % n] = calls[i % n]()
        self.latest = weakref.ref(graph)

        # The graph holds addresses only; `calls` holds the inputs that lie there.
        def replay(_alive: Sequence[Call] = calls) -> float:
            return self._timed(graph.replay) / (rounds * n)

        return replay

    def _timed(self, work: Call) -> float:
        # Reading leaves no dirty lines whose write-back the timed work would pay for.
        for _ in range(self.passes):
            self.buffer.sum()
        self.start.record()
        work()
        self.end.record()
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) * 1e3


def warm(where: torch.device, calls: Sequence[Call]) -> None:
    """Run `calls` once on a side stream, so that compiling and loading stay out of a capture."""
    stream = torch.cuda.Stream(where)
    stream.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream(where).wait_stream(stream)
    torch.cuda.synchronize(where)
