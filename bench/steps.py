"""A model's decode steps under measurement: contexts nobody computed, times, launches by layer.

Prompts are not prefilled: the caches hold noise, and a request is told that its context is done.
Layers are told apart in a trace by tiny marker kernels behind each of them, in a step that is
launched piece by piece; what a recorded step replays are the same kernels.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.rows import BenchError
from nemotriton import LLM, SamplingParams
from nemotriton.engine import graphs
from nemotriton.engine.request import State
from nemotriton.errors import require
from nemotriton.model.mixers import MoeMixer

WARM = 5  # steps before those that count


def noise(llm: LLM) -> None:
    """Random numbers where the caches hold contexts that nobody has computed."""
    held = llm.runner.caches
    for cache in (held.kv, held.mamba):
        for name, tensor in vars(cache).items() if cache is not None else ():
            if not isinstance(tensor, torch.Tensor) or name == "cursor":
                continue
            for part in tensor:
                if part.is_floating_point():
                    part.copy_(torch.randn(part.shape, device=part.device).mul_(0.1))
                elif part.dtype in (torch.int8, torch.int16):  # states; wider ones are indices
                    part.random_(-40, 40)


def begin(llm: LLM, batch: int, context: int) -> None:
    """Requests that stand behind `context` tokens, without having computed them."""
    engine, vocab = llm.engine, llm.config.vocab
    rng = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for _ in range(batch):
        ids = torch.randint(vocab // 2, vocab, (context,), generator=rng).tolist()
        engine.submit(engine.prepare(ids, params))
    own = engine.scheduler.prefill_piece
    engine.scheduler.prefill_piece = batch * context
    engine.scheduler.drafts = 0
    for piece in engine.scheduler.step().prefill:
        token = int(torch.randint(vocab // 2, vocab, (1,), generator=rng))
        engine._take(piece, [token])
        piece.request.hidden = torch.randn(
            llm.config.width, device=llm.device, dtype=torch.float32
        ).to(llm.dtype)
    engine.scheduler.prefill_piece = own
    running = sum(r.state is State.DECODE for r in engine.scheduler.running)
    if running != batch:
        end(llm)
    require(
        running == batch,
        f"{running} of {batch} contexts of {context:,} tokens fit beside the weights",
        BenchError,
    )


def end(llm: LLM) -> None:
    """Cancel all that runs."""
    for group in list(llm.engine._groups.values()):
        llm.engine.cancel(group.id)
    llm.engine.drop_cancelled()
    llm.engine.settle()


@contextmanager
def only_rungs(batches: list[int]) -> Iterator[None]:
    """Record decode steps for these numbers of sequences alone: a start takes seconds, not
    minutes."""
    own = graphs.ladder
    graphs.ladder = lambda requests: sorted({*batches, requests})
    try:
        yield
    finally:
        graphs.ladder = own


# ------------------------------------------------------------------------------------------- times
@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of the steps: wall, device, host; of the parts; and tokens gained in all.

    `host` is what of a step's wall time was not spent waiting for the device."""

    wall: list[float]
    device: list[float]
    host: list[float]
    parts: dict[str, list[float]]
    tokens: int


def steps_of(llm: LLM, drafts: int, count: int) -> Measured:
    """Run steps and time each."""
    engine = llm.engine
    engine.depth = None
    engine.scheduler.drafts = drafts
    recorded = engine.runner.steps
    wall, device, host, before = [], [], [], 0
    parts: dict[str, list[float]] = {}
    for i in range(WARM + count):
        if i == WARM:
            before = engine.meter.output_tokens
        waited = recorded.waited if recorded is not None else 0.0
        start = time.perf_counter()
        llm.step()
        took = time.perf_counter() - start
        idle = recorded.waited - waited if recorded is not None else 0.0
        if i >= WARM:
            seconds = engine.runner.clock.seconds()
            wall.append(1e6 * took)
            host.append(1e6 * (took - idle))
            device.append(1e6 * sum(seconds.values()))
            for part, value in seconds.items():
                parts.setdefault(part, []).append(1e6 * value)
    return Measured(wall, device, host, parts, engine.meter.output_tokens - before)


# ------------------------------------------------------------------------------------ what it does
@contextmanager
def piece_by_piece(llm: LLM) -> Iterator[None]:
    """Launch the recorded steps anew instead of replaying them, one at a time."""
    recorded, engine = llm.runner.steps, llm.engine
    assert recorded is not None
    parts, ahead = recorded._parts, engine.run_ahead
    try:
        engine.run_ahead = False
        if engine._ahead is not None:
            llm.step()
        recorded._parts = {shape: recorded._step(shape).parts() for shape in parts}
        yield
    finally:
        recorded._parts, engine.run_ahead = parts, ahead


def experts_seen(llm: LLM) -> float | None:
    """Distinct experts a layer of the trunk that one more step reaches."""
    counts: list[int] = []
    model: Any = llm.runner.model
    mixers = [b.mixer for b in model.blocks if isinstance(b.mixer, MoeMixer)]
    if not mixers or llm.runner.steps is None:
        return None

    def count(experts: Any, given: Any) -> None:
        counts.append(len(given[1].ids.unique()))

    hooks = [m.experts.register_forward_pre_hook(count) for m in mixers]
    try:
        with piece_by_piece(llm):
            llm.step()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counts) / len(counts) if counts else None


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel on the device, microseconds."""

    name: str
    start: float
    end: float


MARKER = "erfc"  # no op of a step is this


def traced(work: Callable[[], None], device: torch.device) -> list[Span] | None:
    """The kernels that `work` launches, in order; None where they cannot be traced."""
    if device.type != "cuda":
        return None
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=kinds) as trace:
            work()
            torch.cuda.synchronize()
        events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    except RuntimeError:
        return None
    found = [Span(e.name, e.time_range.start, e.time_range.end) for e in events]
    return sorted((s for s in found if not s.name.startswith("Mem")), key=lambda s: s.start) or None


def idle_of(llm: LLM, count: int = 20) -> float | None:
    """Microseconds a step that the device waits for the host: from a step's last kernel to the next
    one's first, in a trace of `count` steps. Tracing slows the host, so it is rather less.

    None where steps are not recorded, cannot be traced or are not of one size."""
    if llm.runner.steps is None:
        return None

    def work() -> None:
        for _ in range(count):
            llm.step()

    spans = traced(work, llm.device)
    if spans is None or len(spans) % count:
        return None
    each = len(spans) // count
    gaps = [spans[i].start - spans[i - 1].end for i in range(each, len(spans), each)]
    return sum(max(gap, 0.0) for gap in gaps) / len(gaps)


@contextmanager
def marked(llm: LLM) -> Iterator[list[str]]:
    """Launch a marker behind every layer and draft; gives the kinds of what lies before each."""
    model: Any = llm.runner.model
    cell = torch.zeros(1, device=llm.device)
    order: list[str] = []

    def mark(kind: str) -> None:
        order.append(kind)
        cell.erfc_()

    hooks = [
        block.mixer.register_forward_hook(lambda *_, k=kind.value: mark(k))
        for block, kind in zip(model.blocks, llm.config.kinds, strict=True)
    ]
    own, forward = model.draft, model.forward

    def trunk(batch: Any, caches: Any) -> torch.Tensor:
        mark("rest")
        out: torch.Tensor = forward(batch, caches)
        return out

    def draft(batch: Any, hidden: torch.Tensor, caches: Any) -> torch.Tensor:
        mark("rest")
        out: torch.Tensor = own(batch, hidden, caches)
        mark("MTP")
        return out

    model.draft, model.forward = draft, trunk
    try:
        yield order
    finally:
        del model.draft, model.forward
        for hook in hooks:
            hook.remove()


def by_layer(spans: list[Span], order: list[str]) -> dict[str, dict[str, float]]:
    """Launches and microseconds by kind of layer: `order` names what lies before each marker, and
    what is behind the last is "rest" (final norm, head, pick, commit), or all where some lack."""
    found: dict[str, dict[str, float]] = {}
    kinds = iter(order)
    current: list[Span] = []

    def close(kind: str) -> None:
        sums = found.setdefault(kind, {"launches": 0, "us": 0.0})
        sums["launches"] += len(current)
        sums["us"] += busy(current)
        current.clear()

    for span in spans:
        if MARKER in span.name:
            close(next(kinds, "rest"))
        else:
            current.append(span)
    close("rest")
    if next(kinds, None) is not None:
        print("the trace lacks markers: layers cannot be told apart", file=sys.stderr, flush=True)
        return {"rest": {"launches": sum(MARKER not in s.name for s in spans), "us": busy(spans)}}
    return found


def busy(spans: list[Span]) -> float:
    """Microseconds in which at least one of these runs; dependent launches overlap."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(span.end - max(span.start, until), 0.0)
        until = max(until, span.end)
    return total


def layers_of(llm: LLM) -> dict[str, dict[str, float]] | None:
    """Launches and microseconds of one more step by kind of layer; None without a trace."""
    if llm.runner.steps is None:
        return None
    with piece_by_piece(llm), marked(llm) as order:
        spans = traced(llm.step, llm.device)
    return None if spans is None else by_layer(spans, order)
