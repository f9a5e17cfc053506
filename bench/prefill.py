"""`python -m bench.prefill preset:super-120b --synthetic`: a prompt's way to its first token.

The floor (`bench.cost`) is, op by op, the longer of bytes at the copy rate and operations at the
rate of bf16 or fp8 products, all measured in this process; what goes in and out of every op counts.
FP8 matrices count at the fp8 rate, NVFP4 at bf16's. A prompt is run whole, from its submission to
its first token on the host, in pieces of --piece tokens; then once more under a trace that tells
the kinds of layer apart.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from bench import cost, rows, steps
from bench.cli import Out, application, need_gpu, run
from bench.cost import Load, Part, Rates
from bench.models import (
    ActQuantFp8,
    Invariant,
    KvDtype,
    Layers,
    Model,
    Quant,
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
from nemotriton.autotune.trial import Facts
from nemotriton.engine.loading import Weights

app = application(__doc__)
AT_ALL = 1 << 17  # tokens measured of one length, where a prompt is not repeated seven times
HEAD = "| tokens | ms | spread | tok/s | TFLOP/s | floor ms | % of floor | launches |"


def pieces(load: Load, tokens: int, piece: int) -> list[Load]:
    """The loads of a prompt's pieces, with the formats of `load`."""
    starts = range(0, tokens, piece)
    sizes = [(start, min(piece, tokens - start)) for start in starts]
    kept = {name: getattr(load, name) for name in ("kv_item", "state_item", "item", "state_scale")}
    return [Load(load.batch, start, tokens=count, **kept) for start, count in sizes]


def parts(weights: Weights, load: Load, tokens: int, piece: int) -> list[Part]:
    """All parts of a prompt; its last token alone goes through the head."""
    found = []
    for part in pieces(load, tokens, piece):
        found += cost.parts(weights, part, activations=True)
    last = len(pieces(load, tokens, piece)) - 1
    head = [p for p in found if p.kind == "head"]
    return [p for p in found if p.kind != "head"] + head[: len(head) // (last + 1)]


def prompt(llm: LLM, tokens: int, seed: int) -> None:
    """Run a random prompt to its first token."""
    rng, vocab = torch.Generator().manual_seed(seed), llm.config.vocab
    ids = torch.randint(vocab // 2, vocab, (tokens,), generator=rng).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    group = llm.engine.submit(llm.engine.prepare(ids, params))
    while not group.finished:
        llm.step()


def measured(llm: LLM, weights: Weights, tokens: int, rates: Rates, repeat: int, piece: int) -> Row:
    """The numbers of one length."""
    prompt(llm, min(tokens, 2 * piece), 0)
    times = []
    for i in range(repeat):
        start = time.perf_counter()
        prompt(llm, tokens, i + 1)
        times.append(1e6 * (time.perf_counter() - start))
    with steps.marked(llm) as order:
        spans = steps.traced(lambda: prompt(llm, tokens, repeat + 1), llm.device)
    found = parts(weights, held(llm, 1, 0), tokens, piece)
    kinds = cost.by_kind(found, rates)
    layers = steps.by_layer(spans, order) if spans is not None else {}
    for kind, sums in layers.items():
        kinds[kind] = kinds.get(kind, {}) | sums
    us, floor = statistics.median(times), cost.floor_us(found, rates)
    return {
        "us": round(us, 1),
        "p20": round(min(times), 1),
        "p80": round(max(times), 1),
        "tokens_per_s": rows.digits(1e6 * tokens / us),
        "tflops": rows.digits(sum(p.flops for p in found) / us / 1e6),
        "gbps": rows.digits(sum(p.nbytes for p in found) / us / 1e3),
        "floor_us": round(floor, 1),
        "roofline_pct": rows.digits(100 * floor / us),
        "ceiling": "matmul and copy",
        "launches": int(sum(k["launches"] for k in layers.values())) if layers else None,
        "kinds": {k: {n: rows.digits(v) for n, v in sums.items()} for k, sums in kinds.items()},
        "clocks": clocks(),
    }


def line(row: Row) -> str:
    return (
        f"| {row['tokens']:,} | {row['us'] / 1e3:.2f} | {rows.spread(row)} | "
        f"{row['tokens_per_s']:,.0f} | {row['tflops']:.0f} | {row['floor_us'] / 1e3:.2f} | "
        f"{row['roofline_pct']:.0f} | {row['launches'] or ''} |"
    )


def kinds_table(row: Row) -> str:
    """Time by kind of layer beside its floor; times of the traced run."""
    lines = [f"{row['tokens']:,} tokens", ""]
    lines += ["| layers | launches | TFLOP | GB | floor ms | ms in kernels | % |"]
    lines += ["|---|" + "--:|" * 6]
    for kind, sums in row["kinds"].items():
        floor, us = sums.get("floor_us", 0.0), sums.get("us")
        cells = [
            rows.number(sums.get("launches"), ".0f"),
            f"{sums.get('flops', 0.0) / 1e12:.2f}",
            f"{sums.get('bytes', 0.0) / 1e9:.2f}",
            f"{floor / 1e3:.2f}",
            rows.number(us / 1e3 if us else None, ".2f"),
            rows.number(100 * floor / us if us else None, ".0f"),
        ]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure(
    setup: Setup, lengths: list[int], facts: Facts, rates: Rates, piece: int, repeat: int | None
) -> Iterator[Row]:
    """A printed row for each length, all by one model."""
    size = {"requests": 1, "context": max(lengths) + 8, "piece": piece, "batches": [1]}
    with setup.started(0, **size) as (llm, _):  # type: ignore[arg-type]
        yield from by(Running(llm, setup, setup.weights(0), 0, facts, rates), lengths, repeat)


def by(running: Running, lengths: list[int], repeat: int | None = None) -> Iterator[Row]:
    """A printed row for each length by a model that has started; repeat: else by the length."""
    print(f"{HEAD}\n|" + "--:|" * HEAD.count(" |"), flush=True)
    llm, rates, tables = running.llm, running.rates, []
    assert rates is not None
    piece = llm.engine.scheduler.prefill_piece
    for tokens in lengths:
        words = f"{running.setup.words()} --tokens {tokens} --piece {piece}"
        row = running.row("prefill", tokens, f"python -m bench.prefill {words}", piece=piece)
        times = repeat or max(1, min(7, AT_ALL // tokens))
        row |= measured(llm, running.weights, tokens, rates, times, piece)
        tables.append(kinds_table(row))
        print(line(row), flush=True)
        yield row
    print("\n" + "\n\n".join(tables), flush=True)


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    tokens: Annotated[str, typer.Option(help="Lengths of the prompt.")] = "1024,8192,65536",
    piece: Annotated[int, typer.Option(help="Tokens a step.")] = 8192,
    repeat: Annotated[
        int | None, typer.Option(help="Prompts of each length; default: 7, of long ones fewer.")
    ] = None,
    state_dtype: StateDtype = None,
    kv_dtype: KvDtype = None,
    invariant: Invariant = False,
    act_quant_fp8: ActQuantFp8 = False,
    out: Out = None,
) -> None:
    """Time from a prompt's submission to its first token, against the floor."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    need_gpu()
    how = (None, state_dtype, kv_dtype)
    setup = Setup(model, quant, layers, *how, invariant=invariant, act_quant_fp8=act_quant_fp8)
    facts = facts_here()
    rates = rates_here(facts)
    for row in measure(setup, numbers(tokens), facts, rates, piece, repeat):
        rows.append(row, out)


if __name__ == "__main__":
    run(app)
