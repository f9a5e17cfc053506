"""`python -m bench.start preset:super-120b --synthetic`: how long until the first token.

Two processes one after the other share an empty folder of compiled kernels: the first compiles, the
second finds them. With --cache DIR, which earlier runs have filled, there is only the second.
Seconds of each: `import` of the package and torch; `weights`, making them; `steps`, recording the
decode steps (with compiling what they need); `first token` of a prompt of --tokens, which compiles
the prefill; `all` by the clock of the parent. `beyond` is all but weights.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Annotated

import torch
import typer

from bench import rows
from bench.cli import Out, application, need_gpu, run
from bench.models import Layers, Model, Quant, Setup, Synthetic, blank
from bench.rows import BenchError, Row
from nemotriton import LLM, SamplingParams
from nemotriton.autotune.ceilings import Ceilings
from nemotriton.autotune.provenance import driver_version
from nemotriton.autotune.trial import Facts
from nemotriton.device import info
from nemotriton.errors import require

app = application(__doc__)
HEAD = "| start | import s | weights s | steps s | first token s | all s | beyond weights s |"
PARTS = ("import", "weights", "steps", "first", "all", "beyond")


def child(setup: Setup, drafts: int, tokens: int, requests: int, began: float) -> None:
    """One start, as a line of JSON on stdout; began: the parent's clock."""
    seconds = {"import": time.time() - began}
    start = time.perf_counter()
    ended = start

    def progress(done: int, total: int, name: str) -> None:
        nonlocal ended
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ended = time.perf_counter()

    with LLM.synthetic(
        setup.model.removeprefix("preset:"),
        layers=setup.layers,
        quant=setup.quant,
        drafts=drafts,
        device=setup.device,
        max_context=tokens + 64,
        max_requests=requests,
        progress=progress,
        graphs=True,
    ) as llm:
        seconds["weights"] = ended - start
        graphs = llm.stats()["graphs"]
        seconds["steps"] = graphs["seconds"]
        start = time.perf_counter()
        ids = [i % 1000 for i in range(tokens)]
        llm.generate([ids], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        seconds["first"] = time.perf_counter() - start
    print(json.dumps(seconds))


def started(words: list[str], cache: str) -> dict[str, float]:
    """Seconds of a start in a process of its own."""
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    start = time.time()
    line = [sys.executable, "-m", "bench.start", *words, "--began", repr(start)]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True)
    whole = time.time() - start
    require(done.returncode == 0, f"{' '.join(line)} ended with {done.returncode}", BenchError)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds | {"all": whole, "beyond": whole - seconds["weights"]}


def line(name: str, seconds: dict[str, float]) -> str:
    return f"| {name} | " + " | ".join(f"{seconds[part]:.1f}" for part in PARTS) + " |"


def row_of(name: str, seconds: dict[str, float], setup: Setup, command: str, **case: int) -> Row:
    """A row; `us` is what lies beyond the weights."""
    row = blank("start", setup.model.removeprefix("preset:"), setup.quant, 1, command, **case)
    if torch.cuda.is_available():
        facts = Facts(info(torch.device("cuda", 0)), driver_version(), Ceilings(0, 0, 0, 0))
        row |= rows.environment(facts)
    us = round(1e6 * seconds["beyond"])
    row["case"] |= {"start": name}
    return row | {"us": us, "p20": us, "p80": us, "seconds": seconds}


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    drafts: Annotated[int, typer.Option(help="Drafts a step.")] = 0,
    tokens: Annotated[int, typer.Option(help="Of the prompt.")] = 1024,
    requests: Annotated[int, typer.Option(help="At a time: decode steps are recorded.")] = 8,
    began: Annotated[float, typer.Option(hidden=True)] = 0.0,
    device: Annotated[str | None, typer.Option(help="As in generate.")] = None,
    cache: Annotated[str, typer.Option(help="Kernels compiled before: no first start.")] = "",
    out: Out = None,
) -> None:
    """A first and a second start."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    setup = Setup(model, quant, layers, device=device)
    if began:
        child(setup, drafts, tokens, requests, began)
        return
    if device != "cpu":
        need_gpu()
    words = [model, "--synthetic", "--quant", quant, "--drafts", str(drafts)]
    words += ["--tokens", str(tokens), "--requests", str(requests)]
    words += ["--layers", str(layers)] if layers else []
    words += ["--device", device] if device else []
    print(f"{HEAD}\n|---|" + "--:|" * len(PARTS), flush=True)
    with tempfile.TemporaryDirectory() as fresh:
        for name in ("second",) if cache else ("first", "second"):
            seconds = started(words, cache or fresh)
            print(line(name, seconds), flush=True)
            command = f"python -m bench.start {' '.join(words)}" + " --cache DIR" * bool(cache)
            case = {"drafts": drafts, "requests": requests, "prompt": tokens}
            rows.append(row_of(name, seconds, setup, command, **case), out)


if __name__ == "__main__":
    run(app)
