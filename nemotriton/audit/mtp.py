"""Drafts on against drafts off, greedily, token by token, and what the drafts were worth.

On fp32 twins the tokens are the same. A pass over several rows may round otherwise than one over a
single row, in 16 bits so much that the likeliest token changes where others are near; behind such a
place the texts have nothing more in common. So where they part, the whole answer with drafts is
given to the model without them, teacher-forced: every one of its tokens must be the likeliest but
for what rounding does to the gap between two logits. That is measured, by passes over the same
tokens whose every layer's result is a rounding off. Within it the difference is a "tie"; any other
is a fault.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemotriton.audit.compare import rounding
from nemotriton.audit.report import table
from nemotriton.console import by_position
from nemotriton.engine.llm import LLM
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import UnsupportedError, require
from nemotriton.model.nemotron_h import NemotronH

_NUDGES = 4  # passes that show what rounding does
_MANY = 50  # drafts, of which a block that fits has some accepted


@dataclass(frozen=True, slots=True)
class Drafted:
    """Answers with drafts: the prompts' ids, the tokens of each, and the engine's statistics."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    stats: dict[str, Any]


def draft(llm: LLM, prompts: Sequence[str], tokens: int) -> Drafted:
    """Answer with the drafts that `llm` was made for."""
    outputs = llm.generate(list(prompts), _greedy(tokens))
    return Drafted(
        prompts=[list(o.prompt_token_ids) for o in outputs],
        tokens=[list(o.outputs[0].token_ids) for o in outputs],
        stats=llm.stats()["drafts"],
    )


def compare(llm: LLM, drafted: Drafted, tokens: int) -> dict[str, Any]:
    """Answer the same prompts with an `llm` that drafts nothing, and find where they part.

    UnsupportedError where rounding alone may make any token the likeliest."""
    outputs = llm.generate(drafted.prompts, _greedy(tokens))
    rows: list[dict[str, Any]] = []
    for prompt, on, output in zip(drafted.prompts, drafted.tokens, outputs, strict=True):
        off = list(output.outputs[0].token_ids)
        rows.append({"prompt_tokens": len(prompt), "tokens": len(off), "result": "equal"})
        if on != off:
            rows[-1] |= {"result": "differs"} | _parting(llm, prompt, on, off)
    bound = max((row.pop("moved") for row in rows if "moved" in row), default=None)
    if bound is not None:
        _judge(rows, bound)
    acceptance = drafted.stats["acceptance"]
    return {
        "equal": all(row["result"] == "equal" for row in rows),
        "faults": sum(row["result"] == "differs" for row in rows),
        "rounding": bound,
        "prompts": rows,
        "verified": drafted.stats["verified"],
        "accepted": drafted.stats["accepted"],
        "acceptance": list(acceptance or ()),
        "tokens_per_pass": drafted.stats["tokens_per_pass"],
    }


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _parting(llm: LLM, prompt: list[int], on: list[int], off: list[int]) -> dict[str, Any]:
    """The first token that differs, and how far the answer's tokens are from the likeliest ones.

    gap: of the two tokens' logits. worst: the most that a token's logit is below the likeliest's.
    picks: tokens that are not the likeliest. moved, likely: see `_moved`, `_judge`.
    """
    least = min(len(on), len(off))
    at = next((i for i in range(least) if on[i] != off[i]), least)
    if at == least:  # one ended where the other goes on
        return dict.fromkeys(("on", "off", "gap", "worst", "picks")) | {"at": at}
    right = _behind(llm, prompt, on)
    best = right.max(-1).values
    below = best - right.gather(1, torch.tensor(on)[:, None])[:, 0]
    below = torch.nan_to_num(below, nan=torch.inf)
    without = torch.nan_to_num(best[at] - right[at, off[at]], nan=torch.inf)
    return {
        "at": at,
        "on": on[at],
        "off": off[at],
        "gap": float(right[at, off[at]] - right[at, on[at]]),
        "worst": max(float(below.max()), float(without)),
        "picks": int((below > 0).sum()),
        "moved": _moved(llm, prompt, on, right),
        "likely": float((best - right.mean(-1)).median()),
    }


def _behind(llm: LLM, prompt: list[int], answer: list[int]) -> Tensor:
    """Teacher-forced logits [len(answer), V] that the answer's tokens are picked from."""
    rows: Tensor = llm.logits(prompt + answer)
    return rows[len(prompt) - 1 : -1]


def _moved(llm: LLM, prompt: list[int], answer: list[int], right: Tensor) -> float:
    """How far rounding moves the gap between the two likeliest tokens, anywhere in an answer."""
    model = llm.runner.model
    assert isinstance(model, NemotronH)
    two = right.topk(2).indices
    gaps = right.gather(1, two).diff()
    most = 0.0
    for seed in range(_NUDGES):
        with rounding(model, seed):
            moved = _behind(llm, prompt, answer).gather(1, two).diff() - gaps
        most = max(most, float(torch.nan_to_num(moved, nan=0.0).abs().max()))
    return most


def _judge(rows: Sequence[dict[str, Any]], bound: float) -> None:
    """Tell the ties among the rows that differ; rounding may move a gap by `bound`."""
    for row in rows:
        likely = row.pop("likely", None)
        if likely is None:
            continue
        require(
            bound < likely,
            f"rounding alone moves the gap between two logits by up to {bound:.2g}, and the "
            f"likeliest token is {likely:.2g} above the mean one: this shows nothing. Use --dtype "
            "float32, or fewer layers.",
            UnsupportedError,
        )
        if row["worst"] <= bound:
            row["result"] = "tie"


def as_lines(found: dict[str, Any], random: bool = False) -> Iterable[str]:
    """The result as text; random: of weights that nobody trained."""
    head = ("prompt", "tokens", "result", "first different", "with", "without", "logit gap")
    keys = ("at", "on", "off", "gap", "picks", "worst")
    rows = (
        (i, r["tokens"], r["result"], *(r.get(k) for k in keys))
        for i, r in enumerate(found["prompts"], 1)
    )
    yield from table((*head, "picks differ", "worst gap"), rows)
    if found["rounding"] is not None:
        yield f"rounding alone moves a gap by up to {found['rounding']:.2e}"
    yield f"drafts: {found['accepted']} of {found['verified']} accepted"
    if found["acceptance"]:
        shares = by_position(found["acceptance"])
        yield f"of a step's: {shares}; {found['tokens_per_pass']:.2f} tokens a step"
    if found["verified"] >= _MANY and not found["accepted"]:
        yield "none was accepted: " + (
            "random weights foresee nothing"
            if random
            else "the MTP block does not belong to these weights, or is wrong"
        )
    if found["equal"]:
        yield "equal: every token is that without drafts"
    elif found["faults"]:
        yield f"differs: {found['faults']} of {len(found['prompts'])} prompts, beyond rounding"
    else:
        yield "equal but for ties within rounding"
