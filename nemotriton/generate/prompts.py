"""What the command line asks to be answered, checked before anything heavy is loaded."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemotriton.commandline import UsageError
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError
from nemotriton.generate.options import DEFAULTS
from nemotriton.text.batch_file import BatchLine, read_batch
from nemotriton.text.chat import ChatPrompt, chat_prompt
from nemotriton.text.structured import check_grammar
from nemotriton.text.template import Message
from nemotriton.text.tokens import Tokenizer

_PARAMS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs"),
    *("prompt_logprobs", "regex"),
)


@dataclass(frozen=True)
class Work:
    """Prompts (or a batch file and where its answers go) and how they become tokens.

    raw: None leaves it to the model; one that `completes` goes on with a text unless something here
    is for a chat. `sampling` are the parameters the command line states, under their names in
    SamplingParams. interactive: prompts are the first turns of a conversation.
    """

    prompts: list[str]
    lines: list[BatchLine] = field(default_factory=list)
    out: Path | None = None
    system: str | None = None
    raw: bool | None = None
    template_args: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    stop_tokens: list[str] = field(default_factory=list)
    interactive: bool = False
    think: bool | None = None
    tools: list[Any] | None = None
    completes: bool = False

    def __post_init__(self) -> None:
        if self.raw and self._for_chat:
            raise UsageError(f"{self._for_chat} goes into a chat template, which --raw leaves out.")
        budget = self.sampling.get("thinking_token_budget")
        if self.think is False and budget is not None:
            raise UsageError("--think-budget limits a thought, which --no-think leaves out.")
        if self.lines and self.system is not None:
            raise UsageError("--system does not reach into a batch: put it into its messages.")
        talk = next((line.number for line in self.lines if line.messages is not None), None)
        if self.raw and talk is not None:
            raise UsageError(
                f"--raw, but line {talk} of the batch is a conversation: leave it out."
            )
        self._check({})
        for line in self.lines:
            try:
                self._check(line.params)
            except RequestError as problem:
                raise UsageError(f"--batch line {line.number}: {problem}") from None

    def _check(self, own: Mapping[str, Any]) -> None:
        """RequestError for parameters, schemas and expressions that cannot be."""
        params = self.params(DEFAULTS, own=own)
        if params.structured:
            check_grammar(params.json_schema, params.regex)

    @property
    def _for_chat(self) -> str:
        """An option that only a chat template can follow, "" if there is none."""
        given = {
            "--chat": self.interactive,
            "--system": self.system is not None,
            "--no-think" if self.think is False else "--think": self.think is not None,
            "--tools": self.tools is not None,
            "--template-arg": bool(self.template_args),
        }
        return next((name for name, there in given.items() if there), "")

    def params(
        self,
        base: SamplingParams,
        tokenizer: Tokenizer | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        """One request's parameters: its own, else the command line's, else `base`."""
        merged = {**self.sampling, **(own or {})}
        if self.stop_tokens and tokenizer is not None:
            ids = [_token(text, tokenizer) for text in self.stop_tokens]
            merged["stop_token_ids"] = [*ids, *merged.get("stop_token_ids", ())]
        return replace(base, **merged)

    def prompt(self, text: str, tokenizer: Tokenizer) -> list[int] | ChatPrompt:
        """A prompt of the command line as the model reads it."""
        wanted = self._for_chat or ("--no-raw" if self.raw is False else "")
        budget = self.sampling.get("thinking_token_budget")
        plain = self.completes and not wanted and budget is None
        if self.raw or tokenizer.chat_template is None or (self.raw is None and plain):
            if wanted:
                raise UsageError(
                    f"{wanted} needs a chat template; this model has none "
                    f"({tokenizer.description})."
                )
            return tokenizer.encode(text)
        return self.chat([{"role": "user", "content": text}], tokenizer)

    def chat(self, messages: Sequence[Message], tokenizer: Tokenizer) -> ChatPrompt:
        """A conversation, behind the system prompt of the command line, as the model reads it."""
        if tokenizer.chat_template is None:
            raise UsageError(
                f"--chat needs a chat template; this model has none ({tokenizer.description})."
            )
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return chat_prompt(
            tokenizer, [*system, *messages], self.think, self.tools, self.template_args
        )

    def batch_prompt(self, line: BatchLine, tokenizer: Tokenizer) -> list[int] | ChatPrompt:
        """A batch line as the model reads it. A `prompt` of a plain line is a user's turn."""
        if isinstance(line.prompt, list):
            return line.prompt
        if line.messages is not None:
            args = self.template_args | line.template_args
            tools = self.tools if line.tools is None else line.tools
            think = None if "enable_thinking" in line.template_args else self.think
            return chat_prompt(tokenizer, line.messages, think, tools, args)
        if line.url:
            return tokenizer.encode(line.prompt or "")
        return self.prompt(line.prompt or "", tokenizer)


def _token(text: str, tokenizer: Tokenizer) -> int:
    found = int(text) if text.isdecimal() else tokenizer.id_of(text)
    if found is None:
        raise UsageError(f"--stop-token {text!r} is no token of this model: give its id or text.")
    return found


def work_of(given: Mapping[str, Any]) -> Work:
    """What the command line's options, by name, ask for."""
    stated = {k: v for k in _PARAMS if (v := given[k]) is not None and v is not False}
    if given["json_schema"] is not None:
        stated["json_schema"] = _schema(given["json_schema"])
    if given["think_budget"] is not None:
        stated["thinking_token_budget"] = given["think_budget"]
    lines: list[BatchLine] = []
    if given["chat"]:
        prompts = _first_turns(given)
    else:
        prompts, lines = gather(given["prompt"], given["file"], given["batch"], given["out"])
    return Work(
        prompts=prompts,
        lines=lines,
        out=given["out"],
        system=given["system"],
        raw=given["raw"],
        template_args=template_args(given["template_arg"]),
        sampling=stated,
        stop_tokens=list(given["stop_token"] or ()),
        interactive=given["chat"],
        think=given["think"],
        tools=_tools(given["tools"]),
        completes=given["model"] is None or given["model"].startswith("preset:"),
    )


def gather(
    prompts: list[str] | None, files: list[Path] | None, batch: Path | None, out: Path | None
) -> tuple[list[str], list[BatchLine]]:
    """The prompts, from options or from stdin if it is piped, or the lines of the batch."""
    if (batch is None) != (out is None):
        there, missing = ("--out", "--batch") if batch is None else ("--batch", "--out")
        raise UsageError(f"{there} needs {missing} as well.")
    if batch is not None and out is not None:
        if prompts or files:
            raise UsageError("--batch brings its own prompts: leave out --prompt and --file.")
        if out.exists() and batch.exists() and out.samefile(batch):
            raise UsageError(f"--out {out} is the batch file itself: give another path.")
        if not out.parent.is_dir():
            raise UsageError(f"--out {out}: there is no folder {out.parent}; make it first.")
        try:
            return [], read_batch(batch)
        except RequestError as problem:
            raise UsageError(str(problem)) from None
    found = [_stdin() if p == "-" else p for p in prompts or ()]
    found += [_stdin() if str(p) == "-" else _file(p) for p in files or ()]
    if not prompts and not files:
        piped = sys.stdin is not None and not sys.stdin.isatty()
        found = [_stdin()] if piped else [""]
        if found == [""]:
            raise UsageError("no prompt: give --prompt TEXT, --file PATH, or pipe text in.")
    if "" in found:
        raise UsageError("a prompt is empty: give at least one character.")
    return found, []


def _first_turns(given: Mapping[str, Any]) -> list[str]:
    """The prompts; UsageError for options that a conversation at the keyboard has no use for."""
    for name in ("file", "batch", "out", "json", "logprobs", "prompt_logprobs"):
        value = given[name]
        if value is not None and value is not False and value not in ([], ()):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} does not go with --chat: leave one of them out.")
    if "-" in (given["prompt"] or ()):
        raise UsageError("--prompt - reads stdin, from which --chat takes its turns: leave it out.")
    return list(given["prompt"] or ())


def _schema(given: str) -> str:
    """A JSON schema that stands on the command line, or in the file it names."""
    if given.lstrip()[:1] in ("{", "[", '"'):
        return given
    return _file(Path(given), "--json-schema")


def _tools(path: Path | None) -> list[Any] | None:
    """The JSON list of a --tools file."""
    if path is None:
        return None
    try:
        found = json.loads(_file(path, "--tools"))
    except ValueError as problem:
        raise UsageError(f"--tools {path} is not JSON: {problem}.") from None
    if not isinstance(found, list) or not found:
        raise UsageError(f"--tools {path} holds no list of functions: give at least one.")
    return found


def _stdin() -> str:
    return text_of(sys.stdin.buffer.read(), "stdin")


def _file(path: Path, option: str = "--file") -> str:
    try:
        return text_of(path.read_bytes(), str(path))
    except OSError as problem:
        what = f"{option} {path}: {problem.strerror}. Name a file that can be read."
        raise UsageError(what) from None


def text_of(data: bytes, name: str) -> str:
    """UTF-8, less the final newline that `echo` and editors add."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UsageError(f"{name} is not UTF-8 at byte {problem.start}: convert it.") from None
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def template_args(pairs: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value that reads as JSON (false, 3) is that, else it is text."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--template-arg {pair!r}: write NAME=VALUE.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
