"""Replay against the plain recurrence: every token, through whatever happens to a request.

The recurrence below knows no rings: it advances a state by the accepted tokens alone and rounds it
where the rule says, behind every sixteenth. The twin must give its very bits.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from nemotriton import LLM, SamplingParams
from nemotriton.engine.batch import Span
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.loading import make_caches
from nemotriton.engine.replay import ReplayStates, find_rollback, places_for, ring_entry_bytes
from nemotriton.errors import ConfigError
from nemotriton.kernels import REPLAY_INTERVAL, STATE_FORMATS, ssm_replay
from nemotriton.kernels.ssm_state import StateFormat, restore_state_ref, round_state_ref
from nemotriton.kernels.ssm_update import ssm_step_ref, time_step_ref
from nemotriton.model.config import MambaConfig, ModelConfig
from tests.fake_model import poison_rings
from tests.replay_world import MAMBA as WORLD
from tests.replay_world import ReplayWorld

MAMBA = MambaConfig(
    heads=2, head_dim=3, state=8, groups=1, conv_width=2, chunk=4, conv_bias=True, proj_bias=False,
    dt_limit=(0.0, float("inf")), state_dtype="float32",
)  # fmt: skip
CHAIN = DraftShape.chain(4)
TREES = ["0,0,1", "0,0,1,1", "0,1,1,2", "0,0,0,0", "0,1,2,2"]


@dataclass
class Sequence:
    """A request as the recurrence sees it: its state, and the tokens since its prompt."""

    slot: int
    h: Tensor
    tokens: int = 0
    inputs: dict[str, Tensor] = field(default_factory=dict)


class World:
    """Random requests over a pool of slots, one more than there are requests."""

    config = MAMBA
    where = "cpu"  # of the states and of what `run` is given

    def __init__(self, run: Callable[..., Tensor], fmt: StateFormat, seed: int) -> None:
        self.run, self.format = run, fmt
        self.rng, self.noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.states = ReplayStates(self.config, 1, 5, torch.float32, self.where, fmt, CHAIN)
        for ring in self.states.rings:
            ring.fill_(torch.nan)
        m = self.config
        self.A = -1 - 15 * torch.rand(m.heads, generator=self.noise)
        self.D, self.bias = self.normal(m.heads), self.normal(m.heads) - 3
        self.running = [self.begin(slot) for slot in range(4)]
        self.free, self.crossed = 4, 0

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.noise)

    def begin(self, slot: int) -> Sequence:
        """A prompt has left a state in the slot."""
        m, states = self.config, self.states
        kept = round_state_ref(self.normal(m.heads, m.head_dim, m.state), self.format.dtype)
        self.write(slot, kept)
        states.start([slot], [0])
        return Sequence(slot, restore_state_ref(*kept))

    def write(self, slot: int, kept: tuple[Tensor, Tensor | None]) -> None:
        self.states.ssm[0, slot] = kept[0]
        if self.states.scales is not None and kept[1] is not None:
            self.states.scales[0, slot] = kept[1]

    def preempt(self, sequence: Sequence) -> None:
        """To the host and back, into another slot."""
        saved = self.states.save(sequence.slot)
        for ring in self.states.rings:
            ring[:, sequence.slot] = torch.nan
        self.states.restore(self.free, saved)
        self.free, sequence.slot = sequence.slot, self.free

    def step(self) -> None:
        """One step of all requests: an event now and then, inputs, outputs, and what is kept."""
        for i, sequence in enumerate(self.running):
            if self.rng.random() < 0.02:
                self.running[i] = self.begin(sequence.slot)
            elif self.rng.random() < 0.02:
                self.preempt(sequence)
        free = torch.arange(5, device=self.where) == self.free
        poison_rings(self.states, free)
        kind = self.rng.choice(["plain", "chain", "chain", "tree"])
        if self.rng.random() < 0.2:
            self.call([1 + self.rng.randrange(4) for _ in self.running], None, update=False)
        shape = DraftShape.parse(self.rng.choice(TREES))
        counts = [1 if kind == "plain" else self.rng.randint(1, 5) for _ in self.running]
        if kind == "tree":
            counts = [min(n, len(shape) + 1) for n in counts]
        parents = [shape.row_parents(n - 1) for n in counts] if kind == "tree" else None
        span, y, rows = self.call(counts, parents, update=True)
        path: list[int] = []
        last = []
        for s, (sequence, count) in enumerate(zip(self.running, counts)):
            above = parents[s] if parents is not None else [*range(-1, count - 1)]
            seen = [(sequence.h, sequence.tokens)]
            first = int(span.cu[s])
            for t in range(count):
                h, n = seen[above[t] + 1]
                out, h = ssm_step_ref(h, *(v[first + t] if v.dim() > 1 else v for v in rows))
                if (n + 1) % REPLAY_INTERVAL == 0:
                    h = restore_state_ref(*round_state_ref(h, self.format.dtype))
                    self.crossed += count > 1
                seen.append((h, n + 1))
                self.check(y[first + t], out)
            walked, at = [0], self.rng.randrange(count)
            if at:
                walked = []
                while at >= 0:
                    walked, at = [at, *walked], above[at]
            path += walked + [-1] * (count - len(walked))
            last.append(walked[-1])
            sequence.h, sequence.tokens = seen[walked[-1] + 1]
        where = span.slots, torch.tensor(last, dtype=torch.int32, device=self.where)
        if kind == "plain":
            self.states.advance(span.slots)
        elif kind == "chain":
            self.states.commit(*where)
        else:
            walked_all = torch.tensor(path, dtype=torch.int32, device=self.where)
            self.states.commit(*where, walked_all, span.cu)

    def check(self, got: Tensor, want: Tensor) -> None:
        assert torch.equal(got, want)

    def call(
        self, counts: list[int], parents: list[list[int]] | None, update: bool
    ) -> tuple[Span, Tensor, tuple[Tensor, ...]]:
        """y of random inputs, and these as `ssm_step_ref` takes them."""
        m, T = self.config, sum(counts)
        cu = torch.tensor([0, *counts]).cumsum(0).int().to(self.where)
        slots = torch.tensor([s.slot for s in self.running], dtype=torch.int32, device=self.where)
        span = Span(0, T, cu, slots, slots, slots, max(counts), 1)
        x, dt = self.normal(T, m.heads, m.head_dim), self.normal(T, m.heads)
        B, C = self.normal(T, m.groups, m.state), self.normal(T, m.groups, m.state)
        states, given = self.states, (x, dt, self.A, B, C, self.D, self.bias)
        y = self.run(
            *(v.to(self.where) for v in given), states.ssm[0],
            *(ring[0] for ring in states.rings), cu, states.cells(span), *states.cursors(span),
            max(counts), update=update, scales=states.layer_scales(0)[0],
            parents=None if parents is None else
            torch.tensor([p for own in parents for p in own], device=self.where).int(),
        )  # fmt: skip
        return span, y.cpu(), (x, time_step_ref(dt, self.bias), self.A, B, C, self.D)


@pytest.mark.parametrize("name,steps", [("float32", 1300), ("bfloat16", 700), ("int8", 500)])
def test_ten_thousand_random_steps_have_the_bits_of_the_recurrence(name: str, steps: int) -> None:
    """2,500 steps of four requests: accepted, rejected, alternative and trial rows, slots that
    change hands and requests that are moved, while all that is not committed is NaN."""
    world = World(ssm_replay.ref, STATE_FORMATS[name], seed=steps)
    for _ in range(steps):
        world.step()
    assert world.crossed > steps / 4, "passes that go beyond a border"


@pytest.mark.parametrize("name", ["float16", "float16-sr", "int16"])
def test_random_steps_have_the_bits_of_tokens_fed_one_by_one(name: str) -> None:
    """The world of the tests on a GPU, in formats that are not above; on a GPU it takes ten
    thousand steps."""
    sizes = replace(WORLD, heads=2, head_dim=3, state=8, groups=1)
    world = ReplayWorld(name, torch.device("cpu"), sizes, ssm_replay.ref, seed=4)
    for _ in range(20):
        world.step()
    world.verdict()


def test_the_whole_engine_gives_the_tokens_of_lanes() -> None:
    """The tiny model and its own drafts: none, a chain, a tree; three requests in two slots."""
    prompts = [[5, 9, 200, 31], list(range(10, 80)), [400]]
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=36, ignore_eos=True)
    found = []
    for options in (
        {"rollback": "lanes"},
        {"rollback": "replay"},
        {"rollback": "replay", "drafts": 3},
        {"rollback": "replay", "tree": "0,0,1,1,2"},
    ):
        sizes = {"dtype": "float32", "device": "cpu", "max_context": 128, "max_requests": 2}
        with LLM.synthetic("tiny", adapt_drafts=False, **sizes, **options) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
            assert bool(llm.plan.rings) == (options["rollback"] == "replay")
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize("name", ["tiny", "super-120b"])
@pytest.mark.parametrize("shape", [None, CHAIN, DraftShape.parse("0,0,1,1")])
def test_the_bytes_planned_are_the_bytes_allocated(name: str, shape: DraftShape | None) -> None:
    from tests.test_plan import plan

    config = ModelConfig.preset(name)
    drafts = len(shape or ())
    sizes = {"max_requests": 3, "max_context": 256, "drafts": drafts}
    found = plan(config, 1024, **sizes, ring_places=places_for(shape))
    meta = torch.device("meta")
    mamba = make_caches(
        config, found, torch.bfloat16, STATE_FORMATS["float32"], meta, shape, rollback="replay"
    ).mamba
    assert isinstance(mamba, ReplayStates)
    assert found.rings == sum(ring.nbytes for ring in mamba.rings) > 0
    windows = 0 if mamba.conv_lanes is None else mamba.conv_lanes.nbytes
    assert found.lanes == windows, "no state a draft"
    assert found.states == mamba.ssm.nbytes + mamba.conv.nbytes
    assert found.parts()["rings"] == found.rings
    assert config.mamba is not None
    entry = ring_entry_bytes(replace(config.mamba, heads=2, head_dim=4, groups=1, state=8), 2)
    assert entry == 2 * (8 + 8) + 8


def test_which_way_to_roll_back() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    deep = DraftShape.chain(REPLAY_INTERVAL)
    assert find_rollback(None, CHAIN, cuda) == find_rollback("auto", CHAIN, cuda) == "replay"
    assert find_rollback("auto", CHAIN, cpu) == "lanes", "the twins replay token by token"
    assert find_rollback("auto", deep, cuda) == find_rollback(None, None, cuda) == "lanes"
    assert find_rollback("replay", None, cpu) == "replay"
    sizes = {n: find_rollback(None, None, cuda, requests=n) for n in (None, 1, 15, 16, 256)}
    assert [n for n, way in sizes.items() if way == "replay"] == [16, 256]
    assert find_rollback(None, None, cuda, True, 64) == find_rollback(None, None, cpu, False, 64)
    int16 = STATE_FORMATS["int16"]
    assert find_rollback(None, None, cuda, False, 64, int16) == "lanes", "no figure says it pays"
    assert find_rollback("lanes", CHAIN, cuda) == find_rollback("lanes", deep, cuda) == "lanes"
    for wanted, shape in (("rings", None), ("replay", deep)):
        with pytest.raises(ConfigError):
            find_rollback(wanted, shape, cuda)
