"""`python -m bench.profile`: which kernels a program spends its GPU time in, and what changed.

    run OUT.json [--kernel NAME --model M --tokens T]      one op, called again and again
    run OUT.json -- nemotriton.generate MODEL --prompt ..  a module with its arguments, in-process
    diff BEFORE.json AFTER.json                            kernel by kernel, largest change first

Times are the device's own (on a machine without a GPU, the operators' CPU times). The profiler adds
a few microseconds to the host's side of every launch and none to a kernel.
"""

import contextlib
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity

from bench.cli import MODELS, application, points, run
from bench.rows import BenchError
from nemotriton import device
from nemotriton.autotune import parity
from nemotriton.autotune.provenance import commit, driver_version, today, version
from nemotriton.autotune.trial import Point, seed_of
from nemotriton.errors import require
from nemotriton.kernels.op import DTYPES

app = application(__doc__)
CALLS = 20
Trace = dict[str, Any]


def trace(work: Callable[[], None], what: str) -> Trace:
    """Profile `work`: calls and microseconds of every kernel, and where it ran."""
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    start = time.perf_counter()
    with torch.profiler.profile(activities=[activity]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    wall_ms = 1e3 * (time.perf_counter() - start)
    kernels = [
        {"name": event.key, "count": event.count, "us": round(_own_time(event, on_gpu), 3)}
        for event in profiler.key_averages()
        if _own_time(event, on_gpu) > 0
    ]
    head, dirty = commit()
    return {
        "suite": "profile",
        "what": what,
        "gpu": device.info().name,
        "driver": driver_version(),
        "torch": version("torch"),
        "triton": version("triton"),
        "commit": head,
        "dirty": dirty,
        "date": today(),
        "wall_ms": round(wall_ms, 3),
        "us": round(sum(k["us"] for k in kernels), 3),
        "kernels": sorted(kernels, key=lambda k: -k["us"]),
    }


def _own_time(event: Any, on_gpu: bool) -> float:
    return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)


def op_calls(point: Point) -> Callable[[], None]:
    """`CALLS` calls of an op on fresh inputs, compiled before."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = parity.generator(seed_of(point), where)
    args = point.spec.make(point.case, point.tokens, where, DTYPES[point.dtype], rng)
    point.spec.op(**args)

    def work() -> None:
        for _ in range(CALLS):
            point.spec.op(**args)

    return work


def module_call(command: list[str]) -> Callable[[], None]:
    """A module run as `python -m` would run it, in this process."""

    def work() -> None:
        with arguments(command), contextlib.suppress(SystemExit):
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)

    return work


@contextlib.contextmanager
def arguments(command: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = command
    try:
        yield
    finally:
        sys.argv = before


@app.command("run", context_settings={"ignore_unknown_options": True})
def run_command(
    out: Annotated[Path, typer.Argument(help="JSON file to write.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="A module and its arguments, after --.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="Profile this op instead of a module.")] = "",
    model: Annotated[str, typer.Option(help="Preset or directory, with --kernel.")] = MODELS,
    tokens: Annotated[str, typer.Option(help="Token count, with --kernel.")] = "64",
) -> None:
    """Profile one op or a whole program."""
    require(bool(kernel) != bool(command), "name a --kernel or, after --, a module: not both")
    if kernel:
        point = next(iter(points([kernel], model, "bf16", tokens)))
        found = trace(op_calls(point), f"{point}, {CALLS} calls")
    else:
        assert command is not None
        found = trace(module_call(command), " ".join(command))
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found['kernels'])} kernels, {found['us'] / 1e3:.3f} ms, in {out}", file=sys.stderr)


# -------------------------------------------------------------------------------------------- diff
def load(file: Path) -> Trace:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{file} cannot be read: {error}") from error
    is_trace = isinstance(found, dict) and isinstance(found.get("kernels"), list)
    require(is_trace, f"{file} is not a trace that `profile run` wrote", BenchError)
    return dict(found)


def difference(before: Trace, after: Trace, top: int) -> str:
    """A line a kernel: calls and time before and after, and the ratio; the total last."""
    lines = ["| kernel | calls | us before | us after | ratio |", "|---|--:|--:|--:|--:|"]
    old, new = ({k["name"]: k for k in t["kernels"]} for t in (before, after))
    zero = {"count": 0, "us": 0.0}
    pairs = [(n, old.get(n, zero), new.get(n, zero)) for n in {**old, **new}]
    pairs.sort(key=lambda p: -abs(p[2]["us"] - p[1]["us"]))
    for name, a, b in pairs[:top]:
        calls = str(a["count"]) if a["count"] == b["count"] else f"{a['count']} → {b['count']}"
        cells = [name[:80], calls, f"{a['us']:.1f}", f"{b['us']:.1f}", ratio(a["us"], b["us"])]
        lines.append("| " + " | ".join(cells) + " |")
    rest = pairs[top:]
    if rest:
        a_us, b_us = (sum(p[i]["us"] for p in rest) for i in (1, 2))
        lines.append(f"| {len(rest)} more | | {a_us:.1f} | {b_us:.1f} | {ratio(a_us, b_us)} |")
    total = (before["us"], after["us"])
    lines.append(f"| total | | {total[0]:.1f} | {total[1]:.1f} | {ratio(*total)} |")
    return "\n".join(lines) + "\n"


def ratio(before: float, after: float) -> str:
    if not before:
        return "new"
    return "gone" if not after else f"{after / before:.3f}"


@app.command("diff")
def diff_command(
    before: Annotated[Path, typer.Argument(help="A trace.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
    top: Annotated[int, typer.Option(help="Kernels to name.")] = 30,
) -> None:
    """What changed between two traces."""
    old, new = load(before), load(after)
    for name in ("what", "gpu", "torch", "triton"):
        if old.get(name) != new.get(name):
            print(f"{name}: {old.get(name)} before, {new.get(name)} after", file=sys.stderr)
    print(difference(old, new, top), end="")


if __name__ == "__main__":
    run(app)
