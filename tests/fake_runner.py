"""A GPU that is not there: a toy op whose tiles can be wrong, slow or deadly, and its runner."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nemotriton.autotune.ceilings import Ceilings
from nemotriton.autotune.timing import Call, Replay, Timing
from nemotriton.autotune.trial import Facts, Point, Trial
from nemotriton.device import DeviceInfo
from nemotriton.kernels.op import OPS, SPECS, Case, Cost, KernelSpec, Op, Tile

GPU = DeviceInfo("Fake GPU", "fake_gpu", (9, 0), 132, 232448, 50 << 20, 80 << 30)
FACTS = Facts(GPU, "580.1", Ceilings(4000.0, 4200.0, 700.0, 50.0))
DEFAULT = Tile(BLOCK=1, num_warps=4)
TILES = [Tile(BLOCK=b, num_warps=4) for b in (1, 2, 4, 8)]


def twice_ref(x: torch.Tensor) -> torch.Tensor:
    """Twin of `twice`."""
    return x * 2


def twice(x: torch.Tensor) -> torch.Tensor:
    """2 x, but tile 8 is wrong, tile 16 cannot be held, and tile 32 is wrong at 64 rows only."""
    block = SPECS["twice"].tile(x.shape[0], x, D=x.shape[1])["BLOCK"]
    if block == 16:
        raise RuntimeError("out of resource: shared memory, Required: 300000")
    wrong = block == 8 or (block == 32 and x.shape[0] == 64)
    return x * (3 if wrong else 2)


@contextmanager
def toy(tiles: list[Tile]) -> Iterator[KernelSpec]:
    """The spec of `twice`, registered inside the block; `tiles` may be changed while it lives."""
    spec = KernelSpec(
        op=Op(twice, twice_ref),
        kernels=(),
        cases=lambda config: [Case(D=config.width)],
        small=[Case(D=4)],
        tokens=(1, 16, 64),
        make=lambda case, T, dev, dtype, rng: {
            "x": torch.randn(T, case.D, generator=rng, device=dev).to(dtype)
        },
        tiles=lambda case: list(tiles),
        default=lambda case, T: DEFAULT,
        cost=lambda case, T, dtype: Cost(T * case.D, 2 * T * case.D * dtype.itemsize),
    )
    try:
        yield spec
    finally:
        del OPS["twice"], SPECS["twice"]


@dataclass
class FakeRunner:
    """Times by `us(point, tile)`; `act` says what a trial of a tile does instead."""

    us: Callable[[Point, Tile], float] = lambda point, tile: 10.0 / int(tile["BLOCK"])
    act: dict[Tile, str] = field(default_factory=dict)
    bad_at_size: set[Tile] = field(default_factory=set)
    tried: list[tuple[Point, Tile]] = field(default_factory=list)
    raced: list[tuple[Point, tuple[Tile, ...]]] = field(default_factory=list)

    def facts(self) -> Facts:
        return FACTS

    def trial(self, point: Point, tile: Tile | None) -> Trial:
        tile = tile or point.default
        self.tried.append((point, tile))
        what = self.act.get(tile)
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif what == "exit":
            os._exit(3)
        elif what == "hang":
            time.sleep(60)
        elif what == "stop":
            raise KeyboardInterrupt
        elif what is not None:
            return Trial(None, what)
        return Trial(self.us(point, tile))

    def vet(self, point: Point, tile: Tile | None) -> str | None:
        return "differs between two runs" if tile in self.bad_at_size else None

    def race(self, point: Point, tiles: Sequence[Tile | None]) -> list[Timing]:
        named = [t or point.default for t in tiles]
        self.raced.append((point, tuple(named)))
        times = [self.us(point, t) for t in named]
        return [Timing(us, 0.99 * us, 1.01 * us, 15) for us in times]

    def close(self) -> None:
        pass


@dataclass
class FakeStopwatch:
    """Runs every call once for real and says that each took `us`."""

    us: float = 5.0
    calls: int = 0

    def capture(self, calls: Sequence[Call], repeat: bool) -> Replay:
        return self.single(calls)

    def single(self, calls: Sequence[Call]) -> Replay:
        def replay() -> float:
            self.calls += 1
            results: list[Any] = [call() for call in calls]
            assert results
            return self.us

        return replay
