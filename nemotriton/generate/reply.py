"""A reply as a person reads it: the answer on stdout as it comes, the thought on stderr or not."""

import json
import secrets
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nemotriton.console import Console, printable
from nemotriton.engine.sampling import SamplingParams
from nemotriton.text.chat import ChatPrompt
from nemotriton.text.reply import ToolCall

if TYPE_CHECKING:
    from nemotriton.engine.llm import LLM, CompletionOutput, Delta

_HEAD = 60  # characters of a prompt
BAD_ENDS = {"error": "the model's logits are not finite", "abort": "it was cancelled"}


@dataclass(frozen=True)
class View:
    """How results are shown. thinking: None shows thoughts on a terminal only."""

    console: Console
    as_json: bool
    stats: bool
    thinking: bool | None = None

    @property
    def shows_thinking(self) -> bool:
        """True where thoughts are written to stderr."""
        return self.console.is_terminal if self.thinking is None else self.thinking

    def head(self, number: int, count: int, prompt: str) -> None:
        """Tell the answers to several prompts apart, on stdout as `tail` does; not when quiet."""
        if not self.console.quiet:
            said = printable(" ".join(prompt.split()))
            short = said if len(said) <= _HEAD else f"{said[: _HEAD - 3]}..."
            gap = "\n" if number > 1 else ""
            print(f"{gap}==> {number} of {count}: {short} <==", flush=True)


class Writer:
    """Writes a reply, piece by piece or whole."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._open = True  # stdout has no line end yet
        self._thought = ""
        self.text = ""
        self.thinking = ""
        self.tool_calls: list[ToolCall] = []

    @property
    def answered(self) -> bool:
        """True once anything but a thought has come."""
        return bool(self.text or self.tool_calls)

    def write(self, text: str, thinking: str = "", tool_calls: Iterable[ToolCall] = ()) -> None:
        """One more piece."""
        if thinking and self._view.shows_thinking:
            self._view.console.thought(thinking)
        self.thinking += thinking
        if text:
            self._end_thought()
            self.text += text
            sys.stdout.write(_shown(text))
            sys.stdout.flush()
            self._open = not text.endswith("\n")
        for call in tool_calls:
            self._end_thought()
            self.tool_calls.append(call)
            record = {"tool_call": {"name": call.name, "arguments": call.arguments}}
            start = "\n" if self.text and self._open else ""
            print(start + json.dumps(record, ensure_ascii=False), flush=True)
            self._open = False

    def close(self) -> None:
        """End the last line; nothing of the answer follows."""
        self._end_thought()
        if self._open:
            print(flush=True)

    def _end_thought(self) -> None:
        if self.thinking != self._thought and self._view.shows_thinking:
            self._view.console.thought("\n")
        self._thought = self.thinking


def seeded(params: SamplingParams) -> SamplingParams:
    """With a seed of its own, new each time, where none is asked for: the report names it."""
    if params.seed is not None or params.greedy:
        return params
    return replace(params, seed=secrets.randbits(31))


def say_end(
    end: "Delta | CompletionOutput",
    prompt: Any,
    tokens: int,
    answered: bool,
    params: SamplingParams,
    llm: "LLM",
    view: View,
    name: str,
) -> int:
    """Why an answer ended; returns the exit code. answered: there is more than a thought."""
    reason = end.finish_reason or "abort"
    if reason in BAD_ENDS:
        view.console.error(f"{name}ended after {tokens} tokens: {BAD_ENDS[reason]}.")
        return 1
    unanswered = isinstance(prompt, ChatPrompt) and prompt.thinking and not answered
    if reason == "length" and tokens == params.max_tokens:
        remedy = "raise it for a longer answer"
        if unanswered:
            remedy = "it was still thinking: raise it, or give --think-budget or --no-think"
        view.console.warn(f"{name}stopped at --max-tokens {tokens}; {remedy}.")
    elif reason == "length":
        context = llm.plan.max_context
        view.console.warn(f"{name}stopped after {tokens} tokens: the context of {context} is full.")
    elif unanswered:
        view.console.warn(f"{name}ended with its thought: there is no answer. Try --no-think.")
    if reason != "length":
        reason = "eos" if end.stop_reason is None else repr(end.stop_reason)
    seed = "" if params.greedy else f" · seed {params.seed}"
    view.console.say(f"--- {name}{tokens} tokens · stop: {reason}{seed}")
    return 0


def _shown(text: str) -> str:
    """Text for stdout: as it is, but on a terminal nothing that would move its cursor."""
    return printable(text) if sys.stdout.isatty() else text
