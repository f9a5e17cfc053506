"""How an audit is told: aligned columns for people, one JSON object for programs; on stdout."""

import json
from collections.abc import Iterable, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> list[str]:
    """Lines of aligned columns; the first `left`, and one without a head, start at their left."""
    cells = [[str(c) for c in head], *([_cell(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return [
        "  ".join(
            c.ljust(w) if i < left or not head[i] else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2e}" if isinstance(value, float) else str(value)


def tell(found: dict[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print an audit's result, the object or the lines."""
    if as_json:
        print(json.dumps(found, ensure_ascii=False), flush=True)
    else:
        for line in lines:
            print(line, flush=True)
