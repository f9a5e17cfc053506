"""Compiling tiles on the CPU while the GPU measures those that are ready.

The compiled kernels land in Triton's own cache, where the measuring process finds them. Tiles that
this GPU cannot hold, that do not compile, or that have the wgmma hazard never reach it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool

from nemotriton.autotune import offline
from nemotriton.autotune.trial import Point
from nemotriton.errors import NemotritonError
from nemotriton.kernels.op import Case, Tile

log = logging.getLogger("nemotriton.autotune")

Compiler = Callable[[Sequence[offline.Job]], Iterator[list[offline.Row]]]
Key = tuple[str, Case, str, Tile]


class Ahead:
    """Runs `compiler` over `jobs` in a thread; `close` stops it."""

    def __init__(self, compiler: Compiler, jobs: Sequence[offline.Job], shared_memory: int) -> None:
        self.compiler = compiler
        self.jobs = jobs
        self.shared_memory = shared_memory
        self.reasons: dict[Key, str | None] = {}
        self.pending = {(j.op, j.case, j.dtype, j.tile) for j in jobs}
        self.changed = threading.Condition()
        self.over = not jobs
        self.thread = threading.Thread(target=self._work, daemon=True)
        if jobs:
            self.thread.start()

    def wait(self, point: Point, tile: Tile, seconds: float) -> bool:
        """Wait until this tile is compiled, or never will be; False when `seconds` pass before."""
        key = (point.op, point.case, point.dtype, tile)
        with self.changed:
            patience = None if seconds == float("inf") else max(seconds, 0.0)
            return self.changed.wait_for(lambda: self.over or key not in self.pending, patience)

    def why(self, point: Point, tile: Tile) -> str | None:
        """Why a tile must not be run; None when it may, or when nobody compiled it."""
        return self.reasons.get((point.op, point.case, point.dtype, tile))

    @property
    def progress(self) -> tuple[int, int]:
        return len(self.jobs) - len(self.pending), len(self.jobs)

    def close(self) -> None:
        with self.changed:
            self.over = True
        if self.jobs:
            self.thread.join()

    def _work(self) -> None:
        try:
            for rows in self.compiler(self.jobs):
                job = rows[0].job
                key = (job.op, job.case, job.dtype, job.tile)
                with self.changed:
                    self.reasons[key] = unfit(rows, self.shared_memory)
                    self.pending.discard(key)
                    self.changed.notify_all()
                    if self.over:
                        return
        except (BrokenProcessPool, NemotritonError) as error:
            # the measuring process compiles what is left, and says whose fault it is
            log.warning("compiling ahead stopped after %d of %d: %s", *self.progress, error)
        finally:
            with self.changed:
                self.over = True
                self.changed.notify_all()


def unfit(rows: Sequence[offline.Row], shared_memory: int) -> str | None:
    """Why a compiled tile must not run on a GPU with so many bytes of shared memory a block."""
    for row in rows:
        if row.found is None:
            return f"does not compile: {'; '.join(row.faults)}"
        if shared_memory and row.found.shared > shared_memory:
            return f"{row.found.shared} bytes of shared memory, this GPU has {shared_memory}"
        if row.found.hazards:
            return f"{row.found.hazards} wgmma register hazards"
        if row.found.unwritten:
            return f"{row.found.unwritten} instructions read registers that nothing wrote"
    return None
