"""Decode steps recorded once and replayed: CUDA graphs, in which Python takes no part.

At the start every shape of a ladder is recorded: so many sequences, each with so many drafts, up
to a context of so many keys. A step with no prompt tokens takes the smallest shape that holds it;
what it lacks are pads, which touch no state. A replay launches the very kernels, with the tiles and
grids, that the recorded work launched, so it gives the bits that the same padded work gives when it
is launched piece by piece (`Direct`, which is what runs with graphs=False on a GPU, where memory
for the graphs runs out, and in the tests on a CPU).

Against a step that is not padded, such as one beside a prompt, bits may differ as they do between
any two numbers of rows: where a tuned tile changes with the number of rows, so may the order of a
sum in it. Steps with prompt tokens, and with drafts under penalties or min_tokens, are not
recorded. Compiled kernels are kept by Triton's own cache on disk, across processes; graphs are not.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from nemotriton.engine.request import State
from nemotriton.engine.sampler import is_plain
from nemotriton.engine.static_step import StaticStep, StepMemory
from nemotriton.engine.step_inputs import StepInputs, StepShape
from nemotriton.errors import require
from nemotriton.kernels.dependent import rehearsed
from nemotriton.kernels.op import compiled_variants, tile_lookups

if TYPE_CHECKING:
    from nemotriton.engine.caches import Caches
    from nemotriton.engine.clock import Clock
    from nemotriton.engine.drafter import Drafter
    from nemotriton.engine.request import Piece, Request, Step
    from nemotriton.engine.sampler import Sampler

log = logging.getLogger("nemotriton.graphs")

Replay = Callable[[], None]
Warming = Callable[[int, int, str], None]
Part = tuple[str, Replay]

_DENSE = (1, 2, 4)  # then multiples of 8
_SHORT = 4096  # keys of the first kind of shape; each further one has _FACTOR times as many
_FACTOR = 8


def ladder(requests: int) -> list[int]:
    """Numbers of sequences that are recorded: 1, 2, 4, 8, 16, 24, ... and `requests` itself."""
    rungs = [n for n in (*_DENSE, *range(8, requests, 8)) if n < requests]
    return [*rungs, requests]


def key_limits(context: int) -> list[int]:
    """Contexts recorded apart: attention starts a program for each split of the longest."""
    limits, keys = [], _SHORT
    while 2 * keys <= context:
        limits.append(keys)
        keys *= _FACTOR
    return [*limits, context]


class Capture(Protocol):
    """How work of fixed shape and addresses is made repeatable."""

    def record(self, work: Replay) -> Replay:
        """What does `work` again when called; work has run before, so that all is compiled."""
        ...

    def mark(self) -> Any:
        """A point behind everything that was started so far."""
        ...

    def wait(self, mark: Any) -> None:
        """Return once everything before a point is done."""
        ...


class Direct:
    """No recording: a replay runs the work itself, on the same buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, work: Replay) -> Replay:
        return work

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()


class CudaGraphs(Direct):
    """CUDA graphs, all in one memory pool: they never run at the same time.

    needed: a shape that cannot be recorded is an error, since other ranks do record it."""

    def __init__(self, device: torch.device, needed: bool = False) -> None:
        super().__init__(device)
        self.needed = needed
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def record(self, work: Replay) -> Replay:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with _nothing_collected(), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error is the one that counts
                    graph.capture_end()
                raise
            graph.capture_end()

        # The graph holds addresses only: `work` keeps what lies there.
        def replay(_alive: Replay = work) -> None:
            graph.replay()

        return replay


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Inside the block Python's collector does not run: in a thread that captures, to destroy a
    graph (one of a model that nobody holds any more) is an error that ends the capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def find_capture(
    wanted: bool | None, device: torch.device, forced: Iterable[str], needed: bool = False
) -> Capture | None:
    """What records decode steps; None runs them as they come.

    wanted: None is CUDA graphs on a GPU and nothing elsewhere; False on a GPU runs the same padded
    steps launch by launch, and so does True on a CPU. forced: implementations that ops are forced
    to. needed: see CudaGraphs. UnsupportedError for graphs of PyTorch twins, which wait for the
    device.
    """
    twins = "ref" in forced
    if device.type != "cuda":
        return Direct(device) if wanted else None
    require(
        not (wanted and twins), "CUDA graphs need kernels: leave out impl='ref', or graphs=True."
    )
    if twins:
        return None
    return Direct(device) if wanted is False else CudaGraphs(device, needed)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was started and whose tokens have not been read.

    host: where they arrive. mark: behind them in the stream."""

    pieces: list[Piece]
    shape: StepShape
    host: Tensor
    mark: Any
    clock: Clock


class DecodeSteps:
    """The recorded steps of a model; `run` is `Runner.run` for those steps that have a shape.

    requests: most sequences. context: longest, drafts not counted. options: numbers of drafts a
    step may have, 0 among them. spare: a page that no request owns; -1 without attention layers.
    """

    def __init__(
        self,
        model: Any,
        caches: Caches,
        sampler: Sampler,
        drafter: Drafter | None,
        capture: Capture,
        *,
        requests: int,
        context: int,
        page_size: int,
        spare: int,
        device: torch.device,
    ) -> None:
        self.model, self.caches, self.sampler = model, caches, sampler
        self.drafter, self.capture, self.device = drafter, capture, device
        self.options = drafter.shape.options if drafter is not None else [0]
        drafts = self.options[-1]
        self.rungs, self.keys = ladder(requests), key_limits(context + drafts)
        self.inputs = StepInputs(
            requests,
            drafts,
            self.keys,
            page_size=page_size,
            spare=spare,
            vocab=sampler.vocab,
            device=device,
        )
        self.memory = StepMemory(requests, requests * (drafts + 1), device)
        self.replays = self.others = 0
        self.seconds = self.waited = 0.0
        self.bytes = 0
        self.problem: str | None = None
        self._parts: dict[StepShape, list[Part]] = {}
        self._carries: dict[StepShape, Replay] = {}  # before parts that start ahead
        self._starting: list[Request] = []  # whose `hidden` is in memory.start
        self._compiled = self._tiles = 0

    @property
    def shapes(self) -> list[StepShape]:
        """All that are recorded, in the order of their recording."""
        return [
            StepShape(rung, drafts, keys)
            # the largest first: the others fit into its memory
            for drafts in reversed(self.options)
            for keys in reversed(self.keys)
            for rung in reversed(self.rungs)
        ]

    # ---- warm-up ------------------------------------------------------------------------------

    @torch.no_grad()
    def warm(self, progress: Warming | None = None) -> None:
        """Run and record every shape, before any request; progress: (done, all, what).

        Where that fails, as when memory runs out, steps run without graphs: `problem` says so,
        and a warning.
        """
        start = time.perf_counter()
        shapes = self.shapes
        gc.collect()  # graphs of an earlier model, whose memory can be had again
        try:
            self._launch(self._step(shapes[-1]))  # makes what others start from
            for i, shape in enumerate(shapes):
                self._record(shape)
                if progress is not None:
                    progress(i + 1, len(shapes), f"{shape.sequences} x {shape.each}")
        except RuntimeError as problem:  # of which running out of memory is one
            if type(self.capture) is Direct or getattr(self.capture, "needed", False):
                raise
            self._give_up(shapes, problem)
        self.seconds = time.perf_counter() - start
        self.count_anew()

    def count_anew(self) -> None:
        """What is compiled or looked up is counted from here on: the warm-up is over."""
        self._compiled, self._tiles = compiled_variants(), tile_lookups()

    def _record(self, shape: StepShape) -> None:
        step = self._step(shape)
        if shape.keys == self.keys[-1]:  # other limits launch the same kernels
            self._launch(step)
        held = self._held()
        carry = self._carry(shape)  # a single launch where there are no drafts
        self._carries[shape] = self.capture.record(carry) if shape.drafts else carry
        self._parts[shape] = [(name, self.capture.record(work)) for name, work in step.parts()]
        self.bytes += self._held() - held

    def _launch(self, step: StaticStep) -> None:
        """Run a step of pads, so that all it needs is compiled, loaded and made."""
        recorded = isinstance(self.capture, CudaGraphs)
        with rehearsed() if recorded else contextlib.nullcontext():
            self.inputs.clear(step.shape)
            self._carry(step.shape)()
            for _, work in step.parts():
                work()

    def _carry(self, shape: StepShape) -> Replay:
        return lambda: self.inputs.carry(shape, self.memory.found, self.memory.last)

    def _step(self, shape: StepShape) -> StaticStep:
        where = (self.inputs, self.memory, self.device)
        return StaticStep(shape, self.model, self.caches, self.drafter, *where)

    def _give_up(self, shapes: Sequence[StepShape], problem: BaseException) -> None:
        self.problem = (
            f"{len(self._parts)} of {len(shapes)} CUDA graphs of decode steps were recorded, then: "
            f"{str(problem).splitlines()[0]} Decoding runs without graphs, slower. If memory ran "
            "out, lower max_requests, max_context or memory."
        )
        log.warning(self.problem)
        self._parts.clear()
        self.bytes = 0
        self.capture = Direct(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._parts = {shape: self._step(shape).parts() for shape in shapes}
        self._carries = {shape: self._carry(shape) for shape in shapes}

    def _held(self) -> int:
        """Device bytes that this process's tensors and pools hold; others' on the card are not in
        it, nor is what the driver keeps for a graph."""
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def close(self) -> None:
        """Let the graphs go; no step follows."""
        self._parts.clear()
        self._carries.clear()

    # ---- steps --------------------------------------------------------------------------------

    def shape_of(self, step: Step, drafter: Drafter | None) -> StepShape | None:
        """The smallest shape for a step; None where it has none, or other drafts were recorded."""
        pieces = step.decode
        if step.prefill or not pieces or drafter is not self.drafter:
            return None
        most = max(p.request.drafts for p in pieces)
        if len(pieces) > self.rungs[-1] or most > self.options[-1]:
            return None
        if any(p.count != 1 + p.request.drafts for p in pieces):
            return None
        if most and not all(is_plain(p.request) for p in pieces):
            return None
        drafts = next(o for o in self.options if o >= most)
        longest = max(p.start for p in pieces) + 1 + drafts
        keys = next((k for k in self.keys if k >= longest), None)
        rung = next(n for n in self.rungs if n >= len(pieces))
        return None if keys is None else StepShape(rung, drafts, keys)

    def settle(self, step: Step) -> None:
        """Before any other step, and before one that moves requests: give them what is theirs."""
        if step.restores:
            self.inputs.forget()
        if not self._starting:
            return
        kept = self.memory.start[: len(self._starting)].clone()
        for i, request in enumerate(self._starting):
            if request.state is not State.DONE:
                request.hidden = kept[i]
        self._starting = []

    def run(self, step: Step, shape: StepShape, clock: Clock) -> list[list[tuple[int, int]]]:
        """Of each piece the (row of the shape, token) of its new tokens; requests move on."""
        return self.read(self.launch(step, shape, clock))

    def launch(
        self, step: Step, shape: StepShape, clock: Clock, behind: Flight | None = None
    ) -> Flight:
        """Start a step. behind: the step before it, of the same requests with as many drafts, where
        its tokens have not been read: they stay on the device."""
        pieces = step.decode
        requests = [p.request for p in pieces]
        if self.drafter is not None and requests != self._starting:
            self._gather(step, requests)
        depths = [0]
        if self.drafter is not None:
            depths = [self.drafter.shape.depth(d) for d in range(shape.each)]
        self.inputs.fill(pieces, shape, depths, ahead=behind is not None)
        if behind is not None:
            self._carries[shape]()
        parts = self._parts[shape]
        plain = shape.drafts > 0 or all(is_plain(r) for r in requests)
        for name, replay in parts:
            replay()
            if name == "verify" and not plain:
                self._pick_again(requests, shape)
            clock.mark(name)
        self.replays += 1
        count = 2 * shape.rows if shape.drafts else shape.rows
        host = self.memory.host[self.replays % 2, :count]
        host.copy_(self.memory.found[:count], non_blocking=True)
        return Flight(pieces, shape, host, self.capture.mark(), clock)

    def read(self, flight: Flight) -> list[list[tuple[int, int]]]:
        """What `run` gives, of a step that was started.

        This is where the host waits for the device."""
        start = time.perf_counter()
        self.capture.wait(flight.mark)
        self.waited += time.perf_counter() - start
        return gained(flight.pieces, flight.shape, flight.host.tolist())

    def logits(self, shape: StepShape) -> Tensor:
        """The last step's, float32 [rows, V], computed again from its hidden states: of as many
        rows, so the bits are the same."""
        logits: Tensor = self.model.logits(self.memory.hidden[: shape.rows])
        return logits

    def _pick_again(self, requests: list[Request], shape: StepShape) -> None:
        """Replace the picks by those under penalties and min_tokens."""
        n = len(requests)
        self.memory.found[:n].copy_(self.sampler.pick(self.logits(shape)[:n], requests))

    def _gather(self, step: Step, requests: list[Request]) -> None:
        """Bring what the drafts of these requests start from into their rows."""
        self.settle(step)
        self.memory.start.zero_()
        self.memory.keep_start(torch.stack([r.hidden for r in requests]))
        self._starting = requests

    def report(self) -> dict[str, object]:
        """Plain values: what was recorded, at what cost, and what happened since."""
        return {
            "recorded": len(self._parts) if isinstance(self.capture, CudaGraphs) else 0,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "replays": self.replays,
            "other_steps": self.others,
            "compiled_since": compiled_variants() - self._compiled,
            "tiles_looked_up_since": tile_lookups() - self._tiles,
            "problem": self.problem,
        }


def gained(
    pieces: Sequence[Piece], shape: StepShape, found: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """(row, token) of each piece's new tokens from a shape's picks and, behind them, its paths."""
    each, tokens, path = shape.each, found[: shape.rows], found[shape.rows :]
    result = []
    for i in range(len(pieces)):
        first = i * each
        on = [first + r for r in path[first : first + each] if r >= 0] if path else [first]
        result.append([(row, tokens[row]) for row in on if tokens[row] >= 0])
    return result
