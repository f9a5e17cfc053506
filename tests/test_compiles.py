"""Every compilation of the process is counted, whoever listens beside us."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from nemotriton.kernels.compiles import compiled_variants
from nemotriton.kernels.op import INTERPRET, compile_only, launch

pytestmark = pytest.mark.skipif(INTERPRET, reason="nothing is compiled in the interpreter")


@triton.jit
def _write(x_ptr, N: tl.constexpr):
    tl.store(x_ptr, N)


@pytest.fixture
def listener() -> Iterator[None]:
    """What listens now does again behind the test."""
    before = knobs.compilation.listener
    yield
    knobs.compilation.listener = before


def compile_one(number: int) -> int:
    """How many more are counted for one kernel that no SPEC names."""
    before = compiled_variants()
    with compile_only(90):
        launch(_write, (1,), torch.empty(1, dtype=torch.int32, device="meta"), N=number)
    return compiled_variants() - before


@pytest.mark.usefixtures("listener")
def test_kernels_of_no_spec_count_and_other_listeners_hear_as_much() -> None:
    assert compile_one(1) == 1
    assert compile_one(1) == 0, "it is there already"
    heard: list[Any] = []
    knobs.compilation.listener = lambda **news: heard.append(news["src"].name)
    assert (compile_one(2), heard) == (1, ["_write"])
    ours = knobs.compilation.listener

    def passing_on(**news: Any) -> None:
        heard.append("last")
        assert ours is not None
        ours(**news)

    knobs.compilation.listener = passing_on
    assert (compile_one(3), heard) == (1, ["_write", "last", "_write"]), "once, though asked twice"
    assert (compile_one(4), len(heard)) == (1, 5)
