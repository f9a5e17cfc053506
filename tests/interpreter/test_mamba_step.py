"""A Mamba layer's one launch beside the three that it replaces, and what it leaves behind.

The checks take a device: the GPU tests run the same ones on compiled kernels."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.errors import UnsupportedError
from nemotriton.kernels.mamba_step import MAMBA_STEP, split_channels
from nemotriton.kernels.op import Args, Case

CPU = torch.device("cpu")
SMALL = Case(H=4, P=6, N=12, G=2, W=4, STATE="fp32")


def inputs(case: Case, T: int, where: torch.device) -> Args:
    return MAMBA_STEP.make(case, T, where, torch.bfloat16, parity.generator(T, where))


def apart(args: Args) -> torch.Tensor:
    """The three ops in turn, on the tensors of `args` in place."""
    a = args
    where = (a["cu"], a["slots"], 1)
    xBC = K.causal_conv1d_update.triton(a["xBC"], a["weight"], a["bias"], a["windows"], *where)
    x, B, C = split_channels(xBC, a["state"], a["groups"])
    rest = (a["A"], B, C, a["D"], a["dt_bias"], a["state"], a["cu"], a["cells"], 1)
    y = K.ssm_update.triton(x, a["dt"], *rest)
    return K.gated_rms_norm.triton(y.flatten(1), a["z"], a["norm"], 1e-5, a["groups"])


def check_same_as_apart(case: Case, T: int, where: torch.device) -> None:
    """Windows to the bit, the rest to the order of a sum; no count is left."""
    args = inputs(case, T, where)
    other = parity.copy(args)
    y, want = K.mamba_step.triton(**args), apart(other)
    assert torch.equal(args["windows"].nan_to_num(7), other["windows"].nan_to_num(7))
    torch.testing.assert_close(args["state"], other["state"], rtol=2e-6, atol=1e-6, equal_nan=True)
    assert (y - want).abs().max() <= 2**-7 * want.abs().max()
    assert not args["arrivals"].any()


def check_again_and_again(case: Case, T: int, where: torch.device) -> None:
    """The counts are zeros between steps, and every step moves the windows by one token."""
    args = inputs(case, T, where)
    for _ in range(case.W):
        K.mamba_step.triton(**args)
    slots = args["slots"][:T].long()
    rows = args["xBC"][slots >= 0]
    assert torch.equal(args["windows"][slots[slots >= 0]], rows[:, None].expand(-1, case.W - 1, -1))


@pytest.mark.parametrize("T", [1, 5])
def test_same_as_apart(T: int) -> None:
    check_same_as_apart(SMALL, T, CPU)


def test_again_and_again() -> None:
    check_again_and_again(SMALL, 3, CPU)


def test_a_sequence_without_a_token_is_left_alone() -> None:
    args = inputs(SMALL, 3, CPU)
    args["cu"] = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32)
    args["slots"], args["cells"] = (torch.tensor([2, 1, -1, 0], dtype=torch.int32) for _ in "ab")
    for name in ("windows", "state"):
        args[name] = torch.randn_like(args[name])
    before = parity.copy(args)
    y = K.mamba_step.triton(**args)
    twin = parity.copy(before)
    want = K.mamba_step.ref(**twin)
    for name in ("windows", "state"):
        assert torch.equal(args[name][1], before[name][1])
        assert torch.equal(args[name][3:], before[name][3:])
        assert not torch.equal(args[name][2], before[name][2])
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert torch.equal(want[1], y[1])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"arrivals": torch.zeros(2, 3, dtype=torch.int32)}, "arrivals must be int32"),
        ({"z": torch.zeros(3, 5)}, "z must be"),
        ({"cells": torch.zeros(1, dtype=torch.int32)}, "cells must name one"),
        ({"groups": 3}, "does not hold"),
    ],
)
def test_what_does_not_fit_is_named(change: Args, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        K.mamba_step.triton(**(inputs(SMALL, 3, CPU) | change))
