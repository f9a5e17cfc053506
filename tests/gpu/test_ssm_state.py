"""State formats on the device: the twins' bits, graph replays that draw anew, the engine."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.engine.llm import LLM
from nemotriton.kernels import ssm_update
from nemotriton.kernels.op import Args, Case
from nemotriton.kernels.ssm_state import (
    STATE_FORMATS,
    StateNoise,
    restore_state_ref,
    round_state_ref,
    state_noise_ref,
)
from tests.interpreter.test_ssm_state import _store_and_load, numbers
from tests.test_llm import ids_of, prompt_of
from tests.test_state_formats import greedy

SUPER = {"H": 128, "P": 64, "N": 128, "G": 8}


@pytest.mark.parametrize("N", [16, 20, 128])
@pytest.mark.parametrize("name", STATE_FORMATS)
def test_bits_of_the_twins(name: str, N: int, cuda: torch.device) -> None:
    fmt, h = STATE_FORMATS[name], numbers(N).to(cuda)
    state = torch.zeros_like(h).to(fmt.dtype)
    scales = torch.zeros(len(h), device=cuda) if fmt.scaled else None
    back, noise = torch.zeros_like(h), torch.zeros_like(h).int()
    seeds = torch.tensor([-(2**62) + 12345], device=cuda) if fmt.stochastic else None
    args = (h, state, scales, back, noise, seeds, 2**20 + 7, 39)
    block = {16: 16, 20: 32, 128: 128}[N]
    _store_and_load[(len(h) // 2,)](*args, N=N, BLOCK_N=block, ROWS=2, num_warps=1)
    drawn = None
    if fmt.stochastic:
        drawn = state_noise_ref(-(2**62) + 12345, 2**20 + 7, 39, len(h), N, cuda)
        assert torch.equal(noise, drawn)
    want, want_scales = round_state_ref(h, fmt.dtype, drawn)
    assert torch.equal(state, want)
    if scales is not None and want_scales is not None:
        assert torch.equal(scales, want_scales)
    assert torch.equal(back, restore_state_ref(want, want_scales))


def test_graph_replays_draw_the_noise_of_their_positions(cuda: torch.device) -> None:
    case = Case(**SUPER, STATE="fp16-sr", NEW=1, TREE=0)
    spec = ssm_update.spec
    graphed = spec.make(case, 5, cuda, torch.bfloat16, parity.generator(2, cuda))
    eager = parity.copy(graphed)

    def step(args: Args) -> None:
        noise = args["noise"]
        ssm_update.triton(**args)
        args["noise"] = StateNoise(noise.seeds, noise.lengths.add_(1), noise.layer)

    warm = parity.copy(graphed)
    step(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = graphed["state"].clone()
    with torch.cuda.graph(graph):
        step(graphed)
    assert torch.equal(graphed["state"].nan_to_num(), before.nan_to_num())
    for _ in range(4):
        graph.replay()
        step(eager)
    assert torch.equal(graphed["noise"].lengths, eager["noise"].lengths)
    assert torch.equal(graphed["state"].nan_to_num(), eager["state"].nan_to_num())


@pytest.mark.parametrize("name", STATE_FORMATS)
def test_engine(name: str, cuda: torch.device) -> None:
    """Recorded decode steps and eager ones give the same tokens."""
    prompts = [prompt_of(n) for n in (60, 3, 129)]
    found = []
    for graphs in (False, True):
        with LLM(
            dtype="float32", device=str(cuda), max_requests=3, max_context=256, state_dtype=name,
            graphs=graphs,
        ) as llm:  # fmt: skip
            found.append(ids_of(llm.generate(prompts, greedy())))
    assert found[0] == found[1]
