"""What a sweep shows on stderr: bars, one line a finished point, a table at the end."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from nemotriton.autotune.sweep import Compiling, Event, Outcome, Trying

MEANING = {
    "win": "a tile beats the default",
    "loss": "the default wins",
    "known": "measured before",
    "fault": "nothing recorded",
    "untouched": "the time ended first",
}


class Display:
    """Two bars, points outside and tiles inside; on no terminal, only a line a finished point."""

    def __init__(self, points: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.outcomes: list[Outcome] = []
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.outer = self.bars.add_task("points", total=points)
        self.inner = self.bars.add_task("tiles", total=None)

    def __enter__(self) -> "Display":
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def show(self, event: Event) -> None:
        if isinstance(event, Compiling):
            self._inner(f"compiling {event.kernel}", event.done, event.total)
        elif isinstance(event, Trying):
            found = f", best {event.best:.1f} us" if event.best is not None else ""
            self._inner(f"{event.point}{found}", event.done, event.total)
        else:
            self.outcomes.append(event)
            self.bars.advance(self.outer)
            if event.kind != "known":
                self.console.print(line(event), highlight=False, markup=False, soft_wrap=True)

    def _inner(self, text: str, done: int, total: int) -> None:
        self.bars.update(self.inner, description=text, completed=done, total=total)

    def summary(self) -> None:
        """The end table: wins and faults one by one, the rest counted."""
        counts = Counter(o.kind for o in self.outcomes)
        table = Table(title="sweep", title_justify="left")
        for name in ("kernel", "case", "tokens", "default us", "best us", "gain", "tile"):
            table.add_column(
                name, justify="left" if name in ("kernel", "case", "tile") else "right"
            )
        for o in self.outcomes:
            if o.kind in ("win", "loss"):
                table.add_row(o.point.op, *_cells(o))
        if table.row_count:
            self.console.print(table)
        for o in self.outcomes:
            if o.kind == "fault":
                self.console.print(line(o), highlight=False, markup=False, soft_wrap=True)
        parts = [f"{counts[k]} {k} ({MEANING[k]})" for k in MEANING if counts[k]]
        self.console.print("; ".join(parts) or "nothing to measure", highlight=False)


def _cells(o: Outcome) -> Sequence[str]:
    assert o.us is not None
    assert o.default_us is not None
    tile = " ".join(f"{k}={v}" for k, v in o.tile.items()) if o.tile else "default"
    gain = f"{o.default_us / o.us - 1:+.1%}"
    case = f"{o.point.case!r} {o.point.dtype}"
    return case, str(o.point.tokens), f"{o.default_us:.2f}", f"{o.us:.2f}", gain, tile


def line(o: Outcome) -> str:
    """One outcome in one line."""
    head = f"{o.kind:9} {o.point}"
    if o.us is None or o.default_us is None:
        return f"{head}  {o.note}" if o.note else f"{head}  after {o.tried} tiles"
    tile = f"{dict(o.tile)}" if o.tile else "default"
    return (
        f"{head}  {o.us:.2f} us (default {o.default_us:.2f}, {o.default_us / o.us - 1:+.1%}) "
        f"{tile}; {o.tried} tried, {o.failed} failed"
    )
