"""States and K/V at the ends of earlier prompts, for prompts that begin with one of them whole.

A recurrent state is that of all tokens before it and of no fewer, so there is nothing to share
between prompts that part earlier: those are computed anew.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's tokens, and the runner's host copy of what they left behind, in bytes."""

    ids: tuple[int, ...]
    saved: Any
    size: int


class Prefixes:
    """Keeps up to `room` bytes on the host; what was of no use for longest goes first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.used = 0
        self._kept: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, ids: list[int]) -> bool:
        return tuple(ids) in self._kept

    def find(self, ids: list[int]) -> Prefix | None:
        """The longest prompt that `ids` begins with and goes on from; None where there is none."""
        whole = tuple(ids)
        found = [key for key in self._kept if len(key) < len(whole) and whole[: len(key)] == key]
        if not found:
            return None
        best = max(found, key=len)
        self._kept.move_to_end(best)
        return self._kept[best]

    def keep(self, ids: list[int], saved: Any, size: int) -> None:
        """Keep what a prompt left behind, if there is room for it at all."""
        key = tuple(ids)
        if key in self._kept or size > self.room:
            return
        self._kept[key] = Prefix(key, saved, size)
        self.used += size
        while self.used > self.room:
            _, oldest = self._kept.popitem(last=False)
            self.used -= oldest.size
