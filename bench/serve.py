"""`python -m bench.serve soak --duration 120`: abuse; `load MODEL`: what serving costs.

`soak` runs a server of the embedded model against clients that leave, send nonsense or too much, or
read slowly, and says what came of each and what memory did. `load` streams to many clients and
compares with `LLM.generate`, see `bench.serve_load`.
"""

import asyncio
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench.cli import application, run
from bench.serve_clients import PATH
from bench.serve_load import Load, compare, table

app = application(__doc__)
JSON = {"content-type": "application/json"}


@dataclass
class Report:
    """counts: answers by kind of client and outcome. growth: bytes of memory from the first third
    to the end. left: jobs and groups that are still alive. failures: what must not be."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    growth: int = 0
    left: int = 0
    failures: list[str] = field(default_factory=list)

    def expect(self, kind: str, response: httpx.Response, *statuses: int) -> None:
        """Book an answer; 429 may always be."""
        status = response.status_code
        self.counts[kind, str(status)] += 1
        if status not in (*statuses, 429):
            self.failures.append(f"{kind}: {status} {response.text[:200]}")


# ------------------------------------------------------------------------------------------- soak
class Clients:
    """Each method is one request of one kind of client."""

    def __init__(self, url: str, report: Report, seed: int) -> None:
        self._url = url + PATH
        self._client = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None))
        self._report = report
        self._random = random.Random(seed)
        self._known: dict[int, str] = {}

    def _body(self) -> dict[str, Any]:
        kind = self._random.randrange(8)
        prompt = "x" * (1 + 20 * kind)
        return {"prompt": prompt, "seed": kind, "max_tokens": 4 + 3 * kind, "ignore_eos": True}

    async def whole(self) -> None:
        """Waits for its answer, which must be what it was before."""
        body = self._body()
        response = await self._client.post(self._url, json=body)
        self._report.expect("whole", response, 200)
        if response.status_code == 200:
            text = response.json()["choices"][0]["text"]
            if self._known.setdefault(body["seed"], text) != text:
                self._report.failures.append(f"whole: another answer to seed {body['seed']}")

    async def leaves(self) -> None:
        """Goes away somewhere in its stream, or before it begins."""
        try:
            async with asyncio.timeout(self._random.random() * 0.5):
                await self.slow("leaves", 0.01)
        except TimeoutError:
            self.count("leaves", "left")

    async def slow(self, kind: str = "slow", pause: float = 0.05) -> None:
        """Takes its time over every line."""
        body = self._body() | {"stream": True}
        async with self._client.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._report.expect(kind, response, 200)
                return
            last = ""
            async for line in response.aiter_lines():
                last = line or last
                await asyncio.sleep(pause)
            self.count(kind, "200")
            if last != "data: [DONE]":
                self._report.failures.append(f"{kind}: ended with {last[:200]}")

    async def malformed(self) -> None:
        """Sends a body with a piece cut out or bytes changed."""
        whole = bytearray(json.dumps(self._body() | {"stop": ["a"]}).encode())
        for _ in range(3):
            whole[self._random.randrange(len(whole))] = self._random.randrange(256)
        response = await self._client.post(self._url, content=bytes(whole), headers=JSON)
        self._report.expect("malformed", response, 200, 400, 404)

    async def oversized(self) -> None:
        """Sends more than the context, or than the body may be."""
        size = self._random.choice((2_000, 2_000_000))
        response = await self._client.post(self._url, json=self._body() | {"prompt": "y" * size})
        self._report.expect("oversized", response, 400, 413)

    def count(self, kind: str, outcome: str) -> None:
        self._report.counts[kind, outcome] += 1

    async def one(self, until: float) -> None:
        """A client after another."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            *(self.whole, self.leaves, self.slow, self.malformed, self.oversized)
        ]
        while time.monotonic() < until:
            await self._random.choice(kinds)()


async def beat(url: str, report: Report, duration: float, clients: int) -> None:
    """All of them at once."""
    until = time.monotonic() + duration
    found = Clients(url, report, seed=0)
    tasks = [asyncio.create_task(found.one(until)) for _ in range(clients)]
    await asyncio.sleep(duration / 3)
    before = resident()
    await asyncio.gather(*tasks)
    report.growth = resident() - before


def soak(duration: float, clients: int = 24) -> Report:
    """Seconds of it, against a server in this process."""
    from nemotriton import LLM
    from nemotriton.engine.outputs import Group
    from nemotriton.serve.app import Limits, Service
    from nemotriton.serve.loop import Job
    from nemotriton.serve.server import background

    report = Report()
    # in fp32 neighbours change no answer; in bf16 they can tip a close choice
    with LLM(device="cpu", dtype="float32", max_context=512, max_requests=8) as llm:
        service = Service(llm, "tiny", Limits(queue=12, body=1_000_000))
        with background(service) as url:
            asyncio.run(beat(url, report, duration, clients))
            until = time.monotonic() + 20
            while (service.loop.open or llm.engine.busy) and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.1)
            gc.collect()
            report.left = sum(type(o) in (Job, Group) for o in gc.get_objects())
            scheduler = llm.engine.scheduler
            for pool in (scheduler.slots, scheduler.pages):
                if pool is not None and pool.taken:
                    report.failures.append(f"{pool.taken} {pool.name} are taken at the end")
    return report


def resident() -> int:
    """Bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@app.command("soak")
def soak_command(
    duration: Annotated[float, typer.Option(help="Seconds.")] = 120.0,
    clients: Annotated[int, typer.Option(help="At the same time.")] = 24,
) -> None:
    """Abuse a server of the embedded model."""
    import torch

    torch.set_num_threads(1)
    report = soak(duration, clients)
    for (kind, outcome), count in sorted(report.counts.items()):
        print(f"{kind:<10} {outcome:<5} {count:7d}")
    print(f"memory grew by {report.growth / 2**20:.1f} MiB; {report.left} jobs are left")
    for failure in report.failures[:20]:
        print(failure)
    if report.failures or report.left:
        sys.exit(1)


# ------------------------------------------------------------------------------------------- load
@app.command("load")
def load_command(
    model: Annotated[str, typer.Argument(help="preset:NAME (random weights) or a directory.")],
    streams: Annotated[int, typer.Option(help="At the same time.")] = 64,
    prompt: Annotated[int, typer.Option(help="Tokens of each.")] = 128,
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 512,
    layers: Annotated[int | None, typer.Option(help="Only so many.")] = None,
    rounds: Annotated[int, typer.Option(help="Of each way; the best counts.")] = 2,
) -> None:
    """Compare streams to many clients with LLM.generate."""
    from nemotriton import LLM

    sizes: dict[str, Any] = {"max_context": prompt + tokens + 64, "max_requests": streams}
    if model.startswith("preset:"):
        llm = LLM.synthetic(model.removeprefix("preset:"), layers=layers, **sizes)
    else:
        llm = LLM(model, **sizes)
    with llm:
        load = Load.random(llm, streams, prompt, tokens)
        print(f"{streams} streams, prompts of {prompt} tokens, answers of {tokens}", flush=True)
        print(table(load, *compare(llm, load, rounds)))


if __name__ == "__main__":
    run(app)
