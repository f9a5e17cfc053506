"""Blocks that the router makes on the device, where its programs are through in any order."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.autotune.parity import generator
from nemotriton.kernels.dependent import independent
from nemotriton.kernels.moe_combine import combining
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.moe_few import FEWEST, FIRST, SHARE_EXPERT, find_blocks_ref
from nemotriton.kernels.moe_packed_tiles import one_launch, packed_default
from nemotriton.kernels.op import Args, Case, use_tile
from nemotriton.model.config import ModelConfig
from tests.gpu.sanitize import here
from tests.interpreter import test_moe_blocks as checks

SUPER = ModelConfig.preset("super-120b")
SHARED = SHARE_EXPERT.cases(SUPER)[0]
EXPERTS = RUN_EXPERTS_PACKED.cases(SUPER)[0]
NANO = RUN_EXPERTS_PACKED.cases(ModelConfig.preset("nano-30b"))[0]


@pytest.mark.parametrize("T", [FIRST, 5, FEWEST])
@pytest.mark.parametrize("how", checks.HOWS)
def test_whoever_is_through_last(how: str, T: int, cuda: torch.device) -> None:
    checks.check_blocks(SHARED, T, how, cuda, calls=50)


@pytest.mark.parametrize("T", [FIRST, FEWEST])
@pytest.mark.parametrize("how", checks.HOWS)
def test_experts_give_the_same_bits(how: str, T: int, cuda: torch.device) -> None:
    if not here(RUN_EXPERTS_PACKED, cuda):
        pytest.skip(f"written for {RUN_EXPERTS_PACKED.arches}")
    for tile in (packed_default(EXPERTS, T), one_launch((64, 6), (64, 6))):
        checks.check_same_bits(EXPERTS, T, how, cuda, tile, bool(EXPERTS.O))


@pytest.mark.parametrize("T", [1, 2, FIRST, FEWEST])
@pytest.mark.parametrize("case", [EXPERTS, NANO], ids=str)
def test_one_launch_again_and_again(case: Case, T: int, cuda: torch.device) -> None:
    """Whichever programs are last, in graphs of dependent launches: the bits of three launches."""
    if not here(RUN_EXPERTS_PACKED, cuda):
        pytest.skip(f"written for {RUN_EXPERTS_PACKED.arches}")
    args = RUN_EXPERTS_PACKED.make(case, T, cuda, torch.bfloat16, generator(T, cuda))
    if FIRST <= T <= FEWEST:
        args["routing"] = find_blocks_ref(args["routing"])
    for tile in (one_launch((64, 6), (64, 6)), one_launch((128, 4), (64, 6))):
        with use_tile("run_experts_packed", tile):
            want = K.run_experts_packed.triton(**args | {"arrivals": None})
            K.run_experts_packed.triton(**args)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = [K.run_experts_packed.triton(**args) for _ in range(4)]
        for _ in range(30):
            graph.replay()
            assert all(torch.equal(y, want) for y in found)
            assert not args["arrivals"].any()


@pytest.mark.parametrize("T", [1, 5, 64])
def test_rows_that_are_added_as_they_come(T: int, cuda: torch.device) -> None:
    """The order of atomic adds changes bits, and stays within the bounds of every order."""
    if not here(RUN_EXPERTS_PACKED, cuda):
        pytest.skip(f"written for {RUN_EXPERTS_PACKED.arches}")
    with combining("atomic"):
        verdict = parity.check(RUN_EXPERTS_PACKED, EXPERTS, T, cuda, torch.bfloat16, seed=T)
    assert verdict.ok, verdict.detail


def test_in_a_graph_of_dependent_launches(cuda: torch.device) -> None:
    """Router and experts in turn, several times: the down product reads the blocks before it waits,
    and every replay's are of new logits."""
    if not here(RUN_EXPERTS_PACKED, cuda):
        pytest.skip(f"written for {RUN_EXPERTS_PACKED.arches}")
    T, rng = FEWEST, generator(1, cuda)
    shared = checks.shared_args(SHARED, T, "drawn", cuda)
    experts = RUN_EXPERTS_PACKED.make(EXPERTS, T, cuda, torch.bfloat16, rng)
    given = [shared["logits"].clone() for _ in range(4)]

    def steps() -> list[torch.Tensor]:
        return [step(shared | {"logits": logits}, experts) for logits in given]

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps()
    for _ in range(5):
        for logits in given:
            logits.copy_(torch.randn(logits.shape, device=cuda, generator=rng))
        graph.replay()
        with independent():
            want = [step(shared | {"logits": x, "arrivals": None}, experts) for x in given]
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)
        assert not shared["arrivals"].any()


def step(shared: Args, experts: Args) -> torch.Tensor:
    routing, _ = K.share_expert.triton(**shared)
    return K.run_experts_packed.triton(**experts | {"routing": routing})
