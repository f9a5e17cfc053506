"""One tile tried on the GPU: is it right, and how fast? Everything here runs in a child process.

Right means three things. At up to `GATE_TOKENS` tokens the tile's result is held against the twin
and the fp64 oracle by the spec's own tolerance. At the full size, where an oracle would not fit, it
may be no farther from the default tile than two right results can be. And it repeats to the bit.
"""

import contextlib
import gc
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton import device
from nemotriton.autotune import parity
from nemotriton.autotune.ceilings import Ceilings, measure
from nemotriton.autotune.provenance import driver_version
from nemotriton.autotune.timing import CudaStopwatch, Stopwatch, Timing, race, rotation
from nemotriton.kernels.op import (
    DTYPES,
    SPECS,
    Args,
    Case,
    Exact,
    KernelSpec,
    Relative,
    Tile,
    Twin,
    use_tile,
)

GATE_TOKENS = 2048  # oracles of attention and of experts in float64 still fit an 80 GB card
ROOM = 0.25  # share of the free memory that the rotated input sets may take


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: an op at one case, token count and dtype."""

    op: str
    case: Case
    tokens: int
    dtype: str

    @property
    def spec(self) -> KernelSpec:
        return SPECS[self.op]

    @property
    def key(self) -> dict[str, Any]:
        """The case as the tune cache and the benchmark rows spell it."""
        return {"dtype": self.dtype, **self.case}

    @property
    def default(self) -> Tile:
        """The tile of an untuned call, which the op chooses by the bucket of its tokens."""
        upto = next((b for b in self.spec.tokens if self.tokens <= b), self.tokens)
        return self.spec.default(self.case, upto)

    def __str__(self) -> str:
        return f"{self.op} {self.case!r} {self.dtype} T={self.tokens}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one tile: microseconds, or why it is out."""

    us: float | None
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """The device and software of a measurement."""

    gpu: device.DeviceInfo
    driver: str
    ceilings: Ceilings


class Runner(Protocol):
    """What sweep and benchmarks ask of a GPU; a tile of None is the one that the op takes."""

    def facts(self) -> Facts:
        """The device, with its measured ceilings."""

    def trial(self, point: Point, tile: Tile | None) -> Trial:
        """Hold the tile against its twin, then time single launches."""

    def vet(self, point: Point, tile: Tile | None) -> str | None:
        """Why the tile is wrong at full size; None when it is right there."""

    def race(self, point: Point, tiles: Sequence[Tile | None]) -> list[Timing]:
        """Time the tiles against each other."""

    def close(self) -> None:
        """Give the GPU back."""


def cuda_runner() -> "TileRunner":
    """The Runner of the first CUDA device, for a process that may die of it."""
    where = torch.device("cuda", 0)
    torch.cuda.set_device(where)
    return TileRunner(where, CudaStopwatch(where))


class TileRunner:
    """The Runner of one device; holds the buffers of the point it was last asked about."""

    def __init__(self, where: torch.device, watch: Stopwatch) -> None:
        self.where = where
        self.watch = watch
        self._at: Point | None = None
        self._gate: Gate | None = None
        self._sets: list[Args] = []
        self._repeat = False

    def facts(self) -> Facts:
        return Facts(device.info(self.where), driver_version(), measure(self.watch, self.where))

    def trial(self, point: Point, tile: Tile | None) -> Trial:
        try:
            gate = self._enter(point)
            verdict = gate.verdict(tile)
            if not verdict.ok:
                return Trial(None, f"parity at {gate.tokens} tokens: {verdict.detail}")
            timed = race([self.watch.single(self._calls(tile))], samples=3, warm_up=0)
        except Exception as error:  # a compiler pass may raise anything: it is this tile's result
            return Trial(None, self._reason(error))
        return Trial(timed[0].us)

    def vet(self, point: Point, tile: Tile | None) -> str | None:
        try:
            gate = self._enter(point)
            args = self._sets[0]
            with forced(point.op, tile):
                first, second = parity.run(point.spec, args), parity.run(point.spec, args)
            for name, value in first.items():
                if not same_bits(value, second[name]):
                    return f"{name} differs between two runs"
            del second
            with use_tile(point.op, point.default):
                return gate.apart(first, parity.run(point.spec, args))
        except Exception as error:  # as above
            return self._reason(error)

    def race(self, point: Point, tiles: Sequence[Tile | None]) -> list[Timing]:
        self._enter(point)
        replays = [self.watch.capture(self._calls(tile), self._repeat) for tile in tiles]
        return race(replays, samples=9, warm_up=32)

    def close(self) -> None:
        self._at, self._gate, self._sets = None, None, []

    def _enter(self, point: Point) -> "Gate":
        if self._at != point or self._gate is None:
            self.close()
            gc.collect()
            torch.cuda.empty_cache()
            self._gate = Gate.within_memory(point, self.where)
            self._sets, self._repeat = input_sets(point, self.where)
            self._at = point
        return self._gate

    def _calls(self, tile: Tile | None) -> list[Callable[[], Any]]:
        assert self._at is not None
        op = self._at.spec.op

        def call(args: Args) -> Any:
            with forced(op.name, tile):
                return op.triton(**args)

        return [lambda args=args: call(args) for args in self._sets]  # type: ignore[misc]

    def _reason(self, error: Exception) -> str:
        text = reason(error)
        if self.where.type == "cuda":
            try:
                torch.cuda.synchronize(self.where)
            except RuntimeError as fatal:  # the context is lost: only a new process can go on
                raise ContextLost(text) from fatal
        return text


class ContextLost(Exception):
    """The CUDA context took a fault that it does not recover from."""


def reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def forced(op: str, tile: Tile | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if tile is None else use_tile(op, tile)


def seed_of(point: Point) -> int:
    return zlib.crc32(str(point).encode())


def input_sets(
    point: Point, where: torch.device, make: Callable[..., Args] | None = None
) -> tuple[list[Args], bool]:
    """Throw-away inputs of `point`, each set drawn anew, and whether a replay may repeat them."""
    build = make or point.spec.make
    dtype = DTYPES[point.dtype]
    rng = parity.generator(seed_of(point) + 1, where)
    first = build(point.case, point.tokens, where, dtype, rng)
    held = max(sum(t.nbytes for t in tensors(first)), 1)
    touched = point.spec.cost(point.case, point.tokens, dtype).bytes
    room = int(ROOM * device.free_memory(where)) + held
    plan = rotation(touched, held, device.info(where).l2 or 64 << 20, room)
    more = (build(point.case, point.tokens, where, dtype, rng) for _ in range(plan.sets - 1))
    return [first, *more], plan.repeat


def tensors(args: Args) -> list[torch.Tensor]:
    found = []
    for value in args.values():
        parts = value if isinstance(value, tuple) else (value,)
        found += [part for part in parts if isinstance(part, torch.Tensor)]
    return found


# ---------------------------------------------------------------------------------------- the gate
class Gate:
    """Twin and oracle of a point, computed once and held against every tile."""

    def __init__(
        self,
        point: Point,
        where: torch.device,
        tokens: int,
        make: Callable[..., Args] | None = None,
    ) -> None:
        self.spec = point.spec
        self.op = point.op
        self.case = point.case
        self.tokens = tokens
        rng = parity.generator(seed_of(point), where)
        build = make or self.spec.make
        self.args = build(point.case, tokens, where, DTYPES[point.dtype], rng)
        self.twin = parity.run(self.spec, self.args, ref=True)
        self.oracle = parity.oracle(self.spec, self.args)
        self.own = {k: _distance(self.twin[k], v) for k, v in self.oracle.items()}

    @classmethod
    def within_memory(cls, point: Point, where: torch.device) -> "Gate":
        """The gate at the point's tokens, or at the most up to `GATE_TOKENS` whose oracle fits."""
        tokens = min(point.tokens, GATE_TOKENS)
        while tokens > 1:
            with contextlib.suppress(torch.OutOfMemoryError):
                return cls(point, where, tokens)
            tokens //= 2
            gc.collect()  # what the failed attempt held hangs on its traceback
            torch.cuda.empty_cache()
        return cls(point, where, tokens)

    def verdict(self, tile: Tile | None) -> parity.Verdict:
        with forced(self.op, tile):
            out = parity.run(self.spec, self.args)
        return parity.compare(self.spec, out, self.twin, self.oracle, self.case)

    def apart(self, out: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str | None:
        """Why `out` and `other`, of inputs too large for an oracle, cannot both be right.

        Each right result is within the tolerance of the truth, so the two are within twice that;
        the twin's own error is taken relative to the largest value, which the size changes little.
        """
        rule = self.spec.tolerance
        for name, b in other.items():
            a = out[name]
            if isinstance(rule, Exact) or not a.is_floating_point():
                if not same_bits(a, b):
                    return f"{name} differs from the default tile's"
                continue
            if not torch.equal(_wide(a).isfinite(), _wide(b).isfinite()):
                return f"{name} is not finite where the default tile's is, or the other way round"
            if isinstance(rule, Relative):
                u, v = _finite(a), _finite(b)
                far, limit = float((u - v).norm() / v.norm().clamp_min(1e-30)), 2 * rule.limit
            else:
                assert isinstance(rule, Twin)
                far = _distance(a, b)
                limit = 2 * (rule.times * self.own.get(name, 0.0) + torch.finfo(a.dtype).eps)
            if far > limit:
                return f"{name} is {far:.1e} from the default tile's, {limit:.1e} are allowed"
        return None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _finite(x: torch.Tensor) -> torch.Tensor:
    return _wide(x).nan_to_num(0.0, 0.0, 0.0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference over the largest value of b; 0 for empty or integer tensors."""
    if a.numel() == 0 or not a.is_floating_point():
        return 0.0
    u, v = _finite(a), _finite(b)
    return float((u - v).abs().max() / v.abs().max().clamp_min(1e-30))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, a NaN being equal to a NaN."""
    if a.dtype.itemsize == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
