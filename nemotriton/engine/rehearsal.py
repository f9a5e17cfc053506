"""Prompts that run before anybody asks, so that nobody waits for what they make Triton compile.

Which kernels a step launches, and with which tiles, hangs on how many tokens, prompts and decoding
requests it has; the token counts at which that changes are the kernels' buckets. A rehearsal runs
prompts of each bucket, several prompts at once, and prompts beside requests that decode, through
the engine itself, and leaves its books as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemotriton.engine.graphs import ladder
from nemotriton.engine.meter import DraftMeter, Meter
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError, require
from nemotriton.kernels.op import SPECS

if TYPE_CHECKING:
    from nemotriton.engine.engine import Engine
    from nemotriton.engine.llm import LLM

_SHORT = 2  # tokens of prompts that come several at a time
_PRIME = 7919


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One step: prompts of so many tokens, beside `decoding` requests."""

    prompts: tuple[int, ...]
    decoding: int = 0

    def __str__(self) -> str:
        count, total = len(self.prompts), sum(self.prompts)
        shown = f"{total:,} tokens" + (f" of {count} prompts" if count > 1 else "")
        return f"{shown} beside {self.decoding}" if self.decoding else shown


def lengths(most: int) -> list[int]:
    """The fewest and the most tokens of each bucket of any kernel, up to `most`: some wrappers
    change their way inside a bucket, at the end of another kernel's."""
    ends = {count for spec in SPECS.values() for count in spec.tokens if count < most}
    return sorted({1, most} | ends | {end + 1 for end in ends})


def rehearsals(engine: Engine) -> list[Rehearsal]:
    """What an engine is to run, as far as its context, pages and requests allow."""
    scheduler, pages = engine.scheduler, engine.scheduler.pages
    piece, held = scheduler.prefill_piece, scheduler.max_requests
    longest, full = min(piece, engine.max_context - 1), held
    if pages is not None:
        longest = min(longest, pages.size * scheduler.page_size)
        full = min(held, pages.size // max(1, scheduler.pages_for(longest)))
        held = min(held, pages.size)
    if longest < 1:
        return []
    most = min(piece, full * longest)
    found = [Rehearsal(split(n, longest)) for n in lengths(most)]
    if engine.max_context < _reach(engine):
        return found
    several = sorted(n for n in {*ladder(held), 3} if n <= held)
    beside = [n for n in several if n < held]
    found += [Rehearsal((_SHORT,) * n) for n in several if 1 < n <= piece // _SHORT]
    found += [Rehearsal((_SHORT,), n) for n in beside]
    return found + [Rehearsal(split(most, longest), 1) for _ in beside[:1]]  # more than a piece


def split(tokens: int, longest: int) -> tuple[int, ...]:
    """So many tokens as prompts of at most `longest`."""
    whole, rest = divmod(tokens, longest)
    return (longest,) * whole + (rest,) * (rest > 0)


def _reach(engine: Engine) -> int:
    """Tokens that a decoding request of a rehearsal comes to, drafts included."""
    drafter = engine.runner.drafter
    return _SHORT + 2 + (len(drafter.shape) if drafter is not None else 0)


def rehearse(llm: LLM, progress: Callable[[int, int, str], None] | None = None) -> None:
    """Run all rehearsals on every rank; progress: (done, all, what).

    RequestError while requests run."""
    engine = llm.engine
    require(not engine.busy, "requests are running: rehearse before the first.", RequestError)
    steps = rehearsals(engine)
    for i, step in enumerate(steps):
        llm.everywhere(run, step)
        if progress is not None:
            progress(i + 1, len(steps), str(step))
    if llm.runner.steps is not None:
        llm.runner.steps.count_anew()


def run(llm: LLM, step: Rehearsal) -> None:
    """Run one, on this rank."""
    engine = llm.engine
    vocab = engine.runner.vocab
    with unseen(engine):
        ids = [i * _PRIME % vocab for i in range(max(_SHORT, *step.prompts))]
        one = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
        more = SamplingParams(max_tokens=_reach(engine) - _SHORT, seed=0, ignore_eos=True)
        waiting = [engine.prepare(ids[:_SHORT], more) for _ in range(step.decoding)]
        groups = [engine.submit(p) for p in waiting]
        try:
            if groups:
                llm.step()
            asked = [engine.prepare(ids[:count], one) for count in step.prompts]
            prompts = [engine.submit(p) for p in asked]
            groups += prompts
            while not all(group.finished for group in prompts):
                llm.step()
        finally:
            for group in groups:
                engine.cancel(group.id)
            engine.drop_cancelled()


@contextlib.contextmanager
def unseen(engine: Engine) -> Iterator[None]:
    """Nothing that runs inside is counted, kept for reuse, told to other ranks or learnt from, and
    requests behind it have the numbers and seeds that they would have had."""
    with contextlib.ExitStack() as stack:

        def put_back(owner: object, *names: str) -> None:
            for name in names:
                stack.callback(setattr, owner, name, getattr(owner, name))

        scheduler, steps, drafter = engine.scheduler, engine.runner.steps, engine.runner.drafter
        put_back(engine, "meter", "draft_meter", "prefixes", "depth", "lead", "run_ahead")
        put_back(engine, "_submitted", "_arrivals")
        put_back(scheduler, "drafts", "preemptions")
        for pool in filter(None, (scheduler.pages, scheduler.slots)):
            stack.callback(pool.order, pool.indices)
        if steps is not None:
            put_back(steps, "others", "replays", "waited")
        engine.meter, engine.draft_meter = Meter(), DraftMeter()
        engine.prefixes = engine.depth = engine.lead = None
        engine.run_ahead = False
        scheduler.drafts = len(drafter.shape) if drafter is not None else 0
        yield
