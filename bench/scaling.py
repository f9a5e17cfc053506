"""`python -m bench.scaling --ranks 4`: all that is to be known of N GPUs, within nine minutes.

    Super, NVFP4   decode steps of 1 and 64 sequences, a prompt of 65,536; one GPU and N
    Super, BF16    decode steps of 1 and 64 sequences; N
    Ultra, NVFP4   decode steps of 1 and 16 sequences without and with three drafts; tp N, and
                   N / 2 of them by experts in two groups
    faults         a rank killed in the middle: seconds until every process has ended

Each of a model's ways to be cut is judged first (`bench.ranks.gate`). What does not fit is said to;
what the time does not allow is left out and named. With --device cpu small models stand in for the
large ones, so that the whole of it can be tried anywhere.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench import rows
from bench.cli import Out, application, run
from bench.models import Setup
from bench.parallel import facts_of, ratio
from bench.rank_killed import until_gone
from bench.ranks import HEAD, Ranks, Work, gate, line, measure
from bench.rows import BenchError, Row
from nemotriton.autotune.trial import Facts
from nemotriton.errors import CapacityError, RankError
from nemotriton.model.config import ModelConfig

app = application(__doc__)


def small_model(directory: str) -> str:
    """A model like the large ones that four ranks can share, as a config.json in a directory."""
    data = ModelConfig.preset("tiny").to_json() | {"n_groups": 4, "num_attention_heads": 8}
    (Path(directory) / "config.json").write_text(json.dumps(data))
    return directory


def works(ranks: int, small: str | None) -> list[Work]:
    """What to measure, the most wanted first; small: of this model, on CPUs."""
    large, larger = small or "preset:super-120b", small or "preset:ultra-550b"
    device, context = ("cpu", 64) if small else (None, 1024)
    many, few = ((1, 4), (1, 2)) if small else ((1, 64), (1, 16))
    prompts, piece = ((256,), 128) if small else ((65536,), 8192)
    steps = 3 if small else 20
    nvfp4 = Setup(large, "release" if not small else "nvfp4", device=device)
    bf16 = Setup(large, "bf16", device=device)
    ultra = Setup(larger, "release" if not small else "nvfp4", device=device)
    sizes = {"context": context, "count": steps, "piece": piece}
    found = [
        Work(nvfp4, Ranks(), many, tokens=prompts, **sizes),  # type: ignore[arg-type]
        Work(nvfp4, Ranks(ranks), many, tokens=prompts, **sizes),  # type: ignore[arg-type]
        Work(bf16, Ranks(ranks), many, **sizes),  # type: ignore[arg-type]
    ]
    cuts = [Ranks(ranks)] + [Ranks(ranks // 2, 2)] * (ranks > 2)
    for drafts in (0, 3):
        found += [Work(ultra, cut, few, drafts=drafts, **sizes) for cut in cuts]  # type: ignore[arg-type]
    return found


class Judge:
    """`gate`, once for each way to cut a model in a format."""

    def __init__(self) -> None:
        self._said: dict[tuple[Setup, Ranks], dict[str, float]] = {}

    def __call__(self, work: Work) -> dict[str, float]:
        """What it said; {} of one rank. BenchError where it refuses."""
        if work.ranks.count == 1:
            return {}
        key = work.setup, work.ranks
        if key not in self._said:
            self._said[key] = gate(*key)
            print(f"gate, {work.setup.model} {work.setup.quant} {work.ranks}: {self._said[key]}")
        return self._said[key]


def attempt(name: str, until: float, work: Callable[[], None]) -> None:
    """Do it unless the time is over; a refusal is a line, not the end."""
    if time.monotonic() > until:
        print(f"{name}: left out, the time is over", flush=True)
        return
    start = time.monotonic()
    try:
        work()
    except CapacityError as problem:
        print(f"{name}: does not fit: {str(problem).split(';')[0]}", flush=True)
    except (BenchError, RankError) as problem:
        print(f"{name}: {problem}", flush=True)
    print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def measured(work: Work, judge: Judge, facts: Facts, before: list[Row], out: Out) -> None:
    """Judge, measure, print and keep."""
    judged = judge(work)
    for row in measure(work, facts, judged):
        rows.append(row, out)
        alike = [r for r in before if r["case"]["model"] == row["case"]["model"]]
        alike = [r for r in alike if r["case"]["quant"] == row["case"]["quant"]]
        model, quant = row["case"]["model"], row["case"]["quant"]
        print(f"{line(row)} {model} {quant}{ratio(alike, row)}", flush=True)
        before.append(row)


@app.command()
def main(
    ranks: Annotated[int, typer.Option(help="GPUs.")] = 4,
    minutes: Annotated[float, typer.Option(help="After these nothing more is begun.")] = 7.5,
    device: Annotated[str | None, typer.Option(help="cpu: small models, to try it.")] = None,
    rate: Annotated[float | None, typer.Option(help="TB/s of one; default: measured.")] = None,
    out: Out = None,
) -> None:
    """Everything on so many ranks, in the order of its worth."""
    until = time.monotonic() + 60 * minutes
    facts = facts_of(device, rate)
    print(f"{HEAD}\n|" + "--:|" * HEAD.count(" |"), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        small = small_model(directory) if device == "cpu" else None
        everything(works(ranks, small), ranks, until, facts, out)


def everything(todo: list[Work], ranks: int, until: float, facts: Facts, out: Out) -> None:
    """Measure all, and after the second see what a killed rank leaves."""
    judge, found = Judge(), list[Row]()
    for i, work in enumerate(todo):
        name = f"{work.setup.model} {work.setup.quant} {work.ranks}, {work.drafts} drafts"
        attempt(name, until, lambda w=work: measured(w, judge, facts, found, out))  # type: ignore[misc]
        if i == 1:
            few = replace(todo[0].setup, layers=3)

            def faults(setup: Setup = few) -> None:
                seconds, said = until_gone(setup, Ranks(ranks))
                print(f"a rank killed: all gone after {seconds:.1f} s: {said}", flush=True)

            attempt("faults", until, faults)


if __name__ == "__main__":
    run(app)
