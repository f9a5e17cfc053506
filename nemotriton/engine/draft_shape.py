"""How the drafts of one step follow each other: a chain, or a tree of alternatives. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from nemotriton.errors import ConfigError, require

MOST = 32  # drafts a step; the state kernels keep a path in the bits of one integer


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Draft d (1, 2, ...) follows draft parents[d - 1], where 0 is the last known token.

    Parents stand before their children, level by level, so the first n drafts are a shape as well:
    what is left where a request may not have all. ConfigError names what is wrong.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        text = ",".join(map(str, self.parents))
        remedy = "give each draft the number of the one it follows, level by level, as in 0,0,1."
        require(
            0 < len(self.parents) <= MOST,
            f"a tree of {len(self.parents)} drafts: give 1 .. {MOST}.",
            ConfigError,
        )
        for draft, parent in enumerate(self.parents, 1):
            require(
                0 <= parent < draft,
                f"tree={text!r}: draft {draft} follows {parent}, which does not stand before it: "
                f"{remedy}",
                ConfigError,
            )
        levels = [self.depth(draft) for draft in range(1, len(self.parents) + 1)]
        for draft, (before, level) in enumerate(pairwise(levels), 2):
            require(
                before <= level,
                f"tree={text!r}: draft {draft} is on level {level} behind one of level {before}: "
                f"{remedy}",
                ConfigError,
            )

    @classmethod
    def chain(cls, drafts: int) -> DraftShape:
        """Each draft follows the one before it."""
        return cls(tuple(range(drafts)))

    @classmethod
    def wanted(cls, drafts: int, tree: str | None) -> DraftShape | None:
        """A chain of so many drafts, the tree if one is given, or None for no drafts."""
        is_count = isinstance(drafts, int) and not isinstance(drafts, bool)
        require(
            is_count and 0 <= drafts <= MOST,
            f"drafts={drafts!r}: use a number from 0 to {MOST}.",
            ConfigError,
        )
        if tree is None:
            return cls.chain(drafts) if drafts else None
        shape = cls.parse(tree)
        require(
            drafts in (0, len(shape)),
            f"drafts={drafts}, but tree={tree!r} has {len(shape)}: leave out drafts={drafts}.",
            ConfigError,
        )
        return shape

    @classmethod
    def parse(cls, text: str) -> DraftShape:
        """`0,0,1`: drafts 1 and 2 are alternatives, draft 3 follows draft 1."""
        try:
            parents = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise ConfigError(f"tree={text!r}: give numbers with commas, as in 0,0,1.") from None
        return cls(parents)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def options(self) -> list[int]:
        """Numbers of drafts to choose from: of a tree all or none."""
        return list(range(len(self) + 1)) if self.is_chain else [0, len(self)]

    @property
    def is_chain(self) -> bool:
        """True where every draft has one possible successor at most."""
        return self.parents == tuple(range(len(self.parents)))

    def path(self, draft: int) -> list[int]:
        """The drafts from the last known token to this one, itself included; [] for 0."""
        found = []
        while draft:
            found.append(draft)
            draft = self.parents[draft - 1]
        return found[::-1]

    def depth(self, draft: int) -> int:
        """Tokens from the last known one to this draft."""
        return len(self.path(draft))

    def levels(self, drafts: int) -> list[list[int]]:
        """The first `drafts` drafts by depth."""
        found: list[list[int]] = []
        for draft in range(1, drafts + 1):
            if self.depth(draft) > len(found):
                found.append([])
            found[-1].append(draft)
        return found

    def row_parents(self, drafts: int) -> list[int]:
        """Parents as `Span.parents` has them: of the last known token and its first drafts."""
        return [-1, *self.parents[:drafts]]
