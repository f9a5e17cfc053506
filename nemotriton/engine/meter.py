"""What an engine has done and how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemotriton.engine.draft_shape import DraftShape
    from nemotriton.engine.request import Piece, Step


@dataclass
class Meter:
    """Counts and seconds since the start; seconds of host time round whole steps."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    prefill_seconds: float = 0.0  # steps that hold prompt tokens
    decode_seconds: float = 0.0  # steps that hold none
    decode_tokens: int = 0  # of the latter
    first_token_seconds: float = 0.0  # summed over requests, from submission

    def count(self, step: Step, new_tokens: int, seconds: float) -> None:
        """Book one step."""
        self.steps += 1
        self.output_tokens += new_tokens
        self.prompt_tokens += sum(p.count for p in step.prefill)
        if step.prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.decode_tokens += new_tokens


@dataclass
class DraftMeter:
    """Drafts proposed, those that a verify pass ran, and those accepted; by position as well.

    passes: verify passes of a request. tried[i], hit[i]: how many of them had a draft of depth
    i + 1, and accepted one. seconds: of steps without prompt tokens, by part of the step, where the
    work runs: "draft", "verify" (and plain decoding), "commit".
    """

    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    passes: int = 0
    tried: list[int] = field(default_factory=list)
    hit: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def propose(self, step: Step) -> None:
        """Book the drafts that a step is about to make."""
        self.proposed += sum(p.request.drafts for p in step.decode)

    def verify(self, shape: DraftShape, verified: Sequence[tuple[Piece, int]]) -> None:
        """Book pieces with drafts, and how many drafts of each were accepted."""
        for piece, accepted in verified:
            drafts = piece.count - 1
            self.passes += 1
            self.verified += drafts
            self.accepted += accepted
            depth = shape.depth(drafts)
            self.tried += [0] * (depth - len(self.tried))
            self.hit += [0] * (depth - len(self.hit))
            for level in range(depth):
                self.tried[level] += 1
                self.hit[level] += level < accepted

    def spend(self, seconds: Mapping[str, float]) -> None:
        """Book the parts of a step."""
        for part, amount in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + amount

    def report(self, most: int, current: int) -> dict[str, object]:
        """Plain values; acceptance of a position is the share of passes that accepted it."""
        return {
            "most": most,
            "current": current,
            "proposed": self.proposed,
            "verified": self.verified,
            "accepted": self.accepted,
            "acceptance": [h / t for h, t in zip(self.hit, self.tried, strict=True)],
            "tokens_per_pass": 1 + self.accepted / self.passes if self.passes else None,
            "seconds": dict(self.seconds),
        }


def rate(amount: float, per: float) -> float | None:
    """None where there is nothing to divide by."""
    return amount / per if per else None
