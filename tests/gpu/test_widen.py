"""Weights and keys decoded once, on the GPU: every number, and the bits of the products."""

import pytest
import torch

from nemotriton.autotune.parity import generator
from nemotriton.kernels import attend_prefill, attention, fp8_matmul, widen_fp8
from nemotriton.kernels.gemm_quant import FP8_MATMUL
from nemotriton.kernels.gemm_quant_tiles import WIDENED, generic_tile
from nemotriton.kernels.op import Case, Tile, use_tile
from nemotriton.kernels.paged import attention_inputs

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e4m3_number(dtype: torch.dtype, cuda: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=cuda).repeat(4, 8)
    codes = codes.view(torch.float8_e4m3fn)
    found, want = widen_fp8(codes, dtype), codes.to(dtype)
    assert bool(((found == want) | (found.isnan() & want.isnan())).all())


def test_products_of_a_widened_weight_have_the_bits_of_decoding_in_the_product(
    cuda: torch.device,
) -> None:
    case = Case(N=640, K=1024, Q=0)
    args = FP8_MATMUL.make(case, 700, cuda, BF16, generator(0, cuda))
    with use_tile("fp8_matmul", generic_tile(case, 700)):
        want = fp8_matmul(**args)
    for tile in WIDENED[:2]:
        with use_tile("fp8_matmul", tile):
            assert torch.equal(fp8_matmul(**args), want)


def test_attention_over_widened_keys_has_the_same_bits(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(H=32, Hkv=2, Dh=128, page=64, fp8=1)
    plan = [(300, 300), (1, 700), (200, 513), (0, 0)]
    args = attention_inputs(case, plan, cuda, BF16, generator(0, cuda))
    with use_tile("attend_prefill", Tile(BLOCK_M=128, BLOCK_N=64, num_warps=8, num_stages=2)):
        want = attend_prefill(**args)
        monkeypatch.setattr(attention, "WIDE_WORK", 0)
        assert torch.equal(attend_prefill(**args), want)
