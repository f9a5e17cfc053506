"""The search: every tile of every point, gated on correctness, the fastest kept.

A point (op, case, dtype, token count) is finished in four steps. Its tiles are compiled on the CPU,
ahead of the GPU, and those that this GPU cannot hold are dropped; each one left is held against the
twin and timed once; the best few are run at full size against the default tile; and those that
stand are raced against the default from CUDA graphs. Every step is journalled, so that a stopped
sweep goes on where it was, and the file is written after every point. Work is given to a `Runner`,
whose crash is the tile's failure and not the sweep's.

Where a batch must not change bits (`KernelSpec.one_tile`) all token counts of a case are one
contest: a tile has to be right at every one of them, and wins by its mean gain.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemotriton.autotune import cache, offline, store
from nemotriton.autotune.ahead import Ahead, Compiler
from nemotriton.autotune.child import MeasuringFailed
from nemotriton.autotune.store import Trials
from nemotriton.autotune.trial import Facts, Point, Runner, Trial
from nemotriton.commandline import need_known
from nemotriton.kernels.op import DTYPES, SPECS, Case, KernelSpec, Tile
from nemotriton.model.config import ModelConfig

FINALISTS = 3
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
    top: int = 0,
) -> list[Point]:
    """The points of these kernels (none named: all) for these models, each once.

    `tokens` are rounded up to a kernel's buckets; none given means every bucket. Of each kernel
    only the `top` largest cases; 0 means all. A kernel that has none of `dtypes` is measured in its
    first."""
    for name in kernels:
        need_known("kernel", name, sorted(SPECS))
    configs = list(configs)
    points: dict[Point, None] = {}
    for name in kernels or sorted(SPECS):
        spec = SPECS[name]
        cases = dict.fromkeys(c for config in configs for c in spec.cases(config))
        for case in largest(spec, list(cases), top):
            for dtype in [d for d in dtypes if d in spec.dtypes] or spec.dtypes[:1]:
                points |= dict.fromkeys(
                    Point(name, case, upto, dtype) for upto in buckets(spec, tokens)
                )
    return list(points)


def largest(spec: KernelSpec, cases: list[Case], top: int) -> list[Case]:
    """The `top` cases that move the most bytes for one token, in their order; 0: all."""
    dtype = DTYPES[spec.dtypes[0]]
    by_cost = sorted(cases, key=lambda case: -spec.cost(case, 1, dtype).bytes)
    kept = set(by_cost[:top] if top else cases)
    return [case for case in cases if case in kept]


def buckets(spec: KernelSpec, tokens: Sequence[int]) -> list[int]:
    """The spec's token buckets that hold any of `tokens`; all of them for no tokens, and where all
    take one tile."""
    if not tokens or spec.one_tile:
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
            for contest in contests(points):
                if all(done[p] is not None for p in contest):
                    yield from (outcome for p in contest if (outcome := done[p]) is not None)
                else:
                    yield from self._contest(contest, trials[contest[0].op], facts, ahead)
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

    # ------------------------------------------------------------------------------- one contest
    def _contest(
        self, points: Sequence[Point], trials: Trials, facts: Facts, ahead: Ahead
    ) -> Iterator[Event]:
        """Try every tile at every point, then decide; points share a tile if there are several."""
        for point in points:
            tried = yield from self._try(point, trials, ahead)
            if tried is not None:
                yield from (Outcome(p, "untouched", tried=tried) for p in points)
                return
        try:
            yield from self._decide(points, trials, facts)
        except MeasuringFailed as error:
            yield from (Outcome(p, "fault", note=str(error)) for p in points)

    def _try(
        self, point: Point, trials: Trials, ahead: Ahead
    ) -> Generator[Event, None, int | None]:
        """Trials of a point's tiles; how many there were when the time ran out, if it did."""
        tiles = store.candidates(point)
        known = dict(trials.of(point))
        for i, tile in enumerate(tiles):
            if tile not in known:
                if not ahead.wait(point, tile, 0):
                    yield Compiling(point.op, *ahead.progress)
                left = self.deadline - self.clock()
                if left <= 0 or not ahead.wait(point, tile, left):
                    return i
                why = ahead.why(point, tile)
                known[tile] = Trial(None, why) if why else self.runner.trial(point, tile)
                trials.add(point, tile, known[tile])
            yield Trying(point, i + 1, len(tiles), best(known.values()))
        return len(tiles) if self.clock() >= self.deadline else None

    def _decide(self, points: Sequence[Point], trials: Trials, facts: Facts) -> Iterator[Outcome]:
        """Race the tiles that stand against the default, and write the winner down."""
        for p in points:
            why = trials.of(p)[p.default].failed or self.runner.vet(p, p.default)
            if why:
                note = f"the default tile {p.default} at {p.tokens} tokens: {why}"
                yield from (Outcome(q, "fault", note=note) for q in points)
                return
        finalists = self._finalists(points, trials)
        timed = [self.runner.race(p, [p.default, *finalists]) for p in points]
        means = [
            store.mean([round(t[i + 1].us, 3) / round(t[0].us, 3) for t in timed])
            for i in range(len(finalists))
        ]
        first = min(range(len(means)), key=lambda i: means[i], default=None)
        won = first is not None and means[first] < 1 - store.GAIN
        tile = finalists[first] if won and first is not None else None
        records = []
        for p, t in zip(points, timed, strict=True):
            us = t[1 + first].us if won and first is not None else t[0].us
            records.append(store.bucket(p, tile, us, t[0].us, trials))
        self._write(points[0], records, facts)
        for p, r in zip(points, records, strict=True):
            figures = (r["us"], r["default_us"], r["tried"], r["failed"])
            yield Outcome(p, "win" if tile else "loss", tile, *figures)

    def _write(self, point: Point, records: list[store.Data], facts: Facts) -> None:
        new = {
            "schema": cache.SCHEMA,
            "kernel": point.op,
            "gpu": store.describe(facts),
            "made_with": store.made_with(facts.driver),
            "source": point.spec.source,
            "entries": [{"case": point.key, "tokens": records}],
        }
        store.update(point.spec, new, self.folder)

    def _finalists(self, points: Sequence[Point], trials: Trials) -> list[Tile]:
        """The fastest few that are also right at full size, at every point."""
        found: list[Tile] = []
        limit = float("inf")
        known = [trials.of(p) for p in points]
        default = [known[i][p.default].us or 1.0 for i, p in enumerate(points)]
        mean = {
            tile: store.mean([us / d for us, d in zip(times, default, strict=True) if us])
            for tile in known[0]
            if all(times := [k[tile].us if tile in k else None for k in known])
        }
        for tile in sorted(mean, key=lambda t: mean[t]):
            if len(found) == FINALISTS or mean[tile] > limit:
                break
            if all(tile == p.default for p in points):
                limit = min(limit, NEAR * mean[tile])
                continue
            wrong = next(((p, w) for p in points if (w := self.runner.vet(p, tile))), None)
            if wrong:
                point, why = wrong
                trials.add(point, tile, Trial(None, f"at {point.tokens} tokens: {why}"))
                continue
            limit = min(limit, NEAR * mean[tile])
            found.append(tile)
        return found


def contests(points: Sequence[Point]) -> list[list[Point]]:
    """The points that are decided together: of one case where all tokens take one tile."""
    found: dict[object, list[Point]] = {}
    for p in points:
        found.setdefault((p.op, p.case, p.dtype) if p.spec.one_tile else p, []).append(p)
    return list(found.values())


def best(trials: Iterable[Trial]) -> float | None:
    return min((t.us for t in trials if t.us is not None), default=None)


def _ops(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(p.op for p in points))
