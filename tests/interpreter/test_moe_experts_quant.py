"""FP8 and NVFP4 experts on counts, widths and routings that the grid does not have."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.kernels.fp4 import nvfp4_values_ref
from nemotriton.kernels.moe_experts_quant import RUN_EXPERTS_FP8, RUN_EXPERTS_NVFP4
from nemotriton.kernels.moe_route import Routing, route_experts_ref
from nemotriton.kernels.op import Args, Case, KernelSpec, Tile, use_tile
from tests.conftest import Poison

CPU = torch.device("cpu")
TILE = Tile(BLOCK_M=16, BLOCK_N=256, BLOCK_K=128, num_warps=4, num_stages=3)
BF16 = torch.bfloat16
SPECS = pytest.mark.parametrize("spec", [RUN_EXPERTS_FP8, RUN_EXPERTS_NVFP4], ids=["fp8", "nvfp4"])


def arguments(
    spec: KernelSpec, T: int, E: int, F: int, L: int, routing: Routing, Q: int = 0
) -> Args:
    case = Case(E=E, F=F, L=L, K=1, Q=Q)
    return spec.make(case, T, CPU, BF16, parity.generator(E + F, CPU)) | {"routing": routing}


def check(spec: KernelSpec, args: Args) -> torch.Tensor:
    """The output, once it is as near to float64 as the twin."""
    with use_tile(spec.op.name, TILE):
        out = parity.run(spec, args)
    twin = parity.run(spec, args, ref=True)
    verdict = parity.compare(spec, out, twin, parity.oracle(spec, args))
    assert verdict.ok, verdict.detail
    return out["out0"]


def random_routing(T: int, E: int, K: int, groups: int = 1, top: int = 1) -> Routing:
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(T * E))
    return route_experts_ref(logits, None, K, groups, top, True, 2.5)


def to_one(T: int, E: int, expert: int) -> Routing:
    logits = torch.zeros(T, E)
    logits[:, expert] = 9
    return route_experts_ref(logits, None, 1)


@pytest.mark.parametrize(
    "E,K,groups,top",
    [(5, 1, 1, 1), (29, 22, 1, 1), (96, 6, 1, 1), (128, 6, 8, 3), (160, 6, 1, 1), (512, 22, 1, 1)],
)
@SPECS
def test_expert_counts(
    spec: KernelSpec, E: int, K: int, groups: int, top: int, poison: Poison
) -> None:
    check(spec, arguments(spec, 2, E, 16, 32, random_routing(2, E, K, groups, top)))


@pytest.mark.parametrize("F,L", [(1856, 80), (336, 672), (80, 928), (928, 16)])
@SPECS
def test_widths_that_no_tile_divides(spec: KernelSpec, F: int, L: int, poison: Poison) -> None:
    check(spec, arguments(spec, 2, 3, F, L, random_routing(2, 3, 1)))


@pytest.mark.parametrize("Q", [0, 1], ids=["weights", "activations"])
@pytest.mark.parametrize("T", [0, 1, 33])
@SPECS
def test_all_tokens_to_one_expert(spec: KernelSpec, T: int, Q: int, poison: Poison) -> None:
    """Three blocks of one expert, and nothing of its neighbours: those are all NaN."""
    args = arguments(spec, T, 7, 48, 32, to_one(T, 7, 4), Q)
    for name, value in args.items():
        if isinstance(value, torch.Tensor) and name != "x":
            sick = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
            sick[[0, 1, 2, 3, 5, 6]] = 0x7F if sick.dtype == torch.uint8 else float("nan")
    assert check(spec, args).isfinite().all()


def test_equals_bf16_experts_of_the_decoded_weights(poison: Poison) -> None:
    """Scales of powers of two commute with every rounding: the same bits."""
    routing = random_routing(5, 6, 2)
    args = arguments(RUN_EXPERTS_NVFP4, 5, 6, 48, 80, routing)
    args["up_global"] = 2.0 ** -torch.arange(4.0, 10.0)
    args["down_global"] = 2.0 ** -torch.arange(9.0, 3.0, -1)
    decoded = [
        nvfp4_values_ref(args[f"{name}_codes"], args[f"{name}_scales"])
        * args[f"{name}_global"][:, None, None]
        for name in ("up", "down")
    ]
    with use_tile("run_experts_nvfp4", TILE), use_tile("run_experts", TILE):
        got = K.run_experts_nvfp4.triton(**args)
        want = K.run_experts.triton(args["x"], *(w.to(BF16) for w in decoded), routing)
    assert torch.equal(got, want)


@SPECS
def test_scales_stay_with_their_expert(spec: KernelSpec, poison: Poison) -> None:
    """Doubling one expert's down scale doubles what its tokens get, and no other token's."""
    routing = random_routing(9, 5, 1)
    args = arguments(spec, 9, 5, 32, 48, routing)
    name = "down_scale" if "down_scale" in args else "down_global"
    expert = int(routing.ids[0, 0])
    changed = args | {name: args[name].clone()}
    changed[name][expert] *= 2
    a, b = spec.op.triton(**args).float(), spec.op.triton(**changed).float()
    mine = routing.ids[:, 0] == expert
    assert mine.any()
    assert not mine.all()
    assert torch.equal(b[mine], 2 * a[mine])
    assert torch.equal(b[~mine], a[~mine])


@SPECS
def test_a_token_has_the_same_bits_in_any_company(spec: KernelSpec) -> None:
    r = random_routing(19, 6, 2)
    args = arguments(spec, 19, 6, 48, 32, r, Q=1)
    with use_tile(spec.op.name, TILE):
        together = spec.op.triton(**args)
        for t in (0, 18):
            ids = r.ids[t : t + 1]
            order = ids.flatten().sort(stable=True)
            offsets = torch.searchsorted(order.values, torch.arange(7, dtype=torch.int32)).int()
            alone = Routing(ids, r.weights[t : t + 1], order.indices.int(), offsets)
            one = spec.op.triton(**(args | {"x": args["x"][t : t + 1], "routing": alone}))
            assert torch.equal(one[0], together[t])
