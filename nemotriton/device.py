"""The device the work runs on: its name, its slug in `tune_cache/`, and its limits."""

import functools
import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What kernels and plans need to know of a device; sizes in bytes, 0 where unknown."""

    name: str
    slug: str
    capability: tuple[int, int]
    sms: int
    shared_memory: int
    l2: int
    memory: int


CPU = DeviceInfo("CPU", "cpu", (0, 0), 1, 0, 0, 0)


def slug(name: str) -> str:
    """`NVIDIA H200` -> `nvidia_h200`: the folder of a device's tuned tiles."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@functools.cache
def _cuda(index: int) -> DeviceInfo:
    p = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        name=p.name,
        slug=slug(p.name),
        capability=(p.major, p.minor),
        sms=p.multi_processor_count,
        shared_memory=getattr(p, "shared_memory_per_block_optin", 0),
        l2=getattr(p, "L2_cache_size", 0),
        memory=p.total_memory,
    )


def info(device: torch.device | str | None = None) -> DeviceInfo:
    """The facts of `device` (default: the current CUDA device, or the CPU where there is none)."""
    if device is None:
        return _cuda(torch.cuda.current_device()) if torch.cuda.is_available() else CPU
    d = torch.device(device)
    if d.type != "cuda":
        return CPU
    return _cuda(torch.cuda.current_device() if d.index is None else d.index)


def free_memory(device: torch.device | str) -> int:
    """Bytes an allocation may still take on `device`; on the CPU, of the machine's memory."""
    d = torch.device(device)
    if d.type == "cuda":
        free, _ = torch.cuda.mem_get_info(d)
        cached = torch.cuda.memory_reserved(d) - torch.cuda.memory_allocated(d)
        return free + cached
    with open("/proc/meminfo") as f:
        for line in f:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
