"""Reading tuned files: what is tuned, how good it is, whether a file may be shipped."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nemotriton.autotune import cache, store
from nemotriton.autotune.ceilings import Ceilings
from nemotriton.autotune.child import MeasuringFailed
from nemotriton.autotune.store import GAIN, Data
from nemotriton.autotune.sweep import plan
from nemotriton.autotune.trial import Point, Runner
from nemotriton.commandline import UsageError, need_known
from nemotriton.errors import NemotritonError, require
from nemotriton.kernels.op import DTYPES, SPECS, Case, Tile
from nemotriton.model.config import ModelConfig


class TuneCacheError(NemotritonError):
    """A tuned file or folder is missing or cannot be used."""


def gpus(folder: Path) -> list[str]:
    """The GPUs that a folder has files for."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []


def files(folder: Path, kernels: Sequence[str] = (), gpu: str | None = None) -> list[Path]:
    """The tuned files of a folder, of these kernels and this GPU if named."""
    for name in kernels:
        need_known("kernel", name, sorted(SPECS))
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder of tuned files: give another.")
    if gpu is not None:
        need_known("GPU folder", gpu, gpus(folder))
    found = (p for g in ([gpu] if gpu else gpus(folder)) for p in sorted((folder / g).glob("*")))
    return [p for p in found if p.name[0] != "." and (not kernels or p.stem in kernels)]


def faults(file: Path) -> list[str]:
    """Everything wrong with one file, in words."""
    if file.suffix != ".json":
        return ["is not a tuned file (*.json)"]
    spec = SPECS.get(file.stem)
    if spec is None:
        return [f"no kernel {file.stem!r}; there are: {', '.join(sorted(SPECS))}"]
    data = store.read(file)
    if data == {}:
        return ["is not JSON"]
    return store.faults(data, spec, file.parent.name)


# ---------------------------------------------------------------------------------------- the rows
@dataclass(frozen=True, slots=True)
class Row:
    """One bucket of a file, with the rates that its cost gives; None where unknown."""

    kernel: str
    case: Data
    upto: int
    tile: Data
    status: str
    us: float | None
    default_us: float | None
    gbps: float | None
    tflops: float | None
    roofline_pct: float | None
    ceiling: str | None


def rows(file: Path) -> Iterator[Row]:
    """The buckets of a file that `faults` finds nothing wrong with."""
    data = store.read(file)
    ceilings = _ceilings(data["gpu"])
    for point, b in _points(file.stem, data):
        us, cost = b.get("us"), point.spec.cost(point.case, point.tokens, DTYPES[point.dtype])
        least = ceilings.bound(cost, point.dtype) if ceilings else None
        yield Row(
            kernel=file.stem,
            case=point.key,
            upto=b["upto"],
            tile=b["tile"],
            status=b.get("status", ""),
            us=us,
            default_us=b.get("default_us"),
            gbps=cost.bytes / us / 1e3 if us else None,
            tflops=cost.flops / us / 1e6 if us else None,
            roofline_pct=100 * least[0] / us if us and least else None,
            ceiling=least[1] if least else None,
        )


def _ceilings(gpu: Data) -> Ceilings | None:
    names = [f.name for f in fields(Ceilings)]
    if not all(isinstance(gpu.get(n), int | float) and gpu[n] > 0 for n in names):
        return None
    return Ceilings(**{n: float(gpu[n]) for n in names})


def _points(kernel: str, data: Any) -> Iterator[tuple[Point, Data]]:
    for entry in data["entries"]:
        axes = {k: v for k, v in entry["case"].items() if k != "dtype"}
        for b in entry["tokens"]:
            yield Point(kernel, Case(**axes), b["upto"], entry["case"]["dtype"]), b


def coverage(
    kernels: Sequence[str], configs: Sequence[ModelConfig], dtypes: Sequence[str], file_of: Any
) -> list[tuple[str, Case, str, dict[str, int]]]:
    """For each kernel, case and dtype the number of token buckets by status; "default" also where
    there is none.

    `file_of(kernel)` is the path of the kernel's tuned file."""
    groups: dict[tuple[str, Case, str], list[Point]] = {}
    for p in plan(kernels, configs, dtypes):
        groups.setdefault((p.op, p.case, p.dtype), []).append(p)
    status = {k: _statuses(file_of(k)) for k in {kernel for kernel, _, _ in groups}}
    return [
        (kernel, case, dtype, dict(Counter(status[kernel].get(p, "default") for p in points)))
        for (kernel, case, dtype), points in groups.items()
    ]


def _statuses(file: Path) -> dict[Point, str]:
    if not file.exists() or faults(file):
        return {}
    return {point: b["status"] for point, b in _points(file.stem, store.read(file))}


# ------------------------------------------------------------------------------------ on the device
def remeasure(file: Path, runner: Runner) -> Iterator[tuple[Point, str | None]]:
    """Gate and time every measured bucket of a file again: each point, and what no longer holds."""
    for point, b in _points(file.stem, store.read(file)):
        if b.get("status") != "measured":
            continue
        tile = Tile(**b["tile"]) if b["tile"] else point.default
        why = runner.trial(point, tile).failed or runner.vet(point, tile)
        if why is None and b["tile"]:
            why = _still_faster(point, tile, runner)
        yield point, why


def _still_faster(point: Point, tile: Tile, runner: Runner) -> str | None:
    try:
        mine, default = runner.race(point, [tile, point.default])
    except MeasuringFailed as error:
        return str(error)
    if mine.p20 < (1 - GAIN) * default.p80:
        return None
    return f"{mine.us:.2f} us is no gain of {GAIN:.0%} over the default's {default.us:.2f}"


def merge(a: Path, b: Path, out: Path) -> tuple[int, list[str]]:
    """Combine two folders into `out` by time: how many files were written, what was left out."""
    for folder in (a, b):
        require(
            folder.is_dir(), f"{folder} is no folder of tuned files: give another.", TuneCacheError
        )
    written, notes = 0, []
    names = sorted(
        {(p.parent.name, p.stem) for x in (a, b) for p in files(x) if p.suffix == ".json"}
    )
    for gpu, kernel in names:
        if kernel not in SPECS:
            notes.append(f"{gpu}/{kernel}.json: there is no such kernel")
            continue
        first, second = (store.read(cache.path_of(gpu, kernel, x)) for x in (a, b))
        data, left = store.merge_files(first, second, SPECS[kernel], gpu)
        notes += left
        if data is not None:
            with store.locked(kernel, gpu, out):
                cache.save(data, kernel, gpu, out)
            written += 1
    return written, notes
