"""A model's reply taken apart as it comes: its thought, its answer, its tool calls.

A reply is `thought </think> answer`, where the prompt, or else the model, opened the thought. Tool
calls stand in the answer, in one of the family's two forms:

    <tool_call>                                     <TOOLCALL>[{"name": "NAME",
    <function=NAME>                                 "arguments": {"P": VALUE}}, ...]</TOOLCALL>
    <parameter=P>
    VALUE
    </parameter>
    </function>
    </tool_call>

The left one is that of Nemotron 3 (its values are typed by the tool's schema, as they come as bare
text), the right one that of Nano v2. White space beside a tag belongs to the format and is dropped.
What only looks like a call stays in the answer, to the letter.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

THINK, END_THINK = "<think>", "</think>"
_BLOCKS = {"<tool_call>": "</tool_call>", "<TOOLCALL>": "</TOOLCALL>"}
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model wants called; `arguments` by name, as values of JSON."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class Reply:
    """A reply, or what one more piece of text added to it."""

    thinking: str = ""
    text: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class ReplyParser:
    """Splits a reply that comes in pieces; pieces joined are what the whole text at once gives.

    thinking: the prompt has opened a thought. tools: descriptions as the template got them
    (OpenAI's, or their inner `function` objects); without any, calls are not looked for.
    """

    def __init__(self, thinking: bool, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._schemas = schemas(tools)
        self._tags = tuple(_BLOCKS) if tools else ()
        self._buffer = ""
        self._rule = self._thought if thinking else self._start
        self._found = Reply()
        self._begun = False  # the thought has words
        self._bare = False  # behind a tag: white space is still dropped

    def push(self, text: str) -> Reply:
        """What is certain after these characters and was not before."""
        self._buffer += text
        return self._advance(last=False)

    def finish(self) -> Reply:
        """What waited for characters that never came."""
        return self._advance(last=True)

    def _advance(self, last: bool) -> Reply:
        self._found = Reply()
        while self._rule(last):
            pass
        return self._found

    # Each rule consumes the start of the buffer and returns True where another one goes on.

    def _start(self, last: bool) -> bool:
        seen = self._buffer.lstrip()
        if seen.startswith(THINK):
            self._buffer, self._rule = seen[len(THINK) :], self._thought
            return True
        if THINK.startswith(seen) and not last:
            return False
        self._rule = self._answer
        return True

    def _thought(self, last: bool) -> bool:
        if not self._begun:
            self._buffer = self._buffer.lstrip()
        end = self._buffer.find(END_THINK)
        if end >= 0:
            self._found.thinking += self._buffer[:end].rstrip()
            self._buffer, self._rule = self._buffer[end + len(END_THINK) :], self._answer
            self._bare = True
            return True
        certain = len(self._buffer) if last else _certain(self._buffer, (END_THINK,))
        words = self._buffer[:certain].rstrip()
        self._found.thinking += words
        self._begun |= bool(words)
        self._buffer = "" if last else self._buffer[len(words) :]
        return False

    def _answer(self, last: bool) -> bool:
        if self._bare:
            self._buffer = self._buffer.lstrip()
            self._bare = not self._buffer
        starts = [at for tag in self._tags if (at := self._buffer.find(tag)) >= 0]
        if starts:
            self._say(len(self._buffer[: min(starts)].rstrip()))
            self._rule = self._call
            return True
        certain = len(self._buffer) if last else _certain(self._buffer, self._tags)
        if self._tags and not last:
            certain = len(self._buffer[:certain].rstrip())
        self._say(certain)
        return False

    def _call(self, last: bool) -> bool:
        """The buffer holds white space, an opening tag and what follows."""
        block = self._buffer.lstrip()
        tag = next(t for t in self._tags if block.startswith(t))
        end = self._buffer.find(_BLOCKS[tag])
        if end < 0 and not last:
            return False
        inside = block[len(tag) :].partition(_BLOCKS[tag])[0]
        read = _json_calls if tag == "<TOOLCALL>" else self._xml_calls
        calls = read(inside) if end >= 0 else None
        size = end + len(_BLOCKS[tag]) if end >= 0 else len(self._buffer)
        if calls is None:
            self._say(size)
        else:
            self._found.tool_calls += calls
            self._buffer = self._buffer[size:]
            self._bare = True
        self._rule = self._answer
        return True

    def _say(self, count: int) -> None:
        self._found.text += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _xml_calls(self, inside: str) -> list[ToolCall] | None:
        calls = []
        functions = _all(_FUNCTION, inside)
        for name, body in functions or ():
            parameters = _all(_PARAMETER, body)
            if parameters is None:
                return None
            schema = self._schemas.get(name, {})
            calls.append(ToolCall(name, {k: _value(v, schema.get(k)) for k, v in parameters}))
        return calls or None


def parse_reply(text: str, thinking: bool, tools: Sequence[Mapping[str, Any]] = ()) -> Reply:
    """The parts of a whole reply."""
    parser = ReplyParser(thinking, tools)
    start, end = parser.push(text), parser.finish()
    calls = start.tool_calls + end.tool_calls
    return Reply(start.thinking + end.thinking, start.text + end.text, calls)


def schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By function, the JSON schema of each of its parameters."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        found[str(function.get("name"))] = dict(parameters.get("properties") or {})
    return found


def _certain(text: str, tags: Sequence[str]) -> int:
    """Length of `text` less the longest end that one of the tags may begin with."""
    longest = min(len(text), max(map(len, tags), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(tag.startswith(text[len(text) - size :]) for tag in tags):
            return len(text) - size
    return len(text)


def _all(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """(name, body) of every match, None where anything else stands in between."""
    found, at = [], 0
    while text[at:].strip():
        match = pattern.match(text, at)
        if match is None:
            return None
        found.append((match[1], match[2]))
        at = match.end()
    return found


def _value(text: str, schema: Any) -> Any:
    """A parameter's bare text as its schema has it; as JSON, or else text, where none says so."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_calls(inside: str) -> list[ToolCall] | None:
    try:
        data = json.loads(inside)
        calls = []
        for call in data if isinstance(data, list) else [data]:
            given = call.get("arguments", {})
            given = json.loads(given) if isinstance(given, str) else given
            if not isinstance(call["name"], str) or not isinstance(given, dict):
                return None
            calls.append(ToolCall(call["name"], given))
    except (ValueError, KeyError, AttributeError):
        return None
    return calls or None
