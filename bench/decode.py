"""`python -m bench.decode preset:nano-30b --synthetic`: what a decode step must move, and takes.

First the card: bytes a step by kind of layer (`bench.cost`). The floor is these bytes at the copy
rate measured in this process. Then the steps of a random model at full width, through the whole
engine, text aside (`bench.steps`). `host` is what of a step's wall time was not spent waiting for
the device; `experts` the distinct ones a layer that the routing really reached, which is what the
floor of the measured rows counts. A second table has launches, bytes and times by kind of layer.

With drafts, acceptance is forced (`bench.forced`): `--acceptance 0.73`, the default, accepts each
draft in that share of passes, as long as all before it were.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import typer

from bench import cost, rows, steps
from bench.cli import Out, application, need_gpu, run
from bench.cost import Load, Part
from bench.models import (
    Acceptance,
    ActQuantFp8,
    Invariant,
    KvDtype,
    Layers,
    Model,
    Quant,
    Rollback,
    Running,
    Setup,
    StateDtype,
    Synthetic,
    facts_here,
    held,
    numbers,
)
from bench.rows import BenchError, Row
from nemotriton import LLM
from nemotriton.autotune.provenance import clocks
from nemotriton.autotune.timing import summary
from nemotriton.autotune.trial import Facts
from nemotriton.engine.caches import PAGE_SIZE
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.loading import Weights
from nemotriton.engine.replay import find_rollback
from nemotriton.errors import CapacityError
from nemotriton.kernels import STATE_FORMATS

app = application(__doc__)


# ------------------------------------------------------------------------------------------- card
def show(found: list[Part], load: Load, rate: float) -> None:
    """The card as a table, its floor and what that is in tokens a second."""
    lines = cost.by_line(found)
    total = sum(lines.values())
    print(f"\n{load.batch} x {load.context:,} tokens, {load.drafts} drafts\n\n| part | GB | % |")
    print("|---|--:|--:|")
    for name, nbytes in sorted(lines.items(), key=lambda p: -p[1]):
        print(f"| {name} | {nbytes / 1e9:.4f} | {100 * nbytes / total:.1f} |")
    seconds = total / rate / 1e9
    print(f"| all | {total / 1e9:.4f} | at {rate / 1e3:.2f} TB/s: {1e3 * seconds:.3f} ms, ", end="")
    print(f"{load.batch / seconds:,.0f} tok/s without an accepted draft |\n", flush=True)


# ---------------------------------------------------------------------------------------- measure
def measured(llm: LLM, weights: Weights, load: Load, facts: Facts, count: int) -> Row:
    """The numbers of one load; BenchError where its contexts do not fit."""
    steps.begin(llm, load.batch, load.context)
    got = steps.steps_of(llm, load.drafts, count)
    idle = steps.idle_of(llm)
    seen = steps.experts_seen(llm)
    layers = steps.layers_of(llm)
    steps.end(llm)
    timing = summary(got.wall)
    found = cost.parts(weights, load, seen)
    nbytes = sum(part.nbytes for part in found)
    floor = nbytes / facts.ceilings.copy_gbs / 1e3
    lists = {"device": got.device, "host": got.host} | got.parts
    middle = {name: round(sorted(x)[len(x) // 2], 1) for name, x in lists.items()}
    kinds = cost.by_kind(found, cost.Rates(facts.ceilings.copy_gbs, 1e9, 1e9))
    for kind, sums in (layers or {}).items():
        kinds[kind] = kinds.get(kind, {}) | sums
    return {
        "us": round(timing.us, 1),
        "p20": round(timing.p20, 1),
        "p80": round(timing.p80, 1),
        "device_us": middle.pop("device"),
        "host_us": middle.pop("host"),
        "idle_us": None if idle is None else round(idle, 1),
        "split_us": middle,
        "tokens_per_s": rows.digits(1e6 * got.tokens / sum(got.wall)),
        "tokens_per_step": rows.digits(got.tokens / count / load.batch),
        "floor_us": round(floor, 1),
        "gbps": rows.digits(nbytes / timing.us / 1e3),
        "roofline_pct": rows.digits(100 * floor / timing.us),
        "ceiling": "copy",
        "launches": None if layers is None else int(sum(k["launches"] for k in layers.values())),
        "experts": None if seen is None else round(seen, 1),
        "kinds": {k: {n: rows.digits(v) for n, v in sums.items()} for k, sums in kinds.items()},
        "clocks": clocks(),
    }


HEAD = (
    "| batch | context | drafts | step ms | device ms | host ms | tok/s | tok/step | floor ms "
    "| % of floor | launches | experts |"
)


def line(row: Row) -> str:
    case = row["case"]
    where = f"| {row['tokens']} | {case['context']} | {case['drafts']} |"
    if row["us"] is None:
        return f"{where} {row['status']}: {row['note']} |" + " |" * 8
    return (
        f"{where} {row['us'] / 1e3:.3f} | {row['device_us'] / 1e3:.3f} | "
        f"{row['host_us'] / 1e3:.3f} | {row['tokens_per_s']:,.0f} | {row['tokens_per_step']} | "
        f"{row['floor_us'] / 1e3:.3f} | {row['roofline_pct']:.0f} | {row['launches'] or ''} | "
        f"{row['experts'] or ''} |"
    )


def layers_table(row: Row) -> str:
    """Launches, bytes, floor and time by kind of layer; times as traced, launched one by one."""
    where = f"{row['tokens']} sequences, context {row['case']['context']:,}"
    lines = [
        where,
        "",
        "| layers | launches | GB | floor ms | ms in kernels |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind, sums in row["kinds"].items():
        cells = [
            rows.number(sums.get("launches"), ".0f"),
            rows.number(sums.get("bytes", 0.0) / 1e9, ".3f"),
            rows.number(sums.get("floor_us", 0.0) / 1e3, ".3f"),
            rows.number(sums["us"] / 1e3 if "us" in sums else None, ".3f"),
        ]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def loads(batch: str, context: str, drafts: int, setup: Setup) -> list[Load]:
    """Of all batches at all contexts, by the rollback that a GPU's engine for them would take."""
    state = STATE_FORMATS[setup.state_dtype or "float32"]
    shape = DraftShape.chain(drafts) if drafts else None
    most = max(numbers(batch))
    how = (setup.rollback, shape, torch.device("cuda"), setup.invariant, most, state)
    kept = {"state_item": state.dtype.itemsize, "rollback": find_rollback(*how)}
    return [
        Load(n, length, drafts, **kept)  # type: ignore[arg-type]
        for length in numbers(context)
        for n in numbers(batch)
    ]


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,16,64,256",
    context: Annotated[str, typer.Option(help="Tokens behind each.")] = "1024",
    drafts: Annotated[str, typer.Option(help="Drafts a step; each number is a start.")] = "0,3",
    acceptance: Acceptance = 0.73,
    state_dtype: StateDtype = None,
    kv_dtype: KvDtype = None,
    rollback: Rollback = None,
    each: Annotated[int, typer.Option("--steps", help="Steps behind each number.")] = 100,
    rate: Annotated[float | None, typer.Option(help="TB/s; default: measured here.")] = None,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs.")] = True,
    invariant: Invariant = False,
    act_quant_fp8: ActQuantFp8 = False,
    out: Out = None,
) -> None:
    """The card, then measured steps; without a GPU the card alone, at --rate or 4.28 TB/s."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    how = (acceptance, state_dtype, kv_dtype, rollback)
    setup = Setup(model, quant, layers, *how, invariant=invariant, act_quant_fp8=act_quant_fp8)
    on_gpu = torch.cuda.is_available()
    facts = facts_here(rate) if on_gpu else None
    copy = facts.ceilings.copy_gbs if facts is not None else 1e3 * (rate or 4.28)
    wanted = {k: loads(batch, context, k, setup) for k in numbers(drafts)}
    for k, found in wanted.items():
        weights = setup.weights(k)
        for load in found:
            show(cost.parts(weights, load), load, copy)
    need_gpu()
    assert facts is not None
    command = f"python -m bench.decode {setup.words()} --batch {batch} --context {context} "
    command += f"--drafts {drafts}"
    for k, found in wanted.items():
        measuring = functools.partial(
            measure, setup, drafts=k, facts=facts, each=each, graphs=graphs, command=command
        )
        for row in fitting(found, measuring):
            rows.append(row, out)


def fitting(wanted: list[Load], measuring: Callable[[list[Load]], Iterator[Row]]) -> Iterator[Row]:
    """Measure the loads; while a GPU cannot hold the largest batch, without it, which is told."""
    while wanted:
        try:
            yield from measuring(wanted)
        except CapacityError as problem:
            most = max(wanted, key=lambda load: load.batch)
            print(f"{most.batch} sequences, {most.drafts} drafts: does not fit: {problem}")
            wanted = [load for load in wanted if load.batch < most.batch]
        else:
            return


def measure(
    setup: Setup,
    wanted: list[Load],
    drafts: int,
    facts: Facts,
    each: int,
    graphs: bool,
    command: str,
) -> Iterator[Row]:
    """A printed row for each load, all by one model."""
    batches = sorted({load.batch for load in wanted})
    longest = max(load.context for load in wanted) + room(drafts, each)
    size = {"requests": batches[-1], "context": longest, "piece": 256, "batches": batches}
    with setup.started(drafts, **size, graphs=graphs) as (llm, _):  # type: ignore[arg-type]
        running = Running(llm, setup, setup.weights(drafts), drafts, facts)
        yield from by(running, wanted, each, command)
        print(f"since then: {llm.stats()['graphs']}", file=sys.stderr)


def room(drafts: int, each: int) -> int:
    """Tokens that measuring adds to a context, and the page that newcomers leave to each."""
    return (steps.WARM + each + 8) * (drafts + 1) + PAGE_SIZE


def by(running: Running, wanted: list[Load], each: int, command: str) -> Iterator[Row]:
    """A printed row for each load by a model that has started; what does not fit says so."""
    print(f"{HEAD}\n|" + "--:|" * HEAD.count(" |"), flush=True)
    tables, drafts = [], running.drafts
    for load in wanted:
        case = {"context": load.context, "drafts": drafts}
        case |= {"acceptance": running.setup.acceptance if drafts else None}  # type: ignore[dict-item]
        row = running.row("decode", load.batch, command, **case)
        try:
            real = held(running.llm, load.batch, load.context, drafts)
            row |= measured(running.llm, running.weights, real, running.facts, each)
            tables.append(layers_table(row))
        except BenchError as problem:
            row |= {"status": "does not fit", "note": str(problem)}
        print(line(row), flush=True)
        yield row
    print("\n" + "\n\n".join(tables), flush=True)


if __name__ == "__main__":
    run(app)
