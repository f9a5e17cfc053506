"""`python -m bench.goals`: the figures that the kernels are to reach, one line each.

Exact shapes (`goal_inputs`), no pads; timed like everything here: behind the op's parity gate,
cold, from a CUDA graph. `reach` is what is asked for, `peer` the best other implementation's time,
both in microseconds.
"""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

from bench import rows
from bench.cli import Out, application, need_gpu, run
from bench.goal_list import Goal, goals
from bench.rows import Row
from nemotriton.autotune import parity
from nemotriton.autotune.timing import CudaStopwatch, Timing, race
from nemotriton.autotune.trial import (
    Facts,
    Gate,
    Point,
    TileRunner,
    forced,
    input_sets,
    reason,
    same_bits,
)
from nemotriton.errors import require
from nemotriton.kernels.moe_combine import adds_atomically
from nemotriton.kernels.op import SPECS

app = application(__doc__)
GATED = 64  # tokens of the gate, on the spec's own ragged inputs: experts in float64 take seconds
ATOMIC = "rows are added by atomic adds: two runs need not give equal bits"
COLUMNS = ("figure", "tokens", "us", "spread", "GB/s", "TFLOP/s", "% of ceiling", "reach", "peer")


def measure(wanted: list[Goal], where: torch.device) -> Iterator[Row]:
    """A row for every goal, right or red."""
    watch = CudaStopwatch(where)
    facts = TileRunner(where, watch).facts()
    common = rows.environment(facts)
    for goal in wanted:
        point = Point(goal.op, goal.case, goal.tokens, SPECS[goal.op].dtypes[0])
        line = "NEMOTRITON_COMBINE=atomic " * atomic(goal)
        line += f"python -m bench.goals --area {goal.area}"
        row = rows.empty("goals", point, "nemotriton", "nemotriton", line) | common
        row |= {"label": goal.label, "area": goal.area, "reach": goal.reach, "peer": goal.peer}
        if atomic(goal):
            row |= {"label": f"{goal.label}, atomic", "note": ATOMIC}
        try:
            yield row | one(goal, point, watch, facts)
        except Exception as error:  # one kernel that cannot run must not end the others' figures
            yield row | {"status": "red", "note": reason(error)}
        torch.cuda.empty_cache()


def one(goal: Goal, point: Point, watch: CudaStopwatch, facts: Facts) -> Row:
    """Gate and time one goal."""
    where = watch.where
    verdict = Gate(point, where, min(GATED, goal.tokens)).verdict(goal.tile)
    if not verdict.ok:
        return {"status": "red", "note": verdict.detail}
    torch.cuda.empty_cache()
    with forced(point.op, goal.tile):
        return timed(goal, point, watch, facts)


def timed(goal: Goal, point: Point, watch: CudaStopwatch, facts: Facts) -> Row:
    """Run it twice for its bits, then time it beside its rival."""
    sets, repeat = input_sets(point, watch.where, goal.make)
    first, second = (parity.run(point.spec, sets[0]) for _ in range(2))
    for name, value in first.items():
        if not (atomic(goal) or same_bits(value, second[name])):
            return {"status": "red", "note": f"{name} differs between two runs"}
    del first, second
    work = [[lambda a=a: point.spec.op.triton(**a) for a in sets]]  # type: ignore[misc]
    if goal.rival is not None:
        theirs = [dict(a) for a in sets]
        work.append([lambda a=a: goal.rival(a) for a in theirs])  # type: ignore[misc]
    return numbers(goal, point, race([watch.capture(calls, repeat) for calls in work]), facts)


def atomic(goal: Goal) -> bool:
    """Whether its rows are added as they come (`moe_combine`), so that bits may differ."""
    if goal.op != "run_experts_packed" or not adds_atomically():
        return False
    return not SPECS[goal.op].default(goal.case, goal.tokens)["ASYNC"]  # which stores all rows


def numbers(goal: Goal, point: Point, times: list[Timing], facts: Facts) -> Row:
    """The row's figures; a rival's time turns `reach` from a share into microseconds."""
    found: Row = rows.figures(point, times[0], facts)
    if goal.cost is not None:
        least, ceiling = facts.ceilings.bound(goal.cost, point.dtype)
        us = times[0].us
        found |= {
            "gbps": rows.digits(goal.cost.bytes / us / 1e3),
            "tflops": rows.digits(goal.cost.flops / us / 1e6),
            "roofline_pct": rows.digits(100 * least / us),
            "ceiling": ceiling,
        }
    if goal.rival is not None:
        rival = times[1].us
        found |= {"reach": rival / goal.reach, "peer": f"{goal.peer} {rival:.1f}"}
    return found


def table(found: list[Row]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * 7 + "---|"]
    for r in found:
        us: Any = r["us"]
        mark = "" if us is None else " met" if us <= r["reach"] else f" ({us / r['reach']:.2f}x)"
        cells = [
            f"{r['kernel']}: {r['label']}",
            f"{r['tokens']:,}",
            rows.number(us, ".2f") or rows.said(r),
            rows.spread(r),
            rows.number(r["gbps"], ".0f"),
            rows.number(r["tflops"], ".1f"),
            rows.number(r["roofline_pct"], ".0f"),
            f"{r['reach']:.1f}{mark}",
            r["peer"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = [
        f"* {r['kernel']} {r['label']} T={r['tokens']}: {r['note']}" for r in found if r["note"]
    ]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


@app.command()
def main(
    area: Annotated[
        list[str] | None, typer.Option(help="Only norm, linear, conv, state, scan, ...")
    ] = None,
    out: Out = None,
) -> None:
    """Measure the goals; exits 1 when a gate is red."""
    wanted = [g for g in goals() if not area or g.area in area]
    known = ", ".join(dict.fromkeys(g.area for g in goals()))
    require(bool(wanted), f"no goal has --area {' '.join(area or [])}; there are: {known}")
    need_gpu()
    found: list[Row] = []
    for row in measure(wanted, torch.device("cuda", torch.cuda.current_device())):
        found.append(row)
        rows.append(row, out)
        said = rows.number(row["us"], ".2f") or f"{rows.said(row)}: {row['note']}"
        print(f"{row['kernel']} {row['label']} T={row['tokens']}: {said}", file=sys.stderr)
    print(table(found), end="")
    raise typer.Exit(1 if any(r["status"] == "red" for r in found) else 0)


if __name__ == "__main__":
    run(app)
