"""Measured rows inside pages: tables between marker lines, written anew from files of rows.

    <!-- rows: ssd_prefill; ssm_replay STATE=fp32 NEW=4 -->
    (the table)
    <!-- end of rows -->

A marker names ops, each with the axes of its case that rows must have. Nothing between the lines is
written by hand, so a page cannot say what was not measured.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import rows
from bench.rows import BenchError, Row
from nemotriton.errors import require

MARKED = re.compile(r"(<!-- rows: (.*?) -->\n).*?(<!-- end of rows -->)", re.DOTALL)
HEAD = "| op | what | tokens | us | of its ceiling | other, us |\n|---|---|--:|--:|--:|--:|"


def write_pages(folder: Path, found: Sequence[Row]) -> None:
    """Write the tables of every page in `folder` anew; BenchError where it has no marker."""
    pages = [p for p in sorted(folder.rglob("*.md")) if MARKED.search(p.read_text())]
    require(bool(pages), f"no page in {folder} has a line <!-- rows: OP -->", BenchError)
    for page in pages:
        page.write_text(written(page.read_text(), found))


def written(text: str, found: Sequence[Row]) -> str:
    """A page's text with its tables made from `found`."""
    return MARKED.sub(lambda m: m[1] + table(list(chosen(m[2], found))) + m[3], text)


def chosen(marker: str, found: Sequence[Row]) -> Iterable[Row]:
    """The rows of ours that a marker names, in its order; of a figure measured twice, the last.

    A figure is an op's, by its label where it has one: a case may have got another axis since."""
    for part in marker.split(";"):
        name, *axes = part.split()
        wanted = dict(axis.split("=", 1) for axis in axes)
        mine = [
            r
            for r in found
            if r["kernel"] == name
            and r["provider"] == "nemotriton"
            and r["us"] is not None
            and all(str(r["case"].get(k)) == v for k, v in wanted.items())
        ]
        require(bool(mine), f"no measured row of {part.strip()}", BenchError)
        yield from {figure(r): r for r in mine}.values()


def figure(row: Row) -> tuple[str, int]:
    """What a row of an op is the figure of."""
    return row.get("label") or rows.case_text(row["case"]), row["tokens"]


def table(found: Sequence[Row]) -> str:
    """A line a row, then where, when and by which commands they were measured."""
    lines = [HEAD]
    for r in found:
        share = f"{r['roofline_pct']:.0f} % of {r['ceiling']}" if r["roofline_pct"] else ""
        us = f"{r['us']:,.{0 if r['us'] >= 1000 else 1}f}"
        what = r.get("label") or rows.case_text(r["case"])
        cells = [r["kernel"], what, f"{r['tokens']:,}", us, share, r.get("peer") or ""]
        lines.append("| " + " | ".join(cells) + " |")
    commands = "; ".join(f"`{c}`" for c in dict.fromkeys(r["command"] for r in found))
    return "\n".join([*lines, "", f"One {rows.origin(found)}: {commands}.", ""])
