"""Replay at production's shape and tiles: ten thousand random steps of every format."""

import pytest
import torch

from nemotriton.kernels import STATE_FORMATS
from tests.replay_world import ReplayWorld


@pytest.mark.parametrize("name", STATE_FORMATS)
def test_ten_thousand_random_steps(name: str, cuda: torch.device) -> None:
    """Accepted, rejected, alternative and trial rows of chains and trees, slots that change hands,
    requests that wait on the host, and NaN in all that is not committed: the bits of tokens fed
    one by one in another tile, and the recurrence's numbers."""
    world = ReplayWorld(name, cuda, seed=11)
    while world.served < 10_000:
        world.step()
    world.verdict()
