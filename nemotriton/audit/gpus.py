"""GPUs by the names people use, with the memory and compute capability that decide what fits.

Memory in MiB is what the driver shows as total; where a card comes in several sizes, each has its
name.
"""

import re
from dataclasses import dataclass

from nemotriton.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory in bytes; capability (0, 0) where only a size was given."""

    name: str
    memory: int
    capability: tuple[int, int]


_KNOWN: dict[str, tuple[str, int, tuple[int, int]]] = {
    "a100": ("A100 80GB", 81920, (8, 0)),
    "a100-40": ("A100 40GB", 40960, (8, 0)),
    "l4": ("L4", 23034, (8, 9)),
    "l40s": ("L40S", 46068, (8, 9)),
    "rtx4090": ("GeForce RTX 4090", 24564, (8, 9)),
    "h100": ("H100 80GB", 81559, (9, 0)),
    "h100-nvl": ("H100 NVL", 95830, (9, 0)),
    "gh200": ("GH200 96GB", 97871, (9, 0)),
    "h200": ("H200", 143771, (9, 0)),
    "b200": ("B200", 183359, (10, 0)),
    "gb200": ("GB200", 189471, (10, 0)),
    "b300": ("B300", 275040, (10, 3)),
    "rtx5090": ("GeForce RTX 5090", 32607, (12, 0)),
    "rtxpro6000": ("RTX PRO 6000 Blackwell", 97887, (12, 0)),
}
NAMES = tuple(_KNOWN)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib)?", re.IGNORECASE)


def find_gpu(name: str) -> Gpu:
    """A GPU by name, or any by its memory in GiB (`64`, `64GiB`); ConfigError for others."""
    key = name.lower().replace(" ", "").replace("_", "-").removeprefix("nvidia").strip("-")
    if key in _KNOWN:
        title, mib, capability = _KNOWN[key]
        return Gpu(f"NVIDIA {title}", mib * 2**20, capability)
    size = _SIZE.fullmatch(name.strip())
    if size and float(size[1]) > 0:
        return Gpu(f"a GPU of {float(size[1]):g} GiB", int(float(size[1]) * 2**30), (0, 0))
    near = nearest(key, NAMES)
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigError(
        f"--gpu {name}: not known.{hint} Give one of {', '.join(NAMES)}, or its memory in GiB."
    )
