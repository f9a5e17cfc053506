"""First tuned files for a GPU that nobody has measured on, from what its compiler shows.

    python -m nemotriton.autotune compile --arch sm_100 --out rows.jsonl
    python -m nemotriton.autotune seed --learn rows.jsonl

`tune_cache/sm_100.jsonl` keeps what was compiled, a line a call: registers, shared and tensor
memory, tensor-core instructions, faults. From it `seed` writes an entry for every default tile that
compiled without a fault, as "compiled", and for tiles that somebody has published for such a GPU,
as "published". Neither has been timed here: they say what to sweep first, and on which tile a sweep
has to improve. A sweep replaces them. What was compiled from another source stays in the file and
counts as long as the default tile is the same.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from nemotriton.autotune import cache
from nemotriton.autotune.commands import MODELS, Kernels, Models, configs
from nemotriton.commandline import need_known

Data = dict[str, Any]
Key = tuple[str, Any, str, Any]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a tuned file says of a GPU: capability times ten, processors, shared memory in KiB."""

    name: str
    arch: int
    sms: int
    smem_kib: int = 227


GPUS = {"nvidia_b200": Gpu("NVIDIA B200", 100, 148), "nvidia_gb200": Gpu("NVIDIA GB200", 100, 152)}
# of the chunk scan on a B200: blocks of 64, three stages, eight warps (mamba-ssm's tuned kernels)
PUBLISHED: Mapping[str, Mapping[str, int]] = {
    "ssd_prefill_chunked": {
        "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_stages": 3, "num_warps": 8
    }
}  # fmt: skip


def seed_command(
    gpu: Annotated[str, typer.Option(help="Folder names, comma-separated.")] = ",".join(GPUS),
    kernel: Kernels = None,
    model: Models = MODELS,
    learn: Annotated[
        Path | None, typer.Option(help="First take up the rows of `compile --out`.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Default tune_cache/.")] = None,
) -> None:
    """Write first files for Blackwell from what compiles: nothing is measured."""
    where = folder or cache.root()
    for slug in gpu.split(","):
        need_known("GPU to seed", slug, list(GPUS))
        file = where / f"sm_{GPUS[slug].arch}.jsonl"
        known = read(file)
        if learn is not None:
            known |= dict(take_up(learn.read_text().splitlines(), GPUS[slug].arch))
            write(known, file)
        written, missing = seed(slug, kernel or [], configs(model), known, where)
        print(f"{slug}: {written} files written", file=sys.stderr)
        for name, count in missing.items():
            print(f"  {name}: {count} default tiles not known to compile", file=sys.stderr)


# ------------------------------------------------------------------------------ what was compiled
def take_up(lines: Iterable[str], arch: int) -> Iterable[tuple[Key, Data]]:
    """One record of each call in the rows of `compile --out`."""
    calls: dict[Key, list[Data]] = {}
    for row in map(json.loads, lines):
        if row["arch"] == f"sm_{arch}":
            calls.setdefault(key_of(row), []).append(row)
    for key, rows in calls.items():
        most = {k: max(r.get(k, 0) for r in rows) for k in ("registers", "shared", "tensor_memory")}
        ops = sorted({short(name) for r in rows for name in r.get("tensor_ops", ())})
        head = {name: rows[0][name] for name in ("op", "case", "dtype", "tile")}
        faults = sorted({f for r in rows for f in r["faults"]})
        yield key, {**head, **most, "ops": ops, "faults": faults}


def key_of(row: Data) -> Key:
    return row["op"], cache.case_key(row["case"]), row["dtype"], cache.case_key(row["tile"])


def short(instruction: str) -> str:
    """The family and kind of a tensor-core instruction, without shape and types."""
    kind = re.search(r"kind::\w+", instruction)
    family = re.match(r"[a-z0-9]+\.(?:async\.bulk\.tensor|[a-z_]+)", instruction)
    return " ".join(part[0] for part in (family, kind) if part) or instruction


def read(file: Path) -> dict[Key, Data]:
    if not file.exists():
        return {}
    return {key_of(r): r for r in map(json.loads, file.read_text().splitlines())}


def write(known: Mapping[Key, Data], file: Path) -> None:
    lines = sorted(json.dumps(r, sort_keys=True) for r in known.values())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


# --------------------------------------------------------------------------------------- the files
def seed(
    slug: str, kernels: list[str], models: Any, known: Mapping[Key, Data], where: Path
) -> tuple[int, dict[str, int]]:
    """Write the files of one GPU; how many, and by kernel the default tiles that are not known.

    Measured buckets of a file that is there stay."""
    from nemotriton.autotune import store
    from nemotriton.kernels.op import SPECS

    gpu = GPUS[slug]
    entries, missing = entries_of(gpu.arch, kernels, models, known)
    about: Data = {"slug": slug, "name": gpu.name, "cc": f"{gpu.arch // 10}.{gpu.arch % 10}"}
    about |= {"sms": gpu.sms, "smem_kib": gpu.smem_kib}
    for name, cases in entries.items():
        new = {
            "schema": cache.SCHEMA,
            "kernel": name,
            "gpu": about,
            "made_with": store.made_with(""),
            "source": SPECS[name].source,
            "entries": list(cases.values()),
        }
        old = measured_part(store.read(cache.path_of(slug, name, where)))
        with store.locked(name, slug, where):
            data, _ = store.merge_files(old, new, SPECS[name], slug)
            assert data is not None
            cache.save(data, name, slug, where)
    return len(entries), missing


def entries_of(
    arch: int, kernels: list[str], models: Any, known: Mapping[Key, Data]
) -> tuple[dict[str, dict[Any, Data]], dict[str, int]]:
    """The entries by kernel and case; buckets next to each other with the same tile become one."""
    from nemotriton.autotune.sweep import plan
    from nemotriton.kernels.op import targeting

    entries: dict[str, dict[Any, Data]] = {}
    missing: dict[str, int] = {}
    for p in plan(kernels, models):
        if p.spec.arches and arch not in p.spec.arches:
            continue
        with targeting(arch):
            tile, status = published(p, dict(p.default))
        found = known.get((p.op, cache.case_key(p.case), p.dtype, cache.case_key(tile)))
        if found is None or found["faults"]:
            missing[p.op] = missing.get(p.op, 0) + 1
            continue
        facts = {k: found[k] for k in ("registers", "shared", "tensor_memory", "ops")}
        entry: Data = {"case": p.key, "tokens": []}
        entry = entries.setdefault(p.op, {}).setdefault(cache.case_key(p.key), entry)
        if entry["tokens"] and entry["tokens"][-1]["tile"] == tile:
            entry["tokens"].pop()
        entry["tokens"].append({"upto": p.tokens, "tile": tile, "status": status, **facts})
    return entries, missing


def published(point: Any, tile: Data) -> tuple[Data, str]:
    """The published tile of a point, if it is in the kernel's space; else the default."""
    wanted = PUBLISHED.get(point.op)
    for candidate in point.spec.tiles(point.case) if wanted else ():
        if wanted and all(candidate[k] == v for k, v in wanted.items()):
            return dict(candidate), "published"
    return tile, "compiled"


def measured_part(data: Any) -> Any:
    """A file without the buckets that were not measured; None where nothing is left."""
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        return None
    kept = []
    for entry in data["entries"]:
        buckets = [b for b in entry["tokens"] if b.get("status") == "measured"]
        if buckets:
            kept.append({**entry, "tokens": buckets})
    return {**data, "entries": kept} if kept else None
