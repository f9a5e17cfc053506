"""Sums of a few rows over the GPUs of one host, in short kernels.

NCCL takes about ten microseconds for any sum, however small, and a decode step has one a mixer.
PyTorch's symmetric memory lets a GPU reach the others' memory, so that one kernel can fetch their
parts (PyTorch's own, for any tensor) or send its own and take theirs in while it does the residual
add and the norm that follow (`kernels.rank_sums`, for rows of the residual stream). Everybody does
the whole sum, so this is for small parts only; all ranks get the same bits. NVLink multicast is not
used. Where the memory cannot be had, as between machines, NCCL adds up everything.

NCCL is the default: these ways have not run on GPUs yet.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

import torch
import torch.distributed as dist

from nemotriton.kernels import add_rms_norm
from nemotriton.kernels.rank_sums import (
    ROWS,
    RankRows,
    slot_bytes,
    sum_add_rms_norm,
    sums_rows,
)

log = logging.getLogger(__name__)
_MOST = 1 << 20  # bytes that a rank reads from the others
_ALIGN = 16  # bytes
_DTYPES = (torch.bfloat16, torch.float32)
_TURNS = 1 << 20  # looks at a flag in a first try: about a second
WAYS = ("nccl", "small", "fused")


class SmallSums:
    """The buffers and who shares them. Every rank must make one at the same time.

    adds: whether `add` may be used. rows: of the sums that go on to a norm, None where those are
    two launches."""

    def __init__(self, rank: int, ranks: int, device: torch.device, store: dist.Store) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        self.rank, self.ranks = rank, ranks
        self.most = _MOST // (ranks - 1) // _ALIGN * _ALIGN
        # a name of its own: PyTorch keeps a process's first group of a name for ever
        if rank == 0:
            store.set("name", uuid.uuid4().hex)
        self.group_name = store.get("name").decode()
        _SymmetricMemory.set_group_info(self.group_name, rank, ranks, store)
        self.buffer, _ = self._shared(self.most, device)
        self.adds = False
        self.rows: RankRows | None = None
        self._held: list[torch.Tensor] = []

    def _shared(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """Zeros that all reach, and where each rank's are."""
        import torch.distributed._symmetric_memory as symmetric
        from torch._C._distributed_c10d import _SymmetricMemory

        memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        handle: Any = _SymmetricMemory.rendezvous(memory, self.group_name)
        return memory.zero_(), list(handle.buffer_ptrs)

    def share_rows(self, device: torch.device) -> None:
        """Make the buffers for `add_norm`."""
        slots, slots_at = self._shared(slot_bytes(self.ranks), device)
        flags, flags_at = self._shared(4 * ROWS * self.ranks, device)
        self._held = [slots, flags]
        self.rows = RankRows(
            self.rank,
            torch.tensor(slots_at, dtype=torch.int64, device=device),
            torch.tensor(flags_at, dtype=torch.int64, device=device),
            torch.zeros(ROWS, dtype=torch.int32, device=device),
        )

    def takes(self, part: torch.Tensor) -> bool:
        """Whether this part is small enough, of whole words, and of a type that is added up."""
        fits = 0 < part.nbytes <= self.most and part.nbytes % _ALIGN == 0
        return self.adds and fits and part.is_contiguous() and part.dtype in _DTYPES

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, a new tensor."""
        shared = self.buffer.view(part.dtype)
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            shared, part, "sum", self.group_name
        )
        return found

    def takes_rows(self, part: torch.Tensor) -> bool:
        """Whether `add_norm` takes this part."""
        return self.rows is not None and sums_rows(part)

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_rms_norm` of the sum of all ranks' parts."""
        assert self.rows is not None
        return sum_add_rms_norm(part, residual, weight, eps, self.rows)


def small_sums(rank: int, ranks: int, device: torch.device, store: dist.Store) -> SmallSums | None:
    """What adds small parts up, as far as it has shown that it can; None where NCCL or gloo has to.

    NEMOTRITON_SUMS is nccl (the default), small or fused (sums inside norms too). Every rank must
    call this at the same time; store: of this group alone."""
    way = os.environ.get("NEMOTRITON_SUMS", WAYS[0])
    if device.type != "cuda" or way == WAYS[0]:
        return None
    # a host's GPUs may be shared by machines that multicast would take down
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    made: SmallSums | None = None
    try:
        made = SmallSums(rank, ranks, device, store)
        if way == "fused":
            made.share_rows(device)
        torch.cuda.synchronize(device)
    except (RuntimeError, ImportError, AttributeError) as problem:
        log.warning("NEMOTRITON_SUMS=%s: no symmetric memory (%s); NCCL adds up", way, problem)
    if not _all_agree(made is not None) or made is None:
        return None
    made.adds = _all_agree(_adds_up(made, device))
    if made.rows is not None and not _all_agree(_adds_norms(made, device)):
        made.rows = None
    if rank == 0 and not made.adds:
        log.warning("NEMOTRITON_SUMS=%s: this torch has no small sum, or it came out wrong", way)
    if rank == 0 and way == "fused" and made.rows is None:
        log.warning("NEMOTRITON_SUMS=%s: a sum with a norm came out wrong; it is two launches", way)
    return made if made.adds or made.rows is not None else None


def _all_agree(right: bool) -> bool:
    """Whether it is right on every rank; none goes on before all have come here."""
    agreed = torch.tensor(int(right))
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed)


def _adds_up(sums: SmallSums, device: torch.device) -> bool:
    """Whether a small sum comes out right, if this torch has it."""
    ranks = sums.ranks
    if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_copy"):
        return False
    part = torch.arange(64, device=device, dtype=torch.float32) + sums.rank
    wanted = ranks * torch.arange(64, device=device) + ranks * (ranks - 1) / 2
    return bool((sums.add(part) == wanted).all())


def _adds_norms(sums: SmallSums, device: torch.device, rows: int = 3, width: int = 512) -> bool:
    """Whether some sums inside norms come out right, after one that compiles the kernel."""
    assert sums.rows is not None
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    right = True
    for turn in range(4):
        g = torch.Generator().manual_seed(turn)
        drawn = torch.randn(sums.ranks + 1, rows, width, generator=g).bfloat16().to(device)
        parts, residual = drawn[:-1], drawn[-1]
        total = sum((p.float() for p in parts), torch.zeros(rows, width, device=device))
        wanted, stream = add_rms_norm(total.bfloat16(), residual, weight)
        got = sum_add_rms_norm(parts[sums.rank], residual, weight, 1e-5, sums.rows, _TURNS)
        equal = torch.equal(got[1], stream) and torch.allclose(got[0], wanted, rtol=1e-2, atol=1e-2)
        if not _all_agree(True):
            return False
        right = right and (equal or turn == 0)
    return right
