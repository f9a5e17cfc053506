"""What a user gets back, and how a completion's tokens become text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nemotriton.engine.request import Request, State
from nemotriton.engine.sampling import Logprob
from nemotriton.text.tokens import StopStrings

if TYPE_CHECKING:
    from nemotriton.text.reply import ReplyParser, ToolCall
    from nemotriton.text.tokens import Tokenizer

Logprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt; vLLM's names.

    text: without the end token and without the stop string; of a chat, the answer. thinking,
    tool_calls: of a chat, what else the reply held; None and none elsewhere. token_ids: all that
    were generated, the end token included. finish_reason: "stop" (an end token, stop token or stop
    string), "length", "abort" (cancelled), "error" (the model's logits were not finite), or None
    while running. stop_reason: the stop string or stop token id, None for an end token.
    cumulative_logprob and logprobs: None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    thinking: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions; vLLM's names. prompt: None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to completion `index` since the last delta; the last has a finish_reason."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class Completion:
    """One completion on its way: the request, and its text as far as it is certain.

    Without a tokenizer the text stays empty. parser: takes a chat's reply apart; stop strings then
    end its answer, not its thought.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, parser: ReplyParser | None = None
    ) -> None:
        params = request.params
        self.request = request
        self.text = ""
        self.thinking = ""
        self.tool_calls: list[ToolCall] = []
        self._parser = parser
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(params.skip_special_tokens) if tokenizer else None
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._text_sent = 0
        self._thinking_sent = 0
        self._calls_sent = 0
        self._tokens_sent = 0
        self._end_sent = False

    def push(self, tokens: list[int]) -> str | None:
        """Take the request's newest tokens; a stop string if one is complete.

        Tokens behind it (there are some when drafts were accepted) are taken back from the request.
        """
        for i, token in enumerate(tokens):
            behind = len(tokens) - 1 - i
            self._push_one(token, len(self.request.output) - behind)
            if self._stops.stopped is not None:
                if behind:
                    del self.request.output[-behind:]
                    del self.request.logprobs[len(self.request.output) :]
                return self._stops.stopped
        return None

    def _push_one(self, token: int, count: int) -> None:
        """`count`: output tokens up to and with this one."""
        params = self.request.params
        is_end = self.request.finish_reason == "stop" and count == len(self.request.output)
        if self._stream is None or (is_end and not params.include_stop_str_in_output):
            return
        text = self._answer(self._stream.push([token]))
        stops = self._stops
        self.text += stops.push(text) if count > params.min_tokens else stops.skip(text)

    def _answer(self, text: str, last: bool = False) -> str:
        """What of new text belongs to the answer; the rest is noted."""
        if self._parser is None:
            return text
        parts = [self._parser.push(text)]
        if last:
            parts.append(self._parser.finish())
        for part in parts:
            self.thinking += part.thinking
            self.tool_calls += part.tool_calls
        return "".join(part.text for part in parts)

    def close(self) -> str | None:
        """Give out what was held back; a stop string if that completes one."""
        if self._stream is not None and self._stops.stopped is None:
            rest = self._answer(self._stream.finish(), last=True)
            self.text += self._stops.push(rest) + self._stops.finish()
        return self._stops.stopped

    def output(self, index: int) -> CompletionOutput:
        """The completion so far."""
        request = self.request
        logprobs = None
        total = None
        if request.params.logprobs is not None:
            logprobs = spell(request.logprobs, self._tokenizer)
            total = sum(row[t].logprob for row, t in zip(logprobs, request.output, strict=True))
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=list(request.output),
            cumulative_logprob=total,
            logprobs=logprobs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            thinking=self.thinking if self._parser is not None else None,
            tool_calls=list(self.tool_calls),
        )

    def delta(self, request_id: str, index: int) -> Delta | None:
        """What is new since the last call; None if nothing is."""
        request = self.request
        text, tokens = self.text[self._text_sent :], request.output[self._tokens_sent :]
        thinking, calls = self.thinking[self._thinking_sent :], self.tool_calls[self._calls_sent :]
        ended = request.state is State.DONE and not self._end_sent
        if not (text or tokens or thinking or calls or ended):
            return None
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = spell(request.logprobs[self._tokens_sent :], self._tokenizer)
        self._text_sent, self._tokens_sent = len(self.text), len(request.output)
        self._thinking_sent, self._calls_sent = len(self.thinking), len(self.tool_calls)
        self._end_sent |= ended
        end = (request.finish_reason, request.stop_reason)
        return Delta(request_id, index, text, tokens, logprobs, *end, thinking, calls)


@dataclass(slots=True)
class Group:
    """A prompt and its completions on their way. reused: prompt tokens that an earlier prompt's end
    spared each of them."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    completions: list[Completion]
    tokenizer: Tokenizer | None
    submitted: float
    first_token: float | None = None
    reused: int = 0

    @property
    def finished(self) -> bool:
        """True once every completion has ended."""
        return all(c.request.state is State.DONE for c in self.completions)

    def output(self) -> RequestOutput:
        """The request as the user sees it, finished or not."""
        first = self.completions[0].request
        prompt_logprobs: list[Logprobs | None] | None = None
        if first.params.prompt_logprobs is not None:
            rows = first.prompt_logprobs
            prompt_logprobs = [None if r is None else spell([r], self.tokenizer)[0] for r in rows]
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[c.output(i) for i, c in enumerate(self.completions)],
            finished=self.finished,
        )

    def take(self) -> list[Delta]:
        """What was added to any completion since the last call."""
        found = [c.delta(self.id, i) for i, c in enumerate(self.completions)]
        return [d for d in found if d is not None]


def spell(rows: list[Logprobs], tokenizer: Tokenizer | None) -> list[Logprobs]:
    """The same log-probabilities with the text of each token."""
    if tokenizer is None:
        return rows
    return [
        {t: replace(p, decoded_token=tokenizer.decode([t], False)) for t, p in row.items()}
        for row in rows
    ]
