"""What the command line asks to be answered, checked before anything heavy is loaded."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import NemotritonError, RequestError
from nemotriton.generate.options import DEFAULTS
from nemotriton.text.batch_file import BatchLine, read_batch
from nemotriton.text.tokens import Tokenizer


class UsageError(NemotritonError):
    """The command line, or a file it names, asks for something that makes no sense: exit code 2."""


@dataclass(frozen=True)
class Work:
    """Prompts (or a batch file and where its answers go) and how they become tokens.

    `sampling` are the parameters the command line states, under their names in SamplingParams.
    """

    prompts: list[str]
    lines: list[BatchLine] = field(default_factory=list)
    out: Path | None = None
    system: str | None = None
    raw: bool = False
    template_args: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    stop_tokens: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.raw and (self.system is not None or self.template_args):
            wrong = "--system" if self.system is not None else "--template-arg"
            raise UsageError(f"{wrong} goes into a chat template, which --raw leaves out.")
        if self.lines and self.system is not None:
            raise UsageError("--system does not reach into a batch: put it into its messages.")
        talk = next((line.number for line in self.lines if line.messages is not None), None)
        if self.raw and talk is not None:
            raise UsageError(
                f"--raw, but line {talk} of the batch is a conversation: leave it out."
            )
        try:
            self.params(DEFAULTS)
        except RequestError as problem:
            raise UsageError(str(problem)) from None
        for line in self.lines:
            try:
                self.params(DEFAULTS, own=line.params)
            except RequestError as problem:
                raise UsageError(f"--batch line {line.number}: {problem}") from None

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

    def tokens(self, prompt: str, tokenizer: Tokenizer) -> list[int]:
        """A prompt of the command line as the model reads it."""
        if self.raw or not tokenizer.chat_template:
            if self.system is not None or self.template_args:
                raise UsageError(
                    f"--system and --template-arg need a chat template; this model has none "
                    f"({tokenizer.description})."
                )
            return tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return tokenizer.apply_chat(messages, template_args=self.template_args)

    def batch_tokens(self, line: BatchLine, tokenizer: Tokenizer) -> list[int]:
        """A batch line as the model reads it. A `prompt` of a plain line is a user's turn."""
        if isinstance(line.prompt, list):
            return line.prompt
        if line.messages is not None:
            args = self.template_args | line.template_args
            return tokenizer.apply_chat(line.messages, template_args=args)
        if line.url:
            return tokenizer.encode(line.prompt or "")
        return self.tokens(line.prompt or "", tokenizer)


def _token(text: str, tokenizer: Tokenizer) -> int:
    found = int(text) if text.isdecimal() else tokenizer.id_of(text)
    if found is None:
        raise UsageError(f"--stop-token {text!r} is no token of this model: give its id or text.")
    return found


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
        try:
            return [], read_batch(batch)
        except RequestError as problem:
            raise UsageError(str(problem)) from None
    found = [_stdin() if p == "-" else p for p in prompts or ()]
    found += [_stdin() if str(p) == "-" else _file(p) for p in files or ()]
    if not prompts and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt: give --prompt TEXT, --file PATH, or pipe text in.")
        found = [_stdin()]
    if "" in found:
        raise UsageError("a prompt is empty: give at least one character.")
    return found, []


def _stdin() -> str:
    return _text(sys.stdin.buffer.read(), "stdin")


def _file(path: Path) -> str:
    try:
        return _text(path.read_bytes(), str(path))
    except OSError as problem:
        raise UsageError(f"--file {path}: {problem.strerror}.") from None


def _text(data: bytes, name: str) -> str:
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
