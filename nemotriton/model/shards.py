"""Safetensors files: headers read and checked without touching the data, then data read in place.

A file is 8 bytes (length n of the header, little endian), n bytes of JSON that gives every tensor's
dtype, shape and byte range, and the data. Source: the format's own description (safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nemotriton.errors import CheckpointError

# dtype name in the header -> torch's dtype; sub-byte types are known to exist but not readable.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
FLOATS = ("BF16", "F16", "F32", "F64")

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit
_WINDOW = 32 << 20  # bytes asked for ahead of reading, and kept behind it
_AGAIN = "Download the file again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; begin and end are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its size in bytes and its tensors in the order of their data."""

    path: Path
    size: int
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Shard:
    """Read and check the header of `path`: no data is read.

    Raises CheckpointError for a file that is missing, too short or too long for its header, or
    whose header is not what the format says.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Download it, or remove it from the index.")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        if start == b"version ":
            raise CheckpointError(
                f"{path} is a Git LFS pointer of {size} bytes, not the weights. Run git lfs pull."
            )
        length = int.from_bytes(start, "little")
        if size < _LENGTH_BYTES or not 0 < length <= _LONGEST_HEADER:
            raise CheckpointError(f"{path} ({size} bytes) is not a safetensors file. {_AGAIN}")
        if size < _LENGTH_BYTES + length:
            raise CheckpointError(
                f"{path} is truncated inside its header: {size} bytes, the header alone ends at "
                f"{_LENGTH_BYTES + length}. {_AGAIN}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path} has a corrupt header ({error}). {_AGAIN}") from error
    return Shard(path, size, _tensors(path, header, _LENGTH_BYTES + length, size))


def _tensors(path: Path, header: Any, base: int, size: int) -> tuple[TensorInfo, ...]:
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a corrupt header: no JSON object. {_AGAIN}")
    found = [
        _tensor(path, name, entry, base) for name, entry in header.items() if name != "__metadata__"
    ]
    found.sort(key=lambda info: (info.begin, info.end))
    position = base
    for info in found:
        if info.begin != position:
            raise CheckpointError(
                f"{path} has a corrupt header: the data of {info.name} begins at byte "
                f"{info.begin}, {position} was expected. {_AGAIN}"
            )
        position = info.end
    if position != size:
        state = "truncated" if size < position else "longer than its header says"
        raise CheckpointError(
            f"{path} is {state}: {size} bytes, {position} were expected. {_AGAIN}"
        )
    return tuple(found)


def _tensor(path: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} has a corrupt header: entry {name!r} is {entry!r}. {_AGAIN}"
        ) from error
    known = DTYPES.get(dtype)
    if known is not None and math.prod(shape) * known.itemsize != end - begin:
        raise CheckpointError(
            f"{path} has a corrupt header: {name} is {dtype} {list(shape)} in {end - begin} bytes. "
            f"{_AGAIN}"
        )
    return TensorInfo(name, dtype, shape, path, base + begin, base + end)


class ShardReader:
    """Tensors of one file as views of its mapped pages, which are given back as reading goes on.

    Use as a context manager, read in the order of the data, and keep no view longer than until the
    next call of `read`: pages behind it are released. ahead: have what follows read in advance;
    without, nothing is read but what is touched, for those who want a part of it.
    """

    def __init__(self, shard: Shard, ahead: bool = True) -> None:
        size = shard.path.stat().st_size if shard.path.is_file() else 0
        if size != shard.size:
            raise CheckpointError(
                f"{shard.path} has {size} bytes, but had {shard.size} when its header was read. "
                "Something is writing it; start again when it is complete."
            )
        self._path, self._size, self._ahead = shard.path, size, ahead
        self._released = self._asked = 0

    def __enter__(self) -> ShardReader:
        with self._path.open("rb") as file:
            # copy-on-write, never written: torch wants a writable buffer
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._map  # unmapped as soon as the last view of it is gone

    def read(self, info: TensorInfo) -> torch.Tensor:
        """Return a tensor of the file, in its stored dtype and shape, on the CPU."""
        dtype = DTYPES[info.dtype]
        self._advance(info.begin, info.end)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.begin)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def _advance(self, begin: int, end: int) -> None:
        """Have the pages after `end` read in advance, and give those before `begin` back."""
        if self._ahead and end > self._asked and self._asked < self._size:
            until = _page(end + _WINDOW)  # cut off at the end of the file by madvise
            self._map.madvise(mmap.MADV_WILLNEED, self._asked, until - self._asked)
            self._asked = until
        if _page(begin) - self._released >= _WINDOW:
            self._map.madvise(mmap.MADV_DONTNEED, self._released, _page(begin) - self._released)
            self._released = _page(begin)


def _page(position: int) -> int:
    """The start of the page that holds `position`."""
    return position - position % mmap.PAGESIZE
