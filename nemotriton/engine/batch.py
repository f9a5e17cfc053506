"""One step as flat device tensors: decode rows first, then prefill rows, no padding between.

Built once a step on the host and moved in two copies, one of 64-bit and one of 32-bit integers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemotriton.kernels import chunk_table

if TYPE_CHECKING:
    from nemotriton.engine.replay import Cursors
    from nemotriton.engine.request import Piece

# Sections of the packed copies start on 64 bytes, so that a kernel's pointer arguments are always
# as aligned as a tensor of their own and never need another specialisation.
_ALIGN = 64
# Page tables are this many entries wide, or a multiple: their stride keeps its divisibility.
_TABLE = 16


@dataclass
class Span:
    """The decode rows, or the prefill rows, of a step; int32 tensors on the model's device.

    Decode rows move the Mamba states on, but not where drafts are among them: under `verify` each
    row leaves its state in a lane, under `trial` nothing is kept. `parents` is for draft trees;
    None means that each token follows the one before it.
    """

    start: int  # first row in the flat batch
    end: int
    cu: Tensor  # [S + 1] first row of each sequence, relative to `start`
    slots: Tensor  # [S] slot in MambaStates, -1 = none
    lengths: Tensor  # [S] tokens in the KV cache after this step, the new ones included
    pages: Tensor  # [S, max_pages], -1 where unused
    max_new: int  # most new tokens of one sequence
    max_length: int  # largest of `lengths`
    fresh: Tensor | None = None  # bool [S], prefill only: first piece, the slot holds another's
    chunks: Tensor | None = None  # [n, 3] prefill only: (sequence, first row, tokens)
    parents: Tensor | None = None  # [rows] decode only: row within the sequence, -1 = none
    verify: bool = False  # decode only: rows behind the first of a sequence are drafts
    trial: bool = False  # decode only: nothing but drafts
    cells: Tensor | None = None  # [S] see MambaStates.cells
    cursors: Cursors | None = None  # see ReplayStates.cursors; looked up with `cells`
    seeds: Tensor | None = None  # int64 [S] see MambaStates.noise; looked up with `cells`


@dataclass
class Batch:
    """What a forward pass reads: token ids, where their K/V go, and the two spans."""

    ids: Tensor  # int64 [T]
    kv_rows: Tensor  # int64 [T] page * page_size + offset, -1 = nowhere
    decode: Span | None
    prefill: Span | None
    logit_rows: Tensor  # int64 [R] rows whose logits are wanted
    next_ids: Tensor | None = None  # int64 [T] the token behind each, 0 = not known; for drafting


def build_batch(
    decode: Sequence[Piece],
    prefill: Sequence[Piece],
    logit_rows: Sequence[int],
    *,
    page_size: int,
    chunk: int | None,
    device: torch.device | str,
    parents: Sequence[int] = (),
    verify: bool = False,
    following: bool = False,
) -> Batch:
    """The batch of a step; `chunk` is the SSD chunk (None without Mamba layers).

    A request without pages (no attention layers) gets kv_rows of -1. Tokens that are not known yet,
    which are drafts, stand as 0. parents, verify: of the decode rows, see Span; no parents are
    chains. following: also make next_ids.
    """
    pieces = [*decode, *prefill]
    long, short = _Packer(torch.int64), _Packer(torch.int32)
    long.add(chain.from_iterable(_known(p, 0) for p in pieces))
    long.add(chain.from_iterable(_kv_rows(p, page_size) for p in pieces))
    long.add(logit_rows)
    long.add(chain.from_iterable(_known(p, 1) for p in pieces if following))
    for pieces_of_span in (decode, prefill):
        _pack_span(short, pieces_of_span)
    # on each sequence's own grid: prompts cut at multiples of `chunk` scan the same terms
    done = [p.start for p in prefill]
    chunks = chunk_table([p.count for p in prefill], chunk, done) if chunk else []
    short.add(value for row in chunks for value in row)
    short.add(parents)
    ids, kv_rows, rows, next_ids = long.upload(device)
    *spans, chunk_values, parent_rows = short.upload(device)
    batch = Batch(ids, kv_rows, None, None, rows, next_ids if following else None)
    if decode:
        batch.decode = _span(decode, 0, spans[:4])
        batch.decode.parents = parent_rows if parents else None
        batch.decode.verify = verify
    if prefill:
        middle = ids.numel() - sum(p.count for p in prefill)
        batch.prefill = _span(prefill, middle, spans[4:])
        fresh = torch.tensor([p.start == 0 for p in prefill], dtype=torch.bool)
        batch.prefill.fresh = fresh.to(device, non_blocking=True)
        batch.prefill.chunks = chunk_values.view(-1, 3) if chunk else None
    return batch


class _Packer:
    """Integer lists laid one behind the other, moved to the device in one copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.values = array("q" if dtype is torch.int64 else "i")
        self.sections: list[tuple[int, int]] = []

    def add(self, values: Iterable[int]) -> None:
        start = len(self.values)
        # from a list an array is made at once; an iterator's items are appended one by one
        self.values += array(self.values.typecode, list(values))
        self.sections.append((start, len(self.values)))
        self.values.extend([0] * (-len(self.values) % (_ALIGN // self.dtype.itemsize)))

    def upload(self, device: torch.device | str) -> list[Tensor]:
        host = torch.frombuffer(self.values, dtype=self.dtype)
        if torch.device(device).type == "cuda":
            host = host.pin_memory()
        whole = host.to(device, non_blocking=True)
        return [whole[start:end] for start, end in self.sections]


def _known(piece: Piece, ahead: int) -> Iterable[int]:
    """The piece's token ids, or those `ahead` of them, with 0 for what is not known."""
    ids = piece.request.tokens(piece.start + ahead, piece.end + ahead)
    return [*ids, *[0] * (piece.count - len(ids))]


def _kv_rows(piece: Piece, page_size: int) -> Iterable[int]:
    pages = piece.request.pages
    if not pages:
        return [-1] * piece.count
    held = range(piece.start // page_size, -(-piece.end // page_size))
    found: list[int] = []
    for i in held:
        first = (pages[i] - i) * page_size  # of position 0, were it in this page
        start, end = max(piece.start, i * page_size), min(piece.end, (i + 1) * page_size)
        found.extend(range(first + start, first + end))
    return found


def _pack_span(short: _Packer, pieces: Sequence[Piece]) -> None:
    cu = [0]
    for p in pieces:
        cu.append(cu[-1] + p.count)
    widest = max((len(p.request.pages) for p in pieces), default=0)
    width = -(-max(widest, 1) // _TABLE) * _TABLE
    short.add(cu)
    short.add(p.request.slot for p in pieces)
    short.add(p.end for p in pieces)
    table: list[int] = []
    for p in pieces:
        table += p.request.pages
        table += [-1] * (width - len(p.request.pages))
    short.add(table)


def _span(pieces: Sequence[Piece], start: int, packed: Sequence[Tensor]) -> Span:
    cu, slots, lengths, pages = packed
    return Span(
        start=start,
        end=start + sum(p.count for p in pieces),
        cu=cu,
        slots=slots,
        lengths=lengths,
        pages=pages.view(len(pieces), -1),
        max_new=max(p.count for p in pieces),
        max_length=max(p.end for p in pieces),
    )
