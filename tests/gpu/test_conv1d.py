"""The convolution in place, many times over: no thread reads a window already overwritten."""

import pytest
import torch

from nemotriton.kernels.conv1d import CAUSAL_CONV1D, causal_conv1d
from nemotriton.kernels.conv1d_update import CAUSAL_CONV1D_UPDATE, causal_conv1d_update
from nemotriton.kernels.op import Case, use_tile

SEQUENCES, CHANNELS = 32, 1344  # a last block of channels that is not full
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8] * 8


def starts(lengths: list[int], where: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=where).cumsum(0).int()


@pytest.mark.parametrize("W", [2, 3, 4])
def test_pieces_in_place_give_the_bits_of_the_whole(W: int, cuda: torch.device) -> None:
    """Every tile of both ops, 64 calls each on one state, against one call on whole sequences."""
    S, C, total = SEQUENCES, CHANNELS, sum(LENGTHS)
    rng = torch.Generator(device=cuda).manual_seed(W)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, device=cuda).bfloat16()

    x, initial = draw(S, total, C), draw(S, W - 1, C)
    weight, bias = draw(C, W), draw(C)
    slots = torch.randperm(S, generator=rng, device=cuda).int()
    before = torch.empty_like(initial)
    before[slots.long()] = initial
    want = torch.cat([initial, x], 1)
    after = torch.empty_like(initial)
    after[slots.long()] = want[:, total:]

    state = before.clone()
    packed, cu = x.reshape(S * total, C), starts([total] * S, cuda)
    y = causal_conv1d.triton(packed, weight, bias, state, cu, slots, None, total)
    y = y.view(S, total, C)
    assert torch.equal(state, after)

    def pieces(update: bool) -> None:
        state, at = before.clone(), 0
        for n in LENGTHS:
            piece = x[:, at : at + n].reshape(S * n, C)
            args = (piece, weight, bias, state, starts([n] * S, cuda), slots)
            out = (
                causal_conv1d_update.triton(*args, n)
                if update
                else causal_conv1d.triton(*args, None, n)
            )
            assert torch.equal(out.view(S, n, C), y[:, at : at + n])
            at += n
        assert torch.equal(state, after)

    for tile in CAUSAL_CONV1D.tiles(Case(C=C, W=W)):
        with use_tile("causal_conv1d", tile):
            pieces(update=False)
    for tile in CAUSAL_CONV1D_UPDATE.tiles(Case(C=C, W=W, N=8)):
        with use_tile("causal_conv1d_update", tile):
            pieces(update=True)
