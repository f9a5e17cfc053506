"""What the plan says fits does fit, all of it at once: no preemption, no wait, no page too few."""

from typing import Any

import pytest

from nemotriton import LLM, SamplingParams
from nemotriton.audit.gpus import find_gpu
from nemotriton.audit.memory import Stored, Wanted, stored, what_fits
from nemotriton.engine.caches import PAGE_SIZE
from nemotriton.engine.pool import Pool
from nemotriton.engine.request import Request, State
from nemotriton.engine.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def model() -> Stored:
    return stored("super-120b", "release", False, None, False)


def served(made: Scheduler, requests: list[Request]) -> int:
    """Run all to their limits; the most that decoded in one step."""
    for request in requests:
        made.add(request)
    most = 0
    while made.busy:
        step = made.step()
        most = max(most, len(step.decode))
        for piece in step.decode:
            made.advance(piece, [1])
        for piece in step.prefill:
            made.advance(piece, [1] if piece.end == len(piece.request.prompt) else [])
    assert all(r.state is State.DONE and r.finish_reason == "length" for r in requests)
    return most


@pytest.mark.parametrize("prompt", [1, 7, 16, 17, 63, 64, 65, 79])
def test_as_many_as_have_pages_run_at_once(prompt: int) -> None:
    """Five contexts of 80 tokens in exactly their pages, whatever part of them is prompt."""
    pages = Pool(5 * 5, "pages")
    made = Scheduler(
        pages=pages, slots=Pool(5, "slots"), page_size=16, max_requests=5, prefill_piece=4000
    )
    requests = [
        Request(str(i), i, [1] * prompt, GREEDY, seed=0, limit=81 - prompt) for i in range(5)
    ]
    assert served(made, requests) == 5
    assert made.preemptions == 0
    assert pages.free == pages.size


def test_one_more_waits_and_nobody_is_preempted_for_it() -> None:
    made = Scheduler(
        pages=Pool(10, "pages"), slots=Pool(9, "slots"), page_size=16, max_requests=9,
        prefill_piece=4000,
    )  # fmt: skip
    requests = [Request(str(i), i, [1] * 79, GREEDY, seed=0, limit=2) for i in range(3)]
    assert served(made, requests) == 2
    assert made.preemptions == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_filled_to_its_last_page(graphs: bool) -> None:
    sizes: dict[str, Any] = {"max_context": 4 * PAGE_SIZE, "max_requests": 3, "graphs": graphs}
    with LLM.synthetic("tiny", dtype="float32", device="cpu", **sizes) as llm:
        pages, slots = llm.engine.scheduler.pages, llm.engine.scheduler.slots
        assert pages is not None
        assert slots is not None
        assert (pages.size, slots.size) == (llm.plan.pages, llm.plan.slots) == (12, 3)
        prompts = [[i + 5] * (4 * PAGE_SIZE - 3) for i in range(3)]
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        groups = [llm.engine.submit(llm.engine.prepare(p, params)) for p in prompts]
        least = pages.free
        while not all(g.finished for g in groups):
            llm.step()
            least = min(least, pages.free)
        assert least == 0
        assert llm.engine.scheduler.preemptions == 0
        assert [len(g.completions[0].request.output) for g in groups] == [3, 3, 3]
        alone = llm.generate(prompts[2], params)[0].outputs[0].token_ids
        assert alone == groups[2].completions[0].request.output


@pytest.mark.parametrize("kv, gib", [("fp8", 4.0), ("bf16", 8.0)])
def test_a_million_tokens_of_super_on_one_h200(model: Stored, kv: str, gib: float) -> None:
    """Weights, K/V of one sequence, its 160 MiB of states, and room to spare for others."""
    context = 1 << 20
    found = what_fits(model, find_gpu("h200"), Wanted(context, 1, kv_dtype=kv))
    assert found["fits"], found["problem"]
    assert found["context"] == context
    assert found["all_at_once"]
    page = gib * 2**30 / context * PAGE_SIZE
    assert found["parts"]["KV"] == gib * 2**30 + page, "and one that no request owns"
    assert found["most_requests"][context] >= 2
    assert found["most_requests"][4096] >= 64


def test_smaller_states_and_keys_make_room(model: Stored) -> None:
    most = {}
    for state, kv in (
        ("float32", "bf16"),
        ("float32", "fp8"),
        ("bfloat16", "fp8"),
        ("int8", "fp8"),
    ):
        wanted = Wanted(32768, None, state_dtype=state, kv_dtype=kv)
        most[state, kv] = what_fits(model, find_gpu("h200"), wanted)["most_requests"][32768]
    numbers = list(most.values())
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 4
    assert numbers[-1] > 2 * numbers[0]


def test_more_context_than_the_configuration_states_is_a_note() -> None:
    with LLM.synthetic("tiny", device="cpu", max_context=4096, max_requests=1) as llm:
        assert llm.plan.max_context == 4096
        (note,) = [n for n in llm.notes if "max_position_embeddings" in n]
        assert note.startswith("max_context=4,096 is beyond the 2,048")
    with LLM.synthetic("tiny", device="cpu", max_context=2048, max_requests=1) as llm:
        assert not any("max_position_embeddings" in n for n in llm.notes)
