"""The search: every tile of every point, gated on correctness, the fastest kept.

A point (op, case, dtype, token count) is finished in four steps. Its tiles are compiled on the CPU,
ahead of the GPU, and those that this GPU cannot hold are dropped; each one left is held against the
twin and timed once; the best few are run at full size against the default tile; and those that
stand are raced against the default from CUDA graphs. Every step is journalled, so that a stopped
sweep goes on where it was, and the file is written after every point. Work is given to a `Runner`,
whose crash is the tile's failure and not the sweep's.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemotriton.autotune import cache, offline, store
from nemotriton.autotune.ahead import Ahead, Compiler
from nemotriton.autotune.child import MeasuringFailed
from nemotriton.autotune.store import Trials
from nemotriton.autotune.trial import Facts, Point, Runner, Trial
from nemotriton.errors import require
from nemotriton.kernels.op import SPECS, Case, KernelSpec, Tile
from nemotriton.model.config import ModelConfig

FINALISTS = 4
NEAR = 1.15  # a single launch this much slower than the best one does not win a race


@dataclass(frozen=True, slots=True)
class Compiling:
    """A tile of this kernel is waited for; `done` of `total` are compiled."""

    kernel: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Trying:
    """Progress at one point; `best` in microseconds of a single launch."""

    point: Point
    done: int
    total: int
    best: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a point ended.

    `kind`: "win" (a tile beats the default), "loss" (none does), "known" (measured before),
    "fault" (nothing could be recorded: `note` says why) or "untouched" (the budget ended)."""

    point: Point
    kind: str
    tile: Tile | None = None
    us: float | None = None
    default_us: float | None = None
    tried: int = 0
    failed: int = 0
    note: str = ""


Event = Compiling | Trying | Outcome


def nothing(jobs: Sequence[offline.Job]) -> Iterator[list[offline.Row]]:
    """A compiler that leaves all work to the measuring process."""
    yield from ()


def plan(
    kernels: Sequence[str],
    configs: Iterable[ModelConfig],
    dtypes: Sequence[str] = ("bf16",),
    tokens: Sequence[int] = (),
) -> list[Point]:
    """The points of these kernels (none named: all) for these models, each once.

    `tokens` are rounded up to a kernel's buckets; none given means every bucket. A kernel that has
    none of `dtypes` is measured in its first."""
    for name in kernels:
        require(name in SPECS, f"no kernel {name!r}; there are: {', '.join(sorted(SPECS))}")
    configs = list(configs)
    points: dict[Point, None] = {}
    for name in kernels or sorted(SPECS):
        spec = SPECS[name]
        for case in dict.fromkeys(c for config in configs for c in spec.cases(config)):
            for dtype in [d for d in dtypes if d in spec.dtypes] or spec.dtypes[:1]:
                points |= dict.fromkeys(
                    Point(name, case, upto, dtype) for upto in buckets(spec, tokens)
                )
    return list(points)


def buckets(spec: KernelSpec, tokens: Sequence[int]) -> list[int]:
    """The spec's token buckets that hold any of `tokens`; all of them for no tokens."""
    if not tokens:
        return list(spec.tokens)
    wanted = (next((b for b in spec.tokens if t <= b), None) for t in tokens)
    return sorted({b for b in wanted if b is not None})


class Sweep:
    """One run over points. `deadline` is a time of `clock`; `fresh` measures known tiles again."""

    def __init__(
        self,
        runner: Runner,
        folder: Path | None = None,
        deadline: float = float("inf"),
        compiler: Compiler = nothing,
        fresh: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.folder = folder
        self.deadline = deadline
        self.compiler = compiler
        self.fresh = fresh
        self.clock = clock

    def run(self, points: Sequence[Point]) -> Iterator[Event]:
        """Measure all points, kernel by kernel; yields progress, and one Outcome a point."""
        facts = self.runner.facts()
        trials = {k: Trials(SPECS[k], facts.gpu.slug, self.folder) for k in _ops(points)}
        known = {} if self.fresh else {k: self._recorded(SPECS[k], facts) for k in _ops(points)}
        if self.fresh:
            for journal in trials.values():
                journal.found.clear()
        done = {p: self._done(p, known.get(p.op, {})) for p in points}
        todo = [p for p in points if done[p] is None]
        ahead = Ahead(self.compiler, self._jobs(todo, trials, facts), facts.gpu.shared_memory)
        try:
            for point in points:
                outcome = done[point]
                if outcome is not None:
                    yield outcome
                else:
                    yield from self._point(point, trials[point.op], facts, ahead)
        finally:
            ahead.close()

    def _recorded(self, spec: KernelSpec, facts: Facts) -> dict[tuple[object, int], store.Data]:
        data = store.read(cache.path_of(facts.gpu.slug, spec.op.name, self.folder))
        if data is None or cache.problems(data, spec.op.name, facts.gpu.slug, spec.source):
            return {}
        return {
            (cache.case_key(e["case"]), b["upto"]): b for e in data["entries"] for b in e["tokens"]
        }

    def _done(self, point: Point, known: dict[tuple[object, int], store.Data]) -> Outcome | None:
        """The outcome of a point whose present tiles have all been measured before."""
        b = known.get((cache.case_key(point.key), point.tokens))
        if b is None or b.get("status") != "measured" or b.get("space") != store.space(point):
            return None
        tile = Tile(**b["tile"]) if b["tile"] else None
        return Outcome(point, "known", tile, b["us"], b["default_us"], b["tried"], b["failed"])

    def _jobs(
        self, points: Sequence[Point], trials: Mapping[str, Trials], facts: Facts
    ) -> list[offline.Job]:
        """What to compile, in the points' order: the tiles that no journal has met."""
        arch = facts.gpu.capability[0] * 10 + facts.gpu.capability[1]
        if arch not in offline.ARCHES:
            return []
        jobs: dict[tuple[str, Case, str, Tile], offline.Job] = {}
        for p in points:
            met = trials[p.op].met(p)
            for tile in store.candidates(p):
                if tile not in met:
                    job = offline.Job(p.op, p.case, p.tokens, p.dtype, tile, False, arch)
                    jobs.setdefault((p.op, p.case, p.dtype, tile), job)
        return list(jobs.values())

    # --------------------------------------------------------------------------------- one point
    def _point(self, point: Point, trials: Trials, facts: Facts, ahead: Ahead) -> Iterator[Event]:
        tiles = store.candidates(point)
        known = dict(trials.of(point))
        for i, tile in enumerate(tiles):
            if tile not in known:
                if not ahead.wait(point, tile, 0):
                    yield Compiling(point.op, *ahead.progress)
                left = self.deadline - self.clock()
                if left <= 0 or not ahead.wait(point, tile, left):
                    yield Outcome(point, "untouched", tried=i)
                    return
                why = ahead.why(point, tile)
                known[tile] = Trial(None, why) if why else self.runner.trial(point, tile)
                trials.add(point, tile, known[tile])
            yield Trying(point, i + 1, len(tiles), best(known.values()))
        if self.clock() >= self.deadline:
            yield Outcome(point, "untouched", tried=len(tiles))
            return
        try:
            yield self._decide(point, trials, facts)
        except MeasuringFailed as error:
            yield Outcome(point, "fault", note=str(error))

    def _decide(self, point: Point, trials: Trials, facts: Facts) -> Outcome:
        """Race the tiles that stand against the default, and write the winner down."""
        default = point.default
        known = trials.of(point)
        why = known[default].failed or self.runner.vet(point, default)
        if why:
            return Outcome(point, "fault", note=f"the default tile {default}: {why}")
        finalists = self._finalists(point, known, trials)
        timed = self.runner.race(point, [default, *finalists])
        default_us = timed[0].us
        ranked = sorted(zip(finalists, timed[1:], strict=True), key=lambda pair: pair[1].us)
        tile, us = (ranked[0][0], ranked[0][1].us) if ranked else (None, default_us)
        record = store.bucket(point, tile, us, default_us, trials)
        new = {
            "schema": cache.SCHEMA,
            "kernel": point.op,
            "gpu": store.describe(facts),
            "made_with": store.made_with(facts.driver),
            "source": point.spec.source,
            "entries": [{"case": point.key, "tokens": [record]}],
        }
        store.update(point.spec, new, self.folder)
        won = tile if record["tile"] else None
        kind = "win" if won else "loss"
        counts = (record["tried"], record["failed"])
        return Outcome(point, kind, won, record["us"], default_us, *counts)

    def _finalists(self, point: Point, known: Mapping[Tile, Trial], trials: Trials) -> list[Tile]:
        """The fastest few that are also right at full size."""
        found: list[Tile] = []
        limit = float("inf")
        timed = {t: r.us for t, r in known.items() if r.us is not None}
        for tile in sorted(timed, key=lambda t: timed[t]):
            if len(found) == FINALISTS or timed[tile] > limit:
                break
            why = None if tile == point.default else self.runner.vet(point, tile)
            if why:
                trials.add(point, tile, Trial(None, f"at {point.tokens} tokens: {why}"))
                continue
            limit = min(limit, NEAR * timed[tile])
            if tile != point.default:
                found.append(tile)
        return found


def best(trials: Iterable[Trial]) -> float | None:
    return min((t.us for t in trials if t.us is not None), default=None)


def _ops(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(p.op for p in points))
