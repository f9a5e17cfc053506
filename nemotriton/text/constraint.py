"""Which tokens may come next in one completion: a thought's budget first, a grammar behind it.

Everything hangs on the tokens alone, those said and those that a row of a verify pass stands
behind, so drafts that are taken back leave no trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemotriton.text.reply import END_THINK
from nemotriton.text.structured import Grammar, Matcher
from nemotriton.text.tokens import Tokenizer

_SPAN = len(END_THINK)  # more tokens than characters it cannot have


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all completions of a prompt.

    thinking: the prompt has opened a thought. budget: its most tokens; then `closing` follows,
    token by token. grammar: of what comes behind the thought, or None. stop_ids: end
    tokens, which a thought may not hold if there is a grammar: it would never be met.
    """

    tokenizer: Tokenizer
    thinking: bool
    budget: int | None
    grammar: Grammar | None
    stop_ids: tuple[int, ...]

    @property
    def closing(self) -> list[int]:
        """Tokens that end a thought."""
        return self.tokenizer.encode_control("\n" + END_THINK)

    def constraint(self) -> "Constraint":
        """For one completion."""
        return Constraint(self)


class Constraint:
    """What one completion may go on with."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._closing = rules.closing if rules.budget is not None else []
        self._matcher = Matcher(rules.grammar) if rules.grammar is not None else None
        self._thinking = rules.thinking
        self._seen = 0  # output tokens that are behind `_thinking` and in the matcher

    def allow(self, bits: Any, output: Sequence[int], ahead: Sequence[int]) -> bool:
        """Write the mask of the token behind `output` and `ahead`; False where it says nothing.

        bits: int32 [ceil(V / 32)] on the host. It says nothing behind tokens that the rules forbid
        either: such drafts are rejected before anyone gets there.
        """
        self._catch_up(output)
        tokens = [*output, *ahead]
        thinking, steps = self._thinking, 0
        for end in range(len(output) + 1, len(tokens) + 1):
            thinking, step = self._pass(tokens[:end], thinking)
            if step is None:
                self._back(steps)
                return False
            steps += step
        found = self._mask(bits, len(tokens), thinking)
        self._back(steps)
        return found

    def _catch_up(self, output: Sequence[int]) -> None:
        for end in range(self._seen + 1, len(output) + 1):
            self._thinking, step = self._pass(output[:end], self._thinking)
            assert step is not None, f"token {output[end - 1]} was masked and is said all the same"
        self._seen = len(output)

    def _pass(self, tokens: Sequence[int], thinking: bool) -> tuple[bool, int | None]:
        """Go on by the last one of `tokens`: whether the thought is open still, and steps of the
        matcher; None where the token is forbidden."""
        matcher = self._matcher
        if thinking:
            rest = self._behind_thought(tokens)
            if rest is None or matcher is None:
                return rest is None, 0
            # a tokenizer without the tag as a token may say the answer's start in the same one
            return False, int(bool(rest) and matcher.accept_text(rest))
        if matcher is None:
            return False, 0
        return False, 1 if matcher.accept(tokens[-1]) else None

    def _behind_thought(self, tokens: Sequence[int]) -> str | None:
        """The text behind the end of the thought if the last token completes it."""
        text = self._rules.tokenizer.decode(tokens[-_SPAN:], skip_special=False)
        _, tag, rest = text.rpartition(END_THINK)
        return rest.lstrip() if tag else None

    def _back(self, steps: int) -> None:
        if self._matcher is not None:
            self._matcher.back(steps)

    def _mask(self, bits: Any, count: int, thinking: bool) -> bool:
        """The mask behind `count` tokens."""
        if not thinking:
            return self._matcher is not None and self._matcher.mask(bits)
        over = count - self._rules.budget if self._rules.budget is not None else -1
        if 0 <= over < len(self._closing):
            bits.zero_()
            _turn(bits, self._closing[over])
            return True
        if self._matcher is None:
            return False
        bits.fill_(-1)
        for token in self._rules.stop_ids:
            _turn(bits, token)
        return bool(self._rules.stop_ids)


def _turn(bits: Any, token: int) -> None:
    """Flip one token's bit."""
    bit = 1 << (token % 32)
    bits[token // 32] ^= bit if bit < 2**31 else bit - 2**32
