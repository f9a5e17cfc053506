"""The tune cache: one reviewable JSON file per GPU and kernel, written whole or not at all.

Layout: `tune_cache/<gpu slug>/<kernel>.json`, schema 1:

    {"schema": 1, "kernel": "rms_norm", "gpu": {...}, "made_with": {...}, "source": "<sha256>",
     "entries": [{"case": {"dtype": "bf16", "D": 4096},
                  "tokens": [{"upto": 64, "tile": {"BLOCK_D": 4096, "num_warps": 8}, "us": 2.1}]}]}

Lookup is exact on `case` (the static axes) and takes the first bucket with `upto >= tokens`. An
empty tile means that the default wins there. A file whose schema, kernel, GPU or source hash
differs is reported once and ignored as a whole; it is never half-used. Standard library only.
"""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

log = logging.getLogger("nemotriton.autotune")

SCHEMA = 1


def root() -> Path:
    """The folder of tuned files: NEMOTRITON_TUNE_CACHE, else `tune_cache/` beside the package."""
    override = os.environ.get("NEMOTRITON_TUNE_CACHE")
    return Path(override) if override else Path(__file__).resolve().parents[2] / "tune_cache"


def path_of(gpu: str, kernel: str, folder: Path | None = None) -> Path:
    return (folder or root()) / gpu / f"{kernel}.json"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tuned tile for up to `upto` tokens; an empty tile stands for the default."""

    upto: int
    tile: Mapping[str, int | bool]


@dataclass(frozen=True, slots=True)
class Table:
    """The tuned tiles of one kernel on one GPU, keyed by the sorted items of its case."""

    cases: Mapping[tuple[tuple[str, Any], ...], tuple[Bucket, ...]]

    def lookup(self, case: Mapping[str, Any], tokens: int) -> Mapping[str, int | bool] | None:
        """The tile of the first bucket that holds `tokens`; None where nothing is recorded."""
        for bucket in self.cases.get(case_key(case), ()):
            if tokens <= bucket.upto:
                return bucket.tile or None
        return None


EMPTY = Table({})


def case_key(case: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(case.items()))


def problems(data: Any, kernel: str, gpu: str, source: str) -> list[str]:
    """Why a file must not be used, in words; empty when it may."""
    if not isinstance(data, dict):
        return ["is not a JSON object"]
    found = []
    if data.get("schema") != SCHEMA:
        found.append(f"has schema {data.get('schema')!r}, this build reads {SCHEMA}")
    if data.get("kernel") != kernel:
        found.append(f"is for kernel {data.get('kernel')!r}")
    if not isinstance(data.get("gpu"), dict) or data["gpu"].get("slug") != gpu:
        found.append(f"is for another GPU ({data.get('gpu')!r})")
    if data.get("source") != source:
        found.append("was tuned for another version of the kernel's source")
    entries = data.get("entries")
    if not isinstance(entries, list):
        return [*found, "has no list of entries"]
    for i, entry in enumerate(entries):
        if not entry_ok(entry):
            found.append(f"entry {i} is malformed")
    return found


def entry_ok(entry: Any) -> bool:
    """May one entry be read: a case of plain values, and buckets of tiles in rising order?"""
    if not isinstance(entry, dict) or not isinstance(entry.get("case"), dict):
        return False
    if not all(isinstance(v, str | int | float | None) for v in entry["case"].values()):
        return False
    buckets = entry.get("tokens")
    if not isinstance(buckets, list) or not buckets:
        return False
    last = 0
    for b in buckets:
        if not isinstance(b, dict) or not isinstance(b.get("tile"), dict):
            return False
        if not isinstance(b.get("upto"), int) or b["upto"] <= last:
            return False
        if not all(isinstance(v, int) for v in b["tile"].values()):
            return False
        last = b["upto"]
    return True


def load(kernel: str, gpu: str, source: str, folder: Path | None = None) -> Table:
    """The usable table of (`kernel`, `gpu`), or an empty one; a refused file is logged."""
    file = path_of(gpu, kernel, folder)
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        return EMPTY
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s): default tiles are used", file, error)
        return EMPTY
    why = problems(data, kernel, gpu, source)
    if why:
        log.warning("%s %s: default tiles are used", file, "; ".join(why))
        return EMPTY
    made, here = data.get("made_with", {}), _installed("triton")
    if isinstance(made, dict) and made.get("triton", here) != here:
        log.info("%s was measured with triton %s; this is %s", file, made["triton"], here)
    return Table(
        {
            case_key(e["case"]): tuple(Bucket(b["upto"], dict(b["tile"])) for b in e["tokens"])
            for e in data["entries"]
        }
    )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def save(data: Mapping[str, Any], kernel: str, gpu: str, folder: Path | None = None) -> Path:
    """Write a file whole or not at all: a temporary neighbour, flushed, then renamed over it."""
    file = path_of(gpu, kernel, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{kernel}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as f:
            json.dump(data, f, indent=1, sort_keys=True)
            f.write("\n")
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return file
