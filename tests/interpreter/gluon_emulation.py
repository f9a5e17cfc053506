"""Runs Gluon kernels that work by roles on the CPU: torch tensors for values, a thread a role.

Copies by TMA arrive at random later times, and what they will overwrite is NaN until then; waits
see only the parity of a barrier's phase. So a missing barrier, a skipped phase, a stage reused too
early or two roles that wait for each other end in NaN, a failed assertion or a timeout. What is not
emulated: layouts (all are the same here), registers, and the overlap of asynchronous products.
"""

import __future__

import builtins
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nemotriton.kernels.attention_hopper import FUSED, ROUND_BF16, ROUND_FP16, SCALE
from nemotriton.kernels.numerics import relu2_ref
from nemotriton.kernels.op import Tile
from nemotriton.kernels.ssd_blocks import DECAYED, WEIGHTED
from tests.interpreter import ssd_assembly

PATIENCE = 30.0  # seconds that a role waits before it is called stuck


class Layout:
    """Stands for every layout."""

    def __init__(self, *args: Any) -> None:
        self.value = self

    @staticmethod
    def get_default_for(*args: Any) -> "Layout":
        return Layout()


class Pointer:
    """A tensor's storage from its first element on, and offsets into it."""

    def __init__(self, base: torch.Tensor, offset: Any = 0) -> None:
        assert base.is_contiguous()
        self.base, self.offset = base.view(-1), offset
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.base, self.offset + more)

    def at(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        offset = torch.as_tensor(self.offset)
        on = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
        offset, on = torch.broadcast_tensors(offset, on)
        inside = (offset >= 0) & (offset < self.base.numel())
        assert bool(inside[on].all()), "out of bounds"
        return torch.where(on, offset, 0), on


class Memory:
    """A tile, or stages of tiles, in shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def index(self, i: Any) -> "Memory":
        return Memory(self.tensor[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Memory":
        return Memory(self.tensor.narrow(dim, start, length))

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def reshape(self, shape: tuple[int, ...]) -> "Memory":
        return Memory(self.tensor.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Memory":
        return Memory(self.tensor.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.tensor.shape
        assert value.dtype == self.tensor.dtype
        self.tensor.copy_(value)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> "Memory":
        size = shape[0] * shape[1] * dtype.itemsize
        return Memory(self.tensor.view(-1).view(torch.uint8)[:size].view(dtype).view(shape))


class Descriptor:
    """A matrix, or a row of numbers, that is moved in blocks."""

    def __init__(self, made: Any) -> None:
        whole = made.base.as_strided(made.shape, made.strides)
        self.tensor, self.dtype, self.layout = whole, whole.dtype, 0
        self.block_shape = made.block_shape
        size = torch.Size(self.block_shape).numel() * whole.dtype.itemsize
        self.block_type = SimpleNamespace(nbytes=size)

    def part(self, at: list[int]) -> tuple[slice, ...]:
        assert all(a >= 0 for a in at)
        return tuple(slice(a, a + n) for a, n in zip(at, self.block_shape, strict=True))


class Barrier:
    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.parity = self.bytes = 0

    def check(self) -> None:
        assert self.pending >= 0
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.parity ^= 1


class Machine:
    """One program at a time: its barriers, copies under way, and threads."""

    def __init__(self, seed: int) -> None:
        self.change = threading.Condition()
        self.random = random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.stores: dict[int, int] = {}
        self.over = False
        self.wrong: list[BaseException] = []
        self.here = threading.local()

    # ------------------------------------------------------------------------------- barriers
    def expect(self, bar: Barrier, size: int) -> None:
        with self.change:
            bar.pending -= 1
            bar.bytes += size
            bar.check()
            self.change.notify_all()

    def arrive(self, bar: Barrier, pred: Any = True) -> None:
        if pred:
            self.expect(bar, 0)

    def wait(self, bar: Barrier, phase: Any) -> None:
        self.until(lambda: bar.parity != int(phase))

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        with self.change:
            while not true():
                self.change.wait(0.2)
                if self.wrong or time.monotonic() > end:
                    raise RuntimeError(f"{threading.current_thread().name} is stuck")

    # --------------------------------------------------------------------------------- copies
    def load(self, desc: Descriptor, at: list[Any], bar: Barrier, to: Memory) -> None:
        place = desc.part([int(a) for a in at])
        assert to.tensor.shape == tuple(desc.block_shape)

        def arrive() -> None:
            found = desc.tensor[place]
            to.tensor.zero_()
            to.tensor[tuple(builtins.slice(0, n) for n in found.shape)] = found
            bar.bytes -= desc.block_type.nbytes
            bar.check()

        with self.change:
            to.tensor.fill_(float("nan"))
            self.copies.append(arrive)

    def save(self, desc: Descriptor, at: list[Any], source: Memory) -> None:
        place, me = desc.part([int(a) for a in at]), threading.get_ident()

        def arrive() -> None:
            part = desc.tensor[place]  # cut off at the matrix's edges
            part.copy_(source.tensor[tuple(builtins.slice(0, n) for n in part.shape)])
            self.stores[me] -= 1

        with self.change:
            self.stores[me] = self.stores.get(me, 0) + 1
            self.copies.append(arrive)

    def store_wait(self, left: int) -> None:
        me = threading.get_ident()
        self.until(lambda: self.stores.get(me, 0) <= left)

    def engine(self) -> None:
        while not self.over:
            with self.change:
                if self.copies:
                    self.copies.pop(self.random.randrange(len(self.copies)))()
                    self.change.notify_all()
            time.sleep(0)

    # ---------------------------------------------------------------------------------- roles
    def specialize(self, parts: list[Any], warps: list[int], registers: list[int]) -> None:
        program = self.here.program

        def role(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.here.program = program
            try:
                function(*args)
            except BaseException as error:
                self.wrong.append(error)

        named = [(f"{f.__name__} {i}", f, args) for i, (f, args) in enumerate(parts)]
        threads = [threading.Thread(target=role, args=(f, a), name=n) for n, f, a in named]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self.wrong:
            raise self.wrong[0]

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self.here.program[0])

    def num_programs(self, axis: int) -> int:
        return self.here.program[1]


# -------------------------------------------------------------------------------------- language
def each(*bounds: Any) -> Iterator[torch.Tensor]:
    for i in builtins.range(*(int(b) for b in bounds)):
        yield torch.tensor(i)


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> torch.Tensor:
    offset, on = pointer.at(mask)
    return torch.where(on, pointer.base[offset], torch.tensor(other, dtype=pointer.base.dtype))


def store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    offset, on = pointer.at(mask)
    assert value.dtype == pointer.base.dtype
    pointer.base[offset[on]] = value.broadcast_to(offset.shape)[on]


def assembly(
    code: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
) -> torch.Tensor:
    if code in (ROUND_BF16.value, ROUND_FP16.value):
        return args[0].to(dtype)
    if code == FUSED.value:
        return args[0] * args[1] + args[2]
    if code == SCALE.value:
        return args[0] * args[1]
    run = {DECAYED.value: ssd_assembly.decayed, WEIGHTED.value: ssd_assembly.weighted}[code]
    bits = [v.view(torch.uint16) if v.dtype == torch.bfloat16 else v for v in args]
    (found,) = run(*(v.numpy() for v in torch.broadcast_tensors(*bits)))
    return torch.from_numpy(found).view(torch.bfloat16)


def product(a: Any, b: Memory, acc: torch.Tensor, use_acc: bool = True, **_: bool) -> torch.Tensor:
    left = (a.tensor if isinstance(a, Memory) else a).float()
    found = left @ b.tensor.float()
    return found + acc if use_acc else found


def product_wait(left: int, deps: tuple[Any, ...]) -> Any:
    return deps[0] if len(deps) == 1 else deps


def language(machine: Machine) -> SimpleNamespace:
    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype is torch.int64:
            bars = [Barrier(0) for _ in range(shape[0])]
            return SimpleNamespace(index=lambda i: bars[int(i)], shape=shape)
        return Memory(torch.full(shape, float("nan"), dtype=dtype))

    layouts = ("SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "DotOperandLayout")
    return SimpleNamespace(
        **dict.fromkeys((*layouts, "NVMMASharedLayout"), Layout),
        constexpr=lambda x: x,
        bfloat16=torch.bfloat16,
        float16=torch.float16,
        float32=torch.float32,
        float8e4nv=torch.float8_e4m3fn,
        int32=torch.int32,
        int64=torch.int64,
        static_range=builtins.range,
        program_id=machine.program_id,
        num_programs=machine.num_programs,
        arange=lambda a, b, layout: torch.arange(a, b),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        split=lambda v: v.unbind(-1),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros_like=torch.zeros_like,
        where=lambda on, a, b: torch.where(torch.as_tensor(on), a, b),
        max=lambda v, axis: v.amax(axis),
        sum=lambda v, axis: v.sum(axis),
        broadcast=lambda a, b: torch.broadcast_tensors(a, b),
        fma=lambda a, b, c: a * b + c,
        cdiv=lambda a, b: -(-a // b),
        exp2=torch.exp2,
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        convert_layout=lambda v, layout, assert_trivial=False: v,
        load=load,
        store=store,
        inline_asm_elementwise=assembly,
        allocate_shared_memory=allocate,
        warp_specialize=machine.specialize,
    )


def emulate(
    modules: tuple[Any, ...],
    kernel: str,
    grid: int,
    operands: list[Any],
    options: dict[str, Any],
    seed: int = 0,
) -> None:
    """`kernel` over `grid` programs, of `modules`, in the order in which one imports the other;
    operands as the launch has them."""
    outside = r"@gluon\.jit(\(.*?\))?$|^from .*? import (\((?s:.*?)\)|.*?)$"
    machine = Machine(seed)

    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count

    names = {
        "gl": language(machine),
        "mbarrier": SimpleNamespace(
            init=init,
            expect=machine.expect,
            arrive=machine.arrive,
            wait=machine.wait,
            MBarrierLayout=Layout,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=machine.load,
            async_copy_shared_to_global=machine.save,
            store_wait=machine.store_wait,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": product,
        "warpgroup_mma_wait": product_wait,
        "range": each,
        "DECAYED": DECAYED.value,
        "WEIGHTED": WEIGHTED.value,
        "relu2": relu2_ref,
        "Tile": Tile,
    }
    for module in modules:
        source = Path(module.__file__).read_text()
        source = re.sub(outside, lambda m: "\n" * m[0].count("\n"), source, flags=re.M)
        flags = __future__.annotations.compiler_flag  # names of types are not looked up
        exec(compile(source, module.__file__, "exec", flags), names)
    engine = threading.Thread(target=machine.engine, name="engine")
    engine.start()
    try:
        for program in range(grid):
            machine.here.program = (program, grid)
            names[kernel](*map(operand, operands), **options)
            assert not machine.copies, "a copy was still under way at the program's end"
    finally:
        machine.over = True
        engine.join()


def operand(v: Any) -> Any:
    if isinstance(v, torch.Tensor):
        return Pointer(v)
    return Descriptor(v) if hasattr(v, "block_shape") else v
