"""State formats: what the twins round to, and that stochastic rounding has no bias."""

import math

import pytest
import torch

from nemotriton.kernels.numerics import philox_ref
from nemotriton.kernels.ssm_state import (
    CODE_MAX,
    STATE_FORMATS,
    restore_state_ref,
    round_state_ref,
    state_noise_ref,
)

EVERY = torch.arange(1 << 13, dtype=torch.int32)  # all noise there is


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("exponent", [-26, -25, -24, -20, -15, -14, -13, 0, 7, 15])
def test_the_mean_over_all_noise_is_the_number(exponent: int) -> None:
    """Exactly for normal numbers, to 2^-14 of fp16's spacing for subnormal ones."""
    for mantissa in (1.0, 1.25, 1.333251953125, 1.5, 1.0001220703125, 1.99853515625):
        for x in (mantissa * 2.0**exponent, -mantissa * 2.0**exponent):
            h = torch.tensor(x, dtype=torch.float32).expand(len(EVERY))
            stored, _ = round_state_ref(h, torch.float16, EVERY)
            mean = stored.double().mean().item()
            spacing = 2.0 ** max(exponent - 10, -24)
            assert abs(mean - x) <= (0 if exponent >= -14 else 2.0**-14 * spacing)
            assert set(stored.unique().tolist()) <= {
                math.floor(x / spacing) * spacing,
                math.ceil(x / spacing) * spacing,
            }


def test_noise_is_uniform_and_of_its_place_alone() -> None:
    """Chi-square over 64 bins of high and of low bits; no value of one element is another's."""
    noise = state_noise_ref(seed=-7, position=3, layer=5, rows=512, N=128)
    for part in (noise >> 7, noise & 63):
        counts = part.flatten().bincount(minlength=64).double()
        expected = noise.numel() / 64
        assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * math.sqrt(2 * 63)
    for other in (
        state_noise_ref(-8, 3, 5, 512, 128),
        state_noise_ref(-7, 4, 5, 512, 128),
        state_noise_ref(-7, 3, 6, 512, 128),
        noise.roll(1, 0),
        noise.roll(1, 1),
    ):
        centred, against = noise.double() - 4095.5, other.double() - 4095.5
        assert (noise == other).double().mean() < 1e-3
        assert abs((centred * against).mean()) / centred.var() < 5 / math.sqrt(noise.numel())


def test_noise_takes_the_halves_of_all_four_words() -> None:
    """Element n of a row of 20 (three groups): word n % 8 // 2 of its group, low half first."""
    noise = state_noise_ref(seed=11, position=9, layer=2, rows=2, N=20)
    one = torch.ones((), dtype=torch.int64)
    words = philox_ref(one * 11, (one * 4, one * 3, one * 9, one * 0), 7)  # row 1, group 1
    want = [half for w in words for half in (int(w) & 0x1FFF, int(w) >> 16 & 0x1FFF)]
    assert noise[1, 8:16].tolist() == want


@pytest.mark.parametrize("name", STATE_FORMATS)
def test_what_was_stored_is_stored_again_alike(name: str) -> None:
    fmt = STATE_FORMATS[name]
    h = torch.randn(40, 24, generator=generator(1)) * torch.logspace(-9, 4, 40)[:, None]
    noise = state_noise_ref(1, 2, 3, 40, 24) if fmt.stochastic else None
    stored, scales = round_state_ref(h, fmt.dtype, noise)
    assert stored.dtype == fmt.dtype
    assert (scales is not None) == fmt.scaled
    once = restore_state_ref(stored, scales)
    again = restore_state_ref(*round_state_ref(once, fmt.dtype, noise))
    assert ((again - once).abs() <= 3e-7 * once.abs()).all()
    bound = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}
    if fmt.scaled:
        limit = 0.5001 * h.abs().amax(-1, keepdim=True) / CODE_MAX[fmt.dtype]
    else:
        limit = bound[fmt.dtype] * h.abs() + (2.0**-24 if fmt.dtype == torch.float16 else 0)
    assert ((once - h).abs() <= limit).all()
    assert fmt.row_bytes(24) == stored[0].nbytes + (0 if scales is None else scales[0].nbytes)


@pytest.mark.parametrize("name", [n for n in STATE_FORMATS if n not in ("float32", "bfloat16")])
def test_extremes(name: str) -> None:
    fmt = STATE_FORMATS[name]
    big, tiny = 3.4e38, 1e-45
    rows = torch.tensor([[big, -big, 1, 0], [0, 0, 0, 0], [tiny, -tiny, 0, 0]]).repeat(1, 2)
    noise = EVERY[:24].view(3, 8) * 340 if fmt.stochastic else None
    back = restore_state_ref(*round_state_ref(rows, fmt.dtype, noise))
    most = big if fmt.scaled else 65504.0
    assert torch.allclose(back[0, :2], torch.tensor([most, -most]), rtol=1e-6)
    assert back.isfinite().all()
    assert not back[1:].any()
    sick = torch.tensor([[float("nan"), 1, 2, 3]]).repeat(1, 2)
    back = restore_state_ref(*round_state_ref(sick, fmt.dtype, None))
    assert back[0].isnan().sum() == (8 if fmt.scaled else 2)
