"""A server of the embedded model in a thread of this process, on a free port."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from nemotriton.engine.llm import LLM
from nemotriton.serve.app import Limits, Service
from nemotriton.serve.server import background


@dataclass
class Running:
    """A server that takes requests."""

    llm: LLM
    service: Service
    url: str

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until nothing is open, then nothing may be held."""
        until = time.monotonic() + seconds
        while self.service.loop.open or self.llm.engine.busy:
            assert time.monotonic() < until, f"{self.service.loop.open} completions are open still"
            time.sleep(0.01)
        scheduler = self.llm.engine.scheduler
        assert scheduler.slots is not None
        assert scheduler.pages is not None
        assert (scheduler.slots.taken, scheduler.pages.taken) == (0, 0)
        assert not self.llm.engine._groups
        assert not self.llm.engine._by_request


@contextlib.contextmanager
def serving(
    limits: Limits | None = None, key: str | None = None, *, requests: int = 8, context: int = 512
) -> Iterator[Running]:
    """The embedded model, named tiny; in fp32, as in bf16 neighbours can tip a close choice."""
    sizes = {"max_context": context, "max_requests": requests}
    with LLM(device="cpu", dtype="float32", **sizes) as llm:
        service = Service(llm, "tiny", limits or Limits(), key)
        with background(service) as url:
            yield Running(llm, service, url)
