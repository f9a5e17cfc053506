"""What the server counts, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemotriton.serve.loop import EngineLoop, Job

if TYPE_CHECKING:
    from nemotriton.engine.llm import LLM

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)


@dataclass
class Histogram:
    """Counts of seconds by upper bound."""

    bounds: tuple[float, ...] = _BOUNDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float) -> None:
        """Book one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def mean(self) -> float:
        """Of all so far; 0 where there are none."""
        return self.total / max(1, sum(self.counts))

    def lines(self, name: str, help: str) -> Iterator[str]:
        """The text format."""
        yield f"# HELP {name} {help}"
        yield f"# TYPE {name} histogram"
        below = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total}"
        yield f"{name}_count {below}"


class Metrics:
    """Books kept on the event loop; the engine's own are read as they stand."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.cancelled = 0
        self.reused = 0
        self.first_token = Histogram()
        self.token = Histogram(_TOKEN_BOUNDS)
        self.request = Histogram()

    def end(self, job: Job, now: float) -> None:
        """Book a job that has ended."""
        self.reused += sum(group.reused for group in job.groups)
        if job.cancelled:
            self.cancelled += 1
            return
        self.request.add(now - job.arrived)
        for group in job.groups:
            if group.first_token is None:
                continue
            self.first_token.add(group.first_token - job.arrived)
            for completion in group.completions:
                later = len(completion.request.output) - 1
                if later > 0:
                    self.token.add((now - group.first_token) / later)

    def text(self, llm: LLM, loop: EngineLoop) -> str:
        """All of it."""
        lines = [*self._gauges(llm, loop), *self._counters(llm)]
        name = "nemotriton_responses_total"
        lines += [f"# HELP {name} Answers by path and status.", f"# TYPE {name} counter"]
        for (path, status), count in sorted(self.responses.items()):
            lines.append(f'{name}{{path="{path}",status="{status}"}} {count}')
        histograms = (
            ("first_token", "From arrival to the first token.", self.first_token),
            ("token", "Of a completion's later tokens, the mean.", self.token),
            ("request", "From arrival to the last token.", self.request),
        )
        for name, help, histogram in histograms:
            lines += histogram.lines(f"nemotriton_{name}_seconds", help)
        return "\n".join(lines) + "\n"

    def _gauges(self, llm: LLM, loop: EngineLoop) -> Iterator[str]:
        # each value by itself: the engine's thread writes them meanwhile
        engine = llm.engine
        scheduler, meter, drafts = engine.scheduler, engine.meter, engine.draft_meter
        found: dict[str, tuple[str, float | None]] = {
            "open": ("Completions accepted and not ended.", loop.open),
            "room": ("Completions that may be open.", loop.room),
            "running": ("Requests that hold memory.", len(scheduler.running)),
            "waiting": ("Requests in the engine's queue.", len(scheduler.waiting)),
            "tokens_per_second": (
                "Of steps without prompt tokens.",
                _ratio(meter.decode_tokens, meter.decode_seconds),
            ),
            "prompt_tokens_per_second": (
                "Of steps with them.",
                _ratio(meter.prompt_tokens, meter.prefill_seconds),
            ),
        }
        for name, pool in (("slots", scheduler.slots), ("pages", scheduler.pages)):
            if pool is not None:
                found[name] = (f"Of {name}, all there are.", pool.size)
                found[name + "_used"] = (f"Of {name}, those taken.", pool.taken)
        if (prefixes := engine.prefixes) is not None:
            found["prefix_bytes"] = ("Memory of earlier prompts' ends.", prefixes.used)
        if engine.depth is not None:
            share = _ratio(drafts.accepted, drafts.verified)
            found["draft_acceptance"] = ("Share of verified drafts.", share)
            found["draft_depth"] = ("Drafts a step at present.", engine.depth.current)
        yield from _plain(found, "gauge")

    def _counters(self, llm: LLM) -> Iterator[str]:
        meter, drafts = llm.engine.meter, llm.engine.draft_meter
        found: dict[str, tuple[str, float | None]] = {
            "steps_total": ("Steps of the engine.", meter.steps),
            "prompt_tokens_total": ("Prompt tokens computed.", meter.prompt_tokens),
            "prompt_tokens_reused_total": ("Those that earlier ones spared.", self.reused),
            "output_tokens_total": ("Tokens generated.", meter.output_tokens),
            "preemptions_total": ("Requests set aside.", llm.engine.scheduler.preemptions),
            "cancelled_total": ("Requests whose client left or was late.", self.cancelled),
            "drafts_proposed_total": ("Drafts proposed.", drafts.proposed),
            "drafts_verified_total": ("Drafts verified.", drafts.verified),
            "drafts_accepted_total": ("Drafts accepted.", drafts.accepted),
        }
        yield from _plain(found, "counter")


def _plain(found: dict[str, tuple[str, float | None]], kind: str) -> Iterator[str]:
    for name, (help, value) in found.items():
        if value is not None:
            full = f"nemotriton_{name}"
            yield from (f"# HELP {full} {help}", f"# TYPE {full} {kind}", f"{full} {value}")


def _ratio(amount: float, per: float) -> float | None:
    return amount / per if per else None
