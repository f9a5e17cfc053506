"""`python -m bench.parallel preset:super-120b --synthetic --quant release --tp 2`: several GPUs.

First the gate: at full width and few layers, that many ranks against one (`bench.ranks`). Then the
decode steps of whole models and, with --tokens, prompts; with --one, of one rank too, so that the
gain stands beside them. `ms in sums` is what rank 0 spends in kernels that add up over the ranks,
its waiting for the others included.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench import rows
from bench.cli import Out, application, run
from bench.models import Layers, Model, Quant, Setup, StateDtype, Synthetic, facts_here, numbers
from bench.ranks import HEAD, Ranks, Work, gate, line, measure
from bench.rows import Row
from nemotriton.autotune.ceilings import Ceilings
from nemotriton.autotune.provenance import commit
from nemotriton.autotune.trial import Facts
from nemotriton.device import info

app = application(__doc__)


def facts_of(device: str | None, rate: float | None) -> Facts:
    """What the first GPU is and reaches; of a CPU only what it is called, at the rate given."""
    if device != "cpu" and torch.cuda.is_available():
        return facts_here(rate)
    speed = 1e3 * (rate or 0.01)
    return Facts(info("cpu"), "", Ceilings(speed, speed, 0.0, 0.0))


def judge(setup: Setup, ranks: Ranks, kept: Path | None) -> dict[str, float]:
    """What the gate says of these widths at this commit, or said before in the file `kept`."""
    key = [setup.model, setup.quant, ranks.tp, ranks.ep, *commit()]
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    for entry in map(json.loads, lines):
        if entry["of"] == key:
            return dict(entry["said"])
    said = gate(setup, ranks)
    if kept is not None:
        with kept.open("a") as file:
            file.write(json.dumps({"of": key, "said": said}) + "\n")
    return said


def ratio(before: list[Row], row: Row) -> str:
    """How much faster than one rank did the same."""
    for other in before:
        alone = other["case"]["tp"] * other["case"]["ep"] == 1
        alike = all(other[k] == row[k] for k in ("kernel", "tokens"))
        if alone and alike and other["case"]["drafts"] == row["case"]["drafts"]:
            return f" {other['us'] / row['us']:.2f} x one"
    return ""


def table(works: list[Work], facts: Facts, judged: dict[str, float], out: Out) -> list[Row]:
    """Measure, print and keep."""
    found: list[Row] = []
    print(f"{HEAD}\n|" + "--:|" * HEAD.count(" |"), flush=True)
    for work in works:
        for row in measure(work, facts, judged):
            rows.append(row, out)
            print(line(row) + ratio(found, row), flush=True)
            found.append(row)
    return found


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    tp: Annotated[int, typer.Option(help="As in generate.")] = 2,
    ep: Annotated[int, typer.Option(help="As in generate.")] = 1,
    one: Annotated[bool, typer.Option("--one", help="One rank as well, first.")] = False,
    batch: Annotated[str, typer.Option(help="Numbers of sequences; none with ''.")] = "1,64",
    context: Annotated[int, typer.Option(help="Tokens behind each.")] = 1024,
    drafts: Annotated[int, typer.Option(help="Drafts a step.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps behind each number.")] = 30,
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "",
    piece: Annotated[int, typer.Option(help="Prompt tokens a step.")] = 8192,
    repeat: Annotated[int, typer.Option(help="Prompts of each length.")] = 2,
    state_dtype: StateDtype = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
    rate: Annotated[float | None, typer.Option(help="TB/s of one; default: measured.")] = None,
    gates: Annotated[
        Path | None, typer.Option(help="Where gates that have been passed are kept, by commit.")
    ] = None,
    out: Out = None,
) -> None:
    """The gate, then decode steps and prompts of whole models on so many ranks."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    setup = Setup(model, quant, layers, state_dtype=state_dtype, device=device)
    ranks = Ranks(tp, ep)
    facts = facts_of(device, rate)
    judged = judge(setup, ranks, gates)
    print(f"gate, {ranks}: {judged}\n", flush=True)
    batches = tuple(numbers(batch)) if batch else ()
    prompts = tuple(numbers(tokens)) if tokens else ()
    work = Work(setup, ranks, batches, context, drafts, prompts, piece, steps, repeat)
    table([*([replace(work, ranks=Ranks())] if one else []), work], facts, judged, out)


if __name__ == "__main__":
    run(app)
