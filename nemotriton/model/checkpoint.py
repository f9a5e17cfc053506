"""Checkpoints: find one, plan where every tensor goes, and stream the data there.

    directory = find_checkpoint("owner/name" or a path)
    source = open_source(directory)                 headers only
    plan = make_plan(source, config)                one destination a tensor, or CheckpointError
    load(source, plan, model.get)                   data, file by file

Names and shapes of destinations: `expected`. Rename rules: `renames`. Formats: `formats`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby

import torch

from nemotriton.errors import CheckpointError
from nemotriton.model.expected import Expected, Role, expected
from nemotriton.model.load_plan import LoadPlan, Part, Placement, make_plan
from nemotriton.model.shards import ShardReader, TensorInfo
from nemotriton.model.sources import Source, find_checkpoint, open_source

__all__ = [
    "Expected",
    "LoadPlan",
    "Part",
    "Placement",
    "Role",
    "Source",
    "copy",
    "cut",
    "destination_dtype",
    "expected",
    "find_checkpoint",
    "load",
    "make_plan",
    "open_source",
]

Progress = Callable[[int, int, str], None]

_DTYPES = {
    Role.FP32: torch.float32,
    Role.FP8: torch.float8_e4m3fn,
    Role.CODES: torch.uint8,
    Role.BLOCK_SCALE: torch.float8_e4m3fn,
    Role.SCALE: torch.float32,
}
_COMPARED_ROWS = 4096  # of two tensors that must be equal, at a time


def destination_dtype(role: Role, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a destination in a model whose weights are `dtype`: routing, the recurrence and
    scales are fp32 whatever is asked for; quantised matrices stay as they are stored."""
    return _DTYPES.get(role, dtype)


def load(
    source: Source,
    plan: LoadPlan,
    get_destination: Callable[[str], torch.Tensor],
    progress: Progress | None = None,
) -> None:
    """Read all data of `plan` into the tensors that `get_destination` gives by canonical name.

    Destinations may be on any device and have the shapes of `plan.local_shape` and the dtypes of
    `destination_dtype`; values are converted as they are copied. The host holds one mapped tensor
    at a time beside the destinations. progress(bytes done, bytes in all, tensor) is called after
    every tensor. Raises CheckpointError for scales that are used and not finite and positive, for
    an NVFP4 block whose scale is NaN, and where a tied head differs from the embeddings.
    """
    with torch.no_grad():
        _Loader(source, plan, get_destination, progress).run()


class _Loader:
    """The state of one `load`."""

    def __init__(
        self,
        source: Source,
        plan: LoadPlan,
        get_destination: Callable[[str], torch.Tensor],
        progress: Progress | None,
    ) -> None:
        self.plan, self.get_destination, self.progress = plan, get_destination, progress
        self.shards = {shard.path: shard for shard in source.shards}
        self.done = 0
        self.total = plan.nbytes
        self.destinations: dict[str, torch.Tensor] = {}
        # of every NVFP4 matrix its codes, which decide whether a NaN scale matters
        self.codes = {
            (plan.expected[p.name].matrix, p.expert): p.info
            for p in plan.placements
            if plan.expected[p.name].role is Role.CODES
        }

    def run(self) -> None:
        for head, embeddings in self.plan.equal:
            self._compare(head, embeddings)
        for path, placements in groupby(self.plan.placements, key=lambda p: p.info.path):
            with ShardReader(self.shards[path], ahead=not self.plan.parts) as reader:
                for placement in placements:
                    self._place(placement, reader)

    def _place(self, placement: Placement, reader: ShardReader) -> None:
        entry = self.plan.expected[placement.name]
        destination = self._destination(placement.name, entry)
        parts, shape = self.plan.parts.get(placement.name, ()), entry.shape
        index: int | None = 0
        if placement.expert is not None:
            index = _local_index(parts, placement.expert)
            parts, shape = tuple(Part(p.dim - 1, p.ranges) for p in parts if p.dim), shape[1:]
        if index is not None:
            data = reader.read(placement.info)
            if placement.inverted:
                data = data.float().reciprocal()
            if entry.role is Role.SCALE:
                self._check_scale(placement, data, entry)
            data = cut(data, shape, parts)
            if entry.role is Role.BLOCK_SCALE:
                data = self._checked_block_scales(placement, data, shape, parts, entry)
            copy(destination if placement.expert is None else destination[index], data)
        self.done += placement.info.nbytes
        if self.progress is not None:
            self.progress(self.done, self.total, placement.info.name)

    def _destination(self, name: str, entry: Expected) -> torch.Tensor:
        if name not in self.destinations:
            tensor = self.get_destination(name)
            shape = self.plan.local_shape(name)
            assert tensor.shape == shape, f"{name}: {tuple(tensor.shape)} for {shape}"
            dtype = destination_dtype(entry.role, tensor.dtype)
            bytes_alike = tensor.dtype.itemsize == dtype.itemsize == 1
            assert tensor.dtype == dtype or bytes_alike, f"{name}: {tensor.dtype} for {dtype}"
            if name in self.plan.absent_scales:
                tensor.fill_(torch.nan)  # whoever uses an absent scale after all sees it
            self.destinations[name] = tensor
        return self.destinations[name]

    # ---- values ---------------------------------------------------------------------------------
    def _check_scale(self, placement: Placement, data: torch.Tensor, entry: Expected) -> None:
        """Refuse a scale that is used and cannot be; an unused input scale may be anything."""
        matrix = entry.matrix
        if placement.name.endswith(".input_scale"):
            assert matrix is not None
            if not self.plan.scheme.quantises(matrix, self.plan.act_quant):
                return
        values = data.float().reshape(-1)
        bad = ~(values.isfinite() & (values > 0))
        if bool(bad.any()):
            where = int(bad.nonzero()[0])
            expert = placement.expert if placement.expert is not None else where
            of = f" (expert {expert})" if entry.experts else ""
            raise CheckpointError(
                f"{placement.info.name}{of} is {float(values[where])}; a scale must be finite and "
                f"above zero. {matrix or placement.name} cannot be computed: export it again."
            )

    def _checked_block_scales(
        self,
        placement: Placement,
        data: torch.Tensor,
        shape: tuple[int, ...],
        parts: tuple[Part, ...],
        entry: Expected,
    ) -> torch.Tensor:
        """Block scales with NaN made 0 where all codes are zero; NaN elsewhere is refused."""
        nan = (data.view(torch.uint8) & 0x7F) == 0x7F
        if not bool(nan.any()):
            return data
        used = nan
        info = self.codes.get((entry.matrix, placement.expert))
        if info is not None:
            with ShardReader(self.shards[info.path]) as reader:
                codes = cut(reader.read(info), (*shape, -1), parts)
                used = nan & ((codes & 0x77) != 0).any(-1)
        if bool(used.any()):
            first = used.nonzero()[0].tolist()
            raise CheckpointError(
                f"{placement.info.name} is NaN for {int(used.sum())} blocks that are not zero, the "
                f"first at {first}. The file is damaged or was exported wrongly; get it again."
            )
        return torch.where(nan, torch.zeros_like(nan, dtype=torch.uint8), data.view(torch.uint8))

    def _compare(self, head: TensorInfo, embeddings: TensorInfo) -> None:
        with (
            ShardReader(self.shards[head.path]) as one,
            ShardReader(self.shards[embeddings.path]) as other,
        ):
            pairs = zip(
                one.read(head).split(_COMPARED_ROWS),
                other.read(embeddings).split(_COMPARED_ROWS),
                strict=True,
            )
            if not all(torch.equal(a.float(), b.float()) for a, b in pairs):
                raise CheckpointError(
                    f"tie_word_embeddings is true, but {head.name} differs from {embeddings.name}. "
                    "Set it to false in config.json to use the head of the file."
                )


def _local_index(parts: tuple[Part, ...], expert: int) -> int | None:
    """Where `expert` lies among those this rank keeps, or None."""
    for part in parts:
        if part.dim == 0:
            offset = 0
            for start, end in part.ranges:
                if start <= expert < end:
                    return offset + expert - start
                offset += end - start
            return None
    return expert


def cut(data: torch.Tensor, shape: tuple[int, ...], parts: tuple[Part, ...]) -> torch.Tensor:
    """`data` in the shape of its destination, and of that what `parts` keep; 8-bit floats may come
    as bytes."""
    whole = -1 in shape or data.numel() == math.prod(shape)
    data = data.reshape(shape) if whole else data.reshape(()).expand(shape)
    if parts and data.dtype.itemsize == 1:
        data = data.view(torch.uint8)  # bytes can be joined whatever they stand for
    for part in parts:
        ranges = [data.narrow(part.dim, start, end - start) for start, end in part.ranges]
        data = ranges[0] if len(ranges) == 1 else torch.cat(ranges, part.dim)
    return data


def copy(destination: torch.Tensor, data: torch.Tensor) -> None:
    """Write data into its destination, converted; bytes as they are."""
    if destination.dtype.itemsize == 1:  # bytes stay bytes, whatever their type is called
        destination.view(torch.uint8).copy_(data.view(torch.uint8))
    else:
        destination.copy_(data)
