"""Sums of a few rows over the GPUs of one host, in one short kernel.

NCCL takes about ten microseconds for any sum, however small, and a decode step has one a mixer.
PyTorch's symmetric memory lets a GPU read the others' memory: every rank copies its part into such
a buffer, waits for the others, and adds all parts up itself, in the order of the ranks, so that all
get the same bits. Everybody reads everything, so this is for small parts only. NVLink multicast is
not used. Where the memory cannot be had, as between machines, NCCL adds up everything.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)
_MOST = 1 << 20  # bytes that a rank reads from the others
_ALIGN = 16  # bytes
_DTYPES = (torch.bfloat16, torch.float32)


class SmallSums:
    """The buffer and who shares it. Every rank must make one at the same time."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        self.most = _MOST // (ranks - 1) // _ALIGN * _ALIGN
        self.group_name: str = group.group_name
        self.buffer = symmetric.empty(self.most, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self.buffer, self.group_name)

    def takes(self, part: torch.Tensor) -> bool:
        """Whether this part is small enough, of whole words, and of a type that is added up."""
        fits = 0 < part.nbytes <= self.most and part.nbytes % _ALIGN == 0
        return fits and part.is_contiguous() and part.dtype in _DTYPES

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, a new tensor."""
        shared = self.buffer.view(part.dtype)
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            shared, part, "sum", self.group_name
        )
        return found


def small_sums(ranks: int, device: torch.device) -> SmallSums | None:
    """What adds small parts up, once it has shown that it can; None where NCCL or gloo has to.

    NEMOTRITON_SUMS=nccl leaves all to NCCL. Every rank must call this at the same time."""
    if device.type != "cuda" or os.environ.get("NEMOTRITON_SUMS") == "nccl":
        return None
    # a host's GPUs may be shared by machines that multicast would take down
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    made, right = None, False
    try:
        made = SmallSums(ranks, device)
        right = _adds_up(made, ranks, device)
    except (RuntimeError, ImportError, AttributeError) as problem:
        log.debug("no symmetric memory: %s", problem)
    agreed = torch.tensor(int(right))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return made if int(agreed) else None


def _adds_up(sums: SmallSums, ranks: int, device: torch.device) -> bool:
    rank = dist.get_rank()
    part = torch.arange(64, device=device, dtype=torch.float32) + rank
    wanted = ranks * torch.arange(64, device=device) + ranks * (ranks - 1) / 2
    return bool((sums.add(part) == wanted).all())
