"""The jit encoders, decoders and quantisers against their twins, to the bit.

The checks take a device: the GPU tests run the same ones on compiled kernels."""

import pytest
import torch
import triton
import triton.language as tl

from nemotriton.kernels import fp4
from nemotriton.kernels.fp4 import (
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    load_fp8,
    load_nvfp4,
    nvfp4_codes,
    nvfp4_round,
    reciprocal,
)


@triton.jit
def _e2m1_encode(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y_ptr + i, e2m1_encode(tl.load(x_ptr + i)))


@triton.jit
def _e4m3_encode(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y_ptr + i, e4m3_encode(tl.load(x_ptr + i)))


@triton.jit
def _e2m1_decode(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y_ptr + i, e2m1_decode(tl.load(x_ptr + i).to(tl.int32)))


@triton.jit
def _e4m3_decode(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y_ptr + i, e4m3_decode(tl.load(x_ptr + i).to(tl.int32)))


@triton.jit
def _reciprocal(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    tl.store(y_ptr + i, reciprocal(tl.load(x_ptr + i)))


@triton.jit
def _codes(x_ptr, g, codes_ptr, scale_ptr, R: tl.constexpr):
    r, c = tl.arange(0, R), tl.arange(0, 16)
    i = r[:, None, None] * 16 + c[None, None, :]
    codes, scale = nvfp4_codes(tl.load(x_ptr + i), tl.load(g))
    tl.store(codes_ptr + i, codes)
    tl.store(scale_ptr + r[:, None], scale)


@triton.jit
def _round(x_ptr, g, y_ptr, R: tl.constexpr):
    i = tl.arange(0, R)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(y_ptr + i, nvfp4_round(tl.load(x_ptr + i), tl.load(g)))


@triton.jit
def _load_nvfp4(w_ptr, s_ptr, y_ptr, N: tl.constexpr, K, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    n = tl.arange(0, N)
    values = load_nvfp4(w_ptr, s_ptr, n, 0, K, K // 2, K // 16, EVEN, BLOCK_K)
    tl.store(y_ptr + n[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], values)


@triton.jit
def _load_fp8(w_ptr, y_ptr, N: tl.constexpr, K, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    n = tl.arange(0, N)
    values = load_fp8(w_ptr, n, 0, K, K, EVEN, BLOCK_K)
    tl.store(y_ptr + n[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], values)


def bits(x: torch.Tensor) -> torch.Tensor:
    """fp32 as integers on the CPU, every NaN alike."""
    x = x.cpu().contiguous()
    return torch.where(x.isnan(), torch.tensor(0x7FC00000, dtype=torch.int32), x.view(torch.int32))


def numbers() -> torch.Tensor:
    """fp32: every fp16 number, all ties of both formats with their neighbours, extremes, NaN."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    tables = (fp4.e4m3_decode_ref(torch.arange(0x7F, dtype=torch.uint8)), torch.tensor([5.0, 7.0]))
    e2m1 = fp4.e2m1_decode_ref(torch.arange(8, dtype=torch.uint8))
    ties = torch.cat([(t[1:] + t[:-1]) / 2 for t in (*tables, e2m1)])
    around = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(ties * 2)])
    low = torch.tensor([1e-45, 1e-38, 1.2e-38, 2.0**-10, 2.0**-11])
    special = torch.tensor([0.0, 448, 464, 480, 3e38, float("inf"), float("nan")])
    edge = torch.cat([around, low, special])
    x = torch.cat([halves, edge, -edge])
    return torch.cat([x, x.new_zeros(2**17 - len(x))])


def check_encoder(name: str, device: torch.device) -> None:
    x = numbers()
    y = torch.full(x.shape, -1, dtype=torch.int32, device=device)
    kernel = {"e2m1": _e2m1_encode, "e4m3": _e4m3_encode}[name]
    kernel[(len(x) // 8192,)](x.to(device), y, N=8192)
    want = getattr(fp4, f"{name}_encode_ref")(x).view(torch.uint8).int()
    assert torch.equal(y.cpu(), want), x[y.cpu() != want][:8]


def check_decoders(device: torch.device) -> None:
    for name, kernel, n in (("e2m1", _e2m1_decode, 16), ("e4m3", _e4m3_decode, 256)):
        codes, y = torch.arange(n, dtype=torch.uint8), torch.zeros(n, device=device)
        kernel[(1,)](codes.to(device), y, N=n)
        assert torch.equal(bits(y), bits(getattr(fp4, f"{name}_decode_ref")(codes)))


def check_reciprocal(device: torch.device) -> None:
    x = torch.cat([torch.logspace(-45, 38, 248), torch.tensor([0.0, 1e-45, 3e38, float("inf")])])
    x = torch.cat([x, torch.full((4,), float("nan"))])
    y = torch.zeros(256, device=device)
    _reciprocal[(1,)](x.to(device), y, N=256)
    assert torch.equal(bits(y), bits(fp4.reciprocal_ref(x)))
    assert float(y[248]) == torch.finfo(torch.float32).max


def check_every_scale_and_code(block_k: int, device: torch.device) -> None:
    """Row b of the matrix: all 16 codes under scale byte b."""
    codes = fp4.pack(torch.arange(16, dtype=torch.uint8).repeat(256, 1))
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    y = torch.full((256, block_k), float("nan"), device=device)
    args = (codes.to(device), scales.to(device), y)
    _load_nvfp4[(1,)](*args, N=256, K=16, EVEN=block_k == 16, BLOCK_K=block_k)
    y = y.cpu()
    want = fp4.nvfp4_values_ref(codes, scales.view(torch.float8_e4m3fn))
    assert torch.equal(bits(y[:, :16]), bits(want))
    assert not y[:, 16:].any()  # columns past the matrix are zeros
    assert not y[0, :16].any()  # a scale of zero
    assert not y[0x7F, 0]  # a zero code under a NaN scale
    assert y[0x7F, 1:8].isnan().all()
    for dtype in (torch.bfloat16, torch.float16):  # what the tensor cores are given is exact
        assert torch.equal(bits(y.to(dtype).float()), bits(y))


def check_every_fp8_byte(block_k: int, device: torch.device) -> None:
    byte = torch.arange(256, dtype=torch.uint8).view(16, 16)
    y = torch.full((16, block_k), float("nan"), device=device)
    _load_fp8[(1,)](byte.to(device), y, N=16, K=16, EVEN=block_k == 16, BLOCK_K=block_k)
    y = y.cpu()
    assert torch.equal(bits(y[:, :16]), bits(fp4.e4m3_decode_ref(byte)))
    assert not y[:, 16:].any()


def blocks() -> torch.Tensor:
    """32 blocks of 16: ordinary, wide, tiny, huge, zero, with NaN and infinities, all ties."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(32, 16, generator=rng)
    x[1] *= torch.exp(4 * torch.randn(16, generator=rng))
    x[2:14] *= torch.tensor([0, -0.0, 1e-6, 2e-3, 1e-9, 1e-41, 1e9, 1e30, 5, 2, 0.1, 7])[:, None]
    x[14, 5], x[15, 5], x[16, 5] = float("nan"), float("inf"), -float("inf")
    x[17] = fp4.e2m1_decode_ref(torch.arange(16, dtype=torch.uint8))
    x[18] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0] * 2)
    x[18, 0] = 6
    return x


def check_quantiser(g: float, device: torch.device) -> None:
    x, scale = blocks(), torch.tensor(g)
    codes = torch.full((32, 16), -1, dtype=torch.int32, device=device)
    scales = torch.full((32, 1), -1, dtype=torch.int32, device=device)
    _codes[(1,)](x.to(device), scale.to(device), codes, scales, R=32)
    want, want_scales = fp4.nvfp4_codes_ref(x, scale)
    assert torch.equal(scales.cpu(), want_scales.view(torch.uint8).int())
    assert torch.equal(codes.cpu(), fp4.unpack(want).int())
    y = torch.zeros(32, 16, device=device)
    _round[(1,)](x.to(device), scale.to(device), y, R=32)
    assert torch.equal(bits(y), bits(fp4.nvfp4_round_ref(x, scale)))


GLOBAL_SCALES = (1.0, 1 / 448, 0.00137, 3.7e-7, 1e-40, 123.0, 0.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["e2m1", "e4m3"])
def test_encoders_equal_the_twins(name: str) -> None:
    check_encoder(name, CPU)


def test_decoders_equal_the_twins() -> None:
    check_decoders(CPU)


def test_reciprocal_is_finite_and_exact() -> None:
    check_reciprocal(CPU)


@pytest.mark.parametrize("block_k", [16, 64])
def test_every_scale_byte_times_every_code(block_k: int) -> None:
    check_every_scale_and_code(block_k, CPU)


@pytest.mark.parametrize("block_k", [16, 32])
def test_every_fp8_byte(block_k: int) -> None:
    check_every_fp8_byte(block_k, CPU)


@pytest.mark.parametrize("g", GLOBAL_SCALES)
def test_quantiser_equals_the_twin(g: float) -> None:
    check_quantiser(g, CPU)
