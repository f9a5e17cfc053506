"""Batch files: requests in, one JSON object a line; answers out, in the same order, resumable.

A request line is an OpenAI batch line (`custom_id`, `url`, `body`) or a plain object with `prompt`
or `messages`, an optional `id`, and sampling parameters under their own names. An answer line is
appended by a single write, so that a stopped run leaves whole lines and at most one torn end.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from nemotriton.errors import RequestError, nearest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# key of a line -> name in SamplingParams
_PARAMS = {
    name: name
    for name in (
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop"),
        *("stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "prompt_logprobs", "include_stop_str_in_output"),
        *("skip_special_tokens", "json_schema", "regex", "thinking_token_budget"),
    )
} | {"max_completion_tokens": "max_tokens"}
# what OpenAI clients send that has no bearing on the answer
_IGNORED = {"model", "user", "metadata", "store"}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request: `prompt` (text or token ids) or `messages`; `url` for OpenAI lines, else "".

    tools: functions a conversation's answer may call, None where the line has none.
    """

    number: int
    id: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    params: dict[str, Any] = field(default_factory=dict)
    template_args: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    tools: list[Any] | None = None


def read_batch(path: Path) -> list[BatchLine]:
    """Every request of a file; RequestError names the line, what is wrong and what would do."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise RequestError(
            f"{path} cannot be read: {problem.strerror}. Name a file that can."
        ) from None
    except UnicodeDecodeError as problem:
        raise RequestError(f"{path} cannot be read: {problem}. Give a UTF-8 file.") from None
    lines: list[BatchLine] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            request = _parse(line, number)
            if request.id in seen:
                _refuse(f"the id {request.id!r} is that of line {seen[request.id]} too")
        except RequestError as problem:
            raise RequestError(f"{path} line {number}: {problem}") from None
        seen[request.id] = number
        lines.append(request)
    if not lines:
        raise RequestError(f"{path} holds no request. Give one JSON object a line.")
    return lines


def _parse(line: str, number: int) -> BatchLine:
    try:
        data = json.loads(line)
    except ValueError as problem:
        _refuse(f"not JSON: {problem}", "Give one JSON object a line.")
    if not isinstance(data, dict):
        _refuse(f"a {type(data).__name__}", "Give one JSON object a line.")
    if "body" not in data and "custom_id" not in data:
        name = data.pop("id", f"line-{number}")
        return _request(data, number, _id(name, "id"), url="")
    known = {"custom_id", "method", "url", "body"}
    if unknown := sorted(set(data) - known):
        _refuse(f"unknown key {unknown[0]!r}", f"A batch line has {', '.join(sorted(known))}.")
    url, body = data.get("url"), data.get("body")
    if url not in (CHAT, COMPLETIONS):
        _refuse(f"url {url!r} is not served", f"Use {CHAT} or {COMPLETIONS}.")
    if data.get("method", "POST") != "POST":
        _refuse(f"method {data['method']!r}", "Use POST.")
    if not isinstance(body, dict):
        _refuse(f"body is {body!r}", "Give the request's JSON object.")
    wanted, other = ("messages", "prompt") if url == CHAT else ("prompt", "messages")
    if other in body:
        _refuse(f"{other} for {url}", f"Give {wanted}.")
    return _request(dict(body), number, _id(data.get("custom_id"), "custom_id"), url)


def _request(body: dict[str, Any], number: int, name: str, url: str) -> BatchLine:
    prompt, messages = body.pop("prompt", None), body.pop("messages", None)
    if (prompt is None) == (messages is None):
        keys = f": its keys are {', '.join(body)}" if body else ""
        _refuse(f"not exactly one of prompt and messages{keys}", "Give one.")
    if prompt is not None:
        _check_prompt(prompt)
    elif not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        _refuse(f"messages is {messages!r}", 'Give a list of {"role": ..., "content": ...}.')
    template_args = body.pop("chat_template_kwargs", {})
    if not isinstance(template_args, dict):
        _refuse(f"chat_template_kwargs is {template_args!r}", "Give an object.")
    tools = body.pop("tools", None)
    if tools is not None and (messages is None or not isinstance(tools, list)):
        _refuse(f"tools is {tools!r}", "Give a list, and messages.")
    if body.pop("tool_choice", "auto") != "auto":
        _refuse("tool_choice is not 'auto'", "Leave it out.")
    if body.pop("stream", False):
        _refuse("stream is true", "A batch is not streamed: leave it out.")
    if body.pop("n", 1) != 1:
        _refuse("n is not 1", "Give the line n times, under different ids.")
    params = _logprobs(body, chat=url == CHAT) | _response_format(body)
    for key in list(body):
        if key in _PARAMS:
            params[_PARAMS[key]] = body.pop(key)
    if unknown := sorted(set(body) - _IGNORED):
        near = nearest(unknown[0], _PARAMS)
        hint = f"Did you mean {near}?" if near else "Leave it out."
        known = ", ".join(sorted(_PARAMS))
        _refuse(f"{unknown[0]!r} is not supported", f"{hint} Supported: {known}.")
    return BatchLine(number, name, prompt, messages, params, template_args, url, tools)


def _response_format(body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `response_format` as our `json_schema`."""
    form = body.pop("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    inner = form.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        _refuse(
            f"response_format is {form!r}",
            'Give {"type": "json_schema", "json_schema": {"schema": {...}}}.',
        )
    return {"json_schema": inner["schema"]}


def _logprobs(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    """OpenAI's chat spells it `logprobs: true, top_logprobs: n`; all else `logprobs: n`."""
    wanted = body.pop("logprobs", None)
    if not chat:
        return {} if wanted is None else {"logprobs": wanted}
    top = body.pop("top_logprobs", 0)
    return {"logprobs": top} if wanted else {}


def _check_prompt(prompt: object) -> None:
    ids = isinstance(prompt, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in prompt
    )
    if not isinstance(prompt, str) and not ids:
        _refuse(f"prompt is {prompt!r}", "Give a string or a list of token ids.")
    if not prompt:
        _refuse("an empty prompt", "Give at least one character or token.")


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _id(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        _refuse(f"{key} is {value!r}", "Give a string of its own for each line.")
    return value


def _refuse(problem: str, remedy: str = "Give each line its own.") -> NoReturn:
    raise RequestError(f"{problem}. {remedy}")


class BatchOutput:
    """The answer file of a batch: `done` answers are there already, the rest is appended in order.

    A last line without its end, torn by a crash, is cut off. RequestError where the file answers
    other requests than `lines`.
    """

    def __init__(self, path: Path, lines: list[BatchLine]) -> None:
        self._path = path
        self.done = self._check(lines)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as problem:
            raise RequestError(
                f"{path} cannot be written: {problem.strerror}. Give a path that can."
            ) from None

    def _check(self, lines: list[BatchLine]) -> int:
        if not self._path.exists():
            return 0
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        answers = whole.splitlines()
        if len(answers) > len(lines):
            self._differs(f"has {len(answers)} answers to {len(lines)} requests")
        for i, (answer, line) in enumerate(zip(answers, lines), 1):
            try:
                found = json.loads(answer)
                name = found.get("custom_id", found.get("id"))
            except (ValueError, AttributeError):
                self._differs(f"line {i} is no answer of ours")
            if name != line.id:
                self._differs(f"line {i} answers {name!r}, not {line.id!r}")
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        return len(answers)

    def _differs(self, problem: str) -> NoReturn:
        raise RequestError(f"{self._path} {problem}. Give another --out, or remove the file.")

    def append(self, answer: dict[str, Any]) -> None:
        """One line in one write."""
        line = (json.dumps(answer, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        try:
            whole = os.write(self._file, line) == len(line)
        except OSError:
            whole = False
        if not whole:  # what is torn is cut off when the run goes on
            raise RequestError(f"{self._path}: the disk is full. Make room and run again.")

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)
