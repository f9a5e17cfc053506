"""The kernel tables of pages: the latest row of every figure of `bench.goals`.

    <!-- figures: kernels -->          a line for each kernel and input
    <!-- figures: kernels short -->    without trees, six tokens and small states
    (the table)
    <!-- end of figures -->

Columns hold one value for each number of tokens. `bench.performance` writes the pages.
"""

import re
from collections.abc import Sequence

from bench import rows
from bench.goal_list import Goal, goals
from bench.rows import Row

HEAD = (
    "| at Super's widths | tokens | us | % of its ceiling | asked for, us | others, us |\n"
    "|---|--:|--:|--:|--:|---|"
)
LEFT_OUT = ("tree", "6 tokens", "int8", "fp32 states of")
BEYOND = 105  # %: e4m3 products, whose rows know the rate of bf16 ones only
NAMED = re.compile(r"(.*?) ?(\d[\d.-]*)$")


def kernel_table(found: Sequence[Row], short: bool = False) -> str:
    """The table, then where and when its rows were measured, and by what."""
    latest = {
        (r["kernel"], r["label"], r["tokens"]): r
        for r in found
        if r["suite"] == "goals" and r["us"] is not None
    }
    groups: dict[tuple[str, str], list[Goal]] = {}
    for goal in goals():
        if not (short and any(word in goal.label for word in LEFT_OUT)):
            groups.setdefault((goal.op, goal.label), []).append(goal)
    lines, used = [HEAD], []
    for (op, label), mine in groups.items():
        mine.sort(key=lambda goal: goal.tokens)
        measured = [latest.get((op, label, goal.tokens)) for goal in mine]
        lines.append(_line(f"`{op}`, {label}", mine, measured))
        used += [row for row in measured if row is not None]
    if used:
        lines += ["", f"One {rows.origin(used)}: `python -m bench.goals`."]
    return "\n".join(lines) + "\n"


def _line(name: str, mine: Sequence[Goal], measured: Sequence[Row | None]) -> str:
    def each(key: str) -> str:
        return " / ".join("-" if r is None or r[key] is None else _us(r[key]) for r in measured)

    shares = [None if r is None else r["roofline_pct"] for r in measured]
    share = " / ".join("-" if x is None or x > BEYOND else f"{x:.0f}" for x in shares)
    tokens = " / ".join(f"{goal.tokens:,}" for goal in mine)
    others = _others([goal.peer if r is None else r["peer"] for goal, r in zip(mine, measured)])
    return f"| {name} | {tokens} | {each('us')} | {share} | {each('reach')} | {others} |"


def _us(us: float) -> str:
    return f"{us:,.{0 if us >= 100 else 1}f}"


def _others(told: Sequence[str]) -> str:
    """ "Marlin 48.6", "Marlin 114" -> "Marlin 48.6 / 114"."""
    if not any(told):
        return ""
    split = [NAMED.match(x) for x in told]
    names = {m[1] for m in split if m}
    if len(names) != 1:
        return " / ".join(x or "-" for x in told)
    return f"{names.pop()} " + " / ".join(m[2] if m else "-" for m in split)
