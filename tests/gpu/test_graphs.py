"""CUDA graphs of decode steps give the bits of the same steps launched piece by piece.

Pieces, neighbours that join and leave, ends that differ, chains, a tree: tokens and hidden states.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton.engine.clock import Clock
from nemotriton.engine.graphs import CudaGraphs, Flight
from nemotriton.engine.request import Step
from nemotriton.engine.static_step import StepMemory
from nemotriton.engine.step_inputs import StepShape
from nemotriton.kernels.op import SPECS, compiled_variants


@dataclass(frozen=True)
class Kept:
    """What a step left: hidden states [rows, D], and drafts of its requests' own, in its order."""

    shape: StepShape
    wanted: list[int]
    hidden: torch.Tensor

    def kind(self, row: int) -> str:
        """Whose row it is, for people."""
        sequence, draft = divmod(row, self.shape.each)
        if sequence >= len(self.wanted):
            return "a pad"
        own = draft <= self.wanted[sequence]
        return f"sequence {sequence}, " + (f"draft {draft}" if own else "more drafts than it has")


PROMPTS = [[5, 9, 200, 31], [77] * 3 + list(range(10, 170)), [400], list(range(300, 340)), [7, 7]]
Found = tuple[list[list[int]], list[Kept]]


def made(graphs: bool | None, preset: str = "tiny", **options: Any) -> LLM:
    sizes = {"dtype": "bfloat16", "max_context": 512, "max_requests": 5, "adapt_drafts": False}
    return LLM.synthetic(preset, device="cuda", graphs=graphs, **(sizes | options))


def params(i: int, length: int = 24) -> SamplingParams:
    return SamplingParams(
        temperature=(0, 0.8)[i % 2], top_p=0.9, seed=3, max_tokens=length + 7 * i, ignore_eos=True
    )


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Tokens of requests that join one after the other, and the hidden states of every step."""
    kept: list[Kept] = []
    steps = llm.runner.steps
    assert steps is not None
    assert steps.problem is None, steps.problem
    own = steps.launch

    def launch(step: Step, shape: StepShape, clock: Clock, behind: Flight | None = None) -> Flight:
        flight = own(step, shape, clock, behind)
        wanted = [p.request.drafts for p in step.decode]
        kept.append(Kept(shape, wanted, steps.memory.hidden[: shape.rows].clone()))
        return flight

    monkeypatch.setattr(steps, "launch", launch)
    groups = []
    for i, prompt in enumerate(PROMPTS):
        groups.append(llm.engine.submit(llm.engine.prepare(prompt, params(i))))
        for _ in range(3):
            llm.step()
    while not all(g.finished for g in groups):
        llm.step()
    assert steps.replays > 20
    assert steps.others == 0
    return [g.completions[0].request.output for g in groups], kept


def check(found: Found, again: Found) -> None:
    """The same tokens, and the same bits on every row, pads included."""
    assert found[0] == again[0]
    wrong = []
    for i, (a, b) in enumerate(zip(found[1], again[1], strict=True)):
        assert (a.shape, a.wanted) == (b.shape, b.wanted)
        assert not torch.isnan(a.hidden).any()
        off = (a.hidden != b.hidden).any(1).nonzero().flatten().tolist()
        wrong += [f"step {i} ({a.shape}), row {row}, {a.kind(row)}" for row in off]
    assert not wrong, f"{len(wrong)} rows differ: " + "; ".join(wrong[:12])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"drafts": 1},
        {"drafts": 2, "rollback": "lanes"},
        {"drafts": 3},
        {"tree": "0,0,1"},
        {"tree": "0,0,1", "rollback": "lanes"},
    ],
    ids=str,
)
def test_graphs_give_the_bits_of_single_launches(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for graphs in (True, False):
        with made(graphs, **given) as llm:
            found.append(watched(llm, monkeypatch))
    check(*found)


@pytest.mark.parametrize(
    "given", [{"drafts": 3}, {"drafts": 3, "rollback": "lanes"}, {"tree": "0,0,1"}], ids=str
)
def test_what_memory_held_before_changes_no_row(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts show in no token when they are wrong, so rows of rejected ones are compared too."""
    found = []
    for value in (float("nan"), 0.7):
        with made(False, **given) as llm:
            kv, mamba = llm.runner.caches.kv, llm.runner.caches.mamba
            assert kv is not None
            assert mamba is not None
            memory = [kv.k, kv.v, mamba.ssm, mamba.conv, mamba.conv_lanes, *(mamba.rings or ())]
            for part in memory:
                if part is not None:
                    part.fill_(value)
            found.append(watched(llm, monkeypatch))
    check(*found)


@pytest.mark.parametrize("preset, quant", [("nano-30b", "bf16"), ("super-120b", "release")])
def test_real_widths(preset: str, quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few layers of each kind; and tokens as without any padding, in most places."""
    found = []
    for graphs in (True, False):
        with made(graphs, preset, layers=10, quant=quant) as llm:
            found.append(watched(llm, monkeypatch))
    check(*found)


def test_fp32_tokens_are_those_of_steps_without_padding() -> None:
    found = []
    for recorded in (True, False):
        with made(None, dtype="float32") as llm:
            if not recorded:
                llm.runner.steps = None
            outputs = llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))])
            found.append([o.outputs[0].token_ids for o in outputs])
    assert found[0] == found[1]


WARM = [{}, {"drafts": 2}, {"preset": "nano-30b", "layers": 10}]


@pytest.mark.parametrize("given", WARM, ids=str)
def test_nothing_compiles_and_no_tile_is_chosen_after_the_warm_up(given: dict[str, Any]) -> None:
    """Counted from the end of the warm-up on: of prompts alone, together and beside others."""
    with made(None, **given) as llm:
        steps = llm.runner.steps
        assert steps is not None
        assert isinstance(steps.capture, CudaGraphs)
        compiled = compiled_variants()
        llm.warm_up_prompts()
        assert compiled_variants() > compiled, "prompts have kernels of their own"
        for length in (1, 5, 16, 40, 64, 200, 256, 500):
            llm.generate([[i % 400 for i in range(length)]], params(1, 3))
        groups = []
        for i, prompt in enumerate(PROMPTS):  # the first two together, others beside them
            groups.append(llm.engine.submit(llm.engine.prepare(prompt, params(i))))
            if i:
                llm.step()
        while not all(g.finished for g in groups):
            llm.step()
        found = steps.report()
        assert (found["compiled_since"], found["tiles_looked_up_since"]) == (0, 0)
        assert found["replays"] > 20  # type: ignore[operator]
        assert found["recorded"] == len(steps.shapes)


def test_prompts_that_nobody_rehearsed_are_counted() -> None:
    """So that the test above can fail; whatever ran in this process before."""
    for spec in SPECS.values():
        spec._chosen.clear()
    with made(None) as llm:
        llm.generate([list(range(300))], params(1, 2))
        assert llm.stats()["graphs"]["tiles_looked_up_since"] > 0


def test_memory_is_steady_and_comes_back() -> None:
    left = []
    for _ in range(3):
        with made(None, drafts=1) as llm:
            llm.generate(PROMPTS, params(1))
            reserved = torch.cuda.memory_reserved()
            for _ in range(3):
                llm.generate(PROMPTS, params(1))
            assert torch.cuda.memory_reserved() == reserved
            assert llm.stats()["graphs"]["bytes"] <= llm.plan.graphs + 2**26
        del llm
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[1] == left[2], left


def test_logprobs_and_penalties_are_those_of_single_launches() -> None:
    hard = SamplingParams(
        temperature=0.7, seed=5, max_tokens=20, min_tokens=4, repetition_penalty=1.3, logprobs=2,
        ignore_eos=True,
    )  # fmt: skip
    found = []
    for graphs in (True, False):
        with made(graphs) as llm:
            outputs = [o.outputs[0] for o in llm.generate(PROMPTS, hard)]
            found.append([(o.token_ids, o.logprobs) for o in outputs])
    assert found[0] == found[1]


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Python's collector runs at nearly every chance."""
    usual = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    yield
    gc.set_threshold(*usual)


@pytest.mark.usefixtures("eager_collector")
def test_graphs_that_nobody_holds_do_not_end_a_recording(cuda: torch.device) -> None:
    """As those of a model that was dropped: to destroy one during a capture is an error."""
    x = torch.zeros(8, device=cuda)
    x.add_(1)

    def litter(*progress: object) -> None:
        alone: list[Any] = [CudaGraphs(cuda).record(lambda: x.add_(1)) for _ in range(4)]
        alone.append(alone)  # only the collector can find it

    with made(None, drafts=1, recording=litter) as llm:
        assert llm.stats()["graphs"]["problem"] is None


def test_out_of_memory_leaves_steps_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real allocation that cannot be had, inside the third capture."""
    recorded = 0
    keep = StepMemory.keep_hidden

    def keeping(self: StepMemory, hidden: torch.Tensor) -> None:
        nonlocal recorded
        if torch.cuda.is_current_stream_capturing():
            recorded += 1
            if recorded == 3:
                torch.empty(2**45, dtype=torch.uint8, device=hidden.device)
        keep(self, hidden)

    with made(False) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params(0))]
    monkeypatch.setattr(StepMemory, "keep_hidden", keeping)
    with made(None) as llm:
        report = llm.stats()["graphs"]
        assert report["recorded"] == 0
        assert "2 of 4 CUDA graphs" in report["problem"]
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params(0))] == want
