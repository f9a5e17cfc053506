"""Outputs of the engine in OpenAI's words: whole answers, and chunks of a stream."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemotriton.engine.outputs import CompletionOutput, Delta, RequestOutput
from nemotriton.serve.loop import BAD_ENDS, Job
from nemotriton.text.answers import chat_logprobs, completion_logprobs
from nemotriton.text.reply import ToolCall

Json = dict[str, Any]
END = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
_MARK = "\0"  # stands nowhere in a choice but where a text does
_MARKED = b'"\\u0000"'


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
        self._open = b"data: " + encode(self._chunk_head)[:-1] + b',"choices":['
        self._shut = b"]" + (b',"usage":null' if usage else b"") + b"}\n\n"
        # by choice, and whether it is a thought: an event cut where its text stands
        self._frames: dict[tuple[int, bool], list[bytes]] = {}

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

    def piece(self, prompt: int, delta: Delta) -> bytes:
        """The event of a stream about one delta; empty where it brings nothing to say."""
        index = prompt * self._choices + delta.index
        begun = index in self._begun
        if not begun or delta.finish_reason or delta.tool_calls or delta.logprobs is not None:
            self._begun.add(index)
            choice = self._part(index, delta, first=not begun)
            return self._event(choice) if choice else b""
        text, thinking = delta.text, delta.thinking
        if text and thinking:  # where the one ends and the other begins
            return self._event(self._part(index, delta))
        word = text or thinking
        if not word:
            return b""
        frame = self._frames.get((index, text == ""))
        if frame is None:
            marked = replace(delta, text=text and _MARK, thinking=thinking and _MARK)
            frame = self._event(self._part(index, marked)).split(_MARKED)
            self._frames[index, text == ""] = frame
        return encode(word).join(frame)

    def _part(self, index: int, delta: Delta, first: bool = False) -> Json:
        """A choice of a chunk; {} where there is nothing to say."""
        reason = None if delta.finish_reason in BAD_ENDS else delta.finish_reason
        if self._chat:
            body = self._chat_delta(index, delta)
            if first:
                body = {"role": "assistant", "content": "", **body}
            if index in self._calls and reason == "stop":
                reason = "tool_calls"
            found: Json = {"delta": body, "logprobs": chat_logprobs(delta)}
        else:
            body = {"text": delta.text} if delta.text else {}
            found = {"text": delta.text, "logprobs": self._text_logprobs(index, delta)}
        if not body and reason is None and found["logprobs"] is None:
            return {}
        end: Json = {"index": index, "finish_reason": reason}
        if reason is not None:
            end["stop_reason"] = delta.stop_reason
        return found | end

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

    def last(self, job: Job) -> bytes:
        """What a stream says behind its choices."""
        counts = {"choices": [], "usage": usage(job)}
        return (event(self._chunk_head | counts) if self._usage else b"") + END

    def _event(self, choice: Json) -> bytes:
        return self._open + encode(choice) + self._shut


def usage(job: Job) -> Json:
    """Tokens read and written, and how many of the former an earlier prompt spared."""
    given, made = job.prompt_tokens, job.output_tokens
    return {
        "prompt_tokens": given,
        "completion_tokens": made,
        "total_tokens": given + made,
        "prompt_tokens_details": {"cached_tokens": sum(group.reused for group in job.groups)},
    }


def encode(value: Mapping[str, Any] | str) -> bytes:
    """JSON as UTF-8, whatever the text holds."""
    return _JSON.encode(value).encode("utf-8", "replace")


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
