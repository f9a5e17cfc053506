"""`python -m bench.stalls`: what a kernel of `bench.goals` waits for, by Nsight Compute's counters.

Every goal is launched once, cold, under `ncu` (which must be installed and be allowed to read the
counters). A line a kernel: how busy memory, L2, the tensor cores and the issue slots are, how many
warps a multiprocessor holds, registers, and the three most frequent reasons for which warps wait.
Times under the profiler are longer than those of `bench.goals`, whose graph they lack.
"""

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.cli import application, need_gpu, run
from bench.goal_list import Goal, goals
from bench.rows import BenchError
from nemotriton.autotune.trial import Point, input_sets
from nemotriton.errors import require
from nemotriton.kernels.op import SPECS

app = application(__doc__)
MARKER = "erfc"  # the name of a kernel that no op launches: it stands behind every goal
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats", "SchedulerStats")
METRICS = {
    "us": "gpu__time_duration.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
    "programs": "launch__grid_size",
}
STALL = re.compile(r"issue_stalled_(\w+?)(_not_issued)?_per_warp_active\.pct$|"
                   r"issue_stalled_(\w+?)(_not_issued)?_per_issue_active\.ratio$")  # fmt: skip
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
TOP = 3  # reasons named


def wanted(areas: list[str] | None, only: str) -> list[Goal]:
    """Goals of these areas whose name holds `only`."""
    found = [g for g in goals() if (not areas or g.area in areas) and only in name(g)]
    require(bool(found), f"no goal of {areas or 'any area'} is called {only!r}: see bench.goals")
    return found


def name(goal: Goal) -> str:
    return f"{goal.op}: {goal.label}, {goal.tokens:,} tokens"


# ------------------------------------------------------------------------------ under the profiler
def launch(chosen: list[Goal], where: torch.device) -> None:
    """Each goal once inside the profiler's range, after a first call that compiles."""
    cell = torch.zeros(1, device=where)
    cell.erfc_()
    for goal in chosen:
        point = Point(goal.op, goal.case, goal.tokens, SPECS[goal.op].dtypes[0])
        sets, _ = input_sets(point, where, goal.make)
        for args in sets[:2]:
            point.spec.op.triton(**args)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        point.spec.op.triton(**sets[-1])
        cell.erfc_()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del sets
        torch.cuda.empty_cache()


def profiled(arguments: list[str]) -> str:
    """ncu's table of this module's launches, in CSV."""
    ncu = shutil.which("ncu")
    require(ncu is not None, "ncu (Nsight Compute) is not on the PATH", BenchError)
    sections = [word for s in SECTIONS for word in ("--section", s)]
    metrics = ["--metrics", ",".join(METRICS.values())]
    command = [
        *(str(ncu), "--profile-from-start", "off", "--clock-control", "none", "--csv"),
        *("--page", "raw", *sections, *metrics),
        *(sys.executable, "-m", "bench.stalls", "--inside", *arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or '"ID"' not in done.stdout:
        said = (done.stdout + done.stderr).strip().splitlines()[-5:]
        raise BenchError("ncu gave no counters: " + " / ".join(said))
    return done.stdout


# ---------------------------------------------------------------------------------------- the table
Kernel = dict[str, str]


def kernels(text: str) -> Iterator[Kernel]:
    """ncu's rows, each a kernel: column to value; times in microseconds."""
    start = text.index('"ID"')
    rows = list(csv.DictReader(io.StringIO(text[start:])))
    units = rows[0]
    time = METRICS["us"]
    scale = UNITS.get(units.get(time) or "", 1e-3)
    for row in rows[1:]:
        if row.get(time):
            row[time] = str(scale * number(row[time]))
        yield row


def number(text: str) -> float:
    return float(text.replace(",", ""))


def by_goal(found: Iterator[Kernel], chosen: list[Goal]) -> Iterator[tuple[Goal, Kernel]]:
    """Each kernel with the goal that launched it."""
    left = iter(chosen)
    goal = next(left, None)
    for kernel in found:
        if MARKER in kernel["Kernel Name"]:
            goal = next(left, None)
        elif goal is not None:
            yield goal, kernel


def reasons(kernel: Kernel) -> str:
    """The most frequent states of waiting warps, with their shares of all warps' time."""
    shares: dict[str, float] = {}
    for column, value in kernel.items():
        matched = STALL.search(column or "")
        if matched and value and "not_issued" not in column:
            reason = (matched[1] or matched[3]).replace("_", " ")
            shares[reason] = max(shares.get(reason, 0.0), number(value))
    shares.pop("selected", None)
    total = sum(shares.values()) or 1.0
    top = sorted(shares.items(), key=lambda item: -item[1])[:TOP]
    return ", ".join(f"{reason} {100 * share / total:.0f} %" for reason, share in top)


def cell(kernel: Kernel, column: str) -> str:
    text = kernel.get(METRICS[column]) or ""
    if not text:
        return ""
    form = ".1f" if column in ("us", "warps") else ",.0f"
    return format(number(text), form)


def table(pairs: Iterator[tuple[Goal, Kernel]]) -> str:
    head = ["figure", "kernel", *METRICS, "warps wait for"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * len(METRICS) + "---|"]
    for goal, kernel in pairs:
        cells = [name(goal), kernel["Kernel Name"].split("(")[0]]
        cells += [cell(kernel, column) for column in METRICS]
        lines.append("| " + " | ".join([*cells, reasons(kernel)]) + " |")
    return "\n".join(lines) + "\n"


@app.command()
def main(
    area: Annotated[
        list[str] | None, typer.Option(help="Only norm, linear, conv, state, scan, ...")
    ] = None,
    only: Annotated[str, typer.Option(help="Goals whose name holds this.")] = "",
    keep: Annotated[Path | None, typer.Option(help="ncu's own table, as CSV.")] = None,
    inside: Annotated[bool, typer.Option("--inside", hidden=True)] = False,
) -> None:
    """Counters of the goals' kernels."""
    chosen = wanted(area, only)
    if inside:
        launch(chosen, torch.device("cuda", torch.cuda.current_device()))
        return
    need_gpu()
    words = [word for a in area or [] for word in ("--area", a)]
    text = profiled([*words, *(["--only", only] if only else [])])
    if keep is not None:
        keep.write_text(text)
    print(table(by_goal(kernels(text), chosen)), end="")


if __name__ == "__main__":
    run(app)
