"""Request bodies: OpenAI's fields, and vLLM's names for what OpenAI does not have.

A field that is null counts as left out; one that is unknown is an error, not ignored, except those
in a message, which clients send back as they got it.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError, require

_MOST_CHOICES = 128
_DEPTH = 64  # of nesting; a schema's reader recurses
_SCHEMA_CHARS = 64 * 1024
_RESERVED = {  # arguments of the renderer, not variables of a template
    *("chat_template", "conversation", "conversations", "messages", "tools", "documents"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "add_generation_prompt", "template"),
    *("continue_final_message", "chat_template_kwargs", "self", "kwargs"),
}
_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "regex"),
    "thinking_token_budget",
)
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Text = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Named(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Named


class Message(BaseModel):
    """One turn; unknown fields are dropped."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def plain(self) -> dict[str, Any]:
        """As templates read it: text in one piece, arguments as values."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if content is not None else "",
        }
        thought = self.reasoning_content or self.reasoning
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        optional["reasoning_content"] = thought
        found |= {key: value for key, value in optional.items() if value is not None}
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return found


class _Function(BaseModel):
    name: Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


class _JsonSchema(BaseModel):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class _ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StreamOptions(BaseModel):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Asked(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    thinking_token_budget: Count | None = None
    response_format: _ResponseFormat | None = None
    # without bearing on the answer, or only where they ask for nothing
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def wants_usage(self) -> bool:
        """True where a stream ends with a count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def sampling(self, defaults: SamplingParams, most: int | None) -> SamplingParams:
        """`defaults` with what is asked for; most: tokens of an answer. RequestError if it cannot
        be."""
        given = {name: v for name in _SAMPLING if (v := getattr(self, name)) is not None}
        given |= self._own(most) | self._form()
        wanted = given["max_tokens"] or 0
        require(
            most is None or wanted <= most,
            f"max_tokens={wanted} is more than this server's limit of {most}: lower it.",
            RequestError,
        )
        names = SamplingParams.__dataclass_fields__
        return SamplingParams(**{name: getattr(defaults, name) for name in names} | given)

    def _own(self, most: int | None) -> dict[str, Any]:
        """What the endpoints say differently; `max_tokens` is always in it."""
        raise NotImplementedError

    def _form(self) -> dict[str, Any]:
        form = self.response_format
        if form is None or form.type == "text":
            return {}
        schema: dict[str, Any] = {"type": "object"}
        if form.type == "json_schema":
            require(
                form.json_schema is not None,
                'response_format without a schema: give {"type": "json_schema", "json_schema": '
                '{"schema": {...}}}.',
                RequestError,
            )
            assert form.json_schema is not None
            schema = form.json_schema.schema_
            _check_schema(schema)
        return {"json_schema": schema}


class ChatRequest(Asked):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[_Tool], Field(max_length=256)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, str | bool | int | float | None] | None = None

    def _own(self, most: int | None) -> dict[str, Any]:
        limit = self.max_completion_tokens or self.max_tokens or most
        return {
            "max_tokens": limit,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """Tools the answer may call."""
        if not self.tools or self.tool_choice == "none":
            return None
        found = [tool.model_dump(exclude_none=True) for tool in self.tools]
        for tool in found:
            parameters = tool["function"].get("parameters", {})
            properties = parameters.get("properties")
            name = tool["function"]["name"]
            require(
                isinstance(properties, dict | None) and _depth(parameters) <= _DEPTH,
                f"the parameters of tool {name!r} are no JSON schema of an object: correct them.",
                RequestError,
            )
        return found

    @property
    def variables(self) -> dict[str, Any]:
        """Of the template; RequestError for what is none."""
        found = self.chat_template_kwargs or {}
        for name in found:
            require(
                name.isidentifier() and name not in _RESERVED,
                f"chat_template_kwargs has {name!r}, which is no variable of a template: remove "
                "it.",
                RequestError,
            )
        return dict(found)


class CompletionRequest(Asked):
    """Body of /v1/completions."""

    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=_MOST_CHOICES)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=_MOST_CHOICES),
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    def _own(self, most: int | None) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens or min(16, most or 16), "logprobs": self.logprobs}

    @property
    def prompts(self) -> list[Any]:
        """Each prompt: a text or token ids."""
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            return list(self.prompt)
        return [self.prompt]


def _arguments(given: str | dict[str, Any]) -> Any:
    """A call's arguments as values; an empty object where they are no JSON object."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return {}
    return given if isinstance(given, dict) else {}


def _check_schema(schema: dict[str, Any]) -> None:
    deep = _depth(schema)
    size = len(json.dumps(schema)) if deep <= _DEPTH else 0
    require(
        deep <= _DEPTH and size <= _SCHEMA_CHARS,
        f"the JSON schema has more than {_DEPTH} levels or {_SCHEMA_CHARS:,} characters: simplify "
        "it.",
        RequestError,
    )


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion."""
    levels, row = 0, [value]
    while row and levels <= _DEPTH:
        levels += 1
        row = [
            inner
            for v in row
            if isinstance(v, dict | list)
            for inner in (v.values() if isinstance(v, dict) else v)
        ]
    return levels
