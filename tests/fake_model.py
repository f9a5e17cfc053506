"""A model whose every logit depends on the whole history, through its caches, in exact arithmetic.

One "attention layer" keeps token ids in K and V; one "Mamba layer" keeps a rolling hash in its
state and the last two ids in its convolution window. Any misplaced page, slot, piece
or order changes the logits; any unwritten memory (NaN) makes them NaN. `history` says what they
must be, from the ids alone.

Its draft block has a layer of each kind too, and works out the trunk's next hidden pair from what
its own caches hold. So every draft is accepted, unless something of the block's past is missing.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nemotriton.engine import replay
from nemotriton.engine.batch import Batch, Span
from nemotriton.engine.caches import Caches, MambaStates, PagedKV
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine
from nemotriton.engine.graphs import Capture, Flight
from nemotriton.engine.outputs import Group
from nemotriton.engine.pool import Pool
from nemotriton.engine.request import Piece, Request, State, Step
from nemotriton.engine.runner import Runner
from nemotriton.engine.sampling import SamplingParams
from nemotriton.engine.scheduler import Scheduler
from nemotriton.model.config import MambaConfig
from nemotriton.text.tokens import ByteTokenizer, Tokenizer

VOCAB = 274
ROLLBACK = "lanes"  # of engines that are not told
FACTORS = (31, 14)  # what a state is multiplied by, in the trunk's layer and in the block's
PRIME = 9973  # products of two residues stay exact in float32
MAMBA = MambaConfig(
    **dict.fromkeys(("heads", "head_dim", "state", "groups"), 1),
    conv_width=3,
    chunk=4,
    conv_bias=True,
    proj_bias=False,
    dt_limit=(0.0, float("inf")),
    state_dtype="float32",
)


def history(ids: Sequence[int]) -> list[tuple[int, int]]:
    """The hidden pair (state hash, K/V hash) after each token."""
    found, state, kv = [], 0, 0
    for i, token in enumerate(ids):
        before, earlier = (ids[i - 1] if i > 0 else 0), (ids[i - 2] if i > 1 else 0)
        state = (state * 31 + token * 7 + before * 5 + earlier * 3 + 1) % PRIME
        kv = (kv + (token + 1) * (i + 1)) % PRIME
        found.append((state, kv))
    return found


def logits_of(pairs: Tensor) -> Tensor:
    """float32 [R, V] of hidden pairs [R, 2]."""
    v = torch.arange(VOCAB, dtype=torch.float64)
    a, b = pairs[:, :1].double(), pairs[:, 1:].double()
    return (4 * torch.sin(a * (0.37 * v + 1) + b * (0.11 * v + 2))).float()


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What greedy decoding must give."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(torch.tensor([history(ids)[-1]], dtype=torch.float32)).argmax()))
    return ids[len(prompt) :]


class FakeModel:
    """`fail` is raised in the next forward; `broken` token ids give NaN; `rows` of each forward."""

    def __init__(self) -> None:
        self.fail: BaseException | None = None
        self.broken: set[int] = set()
        self.rows: list[int] = []

    def forward(self, batch: Batch, caches: Caches) -> Tensor:
        if self.fail is not None:
            problem, self.fail = self.fail, None
            raise problem
        self.rows.append(len(batch.ids))
        hidden = torch.full((len(batch.ids), 2), float("nan"))
        if caches.kv is not None:
            for cache in caches.kv.layer(0):
                write(cache, batch.kv_rows, batch.ids.float())
        for span in (batch.decode, batch.prefill):
            if span is not None:
                self.run_span(span, batch, caches, hidden)
        hidden[torch.isin(batch.ids, torch.tensor(sorted(self.broken), dtype=torch.int64))] = float(
            "nan"
        )
        return hidden

    def run_span(self, span: Span, batch: Batch, caches: Caches, hidden: Tensor) -> None:
        if span.chunks is not None:
            check_chunks(span)
        cu, lengths = span.cu.tolist(), span.lengths.tolist()
        assert span.max_new == max(b - a for a, b in pairwise(cu))
        assert span.max_length >= max(lengths)  # static steps state a bound
        for s, (start, end) in enumerate(pairwise(cu)):
            rows = slice(span.start + start, span.start + end)
            ids = batch.ids[rows]
            assert ((ids >= 0) & (ids < VOCAB)).all(), "an id outside the vocabulary"
            if is_pad(span, s):
                hidden[rows] = 0
                continue
            parents = parents_of(span, start, end)
            if caches.mamba is not None:
                hidden[rows, 0] = self.scan(ids, parents, caches.mamba, span, s)
            else:
                hidden[rows, 0] = 0
            if caches.kv is not None:
                k, v = keys(caches.kv, 0, span, s)
                hidden[rows, 1] = attend((k + v) / 2, 1, parents)
            else:
                hidden[rows, 1] = 0

    def scan(
        self, ids: Tensor, parents: list[int], states: MambaStates, span: Span, s: int
    ) -> Tensor:
        past = Past(states, 0, span, s)
        for token, parent in zip(ids.float(), parents):
            window, state = past.after(parent)
            past.add(window, token, mixed(state, token, window[1, 0], window[0, 0]))
        past.store()
        return past.outputs()

    # ---- the draft block ----------------------------------------------------------------------

    def draft(self, batch: Batch, hidden: Tensor, caches: Caches) -> Tensor:
        """The trunk's hidden pairs one token later, if the block's caches are as they must be."""
        out = torch.full((len(batch.ids), 2), float("nan"))
        if caches.kv is not None:
            k, v = caches.kv.layer(1)
            write(k, batch.kv_rows, batch.ids.float())
            write(v, batch.kv_rows, hidden[:, 1])
        for span in (batch.decode, batch.prefill):
            if span is None:
                continue
            for s, (start, end) in enumerate(pairwise(span.cu.tolist())):
                rows = slice(span.start + start, span.start + end)
                parents = parents_of(span, start, end)
                ids = batch.ids[rows]
                assert ((ids >= 0) & (ids < VOCAB)).all(), "an id outside the vocabulary"
                out[rows] = 0
                if is_pad(span, s):
                    continue
                if caches.mamba is not None:
                    pairs = zip(ids.float(), hidden[rows, 0], parents)
                    out[rows, 0] = self.draft_scan(list(pairs), caches.mamba, span, s)
                if caches.kv is not None:
                    k, v = keys(caches.kv, 1, span, s)
                    sums = (attend(k, 2, parents) + v[0]) % PRIME
                    before = (sums - last_terms(k, parents)) % PRIME  # what the trunk's was
                    out[rows, 1] = ((sums + hidden[rows, 1] - before) % PRIME).float()
        return out

    def draft_scan(
        self, pairs: list[tuple[Tensor, Tensor, int]], states: MambaStates, span: Span, s: int
    ) -> Tensor:
        past = Past(states, 1, span, s)
        for token, given, parent in pairs:
            window, state = past.after(parent)
            if parent < 0 and past.fresh:  # the first token shows in the trunk's first state alone
                window, state = window.clone(), given.view(1, 1, 1)
                window[1] = (given - 1) / 7
            after = mixed(state, token, window[1, 0], window[0, 0])
            past.add(window, token, (after + 17 * (given - state)) % PRIME)  # they must agree
        past.store()
        return past.outputs()

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(hidden)

    draft_logits = logits


class Past:
    """States of one sequence in one Mamba layer: the stored one, and after each new token."""

    def __init__(self, states: MambaStates, layer: int, span: Span, s: int) -> None:
        self.states, self.layer, self.span = states, layer, span
        self.slot, self.cell = int(span.slots[s]), int(states.cells(span)[s])
        self.fresh = span.fresh is not None and bool(span.fresh[s])
        conv, ssm = states.layer(layer)
        first = conv[self.slot].clone(), ssm[self.cell].clone()
        self.kept = [tuple(map(torch.zeros_like, first)) if self.fresh else first]
        self.replays = states.rings is not None and span.fresh is None
        self.inputs: list[Tensor] = []
        if self.replays:
            counts, order = (c[s].tolist() for c in states.cursors(span))
            self.entries, self.places = order[:counts], order[counts:]
            self.kept = [(first[0], self.replay(first[1], len(self.entries)))]

    def ring(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, step sizes and B of this slot: its entries' inputs, and ones."""
        assert self.states.rings is not None
        x, dt, B = (ring[self.layer, self.slot, 0] for ring in self.states.rings)
        return x[:, 0], dt, B[:, 0]

    def replay(self, state: Tensor, entries: int) -> Tensor:
        x, dt, B = self.ring()
        for at in self.entries[:entries]:
            state = (FACTORS[self.layer] * state + x[at] * dt[at] * B[at]) % PRIME
        return state

    def after(self, row: int) -> tuple[Tensor, Tensor]:
        window, state = self.kept[row + 1]
        self.before = state
        return window, state

    def add(self, window: Tensor, token: Tensor, state: Tensor) -> None:
        self.kept.append((torch.stack([window[1], token.expand_as(window[1])]), state))
        self.inputs.append((state - FACTORS[self.layer] * self.before) % PRIME)

    def store_entries(self) -> None:
        """The new tokens' inputs, and the state behind a full window."""
        conv, ssm = self.states.layer(self.layer)
        if len(self.entries) >= replay.REPLAY_INTERVAL:
            ssm[self.cell] = self.replay(ssm[self.cell], replay.REPLAY_INTERVAL)
        x, dt, B = self.ring()
        for at, value in zip(self.places, self.inputs, strict=False):
            x[at], dt[at], B[at] = value, 1, 1
        for t, (window, _) in enumerate(self.kept[1:]):
            if self.span.verify:
                assert self.states.conv_lanes is not None
                self.states.conv_lanes[self.layer, self.slot, t] = window
            else:
                conv[self.slot] = window

    def store(self) -> None:
        if self.replays:
            if not self.span.trial:
                self.store_entries()
        elif self.span.verify:
            conv_lanes, ssm_lanes = self.states.layer_lanes(self.layer)
            for t, (window, state) in enumerate(self.kept[1:]):
                conv_lanes[self.slot, t], ssm_lanes[self.slot, t] = window, state
        elif not self.span.trial:
            conv, ssm = self.states.layer(self.layer)
            conv[self.slot], ssm[self.cell] = self.kept[-1]

    def outputs(self) -> Tensor:
        return torch.stack([state.reshape(()) for _, state in self.kept[1:]])


def mixed(state: Tensor, token: Tensor, before: Tensor, earlier: Tensor) -> Tensor:
    return (state * 31 + token * 7 + before * 5 + earlier * 3 + 1) % PRIME


def parents_of(span: Span, start: int, end: int) -> list[int]:
    if span.parents is None:
        return [*range(-1, end - start - 1)]
    return span.parents[start:end].tolist()


def write(cache: Tensor, rows: Tensor, values: Tensor) -> None:
    """Into the cells `rows`; -1 is nowhere."""
    cache.view(-1)[rows[rows >= 0]] = values[rows >= 0]


def is_pad(span: Span, s: int) -> bool:
    """A sequence that is nobody's: it has no context, and every real one has."""
    assert int(span.lengths[s]) > 0 or int(span.slots[s]) == -1
    return int(span.lengths[s]) == 0


def keys(kv: PagedKV, layer: int, span: Span, s: int) -> tuple[Tensor, Tensor]:
    """K and V of a sequence, new tokens included."""
    length = int(span.lengths[s])
    used = span.pages[s][: -(-length // kv.page_size)].long()
    assert (used >= 0).all()
    k, v = (cache[used].reshape(-1)[:length].double() for cache in kv.layer(layer))
    return k, v


def attend(ids: Tensor, weight: int, parents: list[int]) -> Tensor:
    """Sums of (id + 1) * (place + weight) over what each new token sees, modulo the prime."""
    context = len(ids) - len(parents)
    base = ((ids[:context] + 1) * torch.arange(weight, weight + context)).sum()
    found: list[Tensor] = []
    depths: list[int] = []
    for t, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        before = found[parent] if parent >= 0 else base
        found.append(before + (ids[context + t] + 1) * (context + depths[t] + weight))
    return torch.stack(found) % PRIME


def last_terms(ids: Tensor, parents: list[int]) -> Tensor:
    """The last term of each of the block's sums."""
    context = len(ids) - len(parents)
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return (ids[context:] + 1) * (context + torch.tensor(depths) + 2)


def check_chunks(span: Span) -> None:
    """Chunks cover the span once, stay inside sequences and on each sequence's own grid."""
    assert span.chunks is not None
    row, cu, lengths = 0, span.cu.tolist(), span.lengths.tolist()
    for s, first, count in span.chunks.tolist():
        assert first == row
        assert cu[s] <= first < first + count <= cu[s + 1]
        done = lengths[s] - (cu[s + 1] - first)
        assert done // MAMBA.chunk == (done + count - 1) // MAMBA.chunk
        row += count
    assert row == span.end - span.start


def poison_rings(states: replay.ReplayStates, free: Tensor) -> None:
    """NaN in all entries that are not committed; nonsense in the cursors of free slots."""
    states.counts[:-1][free] = 7
    committed = torch.arange(states.order.shape[1]).to(states.counts) < states.counts[:-1, None]
    committed &= ~free[:, None]
    for slot, (order, kept) in enumerate(zip(states.order[:-1], committed)):
        for ring in states.rings:
            ring[:, slot].index_fill_(2, order[~kept].long(), float("nan"))


class PoisonRunner(Runner):
    """Fills with NaN, before every step, all memory that no request has computed anything in."""

    def run(self, step: Step) -> list[tuple[Piece, list[int] | None]]:
        for move in step.saves:
            self._save(move)
        restored = {move.request.id for move in step.restores}
        pieces = [p for p in (*step.decode, *step.prefill) if p.request.id not in restored]
        live = [r for r in self.scheduler.running if r.id not in restored]
        assert {p.request.id for p in pieces} <= {r.id for r in live}
        self.poison({r: r.computed for r in live})
        return super().run(Step([], step.restores, step.decode, step.prefill))

    def launch(self, step: Step, behind: Flight | None = None) -> Flight | None:
        if self.steps is None or step.saves or step.restores or step.prefill:
            return None
        computed = {r: r.computed for r in self.scheduler.running}
        if behind is not None:  # what it brought is on the device, and not yet in the books
            last = self.steps.memory.last.tolist() if behind.shape.drafts else [0] * len(computed)
            for p, more in zip(behind.pieces, last):
                computed[p.request] += more + 1
        self.poison(computed)
        return super().launch(step, behind)

    def poison(self, computed: dict[Request, int]) -> None:
        """NaN in all but what so many tokens of each request have left."""
        if self.caches.kv is not None:
            kept = torch.zeros(self.caches.kv.k.shape[1:3], dtype=torch.bool)
            for r, count in computed.items():
                for i in range(count):
                    kept[r.pages[i // self.page_size], i % self.page_size] = True
            for cache in (self.caches.kv.k, self.caches.kv.v):
                cache[:, ~kept] = float("nan")
        if (mamba := self.caches.mamba) is not None:
            slots = torch.ones(mamba.conv.shape[1], dtype=torch.bool)
            slots[[r.slot for r, count in computed.items() if count]] = False
            mamba.conv[:, slots] = float("nan")
            cells = torch.arange(len(slots)) * mamba.lanes + mamba.cursor.cpu()
            cold = torch.ones(mamba.ssm.shape[1], dtype=torch.bool)
            cold[cells[~slots]] = False
            mamba.ssm[:, cold] = float("nan")
            if mamba.conv_lanes is not None:
                mamba.conv_lanes.fill_(float("nan"))
            if isinstance(mamba, replay.ReplayStates):
                poison_rings(mamba, slots)

    scheduler: Scheduler


def make_engine(
    *,
    pages: int | None = 64,
    slots: int | None = 8,
    requests: int = 8,
    piece: int = 32,
    page_size: int = 4,
    max_context: int = 128,
    seed: int = 0,
    eos_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    shape: DraftShape | None = None,
    capture: Capture | None = None,
    rollback: str | None = None,
) -> Engine:
    """An engine over the fake model, its free memory poisoned at all times.

    shape: the drafts of every step; None is a model without its draft block. capture: records
    decode steps; None runs them as they come."""
    layers, lanes = (1, 1) if shape is None else (2, len(shape) + 1)
    kv = mamba = None
    if pages is not None:
        spare = int(capture is not None)
        kv = PagedKV(layers, pages + spare, 1, 1, torch.float32, "cpu", page_size)
    if slots is not None:
        pool = (MAMBA, layers, slots, torch.float32, "cpu")
        if (rollback or ROLLBACK) == "replay":
            mamba = replay.ReplayStates(*pool, shape=shape)
        else:
            mamba = MambaStates(*pool, lanes=lanes)
    runner = PoisonRunner(
        FakeModel(),
        Caches(kv, mamba),
        vocab=VOCAB,
        chunk=None if slots is None else MAMBA.chunk,
        device="cpu",
        shape=shape,
        stateful=slots is not None,
    )
    scheduler = Scheduler(
        pages=None if pages is None else Pool(pages, "pages"),
        slots=None if slots is None else Pool(slots, "slots"),
        page_size=page_size,
        max_requests=requests,
        prefill_piece=piece,
    )
    scheduler.drafts = 0 if shape is None else len(shape)
    runner.scheduler = scheduler
    if capture is not None:
        runner.record(capture, requests=requests, context=max_context).warm()
    text = tokenizer or ByteTokenizer(VOCAB, None, ())
    return Engine(runner, scheduler, text, max_context=max_context, eos_ids=eos_ids, seed=seed)


def submit(engine: Engine, prompt: str | Sequence[int], params: SamplingParams) -> Group:
    return engine.submit(engine.prepare(prompt, params))


def finish(engine: Engine, steps: int = 5000) -> None:
    """Step until nothing is left; pages and slots must all be back."""
    while engine.busy:
        engine.step()
        steps -= 1
        assert steps, "the engine goes round in circles"
    for pool in (engine.scheduler.pages, engine.scheduler.slots):
        assert pool is None or pool.taken == 0
    assert not engine._groups
    assert not engine._by_request
    assert not engine.runner.sampler._counts


def ids_of(group: Group, index: int = 0) -> list[int]:
    assert group.completions[index].request.state is State.DONE
    return group.completions[index].request.output
