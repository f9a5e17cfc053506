"""`python -m bench.drafts`: what a step with drafts costs, part by part, and when it pays.

Random weights at full width; the accepted drafts are forced to each number from 0 up, so the times
do not hang on a text. Parts are times in the stream of the device, medians over steps; `step` is
the host's. Steps are launched one by one, not replayed from CUDA graphs. tok/s is of all requests
together. `gain` is against the plain step of the same run, without the draft block's own rows.
"""

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer

from bench.cli import application, need_gpu, run
from nemotriton import LLM, SamplingParams
from nemotriton.engine.request import State
from nemotriton.engine.runner import Runner
from nemotriton.kernels import Verdict

app = application(__doc__)
PARTS = ("draft", "verify", "commit")


@contextmanager
def accepting(runner: Runner, count: int) -> Iterator[None]:
    """Every verify pass accepts exactly so many drafts, or all there are."""
    own = runner._verify

    def forced(batch: object, picked: torch.Tensor) -> Verdict:
        found = own(batch, picked)  # type: ignore[arg-type]
        span = batch.decode  # type: ignore[attr-defined]
        rows = torch.arange(span.end, device=picked.device, dtype=torch.int32)
        row = rows - torch.repeat_interleave(span.cu[:-1], span.cu.diff(), output_size=span.end)
        last = (span.cu.diff() - 1).clamp_max(count)
        return found._replace(path=torch.where(row <= count, row, -1), accepted=last, last=last)

    runner._verify = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner._verify


def measure(llm: LLM, drafts: int, accepted: int, steps: int) -> dict[str, float]:
    """Median seconds of a step and its parts."""
    engine = llm.engine
    engine.depth = None
    engine.scheduler.drafts = drafts
    found: dict[str, list[float]] = {}
    with accepting(engine.runner, accepted):
        for i in range(steps + 3):
            start = time.perf_counter()
            llm.step()
            seconds = engine.runner.clock.seconds() | {"step": time.perf_counter() - start}
            if i >= 3:
                for part, value in seconds.items():
                    found.setdefault(part, []).append(value)
    return {part: statistics.median(values) for part, values in found.items()}


def table(llm: LLM, requests: int, drafts: int, context: int, steps: int) -> Iterator[str]:
    """Rows for one number of requests: no drafts, then each number accepted."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    groups = [
        llm.engine.submit(
            llm.engine.prepare(
                rng.choices(range(llm.config.vocab // 2, llm.config.vocab), k=context), params
            )
        )
        for _ in range(requests)
    ]
    llm.engine.scheduler.drafts = 0
    while any(g.completions[0].request.state is not State.DECODE for g in groups):
        llm.step()
    plain = measure(llm, 0, 0, steps)
    for k, accepted in [(0, 0), *((drafts, a) for a in range(drafts + 1))]:
        got = plain if k == 0 else measure(llm, k, accepted, steps)
        parts = " | ".join(f"{1e3 * got.get(part, 0.0):.3f}" for part in PARTS)
        rate = requests * (accepted + 1) / got["step"]
        gain = rate * plain["verify"] / requests
        yield (
            f"| {requests} | {k} | {accepted} | {1e3 * got['step']:.3f} | {parts} | {rate:.0f} | "
            f"{gain:.2f} |"
        )
    for group in groups:
        llm.engine.cancel(group.id)
    llm.engine.drop_cancelled()


@app.command()
def main(
    model: Annotated[str, typer.Option(help="A preset with an MTP block.")] = "super-120b",
    quant: Annotated[str, typer.Option(help="As in generate.")] = "release",
    layers: Annotated[int | None, typer.Option(help="Only so many layers.")] = None,
    drafts: Annotated[int, typer.Option(help="Drafts a step.")] = 3,
    requests: Annotated[str, typer.Option(help="Numbers of requests.")] = "1,16,64",
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    steps: Annotated[int, typer.Option(help="Steps behind each number.")] = 20,
) -> None:
    need_gpu()
    counts = [int(n) for n in requests.split(",")]
    longest = context + (drafts + 2) * (drafts + 2) * (steps + 3) + 16
    with LLM.synthetic(
        model,
        quant=quant,
        layers=layers,
        drafts=drafts,
        max_context=longest,
        max_requests=max(counts),
    ) as llm:
        llm.runner.steps = None  # what is forced below is not in the recorded steps
        print("| requests | drafts | accepted | step ms | draft | verify | commit | tok/s | gain |")
        print("|---|---|---|---|---|---|---|---|---|")
        for count in counts:
            for row in table(llm, count, drafts, context, steps):
                print(row, flush=True)


if __name__ == "__main__":
    run(app)
