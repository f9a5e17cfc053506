"""What a person sees besides the answer: progress, memory, speed, warnings. All on stderr."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

_CONTROL = {c: 0x2400 + c for c in range(32) if c not in (9, 10)} | {127: 0x2421}
_CONTROL |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class LoadProgress(Protocol):
    """Called as weights arrive: bytes so far of bytes in all."""

    def __call__(self, done: int, total: int) -> None: ...


class Console:
    """One per program. `quiet` leaves warnings and errors, and nothing else."""

    def __init__(self, quiet: bool = False) -> None:
        self._out = RichConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._quiet = quiet

    def line(self, label: str, text: str) -> None:
        """`label    text`, one of the lines above the answer."""
        if not self._quiet:
            self._out.print(f"{label:<8} {text}")

    def say(self, text: str) -> None:
        """A remark, such as the report under an answer."""
        if not self._quiet:
            self._out.print(text, style="dim")

    def warn(self, text: str) -> None:
        """Something the user would want to know even when quiet."""
        self._out.print(f"warning: {text}", style="yellow")

    def error(self, text: str) -> None:
        """Why the program ends."""
        self._out.print(f"error: {text}", style="bold red")

    @contextlib.contextmanager
    def loading(self) -> Iterator[LoadProgress]:
        """A bar of bytes while weights load, on a terminal; silent elsewhere."""
        columns = [TextColumn("weights "), BarColumn(), DownloadColumn(True), TimeElapsedColumn()]
        hidden = self._quiet or not self._out.is_terminal
        with Progress(*columns, console=self._out, disable=hidden, transient=True) as bars:
            task = bars.add_task("weights", total=None)

            def update(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            yield update

    @contextlib.contextmanager
    def counting(self, total: int) -> Iterator[Any]:
        """A bar of finished requests on a terminal; gives a function to call after each."""
        columns = [TextColumn("requests"), BarColumn(), TextColumn("{task.completed}/{task.total}")]
        hidden = self._quiet or not self._out.is_terminal
        with Progress(*columns, console=self._out, disable=hidden, transient=True) as bars:
            task = bars.add_task("requests", total=total)
            yield lambda: bars.advance(task)

    def memory(self, total: int, parts: Mapping[str, int]) -> None:
        """`memory   140 GiB: weights 17 · states 2 · ...`, all in the unit of the total."""
        unit, size = _unit(total)
        shown = " · ".join(f"{name} {_short(part / size)}" for name, part in parts.items())
        self.line("memory", f"{_short(total / size)} {unit}: {shown}")

    def logprobs(self, title: str, rows: Sequence[tuple[str, float, int]]) -> None:
        """One line a token: its text, logprob and rank."""
        if self._quiet:
            return
        self._out.print(title, style="dim")
        for text, logprob, rank in rows:
            self._out.print(f"  {logprob:9.4f}  {rank:6d}  {text!r}", style="dim")


def _unit(size: int) -> tuple[str, int]:
    for name, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return name, factor
    return "KiB", 2**10


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def bytes_text(size: int) -> str:
    """A size for the eye: `17.2 GiB`."""
    unit, factor = _unit(size)
    return f"{_short(size / factor)} {unit}"


def printable(text: str) -> str:
    """Text without control characters that would move a terminal's cursor or change its colours."""
    return text.translate(_CONTROL)
