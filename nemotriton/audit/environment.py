"""What a bug report needs: versions, GPU, driver, tiles. Nothing here raises."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from nemotriton.audit.report import table

_PACKAGES = (
    *("nemotriton", "torch", "triton", "transformers", "tokenizers", "safetensors"),
    *("huggingface_hub", "numpy", "typer", "xgrammar"),
)
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "NEMOTRITON_TUNE_CACHE"),
    *("NEMOTRITON_PDL", "NEMOTRITON_ASM", "NEMOTRITON_COMBINE"),
    *("HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"),
)
_QUERY = "--query-gpu=name,memory.total,compute_cap"


def describe() -> dict[str, Any]:
    """Plain values by topic; what cannot be told is a text that says why."""
    probes: dict[str, Callable[[], Any]] = {
        "python": lambda: f"{platform.python_version()} ({sys.executable})",
        "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count,
        "memory": _host_memory,
        "versions": _versions,
        "commit": _commit,
        "driver": lambda: _provenance().driver_version() or "none",
        "gpus": _gpus,
        "torch_cuda": _torch_cuda,
        "tiles": _tiles,
        "variables": lambda: {k: os.environ[k] for k in _VARIABLES if k in os.environ},
    }
    return {name: _tried(probe) for name, probe in probes.items()}


def _tried(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Exception as problem:  # a broken installation is what this is for
        return f"unknown ({type(problem).__name__}: {problem})"


def _provenance() -> Any:
    return import_module("nemotriton.autotune.provenance")


def _versions() -> dict[str, str]:
    return {name: _provenance().version(name) or "not installed" for name in _PACKAGES}


def _commit() -> str:
    commit, changed = _provenance().commit()
    return commit + (" with changes" if changed else "") if commit else "unknown (no git history)"


def _host_memory() -> str:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{pages / 2**30:.1f} GiB"


def _gpus() -> list[str]:
    """As the driver names them, without torch."""
    command = ["nvidia-smi", _QUERY, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return [line.strip() for line in lines]


def _torch_cuda() -> str:
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return f"torch sees no GPU (built for CUDA {torch.version.cuda or 'none'})"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _tiles() -> dict[str, dict[str, int]]:
    """By the folder of a GPU: kernels with a file, and how many of their tiles were measured there,
    published for it, or no more than compiled."""
    cache: Any = import_module("nemotriton.autotune.cache")
    root = cache.root()
    if not root.is_dir():
        return {}
    return {f.name: _counted(f) for f in sorted(p for p in root.iterdir() if p.is_dir())}


def _counted(folder: Path) -> dict[str, int]:
    files = sorted(folder.glob("*.json"))
    counts = {"kernels": len(files), "measured": 0, "published": 0, "compiled": 0}
    for file in files:
        try:
            entries = json.loads(file.read_text())["entries"]
            found = [bucket["status"] for entry in entries for bucket in entry["tokens"]]
        except (OSError, ValueError, TypeError, KeyError):
            found = ["unreadable"]
        for status in found:
            counts[status] = counts.get(status, 0) + 1
    return counts


def _counts_text(counts: dict[str, int]) -> str:
    tiles = [f"{count} {status}" for status, count in counts.items() if status != "kernels"]
    return f"{', '.join(tiles)}; of {counts['kernels']} kernels"


def as_lines(found: dict[str, Any]) -> Iterable[str]:
    """The result as text."""
    rows: list[tuple[str, str]] = []
    for name, value in found.items():
        label = name.replace("_", " ")
        if isinstance(value, dict) and value:
            shown = ((k, _counts_text(v) if isinstance(v, dict) else v) for k, v in value.items())
            rows += [(f"{label}: {key}", text) for key, text in shown]
        elif isinstance(value, list | dict):
            rows.append((label, "; ".join(value) or "none"))
        else:
            rows.append((label, str(value)))
    yield from table(("what", "found"), rows, left=2)[1:]
