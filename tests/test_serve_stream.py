"""What a streamed token costs the server, and that no shortcut changes what a client reads."""

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotriton.engine.llm import LLM
from nemotriton.engine.outputs import Delta
from nemotriton.engine.sampling import SamplingParams
from nemotriton.serve import loop as serve_loop
from nemotriton.serve.exchange import Exchange
from nemotriton.serve.loop import Done, EngineLoop, Job
from nemotriton.serve.wire import Voice
from tests.serving import Running, serving

CALLS_PER_TOKEN = 25


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def stream(running: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must have come to its end."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(running.url + path, json=body | options, timeout=60)
    assert answer.status_code == 200, answer.text
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(d) for d in data]


@contextlib.contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls of Python functions, by name, in an event loop's thread that starts meanwhile."""
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and threading.current_thread().name == "http":
            found[frame.f_code.co_name] += 1

    threading.setprofile(count)
    try:
        yield found
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_token_costs_few_calls() -> None:
    """Counted, as a clock would measure the machine: those of long answers less those of short
    ones, so that what a request costs stays out."""
    prompts, short, long = [[300 + i] * 4 for i in range(8)], 10, 70

    def all_of(running: Running, tokens: int) -> None:
        bodies = [{"prompt": p, "max_tokens": tokens, "ignore_eos": True} for p in prompts]
        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(lambda body: stream(running, "/v1/completions", body), bodies))
        running.settle()

    with counted_calls() as calls, serving(context=128) as running:
        all_of(running, short)
        before, steps = calls.copy(), running.llm.engine.meter.steps
        all_of(running, short)
        middle, halfway = calls.copy(), running.llm.engine.meter.steps
        all_of(running, long)
        after, end = calls.copy(), running.llm.engine.meter.steps
    spent = after - middle - (middle - before)
    tokens = len(prompts) * (long - short)
    assert 0 < spent["_say"] <= tokens
    assert spent["_deliver"] <= (end - halfway) - (halfway - steps) + 2, "one call for a step"
    assert spent.total() <= CALLS_PER_TOKEN * tokens, spent.most_common(20)
    assert spent["_part"] < 0.1 * tokens, "what does not change is encoded once"


@pytest.mark.parametrize("chat", [True, False])
def test_steps_joined_in_one_write_are_the_whole(
    chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, say = [], Exchange._say

    async def slow(self: Exchange, send: Any, data: bytes, more: bool = True) -> None:
        writes.append(data)
        time.sleep(0.02)  # the event loop is behind: steps go on meanwhile
        await say(self, send, data, more)

    monkeypatch.setattr(Exchange, "_say", slow)
    body: dict[str, Any] = {"max_tokens": 40, "seed": 5, "temperature": 1.5, "n": 2}
    body |= {"ignore_eos": True}
    if chat:
        body |= {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 20}
        body |= {"logprobs": True, "top_logprobs": 2}
    else:
        body |= {"prompt": "once", "logprobs": 2}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with serving() as running:
        whole = httpx.post(running.url + path, json=body, timeout=60).json()
        for rows in (True, False):
            asked = body if rows else body | {"logprobs": None, "top_logprobs": None}
            if not chat and not rows:
                del asked["top_logprobs"]
            writes.clear()
            *events, usage = stream(running, path, asked)
            assert usage["usage"] == whole["usage"]
            assert len(writes) < 40, "fewer writes than steps"
            for choice in whole["choices"]:
                of_one = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
                expected = choice if rows else choice | {"logprobs": None}
                assert joined(of_one, chat) == said(expected, chat)
        running.settle()


def joined(parts: list[dict[str, Any]], chat: bool) -> dict[str, Any]:
    """A choice of a stream, put together."""
    texts = [part["delta"] if chat else part for part in parts]
    rows = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    keys = rows[0] if rows else {}
    return {
        "text": "".join(t.get("content" if chat else "text") or "" for t in texts),
        "thought": "".join(t.get("reasoning", "") for t in texts),
        "logprobs": {key: [x for row in rows for x in row[key]] for key in keys} or None,
        "reason": [part["finish_reason"] for part in parts if part["finish_reason"]],
    }


def said(choice: dict[str, Any], chat: bool) -> dict[str, Any]:
    """The same of an answer that was not streamed."""
    message = choice["message"] if chat else choice
    return {
        "text": message["content" if chat else "text"] or "",
        "thought": message.get("reasoning", ""),
        "logprobs": choice["logprobs"],
        "reason": [choice["finish_reason"]],
    }


@settings(max_examples=100, deadline=None)
@given(st.text(), st.lists(st.tuples(st.text(), st.booleans()), min_size=1), st.booleans())
def test_any_text_is_read_as_it_was_said(
    model: str, words: list[tuple[str, bool]], chat: bool
) -> None:
    voice = Voice(model, chat, choices=1, usage=chat)
    for text, thinks in words:
        given = ("", text) if thinks and chat else (text, "")
        delta = Delta("0", 0, given[0], [1], None, None, None, thinking=given[1])
        event = voice.piece(0, delta)
        if not event:
            assert not text
            continue
        assert event.startswith(b"data: ")
        assert event.endswith(b"}\n\n")
        assert event.count(b"\n") == 2
        found = json.loads(event[6:])
        assert found["model"] == model
        (choice,) = found["choices"]
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, None, None)
        body = choice["delta"] if chat else choice
        assert body.get("content" if chat else "text", "") == given[0]
        assert body.get("reasoning", "") == body.get("reasoning_content", "") == given[1]


@pytest.mark.parametrize("how", ["comes", "does not", "is late"])
def test_prompts_that_come_together_run_together(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step waits for who is being read, whether he comes or not, but not for ever."""
    monkeypatch.setattr(serve_loop, "_GATHER", 0.2 if how == "is late" else 60.0)
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    async def run(llm: LLM) -> None:
        loop = EngineLoop(llm, 8, lambda _: None)
        loop.start()
        assert loop.reserve(1)
        assert loop.reserve(1)
        jobs = [Job([llm.engine.prepare([300, 301], params)], 1, stream=False) for _ in range(2)]
        loop.submit(jobs[0])
        await asyncio.sleep(0.05)
        assert llm.engine.meter.steps == 0
        if how == "comes":
            loop.submit(jobs[1])
        elif how == "does not":
            loop.release(1)
        for job in jobs[: 2 if how == "comes" else 1]:
            assert isinstance((await job.news.take())[0], Done)
        assert llm.engine.meter.steps == 2
        await asyncio.to_thread(loop.stop)

    with LLM(device="cpu", max_context=64, max_requests=4) as llm:
        asyncio.run(asyncio.wait_for(run(llm), 20))
