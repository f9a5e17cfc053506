"""What a decode step of a fixed shape reads, at addresses that never change.

The host writes numpy views of one page-locked buffer; `upload` moves it in one copy that the host
does not wait for, until the next `fill` writes there again. Page tables move apart, and only when a
page has come or gone.

Row i of sequence s is row s * n + i: its last known token (i = 0) and its drafts. A sequence that
may not have as many drafts as the shape keeps rows for them all the same. They are computed and
never accepted; where the sequence owns no page for them, their K/V go to a spare page that all
share. Rows behind the last sequence are pads: slot -1, no K/V, no context, greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

if TYPE_CHECKING:
    from nemotriton.engine.request import Piece, Request

_ALIGN = 64  # bytes; see `batch`
_TABLE = 16  # page tables are this many entries wide, or a multiple


@dataclass(frozen=True, slots=True)
class StepShape:
    """A decode step that can be replayed: so many sequences with so many drafts each.

    keys: the longest context, drafts included, that it serves.
    """

    sequences: int
    drafts: int
    keys: int

    @property
    def each(self) -> int:
        """Rows of a sequence."""
        return self.drafts + 1

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.sequences * self.each


class _Arena:
    """Named arrays of fixed dtype and size, in one buffer on the host and one on the device."""

    def __init__(self, sizes: dict[str, tuple[int, torch.dtype]], device: torch.device) -> None:
        starts, end = {}, 0
        for name, (count, dtype) in sizes.items():
            starts[name] = end
            end += -(-count * dtype.itemsize // _ALIGN) * _ALIGN
        pinned = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self.host: dict[str, Any] = {}
        self.on_device: dict[str, Tensor] = {}
        for name, (count, dtype) in sizes.items():
            where = slice(starts[name], starts[name] + count * dtype.itemsize)
            self.host[name] = self._host[where].view(dtype).numpy()
            self.on_device[name] = self._device[where].view(dtype)

        self._copied = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Return once the last copy, and all that was copied before it, is over."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self) -> None:
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class PageTable:
    """Page tables [sequences, width] of at most `keys` tokens; `spare` where nothing is owned."""

    def __init__(
        self, sequences: int, keys: int, page_size: int, spare: int, device: torch.device
    ) -> None:
        self.page_size, self.spare = page_size, spare
        pages = -(-keys // page_size)
        width = -(-pages // _TABLE) * _TABLE
        shape, pinned = (sequences, width), device.type == "cuda"
        self._host = torch.full(shape, spare, dtype=torch.int32, pin_memory=pinned)
        self.device = torch.full(shape, spare, dtype=torch.int32, device=device)
        self.host: Any = self._host.numpy()
        self._owners: list[Request | None] = [None] * sequences
        self._settled = [0] * sequences  # entries that hold computed tokens and so cannot change
        self._used = [0] * sequences

    def forget(self) -> None:
        """Trust no row."""
        self._owners = [None] * len(self._owners)

    def fill(self, requests: Sequence[Request]) -> None:
        """Bring the rows of these requests up to date, and the device's copy if any has moved."""
        moved = False
        for i, request in enumerate(requests):
            pages = request.pages
            if self._owners[i] is not request:
                self._owners[i], self._settled[i] = request, 0
            settled, used = self._settled[i], self._used[i]
            row, count = self.host[i], len(pages)
            if used != count or row[settled:count].tolist() != pages[settled:]:
                row[settled:count] = pages[settled:]
                row[count:used] = self.spare
                self._used[i], moved = count, True
            self._settled[i] = request.computed // self.page_size
        if moved:
            self.device[: len(requests)].copy_(self._host[: len(requests)], non_blocking=True)


class StepInputs:
    """The inputs of all shapes up to so many sequences and drafts; `keys` as in the shapes.

    spare: the page that no request owns, -1 without attention layers. On the device, by name:
    last, seeds, positions, kv_rows int64; top_k, slots, lengths, wanted int32; temperature, top_p,
    min_p float32. last, slots, lengths and wanted (drafts of the request itself) have an entry a
    sequence, the others one a row.
    """

    def __init__(
        self,
        sequences: int,
        drafts: int,
        keys: Sequence[int],
        *,
        page_size: int,
        spare: int,
        vocab: int,
        device: torch.device,
    ) -> None:
        rows = sequences * (drafts + 1)
        long, short, real = torch.int64, torch.int32, torch.float32
        sizes = dict.fromkeys(("slots", "lengths", "wanted"), (sequences, short))
        sizes |= {"last": (sequences, long)}
        sizes |= dict.fromkeys(("seeds", "positions", "kv_rows"), (rows, long))
        sizes |= dict.fromkeys(("temperature", "top_p", "min_p"), (rows, real))
        sizes |= {"top_k": (rows, short)}
        self._arena = _Arena(sizes, device)
        self.page_size, self.spare, self.vocab = page_size, spare, vocab
        self.tables = {k: PageTable(sequences, k, page_size, spare, device) for k in keys}
        self.owners: list[Request] = []
        self._shape: StepShape | None = None

    def view(self, name: str, count: int) -> Tensor:
        """The first `count` entries on the device."""
        return self._arena.on_device[name][:count]

    def forget(self) -> None:
        """Trust nothing of the last step: a request may have come back in other places."""
        self.owners = []
        for table in self.tables.values():
            table.forget()

    def clear(self, shape: StepShape) -> None:
        """Make every row a pad."""
        self._arena.wait()
        self.owners, self._shape = [], shape
        self._pad(shape, 0)
        self._arena.upload()

    def fill(
        self,
        pieces: Sequence[Piece],
        shape: StepShape,
        depths: Sequence[int],
        ahead: bool = False,
    ) -> None:
        """Write a step's inputs and start their copy; depths: of a sequence's rows, from 0 on.

        ahead: of a step whose predecessor's tokens nobody has read, as if it brought one to each;
        `carry` sets that right.
        """
        self._arena.wait()
        requests = [p.request for p in pieces]
        if requests != self.owners or shape != self._shape:
            self.owners, self._shape = requests, shape
            self._rules(requests, shape.each)
            self._pad(shape, len(requests))
        host, n, each = self._arena.host, len(requests), shape.each
        known = numpy.array([r.length + ahead for r in requests], dtype=numpy.int64)
        if not ahead:
            host["last"][:n] = [(r.output or r.prompt)[-1] for r in requests]
        host["lengths"][:n] = known + shape.drafts
        host["wanted"][:n] = [r.drafts for r in requests]
        host["positions"][: n * each] = (known[:, None] + numpy.array(depths)).ravel()
        if self.spare >= 0:
            table = self.tables[shape.keys]
            table.fill(requests)
            cells = known[:, None] + numpy.arange(-1, each - 1)
            pages = table.host[numpy.arange(n)[:, None], cells // self.page_size]
            cells = pages.astype(numpy.int64) * self.page_size + cells % self.page_size
            host["kv_rows"][: n * each] = cells.ravel()
        self._arena.upload()

    def carry(self, shape: StepShape, found: Tensor, last: Tensor) -> None:
        """Bring the tokens of the step before to the inputs of one that was filled ahead, without
        host work: found [rows] its picks, of which a negative one counts as 0, and last [sequences]
        the row that each sequence ended on, which with chains is the number of accepted drafts."""
        S, each = shape.sequences, shape.each
        new = self.view("last", S)
        if each == 1:
            torch.clamp(found[:S], min=0, out=new)
            return
        lengths = self.view("lengths", S)
        real = lengths > 0
        gained = torch.where(real, last[:S], 0)
        first = torch.arange(0, S * each, each, device=found.device)
        torch.clamp(found[first + gained], min=0, out=new)
        lengths += gained
        positions = self.view("positions", S * each).view(S, each)
        positions += gained[:, None]
        if self.spare < 0:
            return
        steps = torch.arange(-each, 0, device=found.device)
        cells = (lengths[:, None] + steps).clamp_min(0)
        pages = self.tables[shape.keys].device[:S].gather(1, cells // self.page_size).long()
        rows = pages * self.page_size + cells % self.page_size
        kv_rows = self.view("kv_rows", S * each).view(S, each)
        kv_rows.copy_(torch.where(real[:, None], rows, -1))

    def _rules(self, requests: Sequence[Request], each: int) -> None:
        """What of a request does not change from step to step."""
        host, n = self._arena.host, len(requests)
        host["slots"][:n] = [r.slot for r in requests]
        params = [r.params for r in requests]
        values: dict[str, list[Any]] = {
            "seeds": [r.seed for r in requests],
            "temperature": [0.0 if p.greedy else p.temperature for p in params],
            "top_p": [p.top_p for p in params],
            "min_p": [p.min_p for p in params],
            "top_k": [min(max(p.top_k, 0), self.vocab) for p in params],
        }
        for name, value in values.items():
            rows = host[name][: n * each].reshape(n, each)
            rows[:] = numpy.array(value, dtype=rows.dtype)[:, None]

    def _pad(self, shape: StepShape, n: int) -> None:
        host, first = self._arena.host, n * shape.each
        pads = {"slots": -1, "lengths": 0, "wanted": 0, "last": 0}
        for name, value in pads.items():
            host[name][n : shape.sequences] = value
        row_pads = {"seeds": 0, "positions": 0, "kv_rows": -1, "top_k": 0}
        row_pads |= {"temperature": 0, "top_p": 1, "min_p": 0}
        for name, value in row_pads.items():
            host[name][first : shape.rows] = value
        if self.spare < 0:
            host["kv_rows"][: shape.rows] = -1
