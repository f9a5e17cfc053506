"""A request that is not finite, at Super's width: the others' bits."""

import pytest
import torch

from nemotriton.kernels.op import SPECS, Case
from tests.sick_requests import SPOILT, check_others


@pytest.mark.parametrize("new,tree", [(1, 0), (4, 0), (4, 1)], ids=["one", "chain", "tree"])
@pytest.mark.parametrize("axis", ["fp32", "bf16", "fp16-sr", "int8"])
@pytest.mark.parametrize("op", ["ssm_replay", "ssm_update"])
def test_the_others_keep_their_bits(
    op: str, axis: str, new: int, tree: int, cuda: torch.device
) -> None:
    """Outputs, states, lanes and rings."""
    case = Case(H=128, P=64, N=128, G=8, STATE=axis, NEW=new, TREE=tree)
    check_others(SPECS[op], case, 64, cuda, SPOILT)
