"""A Mamba layer's one launch on the device, where programs arrive in any order."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.kernels.op import Case
from tests.interpreter import test_mamba_step as checks

SUPER = Case(H=128, P=64, N=128, G=8, W=4, STATE="fp32")


@pytest.mark.parametrize("T", [1, 3, 64])
def test_same_as_apart(T: int, cuda: torch.device) -> None:
    checks.check_same_as_apart(SUPER, T, cuda)


@pytest.mark.parametrize("T", [1, 16])
def test_again_and_again(T: int, cuda: torch.device) -> None:
    checks.check_again_and_again(SUPER, T, cuda)


@pytest.mark.parametrize("T", [1, 7, 64])
def test_whoever_arrives_last(T: int, cuda: torch.device) -> None:
    """The same bits whichever program closes a group, alone and among others' launches."""
    args = checks.inputs(SUPER, T, cuda)
    first = parity.run(K.mamba_step.spec, args)
    for _ in range(30):
        again = parity.run(K.mamba_step.spec, args)
        assert all(torch.equal(first[k].nan_to_num(7), again[k].nan_to_num(7)) for k in first)
