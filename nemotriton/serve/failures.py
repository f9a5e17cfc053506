"""What a client is told when a request does not succeed: OpenAI's error object and its status."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from nemotriton.errors import NemotritonError, nearest

_LONG = 100  # characters of a path in a message
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}


class Failure(Exception):
    """An answer that is an error.

    status: of HTTP. message: what happened and what would do. code: for programs. param: the field
    at fault. retry_after: seconds, sent as a header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Beside the error object."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def refusal(problem: NemotritonError) -> Failure:
    """A request that the engine cannot serve, whoever asks."""
    message = str(problem)
    code = "context_length_exceeded" if "max_context" in message else None
    return Failure(400, message, code)


def lost(status: int, method: str, path: str, ways: Mapping[str, str]) -> Failure:
    """A path that there is not, or not with this method; ways: the method of each path."""
    if status == 405 and path in ways:
        message = f"{path} does not take {method}: use {ways[path]}."
        return Failure(405, message, "method_not_allowed")
    near = nearest(path, ways)
    hint = f" Did you mean {near}?" if near else ""
    known = ", ".join(f"{ways[known]} {known}" for known in ways)
    message = f"there is no {method} {path[:_LONG]} here.{hint} There are {known}."
    return Failure(status, message, "not_found")


def malformed(errors: Sequence[Mapping[str, Any]]) -> Failure:
    """A body that is not what the schema says, from pydantic's list of errors."""
    # where a field may be several things, the deepest is about the one that was meant
    first = max(errors, key=lambda e: len(e.get("loc", ())), default={})
    where = [str(part) for part in first.get("loc", ()) if part != "body"]
    # what follows a field of several types is pydantic's name of the one it tried
    named = itertools.takewhile(lambda part: part.isidentifier() or part.isdecimal(), where)
    param = ".".join(named) or None
    message = str(first.get("msg", "the body cannot be read"))
    if first.get("type") == "extra_forbidden":
        return Failure(400, f"{param} is not supported: leave it out.", "unknown_parameter", param)
    if first.get("type") == "json_invalid":
        return Failure(400, f"the body is not JSON: {message}. Send a JSON object.", "invalid_json")
    if first.get("type") == "model_attributes_type" and param is None:
        header = "Content-Type: application/json"
        return Failure(400, f"the body is no JSON object: send one, with {header}.", "invalid_json")
    remedy = "Send a JSON object, as application/json." if param is None else "Correct it."
    return Failure(400, f"{param or 'the body'}: {message}. {remedy}", "invalid_value", param)
