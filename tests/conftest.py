"""Shared fixtures: poisoned allocations with guard bands, so that nothing unwritten passes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

GUARD = 64


@dataclass
class Poison:
    """Buffers handed out by torch.empty during a test, each inside a larger NaN-filled one."""

    buffers: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        n = 1
        for s in shape:
            n *= s
        whole = torch.zeros(n + 2 * GUARD, dtype=dtype, device=device)
        fill(whole)
        self.buffers.append((whole, n))
        return whole[GUARD : GUARD + n].view(shape)

    def check(self) -> None:
        """Fail if a kernel wrote outside a buffer it was given."""
        for whole, n in self.buffers:
            clean = torch.zeros_like(whole)
            fill(clean)
            for part in (slice(0, GUARD), slice(GUARD + n, None)):
                a, b = whole[part], clean[part]
                same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
                assert bool(same.all()), f"a guard band of a {n}-element buffer was written"


def fill(x: torch.Tensor) -> None:
    """NaN for floats, an absurd index for integers."""
    if x.is_floating_point():
        x.fill_(float("nan"))
    elif x.dtype == torch.uint8:
        x.fill_(0x7F)
    elif x.dtype != torch.bool:
        x.fill_(-(2**30) if x.dtype.itemsize >= 4 else -99)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="run the engine's tests on cpu or cuda")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the engine under test runs; the oracle stays on the CPU."""
    return request.config.getoption("--device")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Poison]:
    """torch.empty, empty_like and new_empty give guarded NaN buffers; checked at the end."""
    book = Poison()
    empty: Callable[..., torch.Tensor] = torch.empty

    def poisoned(*size: object, **kw: object) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = kw.get("dtype") or torch.get_default_dtype()
        device = torch.device(kw.get("device") or "cpu")  # type: ignore[arg-type]
        if device.type == "meta":
            return empty(*size, **kw)
        return book.allocate(tuple(shape), dtype, device)  # type: ignore[arg-type]

    def like(x: torch.Tensor, **kw: object) -> torch.Tensor:
        dtype, device = kw.get("dtype") or x.dtype, kw.get("device") or x.device
        return poisoned(tuple(x.shape), dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", like)
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda x, *size, **kw: poisoned(*size, dtype=kw.get("dtype") or x.dtype, device=x.device),
    )
    yield book
    monkeypatch.undo()
    book.check()
