"""How the ranks keep step: rank 0 tells what came since the last step, and all run the same step.

Scheduler, sampler and text are repeated on every rank. They decide by what they are told and by
logits that are equal to the last bit on all ranks, so no rank has to be told what comes out. What
hangs on a clock or a client is decided by rank 0 and told: which requests came, which were
cancelled, how many drafts the step has. A checksum of all tokens so far shows whether the ranks
have lost each other.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nemotriton.errors import RankError, require

if TYPE_CHECKING:
    from nemotriton.engine.engine import Engine, Prepared
    from nemotriton.engine.request import Piece
    from nemotriton.engine.team import Team

Command = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Tick:
    """One step: what is to be done before it, its number of drafts, and where all should stand."""

    commands: tuple[Command, ...]
    drafts: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Call:
    """function(llm, *args) on every rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """The last word."""


@dataclass(slots=True)
class Lead:
    """What an engine tells the engines of other ranks, once a step."""

    team: Team
    checksum: int = 0
    _commands: list[Command] = field(default_factory=list)

    def submit(self, prepared: Prepared) -> None:
        """A prompt was queued."""
        if not self.team.leads:
            return
        prompt = prepared.chat if prepared.chat is not None else prepared.ids
        self._commands.append(("submit", (prompt, prepared.params, prepared.keep_logits)))

    def cancel(self, ids: Sequence[str]) -> None:
        """These requests were ended."""
        if ids and self.team.leads:
            self._commands.append(("cancel", tuple(ids)))

    def reuse(self, nbytes: int) -> None:
        """Ends of earlier prompts are kept."""
        if self.team.leads:
            self._commands.append(("reuse", (nbytes,)))

    def settle(self) -> None:
        """A step that was started is forgotten."""
        if self.team.leads:
            self._commands.append(("settle", ()))

    def tick(self, drafts: int) -> None:
        """A step comes now."""
        if self.team.leads:
            self.team.tell(Tick(tuple(self._commands), drafts, self.checksum))
            self._commands.clear()

    @contextlib.contextmanager
    def calling(self, function: Callable[..., Any], *args: Any) -> Iterator[None]:
        """A function of the LLM runs inside, behind what was told before; the other ranks run it
        too, so what it submits is not told."""
        require(
            function.__module__ != "__main__",
            f"{function.__name__} is of the program itself, which other ranks have none of: put it "
            "into a module.",
        )
        if self.team.leads:
            self.team.tell(Call(_apply, (tuple(self._commands),)))
            self.team.tell(Call(function, args))
        try:
            yield
        finally:
            self._commands.clear()


def checked(checksum: int, results: Sequence[tuple[Piece, list[int] | None]]) -> int:
    """The checksum behind a step."""
    for _, tokens in results:
        for token in tokens or (-1,):
            checksum = zlib.crc32(token.to_bytes(8, "little", signed=True), checksum)
    return checksum


def _apply(llm: Any, commands: Sequence[Command]) -> None:
    engine: Engine = llm.engine
    for name, args in commands:
        if name == "submit":
            prompt, params, keep_logits = args
            engine.submit(engine.prepare(prompt, params, keep_logits))
        elif name == "cancel":
            for request in args:
                engine.cancel(request)
            engine.drop_cancelled()
        elif name == "settle":
            engine.settle()
        else:
            engine.reuse(*args)


def follow(llm: Any, team: Team) -> None:
    """Repeat what rank 0 does until it stops; RankError where this rank has come to differ."""
    engine: Engine = llm.engine
    while True:
        heard = team.hear()
        if isinstance(heard, Stop):
            return
        if isinstance(heard, Call):
            heard.function(llm, *heard.args)
            continue
        assert isinstance(heard, Tick)
        assert engine.lead is not None
        if heard.checksum != engine.lead.checksum:
            raise RankError(
                f"rank {team.shard.rank} has computed other tokens than rank 0: their GPUs, or "
                "the programs on them, differ."
            )
        _apply(llm, heard.commands)
        engine.depth = None
        engine.scheduler.drafts = heard.drafts
        llm.step()
