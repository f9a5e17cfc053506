"""A Runner in a process of its own: a tile that crashes or hangs takes only that process along."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from nemotriton.autotune.timing import Timing
from nemotriton.autotune.trial import Facts, Point, Runner, Trial
from nemotriton.errors import NemotritonError
from nemotriton.kernels.op import Tile


class MeasuringFailed(NemotritonError):
    """The measuring process died or hung where no single tile is to blame."""


class _Died(Exception):
    """The child is gone; the message says how."""


class ChildRunner:
    """Forwards every call to the Runner that `make` builds in a child, restarted when it dies.

    `make` must be picklable (a module-level function or class). `limit_s` bounds one call, which
    includes compiling and, at a new point, the oracle."""

    def __init__(
        self, make: Callable[[], Runner], limit_s: float = 300.0, method: str = "spawn"
    ) -> None:
        self.make = make
        self.limit_s = limit_s
        self.context: Any = multiprocessing.get_context(method)
        self.process: Any = None
        self.pipe: Connection | None = None

    def facts(self) -> Facts:
        return self.call("facts")

    def trial(self, point: Point, tile: Tile | None) -> Trial:
        try:
            return self._ask("trial", point, tile)
        except _Died as how:
            return Trial(None, str(how))

    def vet(self, point: Point, tile: Tile | None) -> str | None:
        try:
            return self._ask("vet", point, tile)
        except _Died as how:
            return str(how)

    def race(self, point: Point, tiles: Sequence[Tile | None]) -> list[Timing]:
        return self.call("race", point, tiles)

    def close(self) -> None:
        self._end(2.0)

    def call(self, name: str, *args: Any) -> Any:
        """Any method of the Runner; MeasuringFailed when the child does not live to answer."""
        try:
            return self._ask(name, *args)
        except _Died as how:
            raise MeasuringFailed(
                f"the measuring process {how} in {name}({', '.join(map(str, args))}); "
                "its own message stands above"
            ) from how

    def _ask(self, name: str, *args: Any) -> Any:
        pipe = self._running()
        try:
            pipe.send((name, args))
            if pipe.poll(self.limit_s):
                return pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise _Died(f"crashed ({_exit(self._end(10.0))})") from error
        self._end(0.0)
        raise _Died(f"hung for {self.limit_s:g} s")

    def _end(self, patience: float) -> int | None:
        """Let the child go, by force after `patience` seconds; its exit code."""
        code = None
        if self.process is not None and self.pipe is not None:
            self.pipe.close()  # the child ends when it finds nobody to listen to
            self.process.join(patience)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
            code = self.process.exitcode
        self.process, self.pipe = None, None
        return code

    def _running(self) -> Connection:
        if self.pipe is None:
            mine, theirs = self.context.Pipe()
            self.process = self.context.Process(
                target=_serve, args=(theirs, mine, self.make), daemon=True
            )
            self.process.start()
            theirs.close()
            self.pipe = mine
        return self.pipe


def _serve(pipe: Connection, parents_end: Connection, make: Callable[[], Runner]) -> None:
    """Answer calls until the parent is gone. An exception ends the child and shows on stderr."""
    parents_end.close()  # inherited or passed on: while it is open, the parent's death goes unseen
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    runner = make()
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(runner, name)(*args))


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit {code}"
