"""State formats on the device: the twins' bits, graph replays that draw anew, the engine."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.engine.batch import Span
from nemotriton.engine.llm import LLM
from nemotriton.engine.replay import ReplayStates
from nemotriton.kernels import ssm_replay, ssm_update
from nemotriton.kernels.op import Args, Case
from nemotriton.kernels.ssm_state import (
    STATE_FORMATS,
    StateNoise,
    restore_state_ref,
    round_state_ref,
    state_noise_ref,
)
from tests.interpreter.test_ssm_state import _store_and_load, numbers
from tests.replay_world import MAMBA
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


class Rings:
    """Three sequences, one of them a pad, that are replayed a token at a time."""

    def __init__(self, where: torch.device) -> None:
        g, m = torch.Generator(device=where).manual_seed(4), MAMBA
        self.states = ReplayStates(m, 1, 3, torch.bfloat16, where, STATE_FORMATS["float16-sr"])
        self.states.ssm.normal_(generator=g)
        for ring in self.states.rings:
            ring.fill_(torch.nan)
        self.states.start([0, 1, 2], [5, -(2**61) - 1, 2**62 + 3])
        shapes = (m.heads, m.head_dim), (m.heads,), *2 * ((m.groups, m.state),)
        x, dt, B, C = (
            torch.randn(3, *shape, generator=g, device=where).bfloat16() for shape in shapes
        )
        A = -1 - 15 * torch.rand(m.heads, generator=g, device=where)
        D, bias = torch.ones_like(A), torch.full_like(A, -4)
        self.given = (x, dt, A, B, C, D, bias)
        self.cu, self.slots, self.lengths = (
            torch.tensor(v, dtype=torch.int32, device=where)
            for v in ([0, 1, 2, 3], [2, -1, 0], [100, 1, 2**18])
        )

    def step(self, moving: int = 1) -> torch.Tensor:
        """y [3, H, P]; what a decode step does with cursors, seeds and positions."""
        span = Span(0, 3, self.cu, self.slots, self.lengths, self.slots, 1, 1)
        states = self.states
        y = ssm_replay.triton(
            *self.given, states.ssm[0], *(ring[0] for ring in states.rings), self.cu,
            states.cells(span), *states.cursors(span), 1, noise=states.noise(span, 0),
        )  # fmt: skip
        states.advance(self.slots)
        self.lengths.add_(moving)
        return y


def test_graph_replays_of_replayed_states_draw_the_noise_of_their_positions(
    cuda: torch.device,
) -> None:
    """Over three borders, one of which comes with every sixteenth launch of the same graph."""
    graphed, eager, still = (Rings(cuda) for _ in range(3))
    Rings(cuda).step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = graphed.step()
    for _ in range(50):
        graph.replay()
        want = eager.step()
        still.step(moving=0)
        assert torch.equal(y, want)
    assert torch.equal(graphed.lengths, eager.lengths)
    assert torch.equal(graphed.states.counts, eager.states.counts)
    for slot in (0, 2):
        assert torch.equal(graphed.states.ssm[0, slot], eager.states.ssm[0, slot])
        assert not torch.equal(graphed.states.ssm[0, slot], still.states.ssm[0, slot])


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
