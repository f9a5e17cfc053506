"""Drafts on against drafts off, greedily, token by token, and what the drafts were worth.

On fp32 twins the tokens are the same. On a GPU a pass over several rows may round otherwise than
one over a single row, so where two logits tie within rounding the texts may part there: such a
first difference is a "tie", any other is a fault.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemotriton.audit.report import table
from nemotriton.engine.llm import LLM
from nemotriton.engine.sampling import SamplingParams

_ROUNDINGS = 4  # of the largest logit, that both sides of a tie may be away from each other


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
    """Answer the same prompts with an `llm` that drafts nothing, and find where they part."""
    outputs = llm.generate(drafted.prompts, _greedy(tokens))
    rows = []
    for prompt, on, output in zip(drafted.prompts, drafted.tokens, outputs, strict=True):
        off = list(output.outputs[0].token_ids)
        row: dict[str, Any] = {"prompt_tokens": len(prompt), "tokens": len(off), "result": "equal"}
        if on != off:
            row |= _parting(llm, prompt, on, off)
        rows.append(row)
    acceptance = drafted.stats["acceptance"]
    return {
        "equal": all(row["result"] == "equal" for row in rows),
        "faults": sum(row["result"] == "differs" for row in rows),
        "prompts": rows,
        "verified": drafted.stats["verified"],
        "accepted": drafted.stats["accepted"],
        "acceptance": list(acceptance or ()),
        "tokens_per_pass": drafted.stats["tokens_per_pass"],
    }


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _parting(llm: LLM, prompt: list[int], on: list[int], off: list[int]) -> dict[str, Any]:
    """The first token that differs, and by how much its logits do."""
    pairs = enumerate(zip(on, off))
    at = next((i for i, (a, b) in pairs if a != b), min(len(on), len(off)))
    if at >= min(len(on), len(off)):
        return {"result": "differs", "at": at, "on": None, "off": None, "gap": None}
    row = llm.logits(prompt + off[:at])[-1]
    gap = float(row[off[at]] - row[on[at]])
    tie = _ROUNDINGS * torch.finfo(llm.dtype).eps * float(row.abs().max())
    result = "tie" if abs(gap) <= tie else "differs"
    return {"result": result, "at": at, "on": on[at], "off": off[at], "gap": gap}


def as_lines(found: dict[str, Any]) -> Iterable[str]:
    """The result as text."""
    head = ("prompt", "tokens", "result", "first different", "with", "without", "logit gap")
    rows = (
        (i, r["tokens"], r["result"], *(r.get(k) for k in ("at", "on", "off", "gap")))
        for i, r in enumerate(found["prompts"], 1)
    )
    yield from table(head, rows)
    yield f"drafts: {found['accepted']} of {found['verified']} accepted"
    if found["acceptance"]:
        shares = " ".join(f"{100 * share:.0f}" for share in found["acceptance"])
        yield f"accepted by position: {shares} %, {found['tokens_per_pass']:.2f} tokens a pass"
    if found["verified"] >= 50 and not found["accepted"]:
        yield "none was accepted: the MTP block does not belong to these weights, or is wrong"
    if found["equal"]:
        yield "equal: every token is that without drafts"
    elif found["faults"]:
        yield f"differs: {found['faults']} of {len(found['prompts'])} prompts, beyond rounding"
    else:
        yield "equal but for ties within rounding"
