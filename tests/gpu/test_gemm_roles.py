"""Products by roles on Hopper: the bits of the square form, on tiles that reach over every edge."""

import pytest
import torch

from nemotriton.kernels.fp4 import random_fp8
from nemotriton.kernels.gemm_roles import has_roles, roles, roles_tile
from nemotriton.kernels.gemm_square import square, square_tile
from nemotriton.kernels.op import target

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SQUARES = {
    E4M3: square_tile((128, 128, 128, 8, 4), halves=2),
    BF16: square_tile((128, 128, 64, 8, 3)),
}


@pytest.mark.parametrize(
    "dtype,block", [(E4M3, (256, 128, 128)), (E4M3, (128, 256, 128)), (BF16, (128, 256, 64))]
)
@pytest.mark.parametrize(
    "sizes", [(300, 1000, 512), (2048, 5376, 4096), (129, 264, 80), (4100, 4096, 2688)]
)
@pytest.mark.parametrize("full", [False, True])
def test_the_bits_of_the_square_form(
    dtype: torch.dtype,
    block: tuple[int, int, int],
    sizes: tuple[int, int, int],
    full: bool,
    cuda: torch.device,
) -> None:
    if target(cuda) != 90:
        pytest.skip("written for compute capability 9.0")
    T, N, K = sizes
    rng = torch.Generator(device=cuda).manual_seed(T)
    x, w = (random_fp8((n, K), cuda, rng).view(E4M3).to(dtype) for n in (T, N))
    scales = (torch.full((), 0.25, device=cuda), torch.full((), 2 * K**-0.5, device=cuda))
    ends = (None, None)
    if full:
        bias = torch.randn(N, generator=rng, device=cuda).bfloat16()
        ends = bias, torch.randn(T, N, generator=rng, device=cuda).bfloat16()
    found, want = (torch.full((T, N), torch.nan, dtype=BF16, device=cuda) for _ in range(2))
    assert has_roles(x, w, found)
    square(x, w, scales, ends[0], full, ends[1], want, SQUARES[dtype])
    for _ in range(5):
        found.fill_(torch.nan)
        roles(x, w, scales, ends[0], full, ends[1], found, roles_tile(*block))
        assert torch.equal(found, want)
