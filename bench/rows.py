"""One measured thing is one row: a flat JSON object that says how it came about.

suite kernel case tokens provider provider_version   what was measured; case holds the dtype too
us p20 p80 default_us gbps tflops roofline_pct ceiling tile       None where nothing was measured
status note                   "ok", "red" (wrong: no numbers), "not installed", "unsupported"
gpu ceilings driver triton torch commit dirty date clocks seed    where and when
command                                                           what measures this row again
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nemotriton.autotune.provenance import clocks, commit, today, version
from nemotriton.autotune.timing import Timing
from nemotriton.autotune.trial import Facts, Point, seed_of
from nemotriton.errors import NemotritonError
from nemotriton.kernels.op import DTYPES

Row = dict[str, Any]
NUMBERS = ("us", "p20", "p80", "default_us", "gbps", "tflops", "roofline_pct")
IDENTITY = ("suite", "kernel", "tokens", "provider", "gpu", "label")


class BenchError(NemotritonError):
    """A file of rows cannot be read, or a table has no place."""


def identity(row: Row) -> tuple[Any, ...]:
    """What makes two rows measurements of the same thing."""
    case = tuple(sorted((row.get("case") or {}).items()))
    return (*(row.get(k) for k in IDENTITY), case)


def environment(facts: Facts) -> Row:
    """The part of a row that is the same for a whole run."""
    head, dirty = commit()
    return {
        "gpu": facts.gpu.name,
        "ceilings": facts.ceilings.as_dict(),
        "driver": facts.driver,
        "triton": version("triton"),
        "torch": version("torch"),
        "commit": head,
        "dirty": dirty,
        "date": today(),
    }


def empty(suite: str, point: Point, provider: str, package: str, command: str) -> Row:
    """A row of `point` without numbers."""
    return {
        "suite": suite,
        "kernel": point.op,
        "case": point.key,
        "tokens": point.tokens,
        "provider": provider,
        "provider_version": version(package),
        **dict.fromkeys(NUMBERS),
        "ceiling": None,
        "tile": None,
        "status": "ok",
        "note": "",
        "clocks": {},
        "seed": seed_of(point),
        "command": command,
    }


def figures(point: Point, timing: Timing, facts: Facts) -> Row:
    """The numbers of a right and timed call, by the spec's own count of bytes and operations."""
    cost = point.spec.cost(point.case, point.tokens, DTYPES[point.dtype])
    least, ceiling = facts.ceilings.bound(cost, point.dtype)
    return {
        "us": round(timing.us, 3),
        "p20": round(timing.p20, 3),
        "p80": round(timing.p80, 3),
        "gbps": digits(cost.bytes / timing.us / 1e3),
        "tflops": digits(cost.flops / timing.us / 1e6),
        "roofline_pct": digits(100 * least / timing.us),
        "ceiling": ceiling,
        "clocks": clocks(),
    }


def digits(x: float) -> float:
    """x to four significant digits."""
    return float(f"{x:.4g}")


# ------------------------------------------------------------------------------------------- files
def append(row: Row, out: Path | None) -> None:
    if out is not None:
        with open(out, "a") as f:
            f.write(json.dumps(row) + "\n")


def load(files: Iterable[Path]) -> list[Row]:
    """The rows of JSONL files; of a thing measured twice, the last."""
    found: dict[tuple[Any, ...], Row] = {}
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError as error:
            raise BenchError(f"{file} cannot be read: {error}") from error
        for i, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                found[identity(row)] = row
            except (ValueError, AttributeError, TypeError) as error:
                raise BenchError(f"{file}:{i} is not a row: {line[:80]!r}") from error
    return list(found.values())


# ---------------------------------------------------------------------------------------- printing
COLUMNS = {
    "kernel": lambda r: r["kernel"],
    "case": lambda r: case_text(r["case"]),
    "tokens": lambda r: str(r["tokens"]),
    "provider": lambda r: r["provider"],
    "us": lambda r: number(r["us"], ".2f") or said(r),
    "spread": lambda r: spread(r),
    "default us": lambda r: number(r["default_us"], ".2f"),
    "GB/s": lambda r: number(r["gbps"], ".0f"),
    "TFLOP/s": lambda r: number(r["tflops"], ".1f"),
    "% of ceiling": lambda r: number(r["roofline_pct"], ".0f"),
    "ceiling": lambda r: r["ceiling"] or "",
}


def origin(found: Sequence[Row]) -> str:
    """Of which GPUs, dates and commits rows are, in words."""
    dates = ", ".join(sorted({r["date"] for r in found}))
    commits = ", ".join(sorted({(r["commit"] or "unknown")[:7] for r in found}))
    return f"{gpus(found)}, {dates}, commit {commits}"


def gpus(found: Iterable[Row]) -> str:
    """The GPUs that rows are of."""
    return " and ".join(sorted({r["gpu"] for r in found}))


def case_text(case: dict[str, Any]) -> str:
    return " ".join([*(f"{k}{v}" for k, v in case.items() if k != "dtype"), case["dtype"]])


def number(x: float | None, form: str) -> str:
    return "" if x is None else format(x, form)


def spread(row: Row) -> str:
    if row["p20"] is None or not row["us"]:
        return ""
    return f"±{50 * (row['p80'] - row['p20']) / row['us']:.1f} %"


def said(row: Row) -> str:
    """What stands in the place of a number."""
    return "parity failed" if row["status"] == "red" else row["status"]


def markdown(rows: Sequence[Row]) -> str:
    """A table with a line a row, and below it what was wrong."""
    table = [list(COLUMNS), ["---"] * 4 + ["--:"] * 6 + ["---"]]
    table += [[cell(row) for cell in COLUMNS.values()] for row in rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    notes = [
        f"* {r['kernel']} {case_text(r['case'])} T={r['tokens']} {r['provider']}: {r['note']}"
        for r in rows
        if r["note"]
    ]
    return "\n".join([text, "", *notes]).rstrip() + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """Every field of every row; objects as JSON."""
    names = list(dict.fromkeys(k for row in rows for k in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = (row.get(n) for n in names)
        writer.writerow([json.dumps(v) if isinstance(v, dict) else v for v in values])
    return out.getvalue()
