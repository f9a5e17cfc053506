"""The twins of the FP8 and NVFP4 ops against dense float64 arithmetic, and what the ops refuse."""

from collections.abc import Callable

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import offline, parity
from nemotriton.errors import UnsupportedError
from nemotriton.kernels.moe_route import Routing, route_experts_ref
from nemotriton.kernels.op import SPECS, Case
from nemotriton.model.nvfp4 import (
    dequantize_fp8,
    dequantize_nvfp4,
    nvfp4_values,
    quantize_fp8,
    quantize_nvfp4,
)

SCHEMES = pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
E4M3 = torch.float8_e4m3fn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(scheme: str, *shape: int, seed: int = 0) -> tuple[tuple, torch.Tensor]:
    """The op's weight arguments, and the dequantised weight in float64."""
    w = normal(*shape, seed=seed) * shape[-1] ** -0.5
    if scheme == "fp8":
        stored = quantize_fp8(w)
        return stored, stored.codes.double() * stored.global_scale.double()[..., None, None]
    stored = quantize_nvfp4(w)
    values = nvfp4_values(stored.codes, stored.scales).double()
    return stored, values * stored.global_scale.double()[..., None, None]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def activation_scale(scheme: str, x: torch.Tensor) -> torch.Tensor:
    return x.float().abs().max() / (448 if scheme == "fp8" else 2688)


def round_trip(scheme: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scheme == "fp8":
        return dequantize_fp8(quantize_fp8(x, scale))
    return dequantize_nvfp4(quantize_nvfp4(x, scale))


# ----------------------------------------------------------------------------------------- matmul
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
@SCHEMES
def test_matmul_equals_the_decoded_weight(scheme: str, dtype: torch.dtype, limit: float) -> None:
    stored, w = weight(scheme, 80, 336)
    x = normal(17, 336).to(dtype)
    y = getattr(K, f"{scheme}_matmul")(x, *stored)
    assert (y.shape, y.dtype) == ((17, 80), dtype)
    assert relative(y, x.double() @ w.T) < limit


@SCHEMES
def test_matmul_quantises_activations_only_when_asked(scheme: str) -> None:
    stored, w = weight(scheme, 48, 64)
    x = normal(9, 64)
    scale = activation_scale(scheme, x)
    y = getattr(K, f"{scheme}_matmul")(x, *stored, input_scale=scale)
    assert relative(y, round_trip(scheme, x, scale).double() @ w.T) < 1e-5
    sqnr = -20 * torch.tensor(relative(y, x.double() @ w.T)).log10()
    assert sqnr > (25 if scheme == "fp8" else 16), f"{sqnr:.1f} dB"


@SCHEMES
def test_saturated_activations_stay_finite(scheme: str) -> None:
    stored, _ = weight(scheme, 16, 32)
    y = getattr(K, f"{scheme}_matmul")(normal(3, 32) * 1e6, *stored, torch.tensor(1e-3))
    assert y.isfinite().all()


@SCHEMES
def test_fp16_does_not_overflow_before_the_scale(scheme: str) -> None:
    """Codes at their largest: the plain sum is beyond fp16, the scaled one is not."""
    x, g = torch.ones(2, 4096, dtype=torch.float16), torch.tensor(2.0**-10)
    if scheme == "fp8":
        stored, largest = (torch.full((4, 4096), 448.0).to(E4M3),), 448
    else:
        codes = torch.full((4, 2048), 0x77, dtype=torch.uint8)
        stored, largest = (codes, torch.full((4, 256), 448.0).to(E4M3)), 2688
    y = getattr(K, f"{scheme}_matmul")(x, *stored, g)
    assert torch.equal(y, torch.full((2, 4), float(largest * 4)).half())


# ---------------------------------------------------------------------------------------- experts
def experts(
    scheme: str, E: int, F: int, L: int
) -> tuple[tuple, tuple, tuple[torch.Tensor, torch.Tensor]]:
    up, up_w = weight(scheme, E, F, L, seed=1)
    down, down_w = weight(scheme, E, L, F, seed=2)
    return up, down, (up_w, down_w)


def dense(
    x: torch.Tensor,
    decoded: tuple[torch.Tensor, torch.Tensor],
    r: Routing,
    quantise: Callable[[torch.Tensor, int, int], torch.Tensor] = lambda x, side, e: x,
) -> torch.Tensor:
    """Every expert on every token, in float64, weighted by a dense [T, E] matrix."""
    up, down = decoded
    gate = torch.zeros(x.shape[0], up.shape[0], dtype=torch.float64)
    gate.scatter_(1, r.ids.long(), r.weights.double())
    y = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for e in range(up.shape[0]):
        h = (quantise(x, 0, e).double() @ up[e].T).relu() ** 2
        y += gate[:, e : e + 1] * (quantise(h, 1, e).double() @ down[e].T)
    return y


@pytest.mark.parametrize("E,top_k", [(5, 1), (29, 22), (96, 6), (128, 6), (160, 6), (512, 22)])
@pytest.mark.parametrize("T", [0, 1, 9])
@SCHEMES
def test_experts_equal_a_dense_loop(scheme: str, E: int, top_k: int, T: int) -> None:
    up, down, decoded = experts(scheme, E, 32, 16)
    x = normal(T, 16)
    r = route_experts_ref(normal(T, E, seed=3), None, top_k, 1, 1, True, 2.5)
    y = getattr(K, f"run_experts_{scheme}")(x, *up, *down, r)
    assert (y.shape, y.dtype) == ((T, 16), torch.float32)
    torch.testing.assert_close(y.double(), dense(x, decoded, r), rtol=1e-5, atol=1e-5)


@SCHEMES
def test_experts_quantise_with_their_own_scales(scheme: str) -> None:
    """The order: dequantise, relu^2, quantise; x and h each with its expert's static scale."""
    up, down, decoded = experts(scheme, 6, 32, 48)
    x = normal(17, 48)
    r = route_experts_ref(normal(17, 6, seed=3), None, 2)
    spread = torch.linspace(1, 2, 6)
    scale = activation_scale(scheme, x)
    scales = (scale * spread, scale * 8 * spread.flip(0))
    y = getattr(K, f"run_experts_{scheme}")(x, *up, *down, r, *scales)
    want = dense(x, decoded, r, lambda v, side, e: round_trip(scheme, v, scales[side][e]))
    # an h beside a rounding boundary may take the next code in float64; none does here
    assert relative(y, want) < 1e-5
    sqnr = -20 * torch.tensor(relative(y, dense(x, decoded, r))).log10()
    assert sqnr > (20 if scheme == "fp8" else 12), f"{sqnr:.1f} dB"


@SCHEMES
def test_experts_without_tokens_are_never_read(scheme: str) -> None:
    up, down, decoded = experts(scheme, 7, 32, 16)
    logits = torch.zeros(33, 7)
    logits[:, 4] = 9
    r = route_experts_ref(logits, None, 1)
    idle = [0, 1, 2, 3, 5, 6]
    for stored in (up, down):
        for part in stored:
            raw = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            raw[idle] = 0x7F if raw.dtype == torch.uint8 else float("nan")
    x = normal(33, 16)
    y = getattr(K, f"run_experts_{scheme}")(x, *up, *down, r)
    own = (decoded[0][4:5], decoded[1][4:5])
    alone = route_experts_ref(torch.zeros(33, 1), None, 1)
    torch.testing.assert_close(y.double(), dense(x, own, alone), rtol=1e-5, atol=1e-5)


def test_half_an_activation_scheme_is_refused() -> None:
    up, down, _ = experts("fp8", 4, 16, 16)
    r = route_experts_ref(torch.zeros(1, 4), None, 1)
    x, scale = normal(1, 16), torch.ones(4)
    with pytest.raises(UnsupportedError, match="give both"):
        K.run_experts_fp8.triton(x, *up, *down, r, scale)


# ---------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": torch.zeros(2, 48)}, "does not match a weight of"),
        ({"x": torch.zeros(2, 64, dtype=torch.float64)}, "must be bf16, fp16 or fp32"),
        ({"codes": torch.zeros(32, 32)}, "codes must be uint8"),
        ({"scales": torch.zeros(32, 3).to(E4M3)}, "do not match codes"),
        ({"scales": torch.zeros(32, 4)}, "scales must be e4m3"),
        ({"global_scale": torch.ones(32)}, "weight's scale must be float32"),
        ({"input_scale": torch.ones((), dtype=torch.float64)}, "input_scale must be float32"),
        ({"epilogue": "gelu"}, "epilogue 'gelu'"),
    ],
)
def test_nvfp4_matmul_refuses(change: dict, message: str) -> None:
    args = {
        "x": torch.zeros(2, 64),
        "codes": torch.zeros(32, 32, dtype=torch.uint8),
        "scales": torch.zeros(32, 4).to(E4M3),
        "global_scale": torch.ones(()),
    }
    with pytest.raises(UnsupportedError, match=message):
        K.nvfp4_matmul.triton(**(args | change))


def test_other_refusals() -> None:
    one, x = torch.ones(()), torch.zeros(1, 48)
    with pytest.raises(UnsupportedError, match="weight must be float8_e4m3fn"):
        K.fp8_matmul.triton(torch.zeros(1, 16), torch.zeros(4, 16), one)
    with pytest.raises(UnsupportedError, match="24 columns are not whole groups"):
        K.quantize_nvfp4.triton(torch.zeros(1, 24), one)
    with pytest.raises(UnsupportedError, match="norm groups of 24 columns"):
        K.gated_rms_norm_nvfp4.triton(x, x, torch.ones(48), one, 1e-5, 2)


# --------------------------------------------------------------------------------------- elsewhere
@pytest.mark.parametrize(
    "op", ["run_experts_nvfp4", "run_experts_fp8", "nvfp4_matmul", "fp8_matmul"]
)
def test_compiles_where_there_is_no_e4m3_type(op: str) -> None:
    """sm_80, with quantised activations, which the models' cases leave out."""
    spec = SPECS[op]
    axes = {"E": 8, "F": 128, "L": 64, "K": 2} if op.startswith("run") else {"N": 128, "K": 64}
    case = Case(**axes, Q=1)
    job = offline.Job(op, case, 4, "bf16", spec.default(case, 4), True, 80)
    rows = offline.compile_job(job)
    assert "_round_rows" in [row.kernel for row in rows]
    assert not any(row.faults for row in rows), [row.faults for row in rows]


def test_a_share_of_bytes_may_differ_where_the_spec_says_so() -> None:
    spec = SPECS["add_rms_norm_fp8"]
    want = {"out0": torch.zeros(200, 200, dtype=torch.uint8)}
    for wrong, ok in ((0, True), (4, True), (5, False)):
        got = {"out0": want["out0"].clone()}
        got["out0"].view(-1)[:wrong] = 1
        assert parity.compare(spec, got, want, want).ok is ok
    few = {"out0": want["out0"][:10]}
    assert not parity.compare(spec, {"out0": few["out0"] + 1}, few, few).ok
