"""A request's life on the host: its tokens, what of them is computed, and what it owns. No torch.

WAITING (in the queue, new or preempted) -> PREFILL (prompt in pieces) -> DECODE -> DONE.
"""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemotriton.engine.sampling import Logprob, SamplingParams

if TYPE_CHECKING:
    from nemotriton.text.constraint import Constraint


class State(enum.Enum):
    """Where a request is in its life."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False)
class Request:
    """One completion in the making.

    `computed` tokens of `prompt + output` have their K/V in `pages` and their effect in `slot`.
    `limit` is the largest number of output tokens. `drafts` is how many guesses for the next tokens
    run behind the last one in the step at hand, and `hidden` what they start from: the draft
    block's output [D] behind the last computed token. `held` is how many tokens' pages a step needs
    that has started already. `saved` is the runner's host copy while preempted.
    `constraint` says which tokens may come next, None where all may; `fault` is what it raised.
    `keep_logits` scores the prompt (float32 rows [n, V] appended to `logits`) and generates
    nothing. `logprobs` has an entry for each output token, `prompt_logprobs` for each prompt token.
    """

    id: str
    arrival: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    stop_ids: frozenset[int] = frozenset()
    keep_logits: bool = False
    constraint: "Constraint | None" = None
    fault: Exception | None = None

    state: State = State.WAITING
    output: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    drafts: int = 0
    held: int = 0
    hidden: Any = None
    saved: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logits: list[Any] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def prefilled(self) -> bool:
        """True once the whole prompt is computed."""
        return self.computed >= len(self.prompt)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start .. end - 1, as far as they are known."""
        parts: list[int] = []
        for known in (self.prompt, self.output):
            parts += known[max(start, 0) : max(end, 0)]
            start, end = start - len(known), end - len(known)
        return parts


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` tokens of a request, from position `start`, computed in one step."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        """Context length after the step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Move:
    """What a preempted (or resumed) request owned (or owns): pages with computed tokens, slot."""

    request: Request
    pages: tuple[int, ...]
    slot: int


@dataclass
class Step:
    """One step's work. Saves come first, then restores, then one forward over all pieces."""

    saves: list[Move] = field(default_factory=list)
    restores: list[Move] = field(default_factory=list)
    decode: list[Piece] = field(default_factory=list)
    prefill: list[Piece] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Rows of the step's forward."""
        return sum(p.count for p in self.decode) + sum(p.count for p in self.prefill)
