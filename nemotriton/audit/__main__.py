"""The audits' command line: 0 nothing wrong, 1 something found, 2 could not look, 130 stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nemotriton.audit.report import tell
from nemotriton.audit.texts import DEFAULT_TEXTS, gather, most_tokens
from nemotriton.commandline import Program, UsageError
from nemotriton.console import Console
from nemotriton.generate import options as o
from nemotriton.generate.source import Machine, Source, implementations, is_embedded

app = Program("Find out what is in a checkpoint, what fits, and which op is wrong.")

Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")]
Checkpoint = Annotated[
    str | None,
    typer.Argument(
        help="Directory or Hugging Face id.",
        show_default="the embedded model, as preset:tiny",
    ),
]
Texts = Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A text (repeatable).")]
TextFile = Annotated[Path | None, typer.Option("--file", "-f", help="A text a line.")]


@app.callback()
def main() -> None:
    """Find out what is in a checkpoint, what fits, and which op is wrong."""


@app.command("checkpoint")
def checkpoint_command(
    model: Checkpoint = None,
    mtp: Annotated[bool, typer.Option(help="Ask for the MTP block config.json declares.")] = True,
    revision: o.Revision = None,
    offline: o.Offline = False,
    as_json: Json = False,
) -> None:
    """Compare a checkpoint with its configuration, from headers only (an id: no download).

    Exits 1 unless every tensor has its place and every place its tensor."""
    from nemotriton.audit import checkpoint
    from nemotriton.audit.headers import open_headers
    from nemotriton.engine.loading import EMBEDDED
    from nemotriton.model.config import ModelConfig

    where = str(EMBEDDED) if model is None or is_embedded(model) else model
    source = open_headers(where, revision, offline)
    config = ModelConfig.from_json(source.directory)
    inventory = checkpoint.take_inventory(source, config, mtp)
    found = checkpoint.as_object(inventory, source, config)
    tell(found, checkpoint.as_lines(inventory, found), as_json)
    _end(inventory.complete)


@app.command("memory")
def memory_command(
    model: Annotated[
        str, typer.Argument(help="Preset (super-120b, ...), directory or Hugging Face id.")
    ],
    gpu: Annotated[str, typer.Option(help="h100, h200, b200, ..., or memory in GiB.")] = "h200",
    context: Annotated[int | None, typer.Option(help="Tokens of a request.", min=1)] = None,
    requests: Annotated[int | None, typer.Option(help="Requests at a time.", min=1)] = None,
    quant: Annotated[
        str, typer.Option(help="Formats of a preset: bf16, fp8, nvfp4, super-mixed, release.")
    ] = "release",
    tp: o.Tp = 1,
    ep: o.Ep = 1,
    drafts: Annotated[int, typer.Option(help="Drafts a step.", min=0)] = 0,
    share: Annotated[
        float, typer.Option("--memory", help="Share of the GPU's memory to use.")
    ] = 0.9,
    prefill_piece: Annotated[
        int, typer.Option(help="Prompt tokens a step, as in generate.", min=1)
    ] = 8192,
    state_dtype: o.StateDtype = None,
    kv_dtype: o.KvDtype = None,
    revision: o.Revision = None,
    offline: o.Offline = False,
    as_json: Json = False,
) -> None:
    """Say what fits on a GPU, without having one.

    Exits 1 where what is asked for does not fit."""
    if not 0 < share <= 1:
        raise UsageError(f"--memory {share:g} is no share: give a number in (0, 1].")
    from nemotriton.audit import memory
    from nemotriton.audit.gpus import find_gpu

    where = find_gpu(gpu)
    wanted = memory.Wanted(
        *(context, requests, drafts, share),
        state_dtype=state_dtype,
        kv_dtype=kv_dtype,
        piece=prefill_piece,
    )
    stored = memory.stored(model, quant, drafts > 0, revision, offline)
    found = memory.what_fits(stored.cut(tp, ep), where, wanted)
    tell(found, memory.as_lines(found), as_json)
    _end(found["fits"])


@app.command("mtp")
def mtp_command(
    model: o.Model = None,
    prompt: Texts = None,
    file: TextFile = None,
    drafts: Annotated[int, typer.Option(help="Drafts a step.", min=1)] = 3,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Of each.", min=1)] = 64,
    synthetic: o.Synthetic = None,
    layers: o.Layers = None,
    width_scale: o.WidthScale = None,
    quant: o.Quant = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    memory: o.Memory = 0.9,
    impl: o.Impl = None,
    rollback: o.Rollback = None,
    revision: o.Revision = None,
    offline: o.Offline = False,
    as_json: Json = False,
) -> None:
    """Show that drafts change no token, and how many are accepted.

    Exits 1 where a token differs by more than rounding explains."""
    console = Console()
    texts = gather(prompt, file) or DEFAULT_TEXTS
    source = Source(model, synthetic, layers, width_scale, dtype, revision, offline, quant)
    context = most_tokens(texts) + max_tokens
    machine = Machine(
        *(device, memory, context, len(texts), None, None, implementations(impl)),
        drafts=drafts,
        adapt_drafts=False,
        rollback=rollback,
    )
    from nemotriton.audit import mtp
    from nemotriton.engine.llm import LLM
    from nemotriton.generate.loading import opened

    with opened(source, machine, console) as llm:
        drafted, weights = mtp.draft(llm, texts, max_tokens), llm.weights
    with LLM(
        weights,
        dtype=llm.dtype,
        device=llm.device,
        max_context=context,
        max_requests=len(texts),
        impl=machine.impl,
        memory=memory,
    ) as plain:
        found = mtp.compare(plain, drafted, max_tokens)
    tell(found, mtp.as_lines(found, synthetic is not None), as_json)
    _end(not found["faults"])


@app.command("divergence")
def divergence_command(
    model: o.Model = None,
    against: Annotated[
        str,
        typer.Option(
            help="ref: the PyTorch twins. hf: transformers, from the same files. FILE.safetensors: "
            "a trace, as parity --trace writes them."
        ),
    ] = "ref",
    prompt: Texts = None,
    file: TextFile = None,
    tokens: Annotated[int, typer.Option(help="How many of the text to use.", min=2)] = 64,
    decoded: Annotated[int, typer.Option(help="Of them, last, one a step.", min=0)] = 8,
    synthetic: o.Synthetic = None,
    layers: o.Layers = None,
    width_scale: o.WidthScale = None,
    quant: o.Quant = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    memory: o.Memory = 0.9,
    impl: o.Impl = None,
    rollback: o.Rollback = None,
    revision: o.Revision = None,
    offline: o.Offline = False,
    as_json: Json = False,
) -> None:
    """Find the first layer that diverges from a reference, and in it the op.

    Exits 1 where there is one."""
    console = Console()
    texts = gather(prompt, file) or DEFAULT_TEXTS
    source = Source(model, synthetic, layers, width_scale, dtype, revision, offline, quant)
    forced = implementations(impl)
    machine = Machine(
        *(device, memory, tokens, 1, None, None, forced), graphs=False, rollback=rollback
    )
    file_given = against.endswith(".safetensors")
    if against not in ("ref", "hf") and not file_given:
        raise UsageError(f"--against {against}: give ref or hf, or a trace's .safetensors file.")
    if file_given and not Path(against).is_file():
        raise UsageError(f"--against {against}: no such file.")
    if decoded >= tokens:
        raise UsageError(f"--decoded {decoded} leaves no prompt of --tokens {tokens}.")
    from nemotriton.audit import between, divergence
    from nemotriton.generate.loading import opened

    source = replace(source, dtype=between.find_dtype(dtype))
    with opened(source, machine, console) as llm:
        random, text = synthetic is not None, "\n".join(texts)
        with console.counting(llm.config.layer_count + 1, "layers") as counted:
            layers_found, culprit, count = between.diverge(
                llm, text, against, forced, tokens, decoded, random, lambda _: counted()
            )
    found = divergence.as_object(layers_found, culprit, count)
    tell(found, divergence.as_lines(layers_found, culprit), as_json)
    _end(culprit is None)


@app.command("parity")
def parity_command(
    model: o.Model = None,
    text: Annotated[
        Path | None, typer.Option("--text", "-f", help="Sequences, one a line.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write prefill's hidden states there (safetensors).")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most of a sequence.", min=2)] = 256,
    drafts: Annotated[int, typer.Option(help="Of a verify pass.", min=1)] = 3,
    synthetic: o.Synthetic = None,
    layers: o.Layers = None,
    width_scale: o.WidthScale = None,
    quant: o.Quant = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    memory: o.Memory = 0.9,
    impl: o.Impl = None,
    rollback: o.Rollback = None,
    revision: o.Revision = None,
    offline: o.Offline = False,
    as_json: Json = False,
) -> None:
    """Compare the logprobs of prefill, decode, drafts and graphs on the same texts.

    Exits 1 where a way or a sequence is beyond what rounding explains."""
    console = Console()
    texts = gather(None, text) or DEFAULT_TEXTS
    source = Source(model, synthetic, layers, width_scale, dtype, revision, offline, quant)
    forced = implementations(impl)
    graphs = None if "ref" in forced.values() else True
    machine = Machine(*(device, memory, tokens, 1, None, None, forced), graphs=graphs)
    if trace is not None and (trace.exists() or not trace.parent.is_dir()):
        what = "exists" if trace.exists() else "is in no directory"
        raise UsageError(f"--trace {trace} {what}: give another path.")
    from nemotriton.audit import parity, traces
    from nemotriton.generate.loading import opened

    with opened(source, machine, console) as llm:
        sequences = [llm.tokenizer.encode(line)[:tokens] for line in texts]
        ways = parity.Ways(llm, forced, drafts, rollback)
        with console.counting(len(sequences) * len(ways.all()), "parity") as counted:
            found = parity.compare(ways, sequences, counted)
        if trace is not None:
            traces.write(trace, traces.record(ways, sequences), llm.config.name, llm.dtype)
    tell(found, parity.as_lines(found), as_json)
    _end(not found["wrong"] and not found["wrong_ways"])


@app.command("env")
def env_command(as_json: Json = False) -> None:
    """Print versions, GPU, driver and tiles by GPU; works where nothing else does."""
    from nemotriton.audit import environment

    found = environment.describe()
    tell(found, environment.as_lines(found), as_json)


def _end(fine: bool) -> None:
    if not fine:
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m nemotriton.audit")
