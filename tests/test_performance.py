"""The tables of whole-model figures: rows alone speak, and the pages show what rows there are."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench import performance, report, rows
from bench.models import blank
from bench.rows import BenchError, Row

ROOT = Path(__file__).resolve().parents[1]
H200 = ROOT / "bench/results/nvidia_h200"
ORIGIN = {
    "gpu": "NVIDIA H200", "ceilings": {"copy_gbs": 4280.0, "bf16_tflops": 700.0},
    "date": "2026-11-30", "commit": "abcdef0123",
}  # fmt: skip


def step(batch: int, us: float, **more: Any) -> Row:
    case = {"context": 1024, "drafts": 0, "state": "float32"} | more.pop("case", {})
    row = blank("decode", "super-120b", "release", batch, f"measure {batch}", **case)
    kinds = {"M": {"launches": 80, "bytes": 4e9, "floor_us": us / 3, "us": us / 2}}
    row |= {"us": us, "p20": us, "p80": us, "idle_us": 0.02 * us, "floor_us": us / 2}
    row |= {"roofline_pct": 50.0, "tokens_per_s": 1e6 * batch / us, "launches": 572}
    return row | ORIGIN | {"experts": None, "kinds": kinds} | more


def test_a_figure_is_its_latest_row() -> None:
    other = step(1, 1.0, case={"state": "int8"})
    found = [step(1, 9000.0), step(1, 4500.0), other, step(16, 9000.0), step(64, 20000.0)]
    text = performance.table("decode", found)
    lines = text.splitlines()
    assert (
        "| a step, 1 x 1,024 tokens | 2.25 ms | 4.50 ms, 222 tok/s | 50 % | >= 70 % |  |" in lines
    )
    assert "| a step, 256 x 1,024 tokens | | not measured | | >= 65 % |  |" in lines
    assert any("| 2.0 % |" in x for x in lines if "waits for the host" in x)
    assert any("| not measured |" in x for x in lines if "the host works" in x)
    assert any("| 6.5 |" in x for x in lines if "launches a layer" in x)
    assert lines[-1] == "Synthetic weights. One NVIDIA H200, 2026-11-30, commit abcdef0."
    assert {x.count("|") for x in lines if x.startswith("|")} == {7}
    assert performance.commands(found) == ["measure 1", "measure 16", "measure 64"]
    told = performance.table("short", found)
    assert told.count("| a step") == 3
    assert "not measured" not in told
    with pytest.raises(BenchError, match="no figure is in 'nothing'"):
        performance.table("nothing", found)


def test_every_area_has_figures_and_every_figure_a_floor_or_none() -> None:
    areas = {f.area for f in performance.figures()}
    assert areas == {"decode", "drafts", "prompt", "load", "transformers", "start"}
    text = (ROOT / "docs/performance.md").read_text()
    shown = {a for m in performance.MARKED.finditer(text) for a in m[2].split(", ")}
    assert areas <= shown


def test_a_page_is_written_between_its_marks(tmp_path: Path) -> None:
    file, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    for row in (step(1, 4500.0), step(16, 9000.0), step(64, 20000.0)):
        rows.append(row, file)
    marks = ("decode", "layers decode 1", "layers prefill 8192", "predictions")
    page.write_text(
        "own\n" + "".join(f"<!-- figures: {m} -->\nold\n<!-- end of figures -->\n" for m in marks)
    )
    words = [str(file), "--figures", str(page)]
    done = CliRunner().invoke(report.app, words)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.startswith("own\n")
    assert "old" not in text
    assert "| M | 80 | 4.000 | 1.500 | 2.250 |" in text
    assert "Not measured." in text
    assert text.count("(prediction)") == 2
    page.write_text("no marks")
    done = CliRunner().invoke(report.app, words)
    assert "has no line" in done.stderr


def goal(label: str, tokens: int, us: float, peer: str, op: str = "run_experts_packed") -> Row:
    figures = {"us": us, "roofline_pct": 61.2, "reach": 24.0, "peer": peer, "label": label}
    return {"suite": "goals", "kernel": op, "tokens": tokens} | ORIGIN | figures


def test_a_kernel_has_a_line_of_its_latest_rows() -> None:
    name = "NVFP4 experts of a layer"
    found = [
        goal(name, 1, 99.0, "Marlin 48.6"),
        goal(name, 1, 27.2, "Marlin 48.6"),
        goal(name, 8192, 4047.8, "Marlin 8600"),
        goal(name, 1, 5.0, "Marlin 48.6", op="run_experts_nvfp4"),
        goal(name, 7, 5.0, "Marlin 1"),
    ]
    text = performance.block("kernels", found)
    (line,) = [x for x in text.splitlines() if name in x]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "`run_experts_packed`, NVFP4 experts of a layer"
    assert cells[1] == "1 / 4 / 8 / 16 / 64 / 256 / 1,024 / 2,048 / 8,192"
    assert cells[2] == "27.2 / - / - / - / - / - / - / - / 4,048"
    assert cells[3].startswith("61 / -")
    assert cells[5] == "Marlin 48.6 / 114 / 185 / 294 / 530 / 655 / 1377 / 2464 / 8600"
    assert "One NVIDIA H200, 2026-11-30, commit abcdef0: `python -m bench.goals`." in text
    assert "of a tree" in text
    assert "of a tree" not in performance.block("kernels short", found)


def test_steps_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra bench is not installed")
    file, picture = tmp_path / "rows.jsonl", tmp_path / "steps.png"
    for row in (step(1, 4500.0), step(16, 9000.0), step(64, 20000.0)):
        rows.append(row, file)
    done = CliRunner().invoke(report.app, [str(file), "--steps", str(picture)])
    assert done.exit_code == 0, done.output
    assert 1000 < picture.stat().st_size < 100_000


def ranks(tp: int, ep: int, us: float, share: float) -> Row:
    case = {"model": "super-120b", "quant": "release", "drafts": 0, "tp": tp, "ep": ep}
    row = {"suite": "parallel", "kernel": "step", "tokens": 1, "case": case, "us": us}
    return row | ORIGIN | {"roofline_pct": share}


def test_several_gpus_stand_beside_one(tmp_path: Path) -> None:
    found = [ranks(1, 1, 9000.0, 50.0), ranks(1, 1, 5000.0, 60.0), ranks(4, 1, 2500.0, 30.0)]
    text = performance.block("scaling", found)
    (line,) = [x for x in text.splitlines() if x.startswith("| Super, a step, 1 seq")]
    assert "| 5.00 ms, 60 % |  | 2.50 ms, 30 %, 2.00 x |  | two >= 1.35 x" in line
    assert "Synthetic weights. NVIDIA H200, 2026-11-30, commit abcdef0." in text
    pytest.importorskip("matplotlib", reason="the extra bench is not installed")
    report.scaled(found, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 1000
    with pytest.raises(BenchError, match="on one GPU and on several"):
        report.scaled(found[:2], tmp_path / "none.png")


@pytest.mark.parametrize("page", ["docs/performance.md", "README.md", "docs/parallel.md"])
def test_the_pages_show_the_rows_that_lie_there(page: str) -> None:
    """If not: python -m bench.report bench/results/nvidia_h200/*.jsonl --figures PAGE"""
    text = (ROOT / page).read_text()
    assert performance.written(text, rows.load(sorted(H200.glob("*.jsonl")))) == text


def test_the_page_says_what_is_no_measurement_of_a_trained_model() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    assert re.search(r"\*\*All weights are synthetic\*\*", text)
    assert re.search(r"\*\*Predictions\*\*", text)
