"""The interpreter stops at every address that belongs to no tensor of the launch."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.interpreter.bounds import reaching


@triton.jit
def _copy(x_ptr, y_ptr, first, end, N: tl.constexpr):
    i = first + tl.arange(0, N)
    tl.store(y_ptr + tl.arange(0, N), tl.load(x_ptr + i, mask=i < end, other=0.0))


@triton.jit
def _scatter(x_ptr, first, end, N: tl.constexpr):
    i = first + tl.arange(0, N)
    tl.store(x_ptr + i, 1.0, mask=i < end)


@triton.jit
def _add(x_ptr, first, end, N: tl.constexpr):
    i = first + tl.arange(0, N)
    tl.atomic_add(x_ptr + i, 1.0, mask=i < end)


@triton.jit
def _through_a_table(table_ptr, N: tl.constexpr):
    there = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(there + tl.arange(0, N), 2.0)


WHOLE = torch.zeros(64)
INNER = WHOLE[16:48]  # of a larger storage: what lies around it is mapped, and is not its own


def copying(first: int, end: int) -> None:
    _copy[(1,)](INNER, torch.empty(16), first, end, 16)


def scattering(first: int, end: int) -> None:
    _scatter[(1,)](INNER, first, end, 16)


def adding(first: int, end: int) -> None:
    _add[(1,)](INNER, first, end, 16)


EVERY = [copying, scattering, adding]


@pytest.mark.parametrize("access", EVERY)
def test_what_is_masked_or_inside_is_allowed(access: Callable[[int, int], None]) -> None:
    access(0, 32)
    access(16, 32)
    access(24, 32)  # the second half is masked


@pytest.mark.parametrize("access", EVERY)
@pytest.mark.parametrize("first,end", [(-1, 32), (17, 33), (1000, 2000)])
def test_one_element_outside_is_an_error(
    access: Callable[[int, int], None], first: int, end: int
) -> None:
    before = WHOLE.clone()
    with pytest.raises(InterpreterError, match="OutOfBounds"):
        access(first, end)
    assert torch.equal(WHOLE, before)


def test_the_gaps_of_a_strided_tensor_are_its_own_and_its_neighbours_are_not() -> None:
    rows = torch.zeros(4, 16)[:, :8]  # its last element is at 3 * 16 + 7
    _copy[(1,)](rows, torch.empty(16), 40, 56, 16)
    with pytest.raises(InterpreterError, match="OutOfBounds"):
        _copy[(1,)](rows, torch.empty(16), 41, 57, 16)


def test_addresses_from_a_table_have_to_be_named() -> None:
    there = torch.zeros(16)
    table = torch.tensor([there.data_ptr()])
    with pytest.raises(InterpreterError, match="OutOfBounds"):
        _through_a_table[(1,)](table, 16)
    with reaching(there):
        _through_a_table[(1,)](table, 16)
    assert torch.equal(there, torch.full((16,), 2.0))
