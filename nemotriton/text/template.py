"""The checkpoint's own chat template: where it lies, what it can switch, rendering and refusals."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemotriton.errors import ConfigError, RequestError, require
from nemotriton.text.generation_config import read_json

FAMILY = Path(__file__).parents[1] / "tiny"  # whose template is written as the family's are
Message = Mapping[str, Any]
# what a template that meets other types than it expects makes Python raise
_MISREAD = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


def read_template(directory: Path | None) -> str | None:
    """The template beside a checkpoint: its own file, or a key of tokenizer_config.json."""
    if directory is None:
        return None
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"{file} cannot be read: {problem}. Copy it anew.") from None
    found = read_json(directory, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several under names; transformers takes this one
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def render(
    template: str, messages: Sequence[Message], generation: bool, args: Mapping[str, object]
) -> str:
    """The conversation as the template writes it, by the library it was written for."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with refusals():
        texts, _ = render_jinja_template(
            [[dict(m) for m in messages]],
            chat_template=template,
            add_generation_prompt=generation,
            **dict(args),
        )
    return str(texts[0])


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What a template raises becomes a RequestError."""
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, *_MISREAD) as problem:
        raise RequestError(f"the chat template refused the conversation: {problem}") from None


def require_messages(messages: Sequence[Message]) -> None:
    """RequestError unless these are messages a template can read."""
    require(len(messages) > 0, "a conversation without messages. Give at least one.", RequestError)
    for i, message in enumerate(messages):
        known = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        require(known, f"message {i} is {message!r}: give it a role and a content.", RequestError)


def switch_thinking(
    template: str, messages: Sequence[Message], args: Mapping[str, object], think: bool | None
) -> tuple[list[Message], dict[str, object]]:
    """Messages and template variables that make the template open a thought, or close it at once.

    Nemotron 3 reads the variable enable_thinking, Nano v2 the last /think or /no_think in a system
    or user text. think: None is on, unless messages or variables say otherwise already.
    RequestError where the template knows neither and `think` is not None.
    """
    if "enable_thinking" in template:
        if think is not None or "enable_thinking" not in args:
            args = {**args, "enable_thinking": think is not False}
        return list(messages), dict(args)
    require(
        think is None or "/no_think" in template,
        f"think={think}, but the chat template of this model has no switch for thinking: leave it "
        "out.",
        RequestError,
    )
    if think is None:
        return list(messages), dict(args)
    # the last word counts, so that it goes behind what the conversation says itself
    word = "/think" if think else "/no_think"
    last = max((i for i, m in enumerate(messages) if m["role"] in ("system", "user")), default=None)
    if last is None:
        return [{"role": "system", "content": word}, *messages], dict(args)
    told = {**messages[last], "content": f"{messages[last].get('content') or ''} {word}".strip()}
    return [*messages[:last], told, *messages[last + 1 :]], dict(args)
