"""The MTP block and the trunk it drafts for, real (random) weights, fp32: step by step.

After every step the trunk's states, windows and K/V equal those of decoding without drafts, and the
block's output equals that of the block run over the whole sequence at once, with no caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nemotriton.engine.caches import Caches, MambaStates, PagedKV
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine
from nemotriton.engine.outputs import CompletionOutput, Group
from nemotriton.engine.pool import Pool
from nemotriton.engine.replay import ReplayStates
from nemotriton.engine.request import Piece, Request
from nemotriton.engine.sampling import SamplingParams
from nemotriton.engine.scheduler import Scheduler
from nemotriton.kernels.ssm_update import ssm_step_ref
from nemotriton.model.config import LayerKind, ModelConfig, MtpConfig
from nemotriton.model.expected import expected
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.synth import fill
from nemotriton.text.tokens import ByteTokenizer
from tests import fake_model
from tests.fake_model import PoisonRunner, finish, ids_of, submit
from tests.test_drafts import stubbed

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=45)
PAGE = 8
PATTERNS = ["*E", "M", "EM*-", "-"]


def made(device: str, pattern: str = "*E") -> NemotronH:
    config = ModelConfig.preset("tiny")
    kinds = tuple(LayerKind(letter) for letter in pattern)
    config = replace(
        config,
        mtp=MtpConfig(1, kinds),
        mtp_moe=config.moe if LayerKind.MOE in kinds else None,
        mtp_mlp_width=96 if LayerKind.MLP in kinds else 0,
    )
    model = NemotronH(config, torch.float32, torch.device(device), drafting=True)
    fill(config, model.named_tensors(), 0)
    model.prepare()
    return model


@pytest.fixture(scope="module", params=PATTERNS)
def model(request: pytest.FixtureRequest, device: str) -> NemotronH:
    return made(device, request.param)


@pytest.fixture(scope="module")
def usual(device: str) -> NemotronH:
    return made(device)


@pytest.fixture(params=["lanes", "replay"])
def rollback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to roll back."""
    monkeypatch.setattr(fake_model, "ROLLBACK", request.param)
    return request.param


def prompt(n: int) -> list[int]:
    return torch.randint(3, 500, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def engine(
    model: NemotronH, shape: DraftShape | None, piece: int = 512, pages: int = 60, slots: int = 4
) -> Engine:
    """A real engine whose free memory is NaN at all times."""
    c, on = model.config, shape is not None
    assert c.attention is not None
    assert c.mamba is not None
    assert c.mtp is not None
    more = [c.mtp.pattern.count(kind) * on for kind in (LayerKind.ATTENTION, LayerKind.MAMBA)]
    kv = PagedKV(
        len(c.attention_layers) + more[0], pages, c.attention.kv_heads, c.attention.head_dim,
        model.dtype, model.device, page_size=PAGE,
    )  # fmt: skip
    pool = (c.mamba, len(c.mamba_layers) + more[1], slots, model.dtype, model.device)
    states = MambaStates(*pool, lanes=len(shape or ()) + 1)
    if fake_model.ROLLBACK == "replay":
        states = ReplayStates(*pool, shape=shape)
    runner = PoisonRunner(
        model, Caches(kv, states), vocab=c.vocab, chunk=c.mamba.chunk, device=model.device,
        shape=shape, stateful=more[1] > 0,
    )  # fmt: skip
    scheduler = Scheduler(
        pages=Pool(pages, "pages"), slots=Pool(slots, "slots"), page_size=PAGE,
        max_requests=slots, prefill_piece=piece,
    )  # fmt: skip
    scheduler.drafts = len(shape or ())
    runner.scheduler = scheduler
    text = ByteTokenizer(c.vocab, None, ())
    return Engine(runner, scheduler, text, max_context=256, eos_ids=(), seed=0)


@dataclass
class Snapshot:
    """What the trunk remembers of a request's computed tokens."""

    ssm: Tensor
    conv: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, e: Engine, request: Request) -> "Snapshot":
        model, caches = e.runner.model, e.runner.caches
        assert isinstance(model, NemotronH)
        assert caches.kv is not None
        assert caches.mamba is not None
        mamba, attention = len(model.config.mamba_layers), len(model.config.attention_layers)
        ssm, conv = states_of(model, caches.mamba, request.slot)
        rows = [request.pages[i // PAGE] * PAGE + i % PAGE for i in range(request.computed)]
        kv = [c[:attention].flatten(1, 2)[:, rows].clone() for c in (caches.kv.k, caches.kv.v)]
        return cls(ssm[:mamba], conv[:mamba], *kv)

    def check(self, other: "Snapshot") -> None:
        for name in ("ssm", "conv", "keys", "values"):
            a, b = getattr(self, name), getattr(other, name)
            error, scale = float((a - b).abs().max()), max(1.0, float(b.abs().max()))
            assert error <= 1e-5 * scale, f"{name} differs by {error}"


def states_of(model: NemotronH, states: MambaStates, slot: int) -> tuple[Tensor, Tensor]:
    """SSM states behind the last computed token and windows of a slot, all layers."""
    saved = MambaStates.save(states, slot)
    if isinstance(states, ReplayStates):
        places = states.order[slot, : states.counts[slot]].tolist()
        for i, layer in enumerate(model.config.mamba_layers):
            mixer = model.layers[layer].mixer
            for at in places:
                x, dt, B = (ring[i, slot, :, at] for ring in states.rings)
                saved.ssm[i] = ssm_step_ref(saved.ssm[i], x, dt, mixer.A, B, B, mixer.D)[1]
    return saved.ssm, saved.conv


def decoded(
    model: NemotronH, ids: list[int], params: SamplingParams = GREEDY
) -> tuple[list[int], dict[int, Snapshot]]:
    """Tokens and, by number of computed tokens, what the trunk remembers, without drafts."""
    e, found = engine(model, None), {}
    group = submit(e, ids, params)
    request = group.completions[0].request
    while e.busy:
        e.step()
        if e.busy:
            found[request.computed] = Snapshot.of(e, request)
    return ids_of(group), found


def whole(model: NemotronH, ids: Sequence[int]) -> Tensor:
    """The block's outputs [n - 1, D] on the pairs of a sequence of n tokens, without caches."""
    assert model.mtp is not None
    tokens = torch.tensor([list(ids)], device=model.device)
    with torch.no_grad():
        hidden = model.train_forward(tokens[:, :-1])
        return model.mtp.train_forward(model.embeddings(tokens[:, 1:]), hidden)[0]


def close(a: Tensor, b: Tensor, name: str) -> None:
    assert float((a - b).abs().max()) <= 2e-5 * float(b.abs().max()), name


# ----------------------------------------------------------------------------------- step by step
@pytest.mark.usefixtures("rollback")
@pytest.mark.parametrize("shape", ["0", "0,1", "0,1,2,3,4", "0,0,1,1,2"])
def test_every_step_leaves_what_plain_decoding_leaves(shape: str, usual: NemotronH) -> None:
    """Drafts right up to another depth on every pass; a neighbour comes along in pieces."""
    ids = prompt(19)
    want, snapshots = decoded(usual, ids)
    e = engine(usual, DraftShape.parse(shape), piece=16)
    stub = stubbed(e, lambda n, depth: depth <= (0, 2, 1, 5, 3)[n % 5])
    group = submit(e, ids, GREEDY)
    other = submit(e, prompt(70), GREEDY)
    for g, true in ((group, want), (other, decoded(usual, prompt(70))[0])):
        stub.truth[g.completions[0].request.id] = true
    request = group.completions[0].request
    while not group.finished:
        e.step()
        if request.prefilled and not group.finished:
            Snapshot.of(e, request).check(snapshots[request.computed])
    finish(e)
    assert ids_of(group) == want
    assert ids_of(other) == stub.truth[other.completions[0].request.id]
    assert 0 < e.draft_meter.accepted < e.draft_meter.verified


@pytest.mark.usefixtures("rollback")
def test_the_block_over_its_caches_is_the_block_without_them(model: NemotronH) -> None:
    """Through pieces of prompts, accepted and rejected runs, and a preemption; every pattern."""
    e = engine(model, DraftShape.chain(3), piece=11, pages=13)
    stub = stubbed(e, lambda n, depth: depth <= n % 4)
    groups = [submit(e, prompt(n), GREEDY) for n in (24, 9, 33)]
    for g, n in zip(groups, (24, 9, 33)):
        stub.truth[g.completions[0].request.id] = decoded(model, prompt(n))[0]
    checked = 0
    while e.busy:
        e.step()
        for g in groups:
            request = g.completions[0].request
            if request.hidden is not None and not g.finished:
                tokens = request.prompt + request.output
                close(request.hidden, whole(model, tokens)[-1], f"after {len(tokens)} tokens")
                checked += 1
    assert e.scheduler.preemptions
    assert checked > 20
    for g in groups:
        assert ids_of(g) == stub.truth[g.completions[0].request.id]


@pytest.mark.usefixtures("rollback")
@pytest.mark.parametrize("shape", ["0,1,2", "0,0,1,1,3"])
def test_proposals_are_the_block_applied_to_its_own_output(shape: str, model: NemotronH) -> None:
    """Draft d + 1 comes from the pair (draft d, the block's output before it), in its place behind
    the pairs of the text; alternatives in order of their logits. Each drafts behind its own past,
    whatever its neighbours do."""
    e = engine(model, DraftShape.parse(shape), piece=11)
    groups = [submit(e, prompt(n), GREEDY) for n in (14, 21)]
    drafter = e.runner.drafter
    assert drafter is not None
    proposed: list[tuple[Request, list[int]]] = []
    own = drafter.propose

    def propose(pieces: Sequence[Piece]) -> Tensor:
        ids = own(pieces)
        parts = ids.split([p.request.drafts for p in pieces])
        proposed.extend((p.request, x.tolist()) for p, x in zip(pieces, parts))
        return ids

    drafter.propose = propose  # type: ignore[method-assign]
    for _ in range(6):
        proposed.clear()
        e.step()
        for request, drafts in proposed:
            assert drafts == by_hand(model, request, drafter.shape, drafts)
    assert proposed
    for g in groups:
        e.cancel(g.id)
    finish(e)


def by_hand(model: NemotronH, request: Request, shape: DraftShape, drafts: list[int]) -> list[int]:
    """What should have been drafted before the last step, which (random weights) accepted none."""
    assert model.mtp is not None
    text = torch.tensor([(request.prompt + request.output)[:-1]], device=model.device)
    found: list[int] = []
    outputs: dict[int, Tensor] = {}
    taken: dict[int, list[int]] = {}
    with torch.no_grad():
        hidden = model.train_forward(text[:, :-1])[0]
        for draft in range(1, len(drafts) + 1):
            parent = shape.parents[draft - 1]
            if parent not in outputs:
                path = shape.path(parent)
                drafted = torch.tensor([found[d - 1] for d in path], dtype=torch.int64)
                ids = torch.cat([text[0, 1:], drafted.to(model.device)])
                before = [hidden, *(outputs[p][None] for p in [0, *path][:-1])][: len(path) + 1]
                pairs = model.embeddings(ids)[None], torch.cat(before)[None]
                outputs[parent] = model.mtp.train_forward(*pairs)[0, -1]
            logits = model.logits(outputs[parent][None])[0]
            logits[taken.setdefault(parent, [])] = -torch.inf
            found.append(int(logits.argmax()))
            taken[parent].append(found[-1])
    return found


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_seven_requests_with_the_real_block(temperature: float, usual: NemotronH) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, seed=3, max_tokens=9, logprobs=0)
    lengths = [1, 30, 5, 14, 2, 21, 9]
    outputs, logprobs = [], []
    for shape in (None, DraftShape.chain(3), DraftShape.parse("0,0,0,1,1,4")):
        e = engine(usual, shape, piece=24, pages=20)
        groups = []
        for n in lengths:
            groups.append(submit(e, prompt(n), params))
            e.step()
        finish(e)
        outputs.append([ids_of(g) for g in groups])
        found = [
            [r[t].logprob for r, t in zip(c.logprobs or [], c.token_ids)] for c in ends(groups)
        ]
        logprobs.append(torch.tensor(found))
    assert outputs[0] == outputs[1] == outputs[2]
    for other in logprobs[1:]:
        assert float((other - logprobs[0]).abs().max()) <= 1e-4, "the trunk's own, as without"


def ends(groups: list[Group]) -> list[CompletionOutput]:
    return [g.output().outputs[0] for g in groups]


# ------------------------------------------------------------------------------------- the block
def test_the_block_has_no_embedding_or_head_of_its_own(usual: NemotronH) -> None:
    """Its drafts go through the trunk's storage, and it holds every tensor of the checkpoint's."""
    own = {n for n in usual.named_tensors() if n.startswith("mtp.")}
    assert own == {n for n in expected(usual.config, mtp_blocks=1) if n.startswith("mtp.")}
    assert not any("embed" in n or "head" in n for n in own)
    hidden = torch.randn(2, usual.config.width, device=usual.device)
    assert usual.lm_head is not None
    before = usual.logits(hidden)
    usual.lm_head.weight.mul_(2)
    try:
        torch.testing.assert_close(usual.logits(hidden), 2 * before)
    finally:
        usual.lm_head.weight.div_(2)


class Ablation:
    """A block without one of its parts, inside the block."""

    def __init__(self, model: NemotronH, part: str) -> None:
        assert model.mtp is not None
        self.first, self.attention, self.moe = (
            model.mtp.steps[0],
            *(layer.mixer for layer in model.mtp.steps),
        )
        self.part = part

    def __enter__(self) -> None:
        first, moe = self.first, self.moe
        weight = {
            "attention": lambda: self.attention.o_proj.weight,
            "routed experts": lambda: moe.fc2_latent_proj.weight,
            "shared expert": lambda: moe.shared_experts.down_proj.weight,
        }.get(self.part)
        self.undo = []
        if weight is not None:
            tensor = weight()
            kept = tensor.clone()
            tensor.data.zero_()
            self.undo.append(lambda: tensor.data.copy_(kept))
        else:
            norm = getattr(first, self.part)
            norm.forward = lambda x: x
            self.undo.append(lambda: delattr(norm, "forward"))

    def __exit__(self, *error: object) -> None:
        for undo in self.undo:
            undo()


@pytest.fixture(scope="module")
def planted(device: str) -> tuple[NemotronH, list[int]]:
    """A block that just knows one text of the trunk by heart: its merging matrix is trained so, the
    other parts have random weights of such size that the matrix has to reckon with each of them."""
    model = made(device)
    text, _ = decoded(model, prompt(30), LONG)
    assert model.mtp is not None
    first, last = model.mtp.steps
    moe, rng = last.mixer, torch.Generator().manual_seed(0)
    parts = {first.mixer.o_proj: 20, moe.fc2_latent_proj: 60, moe.shared_experts.down_proj: 60}
    for matrix, size in parts.items():
        matrix.weight.mul_(size)
    for norm in (first.enorm, first.hnorm):
        norm.weight.copy_(torch.randn(norm.weight.shape, generator=rng).exp())
    sequence = torch.tensor([prompt(30) + text], device=model.device)
    targets, weight = sequence[0, 2:], first.eh_proj.weight.requires_grad_(True)
    with torch.no_grad():
        hidden, embedded = model.train_forward(sequence[:, :-1]), model.embeddings(sequence[:, 1:])
    optimiser = torch.optim.Adam([weight], lr=3e-3)
    for _ in range(200):
        logits = model.logits(model.mtp.train_forward(embedded, hidden)[0, :-1])
        if bool((logits.argmax(-1) == targets).all()):
            break
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits, targets).backward()
        optimiser.step()
    weight.requires_grad_(False)
    return model, text


def acceptance(planted: tuple[NemotronH, list[int]]) -> float:
    model, text = planted
    e = engine(model, DraftShape.chain(1), piece=13)
    group = submit(e, prompt(30), LONG)
    finish(e)
    assert ids_of(group) == text, "whatever the drafts"
    return e.draft_meter.accepted / e.draft_meter.verified


def test_a_planted_block_is_always_right(planted: tuple[NemotronH, list[int]]) -> None:
    assert acceptance(planted) == 1.0


@pytest.mark.parametrize("part", ["attention", "routed experts", "shared expert", "enorm", "hnorm"])
def test_every_part_of_the_block_matters(part: str, planted: tuple[NemotronH, list[int]]) -> None:
    with Ablation(planted[0], part):
        assert acceptance(planted) < 1.0
    assert acceptance(planted) == 1.0
