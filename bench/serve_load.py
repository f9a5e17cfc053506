"""What serving costs: streams to many clients against `LLM.generate`.

Both get the same prompts, sampling and number of tokens of one model, and are timed from the first
submission (the first client's connect) to the last token (the last client's last byte), after a
warm-up of both. The clients are a process of their own, see `bench.serve_clients`.
"""

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import serve_clients
from bench.rows import BenchError
from nemotriton.errors import require
from nemotriton.kernels.op import compiled_variants

if TYPE_CHECKING:
    from nemotriton import LLM

ROOT = Path(__file__).parents[1]
HTTP_THREADS = ("http", "reader")  # the event loop, and those that tokenize


@dataclass
class Round:
    """One way's time with all requests; times of `perf_counter`, in seconds.

    steps: the end of each, and the tokens it brought. submitted: of each prompt, in the engine.
    cpu: of the threads that speak HTTP. compiled: kernels that a warm-up had not met.
    """

    start: float = 0.0
    end: float = 0.0
    steps: list[tuple[float, int]] = field(default_factory=list)
    submitted: list[float] = field(default_factory=list)
    prompt_steps: int = 0
    cpu: float = 0.0
    compiled: int = 0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.end - self.start

    @property
    def arrival(self) -> float:
        """Until the engine had the last prompt."""
        return max(self.submitted) - self.start

    def parts(self, streams: int) -> tuple[float, float, float, float]:
        """Seconds until all streams run, while they do, and after; tokens a second while they do.
        0 where there was no such time."""
        full = [i for i, (_, tokens) in enumerate(self.steps) if tokens >= streams]
        if not full:
            return self.seconds, 0.0, 0.0, 0.0
        first, last = self.steps[full[0]][0], self.steps[full[-1]][0]
        made = sum(tokens for _, tokens in self.steps[full[0] + 1 : full[-1] + 1])
        rate = made / (last - first) if last > first else 0.0
        return first - self.start, last - first, self.end - last, rate


@contextmanager
def watched(llm: "LLM") -> Iterator[Round]:
    """Book every step of the model and every prompt that its engine gets."""
    found, engine = Round(), llm.engine
    step, submit, meter = llm.step, engine.submit, engine.meter

    def booked_step() -> None:
        tokens, prompts = meter.output_tokens, meter.prompt_tokens
        step()
        found.steps.append((time.perf_counter(), meter.output_tokens - tokens))
        found.prompt_steps += meter.prompt_tokens > prompts

    def booked_submit(prepared: Any) -> Any:
        found.submitted.append(time.perf_counter())
        return submit(prepared)

    before, cpu = compiled_variants(), http_cpu()
    llm.step, engine.submit = booked_step, booked_submit  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del llm.step, engine.submit
    found.compiled, found.cpu = compiled_variants() - before, http_cpu() - cpu


def http_cpu() -> float:
    """CPU seconds so far of the threads that speak HTTP."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.ident is not None and thread.name.startswith(HTTP_THREADS)
    )


# ---------------------------------------------------------------------------------------- clients
@dataclass(frozen=True)
class Clients:
    """A process of them."""

    process: subprocess.Popen[str]

    def stream(self, bodies: Sequence[dict[str, Any]]) -> tuple[float, float]:
        """When the first set out, and when every stream had ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(bodies) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        require(line != "", "the clients' process has ended: see its message.", BenchError)
        start, end = json.loads(line)
        return start, end


@contextmanager
def clients(llm: "LLM", streams: int) -> Iterator[Clients]:
    """Clients of a server of this model, for as long as both are there."""
    from nemotriton.serve.app import Limits, Service
    from nemotriton.serve.server import background

    with background(Service(llm, "model", Limits(queue=streams))) as url:
        command = [sys.executable, "-m", serve_clients.__name__, url]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            yield Clients(process)
        finally:
            process.kill()
            process.communicate()


# --------------------------------------------------------------------------------------- compared
@dataclass(frozen=True)
class Load:
    """Prompts of random ids, and what both ways are asked for: `tokens` each, whatever they are."""

    prompts: list[list[int]]
    tokens: int

    @classmethod
    def random(cls, llm: "LLM", streams: int, prompt: int, tokens: int) -> "Load":
        """Ids of texts, which no tokenizer of the family holds for control."""
        drawn, high = random.Random(0), min(llm.config.vocab, 30_000)
        return cls(
            [[drawn.randrange(100, high) for _ in range(prompt)] for _ in range(streams)], tokens
        )

    def generate(self, llm: "LLM", tokens: int | None = None) -> Round:
        """By `LLM.generate`."""
        given = replace(llm.default_params, max_tokens=tokens or self.tokens, ignore_eos=True)
        params = [replace(given, seed=i) for i in range(len(self.prompts))]
        with watched(llm) as found:
            found.start = time.perf_counter()
            llm.generate(self.prompts, params)
            found.end = time.perf_counter()
        return found

    def serve(self, llm: "LLM", client: "Clients", tokens: int | None = None) -> Round:
        """By the server that these clients are at."""
        asked = {"max_tokens": tokens or self.tokens, "ignore_eos": True, "stream": True}
        bodies = [asked | {"prompt": ids, "seed": i} for i, ids in enumerate(self.prompts)]
        with watched(llm) as found:
            found.start, found.end = client.stream(bodies)
        return found


def compare(llm: "LLM", load: Load, rounds: int) -> tuple[Round, Round]:
    """The best round of each way, (generate, serve).

    The former's stand before and after the latter's: while there is a server, its thread alone may
    step the model."""
    load.generate(llm, tokens=4)
    before = [load.generate(llm) for _ in range(rounds - rounds // 2)]
    with clients(llm, len(load.prompts)) as found:
        for _ in range(2):  # what steps of prompts launch hangs on how many arrive at a time
            load.serve(llm, found, tokens=4)
        served = [load.serve(llm, found) for _ in range(rounds)]
    after = [load.generate(llm) for _ in range(rounds // 2)]
    return min(before + after, key=lambda r: r.seconds), min(served, key=lambda r: r.seconds)


def table(load: Load, alone: Round, served: Round) -> str:
    """What was measured, for the eye."""
    streams = len(load.prompts)
    made = streams * load.tokens
    ours, theirs = alone.parts(streams), served.parts(streams)
    rows = [
        ("seconds", alone.seconds, served.seconds, 3),
        ("  until all run", ours[0], theirs[0], 3),
        ("  while all run", ours[1], theirs[1], 3),
        ("  after", ours[2], theirs[2], 3),
        ("tokens/s", made / alone.seconds, made / served.seconds, 0),
        ("  while all run", ours[3], theirs[3], 0),
        ("steps with prompts", alone.prompt_steps, served.prompt_steps, 0),
        ("ms until all are submitted", 1e3 * alone.arrival, 1e3 * served.arrival, 1),
    ]
    lines = [f"{'':<28}{'generate':>10}{'serve':>10}"]
    lines += [f"{name:<28}{a:>10.{digits}f}{b:>10.{digits}f}" for name, a, b, digits in rows]
    steady = f"{ours[3] / theirs[3] - 1:+.1%}" if ours[3] and theirs[3] else "unknown"
    lines += [
        f"overhead {served.seconds / alone.seconds - 1:+.1%}, while all run {steady}",
        f"HTTP's threads: {1e6 * served.cpu / made:.1f} us of CPU a token",
        f"kernels compiled meanwhile: {alone.compiled}, {served.compiled}",
    ]
    return "\n".join(lines)
