"""How the work is cut changes no token: pieces, neighbours, preemption, poisoned memory.

On a real (random) model holding every layer kind. Token ids are equal and states agree to 1e-5;
equal bits are the business of another mode, since products differ in their last bits with the
number of rows.
"""

import pytest
import torch

from nemotriton.engine.caches import Caches, MambaStates, PagedKV
from nemotriton.engine.engine import Engine
from nemotriton.engine.pool import Pool
from nemotriton.engine.sampling import SamplingParams
from nemotriton.engine.scheduler import Scheduler
from nemotriton.model.config import ModelConfig
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.synth import fill
from nemotriton.text.tokens import ByteTokenizer
from tests import harness
from tests.fake_model import PoisonRunner, finish, ids_of, submit

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
LENGTHS = [1, 130, 5, 67, 2, 300, 33]


@pytest.fixture(scope="module")
def model(device: str) -> NemotronH:
    config = ModelConfig.preset("tiny")
    made = NemotronH(config, torch.float32, torch.device(device))
    fill(config, made.named_tensors(), 0)
    made.prepare()
    return made


def prompt(n: int) -> list[int]:
    g = torch.Generator().manual_seed(n)
    return torch.randint(3, 500, (n,), generator=g).tolist()


def engine(model: NemotronH, piece: int = 512, pages: int = 40, requests: int = 7) -> Engine:
    """A real engine whose free memory is NaN at all times."""
    c = model.config
    assert c.attention is not None
    assert c.mamba is not None
    kv = PagedKV(
        len(c.attention_layers), pages, c.attention.kv_heads, c.attention.head_dim,
        torch.float32, model.device, page_size=16,
    )  # fmt: skip
    states = MambaStates(c.mamba, len(c.mamba_layers), requests, torch.float32, model.device)
    caches = Caches(kv, states)
    runner = PoisonRunner(model, caches, vocab=c.vocab, chunk=c.mamba.chunk, device=model.device)
    scheduler = Scheduler(
        pages=Pool(pages, "pages"), slots=Pool(requests, "slots"), page_size=16,
        max_requests=requests, prefill_piece=piece,
    )  # fmt: skip
    runner.scheduler = scheduler
    return Engine(
        runner, scheduler, ByteTokenizer(c.vocab, None, ()), max_context=512, eos_ids=(), seed=0
    )


@pytest.fixture(scope="module")
def alone(model: NemotronH) -> dict[tuple[int, float], list[int]]:
    """Every prompt's completion when nothing else runs and it is prefilled whole."""
    found = {}
    for params in (GREEDY, WARM):
        for n in LENGTHS:
            e = engine(model)
            group = submit(e, prompt(n), params)
            finish(e)
            found[n, params.temperature] = ids_of(group)
    assert len({tuple(v) for v in found.values()}) == len(found), "completions must tell apart"
    return found


@pytest.mark.parametrize("piece", [1, 3, 16, 127, 128, 129])
def test_pieces_change_no_token(piece: int, model: NemotronH, alone: dict) -> None:
    e = engine(model, piece=piece)
    group = submit(e, prompt(130), GREEDY)
    finish(e)
    assert ids_of(group) == alone[130, 0]


@pytest.mark.parametrize("piece", [1, 3, 16, 127, 128, 129])
def test_pieces_leave_the_same_states(piece: int, model: NemotronH) -> None:
    ids = prompt(260)
    whole, a = harness.run(model, ids)
    pieces = [piece] * (260 // piece) + ([260 % piece] if 260 % piece else [])
    cut, b = harness.run(model, ids, pieces)
    assert float((whole - cut).abs().max()) <= 1e-5 * float(whole.abs().max())
    same_states(a, b)


def test_tokens_one_by_one_through_the_decode_path(model: NemotronH) -> None:
    ids = prompt(70)
    whole, a = harness.run(model, ids)
    steps, b = harness.run(model, ids, [37, *[-1] * 33])
    assert float((whole - steps).abs().max()) <= 1e-5 * float(whole.abs().max())
    same_states(a, b)


def test_several_tokens_into_a_warm_state(model: NemotronH) -> None:
    """Prefill 37, then five at once: not a one-token step, and not a fresh prompt."""
    ids = prompt(42)
    whole, a = harness.run(model, ids)
    warm, b = harness.run(model, ids, [37, 5])
    verify, c = harness.run(model, ids, [37, -5])
    for other, caches in ((warm, b), (verify, c)):
        assert float((whole - other).abs().max()) <= 1e-5 * float(whole.abs().max())
        same_states(a, caches)


def same_states(a: Caches, b: Caches) -> None:
    assert a.mamba is not None
    assert b.mamba is not None
    for name in ("ssm", "conv"):
        x, y = getattr(a.mamba, name)[:, 1], getattr(b.mamba, name)[:, 1]
        assert float((x - y).abs().max()) <= 1e-5 * max(1.0, float(x.abs().max())), name


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_seven_requests_joining_and_leaving(
    params: SamplingParams, model: NemotronH, alone: dict
) -> None:
    e = engine(model, piece=48)
    groups = []
    for i, n in enumerate(LENGTHS):
        groups.append(submit(e, prompt(n), params))
        for _ in range(1 + i % 3):
            e.step()
    finish(e)
    for n, group in zip(LENGTHS, groups, strict=True):
        assert ids_of(group) == alone[n, params.temperature], f"prompt of {n} tokens"


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_preemption(params: SamplingParams, model: NemotronH, alone: dict) -> None:
    """Pages for a fraction of the work: requests are saved to the host and come back."""
    e = engine(model, piece=64, pages=11)
    short = [33, 33, 67, 33, 5, 33, 67, 33]
    groups = [submit(e, prompt(n), params) for n in short]
    finish(e)
    assert e.scheduler.preemptions >= 2
    for n, group in zip(short, groups, strict=True):
        assert ids_of(group) == alone[n, params.temperature], f"prompt of {n} tokens"


def test_slots_and_pages_are_reused(model: NemotronH, alone: dict) -> None:
    """One slot serves seven requests in turn, its memory NaN between them."""
    e = engine(model, requests=1)
    groups = [submit(e, prompt(n), GREEDY) for n in LENGTHS]
    finish(e)
    for n, group in zip(LENGTHS, groups, strict=True):
        assert ids_of(group) == alone[n, 0]


def test_training_forward_equals_the_engine(model: NemotronH) -> None:
    """The caches-free forward computes the same model, and gradients reach every parameter."""
    if model.device.type != "cpu":
        pytest.skip("the training forward is compared where the twins are the engine too")
    ids = torch.tensor([prompt(50), prompt(50)[::-1]])
    hidden = model.train_forward(ids)
    for row, tokens in zip(hidden, ids.tolist(), strict=True):
        want, _ = harness.run(model, tokens)
        got = model.logits(row)
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
    for p in model.parameters():
        p.requires_grad_(True)
    try:
        model.logits(model.train_forward(ids).flatten(0, 1)).square().mean().backward()
        dead = [
            n for n, p in model.named_parameters()
            if (p.grad is None or not bool(p.grad.abs().sum() > 0)) and "correction_bias" not in n
        ]  # fmt: skip
        assert not dead, f"no gradient reaches {dead}"
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    finally:
        for p in model.parameters():
            p.requires_grad_(False)
            p.grad = None
