"""`python -m bench.layers preset:super-120b --synthetic`: a layer of each kind beside its floors.

Norm and mixer of all layers of a kind, one behind the other in a CUDA graph, as in a step: each has
its own weights, so none is found in L2. `floor` is the sum over the layer's ops of the longer of
bytes (inputs and outputs included) and operations; `moves` what no fusion saves: weights, states,
K/V. --batch sequences decode a token each; --tokens are prompts of one sequence.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer

from bench import cost, rows, steps
from bench.cli import Out, application, need_gpu, run
from bench.cost import Load, Rates
from bench.models import (
    KvDtype,
    Layers,
    Model,
    Quant,
    Setup,
    StateDtype,
    Synthetic,
    blank,
    facts_here,
    formats,
    held,
    numbers,
    rates_here,
)
from bench.rows import Row
from nemotriton import LLM, SamplingParams
from nemotriton.autotune.provenance import clocks
from nemotriton.autotune.timing import CudaStopwatch, Stopwatch, Timing, race
from nemotriton.autotune.trial import Facts
from nemotriton.engine.batch import Batch
from nemotriton.engine.runner import Rows
from nemotriton.model.config import LayerKind

app = application(__doc__)
HEAD = "| layer | of the model | rows | us | spread | floor us | % of floor | moves us | MB |"


def decoding(llm: LLM, batch: int, context: int) -> Batch:
    """A decode step's batch of sequences that stand behind `context` tokens."""
    steps.begin(llm, batch, context)
    recorded = llm.runner.steps
    assert recorded is not None
    with steps.piece_by_piece(llm):
        llm.step()
    shape = recorded.inputs._shape
    assert shape is not None
    return recorded._step(shape).batch


def reading(llm: LLM, tokens: int) -> Batch:
    """The batch of a prompt's first piece."""
    vocab, engine = llm.config.vocab, llm.engine
    ids = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    engine.submit(engine.prepare(ids, SamplingParams(max_tokens=1)))
    step = engine.scheduler.step()
    assert [p.count for p in step.prefill] == [tokens]
    return llm.runner._batch(step, Rows.of(step), False)


def timed(llm: LLM, watch: Stopwatch, kind: LayerKind, batch: Batch) -> Timing:
    """Microseconds of one layer."""
    model: Any = llm.runner.model
    blocks = [b for b, k in zip(model.blocks, llm.config.kinds, strict=True) if k is kind]
    rng = torch.Generator(llm.device).manual_seed(0)
    shape = (batch.ids.shape[0], llm.config.width)
    x = torch.randn(shape, generator=rng, device=llm.device).to(llm.dtype)
    residual = x.float() if llm.config.residual_fp32 else x.clone()

    def work() -> None:
        for block in blocks:
            normed, _ = block.norm.add(x, residual)
            block.mixer(normed, batch, llm.runner.caches)

    with torch.no_grad(), llm._on_device():
        found = race([watch.capture([work], True)])[0]
    n = len(blocks)
    return Timing(found.us / n, found.p20 / n, found.p80 / n, found.samples)


def numbers_of(
    llm: LLM, kind: LayerKind, load: Load, timing: Timing, setup: Setup, rates: Rates
) -> Row:
    """The row's figures: sums over the layers of a kind, over their number."""
    weights = setup.weights(0)
    count = llm.config.kinds.count(kind)
    with_io, least = (
        cost.by_kind(cost.parts(weights, load, activations=io), rates)[kind.value]
        for io in (True, False)
    )
    floor, moves = with_io["floor_us"] / count, least["bytes"] / count / rates.copy_gbs / 1e3
    return {
        "us": round(timing.us, 2),
        "p20": round(timing.p20, 2),
        "p80": round(timing.p80, 2),
        "gbps": rows.digits(with_io["bytes"] / count / timing.us / 1e3),
        "tflops": rows.digits(with_io["flops"] / count / timing.us / 1e6),
        "floor_us": round(floor, 2),
        "moves_us": round(moves, 2),
        "bytes": round(with_io["bytes"] / count),
        "layers": count,
        "roofline_pct": rows.digits(100 * floor / timing.us),
        "ceiling": "matmul and copy",
        "clocks": clocks(),
    }


def line(row: Row) -> str:
    return (
        f"| {row['case']['layer']} | {row['layers']} | {row['tokens']:,} | {row['us']:.1f} | "
        f"{rows.spread(row)} | {row['floor_us']:.1f} | {row['roofline_pct']:.0f} | "
        f"{row['moves_us']:.1f} | {row['bytes'] / 1e6:.1f} |"
    )


def measure(
    setup: Setup,
    batches: list[int],
    prompts: list[int],
    context: int,
    watch: Stopwatch,
    facts: Facts,
    rates: Rates,
) -> Iterator[Row]:
    """A printed row for each kind of layer and number of rows, all by one model."""
    piece = max([256, *prompts])
    size = {"requests": max([1, *batches]), "context": max(context + 136, piece + 8)}
    with setup.started(0, **size, piece=piece, batches=batches or [1], graphs=True) as (llm, _):
        print(f"{HEAD}\n|" + "--:|" * HEAD.count(" |"), flush=True)
        work = [(n, 0) for n in batches] + [(1, n) for n in prompts]
        for count, tokens in work:
            batch = reading(llm, tokens) if tokens else decoding(llm, count, context)
            load = held(llm, count, 0 if tokens else context, tokens=tokens)
            command = f"python -m bench.layers {setup.words()} --context {context} "
            command += f"--tokens {tokens}" if tokens else f"--batch {count}"
            for kind in dict.fromkeys(llm.config.kinds):
                name = llm.config.name
                case = {"layer": kind.value, "context": load.context, "prompt": bool(tokens)}
                row = blank("layers", name, setup.quant, load.rows, command, **case | formats(llm))
                row |= rows.environment(facts) | {"kernel": "layer"}
                timing = timed(llm, watch, kind, batch)
                row |= numbers_of(llm, kind, load, timing, setup, rates)
                print(line(row), flush=True)
                yield row
            steps.end(llm)


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences that decode.")] = "1,16,64",
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "2048,8192",
    context: Annotated[int, typer.Option(help="Tokens behind each that decodes.")] = 1024,
    state_dtype: StateDtype = None,
    kv_dtype: KvDtype = None,
    out: Out = None,
) -> None:
    """Time of a layer of each kind."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    need_gpu()
    setup = Setup(model, quant, layers, state_dtype=state_dtype, kv_dtype=kv_dtype)
    facts = facts_here()
    watch = CudaStopwatch(torch.device("cuda", 0))
    sizes = [numbers(batch) if batch else [], numbers(tokens) if tokens else []]
    for row in measure(setup, *sizes, context, watch, facts, rates_here(facts)):
        rows.append(row, out)


if __name__ == "__main__":
    run(app)
