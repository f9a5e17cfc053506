"""Ops whose batch must not change bits: one tile for all token counts, swept and filed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemotriton.autotune import cache, store
from nemotriton.autotune.sweep import Outcome, Sweep, buckets, contests, plan
from nemotriton.autotune.trial import Point
from nemotriton.kernels.op import SPECS, Case, KernelSpec, Tile
from nemotriton.model.config import ModelConfig
from tests.fake_runner import GPU, TILES, FakeRunner, toy

POINTS = [Point("twice", Case(D=64), upto, "bf16") for upto in (1, 16, 64)]
WIDE, FAST = TILES[2], TILES[-1]


@pytest.fixture
def spec() -> Iterator[KernelSpec]:
    with toy(list(TILES)) as spec:
        object.__setattr__(spec, "one_tile", True)
        yield spec


def measure(folder: Path, us: Callable[[Point, Tile], float], **more: object) -> list[Outcome]:
    runner = FakeRunner(us=us, **more)  # type: ignore[arg-type]
    return [e for e in Sweep(runner, folder).run(POINTS) if isinstance(e, Outcome)]


def entries(folder: Path) -> list[dict]:
    return store.read(cache.path_of(GPU.slug, "twice", folder))["entries"]


def by_tokens(times: dict[Tile, tuple[float, float, float]]) -> Callable[[Point, Tile], float]:
    return lambda point, tile: times.get(tile, (10.0,) * 3)[(1, 16, 64).index(point.tokens)]


def test_the_best_on_the_whole_wins_everywhere(spec: KernelSpec, tmp_path: Path) -> None:
    """One tile is twice as fast at one token, another a little faster at all: 0.79 against 0.8."""
    found = measure(tmp_path, by_tokens({FAST: (5.0, 10.0, 10.0), WIDE: (8.0, 8.0, 8.0)}))
    assert [(o.kind, o.tile) for o in found] == [("win", FAST)] * 3
    (entry,) = entries(tmp_path)
    assert [b["tile"] for b in entry["tokens"]] == [dict(FAST)] * 3
    assert [b["us"] for b in entry["tokens"]] == [5.0, 10.0, 10.0]
    data = store.read(cache.path_of(GPU.slug, "twice", tmp_path))
    assert store.faults(data, spec, GPU.slug) == []


def test_a_tile_must_be_right_at_every_size(spec: KernelSpec, tmp_path: Path) -> None:
    times = by_tokens({FAST: (5.0, 5.0, 5.0), WIDE: (8.0, 8.0, 8.0)})
    found = measure(tmp_path, times, bad_at_size={FAST})
    assert {o.tile for o in found} == {WIDE}


def test_no_gain_on_the_whole_is_no_gain(spec: KernelSpec, tmp_path: Path) -> None:
    found = measure(tmp_path, by_tokens({FAST: (5.0, 15.0, 15.0)}))
    assert [o.kind for o in found] == ["loss"] * 3
    (entry,) = entries(tmp_path)
    assert [b["tile"] for b in entry["tokens"]] == [{}] * 3
    assert [b["us"] for b in entry["tokens"]] == [10.0] * 3


def test_a_file_of_several_tiles_is_at_fault(spec: KernelSpec, tmp_path: Path) -> None:
    measure(tmp_path, by_tokens({FAST: (5.0, 5.0, 5.0)}))
    data = store.read(cache.path_of(GPU.slug, "twice", tmp_path))
    data["entries"][0]["tokens"][1]["tile"] = dict(WIDE)
    (fault,) = store.faults(data, spec, GPU.slug)
    assert "different tiles" in fault


def test_merging_takes_entries_as_a_whole(spec: KernelSpec, tmp_path: Path) -> None:
    measure(tmp_path / "a", by_tokens({FAST: (5.0, 9.0, 9.0)}))
    measure(tmp_path / "b", by_tokens({WIDE: (6.0, 6.0, 6.0)}))
    a, b = entries(tmp_path / "a"), entries(tmp_path / "b")
    assert store.merged(a, b, spec) == b
    assert store.merged(b, a, spec) == a
    assert store.merged(b, a, spec, by_time=True) == a, "the first bucket's time decides"


def test_points_of_a_case_are_one_contest_and_keep_all_buckets(spec: KernelSpec) -> None:
    assert contests(POINTS) == [POINTS]
    assert buckets(spec, [1]) == [1, 16, 64]
    object.__setattr__(spec, "one_tile", False)
    assert contests(POINTS) == [[p] for p in POINTS]
    assert buckets(spec, [1]) == [1]


def test_attention_is_such_an_op() -> None:
    assert {name for name, spec in SPECS.items() if spec.one_tile} >= {
        "attend_prefill",
        "attend_decode",
    }
    for name in ("attend_prefill", "attend_decode"):
        for case in SPECS[name].cases(ModelConfig.preset("super-120b")):
            assert len({SPECS[name].default(case, t) for t in SPECS[name].tokens}) == 1


def test_the_largest_cases_come_first_of_all() -> None:
    config = ModelConfig.preset("super-120b")
    (head,) = plan(["matmul"], [config], tokens=[1], top=1)
    assert config.vocab == head.case.N
    assert len(plan(["matmul"], [config], tokens=[1], top=3)) == 3
