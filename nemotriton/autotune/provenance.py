"""Where a measurement comes from: versions, driver, commit. Standard library only."""

import datetime
import os
import re
import subprocess
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from nemotriton import __version__

ROOT = Path(__file__).resolve().parents[2]


def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The NVIDIA driver's version; "" where there is none."""
    try:
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", proc.read_text())
    except OSError:
        found = None
    if found:
        return found[1]
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else ""


@cache
def version(package: str) -> str:
    """The installed version of a package; "" when it is not installed."""
    if package == "nemotriton":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def clocks() -> dict[str, int]:
    """The present clocks in MHz of the first GPU's SMs and memory; {} where they cannot be read."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        kinds = {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}
        return {name: int(nvml.nvmlDeviceGetClockInfo(gpu, kind)) for name, kind in kinds.items()}
    except nvml.NVMLError:
        return {}


def today() -> str:
    return datetime.date.today().isoformat()


@cache
def commit(root: Path = ROOT) -> tuple[str, bool]:
    """The commit of the source tree and whether tracked files differ from it; ("", False) if none.

    NEMOTRITON_COMMIT names it for a copy of the tree that came without its history."""
    named = os.environ.get("NEMOTRITON_COMMIT")
    if named:
        return named, False
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "", False
    return head, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))


def _git(root: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
