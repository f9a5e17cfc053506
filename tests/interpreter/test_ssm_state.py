"""The jit functions of the state formats give the bits of their twins."""

import pytest
import torch
import triton
import triton.language as tl

from nemotriton.kernels.op import launch
from nemotriton.kernels.ssm_state import (
    STATE_FORMATS,
    load_state,
    restore_state_ref,
    round_state,
    round_state_ref,
    state_noise,
    state_noise_ref,
    store_state,
)

ROWS = 6


@triton.jit(do_not_specialize=["position", "layer"])
def _store_and_load(
    h_ptr, state_ptr, scales_ptr, back_ptr, noise_ptr, seeds_ptr, position, layer,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    at = rows[:, None] * N + n[None, :]
    live = rows >= 0
    mask = live[:, None] & (n < N)[None, :]
    h = tl.load(h_ptr + at, mask=mask, other=0.0)
    noise = None
    if seeds_ptr is not None:
        noise = state_noise(tl.load(seeds_ptr), position, layer, rows, N, BLOCK_N)
        tl.store(noise_ptr + at, noise, mask=mask)
    stored, scale = round_state(h, state_ptr, scales_ptr, noise)
    store_state(stored, scale, state_ptr + at, scales_ptr, rows, mask, live)
    tl.store(back_ptr + at, load_state(state_ptr + at, scales_ptr, rows, mask, live), mask=mask)


def numbers(N: int) -> torch.Tensor:
    """Every magnitude, subnormals, halves between two stored numbers, zeros, overflow."""
    rng = torch.Generator().manual_seed(N)
    h = torch.randn(ROWS, N, generator=rng)
    h[1] *= 2.0 ** torch.randint(-30, 0, (N,), generator=rng)
    h[2] *= 1e6
    h[3] = (h[3] * 8).round() * 2.0**-25
    h[4] = 0
    h[5, ::2] *= 1e-42
    h[5, 1::2] = 65503.99
    return h


@pytest.mark.parametrize("N", [16, 20])
@pytest.mark.parametrize("name", STATE_FORMATS)
def test_bits_of_the_twins(name: str, N: int) -> None:
    fmt = STATE_FORMATS[name]
    h = numbers(N)
    state, back = torch.full((ROWS, N), 77).to(fmt.dtype), torch.full((ROWS, N), torch.nan)
    scales = torch.full((ROWS,), torch.nan) if fmt.scaled else None
    noise = torch.full((ROWS, N), -1, dtype=torch.int32)
    seeds = torch.tensor([-(2**62) + 12345]) if fmt.stochastic else None
    args = (h, state, scales, back, noise, seeds, 2**20 + 7, 39)
    launch(_store_and_load, (ROWS // 2,), *args, N=N, BLOCK_N=16 if N == 16 else 32, ROWS=2)
    drawn = state_noise_ref(-(2**62) + 12345, 2**20 + 7, 39, ROWS, N) if fmt.stochastic else None
    if drawn is not None:
        assert torch.equal(noise, drawn)
    want, want_scales = round_state_ref(h, fmt.dtype, drawn)
    assert torch.equal(state, want)
    assert (scales is None) == (want_scales is None)
    if scales is not None and want_scales is not None:
        assert torch.equal(scales, want_scales)
    assert torch.equal(back, restore_state_ref(want, want_scales))
