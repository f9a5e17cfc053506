"""The sweep on a GPU that is not there: gated, resumable, unharmed by tiles that crash."""

import contextlib
import io
import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nemotriton.autotune import cache, child, commands, offline, store
from nemotriton.autotune.__main__ import app
from nemotriton.autotune.ahead import unfit
from nemotriton.autotune.display import Display
from nemotriton.autotune.sass import Resources
from nemotriton.autotune.sweep import Compiling, Event, Outcome, Sweep, Trying, plan
from nemotriton.autotune.trial import Gate, Point, TileRunner
from nemotriton.commandline import UsageError
from nemotriton.errors import UnsupportedError
from nemotriton.kernels.op import DTYPES, SPECS, Case, KernelSpec, Tile
from nemotriton.model.config import ModelConfig
from tests.fake_runner import DEFAULT, FACTS, GPU, TILES, FakeRunner, FakeStopwatch, toy

CPU = torch.device("cpu")
FAST = TILES[-1]  # the fastest by FakeRunner's clock
POINT = Point("twice", Case(D=64), 16, "bf16")
POINTS = [Point("twice", Case(D=64), upto, "bf16") for upto in (1, 16, 64)]


@pytest.fixture
def tiles() -> list[Tile]:
    return list(TILES)


@pytest.fixture
def spec(tiles: list[Tile]) -> Iterator[KernelSpec]:
    with toy(tiles) as spec:
        yield spec


def sweep(
    runner: Any, folder: Path, points: Sequence[Point] = (POINT,), **more: Any
) -> list[Event]:
    return list(Sweep(runner, folder, **more).run(points))


def outcomes(events: Sequence[Event]) -> list[Outcome]:
    return [e for e in events if isinstance(e, Outcome)]


def recorded(folder: Path) -> dict[int, dict[str, Any]]:
    data = store.read(cache.path_of(GPU.slug, "twice", folder))
    return {b["upto"]: b for e in data["entries"] for b in e["tokens"]}


# ---------------------------------------------------------------------------------- what it decides
def test_the_fastest_right_tile_is_written_for_the_runtime(
    spec: KernelSpec, tmp_path: Path
) -> None:
    runner = FakeRunner(act={FAST: "parity at 16 tokens: out0: error 1"})
    (outcome,) = outcomes(sweep(runner, tmp_path))
    assert (outcome.kind, outcome.tile) == ("win", TILES[2])
    assert (outcome.tried, outcome.failed) == (4, 1)
    table = cache.load("twice", GPU.slug, spec.source, tmp_path)
    assert table.lookup(POINT.key, 16) == dict(TILES[2])
    assert (
        store.faults(store.read(cache.path_of(GPU.slug, "twice", tmp_path)), spec, GPU.slug) == []
    )
    assert (recorded(tmp_path)[16]["us"], recorded(tmp_path)[16]["default_us"]) == (2.5, 10.0)


@pytest.mark.parametrize("us,kind", [(9.81, "loss"), (9.79, "win"), (10.5, "loss")])
def test_only_a_gain_of_two_percent_is_recorded(
    us: float, kind: str, spec: KernelSpec, tmp_path: Path
) -> None:
    runner = FakeRunner(us=lambda point, tile: 10.0 if tile == DEFAULT else us)
    (outcome,) = outcomes(sweep(runner, tmp_path))
    assert outcome.kind == kind
    b = recorded(tmp_path)[16]
    assert bool(b["tile"]) == (kind == "win")
    assert b["us"] == (us if kind == "win" else 10.0)


def test_a_tile_that_is_wrong_at_full_size_is_out(spec: KernelSpec, tmp_path: Path) -> None:
    runner = FakeRunner(bad_at_size={FAST})
    (outcome,) = outcomes(sweep(runner, tmp_path))
    assert (outcome.tile, outcome.failed) == (TILES[2], 1)
    assert all(FAST not in raced for _, raced in runner.raced)


def test_a_wrong_default_is_a_fault_and_nothing_is_recorded(
    spec: KernelSpec, tmp_path: Path
) -> None:
    (outcome,) = outcomes(sweep(FakeRunner(act={DEFAULT: "parity: 3"}), tmp_path))
    assert outcome.kind == "fault"
    assert "the default tile" in outcome.note
    assert not cache.path_of(GPU.slug, "twice", tmp_path).exists()


# --------------------------------------------------------------------------------- stop and go on
def test_a_spent_budget_keeps_what_is_done_and_the_next_run_goes_on(
    spec: KernelSpec, tmp_path: Path
) -> None:
    runner = FakeRunner()
    deadline = 6.0  # of a clock that counts trials: four tiles at 1 token, two at 16
    first = sweep(runner, tmp_path, POINTS, deadline=deadline, clock=lambda: len(runner.tried))
    assert [o.kind for o in outcomes(first)] == ["win", "untouched", "untouched"]
    assert set(recorded(tmp_path)) == {1}
    again = FakeRunner()
    second = sweep(again, tmp_path, POINTS)
    assert [o.kind for o in outcomes(second)] == ["known", "win", "win"]
    assert again.tried[:2] == [(POINTS[1], t) for t in TILES[2:]]
    assert len(again.tried) == 2 + 4
    assert outcomes(second)[0].tile == outcomes(first)[0].tile


def test_ctrl_c_keeps_what_is_done(spec: KernelSpec, tmp_path: Path) -> None:
    runner = FakeRunner()
    seen: list[Event] = []
    events = Sweep(runner, tmp_path).run(POINTS)
    while not outcomes(seen):
        seen.append(next(events))
    runner.act[TILES[1]] = "stop"
    with pytest.raises(KeyboardInterrupt):
        seen.extend(events)
    assert [o.kind for o in outcomes(seen)] == ["win"]
    assert set(recorded(tmp_path)) == {1}
    again = FakeRunner()
    assert [o.kind for o in outcomes(sweep(again, tmp_path, POINTS))] == ["known", "win", "win"]
    assert len(again.tried) == 8 - 1, "the default at 16 tokens was already measured"


def test_a_new_tile_is_timed_alone(spec: KernelSpec, tiles: list[Tile], tmp_path: Path) -> None:
    sweep(FakeRunner(), tmp_path)
    again = FakeRunner()
    assert [o.kind for o in outcomes(sweep(again, tmp_path))] == ["known"]
    assert again.tried == []
    tiles.append(Tile(BLOCK=64, num_warps=4))
    (outcome,) = outcomes(sweep(again, tmp_path))
    assert again.tried == [(POINT, tiles[-1])]
    assert (outcome.kind, outcome.tile, outcome.tried) == ("win", tiles[-1], 5)
    fresh = FakeRunner()
    sweep(fresh, tmp_path, fresh=True)
    assert len(fresh.tried) == 5


def test_another_source_is_measured_anew(
    spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(FakeRunner(), tmp_path)
    monkeypatch.setitem(spec.__dict__, "source", "f" * 64)
    again = FakeRunner()
    (outcome,) = outcomes(sweep(again, tmp_path))
    assert (outcome.kind, len(again.tried)) == ("win", 4)


def test_a_torn_journal_costs_only_its_last_line(spec: KernelSpec, tmp_path: Path) -> None:
    sweep(FakeRunner(), tmp_path)
    journal = next(tmp_path.glob("*/.twice.trials.jsonl"))
    journal.write_bytes(journal.read_bytes()[:-9])
    trials = store.Trials(spec, GPU.slug, tmp_path)
    assert len(trials.of(POINT)) == 3
    again = FakeRunner()
    cache.path_of(GPU.slug, "twice", tmp_path).unlink()
    (outcome,) = outcomes(sweep(again, tmp_path))
    assert again.tried == [(POINT, FAST)]
    assert len(store.Trials(spec, GPU.slug, tmp_path).of(POINT)) == 4
    assert outcome.kind == "win"


# ------------------------------------------------------------------------------- tiles that crash
@pytest.mark.parametrize(
    "how,words",
    [("crash", "crashed (SIGSEGV)"), ("exit", "crashed (exit 3)"), ("hang", "hung for")],
)
def test_a_tile_that_takes_its_process_along_is_a_failed_tile(
    how: str, words: str, spec: KernelSpec, tmp_path: Path
) -> None:
    fake = FakeRunner(act={TILES[1]: how})
    # the limit is for the tile that hangs; one that crashes may be slow in it on a busy machine
    runner = child.ChildRunner(lambda: fake, limit_s=3.0 if how == "hang" else 60, method="fork")
    with contextlib.closing(runner):
        (outcome,) = outcomes(sweep(runner, tmp_path))
    assert (outcome.kind, outcome.tile, outcome.failed) == ("win", FAST, 1)
    failed = store.Trials(spec, GPU.slug, tmp_path).of(POINT)[TILES[1]].failed
    assert failed is not None
    assert words in failed
    assert runner.process is None


def test_a_child_that_dies_in_a_race_is_a_fault_of_that_point(
    spec: KernelSpec, tmp_path: Path
) -> None:
    class Fragile(FakeRunner):
        def race(self, point: Point, tiles: Sequence[Tile | None]) -> Any:
            if point.tokens == 16:
                os._exit(9)
            return super().race(point, tiles)

    runner = child.ChildRunner(Fragile, limit_s=5, method="fork")
    with contextlib.closing(runner):
        found = outcomes(sweep(runner, tmp_path, POINTS))
    assert [o.kind for o in found] == ["win", "fault", "win"]
    assert "crashed (exit 9) in race" in found[1].note


# ------------------------------------------------------------------------- what the card can hold
def fake_compiler(shared: dict[Tile, int]) -> Any:
    def compiler(jobs: Sequence[offline.Job]) -> Iterator[list[offline.Row]]:
        for job in jobs:
            found = Resources(64, 0, 0, shared.get(job.tile, 1024), 0, {}, 0)
            yield [offline.Row(job, "_twice", found, (), 0.1)]

    return compiler


def test_tiles_that_the_card_cannot_hold_are_never_run(spec: KernelSpec, tmp_path: Path) -> None:
    runner = FakeRunner()
    events = sweep(runner, tmp_path, compiler=fake_compiler({FAST: 240_000, TILES[2]: 232_448}))
    (outcome,) = outcomes(events)
    assert (outcome.tile, outcome.failed) == (TILES[2], 1)
    assert (POINT, FAST) not in runner.tried
    failed = store.Trials(spec, GPU.slug, tmp_path).of(POINT)[FAST].failed
    assert failed == "240000 bytes of shared memory, this GPU has 232448"


def test_a_smaller_card_prunes_a_real_kernel_by_what_was_compiled() -> None:
    point = plan(["rms_norm"], [ModelConfig.preset("tiny")], tokens=[1])[0]
    tile = Tile(**point.default).but(num_warps=8)  # the reduction over warps goes through memory
    job = offline.Job(point.op, point.case, 1, "bf16", tile, False, 90)
    rows = offline.compile_job(job)
    assert rows[0].found is not None
    need = rows[0].found.shared
    assert need > 0
    assert unfit(rows, need) is None
    assert unfit(rows, need - 1) == f"{need} bytes of shared memory, this GPU has {need - 1}"


def test_a_hazard_and_a_compile_error_are_unfit() -> None:
    job = offline.Job("twice", Case(D=64), 1, "bf16", FAST, False, 90)
    hazard = offline.Row(job, "_twice", Resources(64, 0, 0, 0, 0, {}, 2), (), 0.1)
    assert unfit([hazard], 232448) == "2 wgmma register hazards"
    stale = offline.Row(job, "_twice", Resources(64, 0, 0, 0, 0, {}, 0, 3), (), 0.1)
    assert unfit([stale], 232448) == "3 instructions read registers that nothing wrote"
    broken = offline.Row(job, "_twice", None, ("CompilationError: no",), 0.1)
    assert unfit([broken], 232448) == "does not compile: CompilationError: no"


def test_a_tile_waits_for_its_compilation_and_no_longer_than_the_budget(
    spec: KernelSpec, tmp_path: Path
) -> None:
    compiled, go = threading.Event(), threading.Event()

    def compiler(jobs: Sequence[offline.Job]) -> Iterator[list[offline.Row]]:
        yield from fake_compiler({})(jobs[:2])
        compiled.set()
        go.wait(10)
        yield from fake_compiler({FAST: 300_000})(jobs[2:])

    runner = FakeRunner()
    events = Sweep(runner, tmp_path, compiler=compiler).run([POINT])
    seen: list[Event] = []
    while len(runner.tried) < 2 or not isinstance(seen[-1], Compiling):
        seen.append(next(events))
    assert compiled.is_set()
    assert runner.tried == [(POINT, t) for t in TILES[:2]], "the third is not compiled yet"
    assert (seen[-1].done, seen[-1].total) == (2, 4)
    go.set()
    (outcome,) = outcomes(list(events))
    assert (outcome.tile, outcome.failed) == (TILES[2], 1)

    stuck = threading.Event()

    def hanging(jobs: Sequence[offline.Job]) -> Iterator[list[offline.Row]]:
        stuck.wait(0.6)
        yield from ()

    late = sweep(runner, tmp_path / "b", deadline=0.2, clock=lambda: 0.0, compiler=hanging)
    assert [o.kind for o in outcomes(late)] == ["untouched"]


def test_a_compiler_pool_that_breaks_leaves_the_tiles_to_the_runner(
    spec: KernelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compiler(jobs: Sequence[offline.Job]) -> Iterator[list[offline.Row]]:
        yield from fake_compiler({})(jobs[:1])
        raise BrokenProcessPool("a worker was killed")

    runner = FakeRunner()
    (outcome,) = outcomes(sweep(runner, tmp_path, compiler=compiler))
    assert (outcome.kind, len(runner.tried)) == ("win", 4)
    assert "stopped after 1 of 4" in caplog.text


# ------------------------------------------------------------------------- the runner, on the CPU
def test_trials_are_gated_on_the_twin(spec: KernelSpec) -> None:
    runner = TileRunner(CPU, FakeStopwatch(us=7.0))
    assert runner.trial(POINT, Tile(BLOCK=2, num_warps=4)).us == 7.0
    wrong = runner.trial(POINT, FAST)
    assert wrong.us is None
    assert "parity at 16 tokens: out0" in str(wrong.failed)
    big = runner.trial(POINT, Tile(BLOCK=16, num_warps=4))
    assert big.failed == "RuntimeError: out of resource: shared memory, Required: 300000"


def test_full_size_is_held_against_the_default_tile(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemotriton.autotune.trial.GATE_TOKENS", 16)
    runner = TileRunner(CPU, FakeStopwatch())
    point = POINTS[2]
    late = Tile(BLOCK=32, num_warps=4)  # right at 16 rows, where the gate looks; wrong at 64
    assert runner.trial(point, late).failed is None
    assert "from the default tile's" in str(runner.vet(point, late))
    assert runner.vet(point, TILES[1]) is None
    (timing,) = runner.race(point, [None])
    assert timing.us == 5.0


def test_results_that_move_between_runs_are_named(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = iter(range(100))
    plain = spec.op.triton
    monkeypatch.setattr(spec.op, "triton", lambda x: plain(x) + next(noisy) * 1e-3)
    assert TileRunner(CPU, FakeStopwatch()).vet(POINT, TILES[1]) == "out0 differs between two runs"


def test_the_gate_shrinks_until_its_oracle_fits(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = Gate.__init__

    def small(self: Gate, point: Point, where: torch.device, tokens: int) -> None:
        asked.append(tokens)
        if tokens > 20:
            raise torch.OutOfMemoryError("no room")
        real(self, point, where, tokens)

    monkeypatch.setattr(Gate, "__init__", small)
    assert Gate.within_memory(POINTS[2], CPU).tokens == 16
    assert asked == [64, 32, 16]


class _Asked(Exception):
    pass


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_wrapper_looks_up_the_case_it_is_swept_under(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its tuned tiles would be written and never found."""
    spec = SPECS[name]
    asked: list[tuple[int, str, dict[str, Any]]] = []

    def tile(self: KernelSpec, tokens: int, where: torch.Tensor, **axes: Any) -> Tile:
        dtype = where.dtype if where.is_floating_point() else DTYPES[self.dtypes[0]]
        asked.append((tokens, str(dtype), axes))
        raise _Asked

    monkeypatch.setattr(KernelSpec, "tile", tile)
    configs = [ModelConfig.preset(n) for n in ("tiny", "super-120b", "nano-30b", "h-8b")]
    for case in dict.fromkeys(c for config in configs for c in spec.cases(config)):
        rng = torch.Generator().manual_seed(0)
        dtype = DTYPES[spec.dtypes[0]]
        args = spec.make(case, 64, torch.device("meta"), dtype, rng)
        with pytest.raises(_Asked):
            spec.op.triton(**args)
        assert asked.pop() == (64, str(dtype), dict(case))


# --------------------------------------------------------------------------- plan, options, display
def test_the_plan_rounds_tokens_up_to_buckets_and_names_unknown_kernels(spec: KernelSpec) -> None:
    config = ModelConfig.preset("tiny")
    assert [p.tokens for p in plan(["twice"], [config, config])] == [1, 16, 64]
    assert [p.tokens for p in plan(["twice"], [config], tokens=[2, 3, 64, 65])] == [16, 64]
    assert {p.dtype for p in plan(["twice"], [config], ["bf16", "fp32"])} == {"bf16", "fp32"}
    with pytest.raises(UsageError, match="no kernel thrice"):
        plan(["thrice"], [config])


@pytest.mark.parametrize("text,s", [("", float("inf")), ("90s", 90), ("10m", 600), ("0.5h", 1800)])
def test_budgets(text: str, s: float) -> None:
    assert commands.parse_budget(text) == s
    with pytest.raises(UnsupportedError, match="write it like 90s"):
        commands.parse_budget("ten minutes")
    with pytest.raises(UnsupportedError, match="write positive numbers"):
        commands.parse_tokens("1,-2")


def test_the_dry_run_needs_no_gpu_and_a_sweep_says_that_it_does(spec: KernelSpec) -> None:
    run = CliRunner().invoke
    dry = run(app, ["sweep", "--dry-run", "--kernel", "twice", "--model", "tiny", "--tokens", "1"])
    assert dry.exit_code == 0
    assert dry.stdout.startswith("twice D")
    assert dry.stdout.endswith("T=1  4 tiles\n")
    if not torch.cuda.is_available():
        real = run(app, ["sweep", "--kernel", "twice", "--model", "tiny"])
        assert "no CUDA device" in real.stderr
    empty = run(app, ["sweep", "--kernel", "twice", "--model", "tiny", "--tokens", "65"])
    assert "no kernel has a case" in empty.stderr


def test_the_display_ends_with_wins_losses_and_the_rest() -> None:
    text = io.StringIO()
    display = Display(3, Console(file=text, width=200))
    with display:
        display.show(Compiling("twice", 1, 4))
        display.show(Trying(POINT, 1, 4, None))
        display.show(Outcome(POINT, "win", FAST, 5.0, 10.0, 4, 1))
        display.show(Outcome(POINTS[0], "loss", None, 10.0, 10.0, 4, 0))
        display.show(Outcome(POINTS[2], "fault", note="the default tile: wrong"))
        display.show(Outcome(POINTS[2], "untouched", tried=2))
    display.summary()
    shown = text.getvalue()
    assert "win       twice D64 bf16 T=16  5.00 us (default 10.00, +100.0%)" in shown
    assert "BLOCK=8 num_warps=4" in shown
    assert "fault     twice D64 bf16 T=64  the default tile: wrong" in shown
    assert "1 win (a tile beats the default); 1 loss" in shown
    assert "1 untouched (the time ended first)" in shown


def test_a_file_says_what_made_it(spec: KernelSpec, tmp_path: Path) -> None:
    sweep(FakeRunner(), tmp_path)
    data = json.loads(cache.path_of(GPU.slug, "twice", tmp_path).read_text())
    assert data["schema"] == cache.SCHEMA
    assert data["gpu"]["smem_kib"] == 227
    assert data["gpu"]["cc"] == "9.0"
    assert data["gpu"]["copy_gbs"] == FACTS.ceilings.copy_gbs
    assert set(data["made_with"]) == {"nemotriton", "triton", "torch", "driver", "date"}
    assert recorded(tmp_path)[16]["status"] == "measured"
