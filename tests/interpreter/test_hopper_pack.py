"""Decoding packed NVFP4 words in a kernel: exact for every code and scale, in both orders.

The checks take a device: the GPU tests run the same ones on compiled kernels."""

import pytest
import torch
import triton
import triton.language as tl

from nemotriton.kernels import hopper_pack
from nemotriton.kernels.fp4 import nvfp4_values_ref
from nemotriton.kernels.hopper_pack import (
    fragments,
    k_order,
    pack_hopper,
    packed_product,
    position_column,
    tiles_of,
    to_position_order,
)
from nemotriton.kernels.op import INTERPRET
from tests.conftest import Poison

DEVICE = torch.device("cpu" if INTERPRET else "cuda")
FORMS = pytest.mark.parametrize("asm", [False] if INTERPRET else [False, True])
MMA = pytest.mark.parametrize("mma", [False, True], ids=["wgmma", "mma.sync"])


@triton.jit
def _decode(words_ptr, out_ptr, K: tl.constexpr, ASM: tl.constexpr, MMA: tl.constexpr):
    """bf16 [N, K] of one packed matrix, columns in `k_order`; a program a tile."""
    pid = tl.program_id(0).to(tl.int64)
    tile = words_ptr + pid * 2304
    block = tl.arange(0, 8)
    words = tl.load(tile + block[:, None] * 256 + tl.arange(0, 256)[None, :])
    scales = tl.load(tile + 2048 + block[:, None] * 32 + tl.arange(0, 32)[None, :])
    words, scales = words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True)
    n = pid // (K // 128) * 128 + tl.arange(0, 128)
    k = pid % (K // 128) * 128 + tl.arange(0, 128)
    tl.store(out_ptr + n[:, None] * K + k[None, :], fragments(words, scales, 8, 2, ASM, MMA))


def decode(words: torch.Tensor, asm: bool, mma: bool, warps: int) -> torch.Tensor:
    n, k, _ = words.shape
    out = torch.full((n * 128, k * 128), float("nan"), dtype=torch.bfloat16, device=words.device)
    options = {} if INTERPRET else {"num_warps": warps}
    _decode[(n * k,)](words, out, K=k * 128, ASM=asm, MMA=mma, **options)
    return out


def every_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales [128, 256] with each code under each of the 126 positive scales, and zero;
    which code stands where differs from row to row."""
    g = torch.Generator().manual_seed(0)
    scales = torch.arange(128 * 16).view(128, 16) % 127
    nibbles = torch.argsort(torch.rand(128, 16, 16, generator=g), -1).flatten(1).to(torch.uint8)
    codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return codes, scales.to(torch.uint8).view(torch.float8_e4m3fn)


@FORMS
@MMA
@pytest.mark.parametrize("warps", [1] if INTERPRET else [1, 2, 4, 8])
def test_decodes_every_code_under_every_scale(asm: bool, mma: bool, warps: int) -> None:
    codes, scales = every_pair()
    values = nvfp4_values_ref(codes, scales)
    assert len(values.unique()) > 400
    found = decode(pack_hopper(codes, scales).to(DEVICE), asm, mma, warps).cpu().float()
    assert torch.equal(found * 128, values[:, k_order(256, mma)])


@triton.jit
def _linear(
    x_ptr, words_ptr, y_ptr, T, N, W, K_TILES: tl.constexpr, STEPS: tl.constexpr,
    FIRST: tl.constexpr, NATURAL: tl.constexpr, EVEN: tl.constexpr, ORDER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """y [T, N] of up to eight rows x [T, W]; ORDER: y's columns in `k_order`."""
    pid = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, 16)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = x_ptr + tl.where(m < T, m, 0) * W
    y = packed_product(
        rows, m < T, words_ptr, pid, FIRST, W, STEPS, K_TILES, NATURAL, EVEN,
        16, BLOCK_N, BLOCK_K, 2, ASM, MMA,
    )  # fmt: skip
    y = y * 128.0
    if ORDER:
        y = to_position_order(y, MMA)
    tl.store(y_ptr + m[None, :] * N + n[:, None], y, mask=(m < T)[None, :] & (n < N)[:, None])


@FORMS
@MMA
@pytest.mark.parametrize(
    "N,K,block_n,block_k,natural",
    [(64, 128, 64, 64, False), (128, 256, 128, 128, False), (80, 144, 64, 128, True),
     (48, 80, 64, 64, True)],
)  # fmt: skip
def test_a_product_with_packed_weights(
    N: int, K: int, block_n: int, block_k: int, natural: bool, asm: bool, mma: bool, poison: Poison
) -> None:
    """Small integers under scales of powers of two: every sum is exact."""
    g = torch.Generator().manual_seed(N)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=g)
    scales = (torch.randint(6, 9, (N, K // 16), generator=g) * 8).to(torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    x = torch.randint(-4, 5, (5, K), generator=g).bfloat16()
    want = x.float() @ nvfp4_values_ref(codes, scales).T
    rows = x if natural else x[:, k_order(K, mma)]
    words, rows = pack_hopper(codes, scales).to(DEVICE), rows.contiguous().to(DEVICE)
    y = torch.empty((5, N), dtype=torch.float32, device=DEVICE)
    steps = -(-K // block_k)
    options = {} if INTERPRET else {"num_warps": 1 if mma else 4}
    _linear[(-(-N // block_n),)](
        rows, words, y, 5, N, K, K_TILES=tiles_of(K), STEPS=steps, FIRST=0, NATURAL=natural,
        EVEN=K % block_k == 0, ORDER=False, BLOCK_N=block_n, BLOCK_K=block_k, ASM=asm, MMA=mma,
        **options,
    )  # fmt: skip
    assert torch.equal(y.cpu(), want)


@MMA
def test_sums_over_part_of_the_columns_and_output_in_order(mma: bool) -> None:
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (64, 192), dtype=torch.uint8, generator=g)
    scales = torch.full((64, 24), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = torch.randint(-4, 5, (3, 384), generator=g).bfloat16()
    want = x[:, 128:256].float() @ nvfp4_values_ref(codes, scales)[:, 128:256].T
    y = torch.full((3, 64), float("nan"), device=DEVICE)
    rows = x[:, k_order(384, mma)].contiguous().to(DEVICE)
    options = {} if INTERPRET else {"num_warps": 1 if mma else 4}
    _linear[(1,)](
        rows, pack_hopper(codes, scales).to(DEVICE), y, 3, 64, 384, K_TILES=3, STEPS=2, FIRST=2,
        NATURAL=False, EVEN=True, ORDER=True, BLOCK_N=64, BLOCK_K=64, ASM=False, MMA=mma, **options,
    )  # fmt: skip
    assert torch.equal(y.cpu(), want[:, k_order(64, mma)])


@triton.jit
def _columns(y_ptr, N: tl.constexpr, MMA: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, position_column(i, MMA))


@MMA
def test_orders_in_kernels_are_the_hosts(mma: bool) -> None:
    y = torch.full((128,), -1, dtype=torch.int32, device=DEVICE)
    _columns[(1,)](y, N=128, MMA=mma)
    assert torch.equal(y.cpu().long(), k_order(128, mma))


def test_words_a_tile() -> None:
    """The literals of the kernels above."""
    assert (hopper_pack.WORDS.value, hopper_pack.WEIGHT_UNIT.value) == (2304, 128.0)
