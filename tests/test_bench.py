"""Benchmarks without a GPU: rows, the gate before every number, reports, traces."""

import csv
import importlib.util
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench import cli, kernels, pages, profile, report, rows
from bench.rows import BenchError, Row
from nemotriton.autotune import cache, store
from nemotriton.autotune.child import MeasuringFailed
from nemotriton.autotune.timing import Timing
from nemotriton.autotune.trial import Point
from nemotriton.errors import UnsupportedError
from nemotriton.kernels.op import Case, KernelSpec, Tile
from tests.fake_runner import DEFAULT, FACTS, GPU, TILES, FakeRunner, toy

POINT = Point("twice", Case(D=64), 16, "bf16")


@pytest.fixture
def spec() -> Iterator[KernelSpec]:
    with toy(list(TILES)) as spec:
        yield spec


def measured(runner: Any, point: Point = POINT) -> Row:
    (row,) = kernels.measure({point: "tiny"}, runner)
    return row


def row(us: float | None, p20: float = 0.0, p80: float = 0.0, **more: Any) -> Row:
    """A row of the toy op with given times."""
    found = rows.empty("kernels", POINT, "nemotriton", "nemotriton", "python -m bench.kernels")
    found |= rows.environment(FACTS)
    if us is not None:
        found |= rows.figures(POINT, Timing(us, p20 or us, p80 or us, 15), FACTS)
    return found | more


# -------------------------------------------------------------------------------- what is measured
def test_token_counts_are_taken_as_they_are(spec: KernelSpec) -> None:
    found = cli.points(["twice"], "tiny,nano-30b", "bf16", "5,64,65")
    assert [(p.case.D, p.tokens, m) for p, m in found.items()] == [
        (192, 5, "tiny"),
        (192, 64, "tiny"),
        (2688, 5, "nano-30b"),
        (2688, 64, "nano-30b"),
    ]
    assert [p.tokens for p in cli.points(["twice"], "tiny", "bf16", "")] == [1, 16, 64]
    with pytest.raises(UnsupportedError, match="no kernel has a case"):
        cli.points(["twice"], "tiny", "bf16", "65")


def test_a_row_says_everything(spec: KernelSpec) -> None:
    found = measured(FakeRunner())
    # 2 x 16 x 64 x 2 bytes in 10 us, of 4,000 GB/s
    assert (found["us"], found["default_us"], found["gbps"]) == (10.0, 10.0, 0.4096)
    assert found["roofline_pct"] == rows.digits(100 * 4096 / 10e-6 / 4e12)
    assert (found["ceiling"], found["tile"], found["status"]) == ("copy", dict(DEFAULT), "ok")
    assert (found["p20"], found["p80"]) == (9.9, 10.1)
    assert found["case"] == {"dtype": "bf16", "D": 64}
    assert found["gpu"] == "Fake GPU"
    assert found["ceilings"]["copy_gbs"] == 4000.0
    origin = {"driver", "triton", "torch", "commit", "dirty", "date", "clocks", "seed"}
    assert origin | {"provider_version"} <= set(found)
    words = found["command"].split()
    assert words[:3] == ["python", "-m", "bench.kernels"]
    again = dict(zip(words[3::2], words[4::2], strict=True))
    same = cli.points([again["--kernel"]], "tiny", again["--dtype"], again["--tokens"])
    assert next(iter(same)).tokens == POINT.tokens


def test_a_tuned_tile_is_gated_and_raced_against_the_default(
    spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMOTRITON_TUNE_CACHE", str(tmp_path))
    tile = {"BLOCK": 4, "num_warps": 4}
    data = {
        "schema": 1,
        "kernel": "twice",
        "gpu": store.describe(FACTS),
        "source": spec.source,
        "entries": [{"case": POINT.key, "tokens": [{"upto": 16, "tile": tile}]}],
    }
    cache.save(data, "twice", GPU.slug, tmp_path)
    runner = FakeRunner()
    nine = Point("twice", Case(D=64), 9, "bf16")
    found = measured(runner, nine)
    assert (found["us"], found["default_us"], found["tile"]) == (2.5, 10.0, tile)
    assert runner.tried == [(nine, Tile(**tile))]
    assert runner.raced == [(nine, (Tile(**tile), DEFAULT))]


class Dying(FakeRunner):
    def race(self, point: Point, tiles: Any) -> Any:
        raise MeasuringFailed("the measuring process crashed (SIGSEGV) in race")


RED: dict[str, tuple[Callable[[], FakeRunner], str]] = {
    "wrong": (lambda: FakeRunner(act={DEFAULT: "parity at 16 tokens: out0"}), "parity at 16"),
    "wrong at full size": (lambda: FakeRunner(bad_at_size={None}), "differs"),  # type: ignore[arg-type]
    "dies": (Dying, "crashed"),
}


@pytest.mark.parametrize("make,words", RED.values(), ids=RED)
def test_a_red_gate_prints_no_number(
    make: Callable[[], FakeRunner], words: str, spec: KernelSpec
) -> None:
    runner = make()
    found = measured(runner)
    assert found["status"] == "red"
    assert words in found["note"]
    assert [found[n] for n in rows.NUMBERS] == [None] * len(rows.NUMBERS)
    assert runner.raced == []
    line = rows.markdown([found]).splitlines()[2]
    assert line == "| twice | D64 bf16 | 16 | nemotriton | parity failed |  |  |  |  |  |  |"


def test_the_commands_say_that_they_need_a_gpu(spec: KernelSpec) -> None:
    if not torch.cuda.is_available():
        done = CliRunner().invoke(kernels.app, ["--kernel", "twice", "--model", "tiny"])
        assert "no CUDA device" in done.stderr


# ------------------------------------------------------------------------------------- the reports
def test_rows_survive_every_format(spec: KernelSpec, tmp_path: Path) -> None:
    first, second = row(10.0), row(None, status="red", note="parity: 3", tokens=64)
    file = tmp_path / "rows.jsonl"
    for r in (row(99.0), first, second):
        rows.append(r, file)
    assert rows.load([file]) == [first, second], "measured twice: the last one counts"
    run = CliRunner().invoke
    as_lines = run(report.app, [str(file), "--format", "jsonl"]).stdout
    assert [json.loads(line) for line in as_lines.splitlines()] == [first, second]
    table = list(
        csv.DictReader(io.StringIO(run(report.app, [str(file), "--format", "csv"]).stdout))
    )
    assert (table[0]["us"], table[1]["us"], table[1]["note"]) == ("10.0", "", "parity: 3")
    assert json.loads(table[0]["case"]) == first["case"]
    shown = run(report.app, [str(file)]).stdout
    assert "| twice | D64 bf16 | 16 | nemotriton | 10.00 | ±0.0 % |" in shown
    assert "* twice D64 bf16 T=64 nemotriton: parity: 3" in shown


def test_files_that_are_no_rows_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"kernel": "twice"}\n{"kernel": "tw\n')
    with pytest.raises(BenchError, match=r"rows.jsonl:2 is not a row"):
        rows.load([broken])
    with pytest.raises(BenchError, match="cannot be read"):
        rows.load([tmp_path / "none.jsonl"])
    done = CliRunner().invoke(report.app, [str(broken), "--format", "xml"])
    assert "use md, csv or jsonl" in done.stderr


@pytest.mark.parametrize(
    "old,new,moves",
    [
        ((10.0, 9.9, 10.1), (10.15, 10.05, 10.2), False),
        ((10.0, 9.9, 10.1), (10.3, 10.2, 10.4), True),
        ((10.0, 9.9, 10.1), (9.0, 8.9, 9.1), True),
        ((10.0, 8.0, 12.0), (11.9, 11.8, 12.2), False),
    ],
)
def test_only_rows_beyond_the_spread_have_moved(
    old: tuple[float, float, float],
    new: tuple[float, float, float],
    moves: bool,
    spec: KernelSpec,
) -> None:
    assert bool(report.moved([row(*new)], [row(*old)])) == moves


def test_against_sorts_by_the_worst_and_counts_the_rest(spec: KernelSpec) -> None:
    old = [row(10.0, tokens=t) for t in (1, 2, 3, 4, 5)]
    new = [row(us, tokens=t) for t, us in ((1, 9.0), (2, 12.0), (3, 10.0))]
    new.append(row(None, tokens=4, status="red"))
    text = report.against(new, old)
    lines = [line for line in text.splitlines() if line.startswith("| twice")]
    assert [line.split(" | ")[2] for line in lines] == ["4", "2", "1"]
    assert lines[0].endswith("| 10.00 | parity failed |  |")
    assert lines[1].endswith("| 10.00 | 12.00 | 1.200 |")
    assert "4 rows compared, 3 moved, 1 in one file only" in text


def test_the_roofline_picture(spec: KernelSpec, tmp_path: Path) -> None:
    out = tmp_path / "roofline.png"
    found = [row(10.0), row(20.0, tokens=64), row(None, tokens=1, status="red")]
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(BenchError, match=r"\.\[bench\]"):
            report.roofline(found, out)
        return
    report.roofline(found, out)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(BenchError, match="several GPUs"):
        report.roofline([found[0], found[1] | {"gpu": "NVIDIA H200"}], out)


def test_a_page_has_the_rows_that_its_marker_names(spec: KernelSpec, tmp_path: Path) -> None:
    page = tmp_path / "layer.md"
    page.write_text("# Title\n<!-- rows: twice D=64 -->\nold\n<!-- end of rows -->\nafter\n")
    found = [row(10.0, label="one", peer="other 5.0-6.0"), row(2000.0, tokens=64), row(None)]
    pages.write_pages(tmp_path, [*found, row(3.0, kernel="thrice")])
    text = page.read_text()
    pages.write_pages(tmp_path, found)
    assert page.read_text() == text, "writing again changes nothing"
    assert "| twice | one | 16 | 10.0 | 0 % of copy | other 5.0-6.0 |" in text
    assert "| twice | D64 bf16 | 64 | 2,000 | 0 % of copy |  |" in text
    assert "One Fake GPU, " in text
    assert text.endswith("`python -m bench.kernels`.\n<!-- end of rows -->\nafter\n")
    assert text.count("| twice |") == 2
    again = row(9.0, label="one", case={"dtype": "bf16", "D": 64, "O": 1})
    other, theirs = row(8.0, label="one, atomic"), row(1.0, label="one", provider="torch")
    shown = list(pages.chosen("twice", [*found, again, other, theirs]))
    assert [r["us"] for r in shown] == [9.0, 2000.0, 8.0], "a figure's last row, at its place"
    for marker in ("thrice", "twice D=65"):
        with pytest.raises(BenchError, match=f"no measured row of {marker}"):
            list(pages.chosen(marker, found))
    page.write_text("# Title\n")
    with pytest.raises(BenchError, match="no page"):
        pages.write_pages(tmp_path, found)


def test_rows_that_differ_in_their_label_are_two_things(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for label in ("one prompt", "sixteen", "sixteen"):
        rows.append({"suite": "goals", "case": {}, "label": label}, file)
    assert [r["label"] for r in rows.load([file])] == ["one prompt", "sixteen"]


def test_the_picture_of_other_kernels(spec: KernelSpec, tmp_path: Path) -> None:
    out = tmp_path / "bars.png"
    found = [row(10.0, label="a", peer="cuBLAS 44-46"), row(2.0, label="b", peer="")]
    assert [report.other_us(r) for r in found] == [44.0, None]
    assert report.other_us(row(1.0)) is None
    if importlib.util.find_spec("matplotlib") is None:
        return
    report.bars(found, out)
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(BenchError, match="no row"):
        report.bars(found[1:], out)


# -------------------------------------------------------------------------------------- the traces
def test_a_trace_counts_kernels_and_a_diff_says_what_changed(tmp_path: Path) -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)

    def work() -> None:
        for _ in range(3):
            torch.mm(a, b)

    if not torch.cuda.is_available():
        found = profile.trace(work, "products")
        (mm,) = [k for k in found["kernels"] if k["name"] == "aten::mm"]
        assert mm["count"] == 3
        assert mm["us"] > 0
        assert found["us"] == pytest.approx(sum(k["us"] for k in found["kernels"]))
    before = {
        "us": 160.0,
        "kernels": [kernel("a", 2, 100.0), kernel("b", 1, 50.0), kernel("c", 1, 10.0)],
    }
    after = {
        "us": 130.0,
        "kernels": [kernel("a", 2, 50.0), kernel("d", 4, 70.0), kernel("c", 1, 10.0)],
    }
    lines = profile.difference(before, after, top=3).splitlines()[2:]
    assert lines == [
        "| d | 0 → 4 | 0.0 | 70.0 | new |",
        "| a | 2 | 100.0 | 50.0 | 0.500 |",
        "| b | 1 → 0 | 50.0 | 0.0 | gone |",
        "| 1 more | | 10.0 | 10.0 | 1.000 |",
        "| total | | 160.0 | 130.0 | 0.812 |",
    ]


def kernel(name: str, count: int, us: float) -> dict[str, Any]:
    return {"name": name, "count": count, "us": us}


def test_profile_runs_an_op_or_a_module_and_compares(tmp_path: Path) -> None:
    run, argv = CliRunner().invoke, list(sys.argv)
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    op = ["run", one, "--kernel", "rms_norm", "--model", "tiny", "--tokens", "4"]
    done = run(profile.app, op)
    assert done.exit_code == 0, done.output
    found = json.loads(Path(one).read_text())
    assert found["what"] == "rms_norm D192 bf16 T=4, 20 calls"
    assert found["kernels"]
    done = run(profile.app, ["run", two, "--", "json.tool", "--compact", one, str(tmp_path / "x")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "x").read_text()) == found
    assert sys.argv == argv
    done = run(profile.app, ["diff", one, two])
    assert "what: rms_norm D192 bf16 T=4, 20 calls before, json.tool" in done.stderr
    assert "| total | |" in done.stdout
    for wrong in (["run", one], ["run", one, "--kernel", "rms_norm", "--", "json.tool"]):
        assert "not both" in run(profile.app, wrong).stderr
    (tmp_path / "x").write_text("[]")
    assert "is not a trace" in run(profile.app, ["diff", one, str(tmp_path / "x")]).stderr
