"""Checks every address that an interpreted kernel reads or writes: a memcheck without a GPU.

A kernel may touch the elements of the tensors that it was given, and nothing between or behind
them. `install()` lets the interpreter note the extents of a launch's tensors, and hold each
unmasked address of its loads, stores and atomics against them. A value that was read beyond and
then not used would pass all comparisons of results, and be an illegal access on a GPU if the
memory behind the tensor happens not to be mapped.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter as stock
from triton.tools.tensor_descriptor import TensorDescriptor

Array = np.ndarray


class OutOfBounds(AssertionError):
    """An address outside of all tensors of the launch."""


class Extents:
    """The memory of one launch's tensors, as disjoint intervals of addresses."""

    def __init__(self, values: Iterable[Any]) -> None:
        found = sorted(_intervals(values))
        joined: list[list[int]] = []
        for begin, end in found:
            if joined and begin <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([begin, end])
        self.begins = np.array([b for b, _ in joined], np.uint64)
        self.ends = np.array([e for _, e in joined], np.uint64)

    def check(self, addresses: Array, wanted: Array, nbytes: int, what: str) -> None:
        """OutOfBounds unless each wanted element lies wholly in one interval."""
        places = np.broadcast_to(addresses, np.broadcast_shapes(addresses.shape, wanted.shape))
        places = places[np.broadcast_to(wanted, places.shape).astype(bool)].astype(np.uint64)
        if not places.size:
            return
        if not self.begins.size:
            raise OutOfBounds(f"{what}: the launch has no tensors")
        which = np.searchsorted(self.begins, places, side="right").astype(np.int64) - 1
        inside = (which >= 0) & (places + np.uint64(nbytes) <= self.ends[np.maximum(which, 0)])
        if not inside.all():
            self._tell(int(places[~inside][0]), int((~inside).sum()), places.size, what)

    def _tell(self, place: int, wrong: int, size: int, what: str) -> None:
        before = [place - int(e) for e in self.ends if int(e) <= place]
        behind = [int(b) - place for b in self.begins if int(b) > place]
        near = [f"{min(before)} bytes behind the end of a tensor"] if before else []
        near += [f"{min(behind)} bytes before the begin of one"] if behind else []
        raise OutOfBounds(f"{what} of {wrong} of {size} elements: {' and '.join(near)}")


def _intervals(values: Iterable[Any]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for value in map(stock._unwrap_tensor, values):
        if isinstance(value, tuple | list):
            found += _intervals(value)
        elif isinstance(value, TensorDescriptor):
            found += _intervals([value.base])
        elif isinstance(value, torch.Tensor) and value.numel():
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            begin = value.data_ptr()
            found.append((begin, begin + (last + 1) * value.element_size()))
    return found


_EXTENTS: list[Extents] = []  # of the launches under way, the innermost last
_REACHED: list[torch.Tensor] = []


@contextlib.contextmanager
def reaching(*tensors: torch.Tensor) -> Iterator[None]:
    """Inside the block kernels may touch these as well: their addresses lie in a table."""
    _REACHED.extend(tensors)
    try:
        yield
    finally:
        del _REACHED[-len(tensors) :]


class Executor(stock.GridExecutor):
    """Runs a grid while the extents of its tensors are those that count."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        args, named = super()._init_args_hst(args_dev, kwargs)
        _EXTENTS.append(Extents([*args, *named.values(), *_REACHED]))
        return args, named

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        depth = len(_EXTENTS)
        try:
            super().__call__(*args, **kwargs)
        finally:
            del _EXTENTS[depth:]


def _check(ptrs: Any, wanted: Array, what: str) -> None:
    if _EXTENTS:
        nbytes = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        _EXTENTS[-1].check(ptrs.data, wanted, nbytes, what)


def guarded(builder: type) -> type:
    """The interpreter's builder `builder` with every access checked."""

    class Guarded(builder):
        def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            _check(ptrs, mask.data, "load")
            return super().create_masked_load(ptrs, mask, *rest, **named)

        def create_masked_store(
            self, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any
        ) -> Any:
            _check(ptrs, mask.data, "store")
            return super().create_masked_store(ptrs, value, mask, *rest, **named)

        def create_atomic_rmw(self, kind: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
            _check(ptr, mask.data, "atomic operation")
            return super().create_atomic_rmw(kind, ptr, val, mask, *rest)

        def create_atomic_cas(self, ptr: Any, *rest: Any) -> Any:
            _check(ptr, np.ones(1, bool), "atomic operation")
            return super().create_atomic_cas(ptr, *rest)

    return Guarded


def install() -> None:
    """Check the kernels of this process; after `repair.install()`, whose builder it takes."""
    checked = guarded(stock.InterpreterBuilder)
    stock.InterpreterBuilder = checked
    stock.interpreter_builder.__class__ = checked
    stock.GridExecutor = Executor
