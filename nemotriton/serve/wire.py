"""Outputs of the engine in OpenAI's words: whole answers, and chunks of a stream."""

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from nemotriton.engine.outputs import CompletionOutput, Delta, RequestOutput
from nemotriton.serve.loop import BAD_ENDS, Job
from nemotriton.text.answers import chat_logprobs, completion_logprobs
from nemotriton.text.reply import ToolCall

Json = dict[str, Any]


class Voice:
    """Speaks for one request: identity, model, and what a stream has already said.

    chat: of the two endpoints. choices: completions a prompt. usage: a stream ends with it.
    """

    def __init__(self, model: str, chat: bool, choices: int, usage: bool) -> None:
        self._chat = chat
        self._choices = choices
        self._usage = usage
        self._calls: dict[int, int] = {}  # by choice, those that a stream has sent
        self._begun: set[int] = set()
        self._sent: dict[int, int] = {}  # by choice, characters whose log-probabilities were sent
        kind = "chat.completion" if chat else "text_completion"
        self._head: Json = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_head = self._head | {"object": kind + (".chunk" if chat else "")}

    def whole(self, outputs: list[RequestOutput], job: Job) -> Json:
        """The answer to a request that is not streamed."""
        choices = [
            self._choice(i * self._choices + c.index, c)
            for i, output in enumerate(outputs)
            for c in output.outputs
        ]
        return self._head | {"choices": choices, "usage": usage(job)}

    def _choice(self, index: int, completion: CompletionOutput) -> Json:
        reason = completion.finish_reason
        found: Json = {"index": index, "finish_reason": reason}
        if self._chat:
            message: Json = {"role": "assistant", "content": completion.text}
            message |= _thought(completion.thinking)
            if completion.tool_calls:
                message["tool_calls"] = [_call(call) for call in completion.tool_calls]
                found["finish_reason"] = "tool_calls" if reason == "stop" else reason
                message["content"] = completion.text or None
            found |= {"message": message, "logprobs": chat_logprobs(completion)}
        else:
            found |= {"text": completion.text, "logprobs": completion_logprobs(completion)}
        return found | {"stop_reason": completion.stop_reason}

    def chunks(self, prompt: int, delta: Delta) -> Iterator[Json]:
        """What a stream says about one delta: nothing where it brings no text."""
        index = prompt * self._choices + delta.index
        reason = None if delta.finish_reason in BAD_ENDS else delta.finish_reason
        if self._chat:
            body = self._chat_delta(index, delta)
            if index not in self._begun:
                self._begun.add(index)
                body = {"role": "assistant", "content": "", **body}
            if index in self._calls and reason == "stop":
                reason = "tool_calls"
            found: Json = {"delta": body, "logprobs": chat_logprobs(delta)}
        else:
            body = {"text": delta.text} if delta.text else {}
            found = {"text": delta.text, "logprobs": self._text_logprobs(index, delta)}
        if body or reason is not None or found["logprobs"] is not None:
            end: Json = {"index": index, "finish_reason": reason}
            if reason is not None:
                end["stop_reason"] = delta.stop_reason
            yield self._chunk([found | end])

    def _chat_delta(self, index: int, delta: Delta) -> Json:
        body = _thought(delta.thinking)
        if delta.text:
            body["content"] = delta.text
        if delta.tool_calls:
            first = self._calls.get(index, 0)
            self._calls[index] = first + len(delta.tool_calls)
            body["tool_calls"] = [
                {"index": first + i, **_call(call)} for i, call in enumerate(delta.tool_calls)
            ]
        return body

    def _text_logprobs(self, index: int, delta: Delta) -> Json | None:
        found = completion_logprobs(delta)
        if found is not None:
            start = self._sent.get(index, 0)
            found["text_offset"] = [start + offset for offset in found["text_offset"]]
            self._sent[index] = start + sum(len(token or "") for token in found["tokens"])
        return found

    def last(self, job: Job) -> Iterator[Json]:
        """What a stream says behind its choices."""
        if self._usage:
            yield self._chunk_head | {"choices": [], "usage": usage(job)}

    def _chunk(self, choices: list[Json]) -> Json:
        found = self._chunk_head | {"choices": choices}
        return found | {"usage": None} if self._usage else found


def usage(job: Job) -> Json:
    """Tokens read and written, and how many of the former an earlier prompt spared."""
    given, made = job.prompt_tokens, job.output_tokens
    return {
        "prompt_tokens": given,
        "completion_tokens": made,
        "total_tokens": given + made,
        "prompt_tokens_details": {"cached_tokens": sum(group.reused for group in job.groups)},
    }


def encode(value: Mapping[str, Any]) -> bytes:
    """JSON as UTF-8, whatever the text holds."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def _thought(text: str | None) -> Json:
    """`reasoning` is vLLM's newer name for what others read as `reasoning_content`."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(call: ToolCall) -> Json:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": "call_" + secrets.token_hex(12),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
