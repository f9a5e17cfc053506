"""Who of a run's processes is still there: a thread in each that notices, within seconds.

Every process beats in a store that all reach and looks at the others' beats and at the one word
"fault", which belongs to the first who fails. Whoever learns of a fault has little time to come
back from where it waits for the others, then it ends: a collective of NCCL would wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

_LOOK = 0.25  # seconds between looks
_BEAT = 1.0  # between beats
_SILENT = 6.0  # without a beat: gone
_GRACE = 2.5  # that the main thread has to come back


class Watch:
    """The thread. store: a connection of its own. children: processes that this one has started, by
    rank. parent: the process that started this one, None where nobody is waited for.
    release: called at a fault on rank 0, to bring back who waits on the device; the others end.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: int,
        children: Mapping[int, subprocess.Popen[bytes]],
        parent: int | None,
        release: Callable[[], None],
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._store, self._children, self._parent = store, children, parent
        self._release = release
        self._fault: str | None = None
        self._known = threading.Event()
        self._back = threading.Event()
        self._back.set()
        self._ending = threading.Event()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    # ---- for the other threads ----------------------------------------------------------------

    @property
    def fault(self) -> str | None:
        """Why the run is over, or None."""
        return self._fault

    def wait(self, seconds: float) -> str | None:
        """`fault`, waited for so long."""
        self._known.wait(seconds)
        return self._fault

    def report(self, message: str) -> str:
        """Say why this process fails; what counts is what was said first, which is returned."""
        with contextlib.suppress(Exception):
            message = self._store.compare_set("fault", "", message).decode()
        self._learn(message)
        return message

    def enter(self) -> None:
        """This process goes where it may wait for others."""
        self._back.clear()

    def leave(self) -> None:
        """It is back."""
        self._back.set()

    def stop(self) -> None:
        """End the thread: from now on the others may go."""
        self._ending.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        beaten = 0.0
        while not self._ending.wait(_LOOK):
            try:
                if time.monotonic() - beaten >= _BEAT:
                    beaten = time.monotonic()
                    self._store.set(f"beat/{self.rank}", str(beaten))
                fault = self._look()
            except Exception:
                fault = "rank 0 has gone, and with it what the ranks tell each other"
            if fault is not None and not self._ending.is_set():
                self._learn(fault)
                if self.rank == 0 and self._comes_back():
                    return  # the main thread tells it
                self.end()

    def _comes_back(self) -> bool:
        """Whether the main thread returns from where it waits; what brings it back may itself wait
        for ever, so it has a thread of its own."""
        threading.Thread(target=self._release, name="release", daemon=True).start()
        return self._back.wait(_GRACE)

    def _look(self) -> str | None:
        if self._store.check(["fault"]):
            return self._store.get("fault").decode()
        if self._parent is not None and os.getppid() != self._parent:
            return "rank 0 has gone without a word"
        for rank, child in self._children.items():
            code = child.poll()
            if code is not None:
                return self._last_words(f"rank {rank} {ending(code)}")
        for rank in range(self.ranks):
            if rank != self.rank and self._store.check([f"beat/{rank}"]):
                beat, now = self._store.get(f"beat/{rank}"), time.monotonic()
                if self._beats.get(rank, (b"", 0.0))[0] != beat:
                    self._beats[rank] = beat, now
                silent = now - self._beats[rank][1]
                if silent > _SILENT:
                    return self._last_words(f"rank {rank} has not been heard of for {silent:.0f} s")
        return None

    def _last_words(self, message: str) -> str:
        """What was said of it by those who know more, else `message`, for all to read."""
        return self._store.compare_set("fault", "", message).decode()

    def _learn(self, message: str) -> None:
        if not self._known.is_set():
            self._fault = message
            self._known.set()

    def end(self) -> NoReturn:
        """End the process because of the fault, and say so where nobody else can."""
        fault = self._fault or ""
        if self.rank and self._parent is None:
            time.sleep(_GRACE)  # a launcher ends all once one has ended: rank 0 is to speak first
        if self.rank == 0 or (self.rank == 1 and fault.startswith("rank 0 has gone")):
            print(f"error: {fault}", file=sys.stderr, flush=True)
        os._exit(1)


def ending(code: int) -> str:
    """A process's exit code in words."""
    if code < 0:
        return f"was ended by signal {-code}" + (" (killed)" if code == -9 else "")
    return f"has ended with exit code {code}"


def end_all(children: Sequence[Any], seconds: float) -> None:
    """Wait so long for processes to end, then kill them."""
    until = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
