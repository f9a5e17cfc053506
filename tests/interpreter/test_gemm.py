"""The matrix product's forms and epilogues in the interpreter."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.kernels.gemm import MATMUL, matmul
from nemotriton.kernels.gemm_square import square_tile
from nemotriton.kernels.op import Tile, use_tile
from tests.conftest import Poison

BF16 = torch.bfloat16
SMALL = {"BLOCK_T": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 3, "num_warps": 1, "num_stages": 1}
STREAM = Tile(STREAM=True, BLOCK_T=8, BLOCK_N=16, BLOCK_K=16, num_warps=2, num_stages=1)
STREAM = STREAM.but(ROTATE=True, AHEAD=2, EARLY=False)
FORMS = {
    "square": Tile(**SMALL, SWAP=False, SPLITS=1),
    "swapped": Tile(**SMALL, SWAP=True, SPLITS=1),
    "split": Tile(**SMALL, SWAP=True, SPLITS=3),
    "square-split": Tile(**SMALL, SWAP=False, SPLITS=2),
}
TMA = square_tile((16, 32, 32, 1, 1)).but(GROUP=3)
HALVES = TMA.but(HALVES=2, BLOCK_N=16)
ALL = FORMS | {"stream": STREAM, "descriptors": TMA, "halves": HALVES}  # 16-bit products only


def arguments(T: int, N: int, K: int, dtype: torch.dtype = BF16) -> dict:
    rng = torch.Generator().manual_seed(T)
    return {
        "x": torch.randn(T, K, generator=rng).to(dtype),
        "weight": (torch.randn(N, K, generator=rng) * K**-0.5).to(dtype),
    }


def assert_parity(args: dict, tile: Tile) -> torch.Tensor:
    with use_tile("matmul", tile):
        out = parity.run(MATMUL, args)
    twin, exact = parity.run(MATMUL, args, ref=True), parity.oracle(MATMUL, args)
    verdict = parity.compare(MATMUL, out, twin, exact)
    assert verdict.ok, verdict.detail
    return out["out0"]


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("epilogue", ["none", "relu2", "residual"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_epilogues(form: str, epilogue: str, out_dtype: torch.dtype, poison: Poison) -> None:
    args = arguments(20, 70, 104) | {"epilogue": epilogue, "out_dtype": out_dtype}
    args["bias"] = torch.randn(70).to(BF16)
    if epilogue == "residual":  # a slice of wider rows
        args["residual"] = torch.randn(20, 81).to(BF16)[:, 5:75]
    assert_parity(args, ALL[form])


@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("K", [1, 31, 32, 33, 96, 97, 264])
def test_every_remainder_of_k(form: str, K: int, poison: Poison) -> None:
    assert_parity(arguments(5, 33, K), ALL[form])


@pytest.mark.parametrize("form", ["square", "swapped", "stream", "halves"])
@pytest.mark.parametrize("T,N", [(1, 1), (16, 32), (17, 33), (130, 100), (100, 1)])
def test_the_grouped_order_meets_every_tile(form: str, T: int, N: int, poison: Poison) -> None:
    assert_parity(arguments(T, N, 40), ALL[form])


@pytest.mark.parametrize("wide", ["x", "weight", "both"])
@pytest.mark.parametrize("form", FORMS)
def test_fp32_on_either_side(wide: str, form: str, poison: Poison) -> None:
    """The other side's digits must all arrive: the error is that of an fp32 product."""
    exact = arguments(9, 40, 128, torch.float32)
    args = {k: v if wide in (k, "both") else v.to(BF16) for k, v in exact.items()}
    y = assert_parity(args | {"out_dtype": torch.float32}, ALL[form])
    want = args["x"].double() @ args["weight"].double().T
    assert float((y - want).abs().max()) < 1e-6


@pytest.mark.parametrize("form", ALL)
def test_a_row_does_not_depend_on_how_many_there_are(form: str) -> None:
    """With one tile a row has the same fp32 bits alone, in a full tile and among several."""
    args = arguments(40, 48, 300) | {"out_dtype": torch.float32}
    with use_tile("matmul", ALL[form]):
        all_rows = parity.run(MATMUL, args)["out0"]
        for rows in (slice(0, 1), slice(0, 16), slice(16, 40), slice(32, 40)):
            part = parity.run(MATMUL, args | {"x": args["x"][rows]})["out0"]
            assert torch.equal(part, all_rows[rows])


def test_nan_passes_every_epilogue() -> None:
    args = arguments(4, 8, 32) | {"bias": torch.zeros(8).to(BF16)}
    args["x"][1, 3] = float("nan")
    for epilogue in ("none", "relu2"):
        y = matmul.triton(**args, epilogue=epilogue)
        assert y[1].isnan().all()
        assert not y[[0, 2, 3]].isnan().any()
