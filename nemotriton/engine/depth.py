"""How many drafts a step should have: as many as pay, by measured acceptance and measured time.

With d drafts a step brings gain(d) = 1 + a1 + a1 a2 + ... + a1 .. ad tokens a request, where ai is
the chance that draft i is accepted if those before it are, and takes seconds(d), which depends on
how many requests decode; the depth with the largest gain / seconds is taken. Chances and seconds
are running averages. A chance is only updated by passes that got so far, so what is known of the
deep ones outlasts a stretch of bad drafts. Times need a look: the first steps with so many requests
(by powers of two) try the most drafts, none, and what lies beside the best so far, and now and then
another depth is looked at again. That is how drafting comes back once it pays. The depth never
changes a token, only when it comes (see `verify_drafts`), so decisions may hang on a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nemotriton.engine.draft_shape import DraftShape

_MEMORY = 64  # steps that an average remembers
_LOOK = 4  # steps of a first look; the very first is not timed, it may compile or allocate
_AGAIN = 4  # steps of a later look
_STAY = 16  # steps between decisions
_DECISIONS = 8  # from one later look to the next
_BETTER = 1.02  # a change must promise this much, or noise would decide
_OUTLIER = 3.0  # a longer step than this many averages counts as that many


@dataclass
class _Average:
    value: float = 0.0
    count: int = 0

    def add(self, sample: float) -> None:
        self.count += 1
        self.value += (sample - self.value) / min(self.count, _MEMORY)


@dataclass
class _Load:
    """What is known of steps with about so many requests, and what is being done there."""

    seconds: dict[int, _Average] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)  # depths that have had their untimed step
    best: int = 0
    depth: int = 0
    left: int = 0  # steps until the next decision
    decisions: int = 0


class Depth:
    """Chooses among the numbers of drafts that a shape allows: of a tree, all or none.

    adaptive: False always gives the most. Call `next`, run the step, call `book`.
    """

    def __init__(self, shape: DraftShape, adaptive: bool = True) -> None:
        self.options = shape.options
        self.adaptive = adaptive
        self.current = self.options[-1]
        self._levels = {option: shape.depth(option) for option in self.options}
        self._chances = [_Average() for _ in range(self._levels[self.current])]
        self._loads: dict[int, _Load] = {}

    def next(self, requests: int) -> int:
        """Drafts for a step in which so many requests decode."""
        if self.adaptive and requests:
            load = self._load(requests)
            if not load.left:
                load.depth, load.left = self._decide(load)
            self.current = load.depth
        elif not self.adaptive:
            self.current = self.options[-1]
        return self.current

    def stays(self, requests: int) -> bool:
        """Whether `next` says the same again behind the step at hand, whatever that brings."""
        return not self.adaptive or self._load(requests).left > 1

    def book(self, requests: int, accepted: Sequence[int], seconds: float | None) -> None:
        """What the step brought: accepted drafts of each request that had as many as `next` said.

        seconds: None where other work was in the step, which so tells nothing of drafting.
        """
        for level in range(self._levels[self.current]):
            reached = sum(count >= level for count in accepted)
            if reached:
                self._chances[level].add(sum(count > level for count in accepted) / reached)
        if seconds is None or not requests:
            return
        load = self._load(requests)
        load.left = max(load.left - 1, 0)
        if self.current not in load.seen:
            load.seen.add(self.current)
            return
        average = load.seconds.setdefault(self.current, _Average())
        if average.count:
            seconds = min(seconds, _OUTLIER * average.value)
        average.add(seconds)

    def rate(self, requests: int, option: int) -> float | None:
        """Tokens a second and request that `option` drafts promise; None if not measured."""
        return self._rate(self._load(requests), option)

    def _load(self, requests: int) -> _Load:
        return self._loads.setdefault(requests.bit_length(), _Load())

    def _rate(self, load: _Load, option: int) -> float | None:
        average = load.seconds.get(option)
        if average is None or not average.value:
            return None
        gain = reaching = chance = 1.0
        for level in range(self._levels[option]):
            if self._chances[level].count:
                chance = self._chances[level].value
            reaching *= chance  # where none got so far yet, as on the level before
            gain += reaching
        return gain / average.value

    def _decide(self, load: _Load) -> tuple[int, int]:
        """The next depth and for how many steps."""
        rates = {o: r for o in self.options if (r := self._rate(load, o)) is not None}
        for option in (self.options[-1], self.options[0]):
            if option not in rates:
                return option, _LOOK
        best = max(rates, key=lambda o: rates[o])
        if load.best not in rates or rates[best] > _BETTER * rates[load.best]:
            load.best = best
        at = self.options.index(load.best)
        beside = self.options[max(at - 1, 0) : at + 2]
        for option in beside:
            if option not in rates:
                return option, _LOOK
        load.decisions += 1
        turn, is_look = divmod(load.decisions, _DECISIONS)
        others = [o for o in dict.fromkeys([self.options[-1], *beside, 0]) if o != load.best]
        if others and not is_look:
            return others[turn % len(others)], _AGAIN
        return load.best, _STAY
