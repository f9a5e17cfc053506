"""A finished request as JSON: our own object (`--json`, plain batch lines) and OpenAI's two.

Outputs are read by vLLM's attribute names, whoever made them.
"""

import json
import time
from typing import Any

from nemotriton.text.batch_file import CHAT, BatchLine

LOWEST = -9999.0  # JSON has no minus infinity; vLLM's server writes this


def answer(output: Any, name: str | None = None) -> dict[str, Any]:
    """What became of one request; keys without a value are left out."""
    completion = output.outputs[0]
    found = {
        "id": name,
        "prompt": output.prompt,
        "thinking": completion.thinking,
        "text": completion.text,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in completion.tool_calls]
        or None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": _positions(completion.token_ids, completion.logprobs),
        "prompt_logprobs": _positions(output.prompt_token_ids, output.prompt_logprobs),
    }
    return {key: value for key, value in found.items() if value is not None}


def failure(line: BatchLine, message: str) -> dict[str, Any]:
    """The answer line of a request that could not be served."""
    if not line.url:
        return {"id": line.id, "error": message}
    problem = {"code": "invalid_request", "message": message}
    return {"id": f"batch-{line.id}", "custom_id": line.id, "response": None, "error": problem}


def batch_answer(output: Any, line: BatchLine, model: str) -> dict[str, Any]:
    """The answer line of a batch, in the format its request line was in."""
    if not line.url:
        return answer(output, line.id)
    response = {
        "status_code": 200,
        "request_id": output.request_id,
        "body": _body(output, line.url, model),
    }
    return {"id": f"batch-{line.id}", "custom_id": line.id, "response": response, "error": None}


def _body(output: Any, url: str, model: str) -> dict[str, Any]:
    completion = output.outputs[0]
    given, made = len(output.prompt_token_ids), len(completion.token_ids)
    choice: dict[str, Any] = {"index": 0, "finish_reason": completion.finish_reason}
    if url == CHAT:
        choice["message"] = _message(completion)
        if completion.tool_calls and completion.finish_reason == "stop":
            choice["finish_reason"] = "tool_calls"
        choice["logprobs"] = chat_logprobs(completion)
    else:
        choice["text"] = completion.text
        choice["logprobs"] = completion_logprobs(completion)
    return {
        "id": output.request_id,
        "object": "chat.completion" if url == CHAT else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": given,
            "completion_tokens": made,
            "total_tokens": given + made,
        },
    }


def _message(completion: Any) -> dict[str, Any]:
    """`reasoning` is vLLM's newer name for what others read as `reasoning_content`."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if completion.thinking:
        message["reasoning"] = message["reasoning_content"] = completion.thinking
    calls = [
        {
            "id": f"call-{i}",
            "type": "function",
            "function": {"name": c.name, "arguments": json.dumps(c.arguments, ensure_ascii=False)},
        }
        for i, c in enumerate(completion.tool_calls)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _positions(ids: Any, logprobs: Any) -> list[Any] | None:
    """For each token its logprob and the most likely ones; None for a prompt's first token."""
    if logprobs is None:
        return None
    return [
        None
        if among is None
        else {
            "token_id": token,
            "token": among[token].decoded_token,
            "logprob": _finite(among[token].logprob),
            "rank": among[token].rank,
            "top": [_alternative(i, p) for i, p in _ranked(among)],
        }
        for token, among in zip(ids, logprobs, strict=True)
    ]


def _alternative(token: int, entry: Any) -> dict[str, Any]:
    return {"token_id": token, "token": entry.decoded_token, "logprob": _finite(entry.logprob)}


def _ranked(among: Any) -> list[tuple[int, Any]]:
    return sorted(among.items(), key=lambda item: (-item[1].logprob, item[0]))


def _finite(logprob: float) -> float:
    return max(float(logprob), LOWEST)


def chat_logprobs(completion: Any) -> dict[str, Any] | None:
    """Of a completion, or of a part of it, as OpenAI's chat has them; None without any."""
    positions = _positions(completion.token_ids, completion.logprobs)
    if positions is None:
        return None
    return {
        "content": [{**_openai(p), "top_logprobs": list(map(_openai, p["top"]))} for p in positions]
    }


def _openai(entry: dict[str, Any]) -> dict[str, Any]:
    token = entry["token"] or ""
    return {"token": token, "logprob": entry["logprob"], "bytes": list(token.encode())}


def completion_logprobs(completion: Any) -> dict[str, Any] | None:
    """The same as OpenAI's plain completions have them."""
    positions = _positions(completion.token_ids, completion.logprobs)
    if positions is None:
        return None
    starts = [0]
    for p in positions:
        starts.append(starts[-1] + len(p["token"] or ""))
    return {
        "tokens": [p["token"] for p in positions],
        "token_logprobs": [p["logprob"] for p in positions],
        "top_logprobs": [{t["token"]: t["logprob"] for t in p["top"]} for p in positions],
        "text_offset": starts[:-1],
    }
