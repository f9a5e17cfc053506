"""`python -m bench.decode preset:nano-30b --synthetic`: what a decode step must move, and takes.

First the card: bytes a step by kind of layer, from the shapes alone. Weights count once a step,
experts as many as rows are expected to reach, E (1 - (1 - k/E)^rows); SSM states are read and
written, K/V read. The floor is these bytes at the copy rate measured in this process. Then the
steps of a random model at full width, through the whole engine, text aside: prompts are not
prefilled, the caches hold noise. `host` is what of a step's wall time was not spent waiting for the
device; `experts` the distinct ones a layer that the routing really reached, which is what the floor
of the measured rows counts.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from bench import rows
from bench.cli import Out, application, need_gpu, run
from bench.rows import Row
from nemotriton import LLM, SamplingParams
from nemotriton.autotune.ceilings import Ceilings, measure
from nemotriton.autotune.provenance import clocks, driver_version, version
from nemotriton.autotune.timing import CudaStopwatch, summary
from nemotriton.autotune.trial import Facts
from nemotriton.device import info
from nemotriton.engine.loading import Weights, random_weights
from nemotriton.engine.replay import ring_entry_bytes
from nemotriton.engine.request import State
from nemotriton.kernels import REPLAY_INTERVAL
from nemotriton.model.config import ModelConfig
from nemotriton.model.mixers import MoeMixer

app = application(__doc__)
WARM = 5  # steps before those that count


@dataclass(frozen=True, slots=True)
class Load:
    """What a step is asked: sequences, tokens behind each, drafts; bytes of cached elements."""

    batch: int
    context: int
    drafts: int
    kv_item: int = 2
    state_item: int = 4
    item: int = 2

    @property
    def rows(self) -> int:
        return self.batch * (self.drafts + 1)


# ------------------------------------------------------------------------------------------- card
def reached(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that so many tokens are expected to reach, each drawing top_k at random."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def card(weights: Weights, load: Load, seen: float | None = None) -> dict[str, float]:
    """Bytes a step by kind of layer; `seen` replaces the expected number of distinct experts."""
    config = weights.config
    found: dict[str, float] = {}

    def add(name: str, nbytes: float) -> None:
        found[name] = found.get(name, 0.0) + nbytes

    for name, entry in weights.expected.items():
        size = entry.nbytes(load.item)
        times = load.drafts if name.startswith("mtp.") else 1
        kind = kind_of(config, name)
        if name == "embeddings.weight":
            add("embedding", load.rows * config.width * load.item)
            if not config.tied:
                continue
            kind = "head"
        if kind == "head":
            times = 1 + load.drafts
        if entry.experts and ".experts." in name:
            moe = config.mtp_moe if name.startswith("mtp.") else config.moe
            assert moe is not None
            tokens = load.rows
            used = seen if seen is not None else reached(moe.experts, moe.top_k, tokens)
            add("E experts", times * size * used / entry.experts)
        else:
            add(kind, times * size)
    for name, nbytes in caches(config, load).items():
        add(name, nbytes)
    return found


def kind_of(config: ModelConfig, name: str) -> str:
    """The line of the card that a weight belongs to."""
    if name.startswith("lm_head."):
        return "head"
    if name.startswith("mtp."):
        return "MTP weights"
    if name.startswith("layers."):
        kind = config.kinds[int(name.split(".")[1])].value
        return "E router, shared" if kind == "E" else f"{kind} weights"
    return "norms"


def caches(config: ModelConfig, load: Load) -> dict[str, float]:
    """Bytes of states, windows and K/V that a step reads and writes."""
    found: dict[str, float] = {}
    if config.mamba is not None and config.mamba_layers:
        m = config.mamba
        state = m.inner * m.state * load.state_item
        window = (m.conv_width - 1) * m.conv_dim * load.item
        layers = len(config.mamba_layers)
        nbytes = 2 * (state + window)
        if load.drafts:  # by replay: the state is written when its window is full
            entries = REPLAY_INTERVAL / 2 + 2 * (load.drafts + 1)
            nbytes = state * (1 + 1 / REPLAY_INTERVAL) + window * (load.drafts + 4)
            nbytes += entries * ring_entry_bytes(m, load.item)
        found["M states"] = layers * load.batch * nbytes
    if config.attention is not None and config.attention_layers:
        token = 2 * config.attention.kv_rows * load.kv_item
        layers = len(config.attention_layers)
        found["* K/V"] = layers * token * (load.batch * load.context + load.rows)
    return found


def show(parts: dict[str, float], load: Load, rate: float) -> None:
    """The card as a table, its floor and what that is in tokens a second."""
    total = sum(parts.values())
    print(f"\n{load.batch} x {load.context:,} tokens, {load.drafts} drafts\n\n| part | GB | % |")
    print("|---|--:|--:|")
    for name, nbytes in sorted(parts.items(), key=lambda p: -p[1]):
        print(f"| {name} | {nbytes / 1e9:.4f} | {100 * nbytes / total:.1f} |")
    seconds = total / rate / 1e9
    print(f"| all | {total / 1e9:.4f} | at {rate / 1e3:.2f} TB/s: {1e3 * seconds:.3f} ms, ", end="")
    print(f"{load.batch / seconds:,.0f} tok/s without an accepted draft |\n", flush=True)


# ---------------------------------------------------------------------------------------- measure
def noise(llm: LLM) -> None:
    """Random numbers where the caches hold contexts that nobody has computed."""
    held = llm.runner.caches
    for cache in (held.kv, held.mamba):
        for name, tensor in vars(cache).items() if cache is not None else ():
            if not isinstance(tensor, torch.Tensor) or name == "cursor":
                continue
            for part in tensor:
                if part.is_floating_point():
                    part.copy_(torch.randn(part.shape, device=part.device).mul_(0.1))
                elif part.dtype in (torch.int8, torch.int16):  # states; wider ones are indices
                    part.random_(-40, 40)


def begin(llm: LLM, batch: int, context: int) -> None:
    """Requests that stand behind `context` tokens, without having computed them."""
    engine, vocab = llm.engine, llm.config.vocab
    rng = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for _ in range(batch):
        ids = torch.randint(vocab // 2, vocab, (context,), generator=rng).tolist()
        engine.submit(engine.prepare(ids, params))
    engine.scheduler.prefill_piece = batch * context
    engine.scheduler.drafts = 0
    for piece in engine.scheduler.step().prefill:
        token = int(torch.randint(vocab // 2, vocab, (1,), generator=rng))
        engine._take(piece, [token])
        piece.request.hidden = torch.randn(
            llm.config.width, device=llm.device, dtype=torch.float32
        ).to(llm.dtype)
    assert all(r.state is State.DECODE for r in engine.scheduler.running)
    assert len(engine.scheduler.running) == batch


def end(llm: LLM) -> None:
    for group in list(llm.engine._groups.values()):
        llm.engine.cancel(group.id)
    llm.engine.drop_cancelled()


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of the steps: wall, device, host; and tokens gained in all."""

    wall: list[float]
    device: list[float]
    host: list[float]
    tokens: int


def steps_of(llm: LLM, drafts: int, count: int) -> Measured:
    """Run steps and time each."""
    engine = llm.engine
    engine.depth = None
    engine.scheduler.drafts = drafts
    recorded = engine.runner.steps
    wall, device, host, before = [], [], [], 0
    for i in range(WARM + count):
        if i == WARM:
            before = engine.meter.output_tokens
        waited = recorded.waited if recorded is not None else 0.0
        start = time.perf_counter()
        llm.step()
        took = time.perf_counter() - start
        idle = recorded.waited - waited if recorded is not None else 0.0
        if i >= WARM:
            wall.append(1e6 * took)
            host.append(1e6 * (took - idle))
            device.append(1e6 * sum(engine.runner.clock.seconds().values()))
    return Measured(wall, device, host, engine.meter.output_tokens - before)


def experts_seen(llm: LLM) -> float | None:
    """Distinct experts a layer that one more step reaches, launched piece by piece."""
    counts: list[int] = []
    mixers = [m for m in llm.runner.model.modules() if isinstance(m, MoeMixer)]  # type: ignore[attr-defined]
    recorded = llm.runner.steps
    if not mixers or recorded is None:
        return None
    routes = [m.route for m in mixers]

    def watched(own: Any) -> Any:
        def route(x: torch.Tensor) -> Any:
            routing = own(x)
            counts.append(int((routing.offsets.diff() > 0).sum()))
            return routing

        return route

    parts = recorded._parts
    try:
        for mixer, own in zip(mixers, routes):
            mixer.route = watched(own)  # type: ignore[method-assign]
        recorded._parts = {shape: recorded._step(shape).parts() for shape in parts}
        llm.step()
    finally:
        recorded._parts = parts
        for mixer in mixers:
            del mixer.route
    return sum(counts) / len(counts) if counts else None


def launches(llm: LLM) -> int | None:
    """Kernels that the device runs in one step; None where they cannot be traced."""
    if llm.device.type != "cuda":
        return None
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=kinds) as trace:
            llm.step()
            torch.cuda.synchronize()
        events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    except RuntimeError:
        return None
    return len([e for e in events if not e.name.startswith("Mem")]) or None


def measured(llm: LLM, weights: Weights, load: Load, facts: Facts, count: int) -> Row:
    """The row of one batch size."""
    begin(llm, load.batch, load.context)
    got = steps_of(llm, load.drafts, count)
    seen = experts_seen(llm)
    kernels = launches(llm)
    end(llm)
    timing = summary(got.wall)
    nbytes = sum(card(weights, load, seen).values())
    floor = nbytes / facts.ceilings.copy_gbs / 1e3
    middle = [sorted(x)[len(x) // 2] for x in (got.device, got.host)]
    return {
        "us": round(timing.us, 1),
        "p20": round(timing.p20, 1),
        "p80": round(timing.p80, 1),
        "device_us": round(middle[0], 1),
        "host_us": round(middle[1], 1),
        "tokens_per_s": rows.digits(1e6 * got.tokens / sum(got.wall)),
        "floor_us": round(floor, 1),
        "gbps": rows.digits(nbytes / timing.us / 1e3),
        "roofline_pct": rows.digits(100 * floor / timing.us),
        "ceiling": "copy",
        "launches": kernels,
        "experts": None if seen is None else round(seen, 1),
        "clocks": clocks(),
    }


def blank(model: str, quant: str, load: Load, command: str) -> Row:
    """A row without numbers."""
    case = {"dtype": "bf16", "model": model, "quant": quant}
    case |= {"context": load.context, "drafts": load.drafts}  # type: ignore[dict-item]
    named = {"suite": "decode", "kernel": "step", "case": case, "tokens": load.batch}
    maker = {"provider": "nemotriton", "provider_version": version("nemotriton")}
    rest = {"tile": None, "status": "ok", "note": "", "clocks": {}, "seed": 0, "command": command}
    return named | maker | dict.fromkeys(rows.NUMBERS) | {"ceiling": None} | rest


HEAD = (
    "| batch | step ms | device ms | host ms | tok/s | floor ms | % of floor | launches | experts |"
)


def line(row: Row) -> str:
    return (
        f"| {row['tokens']} | {row['us'] / 1e3:.3f} | {row['device_us'] / 1e3:.3f} | "
        f"{row['host_us'] / 1e3:.3f} | {row['tokens_per_s']:,.0f} | {row['floor_us'] / 1e3:.3f} | "
        f"{row['roofline_pct']:.0f} | {row['launches'] or ''} | {row['experts'] or ''} |"
    )


def loads(batch: str, context: int, drafts: int) -> Iterator[Load]:
    for part in batch.split(","):
        yield Load(int(part), context, drafts)


@app.command()
def main(
    model: Annotated[str, typer.Argument(help="preset:NAME, or a directory's config.json.")],
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Random weights.")] = False,
    quant: Annotated[str, typer.Option(help="As in generate.")] = "bf16",
    layers: Annotated[int | None, typer.Option(help="Only so many layers.")] = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,16,64",
    context: Annotated[int, typer.Option(help="Tokens behind each.")] = 1024,
    drafts: Annotated[int, typer.Option(help="Drafts a step.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps behind each number.")] = 30,
    rate: Annotated[float | None, typer.Option(help="TB/s; default: measured here.")] = None,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs.")] = True,
    out: Out = None,
) -> None:
    """The card, then measured steps; without a GPU the card alone, at --rate or 4.28 TB/s."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    weights = random_weights(model, 0, layers, None, quant, False, drafts > 0)
    wanted = list(loads(batch, context, drafts))
    if not torch.cuda.is_available():
        for load in wanted:
            show(card(weights, load), load, 1e3 * (rate or 4.28))
    need_gpu()
    where = torch.device("cuda", 0)
    found = measure(CudaStopwatch(where), where) if rate is None else fixed(rate)
    facts = Facts(info(where), driver_version(), found)
    for load in wanted:
        show(card(weights, load), load, found.copy_gbs)
    torch.cuda.empty_cache()
    start = time.perf_counter()
    with LLM.synthetic(
        model.removeprefix("preset:"),
        layers=layers,
        quant=quant,
        drafts=drafts,
        adapt_drafts=False,
        graphs=graphs,
        max_context=context + (WARM + steps + 8) * (drafts + 1),
        max_requests=max(load.batch for load in wanted),
        prefill_piece=256,
    ) as llm:
        report = llm.stats()["graphs"]
        up = time.perf_counter() - start
        print(f"up in {up:.1f} s, of which steps recorded: {report}", file=sys.stderr, flush=True)
        noise(llm)
        print(f"{HEAD}\n|" + "--:|" * 9, flush=True)
        command = f"python -m bench.decode {model} --synthetic --quant {quant} --batch {batch} "
        command += f"--context {context} --drafts {drafts}"
        for load in wanted:
            row = blank(weights.config.name, quant, load, command) | rows.environment(facts)
            row |= measured(llm, weights, load, facts, steps)
            rows.append(row, out)
            print(line(row), flush=True)
        print(f"since then: {llm.stats()['graphs']}", file=sys.stderr)


def fixed(rate: float) -> Ceilings:
    """A ceiling that was measured before, in TB/s."""
    return Ceilings(1e3 * rate, 1e3 * rate, 0.0, 0.0)


if __name__ == "__main__":
    run(app)
