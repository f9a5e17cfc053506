"""What every kernel file registers, and the one way a kernel is launched.

An `Op` is a Triton wrapper together with its PyTorch twin. Calling it takes the wrapper on a GPU,
on `meta` tensors under `compile_only`, and in Triton's interpreter (TRITON_INTERPRET=1); elsewhere
the twin. `use(name="ref")` swaps single ops by hand. A `KernelSpec` beside the op says which sizes
it meets, which tiles it may take and what it costs: parity tests, the sweep, the offline compile
check and the roofline row are all made from it.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import triton

from nemotriton import device
from nemotriton.autotune import cache
from nemotriton.errors import require
from nemotriton.kernels import fixed_order
from nemotriton.kernels.compiles import compiled_variants as compiled_variants
from nemotriton.kernels.stub_driver import stub_driver

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

_NONE: Mapping[str, Any] = MappingProxyType({})
_FORCED: ContextVar[Mapping[str, str]] = ContextVar("forced implementations", default=_NONE)
_TILES: ContextVar[Mapping[str, "Tile"]] = ContextVar("forced tiles", default=_NONE)
_CALLED: ContextVar["dict[str, int] | None"] = ContextVar("ops called", default=None)
_COMPILED: ContextVar["list[Compiled] | None"] = ContextVar("compile only", default=None)
_TARGET: ContextVar[int] = ContextVar("compute capability compiled for", default=0)
OPS: dict[str, "Op[..., Any]"] = {}
SPECS: dict[str, "KernelSpec"] = {}


# ------------------------------------------------------------------------------------ the types
class _Frozen(Mapping[str, V]):
    """Named values that never change and may be a key."""

    __slots__ = ("_items",)

    def __init__(self, **items: V) -> None:
        self._items = items

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._items.items())))


class Tile(_Frozen[int | bool]):
    """A tuned configuration: the kernel's block sizes with `num_warps` and `num_stages`."""

    __slots__ = ()

    def __init__(self, **items: int | bool) -> None:
        super().__init__(**dict(sorted(items.items())))

    def __repr__(self) -> str:
        return "Tile(" + ", ".join(f"{k}={v}" for k, v in self._items.items()) + ")"

    def but(self, **changes: int | bool) -> "Tile":
        """The same tile with some entries changed."""
        return Tile(**(self._items | changes))

    def without(self, *names: str) -> "Tile":
        """The same tile less these entries, which a kernel that is launched does not know."""
        return Tile(**{k: v for k, v in self._items.items() if k not in names})


class Case(_Frozen[Any]):
    """The static axes of a kernel, such as widths and head counts, by shape letter."""

    __slots__ = ()

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        try:
            return self._items[key]
        except KeyError:
            known = ", ".join(self._items)
            raise AttributeError(f"this case has no axis {key!r}, only {known}") from None

    def __repr__(self) -> str:
        return "-".join(f"{k}{v}" for k, v in self._items.items())


@dataclass(frozen=True, slots=True)
class Cost:
    """Arithmetic (`flops`) and the fewest bytes that must move (`bytes`) of one call."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Twin:
    """Tolerance: at most `times` the twin's own error against fp64, plus one ulp of the dtype."""

    times: float = 2.0


@dataclass(frozen=True, slots=True)
class Exact:
    """Tolerance: equal bits, but for at most `share` of the elements, with the reason for those."""

    share: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Relative:
    """Tolerance: relative Frobenius error, with the reason why no tighter rule applies."""

    limit: float
    reason: str


Args = dict[str, Any]
Make = Callable[[Case, int, torch.device, torch.dtype, torch.Generator], Args]


@dataclass(frozen=True)
class KernelSpec:
    """Sizes, tiles, inputs, cost and tolerance of one op.

    `cases(config)` takes the sizes from a ModelConfig (by attribute only) and may return nothing
    for a model without that layer kind. `small` are the odd sizes of the parity tests, `tokens` the
    buckets of the token axis. `make` returns the op's keyword arguments; `mutates` names those
    written in place, `per_token` those with one row a token (the tests poison rows of them), and
    `strided` those whose row stride is free (the tests embed them in wider, misaligned tensors).
    `terms` is the length of the longest sum behind one output element. `suits` says which tiles the
    sweep measures at a number of tokens. `meaning` turns tensors of codes into the numbers that are
    compared, and that the oracle starts from. `arches`: compute capabilities (90 is 9.0) that the
    kernels are for, if not all. `may_spill`: kernels whose default tile is the fastest all the
    same. `one_tile`: all token counts of a case take the same tile. `native`: by kernel, part of an
    instruction's name that it must have. `fixed`: of the invariant mode.
    """

    op: "Op[..., Any]"
    kernels: Sequence[Any]
    cases: Callable[[Any], list[Case]]
    small: Sequence[Case]
    tokens: Sequence[int]
    make: Make
    tiles: Callable[[Case], list[Tile]]
    default: Callable[[Case, int], Tile]
    cost: Callable[[Case, int, torch.dtype], Cost]
    tolerance: Twin | Exact | Relative = field(default_factory=Twin)
    dtypes: Sequence[str] = ("bf16", "fp16", "fp32")
    small_tokens: Sequence[int] = (0, 1, 3, 17)
    mutates: Sequence[str] = ()
    per_token: Sequence[str] = ()
    strided: Sequence[str] = ()
    terms: Callable[[Case], int] = lambda case: 1
    meaning: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    suits: Callable[[Tile, int], bool] = lambda tile, tokens: True
    arches: Sequence[int] = ()
    may_spill: Sequence[str] = ()
    one_tile: bool = False
    native: Mapping[str, str] = field(default_factory=dict)
    fixed: fixed_order.FixedOrder = fixed_order.WHOLE
    _tables: dict[str, cache.Table] = field(default_factory=dict, compare=False)
    _chosen: dict[Any, Tile] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        SPECS[self.op.name] = self
        object.__setattr__(self.op, "spec", self)

    def tile(self, tokens: int, where: torch.Tensor, **axes: Any) -> Tile:
        """The tile for a call: forced by `use_tile`, tuned for this GPU, or the default."""
        forced = _TILES.get().get(self.op.name)
        if forced is not None:
            return forced
        bucket = next((b for b in self.tokens if tokens <= b), tokens)
        kind = (where.device, _TARGET.get(), where.dtype, fixed_order.phase())
        key = (bucket, *kind, *axes.values())
        tile = self._chosen.get(key)
        if tile is None:
            tile = self._chosen[key] = self._choose(bucket, where, axes)
        return tile

    def _choose(self, tokens: int, where: torch.Tensor, axes: Mapping[str, Any]) -> Tile:
        found = None
        if where.device.type == "cuda":
            gpu = device.info(where.device).slug
            if gpu not in self._tables:
                self._tables[gpu] = cache.load(self.op.name, gpu, self.source)
            dtype = DTYPE_NAMES.get(where.dtype, self.dtypes[0])  # an op of integers has one
            found = self._tables[gpu].lookup({"dtype": dtype, **axes}, tokens)
        tuned = None if found is None else Tile(**found)
        return self.fixed.choose(self.default, Case(**axes), tokens, fixed_order.phase(), tuned)

    @functools.cached_property
    def source(self) -> str:
        """sha256 over the jit functions of the modules of the op, of its kernels and `numerics`;
        tiles are not in it, so adding one to the search space leaves what is measured valid."""
        homes = {kernel.fn.__module__ for kernel in self.kernels}
        text = []
        for name in sorted({self.op.module, "nemotriton.kernels.numerics", *homes}):
            members = vars(sys.modules[name]) if name in sys.modules else {}
            text += [f"{k}\n{jit_source(v)}" for k, v in sorted(members.items()) if is_jit(v)]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()


def is_jit(value: Any) -> bool:
    """True for what `@triton.jit` returns, compiled or interpreted."""
    return hasattr(value, "fn") and hasattr(value, "run") and callable(getattr(value, "fn", None))


def jit_source(kernel: Any) -> str:
    return inspect.getsource(kernel.fn)


# ------------------------------------------------------------------------------------------- ops
class Op(Generic[P, R]):
    """A Triton wrapper (`triton`) with its twin (`ref`) under one name, and perhaps further
    implementations that are taken only when asked for (`others`)."""

    spec: KernelSpec

    def __init__(
        self,
        wrapper: Callable[P, R],
        ref: Callable[P, R],
        others: Mapping[str, Callable[P, R]] = _NONE,
    ) -> None:
        self.name = wrapper.__name__
        self.module = wrapper.__module__
        self.triton = wrapper
        self.ref = ref
        self.others = others
        functools.update_wrapper(self, wrapper)
        OPS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        called = _CALLED.get()
        if called is not None:
            called[self.name] = called.get(self.name, 0) + 1
        other = self.others.get(_FORCED.get().get(self.name, ""))
        if other is not None:
            return other(*args, **kwargs)
        alone = self.spec.fixed.twin if fixed_order.phase() else None
        twin = alone or self.ref
        return (self.triton if self.uses_triton(args, kwargs) else twin)(*args, **kwargs)

    def uses_triton(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        forced = _FORCED.get()
        choice = forced.get(self.name) or forced.get("*")
        if choice is not None:
            return choice == "triton"
        if INTERPRET:
            return True
        values = (*args, *kwargs.values())
        first = next((v for v in values if isinstance(v, torch.Tensor)), None)
        return first is not None and first.device.type in ("cuda", "meta")


def op(
    ref: Callable[P, R], others: Mapping[str, Callable[P, R]] = _NONE
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator: makes the Triton wrapper below it an Op whose twin is `ref`; `others` are further
    implementations by the name that `use` knows them by."""
    return lambda wrapper: Op(wrapper, ref, others)


@contextlib.contextmanager
def use(implementations: Mapping[str, str] | None = None, /, **by_name: str) -> Iterator[None]:
    """Force ops to "ref" (the twin) or "triton" by name inside the block; `{"*": "ref"}` means all.
    An op with further implementations also takes their names.

    UnsupportedError names an unknown op or implementation."""
    wanted = {**(implementations or {}), **by_name}
    for name, choice in wanted.items():
        known = ", ".join(sorted(OPS))
        require(name == "*" or name in OPS, f"no op is called {name!r}; there are: {known}")
        choices = ["ref", "triton", *(OPS[name].others if name in OPS else ())]
        require(
            choice in choices,
            f"op {name!r}: implementation {choice!r} is unknown; use "
            + " or ".join(repr(c) for c in choices),
        )
    token = _FORCED.set({**_FORCED.get(), **wanted})
    try:
        yield
    finally:
        _FORCED.reset(token)


@contextlib.contextmanager
def counting_calls() -> Iterator[dict[str, int]]:
    """Gives how often each op has been called inside the block, by name, in order of first call."""
    called: dict[str, int] = {}
    token = _CALLED.set(called)
    try:
        yield called
    finally:
        _CALLED.reset(token)


@contextlib.contextmanager
def use_tile(name: str, tile: Tile) -> Iterator[None]:
    """Force the tile of one op inside the block (the sweep and the tests)."""
    token = _TILES.set({**_TILES.get(), name: tile})
    try:
        yield
    finally:
        _TILES.reset(token)


# ---------------------------------------------------------------------------------------- launch
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run `kernel` over `grid`: on the GPU, in the interpreter, or compile it under `compile_only`.

    `meta` holds constexprs and launch options by name. An empty grid launches nothing."""
    compiled = _COMPILED.get()
    if compiled is not None:
        compiled.append(Compiled(kernel.__name__, kernel.warmup(*args, grid=(1,), **meta)))
        return
    if 0 in grid:
        return
    if INTERPRET:
        meta = {k: v for k, v in meta.items() if k not in _OPTIONS}
    kernel[grid](*args, **meta)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel compiled under `compile_only`, with Triton's own handle (`asm`, `metadata`)."""

    name: str
    kernel: Any


@contextlib.contextmanager
def compile_only(arch: int) -> Iterator[list[Compiled]]:
    """Compile instead of launching, for compute capability `arch` (90, 100, 120), with no GPU.

    Ops called on `meta` tensors inside the block append what Triton compiled to the list. The
    argument specialisation is Triton's own. Needs the real compiler: UnsupportedError under
    TRITON_INTERPRET=1."""
    require(
        not INTERPRET, "compile_only needs the compiler: unset TRITON_INTERPRET and start again"
    )
    from triton.runtime.driver import driver

    previous = driver._active if hasattr(driver, "_active") else None
    driver.set_active(stub_driver(arch))
    done: list[Compiled] = []
    token = _COMPILED.set(done)
    clear_compiled()
    try:
        with targeting(arch):
            yield done
    finally:
        _COMPILED.reset(token)
        clear_compiled()
        driver.set_active(previous)


@contextlib.contextmanager
def targeting(arch: int) -> Iterator[None]:
    """Inside the block default tiles are those for compute capability `arch` (90, 100, 120)."""
    token = _TARGET.set(arch)
    try:
        yield
    finally:
        _TARGET.reset(token)


def on_hopper() -> bool:
    """Whether default tiles are chosen for compute capability 9.x: that of `targeting`, or of the
    current GPU."""
    if INTERPRET:
        return False
    return (_TARGET.get() or 10 * device.info().capability[0]) // 10 == 9


def target(where: torch.device) -> int:
    """Compute capability (90, 100, ...) that kernels on `where` are compiled for; 0 where they are
    interpreted, or where there are none."""
    if INTERPRET:
        return 0
    if where.type == "cuda":
        major, minor = device.info(where).capability
        return 10 * major + minor
    return _TARGET.get()


def tile_lookups() -> int:
    """How many different calls have had their tile chosen, from the tune cache or by default."""
    return sum(len(spec._chosen) for spec in SPECS.values())


def clear_compiled() -> None:
    """Forget compiled kernels: the per-device cache would hand out the previous target's."""
    for spec in SPECS.values():
        for kernel in spec.kernels:
            if hasattr(kernel, "device_caches"):
                kernel.device_caches.clear()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_pow2(n: int) -> int:
    """The smallest power of two that is >= n (1 for 0)."""
    return triton.next_power_of_2(max(n, 1))


def acc_dtype(x: torch.Tensor) -> torch.dtype:
    """What a twin computes in: float64 for float64 inputs (then it is the oracle), else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
