"""Which indices (pages of KV, slots of state) are free. No torch."""

from collections.abc import Sequence


class Pool:
    """The indices 0 .. size - 1, each free or taken; what came back last goes out first.

    `name` is used in messages. Taking more than is free, or giving back what is not taken, is a
    fault of ours and trips an assertion.
    """

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self.name = name
        self._free = list(range(size - 1, -1, -1))
        self._taken = bytearray(size)

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def taken(self) -> int:
        """How many are taken."""
        return self.size - len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` indices."""
        assert 0 <= count <= self.free, f"{count} {self.name} wanted, {self.free} free"
        got = [self._free.pop() for _ in range(count)]
        for index in got:
            self._taken[index] = 1
        return got

    @property
    def indices(self) -> list[int]:
        """Those that are free, the next one last."""
        return list(self._free)

    def order(self, indices: Sequence[int]) -> None:
        """Let the same free indices go out in another order, the last one first."""
        assert sorted(indices) == sorted(self._free), f"{self.name}: others are free"
        self._free = list(indices)

    def give(self, indices: Sequence[int]) -> None:
        """Give indices back."""
        for index in indices:
            assert 0 <= index < self.size, f"{self.name}: there is no {index}"
            assert self._taken[index], f"{self.name}: {index} is free"
            self._taken[index] = 0
        self._free.extend(reversed(indices))
