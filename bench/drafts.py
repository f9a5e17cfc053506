"""`python -m bench.drafts`: what a step with drafts costs, part by part, and when it pays.

Random weights at full width; the accepted drafts are forced to each number from 0 up
(`bench.forced`), so the times do not hang on a text. Parts are times in the stream of the device,
medians over steps; `step` is the host's. tok/s is of all requests together. `gain` is against the
plain step of the same run, without the draft block's own rows. `over` is what the step's passes of
the trunk take beyond the plain one's, once the bytes of the further experts that their rows reach
are subtracted at the copy rate: what a verify pass costs by itself.
"""

import random
import statistics
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from bench import cost, rows, steps
from bench.cli import Out, application, need_gpu, run
from bench.forced import Forced
from bench.models import (
    KvDtype,
    Layers,
    Quant,
    Rollback,
    Setup,
    StateDtype,
    blank,
    facts_here,
    formats,
    held,
    numbers,
)
from bench.rows import Row
from nemotriton import LLM, SamplingParams
from nemotriton.autotune.provenance import clocks
from nemotriton.autotune.trial import Facts
from nemotriton.engine.loading import Weights
from nemotriton.engine.request import State

app = application(__doc__)
PARTS = ("draft", "verify", "commit")
HEAD = (
    "| requests | drafts | accepted | step ms | draft | verify | commit | tok/s | gain | over | "
    "experts |"
)


def measure(llm: LLM, drafts: int, count: int) -> dict[str, float]:
    """Median seconds of a step and its parts."""
    engine = llm.engine
    engine.depth = None
    engine.scheduler.drafts = drafts
    found: dict[str, list[float]] = {}
    for i in range(count + 3):
        start = time.perf_counter()
        llm.step()
        seconds = engine.runner.clock.seconds() | {"step": time.perf_counter() - start}
        if i >= 3:
            for part, value in seconds.items():
                found.setdefault(part, []).append(value)
    return {part: statistics.median(values) for part, values in found.items()}


def begin(llm: LLM, requests: int, context: int) -> None:
    """Prefill so many random prompts of `context` tokens."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    words = range(llm.config.vocab // 2, llm.config.vocab)
    groups = [
        llm.engine.submit(llm.engine.prepare(rng.choices(words, k=context), params))
        for _ in range(requests)
    ]
    llm.engine.scheduler.drafts = 0
    while any(g.completions[0].request.state is not State.DECODE for g in groups):
        llm.step()


def table(
    llm: LLM, weights: Weights, forced: Forced, requests: int, context: int, count: int, rate: float
) -> Iterator[Row]:
    """Numbers for so many requests: no drafts, then each number accepted; rate: GB/s."""
    begin(llm, requests, context)
    plain, few = measure(llm, 0, count), steps.experts_seen(llm)
    for drafts, accepted in [(0, 0), *((forced.drafts, a) for a in range(forced.drafts + 1))]:
        forced.always(accepted)
        got = measure(llm, drafts, count) if drafts else plain
        seen = steps.experts_seen(llm) if drafts else few
        load = held(llm, requests, context, 0)
        further = 0.0
        if seen is not None and few is not None:
            bytes_of = [
                cost.by_line(cost.parts(weights, load, n))["E experts"] for n in (few, seen)
            ]
            further = (bytes_of[1] - bytes_of[0]) / rate / 1e9
        speed = requests * (accepted + 1) / got["step"]
        yield {
            "us": round(1e6 * got["step"], 1),
            "p20": round(1e6 * got["step"], 1),
            "p80": round(1e6 * got["step"], 1),
            "split_us": {part: round(1e6 * got.get(part, 0.0), 1) for part in PARTS},
            "tokens_per_s": rows.digits(speed),
            "gain": rows.digits(speed * plain["verify"] / requests),
            "over": rows.digits((got["verify"] - further) / plain["verify"]),
            "experts": None if seen is None else round(seen, 1),
            "case": {"drafts": drafts, "accepted": accepted},
            "clocks": clocks(),
        }
    steps.end(llm)


def line(row: Row) -> str:
    split = " | ".join(f"{row['split_us'][part] / 1e3:.3f}" for part in PARTS)
    return (
        f"| {row['tokens']} | {row['case']['drafts']} | {row['case']['accepted']} | "
        f"{row['us'] / 1e3:.3f} | {split} | {row['tokens_per_s']:.0f} | {row['gain']:.2f} | "
        f"{row['over']:.2f} | {row['experts'] or ''} |"
    )


def run_all(
    setup: Setup, counts: list[int], drafts: int, context: int, each: int, facts: Facts
) -> Iterator[Row]:
    """A printed row for each number of requests, of drafts and of accepted ones."""
    weights = setup.weights(drafts)
    longest = context + (drafts + 2) * (drafts + 2) * (each + 5) + 16
    size = {"requests": max(counts), "context": longest, "piece": 8192, "batches": counts}
    command = f"python -m bench.drafts --model {setup.model} --quant {setup.quant} --requests "
    with setup.started(drafts, **size) as (llm, forced):  # type: ignore[arg-type]
        assert forced is not None
        print(f"{HEAD}\n|" + "--:|" * HEAD.count(" |"), flush=True)
        for count in counts:
            name, again = weights.config.name, f"{command}{count} --drafts {drafts}"
            case = {"context": context} | formats(llm)
            head = blank("drafts", name, setup.quant, count, again, **case)
            head |= rows.environment(facts)
            for found in table(llm, weights, forced, count, context, each, facts.ceilings.copy_gbs):
                row = head | found | {"case": head["case"] | found["case"]}
                print(line(row), flush=True)
                yield row


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A preset with an MTP block.")] = "super-120b",
    quant: Quant = "release",
    layers: Layers = None,
    drafts: Annotated[int, typer.Option(help="Drafts a step.")] = 3,
    requests: Annotated[str, typer.Option(help="Numbers of requests.")] = "1,16,64",
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    each: Annotated[int, typer.Option("--steps", help="Steps behind each number.")] = 20,
    state_dtype: StateDtype = None,
    kv_dtype: KvDtype = None,
    rollback: Rollback = None,
    out: Out = None,
) -> None:
    """Steps that accept 0 to --drafts drafts, beside the plain one."""
    need_gpu()
    setup = Setup(model, quant, layers, None, state_dtype, kv_dtype, rollback)
    for row in run_all(setup, numbers(requests), drafts, context, each, facts_here()):
        rows.append(row, out)


if __name__ == "__main__":
    run(app)
