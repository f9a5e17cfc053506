"""A model whose every logit depends on the whole history, through its caches, in exact arithmetic.

One "attention layer" keeps token ids in K and V; one "Mamba layer" keeps a rolling hash in its
state and the last two ids in its convolution window. Any misplaced page, slot, piece
or order changes the logits; any unwritten memory (NaN) makes them NaN. `history` says what they
must be, from the ids alone.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nemotriton.engine.batch import Batch, Span
from nemotriton.engine.caches import Caches, MambaStates, PagedKV
from nemotriton.engine.engine import Engine
from nemotriton.engine.outputs import Group
from nemotriton.engine.pool import Pool
from nemotriton.engine.request import Piece, State, Step
from nemotriton.engine.runner import Runner
from nemotriton.engine.sampling import SamplingParams
from nemotriton.engine.scheduler import Scheduler
from nemotriton.model.config import MambaConfig
from nemotriton.text.tokens import ByteTokenizer, Tokenizer

VOCAB = 274
PRIME = 9973  # products of two residues stay exact in float32
MAMBA = MambaConfig(
    heads=1,
    head_dim=1,
    state=1,
    groups=1,
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
                cache.view(-1)[batch.kv_rows] = batch.ids.float()
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
        assert span.max_length == max(lengths)
        for s, (start, end) in enumerate(pairwise(cu)):
            rows = slice(span.start + start, span.start + end)
            ids = batch.ids[rows]
            if caches.mamba is not None:
                fresh = span.fresh is not None and bool(span.fresh[s])
                hidden[rows, 0] = self.scan(ids, caches.mamba, int(span.slots[s]), fresh)
            else:
                hidden[rows, 0] = 0
            if caches.kv is not None:
                hidden[rows, 1] = self.attend(len(ids), span.pages[s], lengths[s], caches.kv)
            else:
                hidden[rows, 1] = 0

    def scan(self, ids: Tensor, states: MambaStates, slot: int, fresh: bool) -> Tensor:
        conv, ssm = states.layer(0)
        if fresh:
            conv[slot], ssm[slot] = 0, 0
        out = []
        for token in ids.float():
            before, earlier = conv[slot, 1, 0], conv[slot, 0, 0]
            state = (ssm[slot] * 31 + token * 7 + before * 5 + earlier * 3 + 1) % PRIME
            ssm[slot] = state
            conv[slot, 0], conv[slot, 1] = conv[slot, 1].clone(), token
            out.append(state.reshape(()))
        return torch.stack(out)

    def attend(self, new: int, pages: Tensor, length: int, kv: PagedKV) -> Tensor:
        used = pages[: -(-length // kv.page_size)].long()
        assert (used >= 0).all()
        k, v = (cache[used].reshape(-1)[:length].double() for cache in kv.layer(0))
        ids = (k + v) / 2
        sums = ((ids + 1) * torch.arange(1, length + 1)).cumsum(0) % PRIME
        return sums[length - new :].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(hidden)


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


class PoisonRunner(Runner):
    """Fills with NaN, before every step, all memory that no request has computed anything in."""

    def run(self, step: Step) -> list[tuple[Piece, list[int] | None]]:
        for move in step.saves:
            self._save(move)
        restored = {move.request.id for move in step.restores}
        pieces = [p for p in (*step.decode, *step.prefill) if p.request.id not in restored]
        live = [r for r in self.scheduler.running if r.id not in restored]
        assert {p.request.id for p in pieces} <= {r.id for r in live}
        if self.caches.kv is not None:
            kept = torch.zeros(self.caches.kv.k.shape[1:3], dtype=torch.bool)
            for r in live:
                for i in range(r.computed):
                    kept[r.pages[i // self.page_size], i % self.page_size] = True
            for cache in (self.caches.kv.k, self.caches.kv.v):
                cache[:, ~kept] = float("nan")
        if self.caches.mamba is not None:
            slots = torch.ones(self.caches.mamba.ssm.shape[1], dtype=torch.bool)
            slots[[r.slot for r in live if r.computed]] = False
            self.caches.mamba.ssm[:, slots] = float("nan")
            self.caches.mamba.conv[:, slots] = float("nan")
        return super().run(Step([], step.restores, step.decode, step.prefill))

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
) -> Engine:
    """An engine over the fake model, its free memory poisoned at all times."""
    caches = Caches(
        None if pages is None else PagedKV(1, pages, 1, 1, torch.float32, "cpu", page_size),
        None if slots is None else MambaStates(MAMBA, 1, slots, torch.float32, "cpu"),
    )
    chunk = None if slots is None else MAMBA.chunk
    runner = PoisonRunner(FakeModel(), caches, vocab=VOCAB, chunk=chunk, device="cpu")
    scheduler = Scheduler(
        pages=None if pages is None else Pool(pages, "pages"),
        slots=None if slots is None else Pool(slots, "slots"),
        page_size=page_size,
        max_requests=requests,
        prefill_piece=piece,
    )
    runner.scheduler = scheduler
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
