"""Writing tuned files, merged under a lock so that two sweeps lose nothing, and judging them.

Beside what the runtime reads (`cache.py`), a file says what made it and what was found:

    gpu        {"slug", "name", "cc", "sms", "smem_kib", and the measured ceilings}
    made_with  {"nemotriton", "triton", "torch", "driver", "date"}
    a bucket   {"upto", "tile", "us", "default_us", "tried", "failed", "status", "space"}

`status` is "measured" (swept on this GPU), "published" (somebody's figure for it), "compiled" (only
known to compile well) or "default" (an empty tile and no figures: nobody has tried anything, and
tiles measured at more tokens are not to be taken there): all but the first say what to sweep.
`space` is a digest of the tiles there were. Next to each file lies `.<kernel>.trials.jsonl`, one
line a tile that was measured: a sweep that was stopped goes on from there, and a new tile is timed
alone. It is never shipped.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemotriton.autotune import cache
from nemotriton.autotune.provenance import today, version
from nemotriton.autotune.trial import Facts, Point, Trial
from nemotriton.kernels.op import Case, KernelSpec, Tile

log = logging.getLogger("nemotriton.autotune")

STATUSES = ("measured", "published", "compiled", "default")
GAIN = 0.02  # a tile is recorded only where it beats the default by more than this
Data = dict[str, Any]


# --------------------------------------------------------------------------------------- one bucket
def bucket(point: Point, tile: Tile | None, us: float, default_us: float, trials: "Trials") -> Data:
    """The record of a finished point; a tile of None stands for the default, which won."""
    tried = trials.of(point)
    return {
        "upto": point.tokens,
        "tile": dict(tile) if tile is not None else {},
        "us": round(us, 3),
        "default_us": round(default_us, 3),
        "tried": len(tried),
        "failed": sum(t.us is None for t in tried.values()),
        "status": "measured",
        "space": space(point),
    }


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def space(point: Point) -> str:
    """A digest of the tiles that a point may take, the default among them."""
    tiles = sorted(json.dumps(dict(t)) for t in candidates(point))
    return hashlib.sha256("\n".join(tiles).encode()).hexdigest()[:12]


def candidates(point: Point) -> list[Tile]:
    """Every tile a point may take, each once, the default first."""
    spec = point.spec
    suited = (t for t in spec.tiles(point.case) if spec.suits(t, point.tokens))
    return list(dict.fromkeys([point.default, *suited]))


def describe(facts: Facts) -> Data:
    """The `gpu` part of a file."""
    g = facts.gpu
    return {
        "slug": g.slug,
        "name": g.name,
        "cc": f"{g.capability[0]}.{g.capability[1]}",
        "sms": g.sms,
        "smem_kib": g.shared_memory // 1024,
        **facts.ceilings.as_dict(),
    }


def made_with(driver: str) -> Data:
    """The `made_with` part of a file."""
    packages = ("nemotriton", "triton", "torch")
    return {**{p: version(p) for p in packages}, "driver": driver, "date": today()}


# ------------------------------------------------------------------------------------------- files
@contextlib.contextmanager
def locked(kernel: str, gpu: str, folder: Path | None) -> Iterator[Path]:
    """Hold one kernel's lock; the operating system releases it when a holder is killed."""
    file = cache.path_of(gpu, kernel, folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file.parent / f".{kernel}.lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(handle)


def update(spec: KernelSpec, new: Data, folder: Path | None = None) -> Path:
    """Merge the entries of `new` into the file of its kernel and GPU; new buckets replace old ones.

    A file of another source, schema or GPU is replaced as a whole, and the log says so."""
    kernel, gpu = spec.op.name, new["gpu"]["slug"]
    with locked(kernel, gpu, folder) as file:
        for left in file.parent.glob(f".{kernel}.*.tmp"):  # of a writer that was killed
            left.unlink(missing_ok=True)
        old = read(file)
        why = cache.problems(old, kernel, gpu, spec.source) if old is not None else []
        if why:
            log.warning("%s %s: it is replaced", file, "; ".join(why))
        entries = [] if old is None or why else old["entries"]
        both = [filled(e, spec) for e in merged(entries, new["entries"], spec)]
        return cache.save({**new, "entries": both}, kernel, gpu, folder)


def filled(entry: Data, spec: KernelSpec) -> Data:
    """The entry with an empty tile, the default, in each bucket of the kernel that has none of its
    own and would else fall to a bucket measured at more tokens."""
    found: dict[int, Data] = {b["upto"]: b for b in entry["tokens"]}
    above: Data = {}
    for upto in sorted({*spec.tokens, *found}, reverse=True):
        if upto not in found and above.get("status") == "measured":
            found[upto] = {"upto": upto, "tile": {}, "status": "default"}
        elif upto in found:
            above = found[upto]
    return {**entry, "tokens": [found[upto] for upto in sorted(found)]}


def read(file: Path) -> Any:
    """The JSON in `file`; None where there is no file, {} where it cannot be read."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def merged(
    old: Sequence[Data], new: Sequence[Data], spec: KernelSpec, by_time: bool = False
) -> list[Data]:
    """Entries of both, sorted; where both have a bucket, the new one or, `by_time`, the faster.

    Where all tokens take one tile an entry is taken as a whole."""
    cases: dict[Any, tuple[Data, dict[int, Data]]] = {}
    for entry in [*old, *new]:
        _, buckets = cases.setdefault(cache.case_key(entry["case"]), (entry["case"], {}))
        taken = [b for b in entry["tokens"] if b["upto"] in buckets]
        if spec.one_tile and taken:
            if by_time and not better(taken[0], buckets[taken[0]["upto"]]):
                continue
            buckets.clear()
        for b in entry["tokens"]:
            if not by_time or b["upto"] not in buckets or better(b, buckets[b["upto"]]):
                buckets[b["upto"]] = b
    found = [
        {"case": case, "tokens": [buckets[u] for u in sorted(buckets)]}
        for case, buckets in cases.values()
    ]
    return sorted(found, key=lambda e: json.dumps(e["case"], sort_keys=True))


def better(a: Data, b: Data) -> bool:
    """Is bucket `a` to be preferred: by status in the order of STATUSES, then by time."""
    ranks = [
        (
            STATUSES.index(x["status"]) if x.get("status") in STATUSES else len(STATUSES),
            x["us"] if isinstance(x.get("us"), int | float) else float("inf"),
        )
        for x in (a, b)
    ]
    return ranks[0] < ranks[1]


def merge_files(a: Any, b: Any, spec: KernelSpec, gpu: str) -> tuple[Data | None, list[str]]:
    """One file out of two of the same kernel and GPU, by time, and what had to be left out."""
    notes, usable = [], []
    for data, name in ((a, "A"), (b, "B")):
        if data is None:
            continue
        why = cache.problems(data, spec.op.name, gpu, spec.source)
        if why:
            notes.append(f"{name}: {gpu}/{spec.op.name}.json {'; '.join(why)}")
        else:
            usable.append(data)
    if not usable:
        return None, notes
    entries: list[Data] = []
    for data in usable:
        entries = merged(entries, data["entries"], spec, by_time=True)
    latest = max(usable, key=lambda d: str(d.get("made_with", {}).get("date", "")))
    return {**latest, "entries": [filled(e, spec) for e in entries]}, notes


# ------------------------------------------------------------------------------------------ trials
class Trials:
    """The journal of one kernel on one GPU: what each tile took at each point, for one source."""

    def __init__(self, spec: KernelSpec, gpu: str, folder: Path | None = None) -> None:
        self.source = spec.source
        self.file = cache.path_of(gpu, spec.op.name, folder).parent / (
            f".{spec.op.name}.trials.jsonl"
        )
        self.found: dict[tuple[Any, int], dict[Tile, Trial]] = {}
        try:
            lines = self.file.read_text().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            self._learn(line)

    def _learn(self, line: str) -> None:
        try:
            row = json.loads(line)
            key = (cache.case_key(row["case"]), int(row["tokens"]))
            tile, trial = Tile(**row["tile"]), Trial(row["us"], row["failed"])
            if row["source"] == self.source:
                self.found.setdefault(key, {})[tile] = trial
        except (ValueError, KeyError, TypeError):
            return  # the last line of a killed process

    def of(self, point: Point) -> Mapping[Tile, Trial]:
        """What is known of a point's present tiles; others, removed since, do not count."""
        known = self.found.get((cache.case_key(point.key), point.tokens), {})
        return {t: known[t] for t in candidates(point) if t in known}

    def met(self, point: Point) -> set[Tile]:
        """The tiles tried at any token count of the point's case."""
        case = cache.case_key(point.key)
        return {t for (c, _), tiles in self.found.items() if c == case for t in tiles}

    def add(self, point: Point, tile: Tile, trial: Trial) -> None:
        """Append one line in one write, and remember it."""
        row = {"source": self.source, "case": point.key, "tokens": point.tokens}
        row |= {"tile": dict(tile), "us": trial.us, "failed": trial.failed}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # A newline first: what a killed process left behind must not swallow this line.
        with open(self.file, "ab", buffering=0) as f:
            f.write(f"\n{json.dumps(row)}\n".encode())
        self._learn(json.dumps(row))


# -------------------------------------------------------------------------------------- validation
def faults(data: Any, spec: KernelSpec, gpu: str) -> list[str]:
    """Everything wrong with a shipped file, in words; what `autotune check` prints."""
    found = cache.problems(data, spec.op.name, gpu, spec.source)
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        return found
    for part in ("nemotriton", "triton", "torch", "driver", "date"):
        if not isinstance(data.get("made_with"), dict) or part not in data["made_with"]:
            found.append(f"made_with lacks {part!r}")
    seen = set()
    for i, entry in enumerate(data["entries"]):
        if not cache.entry_ok(entry):
            continue  # named by `problems`
        key = cache.case_key(entry["case"])
        if key in seen:
            found.append(f"entry {i}: the case {entry['case']} comes twice")
        seen.add(key)
        found += [f"entry {i} ({entry['case']}): {f}" for f in _entry_faults(entry, spec)]
    return found


def _entry_faults(entry: Data, spec: KernelSpec) -> list[str]:
    axes = {k: v for k, v in entry["case"].items() if k != "dtype"}
    found = []
    if entry["case"].get("dtype") not in spec.dtypes:
        found.append(f"dtype {entry['case'].get('dtype')!r} is none of {', '.join(spec.dtypes)}")
    if set(axes) not in [set(case) for case in spec.small]:
        return [*found, f"axes {sorted(axes)} are not those of the kernel's cases"]
    tiles = set(spec.tiles(Case(**axes)))
    for b in entry["tokens"]:
        at = f"up to {b['upto']} tokens: "
        if b["upto"] not in spec.tokens:
            found.append(f"{at}no bucket of this kernel, which has {list(spec.tokens)}")
        tile = Tile(**b["tile"])
        if b["tile"] and tile not in tiles | {spec.default(Case(**axes), b["upto"])}:
            found.append(f"{at}{tile} is not among the kernel's tiles")
        found += [at + f for f in _figure_faults(b)]
    return found + _gain_faults(entry["tokens"], spec)


def _gain_faults(buckets: Sequence[Data], spec: KernelSpec) -> list[str]:
    """Tiles that were measured to be no gain, and differing ones where all tokens take one."""
    if spec.one_tile and any(b["tile"] != buckets[0]["tile"] for b in buckets):
        return ["its buckets have different tiles, but a batch must not change a sequence's bits"]
    measured = [b for b in buckets if b["tile"] and not _figure_faults(b)]
    measured = [b for b in measured if b["status"] == "measured"]
    for contest in [measured] if spec.one_tile and measured else [[b] for b in measured]:
        ratio = mean([b["us"] / b["default_us"] for b in contest])
        if ratio >= 1 - GAIN:
            upto = contest[0]["upto"]
            return [
                f"up to {upto} tokens: {ratio:.3f} of the default's time is no gain of {GAIN:.0%}"
            ]
    return []


def _figure_faults(b: Data) -> list[str]:
    if b.get("status") not in STATUSES:
        return [f"status {b.get('status')!r} is none of {', '.join(STATUSES)}"]
    if b["status"] == "default" and b["tile"]:
        return ["status 'default' says that nobody tried a tile, but there is one"]
    if b["status"] != "measured":
        return []
    if not all(isinstance(b.get(k), int | float) and b[k] > 0 for k in ("us", "default_us")):
        return ["measured, but us and default_us are not both there"]
    if not all(isinstance(b.get(k), int) for k in ("tried", "failed")) or b["failed"] > b["tried"]:
        return [f"tried {b.get('tried')!r} and failed {b.get('failed')!r} do not fit"]
    return []
