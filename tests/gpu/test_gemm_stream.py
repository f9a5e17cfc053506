"""Linear layers on the device, number by number."""

import pytest
import torch

import nemotriton.kernels as K
from nemotriton.autotune import parity
from nemotriton.kernels.gemm_packed import PACKED_MATMUL
from nemotriton.kernels.op import Case
from tests.interpreter import test_gemm_stream as checks


@pytest.mark.parametrize("form", checks.TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte(form: str, dtype: torch.dtype, cuda: torch.device) -> None:
    checks.check_every_byte(checks.TILES[form], dtype, cuda)


@pytest.mark.parametrize("columns", [400, 4096, 16384])
def test_sums_of_e4m3(columns: int, cuda: torch.device) -> None:
    checks.check_sums_of_e4m3(cuda, columns)


@pytest.mark.parametrize("N,K", [(18560, 4096), (4096, 5376), (2688, 1856)])
@pytest.mark.parametrize("T", [1, 7, 16, 100])
def test_packed_words_by_assembly_and_without(N: int, K: int, T: int, cuda: torch.device) -> None:
    case = Case(N=N, K=K)
    for asm in (True, False):
        tile = PACKED_MATMUL.default(case, T).but(ASM=asm)
        verdict = parity.check(PACKED_MATMUL, case, T, cuda, torch.bfloat16, tile)
        assert verdict.ok, f"ASM={asm}: {verdict.detail}"


@pytest.mark.parametrize("tokens", [1, 16, 64, 2048])
def test_a_row_is_the_same_from_call_to_call(tokens: int, cuda: torch.device) -> None:
    rng = parity.generator(0, cuda)
    x = torch.randn(tokens, 4096, device=cuda, generator=rng).bfloat16()
    w = torch.randn(18560, 4096, device=cuda, generator=rng).bfloat16()
    w8, one = w.to(torch.float8_e4m3fn), torch.ones((), device=cuda)
    for call in (
        lambda: K.matmul(x, w),
        lambda: K.fp8_matmul(x, w8, one),
        lambda: K.fp8_matmul(x, w8, one, one),
    ):
        first = call()
        assert all(torch.equal(first, call()) for _ in range(10))
