"""Dependent launches: a decode kernel comes up while the one before it is still finishing.

A decode step is hundreds of short kernels in a row, and between two of them the memory idles for
microseconds: the last programs of one drain, the next one starts, reads its tables, waits for its
first weights. Programmatic dependent launch (CUDA programming guide; PTX `griddepcontrol`; compute
capability 9.0 and later) lets the second kernel start early. Every kernel of the decode path keeps
to one convention:

* The wrapper passes `PDL=pdl, launch_pdl=pdl` of `dependent(x)`, or `**as_dependent(x)`.
* The kernel has, at the top level of its body, `if PDL: tl.extra.cuda.gdc_wait()`. So every program
  waits exactly once, pads and those that leave early too: then a kernel ends after all kernels
  before it have, and whoever waits for its neighbour waits for the whole step so far. It waits
  before it first reads what another kernel of a step may have written (activations, states, caches,
  index tables), and before it first writes anything.
* Before it waits it may compute addresses and read or `prefetch` weights, which nobody writes: that
  is the gain.
* What was written two launches ago or earlier it may read before, past L1 (`.cg`): the kernel in
  between let it come after its own wait only.
* `gdc_launch_dependents()` comes after the wait, and late, when a program has issued its last large
  load: programs that wait hold registers and shared memory, and with an early call the experts ran
  1.9 times slower. Kernels of a few small programs call it at once. One that never calls it lets
  the next one come when its programs leave.

A plain launch in between is always right: it starts when everything before it has ended. A graph
keeps the attribute of what it captures.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
import triton
import triton.language as tl

from nemotriton.kernels.op import target

_ALLOWED: ContextVar[bool] = ContextVar(
    "dependent launches", default=os.environ.get("NEMOTRITON_PDL", "1") != "0"
)
_FORKED: ContextVar[bool] = ContextVar("forks while capturing", default=True)
_REHEARSED: ContextVar[bool] = ContextVar("launches of a capture to come", default=False)


def dependent(where: torch.Tensor) -> bool:
    """Whether a decode kernel on `where`'s device is launched as a dependent of the one before it.

    False in the interpreter, below compute capability 9.0 (of the GPU or, for `meta` tensors, of
    `compile_only`), inside `independent()`, and with NEMOTRITON_PDL=0 in the environment."""
    return _ALLOWED.get() and target(where.device) >= 90


def as_dependent(where: torch.Tensor) -> dict[str, bool]:
    """`dependent(where)` as a kernel's constant and as its launch option."""
    pdl = dependent(where)
    return {"PDL": pdl, "launch_pdl": pdl}


@contextlib.contextmanager
def independent() -> Iterator[None]:
    """Inside the block every kernel starts when the one before it has ended. What a graph captured
    outside the block stays as it was captured."""
    token = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@contextlib.contextmanager
def forked(wanted: bool) -> Iterator[None]:
    """Inside the block `side_by_side` takes a second stream while a graph is captured, or never."""
    token = _FORKED.set(wanted)
    try:
        yield
    finally:
        _FORKED.reset(token)


@contextlib.contextmanager
def rehearsed() -> Iterator[None]:
    """Inside the block `side_by_side` launches the kernels that it would while a graph is captured,
    so that none is compiled, loaded or tuned for the first time there."""
    token = _REHEARSED.set(True)
    try:
        yield
    finally:
        _REHEARSED.reset(token)


Work = Callable[[], torch.Tensor]


@contextlib.contextmanager
def side_by_side(where: torch.Tensor) -> Iterator[Callable[[Work], Work]]:
    """Gives `start(work)`, which does `work` on a second stream of `where`'s device while a graph
    is captured: what follows in the block then runs beside it, but for other started work, which
    comes after it. `start` returns what gives the result; call that inside the block, before
    anything that `work` reads is let go.

    Elsewhere `work` is done at once. On the second stream launches are plain: programs that wait
    there would take the room of those that work on the first."""
    forks = _FORKED.get() and where.is_cuda
    if not (forks and torch.cuda.is_current_stream_capturing()):
        yield _as_there if forks and _REHEARSED.get() else _at_once
        return
    first, second = torch.cuda.current_stream(where.device), _second_stream(where.device)

    def start(work: Work) -> Work:
        second.wait_stream(first)
        with torch.cuda.stream(second), independent():
            result = work()
            done = second.record_event()

        def join() -> torch.Tensor:
            first.wait_event(done)
            return result

        return join

    yield start


def _at_once(work: Work) -> Work:
    result = work()
    return lambda: result


def _as_there(work: Work) -> Work:
    with independent():
        return _at_once(work)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@triton.jit
def prefetch(at):
    """Bring the L2 line of every pointer of a tensor `at` near; compiled kernels only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )
