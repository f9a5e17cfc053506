"""Attention by warp roles on Hopper: against the plain form, itself, and its cuts."""

import random

import pytest
import torch

from nemotriton.autotune.parity import generator
from nemotriton.kernels import attend_prefill
from nemotriton.kernels.attention_roles import has_roles
from nemotriton.kernels.op import Args, Case, Tile, use_tile
from nemotriton.kernels.paged import attention_inputs

BF16 = torch.bfloat16
SUPER = Case(H=32, Hkv=2, Dh=128, page=64, fp8=0)
PLAIN = Tile(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)
RAGGED = [(70, 70), (0, 0), (3, 0), (1, 130), (700, 2777), (65, 128), (0, 50), (1500, 1500)]


def inputs(
    plan: list[tuple[int, int]],
    where: torch.device,
    case: Case = SUPER,
    dtype: torch.dtype = BF16,
) -> Args:
    args = attention_inputs(case, plan, where, dtype, generator(0, where))
    if not has_roles(args["q"], args["k_cache"], args["v_cache"]):
        pytest.skip("written for compute capability 9.0")
    return args


@pytest.mark.parametrize(
    "case,dtype",
    [
        (SUPER, BF16),
        (SUPER, torch.float16),
        (Case(H=4, Hkv=4, Dh=128, page=128, fp8=0), BF16),
        (Case(H=64, Hkv=1, Dh=128, page=64, fp8=0), BF16),
        (Case(H=32, Hkv=2, Dh=128, page=64, fp8=1), BF16),
    ],
    ids=str,
)
def test_the_plain_form_agrees(case: Case, dtype: torch.dtype, cuda: torch.device) -> None:
    """Also behind the last sequence, where q is NaN, and at pads."""
    args = inputs(RAGGED, cuda, case, dtype)
    rest = torch.full((9, case.H, 128), torch.nan, dtype=dtype, device=cuda)
    args["q"] = torch.cat([args["q"], rest])
    found = attend_prefill(**args)
    with use_tile("attend_prefill", PLAIN):
        plain = attend_prefill(**args)
    assert bool(found.isfinite().all())
    assert not found[70:73].any()
    assert not found[-9:].any()
    error = (found.double() - plain.double()).norm() / plain.double().norm()
    assert 0 < float(error) < 4e-3


def test_bits_repeat(cuda: torch.device) -> None:
    """A race shows as a bit that moves; so does a register that is written too early."""
    args = inputs([(3000, 9000), (2000, 2000), (1, 700)], cuda)
    first = attend_prefill(**args)
    assert all(torch.equal(attend_prefill(**args), first) for _ in range(20))


def test_a_prompt_in_pieces_beside_others_has_the_bits_of_the_whole(cuda: torch.device) -> None:
    args = inputs([(1500, 1500), (800, 1300), (5, 9)], cuda)
    whole = attend_prefill(**args)
    for first, last in ((0, 1), (1, 333), (333, 700), (700, 1499), (1499, 1500)):
        alone = {
            "q": args["q"][first:last],
            "cu": torch.tensor([0, last - first], dtype=torch.int32, device=cuda),
            "pages": args["pages"][:1],
            "lengths": torch.tensor([last], dtype=torch.int32, device=cuda),
            "max_length": last,
        }
        assert torch.equal(attend_prefill(**args | alone), whole[first:last])


def test_a_sick_neighbour_reaches_nobody(cuda: torch.device) -> None:
    """NaN in the next sequence's rows, and in every key behind a block's last."""
    args = inputs([(300, 300), (200, 400)], cuda)
    whole = attend_prefill(**args)
    args["q"][300:] = torch.nan
    pages = args["pages"][0].long()
    for name in ("k_cache", "v_cache"):
        args[name][pages[4], 32:] = torch.nan  # keys 288 and up
    found = attend_prefill(**args)
    assert torch.equal(found[:288], whole[:288])


def test_random_batches_row_by_row(cuda: torch.device) -> None:
    """Each row, into memory full of NaN: items that are left out, or stored in another's place."""
    draw = random.Random(0)
    for _ in range(60):
        plan = []
        for _ in range(draw.choice([1, 2, 5, 20])):
            new = draw.choice([0, 1, 7, 64, draw.randrange(1, 1200)])
            context = draw.choice([0, 0, 1, 63, draw.randrange(3000)])
            plan.append((new, 0 if draw.random() < 0.1 else new + context))
        args = inputs([*plan, (5, 9)], cuda)
        torch.full_like(args["q"], torch.nan)  # what is allocated next
        found = attend_prefill(**args).double()
        with use_tile("attend_prefill", PLAIN):
            plain = attend_prefill(**args).double()
        error = (found - plain).norm(dim=-1) / plain.norm(dim=-1).clamp(min=1e-6)
        assert bool((error < 2e-2).all()), plan
