"""A request that is not finite: the others' bits, for one token, a chain and a tree."""

import pytest
import torch

from nemotriton.kernels.op import SPECS, Case
from tests.conftest import Poison
from tests.sick_requests import ALL, check_others


@pytest.mark.parametrize(
    "op,axis,new,tree",
    [
        ("ssm_replay", "fp32", 3, 0),
        ("ssm_replay", "int8", 3, 1),
        ("ssm_update", "fp16-sr", 1, 0),
        ("ssm_update", "int8", 3, 0),
    ],
)
def test_the_others_keep_their_bits(
    op: str, axis: str, new: int, tree: int, poison: Poison
) -> None:
    case = Case(H=1, P=5, N=16, G=1, STATE=axis, NEW=new, TREE=tree)
    check_others(SPECS[op], case, 7 if new > 1 else 4, torch.device("cpu"), [ALL])
