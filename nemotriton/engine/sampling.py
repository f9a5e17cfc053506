"""How one request wants its tokens chosen and when it ends; vLLM's names, no torch.

The arithmetic on logits is in `sampler.py`; this file is what `--help`, the server and user code
import, so it costs nothing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nemotriton.errors import RequestError

DEFAULT_MAX_TOKENS = 4096
_INT64 = 2**63
_GREEDY = 1e-5  # vLLM's border: below it the softmax of real logits has one non-zero entry anyway


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Choice and end of a completion.

    n: completions a prompt. temperature: 0 = greedy. top_k: 0 or -1 = all. repetition_penalty
    counts prompt and output tokens, presence and frequency the output only. seed: None = drawn from
    the engine's seed and the request's number. max_tokens: None = to the end of the context.
    min_tokens: no stop before that many. stop, stop_token_ids: end the completion; the string is
    cut off unless include_stop_str_in_output. ignore_eos: only stop and stop_token_ids end it.
    logprobs, prompt_logprobs: number of most likely tokens reported beside the actual one, of the
    model's own distribution, before penalties and temperature. json_schema (an object, or its JSON)
    or regex: what the text must match, all of it; behind the thought if the prompt opens one.
    thinking_token_budget: most tokens of such a thought; then it is closed.

    RequestError names the first impossible value and what would do.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        self._check_choice()
        self._check_end()
        self._check_form()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "use True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, "use a number >= 0, or None for none")

    def _check_choice(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf, "use 0 for greedy or a number > 0")
        _number("top_p", self.top_p, 0.0, 1.0, "use a number in (0, 1]; 1 keeps all tokens")
        if self.top_p == 0:
            _refuse("top_p", self.top_p, "use a number in (0, 1], or temperature=0 for greedy")
        _integer("top_k", self.top_k, -1, "use a number >= 1, or 0 for all tokens")
        _number("min_p", self.min_p, 0.0, 1.0, "use a number in [0, 1]; 0 keeps all tokens")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0, "use a number in [-2, 2]; 0 is off")
        remedy = "use a number > 0; 1 is off"
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, remedy)
        if self.repetition_penalty == 0:
            _refuse("repetition_penalty", self.repetition_penalty, remedy)
        if self.seed is not None:
            _integer("seed", self.seed, -_INT64, "use a 64-bit integer or None")
            if self.seed >= _INT64:
                _refuse("seed", self.seed, "use a 64-bit integer or None")

    def _check_end(self) -> None:
        _integer("n", self.n, 1, "use a number >= 1")
        if self.n > 1 and self.greedy:
            _refuse("n", self.n, "greedy completions are all the same: use n=1 or a temperature")
        if self.max_tokens is not None:
            remedy = "use a number >= 1, or None to go on to the end of the context"
            _integer("max_tokens", self.max_tokens, 1, remedy)
        _integer("min_tokens", self.min_tokens, 0, "use a number >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            remedy = f"lower it to max_tokens={self.max_tokens} or raise that"
            _refuse("min_tokens", self.min_tokens, remedy)
        remedy = "use a string or a list of strings, none of them empty"
        if not isinstance(self.stop, str | Sequence | None):
            _refuse("stop", self.stop, remedy)
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                _refuse("stop", self.stop, remedy)
        remedy = "use a list of token ids >= 0"
        if isinstance(self.stop_token_ids, str) or not isinstance(
            self.stop_token_ids, Sequence | None
        ):
            _refuse("stop_token_ids", self.stop_token_ids, remedy)
        for token in self.stop_token_ids or ():
            if not _is_integer(token) or token < 0:
                _refuse("stop_token_ids", self.stop_token_ids, remedy)

    def _check_form(self) -> None:
        if self.thinking_token_budget is not None:
            remedy = "use a number >= 0, or None for thoughts of any length"
            _integer("thinking_token_budget", self.thinking_token_budget, 0, remedy)
        if self.regex is not None and (not isinstance(self.regex, str) or not self.regex):
            _refuse("regex", self.regex, "use a regular expression, or None")
        if self.json_schema is not None:
            _check_schema(self.json_schema)
        if self.structured:
            if self.json_schema is not None and self.regex is not None:
                _refuse("regex", self.regex, "json_schema is given too, use one of them")
            for name in ("ignore_eos", "min_tokens"):
                if getattr(self, name):
                    remedy = "a JSON schema or regex says where the text ends, leave it out"
                    _refuse(name, getattr(self, name), remedy)

    @property
    def structured(self) -> bool:
        """True where the text must match a schema or an expression."""
        return self.json_schema is not None or self.regex is not None

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken."""
        return self.temperature < _GREEDY

    @property
    def penalised(self) -> bool:
        """True where a penalty changes the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank (1 = most likely), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def mix_seed(seed: int, index: int) -> int:
    """A seed in [0, 2**63) for the `index`-th stream under `seed` (SplitMix64's finaliser).

    Different (seed, index) pairs give unrelated streams: seed 1 of request 2 is not seed 2 of 1.
    """
    z = (_finalise(seed) + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64
    return _finalise(z) >> 1


def _finalise(z: int) -> int:
    z %= 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def _check_schema(schema: object) -> None:
    remedy = "use a JSON schema, which is an object: a mapping or its JSON"
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(found, Mapping):
            json.dumps(found)
    except (TypeError, ValueError) as problem:
        _refuse("json_schema", schema, f"{remedy} ({problem})")
    if not isinstance(found, Mapping):
        _refuse("json_schema", schema, remedy)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(name: str, value: object, low: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        _refuse(name, value, remedy)


def _number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, value, remedy)
    if not low <= value <= high or value == math.inf:
        _refuse(name, value, remedy)


def _refuse(name: str, value: object, remedy: str) -> NoReturn:
    raise RequestError(f"{name}={value!r} is not possible: {remedy}.")
