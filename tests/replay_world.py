"""Random requests over the engine's replay states, on any device, that are checked as they run.

Every request is followed twice. A second pool gets its accepted tokens one by one, in calls that
know no drafts: a token's output and the states that are stored must have the very bits of those.
And the recurrence, in fp32, goes the way of every row, rejected ones too: within the formats'
rounding. What happens is decided on the host by a seeded generator and what is found is gathered on
the device, so that thousands of steps wait for nothing.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotriton.engine.batch import Span
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.replay import ReplayStates, SavedRings
from nemotriton.kernels import REPLAY_INTERVAL, STATE_FORMATS, ssm_replay
from nemotriton.kernels.op import Case, use_tile
from nemotriton.kernels.ssm_replay_tiles import replay_default
from nemotriton.kernels.ssm_state import restore_state_ref, round_state_ref, state_noise_ref
from nemotriton.kernels.ssm_update import time_step_ref
from nemotriton.model.config import MambaConfig

MAMBA = MambaConfig(
    heads=4, head_dim=64, state=128, groups=2, conv_width=2, chunk=4, conv_bias=True,
    proj_bias=False, dt_limit=(0.0, float("inf")), state_dtype="float32",
)  # fmt: skip
REQUESTS, SLOTS, MOST = 4, 6, 5
MANY = 256  # sequences, whose tiles the calls with drafts take
TREES = [DraftShape.parse(t) for t in ("0,0,1", "0,0,1,1", "0,1,1,2", "0,0,0,0", "0,1,2,2")]
# off the recurrence, of the largest output: a state's rounding, where it falls otherwise
LOOSE = {
    "float32": 2e-5, "bfloat16": 2e-2, "float16": 2.5e-3, "float16-sr": 2.5e-3, "int16": 2e-4,
    "int8": 4e-2,
}  # fmt: skip
ALIGNED = 64  # columns with the step sizes
NEVER = 2**40


@dataclass
class Request:
    """Its slot in the pool under test (None: it waits on the host), and its row everywhere else."""

    row: int
    slot: int | None
    seed: int
    prompt: int  # tokens
    tokens: int = 0  # behind the prompt
    saved: SavedRings | None = None


@dataclass
class Rows:
    """What a call computes with: rows of one wide tensor, as an in-projection leaves them."""

    wide: Tensor
    config: MambaConfig

    def split(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, H, P], dt [T, H], B and C [T, G, N]."""
        m = self.config
        inner, groups = m.heads * m.head_dim, m.groups * m.state
        x, B, C, dt, _ = self.wide.split([inner, groups, groups, m.heads, ALIGNED - m.heads], dim=1)
        B, C = (v.unflatten(1, (m.groups, m.state)) for v in (B, C))
        return x.unflatten(1, (m.heads, m.head_dim)), dt, B, C


class ReplayWorld:
    """Four requests over six slots; `step` until `served` is enough, then `verdict`."""

    def __init__(
        self,
        name: str,
        where: torch.device,
        config: MambaConfig = MAMBA,
        run: Callable[..., Tensor] = ssm_replay.triton,
        seed: int = 0,
    ) -> None:
        self.config, self.where, self.replay = config, where, run
        self.format = STATE_FORMATS[name]
        self.rng = random.Random(seed)
        self.generator = torch.Generator(device=where).manual_seed(seed)
        shape, dtype = DraftShape.chain(MOST - 1), torch.bfloat16
        self.states = ReplayStates(config, 1, SLOTS, dtype, where, self.format, shape)
        self.plain = ReplayStates(config, 1, REQUESTS, dtype, where, self.format)
        for pool in (self.states, self.plain):
            for value in (pool.conv, *pool.rings):
                value.fill_(torch.nan)
        m = config
        self.A = -1 - 15 * torch.rand(m.heads, generator=self.generator, device=where)
        self.D, self.bias = self.normal(m.heads), self.normal(m.heads) - 3
        self.h = self.normal(REQUESTS, m.heads, m.head_dim, m.state)
        self.steps = self.served = self.crossed = self.moved = 0
        # in which step something was first found wrong
        self.found = dict.fromkeys(("bits", "states", "recurrence", "pads"), self.put([NEVER])[0])
        self.worst = torch.zeros((), device=where)  # error over allowance
        self.requests = [self.begin(row, row) for row in range(REQUESTS)]

    # ---- requests -----------------------------------------------------------------------------

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.where)

    def put(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """On the device, which is not waited for."""
        return torch.tensor(values, dtype=dtype).to(self.where, non_blocking=True)

    def ints(self, values: list[int]) -> Tensor:
        return self.put(values, torch.int32)

    def free(self) -> list[int]:
        taken = {r.slot for r in getattr(self, "requests", [])}
        return [slot for slot in range(SLOTS) if slot not in taken]

    def begin(self, row: int, slot: int) -> Request:
        """A prompt has left a state."""
        m, seed = self.config, self.rng.randrange(-(2**62), 2**62)
        kept = round_state_ref(self.normal(m.heads, m.head_dim, m.state), self.format.dtype)
        for pool, cell in ((self.states, slot), (self.plain, row)):
            pool.ssm[0, cell] = kept[0]
            if pool.scales is not None and kept[1] is not None:
                pool.scales[0, cell] = kept[1]
            pool.start([cell], [seed])
        for ring in self.plain.rings:
            ring[:, row] = torch.nan
        self.h[row] = restore_state_ref(*kept)
        return Request(row, slot, seed, prompt=self.rng.randrange(1, 2**18))

    def happen(self) -> None:
        """Requests end and others take their slots, or other ones; some go to the host and back."""
        for i, r in enumerate(self.requests):
            chance = self.rng.random()
            if r.slot is None:
                if chance < 0.5:
                    assert r.saved is not None
                    r.slot = self.rng.choice(self.free())
                    self.states.restore(r.slot, r.saved)
                    self.states.seed([r.slot], [r.seed])
            elif chance < 0.02:
                slots = [r.slot, *self.free()]
                r.slot = None
                self.requests[i] = self.begin(r.row, self.rng.choice(slots))
            elif chance < 0.04:
                r.saved, r.slot = self.states.save(r.slot), None
                self.moved += 1

    def poison(self) -> None:
        """NaN in all that belongs to no request, and nonsense in the cursors of free slots."""
        free = torch.zeros(SLOTS, dtype=torch.bool, device=self.where)
        free[self.put(self.free())] = True
        states = self.states
        states.counts[:-1].masked_fill_(free, 7)
        order = states.order[:-1].long()
        committed = torch.arange(order.shape[1], device=self.where) < states.counts[:-1, None]
        dead = torch.ones_like(order, dtype=torch.bool)
        dead.scatter_(1, order, ~committed | free[:, None])
        for ring in states.rings:
            mask = dead[:, None] if ring.dim() == 4 else dead[:, None, :, None]
            ring[0].masked_fill_(mask, torch.nan)
        value = torch.nan if states.ssm.dtype.is_floating_point else 77
        states.ssm[0].masked_fill_(free[:, None, None, None], value)
        if states.scales is not None:
            states.scales[0].masked_fill_(free[:, None, None], torch.nan)

    # ---- a step -------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of the requests that are here; the rows of the others are pads."""
        self.happen()
        self.poison()
        kind = self.rng.choice(["plain", "chain", "chain", "tree"])
        counts = [1 if kind == "plain" else self.rng.randint(1, MOST) for _ in self.requests]
        parents = [[*range(-1, n - 1)] for n in counts]
        if kind == "tree":
            shape = self.rng.choice(TREES)
            counts = [min(n, len(shape) + 1) for n in counts]
            parents = [shape.row_parents(n - 1) for n in counts]
        first = [sum(counts[:s]) for s in range(REQUESTS)]
        m = self.config
        width = m.heads * m.head_dim + 2 * m.groups * m.state + ALIGNED
        rows = Rows(self.normal(sum(counts), width).bfloat16(), m)
        away = [r.slot is None for r in self.requests]
        gone = [first[s] + t for s in range(REQUESTS) if away[s] for t in range(counts[s])]
        if gone:
            rows.wide[self.put(gone)] = torch.nan
        if kind == "chain" and self.rng.random() < 0.2:
            trial = self.call(rows, counts, None, update=False)[1]
        else:
            trial = None
        span, y = self.call(rows, counts, parents if kind == "tree" else None, update=True)
        if trial is not None:
            self.note("bits", (trial != y).any())
        if gone:
            self.note("pads", (y[self.put(gone)] != 0).any())
        walked = [[] if away[s] else self.walk(parents[s]) for s in range(REQUESTS)]
        self.follow(rows, y, first, parents, walked)
        self.one_by_one(rows, y, first, walked)
        self.commit(kind, span, counts, walked)
        if kind == "plain":
            self.compare_states()
        for r, way in zip(self.requests, walked):
            r.tokens += len(way)
            self.served += r.slot is not None
        self.steps += 1

    def walk(self, above: list[int]) -> list[int]:
        """The rows that are accepted: the way to any of them."""
        at, way = self.rng.randrange(len(above)), [0]
        if at:
            way = []
            while at >= 0:
                way, at = [at, *way], above[at]
        return way

    def commit(self, kind: str, span: Span, counts: list[int], walked: list[list[int]]) -> None:
        if kind == "plain":
            self.states.advance(span.slots)
            return
        last = self.ints([way[-1] if way else 0 for way in walked])
        if kind == "chain":
            self.states.commit(span.slots, last)
            return
        path = [row for way, n in zip(walked, counts) for row in way + [-1] * (n - len(way))]
        self.states.commit(span.slots, last, self.ints(path), span.cu)

    def call(
        self, rows: Rows, counts: list[int], parents: list[list[int]] | None, update: bool
    ) -> tuple[Span, Tensor]:
        """y [T, H, P] of a call for all requests, in the tile of many sequences."""
        slots = [-1 if r.slot is None else r.slot for r in self.requests]
        lengths = [r.prompt + r.tokens + n for r, n in zip(self.requests, counts)]
        flat = None if parents is None else self.ints([p for own in parents for p in own])
        most = max(counts)
        with self.tile(most, parents is not None, MANY):
            return self.run(self.states, rows, counts, slots, lengths, most, flat, update)

    def tile(self, most: int, tree: bool, sequences: int) -> AbstractContextManager[None]:
        m, new = self.config, 1 if most == 1 else 4
        case = Case(
            H=m.heads, P=m.head_dim, N=m.state, G=m.groups, STATE=self.format.axis, NEW=new,
            TREE=int(tree),
        )  # fmt: skip
        return use_tile("ssm_replay", replay_default(case, sequences * new))

    def run(
        self, pool: ReplayStates, rows: Rows, counts: list[int], slots: list[int],
        lengths: list[int], most: int, parents: Tensor | None, update: bool,
    ) -> tuple[Span, Tensor]:  # fmt: skip
        cu = self.ints([sum(counts[:s]) for s in range(len(counts) + 1)])
        index = self.ints(slots)
        span = Span(0, sum(counts), cu, index, self.ints(lengths), index, most, 1)
        x, dt, B, C = rows.split()
        y = self.replay(
            x, dt, self.A, B, C, self.D, self.bias, pool.ssm[0], *(ring[0] for ring in pool.rings),
            cu, pool.cells(span), *pool.cursors(span), most, update=update, parents=parents,
            scales=pool.layer_scales(0)[0], noise=pool.noise(span, 0),
        )  # fmt: skip
        return span, y

    # ---- what must hold -----------------------------------------------------------------------

    def note(self, what: str, wrong: Tensor) -> None:
        now = torch.where(wrong, self.steps, NEVER)
        self.found[what] = torch.minimum(self.found[what], now)

    def one_by_one(self, rows: Rows, y: Tensor, first: list[int], walked: list[list[int]]) -> None:
        """Feed the accepted rows to the other pool, a token a call: the same bits."""
        for k in range(max(map(len, walked))):
            more = [k < len(way) for way in walked]
            chosen = self.put([first[s] + w[k] for s, w in enumerate(walked) if more[s]])
            counts = [int(on) for on in more]
            slots = [r.row if on else -1 for r, on in zip(self.requests, more)]
            lengths = [r.prompt + r.tokens + k + 1 for r in self.requests]
            part = Rows(rows.wide[chosen], self.config)
            with self.tile(1, False, 1):
                span, out = self.run(self.plain, part, counts, slots, lengths, 1, None, True)
            self.plain.advance(span.slots)
            self.note("bits", (out != y[chosen]).any())

    def compare_states(self) -> None:
        """Behind a call of one token each both pools have stored the same borders."""
        here = [r for r in self.requests if r.slot is not None]
        if not here:
            return
        slots = self.put([r.slot for r in here if r.slot is not None])
        rows = self.put([r.row for r in here])
        wrong = (self.states.ssm[0, slots] != self.plain.ssm[0, rows]).any()
        if self.states.scales is not None and self.plain.scales is not None:
            wrong |= (self.states.scales[0, slots] != self.plain.scales[0, rows]).any()
        self.note("states", wrong)

    def follow(
        self, rows: Rows, y: Tensor, first: list[int], parents: list[list[int]],
        walked: list[list[int]],
    ) -> None:  # fmt: skip
        """The recurrence over all rows, a row of every request at a time; keeps the accepted."""
        x, dt, B, C = (v.float() for v in rows.split())
        steps, each = time_step_ref(dt, self.bias), self.config.heads // self.config.groups
        B, C = B.repeat_interleave(each, 1), C.repeat_interleave(each, 1)
        seen, depths = [self.h], [[0] for _ in self.requests]
        lane = torch.arange(REQUESTS, device=self.where)
        for t in range(max(map(len, parents))):
            real = [bool(way) and t < len(up) for way, up in zip(walked, parents)]
            above = [up[t] + 1 if on else 0 for up, on in zip(parents, real)]
            at = self.put([f + t if on else f for f, on in zip(first, real)])
            h = torch.stack(seen)[self.put(above), lane]
            left, into = (steps[at] * self.A).exp(), steps[at][..., None] * x[at]
            h = h * left[..., None, None] + into[..., None] * B[at][:, :, None]
            out = (h * C[at][:, :, None]).sum(-1) + self.D[:, None] * x[at]
            self.near(y[at], out, self.put([int(on) for on in real]) > 0)
            for s, depth in enumerate(depths):
                depth.append(depth[above[s]] + 1)
            ends = [on and self.is_border(s, depths[s][-1]) for s, on in enumerate(real)]
            if any(ends):
                self.crossed += sum(ends)
                h = self.stored(h, ends, [depth[-1] for depth in depths])
            seen.append(h)
        last = self.put([way[-1] + 1 if way else 0 for way in walked])
        self.h = torch.stack(seen)[last, lane]

    def is_border(self, s: int, depth: int) -> bool:
        return (self.requests[s].tokens + depth) % REPLAY_INTERVAL == 0

    def stored(self, h: Tensor, ends: list[bool], depths: list[int]) -> Tensor:
        """h [S, H, P, N], as it would be stored where a window ends."""
        h = h.clone()
        for s, r in enumerate(self.requests):
            if ends[s]:
                drawn = None
                if self.format.stochastic:
                    rows, N = h[s].flatten(0, 1).shape
                    position = r.prompt + r.tokens + depths[s] - 1
                    drawn = state_noise_ref(r.seed, position, 0, rows, N, h.device).view(h[s].shape)
                h[s] = restore_state_ref(*round_state_ref(h[s], self.format.dtype, drawn))
        return h

    def near(self, got: Tensor, want: Tensor, real: Tensor) -> None:
        """Within what states may be off, and the rounding of an output to bf16."""
        most = want.abs().amax((1, 2), keepdim=True) + 1
        off = (got.float() - want).abs() / (LOOSE[self.format.name] * most + 2.0**-8 * want.abs())
        off = torch.where(real, off.amax((1, 2)), 0.0)
        self.note("recurrence", ~(off <= 1).all())
        self.worst = torch.maximum(self.worst, off.max())

    def verdict(self) -> None:
        """Fail unless nothing was found and enough has happened."""
        found = {what: int(step) for what, step in self.found.items() if int(step) < NEVER}
        assert not found, f"first wrong in step {found}, {float(self.worst):.2f} of what is allowed"
        assert self.crossed > self.served / 40, "rows that end a window"
        assert self.moved > self.served / 250, "requests that went to the host"
