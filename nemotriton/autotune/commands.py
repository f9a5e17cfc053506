"""The commands beside `compile`: list, sweep, show, check and merge.

What was asked for goes to stdout, everything else to stderr. Exit codes: 0 done, 1 something is
wrong with a kernel or a file, 2 wrong usage, 130 stopped by Ctrl-C (what was measured is kept).
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemotriton.autotune import cache
from nemotriton.errors import require

if TYPE_CHECKING:
    from nemotriton.autotune.review import Row
    from nemotriton.autotune.trial import Runner
    from nemotriton.model.config import ModelConfig

COLUMNS = ["kernel", "case", "tokens", "us", "default us", "gain"]
COLUMNS += ["GB/s", "TFLOP/s", "roofline", "status", "tile"]
MODELS = "super-120b,nano-30b,h-8b"
Kernels = Annotated[list[str] | None, typer.Option("--kernel", help="Only this op (repeatable).")]
Models = Annotated[str, typer.Option("--model", help="Presets or directories, comma-separated.")]
Gpu = Annotated[str | None, typer.Option("--gpu", help="Folder name, such as nvidia_h200.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="Of bf16, fp16, fp32; comma-separated.")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Tuned files (default tune_cache/).")]


def list_command(
    kernel: Kernels = None,
    model: Models = MODELS,
    gpu: Gpu = None,
    dtype: Dtypes = "bf16",
    folder: Folder = None,
) -> None:
    """Kernels and the cases a model needs, with how many token buckets are tuned."""
    from nemotriton.autotune import review

    where = folder or cache.root()
    slug = _gpu(gpu, review.gpus(where))
    found = review.coverage(
        kernel or [], configs(model), parse_dtypes(dtype), lambda k: cache.path_of(slug, k, where)
    )
    if slug not in review.gpus(where):
        known = ", ".join(review.gpus(where)) or "none"
        print(f"no files for {slug} in {where} yet; there are: {known}", file=sys.stderr)
    print(f"{'kernel':22} {'case':36} {'dtype':6} buckets on {slug}")
    for name, case, kind, counts in found:
        text = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        print(f"{name:22} {case!r:36} {kind:6} {text}")


def sweep_command(
    kernel: Kernels = None,
    model: Models = MODELS,
    tokens: Annotated[str, typer.Option(help="Token counts, comma-separated; default all.")] = "",
    top: Annotated[int, typer.Option(help="Only a kernel's largest cases; 0: all.", min=0)] = 0,
    dtype: Dtypes = "bf16",
    budget: Annotated[str, typer.Option(help="Stop after this long: 90s, 10m, 2h.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes that compile; 0: none.")] = max(
        (os.cpu_count() or 1) - 2, 2
    ),
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Keep what is known.")] = True,
    dry_run: Annotated[bool, typer.Option(help="Only say what would be measured.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write (default tune_cache/).")] = None,
) -> None:
    """Measure every tile on this GPU, keep the fastest right one. Run again to go on."""
    from nemotriton.autotune import offline, store
    from nemotriton.autotune.child import ChildRunner
    from nemotriton.autotune.display import Display
    from nemotriton.autotune.sweep import Outcome, Sweep, nothing, plan
    from nemotriton.autotune.trial import cuda_runner

    seconds = parse_budget(budget)
    points = plan(kernel or [], configs(model), parse_dtypes(dtype), parse_tokens(tokens), top)
    require(
        bool(points),
        f"no kernel has a case for --model {model} --dtype {dtype} --tokens {tokens or 'any'}: "
        "give others.",
    )
    if dry_run:
        for p in points:
            print(f"{p}  {len(store.candidates(p))} tiles")
        return
    _need_gpu()
    deadline = time.monotonic() + seconds
    runner = ChildRunner(cuda_runner)
    compiler = (lambda todo: offline.run(todo, max(jobs, 2))) if jobs > 0 else nothing
    sweep = Sweep(runner, out or cache.root(), deadline, compiler, fresh=not resume)
    stopped = False
    with contextlib.closing(runner), Display(len(points)) as display:
        try:
            for event in sweep.run(points):
                display.show(event)
        except KeyboardInterrupt:
            stopped = True
    met = {o.point for o in display.outcomes}
    display.outcomes += [Outcome(p, "untouched") for p in points if p not in met]
    display.summary()
    if stopped:
        print("stopped; what was measured is kept: run the same command again", file=sys.stderr)
    faulty = any(o.kind == "fault" for o in display.outcomes)
    raise typer.Exit(130 if stopped else 1 if faulty else 0)


def show_command(
    kernel: Kernels = None,
    gpu: Gpu = None,
    form: Annotated[
        str, typer.Option("--format", help="'md' or 'json' (one object a row).")
    ] = "md",
    folder: Folder = None,
) -> None:
    """The best tiles: time, gain over the default, and share of what the GPU can do."""
    from nemotriton.autotune import review

    require(form in ("md", "json"), f"--format {form}: give md or json.")
    where = folder or cache.root()
    found: list[Row] = []
    for file in review.files(where, kernel or [], _gpu(gpu, review.gpus(where))):
        why = review.faults(file)
        if why:
            print(f"{file}: {'; '.join(why)}: left out", file=sys.stderr)
        else:
            found += review.rows(file)
    if form == "json":
        for row in found:
            print(json.dumps(asdict(row)))
        return
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|--:|--:|--:|--:|--:|--:|--:|---|---|")
    for row in found:
        print("| " + " | ".join(_cells(row)) + " |")


def _cells(row: "Row") -> Sequence[str]:
    def number(x: float | None, form: str) -> str:
        return "" if x is None else format(x, form)

    gain = row.default_us / row.us - 1 if row.us and row.default_us else None
    share = f"{row.roofline_pct:.0f} % of {row.ceiling}" if row.roofline_pct is not None else ""
    return (
        row.kernel,
        " ".join(f"{k}={v}" for k, v in row.case.items()),
        str(row.upto),
        number(row.us, ".2f"),
        number(row.default_us, ".2f"),
        number(gain, "+.1%"),
        number(row.gbps, ".0f"),
        number(row.tflops, ".1f"),
        share,
        row.status,
        " ".join(f"{k}={v}" for k, v in row.tile.items()) or "default",
    )


def check_command(
    kernel: Kernels = None,
    gpu: Gpu = None,
    gpu_run: Annotated[bool, typer.Option("--gpu-run", help="Measure this GPU's again.")] = False,
    folder: Folder = None,
) -> None:
    """Validate tuned files: schema, source, tiles, order; --gpu-run: still right, still faster.

    Needs no GPU otherwise. Exits 1 when anything is wrong."""
    from nemotriton.autotune import review

    where = folder or cache.root()
    named = None if gpu is None else _gpu(gpu, review.gpus(where))
    found = review.files(where, kernel or [], named)
    bad = {file: why for file in found if (why := review.faults(file))}
    for file, why in bad.items():
        for text in why:
            print(f"{file.relative_to(where)}: {text}")
    broken = sum(len(why) for why in bad.values())
    if gpu_run:
        broken += _remeasure([f for f in found if f not in bad])
    print(f"{len(found)} files, {broken} faults", file=sys.stderr)
    raise typer.Exit(1 if broken else 0)


def _remeasure(found: Sequence[Path]) -> int:
    from nemotriton import device
    from nemotriton.autotune import review
    from nemotriton.autotune.child import ChildRunner
    from nemotriton.autotune.trial import cuda_runner

    _need_gpu()
    mine = [f for f in found if f.parent.name == device.info().slug]
    broken = 0
    runner: Runner = ChildRunner(cuda_runner)
    with contextlib.closing(runner):
        for file in mine:
            for point, why in review.remeasure(file, runner):
                print(f"{point}: {why or 'holds'}", flush=True)
                broken += why is not None
    print(f"measured again: {len(mine)} files of {device.info().slug}", file=sys.stderr)
    return broken


def merge_command(
    a: Annotated[Path, typer.Argument(help="Folder of tuned files.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; may be A or B.")],
) -> None:
    """Combine two folders: of each bucket the faster, measured before any other.

    Exits 1 when a file had to be left out."""
    from nemotriton.autotune import review

    written, notes = review.merge(a, b, out)
    for note in notes:
        print(f"left out: {note}", file=sys.stderr)
    print(f"{written} files written to {out}", file=sys.stderr)
    raise typer.Exit(1 if notes else 0)


# ----------------------------------------------------------------------------------------- options
def configs(model: str) -> "list[ModelConfig]":
    """The models named by comma-separated presets and directories (or config.json files)."""
    from nemotriton.model.config import PRESETS, ModelConfig

    return [
        ModelConfig.from_json(Path(name))
        if name not in PRESETS and Path(name).exists()
        else ModelConfig.preset(name)
        for name in model.split(",")
    ]


def parse_budget(text: str) -> float:
    """Seconds in `90s`, `10m`, `2h` or `90`; infinity for nothing."""
    if not text:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    require(found is not None, f"--budget {text}: write it like 90s, 10m or 2h.")
    assert found is not None
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_dtypes(text: str) -> list[str]:
    """The names of `bf16,fp32`."""
    parts = [part.strip() for part in text.split(",")]
    good = all(part in ("bf16", "fp16", "fp32") for part in parts)
    require(good, f"--dtype {text}: give bf16, fp16, fp32, or several with commas.")
    return parts


def parse_tokens(text: str) -> list[int]:
    """The positive numbers of `1,64,8192`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    good = all(part.isdecimal() and int(part) > 0 for part in parts)
    require(good, f"--tokens {text}: write positive numbers, such as 1,64,8192.")
    return [int(part) for part in parts]


def _gpu(named: str | None, known: Sequence[str]) -> str:
    """The GPU to speak of: as named, else this machine's, else the only one there are files for."""
    if named is not None:
        require(
            named == re.sub(r"[^a-z0-9_]", "", named),
            f"--gpu {named}: write the folder's name; there are: {', '.join(known) or 'none'}.",
        )
        near = [gpu for gpu in known if gpu.endswith(f"_{named}")]  # h200 of nvidia_h200
        return near[0] if named not in known and len(near) == 1 else named
    from nemotriton import device

    here = device.info()
    if here.capability != (0, 0):
        return here.slug
    choice = ", ".join(known) or "none yet"
    require(len(known) == 1, f"no CUDA device here: name a --gpu; there are: {choice}.")
    return known[0]


def _need_gpu() -> None:
    import torch

    require(
        torch.cuda.is_available(),
        "no CUDA device: tiles are measured on the GPU they are for. Without one, `compile` and "
        "`check` work, and `sweep --dry-run` says what would be measured.",
    )
