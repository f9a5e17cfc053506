"""A model opened as the command line asks, with what a person wants to know said on the way."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from nemotriton.commandline import as_typed
from nemotriton.console import Console
from nemotriton.engine.llm import LLM
from nemotriton.engine.loading import EMBEDDED
from nemotriton.generate.source import Machine, Source
from nemotriton.text.tokens import ByteTokenizer

_LONG = 10.0  # seconds
_LARGE = 2**30  # bytes of weights: a second a token or so on a CPU


@contextlib.contextmanager
def opened(source: Source, machine: Machine, console: Console) -> Iterator[LLM]:
    """The model, closed at the end; NemotritonError where it cannot be had."""
    with console.loading() as progress:
        if source.synthetic is not None:
            llm = LLM.synthetic(
                EMBEDDED if source.model is None else source.model,
                seed=source.synthetic,
                layers=source.layers,
                width_scale=source.width_scale,
                quant=source.quant or "bf16",
                dtype=source.dtype,
                device=machine.device,
                max_context=machine.max_context,
                max_requests=machine.max_requests,
                prefill_piece=machine.prefill_piece,
                drafts=machine.drafts,
                tree=machine.tree,
                adapt_drafts=machine.adapt_drafts,
                graphs=machine.graphs,
                impl=machine.impl,
                memory=machine.memory,
                state_dtype=machine.state_dtype,
                kv_dtype=machine.kv_dtype,
                rollback=machine.rollback,
                invariant=machine.invariant,
                act_quant=machine.quantised_activations,
                tp=machine.tp,
                ep=machine.ep,
                progress=progress,
                recording=progress.graphs,
            )
        else:
            llm = LLM(
                source.model,
                dtype=source.dtype,
                device=machine.device,
                max_context=machine.max_context,
                max_requests=machine.max_requests,
                prefill_piece=machine.prefill_piece,
                drafts=machine.drafts,
                tree=machine.tree,
                adapt_drafts=machine.adapt_drafts,
                graphs=machine.graphs,
                impl=machine.impl,
                memory=machine.memory,
                state_dtype=machine.state_dtype,
                kv_dtype=machine.kv_dtype,
                rollback=machine.rollback,
                invariant=machine.invariant,
                act_quant=machine.quantised_activations,
                tp=machine.tp,
                ep=machine.ep,
                revision=source.revision,
                offline=source.offline,
                progress=progress,
                recording=progress.graphs,
            )
    with llm:
        _introduce(llm, source, machine, console, progress.seconds)
        yield llm


def _introduce(
    llm: LLM, source: Source, machine: Machine, console: Console, seconds: float
) -> None:
    config = llm.config
    kinds = " ".join(f"{kind.value}{n}" for kind, n in Counter(config.kinds).items())
    dtype = str(llm.dtype).removeprefix("torch.")
    console.line("model", f"{config.name}  {dtype} · {len(config.kinds)} layers {kinds}")
    embedded = source.embedded
    if source.synthetic is not None:
        console.line("weights", "random: what this model says is noise")
    for note in llm.notes:
        console.line("weights", as_typed(note))
    if llm.invariant:
        console.line("bits", "the same whatever runs beside a request")
    plan = llm.plan
    requests = "1 request" if plan.max_requests == 1 else f"{plan.max_requests} requests"
    room = f"{requests} of up to {plan.max_context:,} tokens"
    console.memory(plan.available, plan.parts(), room)
    if isinstance(llm.tokenizer, ByteTokenizer) and not embedded:
        where = "" if llm.directory is None else f" in {llm.directory}"
        console.line(
            "tokens", f"no tokenizer.json{where}: text is bytes, other tokens are <number>"
        )
    slow = llm.device.type == "cpu" and plan.parts()["weights"] >= _LARGE
    if slow and machine.device is None:
        console.line("device", "no CUDA device: the PyTorch twins run, expect seconds per token")
    _long_start(llm, seconds, console)


def _long_start(llm: LLM, seconds: float, console: Console) -> None:
    """What a start that makes people wait went into."""
    if seconds < _LONG:
        return
    graphs = llm.stats()["graphs"]
    recording = (
        "" if graphs is None else f", {graphs['seconds']:.0f} of them recording decode steps"
    )
    once = "" if llm.device.type == "cpu" else " (kernels are compiled once on a machine)"
    console.line("start", f"{seconds:.0f} s{recording}{once}")
