"""What 100,000 tokens do to a state that is rounded on the way, against the state in fp32."""

import pytest
import torch

from nemotriton.kernels.ssm_state import STATE_FORMATS, restore_state_ref, round_state_ref

TOKENS, BLOCK, EVERY = 100_000, 2_000, 4  # the states are stored behind every fourth token
ROWS, N = 6, 16  # the first three rows get random inputs, the last three constant ones
DECAYS = torch.tensor([0.9, 0.99, 0.9999] * 2)[:, None]  # of a fast, a usual and a slow head
ROUNDED = [n for n in STATE_FORMATS if n != "float32"]


@pytest.fixture(scope="module")
def drift() -> dict[str, torch.Tensor]:
    """Of every format, the relative error of each row at the end of each block [blocks, ROWS]."""
    g = torch.Generator().manual_seed(0)
    constant = torch.randn(3, N, generator=g).expand(BLOCK, -1, -1)
    h = torch.zeros(len(ROUNDED) + 1, ROWS, N)  # the last is not rounded
    errors = []
    with torch.inference_mode():
        for _ in range(0, TOKENS, BLOCK):
            random = torch.randn(BLOCK, 3, N, generator=g)
            noise = torch.randint(1 << 13, (BLOCK, ROWS, N), generator=g).int()
            steps = zip(torch.cat([random, constant], 1).unbind(), noise.unbind())
            for t, (x, drawn) in enumerate(steps):
                h = torch.addcmul(x, h, DECAYS)
                if t % EVERY == EVERY - 1:
                    for i, name in enumerate(ROUNDED):
                        h[i] = stored(h[i], name, drawn)
            errors.append((h[:-1] - h[-1]).norm(dim=-1) / h[-1].norm(dim=-1))
    return dict(zip(ROUNDED, torch.stack(errors, 1)))


def stored(h: torch.Tensor, name: str, noise: torch.Tensor) -> torch.Tensor:
    fmt = STATE_FORMATS[name]
    kept = round_state_ref(h, fmt.dtype, noise if fmt.stochastic else None)
    return restore_state_ref(*kept)


@pytest.mark.parametrize(
    "name,limits",
    [
        ("bfloat16", [0.004, 0.012, 0.1]),
        ("float16", [0.0005, 0.002, 0.015]),
        ("float16-sr", [0.0007, 0.0025, 0.025]),
        ("int16", [5e-5, 1.5e-4, 1.5e-3]),
        ("int8", [0.013, 0.04, 0.3]),
    ],
)
def test_rounding_of_random_inputs_does_not_add_up(
    name: str, limits: list[float], drift: dict[str, torch.Tensor]
) -> None:
    """Errors are forgotten as fast as the state itself: as large at the end as soon after the
    start."""
    random = drift[name][:, :3]
    early, late = random[5:15].square().mean(0).sqrt(), random[-10:].square().mean(0).sqrt()
    assert (late < torch.tensor(limits)).all(), late
    assert (late < 2 * early).all(), (early, late)


def test_increments_below_half_a_spacing_count(drift: dict[str, torch.Tensor]) -> None:
    """Constant inputs into a slow head: rounding to the nearest stops far below where the state
    belongs, stochastic rounding does not, nor does a scale that grows with the row."""
    slow = {name: float(errors[-20:, -1].mean()) for name, errors in drift.items()}
    assert slow["float16"] > 0.3
    assert slow["bfloat16"] > 0.6
    assert slow["float16-sr"] < 0.01
    assert slow["int16"] < 0.001
    assert slow["int8"] < 0.02
