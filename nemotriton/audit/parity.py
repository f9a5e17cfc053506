"""The same tokens through every way the engine may take, teacher-forced: are the logprobs alike?

    prefill   the whole text in one pass
    decode    a token a step behind the first
    drafts    rows of a verify pass, all of them accepted
    graphs    a token a step, in recorded steps

Every way is compared with prefill by the logprob of each token that really follows. What rounding
alone does is measured: prefill again, every layer's result moved by a rounding. A way is wrong
where its mean difference over all tokens is above that of rounding. A sequence is wrong where its
largest or its mean difference is far above that, or the largest far above what other sequences
show. (Where rounding sends a token to other experts single differences are large; means are not.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nemotriton.audit.compare import rounding
from nemotriton.audit.report import table
from nemotriton.engine.batch import build_batch
from nemotriton.engine.caches import Caches, MambaStates, PagedKV
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.llm import LLM
from nemotriton.engine.replay import ReplayStates, find_rollback
from nemotriton.engine.request import Piece, Request, Step
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError, require
from nemotriton.kernels.op import compiled_variants, use
from nemotriton.model.nemotron_h import NemotronH, Probe

_SHOWN = 10
_OUTLIER = 6.0  # times the other sequences' median
_NUDGES = 2  # passes that show what rounding does
# Single differences are large where rounding sends a token to other experts, which the few passes
# that show it may not happen to do; the mean of a sequence is steady.
_TIMES_NOISE = {"largest": 4.0, "mean": 2.0}
_ERRORS = 3.0  # standard errors that two means may differ by


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one sequence's logprobs on one way from prefill's; `tokens` were compared.

    deviation: of the tokens' differences from their mean. at: the position of the largest, in
    tokens. picks: rows whose likeliest token differs."""

    sequence: int
    way: str
    tokens: int
    largest: float
    mean: float
    deviation: float
    at: int
    picks: int


class Timing:
    """Seconds by what they went into."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Count the block's, whose results have been read from the device."""
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


class Ways:
    """An LLM's model on single sequences, ops forced to `impl`; drafts: of a verify pass."""

    def __init__(
        self, llm: LLM, impl: Mapping[str, str], drafts: int, rollback: str | None = None
    ) -> None:
        self.llm, self.impl = llm, impl
        model = llm.runner.model
        assert isinstance(model, NemotronH)
        self.model: NemotronH = model
        self.shape = DraftShape.chain(drafts)
        self.verifying = self._caches(rollback)

    def _caches(self, rollback: str | None) -> Caches:
        """One slot and its pages, with the lanes or rings of a verify pass."""
        config, mine = self.model.config, self.llm.runner.caches
        dtype, device = self.model.dtype, self.llm.device
        kv: PagedKV | None = None
        mamba: MambaStates | None = None
        if mine.kv is not None and config.attention is not None:
            pages, a = self._pages(self.llm.plan.max_context), config.attention
            kind = mine.kv.k.dtype
            kv = PagedKV(mine.kv.k.shape[0], pages, a.kv_heads, a.head_dim, kind, device)
        if mine.mamba is not None and config.mamba is not None:
            pool = (config.mamba, mine.mamba.ssm.shape[0], 1, dtype, device, mine.mamba.format)
            if find_rollback(rollback, self.shape, device) == "replay":
                mamba = ReplayStates(*pool, self.shape)
            else:
                mamba = MambaStates(*pool, lanes=len(self.shape) + 1)
        return Caches(kv, mamba)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.llm.runner.page_size)

    def _request(self, ids: Sequence[int]) -> Request:
        request = Request("audit", 0, list(ids), SamplingParams(temperature=0), seed=0, limit=1)
        request.slot = 0
        if self.llm.runner.caches.kv is not None:
            request.pages = list(range(self._pages(len(ids))))
        return request

    def _start(self, caches: Caches) -> None:
        if caches.mamba is not None:
            caches.mamba.start([0], [0])

    def _forward(self, piece: Piece, caches: Caches, prompt: bool, probe: Probe | None) -> Tensor:
        """Logits of a piece, fp32 [count, V]."""
        verify = not prompt and piece.count > 1
        batch = build_batch(
            *(([], [piece]) if prompt else ([piece], [])),
            [],
            page_size=self.llm.runner.page_size,
            chunk=self.llm.runner.chunk,
            device=self.llm.device,
            verify=verify,
        )
        logits = self.model.logits(self.model.forward(batch, caches, probe))
        span, mamba = batch.decode, caches.mamba
        if span is not None and mamba is not None:
            if verify:
                mamba.commit(span.slots, torch.full_like(span.slots, piece.count - 1))
            else:
                mamba.advance(span.slots)
        return logits

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The device and the implementations inside the block."""
        on_gpu = self.llm.device.type == "cuda"
        current = torch.cuda.device(self.llm.device) if on_gpu else nullcontext()
        with current, use(self.impl):
            yield

    # ---- the ways -----------------------------------------------------------------------------

    def prefill(self, ids: Sequence[int], probe: Probe | None = None) -> Tensor:
        """The whole in one pass."""
        caches, request = self.llm.runner.caches, self._request(ids)
        self._start(caches)
        return self._forward(Piece(request, 0, len(ids)), caches, True, probe)

    def nudged(self, ids: Sequence[int], seed: int = 0) -> Tensor:
        """Prefill whose embeddings and every layer's result are a rounding off."""
        with rounding(self.model, seed):
            return self.prefill(ids)

    def decode(self, ids: Sequence[int]) -> Tensor:
        """A token a step behind the first."""
        return self._stepwise(ids, self.llm.runner.caches, 1)

    def drafts(self, ids: Sequence[int]) -> Tensor:
        """Verify passes of as many drafts as there may be."""
        return self._stepwise(ids, self.verifying, len(self.shape) + 1)

    def _stepwise(self, ids: Sequence[int], caches: Caches, each: int) -> Tensor:
        request = self._request(ids)
        self._start(caches)
        rows = [self._forward(Piece(request, 0, 1), caches, True, None)]
        for at in range(1, len(ids), each):
            piece = Piece(request, at, min(each, len(ids) - at))
            whole = piece.count == each
            rows.append(
                self._forward(piece, caches, False, None)
                if whole
                else self._one_by_one(piece, caches)
            )
        return torch.cat(rows)

    def _one_by_one(self, piece: Piece, caches: Caches) -> Tensor:
        """What is left of a text, too short for a whole pass."""
        parts = [Piece(piece.request, at, 1) for at in range(piece.start, piece.end)]
        return torch.cat([self._forward(part, caches, False, None) for part in parts])

    def graphs(self, ids: Sequence[int]) -> Tensor:
        """Recorded steps behind the first token."""
        runner = self.llm.runner
        steps = runner.steps
        assert steps is not None, "the LLM records no steps"
        self._start(runner.caches)
        rows = [self._forward(Piece(self._request(ids), 0, 1), runner.caches, True, None)]
        steps.inputs.forget()
        request = self._request(ids)
        for at in range(1, len(ids)):
            request.prompt = list(ids[: at + 1])
            step = Step(decode=[Piece(request, at, 1)])
            shape = steps.shape_of(step, None)
            assert shape is not None
            runner.clock.start()
            steps.run(step, shape, runner.clock)
            rows.append(steps.logits(shape)[:1])
        return torch.cat(rows)

    def all(self) -> dict[str, Callable[[Sequence[int]], Tensor]]:
        """Those that are compared with prefill; recorded steps where there are any."""
        found: dict[str, Callable[[Sequence[int]], Tensor]] = {}
        found |= {"decode": self.decode, "drafts": self.drafts}
        return found | ({"graphs": self.graphs} if self.llm.runner.steps is not None else {})


@torch.no_grad()
def compare(
    ways: Ways, sequences: Sequence[Sequence[int]], counted: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Every way on every sequence; `counted` is called after each sequence."""
    found: list[Difference] = []
    noise: list[Difference] = []
    scale = 0.0
    timing, compiled = Timing(), compiled_variants()
    for number, ids in enumerate(sequences, 1):
        _check(ways.llm, ids, number)
        with ways.ready():
            with timing.of("prefill"):
                want = ways.prefill(ids)
                scale = max(scale, float(want.abs().max()))
            for seed in range(_NUDGES):
                with timing.of("rounding"):
                    noise.append(_differ(number, "noise", ways.nudged(ids, seed), want, ids))
            for name, way in ways.all().items():
                with timing.of(name):
                    found.append(_differ(number, name, way(ids), want, ids))
                counted()
    judged = _judged(found, noise, 2 * torch.finfo(ways.model.dtype).eps * scale)
    return judged | {"seconds": timing.seconds, "compiled": compiled_variants() - compiled}


def _check(llm: LLM, ids: Sequence[int], number: int) -> None:
    most = llm.plan.max_context
    require(
        2 <= len(ids) <= most,
        f"text {number} is {len(ids):,} tokens: give 2 to {most:,} (--tokens).",
        RequestError,
    )


def _differ(number: int, way: str, got: Tensor, want: Tensor, ids: Sequence[int]) -> Difference:
    index = torch.tensor(list(ids[1:]), device=want.device)[:, None]
    a, b = (x[:-1].float().log_softmax(-1).gather(1, index)[:, 0] for x in (got, want))
    gap = torch.nan_to_num((a - b).abs(), nan=torch.inf)
    picks = int((got[:-1].argmax(-1) != want[:-1].argmax(-1)).sum())
    at = int(gap.argmax())
    mean, deviation = float(gap.mean()), float(gap.std(correction=0))
    return Difference(number, way, len(ids) - 1, float(gap[at]), mean, deviation, at + 1, picks)


def _judged(
    found: Sequence[Difference], noise: Sequence[Difference], least: float
) -> dict[str, Any]:
    """Each way's mean over all tokens, and the sequences' differences, the largest first, each told
    right or wrong; `least` is always right."""
    usual: dict[str, float] = {}
    names = list(dict.fromkeys(d.way for d in found))
    for way in names:
        own = [d.largest for d in found if d.way == way]
        usual[way] = median(own) if len(own) > 3 else torch.inf
    limits = {
        "largest": least + _TIMES_NOISE["largest"] * max(d.largest for d in noise),
        "mean": least / 4 + _TIMES_NOISE["mean"] * max(d.mean for d in noise),
    }
    rows = []
    for d in sorted(found, key=lambda d: -d.largest):
        outlier = d.largest > max(limits["largest"] / 2, _OUTLIER * usual[d.way])
        wrong = outlier or d.largest > limits["largest"] or d.mean > limits["mean"]
        rows.append(asdict(d) | {"wrong": wrong})
    ways = [_way([d for d in found if d.way == way], noise, least / 4) for way in sorted(names)]
    return {
        "noise": {"largest": max(d.largest for d in noise), "mean": max(d.mean for d in noise)},
        "limits": limits,
        "wrong": sum(r["wrong"] for r in rows),
        "wrong_ways": sum(way["wrong"] for way in ways),
        "ways": ways,
        "worst": rows,
    }


def _way(own: Sequence[Difference], noise: Sequence[Difference], least: float) -> dict[str, Any]:
    """All sequences of one way: what is wrong by little everywhere shows in the mean over many
    tokens, which may exceed that of rounding by standard errors of the two and no more."""
    tokens, mean, error = _mean(own)
    _, usual, spread = _mean(noise)
    limit = least + usual + _ERRORS * (error**2 + spread**2) ** 0.5
    return {
        "way": own[0].way,
        "sequences": len(own),
        "tokens": tokens,
        "mean": mean,
        "limit": limit,
        "largest": max(d.largest for d in own),
        "picks": sum(d.picks for d in own),
        "wrong": not mean <= limit,
    }


def _mean(found: Sequence[Difference]) -> tuple[int, float, float]:
    """Tokens, the mean of their differences, and its standard error."""
    tokens = sum(d.tokens for d in found)
    mean = sum(d.tokens * d.mean for d in found) / tokens
    square = sum(d.tokens * (d.deviation**2 + d.mean**2) for d in found) / tokens
    return tokens, mean, (max(square - mean**2, 0.0) / tokens) ** 0.5


def as_lines(found: dict[str, Any]) -> Iterable[str]:
    """The result as text: each way, then the worst sequences."""
    rows = found["worst"]
    yield "logprobs against prefill"
    keys = ("way", "sequences", "tokens", "mean", "limit", "largest", "picks")
    yield from table(
        (*keys[:-1], "picks differ", ""),
        ((*(way[key] for key in keys), "!!" if way["wrong"] else "") for way in found["ways"]),
    )
    spent = ", ".join(f"{what} {seconds:.1f}" for what, seconds in found["seconds"].items())
    yield f"seconds: {spent}; {found['compiled']} kernels compiled or loaded"
    yield "of a sequence"
    for what, limit in found["limits"].items():
        yield f"{what}: rounding alone {found['noise'][what]:.2e}, limit {limit:.2e}"
    yield "worst sequences"
    head = ("sequence", "way", "largest", "at token", "mean", "picks differ", "")
    yield from table(
        head,
        (
            (
                r["sequence"],
                r["way"],
                r["largest"],
                r["at"],
                r["mean"],
                r["picks"],
                "!!" if r["wrong"] else "",
            )
            for r in rows[:_SHOWN]
        ),
        left=2,
    )
    ways, sequences = found["wrong_ways"], found["wrong"]
    told = [f"{ways} of {len(found['ways'])} ways"] if ways else []
    told += [f"{sequences} of {len(rows)} passes over a sequence"] if sequences else []
    yield f"wrong: {', '.join(told) or 'none'}"
