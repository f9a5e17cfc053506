"""What a person sees besides the answer: progress, memory, speed, warnings. All on stderr."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

_SECONDS = 10.0  # between two lines of progress in a log
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_CONTROL = {c: 0x2400 + c for c in range(32) if c not in (9, 10)} | {127: 0x2421}
_CONTROL |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Loading:
    """Bars while a model comes up: bytes of weights, decode steps recorded, prompts to warm up."""

    def __init__(self, bars: Progress, tell: Callable[[str, str], None]) -> None:
        self._bars, self._tell = bars, tell
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def __call__(self, done: int, total: int, tensor: str, /) -> None:
        self._show("weights", done, total, f"{bytes_text(done)} of {bytes_text(total)}")

    def graphs(self, done: int, total: int, what: str, /) -> None:
        """Steps recorded so far, in all, and which came last."""
        self._show("graphs", done, total, f"{done} of {total}")

    def prompts(self, done: int, total: int, what: str, /) -> None:
        """Prompts run so far, in all, and which came last."""
        self._show("prompts", done, total, f"{done} of {total}: {what}")

    def _show(self, name: str, done: int, total: int, text: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(f"{name:<8}", total=total, text=text)
        self._bars.update(self._tasks[name], completed=done, total=total, text=text)
        self._tell(name, text)


class Console:
    """One per program. `quiet` leaves warnings and errors, and nothing else."""

    def __init__(self, quiet: bool = False) -> None:
        self._out = RichConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self.quiet = quiet

    def line(self, label: str, text: str) -> None:
        """`label    text`, one of the lines above the answer."""
        if not self.quiet:
            self._out.print(f"{label:<8} {text}")

    def say(self, text: str) -> None:
        """A remark, such as the report under an answer."""
        if not self.quiet:
            self._out.print(text, style="dim")

    @property
    def is_terminal(self) -> bool:
        """True where somebody looks at stderr and wants more than warnings."""
        return self._out.is_terminal and not self.quiet

    def thought(self, text: str) -> None:
        """A piece of what the model thinks, as it comes."""
        shown = printable(text) if self._out.is_terminal else text
        self._out.print(Text(shown, style="dim"), end="")

    def warn(self, text: str) -> None:
        """Something the user would want to know even when quiet."""
        self._out.print(f"warning: {text}", style="yellow")

    def error(self, text: str) -> None:
        """Why the program ends."""
        self._out.print(f"error: {text}", style="bold red")

    @contextlib.contextmanager
    def loading(self) -> Iterator[Loading]:
        """Bars while a model comes up, on a terminal; elsewhere now and then a line."""
        text = TextColumn("{task.fields[text]}")
        columns = [TextColumn("{task.description}"), BarColumn(), text, TimeElapsedColumn()]
        hidden = self.quiet or not self._out.is_terminal
        with Progress(*columns, console=self._out, disable=hidden, transient=True) as bars:
            yield Loading(bars, self._now_and_then())

    @contextlib.contextmanager
    def counting(self, total: int, what: str = "requests") -> Iterator[Any]:
        """A bar of what is finished on a terminal, elsewhere now and then a line; gives a function
        to call after each."""
        done = TextColumn("{task.completed}/{task.total}")
        columns = [TextColumn(what), BarColumn(), done, TimeElapsedColumn()]
        hidden = self.quiet or not self._out.is_terminal
        with Progress(*columns, console=self._out, disable=hidden, transient=True) as bars:
            task, tell = bars.add_task(what, total=total), self._now_and_then()
            numbers = itertools.count(1)

            def count() -> None:
                bars.advance(task)
                tell(what, f"{next(numbers)} of {total}")

            yield count

    def _now_and_then(self) -> Callable[[str, str], None]:
        """What prints a line where no bar is seen, if the last one is long ago: for log files."""
        last = time.monotonic()

        def tell(label: str, text: str) -> None:
            nonlocal last
            if not self._out.is_terminal and time.monotonic() - last >= _SECONDS:
                last = time.monotonic()
                self.line(label, text)

        return tell

    def memory(self, total: int, parts: Mapping[str, int], room: str) -> None:
        """`memory   140 GiB: weights 17 GiB · states 2 GiB · ... · room for ...`."""
        shown = " · ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
        self.line("memory", f"{bytes_text(total)}: {shown} · room for {room}")

    def logprobs(self, ids: Sequence[int], rows: Sequence[Mapping[int, Any] | None]) -> None:
        """One line a token: logprob, rank, text; then the likeliest ones."""
        for token, row in zip(ids, rows, strict=True):
            if row is None:
                self.say(f"{'-':>9} {'-':>6}  token {token}")
                continue
            best = sorted(row.values(), key=lambda entry: -entry.logprob)
            others = "  ".join(f"{e.logprob:.3f} {e.decoded_token!r}" for e in best)
            own = row[token]
            self.say(f"{own.logprob:9.4f} {own.rank:6d}  {own.decoded_token!r}  of  {others}")


def bytes_text(size: int) -> str:
    """A size for the eye: `17.2 GiB`."""
    unit, factor = next((u for u in _UNITS if size >= u[1]), _UNITS[-1])
    value = size / factor
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def by_position(shares: Sequence[float]) -> str:
    """Acceptance of the first, second, ... draft of a step: `1st 90 %, 2nd 25 %`."""
    ends = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd", 31: "st", 32: "nd"}
    named = ((f"{i}{ends.get(i, 'th')}", share) for i, share in enumerate(shares, 1))
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in named)


def printable(text: str) -> str:
    """Text without control characters that would move a terminal's cursor or change its colours."""
    return text.translate(_CONTROL)
