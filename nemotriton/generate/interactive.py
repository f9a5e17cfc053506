"""A conversation at the keyboard, or from a pipe: a line is a turn, the history goes along."""

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from nemotriton.commandline import UsageError, as_typed
from nemotriton.errors import RequestError
from nemotriton.generate.prompts import Work, text_of
from nemotriton.generate.reply import BAD_ENDS, View, Writer, say_end, seeded
from nemotriton.text.template import Message

if TYPE_CHECKING:
    from nemotriton.engine.llm import LLM

_HELP = """\
/reset         forget the conversation
/system TEXT   say who the model is from now on; without TEXT, nobody
/help          this
/exit          leave; so does Ctrl-D, and Ctrl-C here. Ctrl-C in an answer stops the answer
A line that starts with a space is never a command."""


def converse(llm: "LLM", work: Work, view: View) -> int:
    """Answer turn after turn until the end of input; returns the exit code."""
    talk = _Talk(llm, work, view)
    if sys.stdin is not None and sys.stdin.isatty():
        view.console.say("/help lists the commands")
    code = 0
    for line in _lines(work.prompts):
        command, _, rest = line.partition(" ")
        if command == "/exit":
            break
        if re.fullmatch(r"/\w+", command):
            talk.obey(command, rest.strip())
        elif line.strip():
            code = max(code, talk.answer(line.removeprefix(" ")))
    return code


class _Talk:
    """The history and what is done with it."""

    def __init__(self, llm: "LLM", work: Work, view: View) -> None:
        self._llm, self._work, self._view = llm, work, view
        self._system = work.system
        self._history: list[Message] = []
        self._prompt()  # a template that cannot do what is asked for refuses here already

    def _prompt(self, turn: str = "") -> Any:
        asked = replace(self._work, system=self._system)
        return asked.chat([*self._history, {"role": "user", "content": turn}], self._llm.tokenizer)

    def obey(self, command: str, rest: str) -> None:
        """/reset, /system, /help; anything else is told to be none."""
        console = self._view.console
        if command == "/reset":
            self._history = []
            console.say("the conversation starts anew")
        elif command == "/system":
            self._system = rest or None
            console.say(f"system prompt: {rest or 'none'}")
        elif command == "/help":
            console.say(_HELP)
        else:
            console.warn(f"there is no {command}. /help lists the commands.")

    def answer(self, turn: str) -> int:
        """One turn and its reply, which both go into the history if there is an answer."""
        llm, view = self._llm, self._view
        params = seeded(self._work.params(llm.default_params, llm.tokenizer))
        try:
            prompt = self._prompt(turn)
            deltas = llm.stream(prompt, params)
        except RequestError as problem:
            view.console.error(f"{as_typed(str(problem))} The turn is dropped; /reset makes room.")
            return 1
        writer, tokens, last = Writer(view), 0, None
        with _stoppable() as stopped:
            for last in deltas:
                writer.write(last.text, last.thinking, last.tool_calls)
                tokens += len(last.token_ids)
                if stopped:
                    break
        deltas.close()
        writer.close()
        ended = last is not None and last.finish_reason is not None
        code = 0
        if ended and last is not None:
            code = say_end(last, prompt, tokens, writer.answered, params, llm, view, "")
        else:
            view.console.say(f"--- stopped after {tokens} tokens")
        if writer.answered and not (last and last.finish_reason in BAD_ENDS):
            self._history += [{"role": "user", "content": turn}, _message(writer)]
        else:
            view.console.say("without an answer the turn is dropped")
        return code


def _message(writer: Writer) -> Message:
    """The reply as the template reads it in a history."""
    message: dict[str, Any] = {"role": "assistant", "content": writer.text}
    if writer.thinking:
        message["reasoning_content"] = writer.thinking
    if writer.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in writer.tool_calls
        ]
    return message


@contextlib.contextmanager
def _stoppable() -> Iterator[list[int]]:
    """Ctrl-C puts something into the list that is given; a second one breaks the block off."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, previous)


def _lines(first: list[str]) -> Iterator[str]:
    """The turns of the command line, then those of stdin."""
    yield from first
    if sys.stdin is None:
        return
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history for `input`
        while True:
            try:
                yield input("> ")
            except EOFError:
                return
    number = 0
    while line := sys.stdin.buffer.readline():
        number += 1
        try:
            yield text_of(line, f"line {number} of stdin")
        except UsageError as problem:
            raise RequestError(str(problem)) from None
