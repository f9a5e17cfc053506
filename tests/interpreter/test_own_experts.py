"""Experts that a rank holds, of all that a routing chose among: the parts add up to the whole."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.kernels.moe_experts import RUN_EXPERTS
from nemotriton.kernels.moe_experts_packed import RUN_EXPERTS_PACKED
from nemotriton.kernels.moe_experts_quant import RUN_EXPERTS_FP8, RUN_EXPERTS_NVFP4
from nemotriton.kernels.moe_packed_tiles import packed_tile
from nemotriton.kernels.moe_route import OwnRouting, route_experts_ref
from nemotriton.kernels.op import Args, Case, KernelSpec, Tile, use_tile
from tests.conftest import Poison

CPU = torch.device("cpu")
E, TOP, T = 6, 3, 5
PAIR = Tile(BLOCK_M=1, BLOCK_N=16, BLOCK_K=32, num_warps=4, num_stages=1)
PACKED = packed_tile((8, 128, 128, 3, 2), (8, 128, 128, 3, 2))
FORMS: dict[str, tuple[KernelSpec, Tile | None]] = {
    "bf16": (RUN_EXPERTS, None),
    "bf16, pair by pair": (RUN_EXPERTS, PAIR),
    "fp8": (RUN_EXPERTS_FP8, None),
    "nvfp4": (RUN_EXPERTS_NVFP4, None),
    "packed, pairs": (RUN_EXPERTS_PACKED, PACKED.but(BLOCKS=0)),
    "packed, runs": (RUN_EXPERTS_PACKED, PACKED.but(BLOCKS=1)),
    "packed, tables": (RUN_EXPERTS_PACKED, PACKED),
}


def arguments(spec: KernelSpec) -> Args:
    case = Case(E=E, F=48, L=64, K=TOP, O=0)
    args = spec.make(case, T, CPU, torch.bfloat16, parity.generator(3, CPU))
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    logits[0, 3:] = 9  # a token none of whose experts the first rank has
    return args | {"routing": route_experts_ref(logits, None, TOP, 1, 1, True, 2.5)}


def of_rank(args: Args, first: int, end: int) -> Args:
    """The same for the experts first .. end - 1."""
    own = {
        name: value[first:end].contiguous()
        for name, value in args.items()
        if isinstance(value, torch.Tensor) and name != "x" and value.shape[:1] == (E,)
    }
    return args | own | {"routing": OwnRouting.of(args["routing"], first, end)}


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_two_ranks_add_up(form: str, poison: Poison) -> None:
    spec, tile = FORMS[form]
    args, name = arguments(spec), spec.op.name
    whole = getattr(K, f"{name}_ref")(**args)
    total = torch.zeros(T, 64)
    for first, end in ((0, 3), (3, E)):
        own = of_rank(args, first, end)
        twin = getattr(K, f"{name}_ref")(**own)
        with use_tile(name, tile) if tile is not None else pytest.MonkeyPatch.context():
            part = spec.op.triton(**own)
        assert torch.isfinite(part).all()
        assert float((part - twin).abs().max()) <= 0.02 * float(whole.abs().max())
        total += part.float()
        if first == 0:
            assert float(part[0].abs().max()) == 0.0
    assert float((total - whole.float()).abs().max()) <= 0.02 * float(whole.abs().max())
