"""The server's engine thread on a GPU: recorded steps replayed there say what `generate` says."""

import asyncio

import pytest

from nemotriton import LLM, SamplingParams
from nemotriton.engine.prefixes import Prefixes
from nemotriton.serve.loop import Done, EngineLoop, Event, Job, Piece

PROMPTS = [list(range(20, 20 + 7 * (1 + i))) for i in range(12)]
PARAMS = [SamplingParams(max_tokens=20, seed=i, ignore_eos=True) for i in range(12)]


async def ended(job: Job) -> list[Event]:
    found: list[Event] = []
    while not found or isinstance(found[-1], Piece):
        found += await job.news.take()
    return found


async def serve(llm: LLM) -> list[list[int]]:
    """Every prompt streamed at the same time; each third job is cancelled at its first token."""
    over: list[Job] = []
    loop = EngineLoop(llm, len(PROMPTS), over.append)
    loop.start()
    try:
        jobs = []
        for prompt, params in zip(PROMPTS, PARAMS):
            assert loop.reserve(1)
            jobs.append(Job([llm.engine.prepare(prompt, params)], 1, stream=True))
            loop.submit(jobs[-1])
        for job in jobs[::3]:
            await job.news.take()
            loop.cancel(job)
        events = [await ended(job) for job in jobs]
        assert all(isinstance(found[-1], Done) for found in events)
        assert (len(over), loop.open) == (len(jobs), 0)
    finally:
        await asyncio.to_thread(loop.stop)
    return [
        [t for e in found if isinstance(e, Piece) for t in e.delta.token_ids] for found in events
    ]


@pytest.mark.parametrize("drafts", [0, 3])
def test_streams_of_the_thread(drafts: int) -> None:
    sizes = {"max_context": 256, "max_requests": 8, "drafts": drafts}
    with LLM(device="cuda", dtype="float32", **sizes, adapt_drafts=False) as llm:
        alone = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)]
        served = asyncio.run(serve(llm))
        for i, (tokens, expected) in enumerate(zip(served, alone, strict=True)):
            assert i % 3 == 0 or tokens == expected, i
        llm.engine.prefixes = Prefixes(2**30)
        llm.generate(PROMPTS, PARAMS)
        computed = llm.stats()["prompt_tokens"]
        longer = [[*prompt, 99] for prompt in PROMPTS]
        again = [o.outputs[0].token_ids for o in llm.generate(longer, PARAMS)]
        assert llm.stats()["prompt_tokens"] - computed == len(longer)
        llm.engine.prefixes = None
        assert again == [o.outputs[0].token_ids for o in llm.generate(longer, PARAMS)]
        scheduler = llm.engine.scheduler
        assert scheduler.slots is not None
        assert scheduler.slots.taken == 0
