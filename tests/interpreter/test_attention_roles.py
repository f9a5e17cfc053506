"""Attention's form for Hopper: its table of work in the interpreter, its kernel by emulation."""

import itertools
from typing import Any

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.kernels import attention_hopper, attention_loads, attention_roles
from nemotriton.kernels.attention import ATTEND_PREFILL, attend_prefill
from nemotriton.kernels.attention_hopper import _attend_roles
from nemotriton.kernels.attention_roles import has_roles
from nemotriton.kernels.fixed_order import PREFILL, fixed_order
from nemotriton.kernels.op import Args, Case, Tile, launch, use_tile
from nemotriton.kernels.paged import attention_inputs
from tests.conftest import Poison
from tests.interpreter.gluon_emulation import emulate

CPU = torch.device("cpu")
BF16 = torch.bfloat16
CASE = Case(H=32, Hkv=2, Dh=128, page=64, fp8=0)
TILE = Tile(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2, ROLES=True)
SMS = 3  # fewer than items, so that a program goes from one to the next


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if on Hopper: the op takes this form, and its second kernel is emulated; its launches."""
    seeds = itertools.count()
    launched = []

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        if kernel is not _attend_roles:
            launch(kernel, grid, *args, **meta)
            return
        options = {k: v for k, v in meta.items() if k not in ("num_warps", "maxnreg", "launch_pdl")}
        modules = (attention_loads, attention_hopper)
        emulate(modules, "_attend_roles", SMS, list(args), options, next(seeds))
        launched.append(SMS)

    monkeypatch.setattr(attention_roles, "launch", run)
    monkeypatch.setattr(attention_roles, "target", lambda where: 90)
    with use_tile("attend_prefill", TILE):
        yield launched


def inputs(plan: list[tuple[int, int]], case: Case = CASE, dtype: torch.dtype = BF16) -> Args:
    return attention_inputs(case, plan, CPU, dtype, parity.generator(3, CPU))


def right(args: Args) -> None:
    out = parity.run(ATTEND_PREFILL, args)
    twin, exact = parity.run(ATTEND_PREFILL, args, ref=True), parity.oracle(ATTEND_PREFILL, args)
    verdict = parity.compare(ATTEND_PREFILL, out, twin, exact)
    assert verdict.ok, verdict.detail


def test_ragged_pieces(emulated: list[int], poison: Poison) -> None:
    """Fresh and continued ones, a pad, an empty one, one token; blocks of keys whole and short, and
    rows of which the second token sees a block more."""
    right(inputs([(9, 9), (0, 5), (3, 0), (1, 130), (20, 277), (5, 128), (2, 129)]))
    assert len(emulated) == 1


@pytest.mark.parametrize(
    "case,dtype",
    [
        (Case(H=4, Hkv=1, Dh=128, page=128, fp8=0), torch.float16),
        (Case(H=1, Hkv=1, Dh=128, page=64, fp8=0), BF16),
        (Case(H=64, Hkv=1, Dh=128, page=64, fp8=0), BF16),
    ],
    ids=str,
)
def test_other_groups_pages_and_dtypes(
    case: Case, dtype: torch.dtype, emulated: list[int], poison: Poison
) -> None:
    right(inputs([(40, 300), (2, 2)], case, dtype))
    assert emulated


def test_rows_of_no_sequence_are_zeros(emulated: list[int], poison: Poison) -> None:
    args = inputs([(3, 40), (2, 0)])
    args["q"] = torch.cat([args["q"], torch.full((11, 32, 128), torch.nan, dtype=BF16)])
    out = attend_prefill.triton(**args)
    assert bool(out[:3].isfinite().all())
    assert not out[3:].any()
    args["lengths"].zero_()
    assert not attend_prefill.triton(**args).any()


def test_a_prompt_in_pieces_beside_others_has_the_bits_of_the_whole(emulated: list[int]) -> None:
    args = inputs([(21, 150), (50, 150)])
    whole = attend_prefill.triton(**args)
    for s, first, last in ((0, 0, 1), (0, 1, 21), (1, 0, 10), (1, 10, 47), (1, 47, 50)):
        start = int(args["cu"][s])
        left = int(args["cu"][s + 1]) - start - last
        alone = {
            "q": args["q"][start + first : start + last],
            "cu": torch.tensor([0, last - first], dtype=torch.int32),
            "pages": args["pages"][s : s + 1],
            "lengths": args["lengths"][s : s + 1] - left,
        }
        got = attend_prefill.triton(**args | alone)
        assert torch.equal(got, whole[start + first : start + last])
    assert len(emulated) == 6


def test_heads_in_a_wider_row_and_scales(emulated: list[int], poison: Poison) -> None:
    """q as a part of a projection's row; scales as those of widened caches."""
    args = inputs([(5, 70)])
    wide = torch.full((5, 36, 128), torch.nan, dtype=BF16)
    wide[:, :32] = args["q"]
    right(args | {"q": wide[:, :32], "k_scale": torch.tensor(0.7), "v_scale": torch.tensor(3.0)})
    assert emulated


def test_fp8_caches_are_widened_whatever_the_length(emulated: list[int], poison: Poison) -> None:
    """Or a prompt's first pieces would have other bits than its later ones."""
    right(inputs([(5, 70), (1, 3)], Case(**{**CASE, "fp8": 1})))
    assert emulated


def test_the_plain_form_agrees(emulated: list[int]) -> None:
    args = inputs([(9, 200), (30, 30)])
    mine = attend_prefill.triton(**args).double()
    with fixed_order(PREFILL):
        plain = attend_prefill.triton(**args).double()
    assert len(emulated) == 1, "the invariant mode has the plain form"
    assert 0 < float((mine - plain).norm() / plain.norm()) < 4e-3


def test_which_calls_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache = torch.zeros(3, 32, 128, dtype=BF16), torch.zeros(2, 64, 2, 128, dtype=BF16)

    def taken(q: torch.Tensor = q, cache: torch.Tensor = cache) -> bool:
        return has_roles(q, cache, cache)

    assert taken()
    assert taken(cache=torch.zeros(9, 64, 2, 128, dtype=BF16)[3:])
    assert not taken(q=q[:0])
    assert not taken(q=torch.zeros(3, 32, 129, dtype=BF16)[..., 1:])  # two bytes off
    assert not taken(q=torch.zeros(3, 6, 128, dtype=BF16))  # three heads a KV head
    assert not taken(q=q.float(), cache=cache.float())
    assert not taken(cache=torch.zeros(2, 32, 2, 128, dtype=BF16))
    assert not taken(cache=torch.zeros(4, 64, 2, 128, dtype=BF16)[::2])
    assert not taken(cache=torch.zeros(2, 64, 4, 128, dtype=BF16)[:, :, ::2])
    monkeypatch.setattr(attention_roles, "target", lambda where: 100)
    assert not taken()
