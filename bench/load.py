"""`python -m bench.load preset:super-120b --synthetic`: requests as they come, so many at a time.

The published proxy: prompts of --in tokens and --out tokens of answer each, --concurrency of them
in flight; the next is submitted when one ends. Output tokens a second are of the whole run, first
prompt to last token; `first token` is the time from submission, `between` from a request's first
token to its last over their number. The floor: every prompt's (`bench.prefill`) and the decode
steps' (`bench.decode`, at full concurrency and the middle of the answer) one after another.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from bench import cost, prefill, rows
from bench.cli import Out, application, need_gpu, run
from bench.cost import Rates
from bench.forced import expected_tokens
from bench.models import (
    Acceptance,
    ActQuantFp8,
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
    rates_here,
)
from bench.rows import Row
from nemotriton import LLM, SamplingParams
from nemotriton.autotune.provenance import clocks
from nemotriton.autotune.timing import quantile
from nemotriton.autotune.trial import Facts
from nemotriton.engine.loading import Weights
from nemotriton.engine.outputs import Group

app = application(__doc__)
HEAD = (
    "| in | out | at a time | prompts | drafts | s | out tok/s | all tok/s | first token ms "
    "| between ms | 99 % ms | floor s | % of floor |"
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts of `given` tokens, answers of `wanted`, `most` at a time, `prompts` in all."""

    given: int
    wanted: int
    most: int
    prompts: int


@dataclass(slots=True)
class Flight:
    """A request on its way: seconds of its submission, its first and its latest token."""

    group: Group
    submitted: float
    first: float = 0.0
    latest: float = 0.0
    seen: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of the run, to every first token, between tokens by request, and of every gap."""

    seconds: float
    first: list[float]
    between: list[float]
    gaps: list[float]
    tokens: int


def drive(llm: LLM, traffic: Traffic, seed: int = 0) -> Outcome:
    """Run all of it, greedily and without ends."""
    engine, vocab = llm.engine, llm.config.vocab
    rng = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0, max_tokens=traffic.wanted, ignore_eos=True)
    shape = (traffic.prompts, traffic.given)
    waiting = torch.randint(vocab // 2, vocab, shape, generator=rng).tolist()
    flying: list[Flight] = []
    first, between, gaps = [], [], []
    start = now = time.perf_counter()
    tokens = 0
    while waiting or flying:
        while waiting and len(flying) < traffic.most:
            group = engine.submit(engine.prepare(waiting.pop(), params))
            flying.append(Flight(group, now))
        llm.step()
        now = time.perf_counter()
        for f in flying:
            count = len(f.group.completions[0].request.output)
            if count == f.seen:
                continue
            tokens += count - f.seen
            if f.seen:
                gaps.append(now - f.latest)
            else:
                f.first = now
                first.append(now - f.submitted)
            f.seen, f.latest = count, now
            if f.group.finished and count > 1:
                between.append((now - f.first) / (count - 1))
        flying = [f for f in flying if not f.group.finished]
    return Outcome(now - start, first, between, gaps, tokens)


def floor_seconds(
    weights: Weights, llm: LLM, traffic: Traffic, drafts: int, share: float | None, rates: Rates
) -> float:
    """Prompts and decode steps one after another, nothing overlapped."""
    piece = llm.engine.scheduler.prefill_piece
    prompt = cost.floor_us(prefill.parts(weights, held(llm, 1, 0), traffic.given, piece), rates)
    middle = traffic.given + traffic.wanted // 2
    load = held(llm, min(traffic.most, traffic.prompts), middle, drafts)
    nbytes = sum(part.nbytes for part in cost.parts(weights, load))
    passes = (traffic.wanted - 1) / expected_tokens(share, drafts) * traffic.prompts / load.batch
    return (traffic.prompts * prompt + passes * nbytes / rates.copy_gbs / 1e3) / 1e6


def measured(
    llm: LLM, weights: Weights, traffic: Traffic, drafts: int, share: float | None, rates: Rates
) -> Row:
    """The numbers of one run, after a small one that compiles what the steps need."""
    llm.engine.scheduler.drafts = drafts
    warm = Traffic(traffic.given, min(traffic.wanted, 8), min(traffic.most, 2), 2)
    drive(llm, warm, seed=1)
    got = drive(llm, traffic)
    assert got.tokens == traffic.prompts * traffic.wanted
    floor = floor_seconds(weights, llm, traffic, drafts, share, rates)
    steps = sorted(got.gaps)
    both = got.tokens + traffic.prompts * traffic.given
    return {
        "us": round(1e6 * got.seconds, 1),
        "p20": round(1e6 * got.seconds, 1),
        "p80": round(1e6 * got.seconds, 1),
        "tokens_per_s": rows.digits(got.tokens / got.seconds),
        "all_tokens_per_s": rows.digits(both / got.seconds),
        "first_token_ms": rows.digits(1e3 * statistics.fmean(got.first)),
        "between_ms": rows.digits(1e3 * statistics.fmean(got.between)) if got.between else None,
        "gap_p99_ms": rows.digits(1e3 * quantile(steps, 0.99)) if steps else None,
        "floor_us": round(1e6 * floor, 1),
        "roofline_pct": rows.digits(100 * floor / got.seconds),
        "ceiling": "matmul and copy",
        "clocks": clocks(),
    }


def line(row: Row) -> str:
    case = row["case"]
    return (
        f"| {case['in']:,} | {case['out']:,} | {row['tokens']} | {case['prompts']} | "
        f"{case['drafts']} | {row['us'] / 1e6:.1f} | {row['tokens_per_s']:,.0f} | "
        f"{row['all_tokens_per_s']:,.0f} | {row['first_token_ms']:,.0f} | {row['between_ms']} | "
        f"{row['gap_p99_ms']} | {row['floor_us'] / 1e6:.1f} | {row['roofline_pct']:.0f} |"
    )


def rungs(most: int) -> list[int]:
    """Numbers of sequences that are recorded: few, for what runs is mostly all of them."""
    return sorted({1, -(-most // 4), -(-most // 2), most})


def measure(
    setup: Setup, wanted: list[Traffic], drafts: int, facts: Facts, rates: Rates, piece: int
) -> Iterator[Row]:
    """A printed row for each traffic, all by one model."""
    longest = max(t.given + t.wanted for t in wanted) + 8
    recorded = sorted({n for t in wanted for n in rungs(t.most)})
    size = {"requests": recorded[-1], "context": longest, "piece": piece, "batches": recorded}
    with setup.started(drafts, **size) as (llm, _):  # type: ignore[arg-type]
        yield from by(Running(llm, setup, setup.weights(drafts), drafts, facts, rates), wanted)


def by(running: Running, wanted: list[Traffic]) -> Iterator[Row]:
    """A printed row for each traffic by a model that has started."""
    print(f"{HEAD}\n|" + "--:|" * HEAD.count(" |"), flush=True)
    llm, drafts, rates = running.llm, running.drafts, running.rates
    assert rates is not None
    share = running.setup.acceptance if drafts else None
    for t in wanted:
        command = (
            f"python -m bench.load {running.setup.words()} --in {t.given} --answer {t.wanted} "
        )
        command += f"--concurrency {t.most} --prompts {t.prompts} --drafts {drafts}"
        piece = llm.engine.scheduler.prefill_piece
        case = {"in": t.given, "out": t.wanted, "prompts": t.prompts, "piece": piece}
        row = running.row("load", t.most, command, **case, drafts=drafts, acceptance=share)
        row |= measured(llm, running.weights, t, drafts, share, rates)
        print(line(row), flush=True)
        yield row


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    given: Annotated[int, typer.Option("--in", help="Tokens of a prompt.")] = 8192,
    wanted: Annotated[int, typer.Option("--answer", help="Tokens of an answer.")] = 1024,
    concurrency: Annotated[str, typer.Option(help="Requests at a time.")] = "32",
    prompts: Annotated[int | None, typer.Option(help="In all; default 4 x --concurrency.")] = None,
    drafts: Annotated[int, typer.Option(help="Drafts a step.")] = 0,
    acceptance: Acceptance = None,
    piece: Annotated[int, typer.Option(help="Prompt tokens a step.")] = 8192,
    state_dtype: StateDtype = None,
    kv_dtype: KvDtype = None,
    act_quant_fp8: ActQuantFp8 = False,
    rollback: Rollback = None,
    out: Out = None,
) -> None:
    """Output tokens a second, time to the first and between tokens, under a steady load."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    need_gpu()
    how = (acceptance, state_dtype, kv_dtype, rollback)
    setup = Setup(model, quant, layers, *how, act_quant_fp8=act_quant_fp8)
    traffic = [Traffic(given, wanted, n, prompts or 4 * n) for n in numbers(concurrency)]
    facts = facts_here()
    for row in measure(setup, traffic, drafts, facts, rates_here(facts), piece):
        rows.append(row, out)


if __name__ == "__main__":
    run(app)
