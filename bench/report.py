"""`python -m bench.report FILES`: rows as tables or a picture, what moved, and the pages' tables.

`--against OLD` shows only rows that moved by more than both measurements' spread: whose intervals
from the 20th to the 80th percentile do not overlap. `--figures PAGE` writes a page's tables of
whole models and of kernels (`bench.performance`), `--pages FOLDER` those of the pages there
(`bench.pages`).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import performance, rows, scaling_figures
from bench.cli import Kernels, application, run
from bench.pages import write_pages
from bench.rows import BenchError, Row
from nemotriton.errors import require

app = application(__doc__)


# ------------------------------------------------------------------------------------ what moved
def moved(new: Sequence[Row], old: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs (new, old) of the same thing that differ by more than the spread, or in status."""
    before = {rows.identity(r): r for r in old}
    pairs = [(r, before[rows.identity(r)]) for r in new if rows.identity(r) in before]
    return [(a, b) for a, b in pairs if a["status"] != b["status"] or apart(a, b)]


def apart(a: Row, b: Row) -> bool:
    """Do the two measured intervals leave a gap?"""
    if a["us"] is None or b["us"] is None:
        return False
    return bool(a["p20"] > b["p80"] or b["p20"] > a["p80"])


def against(new: Sequence[Row], old: Sequence[Row]) -> str:
    """The moved rows, slowest change first, and how many rows were compared."""
    lines = ["| kernel | case | tokens | provider | before us | now us | ratio |"]
    lines.append("|---|---|--:|---|--:|--:|--:|")
    pairs = moved(new, old)

    def ratio(pair: tuple[Row, Row]) -> float:
        now, before = pair
        return now["us"] / before["us"] if now["us"] and before["us"] else float("inf")

    for pair in sorted(pairs, key=ratio, reverse=True):
        now, before = pair
        values = [rows.number(r["us"], ".2f") or rows.said(r) for r in (before, now)]
        text = f"{ratio(pair):.3f}" if ratio(pair) != float("inf") else ""
        cells = [now["kernel"], rows.case_text(now["case"]), str(now["tokens"]), now["provider"]]
        lines.append("| " + " | ".join([*cells, *values, text]) + " |")
    both = {rows.identity(r) for r in new} & {rows.identity(r) for r in old}
    alone = len(new) + len(old) - 2 * len(both)
    lines.append(f"\n{len(both)} rows compared, {len(pairs)} moved, {alone} in one file only")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------- pictures
def plotting() -> Any:
    """matplotlib's pyplot, drawing into files."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BenchError(
            "a picture needs: pip install -e '.[bench]' in the project's folder."
        ) from error
    return pyplot


def roofline(found: Sequence[Row], file: Path) -> None:
    """Achieved TFLOP/s over operations a byte, below the measured ceilings; one picture a GPU."""
    pyplot = plotting()
    good = [r for r in found if r["us"] is not None and r["tflops"] and r["gbps"]]
    require(bool(good), "no row has numbers to draw", BenchError)
    gpus = {r["gpu"] for r in good}
    require(len(gpus) == 1, f"rows of several GPUs: {', '.join(sorted(gpus))}", BenchError)
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for kernel in sorted({r["kernel"] for r in good}):
        mine = [r for r in good if r["kernel"] == kernel]
        intensity = [1e3 * r["tflops"] / r["gbps"] for r in mine]
        axes.scatter(intensity, [r["tflops"] for r in mine], s=14, label=kernel)
    limits = good[0]["ceilings"]
    ridge = 1e3 * limits["bf16_tflops"] / limits["copy_gbs"]
    low = min(1e3 * r["tflops"] / r["gbps"] for r in good) / 2
    xs = [low, ridge, 8 * ridge]
    axes.plot(
        xs, [min(x * limits["copy_gbs"] / 1e3, limits["bf16_tflops"]) for x in xs], "k-", lw=1
    )
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.set_title(f"{good[0]['gpu']}, ceilings measured in the same run")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(file, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def other_us(row: Row) -> float | None:
    """The least time that `peer` names, as in "cuBLAS 44-46"; None where it names none."""
    said_by = re.search(r"(\d+(?:\.\d+)?)(?:-\d+(?:\.\d+)?)?$", row.get("peer") or "")
    return float(said_by[1]) if said_by else None


def bars(found: Sequence[Row], file: Path) -> None:
    """How many times as fast as the best other kernel each row is: a bar a row, 1 is a tie."""
    pyplot = plotting()
    good = [(r, other) for r in found if r["us"] is not None and (other := other_us(r))]
    require(bool(good), "no row has another kernel's time to draw", BenchError)
    gpus = sorted({r["gpu"] for r, _ in good})
    require(len(gpus) == 1, f"rows of several GPUs: {', '.join(gpus)}", BenchError)
    names = [f"{r['kernel']}: {r['label']}, {r['tokens']:,} ({r['peer']} us)" for r, _ in good]
    ratios = [other / r["us"] for r, other in good]
    colours = ["tab:green" if ratio >= 1 else "tab:red" for ratio in ratios]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.17 * len(good)))
    axes.barh(names, ratios, color=colours, height=0.7)
    axes.axvline(1.0, color="black", lw=1)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("time of the best other kernel / time here")
    axes.set_title(gpus[0])
    figure.savefig(file, dpi=66, bbox_inches="tight")
    pyplot.close(figure)


def steps(found: Sequence[Row], file: Path) -> None:
    """Whole decode steps over the number of sequences, and where a step's time goes by layer."""
    pyplot = plotting()
    good = [r for r in found if r["suite"] == "decode" and r["us"] is not None]
    plain = {r["tokens"]: r for r in good if performance.is_plain(r)}
    require(bool(plain), "no row is a plain decode step of Super", BenchError)
    counts = sorted(plain)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, label in (("us", "measured"), ("floor_us", "floor of the bytes")):
        left.plot(counts, [plain[n][name] / 1e3 for n in counts], "o-", label=label)
    left.set(xscale="log", yscale="log", xlabel="sequences", ylabel="ms a step")
    left.legend()
    shown = [n for n in counts if plain[n].get("kinds")]
    bottom = {(n, what): 0.0 for n in shown for what in ("us", "floor_us")}
    names = [f"{n}\n{what}" for n in shown for what in ("kernels", "floor")]
    for kind in dict.fromkeys(k for n in shown for k in plain[n]["kinds"]):
        heights, starts = [], []
        for (n, what), base in bottom.items():
            height = plain[n]["kinds"].get(kind, {}).get(what, 0.0) / plain[n]["us"]
            heights.append(height)
            starts.append(base)
            bottom[n, what] += height
        right.bar(names, heights, bottom=starts, label=kind)
    right.set(ylabel="share of the step")
    right.legend(fontsize=7)
    figure.suptitle(f"{plain[counts[0]]['gpu']}, Super 120B, synthetic weights, 1,024 tokens each")
    figure.savefig(file, dpi=80, bbox_inches="tight")
    pyplot.close(figure)


def scaled(found: Sequence[Row], file: Path) -> None:
    """Super on several GPUs: how many times the speed of one, and the share of all their floors."""
    pyplot = plotting()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    drawn, used = False, list[Row]()
    for what in scaling_figures.LINES:
        mine = {tp: r for (tp, ep), r in sorted(what.rows(found).items()) if ep == 1}
        used += mine.values()
        if 1 in mine and len(mine) > 1:
            left.plot(
                [*mine], [mine[1]["us"] / r["us"] for r in mine.values()], "o-", label=what.name
            )
            drawn = True
        shares = {n: r["roofline_pct"] for n, r in mine.items() if r["roofline_pct"]}
        right.plot([*shares], [*shares.values()], "o-", label=what.name)
    require(drawn, "no row was measured on one GPU and on several", BenchError)
    left.plot([1, 4], [1, 4], "k:", lw=1)
    left.set(xlabel="GPUs (tp)", ylabel="times the speed of one", xticks=[1, 2, 4])
    right.set(xlabel="GPUs (tp)", ylabel="% of the floor of all", xticks=[1, 2, 4], ylim=(0, 100))
    left.legend(fontsize=7)
    right.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.02, 1))
    figure.suptitle(f"{rows.gpus(used)}, synthetic weights")
    figure.savefig(file, dpi=66, bbox_inches="tight")
    pyplot.close(figure)


@app.command()
def main(
    files: Annotated[list[Path], typer.Argument(help="JSONL files of rows.")],
    form: Annotated[str, typer.Option("--format", help="md, csv or jsonl.")] = "md",
    old: Annotated[Path | None, typer.Option("--against", help="Rows of an earlier run.")] = None,
    picture: Annotated[Path | None, typer.Option("--roofline", help="PNG to draw.")] = None,
    others: Annotated[
        Path | None, typer.Option("--bars", help="PNG to draw: beside other kernels.")
    ] = None,
    picture_of_steps: Annotated[
        Path | None, typer.Option("--steps", help="PNG to draw: decode steps by layer.")
    ] = None,
    picture_of_scaling: Annotated[
        Path | None, typer.Option("--scaling", help="PNG to draw: several GPUs.")
    ] = None,
    figures: Annotated[
        list[Path] | None,
        typer.Option(help="Page whose tables of figures are written; repeatable."),
    ] = None,
    pages: Annotated[Path | None, typer.Option(help="Folder whose tables are written.")] = None,
    kernel: Kernels = None,
) -> None:
    """Print rows, compare them with an earlier run, draw them, or write a page's tables."""
    formats: dict[str, Any] = {"md": rows.markdown, "csv": rows.as_csv, "jsonl": as_jsonl}
    require(form in formats, f"--format {form!r}: use md, csv or jsonl")
    found = [r for r in rows.load(files) if not kernel or r["kernel"] in kernel]
    if picture is not None:
        roofline(found, picture)
    if others is not None:
        bars(found, others)
    if picture_of_steps is not None:
        steps(found, picture_of_steps)
    if picture_of_scaling is not None:
        scaled(found, picture_of_scaling)
    for page in figures or ():
        performance.write(page, found)
    if pages is not None:
        write_pages(pages, found)
    if old is not None:
        print(against(found, rows.load([old])), end="")
    elif not any((picture, others, picture_of_steps, picture_of_scaling, figures, pages)):
        print(formats[form](found), end="")


def as_jsonl(found: Sequence[Row]) -> str:
    return "".join(json.dumps(r) + "\n" for r in found)


if __name__ == "__main__":
    run(app)
