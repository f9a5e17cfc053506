"""What `bench.parallel` and `bench.scaling` share: models over several GPUs, judged, then timed.

Steps are timed as those of `bench.decode` and prompts as those of `bench.prefill`, by rank 0, whose
steps include its waiting for the others. The floor is that of the whole model's bytes at the copy
rates of all GPUs together. A model of few layers at full width is judged first: what N ranks give
for a prompt may be at most twice as far from the twins in fp32 as what one gives.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import cost, prefill, rows, steps
from bench.cost import Load
from bench.models import Setup, blank, formats, held
from bench.rows import BenchError, Row
from nemotriton import LLM
from nemotriton.autotune.provenance import clocks
from nemotriton.autotune.timing import summary
from nemotriton.autotune.trial import Facts
from nemotriton.engine.caches import PAGE_SIZE
from nemotriton.errors import require

GATE_LAYERS = 3  # the first run of three that has the most kinds
GATE_TOKENS = 48
GATE_FACTOR = 2.0
HEAD = "| ranks | load | ms | tok/s | floor ms | % of floor | launches | ms in sums | tok/step |"


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many GPUs; one is the plain model."""

    tp: int = 1
    ep: int = 1

    @property
    def count(self) -> int:
        return self.tp * self.ep

    def __str__(self) -> str:
        return f"tp{self.tp}" + f" x ep{self.ep}" * (self.ep > 1)

    def words(self) -> str:
        return f"--tp {self.tp} --ep {self.ep}"


@contextmanager
def opened(
    setup: Setup,
    ranks: Ranks,
    *,
    requests: int,
    context: int,
    piece: int,
    drafts: int = 0,
    batches: list[int] | None = None,
    graphs: bool | None = None,
    impl: str | None = None,
) -> Iterator[LLM]:
    """A random model on so many ranks; decode steps are recorded for `batches` sequences alone."""
    start = time.perf_counter()
    with steps.only_rungs(batches or [1]):
        llm = LLM.synthetic(
            **setup.options(requests, context, piece),
            dtype="float32" if impl == "ref" else None,
            drafts=drafts,
            graphs=graphs,
            impl=impl,
            tp=ranks.tp,
            ep=ranks.ep,
        )
    with llm:
        up = time.perf_counter() - start
        said = f"{ranks}: up in {up:.1f} s; steps recorded: {llm.stats()['graphs']}"
        print(f"{said}; {llm.plan.parts()}", file=sys.stderr, flush=True)
        yield llm


# -------------------------------------------------------------------------------------------- gate
def gate(setup: Setup, ranks: Ranks) -> dict[str, float]:
    """Distances from the twins in fp32, of logits at full width and few layers, in root mean
    squares over that of the logits: of one rank, and of so many, which may be twice as far."""
    layers = min(setup.layers or GATE_LAYERS, GATE_LAYERS)
    few = replace(setup, layers=layers)
    vocab = setup.weights(0).config.vocab
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (GATE_TOKENS,), generator=rng).tolist()
    found = {}
    kinds = {"truth": (Ranks(), "ref"), "one": (Ranks(), None), "all": (ranks, None)}
    for name, (many, impl) in kinds.items():
        size = {"requests": 1, "context": 2 * GATE_TOKENS, "piece": 512}
        with opened(few, many, **size, graphs=False, impl=impl) as llm:
            found[name] = llm.logits(ids)
    scale = float(found["truth"].square().mean().sqrt())
    one, apart = (
        float((found[name] - found["truth"]).square().mean().sqrt()) / scale
        for name in ("one", "all")
    )
    require(
        apart <= GATE_FACTOR * one,
        f"{ranks} is {apart:.2e} from the twins, one rank {one:.2e}: not measured",
        BenchError,
    )
    return {"one": rows.digits(one), "ranks": rows.digits(apart)}


# ---------------------------------------------------------------------------------------- measured
def in_sums(llm: LLM) -> tuple[int | None, float | None]:
    """Launches of one more step, and microseconds of rank 0 in sums over the ranks."""
    spans = steps.traced(llm.step, llm.device)
    if spans is None:
        return None, None
    shared = ("nccl", "all_reduce", "one_shot", "sum_add")
    return len(spans), sum(s.end - s.start for s in spans if any(n in s.name for n in shared))


def decoded(llm: LLM, setup: Setup, load: Load, facts: Facts, ranks: Ranks, count: int) -> Row:
    """The numbers of the decode steps of one load."""
    llm.everywhere(steps.begin, load.batch, load.context)
    got = steps.steps_of(llm, load.drafts, count)
    launches, sums = in_sums(llm)
    llm.everywhere(steps.end)
    timing = summary(got.wall)
    nbytes = sum(part.nbytes for part in cost.parts(setup.weights(load.drafts), load))
    floor = nbytes / facts.ceilings.copy_gbs / 1e3 / ranks.count
    return {
        "us": round(timing.us, 1),
        "p20": round(timing.p20, 1),
        "p80": round(timing.p80, 1),
        "host_us": round(statistics.median(got.host), 1),
        "tokens_per_s": rows.digits(1e6 * got.tokens / sum(got.wall)),
        "tokens_per_step": rows.digits(got.tokens / count / load.batch),
        "floor_us": round(floor, 1),
        "roofline_pct": rows.digits(100 * floor / timing.us),
        "ceiling": "copy",
        "launches": launches,
        "sums_us": None if sums is None else round(sums, 1),
        "clocks": clocks(),
    }


def prompted(llm: LLM, tokens: int, repeat: int) -> Row:
    """The numbers of a prompt's way to its first token."""
    prefill.prompt(llm, tokens, 0)
    times = []
    for i in range(repeat):
        start = time.perf_counter()
        prefill.prompt(llm, tokens, i + 1)
        times.append(1e6 * (time.perf_counter() - start))
    us = statistics.median(times)
    spread = {"p20": round(min(times), 1), "p80": round(max(times), 1)}
    return {"us": round(us, 1), "tokens_per_s": rows.digits(1e6 * tokens / us)} | spread


def line(row: Row) -> str:
    """A row of the table under HEAD."""
    case = row["case"]
    what = f"{row['tokens']:,} x {case['context']:,}, {case['drafts']} drafts"
    if row["kernel"] == "prompt":
        what = f"prompt of {row['tokens']:,}"
    cells = [
        str(Ranks(case["tp"], case["ep"])),
        what,
        f"{row['us'] / 1e3:.3f}",
        f"{row['tokens_per_s']:,.0f}",
        rows.number(row["floor_us"] / 1e3 if row.get("floor_us") else None, ".3f"),
        rows.number(row["roofline_pct"], ".0f"),
        str(row.get("launches") or ""),
        rows.number(row["sums_us"] / 1e3 if row.get("sums_us") else None, ".3f"),
        str(row.get("tokens_per_step") or ""),
    ]
    return "| " + " | ".join(cells) + " |"


@dataclass(frozen=True, slots=True)
class Work:
    """What to time of a model on so many ranks."""

    setup: Setup
    ranks: Ranks
    batches: tuple[int, ...] = ()
    context: int = 1024
    drafts: int = 0
    tokens: tuple[int, ...] = ()  # of prompts
    piece: int = 8192
    count: int = 30  # steps
    repeat: int = 2  # prompts

    def command(self) -> str:
        """What measures this again."""
        words = f"python -m bench.parallel {self.setup.words()} {self.ranks.words()}"
        words += f" --batch {','.join(map(str, self.batches))} --context {self.context}"
        words += f" --drafts {self.drafts} --steps {self.count}"
        prompts = f" --tokens {','.join(map(str, self.tokens))} --piece {self.piece}"
        return words + (prompts if self.tokens else "")


def measure(work: Work, facts: Facts, judged: dict[str, float]) -> Iterator[Row]:
    """A row for each load of a model, opened once. judged: what `gate` said of these ranks."""
    longest = work.context + (steps.WARM + work.count + 8) * (work.drafts + 1) + PAGE_SIZE
    longest = max([longest, *(tokens + 8 for tokens in work.tokens)])
    size: dict[str, Any] = {"requests": max((1, *work.batches)), "context": longest}
    size |= {"piece": work.piece if work.tokens else 256, "batches": [*work.batches] or [1]}
    with opened(work.setup, work.ranks, drafts=work.drafts, **size) as llm:
        llm.everywhere(steps.noise)
        case = {"tp": work.ranks.tp, "ep": work.ranks.ep, "drafts": work.drafts}
        case |= {"context": work.context} | formats(llm)
        said = {"gate": judged} | rows.environment(facts)
        name, quant = llm.config.name, work.setup.quant
        for batch in work.batches:
            load = held(llm, batch, work.context, work.drafts)
            row = blank("parallel", name, quant, batch, work.command(), **case)
            yield row | said | decoded(llm, work.setup, load, facts, work.ranks, work.count)
        for tokens in work.tokens:
            own = case | {"context": 0, "piece": work.piece}
            row = blank("parallel", name, quant, tokens, work.command(), **own)
            yield row | {"kernel": "prompt"} | said | prompted(llm, tokens, work.repeat)
