"""A conversation as a prompt: the checkpoint's template, thinking on or off, tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotriton.errors import RequestError, require
from nemotriton.text.reply import THINK, ReplyParser
from nemotriton.text.template import Message, switch_thinking
from nemotriton.text.tokens import Tokenizer

_TAIL = 16  # tokens that hold "<think>" and the white space behind it, however it is cut


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation's token ids, and what is needed to read the reply.

    thinking: the reply begins inside a thought.
    """

    ids: list[int]
    thinking: bool
    tools: tuple[Mapping[str, Any], ...] = ()

    def parser(self) -> ReplyParser:
        """For one reply."""
        return ReplyParser(self.thinking, self.tools)


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    think: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_args: Mapping[str, object] | None = None,
) -> ChatPrompt:
    """A conversation up to where the model is to answer.

    think: None is the checkpoint's way, which is on where its template can. tools: JSON schemas of
    functions, OpenAI's format. template_args: the template's own variables. RequestError where
    there is no template, it refuses, or it does not know what is asked for.
    """
    args = dict(template_args or {})
    found = tools if tools is not None else args.pop("tools", None)
    described = _tools(found)
    if described:
        args["tools"] = [dict(tool) for tool in described]
    template = tokenizer.chat_template
    if template is not None and all(isinstance(m, Mapping) and "role" in m for m in messages):
        require(
            not described or "tools" in template,
            "the call has tools, but the chat template of this model knows none: leave them out.",
            RequestError,
        )
        messages, args = switch_thinking(template, messages, args, think)
    ids = tokenizer.apply_chat(messages, template_args=args)
    return ChatPrompt(ids, opens_thought(tokenizer, ids), described)


def opens_thought(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """True where a prompt ends inside a thought that it has just opened."""
    return tokenizer.decode(ids[-_TAIL:], skip_special=False).rstrip().endswith(THINK)


def _tools(found: object) -> tuple[Mapping[str, Any], ...]:
    remedy = 'give a list of {"type": "function", "function": {"name": ..., "parameters": ...}}.'
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    require(
        found is None or is_list, f"tools of type {type(found).__name__}: {remedy}", RequestError
    )
    assert found is None or isinstance(found, Sequence)
    for i, tool in enumerate(found or ()):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        require(named, f"tools[{i}] is {tool!r}: {remedy}", RequestError)
    return tuple(found or ())
