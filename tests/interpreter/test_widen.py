"""Matrices and keys that are widened before a product, against the forms that decode in it."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.kernels import attend_prefill, attention, fp8_matmul, widen_fp8
from nemotriton.kernels.attention import ATTEND_PREFILL
from nemotriton.kernels.fixed_order import PREFILL, fixed_order
from nemotriton.kernels.gemm_packed import PACKED_MATMUL
from nemotriton.kernels.gemm_quant import FP8_MATMUL
from nemotriton.kernels.gemm_quant_tiles import WIDEN_TOKENS, WIDENED, generic_tile
from nemotriton.kernels.op import Args, Case, use_tile
from tests.conftest import Poison
from tests.interpreter.test_parity import build

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e4m3_number_is_exact(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    wide = widen_fp8(codes, dtype)
    assert torch.equal(wide.float().nan_to_num(1e4), codes.float().nan_to_num(1e4))


def ended(args: Args, N: int) -> Args:
    """The same product with a bias and a residual."""
    rows = args["x"].shape[0]
    more = {"bias": torch.randn(N).to(BF16), "residual": torch.randn(rows, N).to(BF16)}
    return {**args, **more, "epilogue": "residual"}


@pytest.mark.parametrize("T", [WIDEN_TOKENS - 1, WIDEN_TOKENS + 1])
def test_fp8_product(T: int, poison: Poison, monkeypatch: pytest.MonkeyPatch) -> None:
    """From WIDEN_TOKENS on the weight is widened, which changes no bit."""
    case = Case(N=80, K=144, Q=0)
    args = ended(build(FP8_MATMUL, case, T, "bf16"), case.N)
    with use_tile("fp8_matmul", generic_tile(case, T)):
        plain = fp8_matmul(**args)
    calls: list[int] = []
    widen = widen_fp8.triton
    monkeypatch.setattr(widen_fp8, "triton", lambda *a: (calls.append(1), widen(*a))[1])
    assert FP8_MATMUL.default(case, 1024) in WIDENED
    with use_tile("fp8_matmul", FP8_MATMUL.default(case, 1024)):
        assert torch.equal(fp8_matmul(**args), plain)
    assert len(calls) == (T >= WIDEN_TOKENS)


def test_few_rows_sum_as_many_do(poison: Poison) -> None:
    """A row alone, by the tile of a prompt of the invariant mode, and among many."""
    case = Case(N=80, K=144, Q=0)
    args = build(FP8_MATMUL, case, WIDEN_TOKENS, "bf16")
    with fixed_order(PREFILL), use_tile("fp8_matmul", WIDENED[0]):
        many = fp8_matmul(**args)
        for rows in (1, 40, 300):
            assert torch.equal(fp8_matmul(**{**args, "x": args["x"][:rows]}), many[:rows])


def test_rows_that_no_descriptor_fits_are_decoded_in_the_product(poison: Poison) -> None:
    case = Case(N=80, K=144, Q=0)
    args = build(FP8_MATMUL, case, WIDEN_TOKENS, "bf16")
    odd = torch.empty(WIDEN_TOKENS, 149, dtype=BF16)[:, 1:145].copy_(args["x"])
    with use_tile("fp8_matmul", WIDENED[0]):
        assert torch.equal(fp8_matmul(**{**args, "x": odd}), fp8_matmul(**args))


def test_packed_product(poison: Poison) -> None:
    case = Case(N=160, K=336)
    args = ended(build(PACKED_MATMUL, case, 130, "bf16"), case.N)
    with use_tile("packed_matmul", WIDENED[0]):
        out = parity.run(PACKED_MATMUL, args)
    twins = parity.run(PACKED_MATMUL, args, ref=True), parity.oracle(PACKED_MATMUL, args)
    verdict = parity.compare(PACKED_MATMUL, out, *twins, case)
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize("phase", [None, PREFILL])
def test_phases_take_one_form(phase: str | None) -> None:
    """A prompt's FP8 products sum alike in both forms; packed words stand in another order."""
    x = torch.zeros(1, 128, dtype=BF16)
    with fixed_order(phase):
        tiles = {T: FP8_MATMUL.tile(T, x, N=256, K=128, Q=0) for T in (300, 1024, 9000)}
        packed = PACKED_MATMUL.tile(9000, x, N=256, K=128)
    orders = {FP8_MATMUL.fixed.order(tile) for tile in tiles.values()}
    assert len(orders) == 1
    assert tiles[9000] in WIDENED
    assert (packed in WIDENED) is (phase is None)


@pytest.mark.parametrize("case", [ATTEND_PREFILL.small[2], ATTEND_PREFILL.small[4]], ids=str)
def test_fp8_keys(case: Case, poison: Poison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over widened keys gives the same bits, and is not taken in the invariant mode."""
    args = build(ATTEND_PREFILL, case, 70, "bf16")
    plain = attend_prefill(**args)
    monkeypatch.setattr(attention, "WIDE_WORK", 0)
    S, longest = args["lengths"].shape[0], args["max_length"]
    assert attention._widens(args["q"], args["k_cache"], S, longest)
    assert torch.equal(attend_prefill(**args), plain)
    with fixed_order(PREFILL):
        assert not attention._widens(args["q"], args["k_cache"], S, longest)


def test_what_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long fp8 contexts, as long as the scratch stays what the plan counts."""
    q = torch.empty(4096, 1, 1, dtype=BF16)
    cache = torch.empty(0, dtype=torch.float8_e4m3fn)
    assert attention._widens(q, cache, 1, 1 << 20)
    assert attention._widens(q, cache, 4, 1 << 16)
    assert not attention._widens(q, cache, 5, 1 << 16)
    assert not attention._widens(q[:8], cache, 1, 4096)
    assert not attention._widens(q.float(), cache, 1, 1 << 20)
    assert not attention._widens(q, cache.to(BF16), 1, 1 << 20)
