"""The engine in a thread of its own: requests in, what they bring out, and nobody waits.

The event loop and this thread share an inbox under a lock. Everything else belongs to one of them:
the engine to the thread, the books (what is open, what is measured) to the event loop, which gets
the news of a step in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nemotriton.engine.engine import Prepared
from nemotriton.engine.outputs import Delta, Group
from nemotriton.errors import NemotritonError, RankError
from nemotriton.serve.failures import Failure, refusal

if TYPE_CHECKING:
    from nemotriton.engine.llm import LLM

log = logging.getLogger(__name__)
# Python's own 5 ms, for which a thread keeps the interpreter from the other, are half a step
_LOOK = 1.0  # seconds between looks at other ranks while there is nothing to do
_SWITCH = 0.0005
_GATHER = 0.02  # seconds that a first step waits at most for requests that are being read
BAD_ENDS = ("error", "abort")


class Piece(NamedTuple):
    """What a step added to one of a job's prompts."""

    prompt: int
    delta: Delta


class Done:
    """A job has ended well; its groups do not change any more."""


Event = Piece | Done | Failure


class News:
    """What a job's steps bring, on its way to the one who answers; all of it on the event loop."""

    def __init__(self) -> None:
        self._found: list[Event] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, events: list[Event]) -> None:
        """Add to what waits; none at all only wakes who waits for it."""
        self._found += events
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[Event]:
        """All that has come since the last time; empty only where `put` brought nothing."""
        if not self._found:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        found, self._found = self._found, []
        return found


@dataclass(eq=False)
class Job:
    """A client's request: one or several prompts, `weight` completions in all.

    stream: its deltas are wanted, not only the end. news: for whoever answers. The rest is for the
    loop; times are of `perf_counter`.
    """

    prepared: list[Prepared]
    weight: int
    stream: bool
    news: News = field(default_factory=News)
    groups: list[Group] = field(default_factory=list)
    cancelled: bool = False
    ended: bool = False
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def prompt_tokens(self) -> int:
        """Of all its prompts."""
        return sum(len(p.ids) for p in self.prepared)

    @property
    def output_tokens(self) -> int:
        """Of all its completions so far."""
        return sum(len(c.request.output) for g in self.groups for c in g.completions)


class EngineLoop:
    """Steps an LLM as long as there is work.

    room: completions that may be open at the same time, running and waiting. on_end: called on the
    event loop with each job that has ended, well or not.
    """

    def __init__(self, llm: LLM, room: int, on_end: Callable[[Job], None]) -> None:
        self.room = room
        self.open = 0
        self.fault: str | None = None  # of the last step
        self.broken: RankError | None = None  # why there will be no more steps
        self.on_broken: Callable[[], None] = lambda: None
        self._llm = llm
        self._on_end = on_end
        self._changed = threading.Condition()
        self._inbox: list[Job] = []
        self._cancels: list[Job] = []
        self._coming = 0  # jobs with room that have not been submitted
        self._stopping = False
        self._active: list[Job] = []
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- called on the event loop -------------------------------------------------------------

    def start(self) -> None:
        """Begin; from the event loop that the news goes to."""
        self._events = asyncio.get_running_loop()
        sys.setswitchinterval(_SWITCH)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def reserve(self, weight: int) -> bool:
        """Book room for a job of so many completions; False where there is none."""
        if self.open + weight > self.room:
            return False
        self.open += weight
        self._coming += 1
        return True

    def release(self, weight: int) -> None:
        """Give back room that no job came to fill."""
        self.open -= weight
        with self._changed:
            self._coming -= 1
            self._changed.notify()

    def submit(self, job: Job) -> None:
        """Hand over a job whose room is reserved; the loop releases it at the job's end."""
        with self._changed:
            self._coming -= 1
            if not self._stopping and self.alive:
                self._inbox.append(job)
                self._changed.notify()
                return
        self._deliver([(job, [Failure(503, "the server is stopping.", "stopping")], True)])

    def cancel(self, job: Job) -> None:
        """End a job before the next step; nothing for one that has ended."""
        if job.ended or job.cancelled:
            return
        job.cancelled = True
        with self._changed:
            self._cancels.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after the step at hand, and wait for that; what is open stays unanswered.

        From any thread; again does nothing."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                self._step()
                self._tell()
        except RankError as problem:  # whoever runs the server says it, once
            self.broken = problem
        except BaseException:
            log.exception("the engine's thread ended")
            raise
        finally:
            with self._changed:
                self._stopping = True
                left, self._inbox = [*self._active, *self._inbox], []
            end = Failure(503, "the server stopped before the answer was complete.", "stopping")
            self._post([(job, [end], True) for job in left])
            if self.broken is not None:
                self.on_broken()

    def _take_in(self) -> bool:
        """Wait for work; False where there will be none."""
        with self._changed:
            while not (self._inbox or self._cancels or self._llm.engine.busy or self._stopping):
                self._changed.wait(_LOOK)
                self._llm.check_ranks()
            if not self._llm.engine.busy:
                self._gather()
            if self._stopping:
                return False
            jobs, self._inbox = self._inbox, []
            cancels, self._cancels = self._cancels, []
        for job in jobs:
            self._active.append(job)
            if not job.cancelled:
                self._submit(job)
        for job in cancels:
            for group in job.groups:
                self._llm.engine.cancel(group.id)
        return True

    def _gather(self) -> None:
        """Let those in who came at the same time: prompts of one step share its weights."""
        until = time.monotonic() + _GATHER
        while self._inbox and self._coming and not self._stopping:
            if not self._changed.wait(until - time.monotonic()):
                return

    def _submit(self, job: Job) -> None:
        try:
            for prepared in job.prepared:
                job.groups.append(self._llm.engine.submit(prepared))
        except Exception as problem:
            for group in job.groups:
                self._llm.engine.cancel(group.id)
            self._active.remove(job)
            self._post([(job, [_failure(problem)], True)])

    def _step(self) -> None:
        try:
            self._llm.step()
            self.fault = None
        except RankError:
            raise
        except Exception as problem:
            log.exception("a step failed; what ran in it has ended")
            self.fault = f"{type(problem).__name__}: {problem}"

    def _tell(self) -> None:
        """Post what the step brought."""
        news: list[tuple[Job, list[Event], bool]] = []
        going: list[Job] = []
        for job in self._active:
            found: list[Event] = []
            if job.stream and not job.cancelled:
                for i, group in enumerate(job.groups):
                    found += [Piece(i, delta) for delta in group.take()]
            ended = all(group.finished for group in job.groups)
            if ended:
                found.append(self._end(job))
            else:
                going.append(job)
            if found:
                news.append((job, found, ended))
        self._active = going
        self._post(news)

    def _end(self, job: Job) -> Event:
        for group in job.groups:
            for completion in group.completions:
                request = completion.request
                if request.finish_reason in BAD_ENDS and not job.cancelled:
                    why = request.stop_reason or self.fault or "it was cancelled"
                    return Failure(500, f"the request failed: {why}", "request_failed")
        return Done()

    def _post(self, news: list[tuple[Job, list[Event], bool]]) -> None:
        assert self._events is not None
        if news:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                self._events.call_soon_threadsafe(self._deliver, news)

    # ---- on the event loop again --------------------------------------------------------------

    def _deliver(self, news: list[tuple[Job, list[Event], bool]]) -> None:
        for job, events, ended in news:
            job.news.put(events)
            if ended and not job.ended:
                job.ended = True
                self.open -= job.weight
                self._on_end(job)


def _failure(problem: Exception) -> Failure:
    if isinstance(problem, NemotritonError):
        return refusal(problem)
    log.error("a request could not be queued", exc_info=problem)
    return Failure(500, f"the request failed: {type(problem).__name__}", "request_failed")
