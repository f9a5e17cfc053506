"""Repacking for Hopper loses nothing: every code under every scale, odd sizes, bit for bit."""

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.fp4 import nvfp4_values_ref
from nemotriton.kernels.gemm_quant import random_nvfp4
from nemotriton.kernels.hopper_pack import (
    TILE,
    k_order,
    pack_hopper,
    packed_bytes,
    unpack_hopper,
)

CPU = torch.device("cpu")


def matrix(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and positive block scales [..., N, K]."""
    g = torch.Generator().manual_seed(seed)
    *lead, columns = shape
    codes = torch.randint(0, 256, (*lead, columns // 2), dtype=torch.uint8, generator=g)
    scales = torch.randint(1, 127, (*lead, columns // 16), dtype=torch.uint8, generator=g)
    return codes, scales.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "shape", [(128, 128), (3, 256, 384), (2, 48, 80), (2, 2, 130, 16), (1, 1856, 64), (0, 128, 128)]
)
def test_unpack_gives_every_bit_back(shape: tuple[int, ...]) -> None:
    codes, scales = matrix(*shape)
    words = pack_hopper(codes, scales)
    *lead, N, K = shape
    assert words.shape == (*lead, -(-N // TILE), -(-K // TILE), 2304)
    assert words.dtype == torch.int32
    again, scales_again = unpack_hopper(words, N, K)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again.view(torch.uint8), scales.view(torch.uint8))


def test_every_code_under_every_scale() -> None:
    """127 positive scales, NaN among them, each with the sixteen codes in a row."""
    row = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    codes = row.repeat(127, 1)
    scales = torch.arange(1, 128, dtype=torch.uint8).view(-1, 1).view(torch.float8_e4m3fn)
    again, scales_again = unpack_hopper(pack_hopper(codes, scales), 127, 16)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again.view(torch.uint8), scales.view(torch.uint8))


def test_zero_and_negative_scales_keep_their_values() -> None:
    codes, scales = matrix(16, 32)
    bytes_ = scales.view(torch.uint8)
    bytes_[0], bytes_[1], bytes_[2, 0], bytes_[3, 1] = 0, 0x80, 0xB8, 0xC3
    words = pack_hopper(codes, scales)
    found = nvfp4_values_ref(*unpack_hopper(words, 16, 32))
    assert torch.equal(found, nvfp4_values_ref(codes, scales))


def test_packing_in_pieces_is_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = matrix(3, 300, 160)
    whole = pack_hopper(codes, scales)
    for chunk in (1, 160 * 128, 3 * 300 * 160):
        monkeypatch.setattr("nemotriton.kernels.hopper_pack._CHUNK", chunk)
        assert torch.equal(pack_hopper(codes, scales), whole)


def test_sizes_in_bytes() -> None:
    """4.5 bits a weight; only what is not whole tiles costs more."""
    assert packed_bytes(2688, 1024) == 2688 * 1024 * 9 // 16
    assert packed_bytes(1856, 2688) == 1920 * 2688 * 9 // 16
    words = pack_hopper(*matrix(130, 16))
    assert packed_bytes(130, 16) == words.numel() * 4


@pytest.mark.parametrize("mma", [False, True])
def test_orders_are_permutations_inside_64(mma: bool) -> None:
    order = k_order(192, mma)
    assert torch.equal(order.sort().values, torch.arange(192))
    assert torch.equal(order // 64, torch.arange(192) // 64)
    assert torch.equal(order[1::2], order[0::2] + 1), "pairs of columns stay together"


def test_shapes_that_do_not_fit_are_refused() -> None:
    codes, scales = random_nvfp4((32, 64), CPU, torch.Generator())
    with pytest.raises(UnsupportedError, match="scales of shape"):
        pack_hopper(codes, scales[:, :2])
    with pytest.raises(UnsupportedError, match=r"not a matrix \[256, 64\]"):
        unpack_hopper(pack_hopper(codes, scales), 256, 64)
    with pytest.raises(UnsupportedError, match="96 columns"):
        k_order(96, True)
