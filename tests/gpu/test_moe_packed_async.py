"""Blocks of prompt experts, full and not, at full width: the form that decodes a step ahead gives
the bits of the one that waits."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune.parity import generator
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.moe_packed_tiles import STEP_AHEAD, packed_tile
from nemotriton.kernels.moe_route import Routing
from nemotriton.kernels.op import use_tile
from nemotriton.model.config import ModelConfig
from tests.gpu.sanitize import here
from tests.interpreter.test_moe_packed_async import counted

EDGES = [1, 8, 15, 16, 17, 0, 32, 33, 48, 49, 64, 65, 96, 97, 127, 128, 129, 192, 225, 352]


@pytest.mark.parametrize("form", range(len(STEP_AHEAD)))
def test_blocks_of_every_height(form: int, cuda: torch.device) -> None:
    if not here(RUN_EXPERTS_PACKED, cuda):
        pytest.skip(f"written for {RUN_EXPERTS_PACKED.arches}")
    case = RUN_EXPERTS_PACKED.cases(ModelConfig.preset("super-120b"))[0]
    args = RUN_EXPERTS_PACKED.make(case, 2, cuda, torch.bfloat16, generator(form, cuda))
    routing = counted([*EDGES, *[0] * (case.E - len(EDGES))], case.K)
    routing = Routing(*(v.to(cuda) for v in routing[:4]))
    tokens = routing.ids.shape[0]
    x = torch.randn(tokens, case.L, device=cuda, generator=generator(form, cuda)).bfloat16()
    args |= {"x": x, "routing": routing, "arrivals": None}
    size, _ = STEP_AHEAD[form]
    tiles = [packed_tile(size, size, narrow=True, ahead=ahead) for ahead in (False, True)]
    found = []
    for tile in tiles:
        with use_tile("run_experts_packed", tile):
            found += [K.run_experts_packed.triton(**args) for _ in range(4)]
    assert found[0].isfinite().all()
    assert all(torch.equal(y, found[0]) for y in found)
