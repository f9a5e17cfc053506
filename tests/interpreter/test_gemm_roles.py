"""The e4m3 product by roles for Hopper, by emulation."""

from typing import Any

import pytest
import torch

from nemotriton.autotune.parity import generator
from nemotriton.kernels import gemm_roles
from nemotriton.kernels.fp4 import random_fp8
from nemotriton.kernels.gemm import MATMUL
from nemotriton.kernels.gemm_quant import FP8_MATMUL
from nemotriton.kernels.gemm_roles import roles_tile
from nemotriton.kernels.gemm_square import square_tile
from nemotriton.kernels.op import Case, KernelSpec, Tile, use_tile
from tests.interpreter.gluon_emulation import emulate

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
SMS = 2  # fewer than tiles, so that a program goes from one to the next
FORMS = [(E4M3, (256, 128, 128)), (E4M3, (128, 256, 128)), (BF16, (128, 256, 64))]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter(range(100))

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        options = {k: v for k, v in meta.items() if k not in ("num_warps", "maxnreg")}
        emulate((gemm_roles,), "_roles", min(grid[0], SMS), list(args), options, next(seeds))

    monkeypatch.setattr(gemm_roles, "launch", run)


@pytest.mark.parametrize("dtype,block", FORMS)
@pytest.mark.parametrize("sizes", [(300, 392, 528), (3, 8, 16)])
@pytest.mark.parametrize("full", [False, True])
def test_against_the_numbers(
    dtype: torch.dtype, block: tuple[int, int, int], sizes: tuple[int, int, int], full: bool
) -> None:
    """Over every edge; a program's second tile, and stages that come round more than once."""
    T, N, K = sizes
    rng = torch.Generator().manual_seed(T)
    x, w = (random_fp8((n, K), torch.device("cpu"), rng).to(dtype) for n in (T, N))
    scale, scales = 1.0, (None, None)
    b, r = None, None
    if full or dtype == E4M3:
        scale, scales = 0.5 * K**-0.5, (torch.tensor(0.25), torch.tensor(2 * K**-0.5))
    if full:
        b, r = torch.randn(N, generator=rng), torch.randn(T, N, generator=rng)
    y = torch.full((T, N), torch.nan, dtype=BF16)
    gemm_roles.roles(x, w, scales, b, full, r, y, roles_tile(*block, stages=3, group=2))
    want = (x.double() @ w.double().T) * scale
    if full:
        want = (want + b).relu().square() + r
    assert torch.allclose(y.double(), want, rtol=2**-8, atol=1e-4)


def test_which_operands_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, y = (torch.zeros(n, 32, dtype=BF16) for n in (4, 8, 4))
    assert not gemm_roles.has_roles(x, w, y)  # interpreted
    monkeypatch.setattr(gemm_roles, "target", lambda where: 90)
    assert gemm_roles.has_roles(x, w, y)
    assert not gemm_roles.has_roles(x, w, y.float())
    assert not gemm_roles.has_roles(x, w[:, 1:], y)  # two bytes off
    assert not gemm_roles.has_roles(x, w, torch.zeros(4, 12, dtype=BF16))  # rows of 24 bytes
    monkeypatch.setattr(gemm_roles, "target", lambda where: 100)
    assert not gemm_roles.has_roles(x, w, y)


@pytest.mark.parametrize("tile", [gemm_roles.CODES, gemm_roles.NUMBERS], ids=["e4m3", "bf16"])
def test_a_tile_of_roles_elsewhere(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The square form takes over, with a block of as many columns."""
    taken: list[Tile] = []
    monkeypatch.setattr(gemm_roles, "square", lambda *args: taken.append(args[-1]))
    x, w, y = (torch.zeros(n, 16, dtype=BF16) for n in (4, 16, 4))
    gemm_roles.multiply_many(x, w, (None, None), None, False, None, y, tile)
    assert taken == [square_tile((128, 128, int(tile["BLOCK_K"]), 8, 3))]


@pytest.mark.parametrize("spec", [FP8_MATMUL, MATMUL], ids=["e4m3", "bf16"])
def test_the_ops_take_it(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_roles, "target", lambda where: 90)
    monkeypatch.setattr(gemm_roles, "square", None)
    e4m3 = spec is FP8_MATMUL
    case = Case(N=80, K=336, Q=1) if e4m3 else Case(N=80, K=336, ieee=0)
    cpu = torch.device("cpu")
    args = spec.make(case, 17, cpu, BF16, generator(0, cpu))
    with use_tile(spec.op.name, gemm_roles.CODES if e4m3 else gemm_roles.NUMBERS):
        found = spec.op.triton(**args)
    torch.testing.assert_close(found, spec.op.ref(**args), rtol=2**-7, atol=1e-3)
