"""`python -m bench.moe_layer`: a decode step's mixture-of-experts layers, launched in several ways.

Random weights at full width, in the release's formats. The MoE layers of the model's first layers
(norm with residual, router, latent projections, routed and shared experts) run after one another
from one CUDA graph, several rounds of them, so that the weights come from memory; the time is the
median of replays over the number of layers. `floor` is the bytes that a layer must read, weights
and reached experts, at --rate. The ways: `dependent` launches (PDL) or plain ones; the products of
a few tokens `joined`, in `halves`, with the shared expert on a second stream, or op by op, also
`forked` so.
--kernels lists the kernels of a layer with their own times, which under PDL include the waiting.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import torch
import typer

from bench.cli import application, need_gpu, run
from nemotriton.engine.loading import random_weights
from nemotriton.kernels.dependent import forked, independent
from nemotriton.kernels.op import use
from nemotriton.model import synth
from nemotriton.model.layers import Linear
from nemotriton.model.mixers import MoeMixer
from nemotriton.model.nemotron_h import Block, NemotronH

app = application(__doc__)
ROUNDS, REPLAYS = 4, 15
PAIRS = ("joined", "halves", "forked", "")
WAYS = tuple(f"{launch} {how}".strip() for how in PAIRS for launch in ("dependent", "plain"))


@contextmanager
def launched(way: str) -> Iterator[None]:
    """Inside the block layers are launched in one of WAYS."""
    with ExitStack() as stack:
        if "plain" in way:
            stack.enter_context(independent())
        if "halves" in way:
            stack.enter_context(use(share_expert="ref"))
        elif "joined" not in way:
            stack.enter_context(use(enter_moe="ref"))  # then no layer joins anything
        stack.enter_context(forked("forked" in way or "halves" in way))
        yield


def moe_blocks(model: str, quant: str, layers: int | None, where: torch.device) -> list[Block]:
    """Those with experts of a model's first layers whose formats are the most frequent."""
    weights = random_weights(model, 0, layers, None, quant)
    made = NemotronH(weights.config, torch.bfloat16, where, weights.scheme)
    blocks = {i: b for i, b in enumerate(made.blocks) if isinstance(b.mixer, MoeMixer)}
    formats = {i: tuple((n, p.dtype) for n, p in b.named_parameters()) for i, b in blocks.items()}
    ((usual, _),) = Counter(formats.values()).most_common(1)
    chosen = [i for i in blocks if formats[i] == usual]
    for name, tensor in made.named_tensors().items():
        if name.startswith(tuple(f"layers.{i}." for i in chosen)):
            synth.fill(weights.config, {name: tensor}, 0)
    for i in chosen:
        for module in blocks[i].modules():
            if isinstance(module, MoeMixer | Linear):
                module.prepare()
    return [blocks[i] for i in chosen]


def chain(blocks: list[Block], x: torch.Tensor, rounds: int) -> torch.Tensor:
    """What decode does with these blocks, over and over."""
    delta, residual = x, torch.zeros_like(x)
    for _ in range(rounds):
        for block in blocks:
            normed, residual = block.norm.add(delta, residual)
            delta = block.mixer(normed, None, None)
    return delta


def captured(work: Callable[[], Any]) -> Callable[[], float]:
    """A replay of `work` from a graph; it gives its microseconds."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(_alive: Any = kept) -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    return replay


def layer_us(blocks: list[Block], x: torch.Tensor) -> float:
    """Microseconds of one layer."""
    replay = captured(lambda: chain(blocks, x, ROUNDS))
    for _ in range(3):
        replay()
    return statistics.median(replay() for _ in range(REPLAYS)) / ROUNDS / len(blocks)


def layer_bytes(blocks: list[Block], x: torch.Tensor) -> float:
    """Bytes of weights that one layer reads, of experts those that x reaches."""
    reached: list[int] = []

    def count(experts: Any, given: Any) -> None:
        reached.append(len(given[1].ids.unique()))

    hooks = [b.mixer.experts.register_forward_pre_hook(count) for b in blocks]  # type: ignore[union-attr]
    chain(blocks, x, 1)
    for hook in hooks:
        hook.remove()
    total = 0.0
    for block, seen in zip(blocks, reached, strict=True):
        mixer = block.mixer
        assert isinstance(mixer, MoeMixer)
        for name, part in block.named_parameters():
            share = seen / mixer.moe.experts if ".experts." in name else 1.0
            total += part.nbytes * share
    return total / len(blocks)


def kernel_times(blocks: list[Block], x: torch.Tensor) -> list[tuple[str, float, float]]:
    """(kernel, launches a layer, microseconds a layer), in order of time."""
    replay = captured(lambda: chain(blocks, x, ROUNDS))
    replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.device_time)
    each = ROUNDS * len(blocks)
    rows = [(name, len(times) / each, sum(times) / each) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="A preset.")] = "preset:super-120b",
    quant: Annotated[str, typer.Option(help="As in generate.")] = "release",
    layers: Annotated[int, typer.Option(help="Of the model's first layers.")] = 15,
    rows: Annotated[str, typer.Option(help="Numbers of tokens.")] = "1,4,16,64",
    ways: Annotated[str, typer.Option(help="Of " + ", ".join(WAYS) + ".")] = ",".join(WAYS),
    rate: Annotated[float, typer.Option(help="TB/s.")] = 4.28,
    kernels: Annotated[bool, typer.Option("--kernels", help="Times by kernel.")] = False,
) -> None:
    """A table of microseconds a layer."""
    need_gpu()
    where = torch.device("cuda", 0)
    blocks = moe_blocks(model, quant, layers, where)
    columns = [way.strip() for way in ways.split(",")]
    print(
        f"| rows | floor us | {' | '.join(columns)} |\n|{'--:|' * (len(columns) + 2)}", flush=True
    )
    width = blocks[0].norm.weight.shape[0]
    rng = torch.Generator(device=where).manual_seed(0)
    for count in map(int, rows.split(",")):
        x = torch.randn(count, width, device=where, generator=rng).bfloat16()
        floor = layer_bytes(blocks, x) / rate / 1e6
        cells, tables = [], []
        for way in columns:
            with launched(way):
                try:
                    cells.append(f"{layer_us(blocks, x):.1f}")
                    if kernels:
                        tables.append((way, kernel_times(blocks, x)))
                except RuntimeError as problem:
                    torch.cuda.synchronize()
                    cells.append(str(problem).splitlines()[0][:40])
        print(f"| {count} | {floor:.1f} | {' | '.join(cells)} |", flush=True)
        for way, found in tables:
            print(f"\n{count} rows, {way}:")
            for name, times, us in found:
                print(f"  {us:7.2f} us {times:4.1f} x {name[:60]}")


if __name__ == "__main__":
    run(app)
