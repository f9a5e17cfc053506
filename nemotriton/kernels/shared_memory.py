"""How much shared memory default tiles may count on."""

import torch

from nemotriton import device
from nemotriton.kernels.op import target

LARGE = 232448  # bytes a program may have on Hopper and Blackwell data-centre GPUs
SMALL = 101376  # on the workstation GPUs below


def most_shared() -> int:
    """Bytes a program may have on the GPU that default tiles are chosen for: that of `targeting`,
    or the current one. `LARGE` where there is none."""
    major, minor = device.info().capability
    arch = target(torch.device("meta")) or 10 * major + minor
    return SMALL if arch in (86, 89, 120, 121) else LARGE
