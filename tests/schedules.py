"""Random schedules over one engine, and the bits of the logits behind every token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nemotriton import LLM, SamplingParams
from nemotriton.autotune import parity
from nemotriton.autotune.alone import same_bits
from nemotriton.engine import runner
from nemotriton.engine.caches import PAGE_SIZE
from nemotriton.engine.request import Piece
from nemotriton.engine.sampling import mix_seed
from nemotriton.kernels.op import SPECS, Case
from tests.test_drafts import stubbed


@dataclass(frozen=True)
class Wish:
    """A request: when it comes, by the number of the step, and after how many tokens it leaves."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    leaves: int | None = None


@dataclass
class Trace:
    """A request's tokens, and the logits (fp32 [V], on the CPU) that each was picked from."""

    tokens: list[int]
    rows: list[Tensor] = field(repr=False)


def wishes(count: int, seed: int, vocab: int, longest: int, tokens: int) -> list[Wish]:
    """Prompts of 1 .. longest tokens, short ones mostly, greedy or not; a tenth leaves early."""
    rng = random.Random(seed)
    found, arrival = [], 0
    for i in range(count):
        length = min(longest, int(rng.expovariate(4 / longest)) + 1)
        if i % 3 == 1:  # about to need another page
            length = max(PAGE_SIZE - rng.randint(0, tokens // 2), 1)
        prompt = tuple(rng.randrange(3, vocab) for _ in range(length))
        if i % 7 == 3:  # runs of one symbol
            prompt = (prompt[0],) * length
        params = SamplingParams(
            temperature=rng.choice([0, 0.8, 1.2]),
            top_p=rng.choice([1, 0.9]),
            seed=mix_seed(seed, i),
            max_tokens=rng.randint(tokens // 2, tokens),
            ignore_eos=True,
            logprobs=0,
        )
        leaves = rng.randint(1, tokens) if rng.random() < 0.1 else None
        found.append(Wish(prompt, params, arrival, leaves))
        arrival += rng.choice([0, 0, 0, 0, 1, 3])
    return found


@pytest.fixture
def raw_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's `logprobs` are the model's logits as they are."""

    def rows(logits: Tensor, chosen: Sequence[int], wanted: Sequence[int]) -> list[Any]:
        return list(logits.float().cpu().clone())

    monkeypatch.setattr(runner, "describe", rows)


def run(
    llm: LLM, wanted: Sequence[Wish], before: Callable[[int], None] = lambda step: None
) -> list[Trace]:
    """Let the requests come and go; `before` is called before every step with its number."""
    engine, groups, step = llm.engine, {}, 0
    while len(groups) < len(wanted) or engine.busy:
        for i, wish in enumerate(wanted):
            if i not in groups and wish.arrival <= step:
                groups[i] = engine.submit(engine.prepare(list(wish.prompt), wish.params))
        for i, group in groups.items():
            leaves = wanted[i].leaves
            if leaves is not None and len(group.completions[0].request.output) >= leaves:
                engine.cancel(group.id)
        before(step)
        llm.step()
        step += 1
        assert step < 20_000, "the schedule does not end"
    requests = [groups[i].completions[0].request for i in range(len(wanted))]
    return [Trace(list(r.output), list(r.logprobs)) for r in requests]


def alone(llm: LLM, wanted: Sequence[Wish]) -> list[Trace]:
    """Each request when nothing runs beside it, to its end."""
    return [run(llm, [Wish(w.prompt, w.params)])[0] for w in wanted]


def check(found: Sequence[Trace], want: Sequence[Trace], wanted: Sequence[Wish]) -> None:
    """The same tokens from the same bits, as far as each request went."""
    wrong = []
    for i, (a, b, wish) in enumerate(zip(found, want, wanted, strict=True)):
        assert len(a.rows) == len(a.tokens)
        assert wish.leaves is not None or len(a.tokens) == len(b.tokens)
        for t, (x, y) in enumerate(zip(a.rows, b.rows)):  # as far as both went
            if not torch.equal(x, y):
                off = float((x - y).abs().max())
                wrong.append(f"request {i}, prompt {len(wish.prompt)}, token {t}: {off:.3g}")
                break
        else:
            assert a.tokens == b.tokens[: len(a.tokens)]
    assert not wrong, f"{len(wrong)} of {len(found)} differ: " + "; ".join(wrong[:8])


def prefill_against_decode(llm: LLM, count: int, tokens: int, top: int = 0) -> list[float]:
    """Of each of `count` prompts, digits and repeated symbols among them: the largest difference
    between the logprobs with which its answer was decoded, and those that prompt and answer get as
    one prompt. top: with those of the `top` best tokens beside it that are the same ones; a trained
    model is so sure of its answers that their own logprobs are zeros either way."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(1, 90))] for _ in range(count)]
    prompts[1::4] = [[48 + n % 10 for n in range(len(p))] for p in prompts[1::4]]
    prompts[2::4] = [[p[0]] * len(p) for p in prompts[2::4]]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=top)
    scoring = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=top)
    answers = [o.outputs[0] for o in llm.generate(prompts, params)]
    whole = [[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)]
    found = []
    for scored, prompt, answer in zip(llm.generate(whole, scoring), prompts, answers, strict=True):
        assert answer.logprobs is not None
        assert scored.prompt_logprobs is not None
        pairs = list(zip(answer.logprobs, scored.prompt_logprobs[len(prompt) :], strict=True))
        assert len(pairs) == tokens
        differences = []
        for t, (a, b) in zip(answer.token_ids, pairs, strict=True):
            assert b is not None
            differences += [abs(a[t].logprob - b[t].logprob)]
            differences += [abs(a[k].logprob - b[k].logprob) for k in a if k in b]
        found.append(max(differences))
    return found


def path_alone(args: dict[str, Any], s: int, i: int) -> dict[str, Any]:
    """Of a call of `attend_decode` with a tree: token i of sequence s as the last one of a context
    that consists of its way from the root."""
    cu, lengths, parents = (args[name].tolist() for name in ("cu", "lengths", "parents"))
    pages, page = args["pages"][s : s + 1], args["k_cache"].shape[1]
    context = lengths[s] - (cu[s + 1] - cu[s])
    path, at = [], i
    while at >= 0:
        path.insert(0, at)
        at = parents[cu[s] + at]
    caches = []
    for cache in (args["k_cache"], args["v_cache"]):
        moved = cache.clone()
        for depth, row in enumerate(path):
            (a, x), (b, y) = divmod(context + depth, page), divmod(context + row, page)
            moved[pages[0, a], x] = cache[pages[0, b], y]
        caches.append(moved)
    length = context + len(path)
    return args | {
        "q": args["q"][cu[s] + i : cu[s] + i + 1].clone(),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "pages": pages,
        "cu": args["cu"].new_tensor([0, 1]),
        "lengths": args["lengths"].new_tensor([length]),
        "max_new": 1,
        "max_length": length,
        "parents": None,
    }


def one_token_step(
    case: Case, sequences: int, dev: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of a plain decode step of `causal_conv1d_update`, or of `ssm_update` (a case with
    STATE)."""
    spec = SPECS[_step_of(case)]
    return spec.make(case, sequences, dev, dtype, parity.generator(9, dev))


def lanes_change_nothing(case: Case, args: dict[str, Any]) -> bool:
    """Whether a step has the same bits, in y and in the state behind it, when states are kept."""
    spec = SPECS[_step_of(case)]
    plain, kept, state = parity.copy(args), parity.copy(args), args["state"]
    kept["lanes"] = state.new_zeros((state.shape[0], 3, *state.shape[1:]))
    a, b = spec.op.triton(**plain), spec.op.triton(**kept)
    return same_bits(a, b) and same_bits(plain["state"], kept["state"])


def _step_of(case: Case) -> str:
    return "ssm_update" if "STATE" in case else "causal_conv1d_update"


def chance(llm: LLM, want: Sequence[Trace], seed: int, stub: bool = True) -> Callable[[int], None]:
    """For `before`: a random number of drafts a step; pages come and go, so that requests are
    preempted. stub: most drafts are right up to a random depth."""
    rng, engine = random.Random(seed), llm.engine
    taken: list[int] = []
    engine.depth = None
    if engine.runner.drafter is not None and stub:
        own = engine.runner.drafter.propose
        made = stubbed(engine, lambda n, depth: depth <= n * 7 % 5)
        truth, plain = made.truth, made.propose

        def propose(pieces: Sequence[Piece]) -> Tensor:
            for p in pieces:  # submitted in the order of `want`, but for what ran before
                truth[p.request.id] = want[int(p.request.id.split("-")[0]) - first].tokens
            return plain(pieces) if rng.random() < 0.7 else own(pieces)

        first = engine._submitted
        made.propose = propose  # type: ignore[method-assign]

    def before(step: int) -> None:
        scheduler, pages = engine.scheduler, engine.scheduler.pages
        if engine.runner.drafter is not None:
            scheduler.drafts = rng.choice(engine.runner.drafter.shape.options)
        assert pages is not None
        if taken and (step % 5 == 0 or not scheduler.running):
            pages.give(taken)
            taken.clear()
        elif len(scheduler.running) > 1 and step % 5 == 1:
            oldest = scheduler.running[0]  # which always advances
            room = len(oldest.pages) * PAGE_SIZE - oldest.length
            taken.extend(pages.take(max(pages.free - (room < 30), 0)))

    return before
