"""The benchmark of MoE layers, as far as it goes without a GPU."""

import pytest
import torch

from bench import moe_layer
from nemotriton.kernels.dependent import dependent
from nemotriton.kernels.op import targeting

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def blocks() -> list:
    return moe_layer.moe_blocks("preset:tiny", "bf16", None, CPU)


def test_only_layers_with_experts(blocks: list) -> None:
    assert blocks
    assert all(block.mixer.experts is not None for block in blocks)


def test_rounds_differ_only_in_what_they_read(blocks: list) -> None:
    x = torch.randn(2, blocks[0].norm.weight.shape[0]).bfloat16()
    once, twice = (moe_layer.chain(blocks, x, rounds) for rounds in (1, 2))
    assert once.shape == x.shape
    assert not torch.equal(once, twice)


def test_bytes_grow_with_the_experts_reached(blocks: list) -> None:
    x = torch.randn(64, blocks[0].norm.weight.shape[0]).bfloat16()
    one, many = moe_layer.layer_bytes(blocks, x[:1]), moe_layer.layer_bytes(blocks, x)
    assert 0 < one < many
    assert many <= sum(p.nbytes for b in blocks for p in b.parameters()) / len(blocks)


@pytest.mark.parametrize("way", moe_layer.WAYS)
def test_ways(way: str) -> None:
    with targeting(90), moe_layer.launched(way):
        assert dependent(torch.empty(1, device="meta")) == ("plain" not in way)
