"""Random models for measuring: which one, in what formats, and how to start it."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from bench import rows, steps
from bench.cost import Load, Rates
from bench.forced import Forced
from bench.rows import Row
from nemotriton import LLM
from nemotriton.autotune.ceilings import Ceilings, measure
from nemotriton.autotune.provenance import driver_version, version
from nemotriton.autotune.timing import CudaStopwatch, race
from nemotriton.autotune.trial import Facts
from nemotriton.device import info
from nemotriton.engine.loading import Weights, random_weights
from nemotriton.model.formats import ActQuant

Model = Annotated[str, typer.Argument(help="preset:NAME, or a directory's config.json.")]
Synthetic = Annotated[bool, typer.Option("--synthetic", help="Random weights; there is no other.")]
Quant = Annotated[str, typer.Option(help="As in generate.")]
Layers = Annotated[int | None, typer.Option(help="Only so many layers.")]
Acceptance = Annotated[
    float | None, typer.Option(help="Forced: of a draft whose predecessors were accepted.")
]
StateDtype = Annotated[str | None, typer.Option(help="As in generate.")]
KvDtype = Annotated[str | None, typer.Option(help="As in generate.")]
Rollback = Annotated[str | None, typer.Option(help="As in generate.")]
ActQuantFp8 = Annotated[bool, typer.Option("--act-quant-fp8", help="As in generate.")]
Invariant = Annotated[bool, typer.Option("--invariant", help="As in generate.")]


@dataclass(frozen=True, slots=True)
class Setup:
    """A random model and its formats. acceptance: what drafts are forced to; None: none is kept."""

    model: str
    quant: str = "bf16"
    layers: int | None = None
    acceptance: float | None = None
    state_dtype: str | None = None
    kv_dtype: str | None = None
    rollback: str | None = None
    device: str | None = None
    invariant: bool = False
    act_quant_fp8: bool = False

    def weights(self, drafts: int) -> Weights:
        how = (self.layers, None, self.quant, self.act_quant)
        return random_weights(self.model, 0, *how, drafts > 0)

    @property
    def act_quant(self) -> ActQuant:
        """Of `LLM`."""
        return "fp8" if self.act_quant_fp8 else False

    def words(self) -> str:
        """The options that say all of this again."""
        named = {
            "quant": self.quant,
            "layers": self.layers,
            "acceptance": self.acceptance,
            "state-dtype": self.state_dtype,
            "kv-dtype": self.kv_dtype,
            "rollback": self.rollback,
        }
        given = [f" --{name} {value}" for name, value in named.items() if value is not None]
        flags = " --invariant" * self.invariant + " --act-quant-fp8" * self.act_quant_fp8
        return f"{self.model} --synthetic" + "".join(given) + flags

    def options(self, requests: int, context: int, piece: int) -> dict[str, Any]:
        """What `LLM.synthetic` takes to make this model, for so much work."""
        return {
            "preset": self.model.removeprefix("preset:"),
            "layers": self.layers,
            "quant": self.quant,
            "adapt_drafts": False,
            "max_context": context,
            "max_requests": requests,
            "prefill_piece": piece,
            "state_dtype": self.state_dtype,
            "kv_dtype": self.kv_dtype,
            "rollback": self.rollback,
            "device": self.device,
            "invariant": self.invariant,
            "act_quant": self.act_quant,
        }

    @contextlib.contextmanager
    def started(
        self,
        drafts: int,
        *,
        requests: int,
        context: int,
        piece: int,
        batches: Sequence[int] = (),
        graphs: bool | None = None,
    ) -> Iterator[tuple[LLM, Forced | None]]:
        """The model with noise in its caches, and what its drafts are accepted by; batches: numbers
        of sequences that decode steps are recorded for, all if there are none."""
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            stack.enter_context(steps.only_rungs([*batches]) if batches else stack)
            forced = None
            if drafts:
                forced = Forced(requests, drafts, self.device or "cuda")
                forced.at_rate(self.acceptance or 0.0)
                stack.enter_context(forced.installed())
            options = self.options(requests, context, piece)
            llm = LLM.synthetic(**options, drafts=drafts, graphs=graphs)
            stack.callback(llm.close)
            steps.noise(llm)
            up = time.perf_counter() - start
            said = f"up in {up:.1f} s; steps recorded: {llm.stats()['graphs']}"
            print(f"{said}; {llm.plan.parts()}", file=sys.stderr, flush=True)
            yield llm, forced


@dataclass(frozen=True, slots=True)
class Running:
    """A model that has started, and the GPU's ceilings; rates: None where prompts do not count."""

    llm: LLM
    setup: Setup
    weights: Weights
    drafts: int
    facts: Facts
    rates: Rates | None = None

    def row(self, suite: str, tokens: int, command: str, **case: Any) -> Row:
        """A row without numbers, of this model in its formats, here and now."""
        name, quant = self.weights.config.name, self.setup.quant
        case |= formats(self.llm)
        if self.setup.act_quant_fp8:
            case["activations"] = "fp8"
        row = blank(suite, name, quant, tokens, command, **case)
        row |= rows.environment(self.facts)
        if self.rates is not None:
            row["ceilings"] |= {"fp8_tflops": self.rates.fp8_tflops}
        return row


def held(llm: LLM, batch: int, context: int, drafts: int = 0, tokens: int = 0) -> Load:
    """A load with the formats that the caches really have."""
    kv, mamba = llm.runner.caches.kv, llm.runner.caches.mamba
    return Load(
        batch,
        context,
        drafts,
        tokens,
        kv_item=2 if kv is None else kv.k.dtype.itemsize,
        state_item=4 if mamba is None else mamba.format.dtype.itemsize,
        state_scale=0 if mamba is None else mamba.format.row_bytes(0),
        item=llm.dtype.itemsize,
        rollback="lanes" if mamba is None or mamba.rings is None else "replay",
    )


def formats(llm: LLM) -> dict[str, Any]:
    """How states and K/V are kept, for a row's case."""
    kv, mamba = llm.runner.caches.kv, llm.runner.caches.mamba
    found: dict[str, Any] = {"state": "none" if mamba is None else mamba.format.name}
    found["rollback"] = "lanes" if mamba is None or mamba.rings is None else "replay"
    return found | {"kv": "none" if kv is None else str(kv.k.dtype).removeprefix("torch.")}


def blank(suite: str, model: str, quant: str, tokens: int, command: str, **case: Any) -> Row:
    """A row without numbers."""
    named = {"dtype": "bf16", "model": model, "quant": quant} | case
    row = {"suite": suite, "kernel": "step", "case": named, "tokens": tokens}
    maker = {"provider": "nemotriton", "provider_version": version("nemotriton")}
    rest = {"tile": None, "status": "ok", "note": "", "clocks": {}, "seed": 0, "command": command}
    return row | maker | dict.fromkeys(rows.NUMBERS) | {"ceiling": None} | rest


def facts_here(rate: float | None = None) -> Facts:
    """What this GPU is and reaches at most; rate: a copy rate in TB/s that was measured before."""
    where = torch.device("cuda", 0)
    if rate is None:
        found = measure(CudaStopwatch(where), where)
    else:
        found = Ceilings(1e3 * rate, 1e3 * rate, 0.0, 0.0)
    torch.cuda.empty_cache()
    return Facts(info(where), driver_version(), found)


def rates_here(facts: Facts, side: int = 8192) -> Rates:
    """The ceilings with the rate of fp8 products, measured here: torch's scaled product of e4m3."""
    where = torch.device("cuda", 0)
    a, b = (torch.randn(side, side, device=where).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=where)
    watch = CudaStopwatch(where)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    us = race([watch.capture([multiply], True)], samples=15)[0].us
    limits = facts.ceilings
    return Rates(limits.copy_gbs, limits.bf16_tflops, rows.digits(2 * side**3 / us / 1e6))


def numbers(text: str) -> list[int]:
    """Numbers with commas."""
    return [int(part) for part in text.split(",")]
