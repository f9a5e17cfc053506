"""Tuned files: what the runtime reads, refuses and reports; how they are written and merged."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nemotriton import device
from nemotriton.autotune import cache, review, store
from nemotriton.autotune.__main__ import app
from nemotriton.autotune.sweep import Outcome, Sweep
from nemotriton.autotune.trial import Point
from nemotriton.kernels.op import SPECS, Case, KernelSpec, Tile
from tests.fake_runner import DEFAULT, FACTS, GPU, TILES, FakeRunner, toy

CASE = {"dtype": "bf16", "D": 64}
POINTS = [Point("twice", Case(D=64), upto, "bf16") for upto in (1, 16, 64)]
BIG = {"BLOCK": 4, "num_warps": 4}


@pytest.fixture
def spec() -> Iterator[KernelSpec]:
    with toy(list(TILES)) as spec:
        yield spec


def bucket(upto: int, tile: dict[str, int], us: float = 5.0, **more: Any) -> dict[str, Any]:
    figures = {"us": us, "default_us": 10.0 if tile else us, "tried": 4, "failed": 1}
    return {"upto": upto, "tile": tile, "status": "measured", "space": ""} | figures | more


def content(spec: KernelSpec, *entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "kernel": "twice",
        "gpu": store.describe(FACTS),
        "made_with": store.made_with("580.1"),
        "source": spec.source,
        "entries": list(entries) or [{"case": CASE, "tokens": [bucket(1, {}), bucket(16, BIG)]}],
    }


def test_round_trip_and_lookup(spec: KernelSpec, tmp_path: Path) -> None:
    cache.save(content(spec), "twice", GPU.slug, tmp_path)
    table = cache.load("twice", GPU.slug, spec.source, tmp_path)
    assert table.lookup({"D": 64, "dtype": "bf16"}, 1) is None, "an empty tile is the default"
    assert table.lookup(CASE, 2) == BIG
    assert table.lookup(CASE, 16) == BIG
    assert table.lookup(CASE, 17) is None, "above the last bucket nothing is known"
    assert table.lookup({**CASE, "D": 65}, 16) is None, "no near match"
    assert table.lookup({**CASE, "dtype": "fp32"}, 16) is None


def test_the_runtime_takes_the_tuned_tile_and_else_the_default(
    spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMOTRITON_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "info", lambda where=None: GPU)
    cache.save(content(spec), "twice", GPU.slug, tmp_path)
    x: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    assert spec.tile(9, x, D=64) == Tile(**BIG)
    assert spec.tile(1, x, D=64) == DEFAULT
    assert spec.tile(99, x, D=64) == DEFAULT
    assert spec.tile(9, x, D=32) == DEFAULT


REFUSED = {
    "schema": ({"schema": 2}, "schema 2"),
    "kernel": ({"kernel": "thrice"}, "kernel 'thrice'"),
    "another GPU": ({"gpu": {"slug": "nvidia_b200"}}, "another GPU"),
    "another source": ({"source": "0" * 64}, "another version of the kernel's source"),
    "no entries": ({"entries": None}, "no list of entries"),
    "a case of lists": (
        {"entries": [{"case": {"D": [1]}, "tokens": [bucket(1, {})]}]},
        "entry 0 is malformed",
    ),
    "buckets out of order": (
        {"entries": [{"case": CASE, "tokens": [bucket(16, {}), bucket(1, {})]}]},
        "entry 0 is malformed",
    ),
    "a tile of text": (
        {"entries": [{"case": CASE, "tokens": [bucket(1, {"BLOCK": "big"})]}]},  # type: ignore[dict-item]
        "entry 0 is malformed",
    ),
    "one bad entry among good ones": (
        {"entries": [{"case": CASE, "tokens": [bucket(1, BIG)]}, {"case": CASE}]},
        "entry 1 is malformed",
    ),
}


@pytest.mark.parametrize("change,words", REFUSED.values(), ids=REFUSED)
def test_a_file_that_does_not_fit_is_reported_and_ignored_whole(
    change: dict[str, Any],
    words: str,
    spec: KernelSpec,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.save(content(spec) | change, "twice", GPU.slug, tmp_path)
    assert cache.load("twice", GPU.slug, spec.source, tmp_path) is cache.EMPTY
    assert words in caplog.text
    assert "default tiles are used" in caplog.text
    assert any(words in f for f in review.faults(cache.path_of(GPU.slug, "twice", tmp_path)))


@pytest.mark.parametrize("keep", [0, 1, 200, -3], ids=lambda n: f"cut at {n}")
def test_a_half_written_file_is_reported_and_ignored(
    keep: int, spec: KernelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = cache.save(content(spec), "twice", GPU.slug, tmp_path)
    file.write_text(file.read_text()[:keep])
    assert cache.load("twice", GPU.slug, spec.source, tmp_path) is cache.EMPTY
    assert "cannot be read" in caplog.text
    assert review.faults(file) == ["is not JSON"]


def test_another_triton_is_used_and_said(
    spec: KernelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = content(spec)
    data["made_with"]["triton"] = "0.0.1"
    cache.save(data, "twice", GPU.slug, tmp_path)
    caplog.set_level("INFO", "nemotriton.autotune")
    assert cache.load("twice", GPU.slug, spec.source, tmp_path).lookup(CASE, 16) == BIG
    assert "measured with triton 0.0.1" in caplog.text


WRITER = """
import sys
from pathlib import Path
from nemotriton.autotune import cache
data = {"entries": [{"case": {"D": i}, "tokens": []} for i in range(3000)]}
print("ready", flush=True)
n = 0
while True:
    n += 1
    cache.save({**data, "n": n}, "twice", "fake_gpu", Path(sys.argv[1]))
"""


def test_a_killed_writer_leaves_a_whole_file(spec: KernelSpec, tmp_path: Path) -> None:
    seen = set()
    for i in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        file = cache.path_of(GPU.slug, "twice", tmp_path)
        while not file.exists():
            time.sleep(0.005)
        time.sleep(0.02 + 0.007 * i)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        data = json.loads(file.read_text())
        assert len(data["entries"]) == 3000
        seen.add(data["n"])
    assert seen
    (tmp_path / GPU.slug / ".twice.x.tmp").write_text("left behind")
    store.update(spec, content(spec), tmp_path)
    assert not list(tmp_path.glob("*/.*.tmp"))
    assert cache.load("twice", GPU.slug, spec.source, tmp_path).lookup(CASE, 16) == BIG


def _sweep_to_death(folder: Path, moment: str) -> None:
    """A sweep that is killed at its second write of that kind, in a process of its own."""
    seen = itertools.count(1)
    kinds: dict[str, tuple[Any, str]] = {
        "before the rename": (os, "replace"),
        "before the flush": (os, "fsync"),
        "within a line": (store.Trials, "add"),
    }
    owner, name = kinds[moment]
    own = getattr(owner, name)

    def dying(*args: Any) -> Any:
        if next(seen) == (2 if owner is os else 6):  # of four tiles a point
            if owner is not os:
                with open(args[0].file, "ab") as f:
                    f.write(b'\n{"source": "')
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args)

    setattr(owner, name, dying)
    list(Sweep(FakeRunner(), folder).run(POINTS))


@pytest.mark.parametrize("moment", ["before the rename", "before the flush", "within a line"])
def test_a_sweep_that_is_killed_while_it_writes_goes_on_from_there(
    moment: str, spec: KernelSpec, tmp_path: Path
) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=_sweep_to_death, args=(tmp_path, moment)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    file = cache.path_of(GPU.slug, "twice", tmp_path)
    assert review.faults(file) == []
    assert cache.load("twice", GPU.slug, spec.source, tmp_path).lookup(CASE, 1) is not None
    runner = FakeRunner()
    events = Sweep(runner, tmp_path).run(POINTS)
    kinds = [e.kind for e in events if isinstance(e, Outcome)]
    assert kinds == ["known", "win", "win"]
    left = 4 + 3 if moment == "within a line" else 4  # the journal knows the others
    assert len(runner.tried) == left
    assert not list(tmp_path.glob("*/.*.tmp"))
    assert review.faults(file) == []


def _add_many(first: int, folder: Path) -> None:
    for i in range(first, first + 40, 2):
        entry = {"case": {**CASE, "D": i}, "tokens": [bucket(16, BIG)]}
        store.update(SPECS["twice"], content(SPECS["twice"], entry), folder)


def test_concurrent_writers_lose_nothing(spec: KernelSpec, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(k, tmp_path)) for k in (0, 1)]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
        assert w.exitcode == 0
    data = store.read(cache.path_of(GPU.slug, "twice", tmp_path))
    assert sorted(e["case"]["D"] for e in data["entries"]) == list(range(40))


def _hold(folder: Path) -> None:
    with store.locked("twice", GPU.slug, folder):
        (folder / "held").touch()
        time.sleep(60)


def test_a_killed_holder_frees_the_lock(spec: KernelSpec, tmp_path: Path) -> None:
    holder = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path,))
    holder.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.005)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert store.update(spec, content(spec), tmp_path).exists()


def test_update_merges_buckets_and_drops_another_source(
    spec: KernelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.update(spec, content(spec), tmp_path)
    newer = {"case": CASE, "tokens": [bucket(16, {}, us=9.0), bucket(64, BIG)]}
    file = store.update(spec, content(spec, newer), tmp_path)
    (entry,) = store.read(file)["entries"]
    assert [(b["upto"], b["tile"]) for b in entry["tokens"]] == [(1, {}), (16, {}), (64, BIG)]
    assert not caplog.text
    stale = content(spec) | {"source": "0" * 64}
    cache.save(stale, "twice", GPU.slug, tmp_path)
    store.update(spec, content(spec, newer), tmp_path)
    assert "another version" in caplog.text
    (entry,) = store.read(file)["entries"]
    known = [(b["upto"], b["status"]) for b in entry["tokens"]]
    assert known == [(1, "default"), (16, "measured"), (64, "measured")], "nobody tried 1"


def test_merge_takes_the_faster_and_the_better_known(spec: KernelSpec, tmp_path: Path) -> None:
    a, b, out = (tmp_path / n for n in "abc")
    mine = {"case": CASE, "tokens": [bucket(1, BIG, 5.0), bucket(16, BIG, 6.0), bucket(64, BIG)]}
    theirs = {
        "case": CASE,
        "tokens": [
            bucket(1, {"BLOCK": 2, "num_warps": 4}, 4.0),
            bucket(16, {"BLOCK": 2, "num_warps": 4}, 1.0, status="published"),
        ],
    }
    other = {"case": {**CASE, "D": 8}, "tokens": [bucket(1, {})]}
    cache.save(content(spec, mine), "twice", GPU.slug, a)
    cache.save(content(spec, theirs, other), "twice", GPU.slug, b)
    assert review.merge(a, b, out) == (1, [])
    data = store.read(cache.path_of(GPU.slug, "twice", out))
    small, big = sorted(data["entries"], key=lambda e: e["case"]["D"])
    assert small["case"]["D"] == 8
    assert [(t["tile"]["BLOCK"], t["us"]) for t in big["tokens"]] == [(2, 4.0), (4, 6.0), (4, 5.0)]
    assert review.faults(cache.path_of(GPU.slug, "twice", out)) == []
    cache.save(content(spec) | {"source": "0" * 64}, "twice", GPU.slug, b)
    written, notes = review.merge(a, b, tmp_path / "d")
    assert written == 1
    assert "another version" in notes[0]


BAD = {
    "tile": (bucket(16, {"BLOCK": 3, "num_warps": 4}), "is not among the kernel's tiles"),
    "bucket": (bucket(17, BIG), "no bucket of this kernel"),
    "status": (bucket(16, BIG, status="guessed"), "status 'guessed'"),
    "untried": (bucket(16, BIG, status="default"), "nobody tried a tile, but there is one"),
    "no time": (bucket(16, BIG, us=None), "us and default_us"),  # type: ignore[arg-type]
    "no gain": (bucket(16, BIG, us=9.9), "no gain of 2%"),
    "counts": (bucket(16, BIG, failed=5), "tried 4 and failed 5"),
}


@pytest.mark.parametrize("b,words", BAD.values(), ids=BAD)
def test_check_names_what_is_wrong(
    b: dict[str, Any], words: str, spec: KernelSpec, tmp_path: Path
) -> None:
    file = cache.save(content(spec, {"case": CASE, "tokens": [b]}), "twice", GPU.slug, tmp_path)
    (fault,) = review.faults(file)
    assert words in fault


def test_check_wants_known_axes_and_dtypes_and_each_case_once(
    spec: KernelSpec, tmp_path: Path
) -> None:
    odd = {"case": {"dtype": "fp8", "D": 64, "H": 2}, "tokens": [bucket(1, {})]}
    good = {"case": CASE, "tokens": [bucket(1, {})]}
    data = content(spec, odd, good, good)
    del data["made_with"]["driver"]
    text = " ".join(store.faults(data, spec, GPU.slug))
    for words in ("dtype 'fp8'", "axes ['D', 'H']", "comes twice", "made_with lacks 'driver'"):
        assert words in text


def test_the_check_command_exits_by_what_it_finds(spec: KernelSpec, tmp_path: Path) -> None:
    file = cache.save(content(spec), "twice", GPU.slug, tmp_path)
    run = CliRunner().invoke
    good = run(app, ["check", "--folder", str(tmp_path)])
    assert (good.exit_code, good.stdout) == (0, "")
    assert "1 files, 0 faults" in good.stderr
    (file.parent / "thrice.json").write_text("{}")
    (file.parent / "notes.txt").write_text("")
    bad = run(app, ["check", "--folder", str(tmp_path)])
    assert bad.exit_code == 1
    assert "fake_gpu/thrice.json: no kernel 'thrice'" in bad.stdout
    assert "fake_gpu/notes.txt: is not a tuned file" in bad.stdout
    wrong = run(app, ["check", "--folder", str(tmp_path), "--gpu", "nvidia_h2000"])
    assert "no GPU folder nvidia_h2000" in wrong.stderr


def test_show_and_list_read_the_files(spec: KernelSpec, tmp_path: Path) -> None:
    cache.save(content(spec), "twice", GPU.slug, tmp_path)
    run = CliRunner().invoke
    shown = run(app, ["show", "--folder", str(tmp_path)])
    assert shown.exit_code == 0
    assert "| twice | dtype=bf16 D=64 | 16 | 5.00 | 10.00 | +100.0% |" in shown.stdout
    asked = run(app, ["show", "--folder", str(tmp_path), "--format", "json"])
    row = json.loads(asked.stdout.splitlines()[1])
    # 2 x 16 x 64 x 2 bytes in 5 us, of 4,000 GB/s
    assert row["gbps"] == pytest.approx(0.8192)
    assert row["roofline_pct"] == pytest.approx(100 * 0.8192 / 4000)
    assert row["ceiling"] == "copy"
    entry = {"case": {"dtype": "bf16", "D": 2688}, "tokens": [bucket(1, {}), bucket(16, BIG)]}
    cache.save(content(spec, entry), "twice", GPU.slug, tmp_path)
    listed = run(
        app, ["list", "--folder", str(tmp_path), "--kernel", "twice", "--model", "nano-30b"]
    )
    words = " ".join(listed.stdout.splitlines()[1].split())
    assert words == "twice D2688 bf16 1 default, 2 measured"


def test_every_shipped_file_passes_the_check() -> None:
    found = review.files(cache.root())
    assert {str(f): why for f in found if (why := review.faults(f))} == {}


def test_the_space_changes_with_the_tiles() -> None:
    tiles = list(TILES)
    point = Point("twice", Case(D=64), 16, "bf16")
    with toy(tiles):
        before = store.space(point)
        tiles.reverse()
        assert store.space(point) == before
        tiles.append(Tile(BLOCK=64, num_warps=4))
        assert store.space(point) != before
