"""`python -m bench.figures preset:super-120b --synthetic`: the whole-model figures, one start each.

Decode steps, prompts and loads of `bench.performance`, by one model without drafts and one with;
rows are the same as those of `bench.decode`, `bench.prefill` and `bench.load`, whose commands they
carry. A figure that fails is told on stderr and the others go on.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from bench import decode, load, prefill, rows
from bench.cli import Out, application, need_gpu, run
from bench.cost import Load, Rates
from bench.load import Traffic
from bench.models import (
    ActQuantFp8,
    KvDtype,
    Layers,
    Model,
    Quant,
    Running,
    Setup,
    StateDtype,
    Synthetic,
    facts_here,
    numbers,
    rates_here,
)
from bench.rows import Row
from nemotriton.autotune.trial import Facts

app = application(__doc__)


def traffics(texts: list[str]) -> list[Traffic]:
    """`8192:1024:32:128` is in, out, at a time, prompts; an empty text is none."""
    return [Traffic(*(int(n) for n in text.split(":"))) for text in texts if text]


def each(work: list[Callable[[], Iterator[Row]]]) -> Iterator[Row]:
    """The rows of all; what one raises is told, and ends that one."""
    for part in work:
        try:
            yield from part()
        except Exception:
            traceback.print_exc(file=sys.stderr)


def measure(
    setup: Setup,
    drafts: int,
    batches: list[int],
    lengths: list[int],
    wanted: list[Traffic],
    count: int,
    piece: int,
    facts: Facts,
    rates: Rates,
) -> Iterator[Row]:
    """Rows of one start; prompts alone are measured without drafts only."""
    longest = max([1024 + decode.room(drafts, count), *(n + 8 for n in lengths)])
    longest = max([longest, *(t.given + t.wanted + 8 for t in wanted)])
    recorded = sorted({1, *batches, *(n for t in wanted for n in load.rungs(t.most))})
    size = {"requests": recorded[-1], "context": longest, "piece": piece, "batches": recorded}
    with setup.started(drafts, **size, graphs=True) as (llm, _):  # type: ignore[arg-type]
        running = Running(llm, setup, setup.weights(drafts), drafts, facts, rates)
        steps = [Load(n, 1024, drafts) for n in batches]

        def stepping() -> Iterator[Row]:
            for step in steps:
                again = f"python -m bench.decode {setup.words()} --batch {step.batch} "
                yield from decode.by(running, [step], count, f"{again}--drafts {drafts}")

        work = [stepping] if batches else []
        if not drafts and lengths:
            work.append(lambda: prefill.by(running, lengths))
        yield from each([*work, *([lambda: load.by(running, wanted)] if wanted else [])])


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    drafts: Annotated[str, typer.Option(help="Drafts a step; each number is a start.")] = "0,3",
    acceptance: Annotated[float, typer.Option(help="Forced, of a draft.")] = 0.73,
    batch: Annotated[str, typer.Option(help="Sequences of decode steps.")] = "1,16,64",
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "8192,65536",
    traffic: Annotated[
        list[str] | None,
        typer.Option("--load", help="in:out:at a time:prompts; repeatable; empty: none."),
    ] = None,
    count: Annotated[int, typer.Option("--steps", help="Decode steps behind each number.")] = 100,
    piece: Annotated[int, typer.Option(help="Prompt tokens a step.")] = 8192,
    state_dtype: StateDtype = None,
    kv_dtype: KvDtype = None,
    act_quant_fp8: ActQuantFp8 = False,
    out: Out = None,
) -> None:
    """Decode steps, prompts and loads."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    need_gpu()
    facts = facts_here()
    rates, wanted = rates_here(facts), traffics(traffic or ["8192:1024:32:128"])
    sizes = [numbers(batch) if batch else [], numbers(tokens) if tokens else []]
    for k in numbers(drafts):
        share = acceptance if k else None
        how = (share, state_dtype, kv_dtype)
        setup = Setup(model, quant, layers, *how, act_quant_fp8=act_quant_fp8)
        for row in measure(setup, k, *sizes, wanted, count, piece, facts, rates):
            rows.append(row, out)


if __name__ == "__main__":
    run(app)
