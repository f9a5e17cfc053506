"""Replay compiled for Hopper: a token's arithmetic is the same in all forms of the kernels.

Bits depend on what the compiler makes of a formula: a product and a sum are one instruction or two,
a sum after a product of matrices may become where that product starts, and which terms a tensor
core adds at a time follows from the type that an operand was loaded as. Whether the bits are equal
in the end a GPU tells (tests/gpu/test_ssm_replay.py).
"""

import collections
import re

import pytest
import torch

from nemotriton.kernels.op import Case, compile_only
from nemotriton.kernels.ssm_replay import SSM_REPLAY

DOT = re.compile(
    r"(%\S+) = tt\.dot %\S+, %\S+, (%[^ ,]+).*? : tensor<\d+x(\d+)x\w+, .*?kWidth = (\d)\}"
)


def compiled(state: str, new: int, **options: object) -> tuple[object, str]:
    """(the options, Triton's last form before LLVM) of the kernel for `new` tokens a sequence."""
    case = Case(H=2, P=32, N=128, G=1, STATE=state, NEW=new, TREE=0)
    rng = torch.Generator().manual_seed(0)
    args = SSM_REPLAY.make(case, 2 * new, torch.device("cpu"), torch.bfloat16, rng)
    args = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in args.items()}
    with compile_only(90) as done:
        SSM_REPLAY.op.triton(**args, **options)
    return done[0].kernel.metadata, done[0].kernel.asm["ttgir"]


@pytest.mark.parametrize(
    ("state", "new", "update"),
    [
        ("fp32", 4, True),
        ("int8", 4, True),
        ("int8", 4, False),
        ("fp16-sr", 4, True),
    ],
)
def test_sums_over_columns_have_one_order(state: str, new: int, update: bool) -> None:
    """Scores and the read of the state, up to the border and beyond: each product over the columns
    starts from zeros or from the columns before, codes are taken by fours and all else by twos."""
    options, text = compiled(state, new, update=update)
    assert not options.enable_fp_fusion  # type: ignore[attr-defined]
    dots = {name: (start, int(K), int(width)) for name, start, K, width in DOT.findall(text)}
    assert len(dots) == text.count("tt.dot "), "all are read"
    long = [dot for dot in dots.values() if dot[1] > 16]
    assert not [dot for dot in long if dot[0] in dots]
    widths = {2: 1, 4: 2} if state == "int8" else {2: 5}
    assert collections.Counter(width for _, _, width in long) == widths
