"""Two streams inside a captured graph: a MoE layer's bits are those of launches one by one."""

import pytest
import torch

from bench.moe_layer import PAIRS, chain, launched, moe_blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 5, 24])
@pytest.mark.parametrize("how", PAIRS)
def test_captured_layers_repeat_their_bits(rows: int, how: str, cuda: torch.device) -> None:
    blocks = moe_blocks("preset:tiny", "bf16", None, cuda)
    width = blocks[0].norm.weight.shape[0]
    x = torch.randn(rows, width, device=cuda, generator=torch.Generator(cuda).manual_seed(rows))
    x = x.bfloat16()
    with launched(f"dependent {how}".strip()):
        want = chain(blocks, x, 3)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(blocks, x, 3)
        for _ in range(5):
            found.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(found, want)
