"""The server under load and signals: who leaves, who crashes, who has to wait, how it ends."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from bench.serve import soak
from bench.serve_clients import StreamError, stream_all
from bench.serve_load import Load, compare
from nemotriton.engine.llm import LLM
from nemotriton.engine.outputs import Completion
from nemotriton.serve import exchange
from nemotriton.serve.app import Limits
from nemotriton.text.constraint import Constraint
from tests.serving import Running, serving

LONG = {"prompt": "long", "ignore_eos": True, "max_tokens": 400, "seed": 1}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def post(running: Running, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(running.url + "/v1/completions", json=body, timeout=30)


def text_of(lines: list[str]) -> str:
    """What the events of a stream of plain text say; it must have come to its end."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]", data[-2:]
    return "".join(c["text"] for d in data[:-1] for c in json.loads(d)["choices"])


@contextlib.contextmanager
def streaming(running: Running, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """Lines of a stream; the connection goes away at the end of the block."""
    body = body | {"stream": True}
    with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=30) as found:
        assert found.status_code == 200, found.read()
        yield found.iter_lines()


def paced(running: Running, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """Slow the engine down; the list gets the time of each step."""
    step, times = running.llm.step, list[float]()

    def slow() -> None:
        times.append(time.monotonic())
        time.sleep(seconds)
        step()

    monkeypatch.setattr(running.llm, "step", slow)
    return times


def test_two_hundred_streams_and_a_third_of_the_clients_leave() -> None:
    kinds = [
        {"prompt": f"number {i}" * (1 + i // 3), "max_tokens": 3 + i, "seed": i, "ignore_eos": True}
        for i in range(10)
    ]

    async def one(client: httpx.AsyncClient, url: str, number: int) -> str | None:
        body = kinds[number % len(kinds)] | {"stream": True}
        lines: list[str] = []
        async with client.stream("POST", url, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if number % 3 == 0 and len(lines) > number % 7:
                    return None
        return text_of(lines)

    async def all_of_them(url: str) -> list[str | None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            return list(await asyncio.gather(*(one(client, url, i) for i in range(200))))

    with serving(Limits(queue=200), requests=12, context=256) as running:
        alone = [post(running, kind).json()["choices"][0]["text"] for kind in kinds]
        found = asyncio.run(all_of_them(running.url + "/v1/completions"))
        assert sum(text is None for text in found) == 67
        for i, text in enumerate(found):
            assert text is None or text == alone[i % len(kinds)], f"stream {i}"
        running.settle()


def test_who_leaves_frees_its_slot_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(requests=2, context=512) as running:
        slots = running.llm.engine.scheduler.slots
        assert slots is not None
        times = paced(running, monkeypatch, 0.1)
        with streaming(running, LONG) as lines:
            next(lines)
            assert slots.taken == 1
        left = time.monotonic()
        running.settle()
        later = [t for t in times if t > left]
        assert len(later) <= 2, "the step that was about to begin, and the one that cancels"
        # one that waits for its whole answer, and one that has not got a slot yet
        for waiting in (0, 1):
            with contextlib.ExitStack() as others:
                running_streams = [
                    others.enter_context(streaming(running, LONG)) for _ in range(2 * waiting)
                ]
                for lines in running_streams:
                    next(lines)
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(running.url + "/v1/completions", json=LONG, timeout=0.3)
                time.sleep(0.3)
                assert running.service.loop.open == 2 * waiting
            running.settle()


def test_overload_is_told_and_nobody_who_is_in_is_thrown_out() -> None:
    with serving(Limits(queue=1), requests=1, context=256) as running:
        body = LONG | {"max_tokens": 60}
        alone = post(running, body).json()["choices"][0]["text"]
        found: list[str] = []

        def run() -> None:
            with streaming(running, body) as lines:
                found.append(text_of(list(lines)))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        while running.service.loop.open < 2:
            time.sleep(0.001)
        refused = [post(running, body) for _ in range(3)]
        for thread in threads:
            thread.join(30)
        assert [r.status_code for r in refused] == [429] * 3
        assert int(refused[0].headers["retry-after"]) >= 1
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        assert found == [alone] * 2
        running.settle()
        assert post(running, body).status_code == 200


def test_a_crash_is_that_of_one_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(inner: Any, marked: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            if marked(self):
                raise ZeroDivisionError("of this request")
            return inner(self, *args)

        return call

    def is_marked(completion: Completion) -> bool:
        return completion.request.params.seed == 13 and len(completion.request.output) > 3

    monkeypatch.setattr(Completion, "push", crash(Completion.push, is_marked))
    monkeypatch.setattr(Constraint, "allow", crash(Constraint.allow, lambda _: True))
    with serving(context=256) as running:
        body = LONG | {"max_tokens": 40}
        alone = post(running, body).json()["choices"][0]["text"]
        with streaming(running, body) as lines:
            first = next(lines)
            text = post(running, body | {"seed": 13, "n": 2})
            grammar = post(running, body | {"regex": "a+", "ignore_eos": False})
            assert text_of([first, *lines]) == alone
        for failed in (text, grammar):
            assert failed.status_code == 500
            assert "ZeroDivisionError: of this request" in failed.json()["error"]["message"]
        with streaming(running, body | {"seed": 13}) as lines:
            error = [line for line in lines if '"error"' in line]
        assert len(error) == 1, "a stream that has begun ends with the error"
        running.settle()
        monkeypatch.setattr(running.llm, "chat_prompt", None)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        broken = httpx.post(running.url + "/v1/chat/completions", json=chat)
        assert broken.status_code == 500
        assert broken.json()["error"]["code"] == "internal_error"
        running.settle()
        assert post(running, body).json()["choices"][0]["text"] == alone


def test_a_step_that_fails_ends_what_ran_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(context=256) as running:
        runner = running.llm.runner
        run = runner.run

        def fail(step: Any) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(runner, "run", fail)
        failed = post(running, LONG | {"max_tokens": 3})
        assert failed.status_code == 500
        assert "the device is gone" in failed.json()["error"]["message"]
        assert httpx.get(running.url + "/health").status_code == 503
        monkeypatch.setattr(runner, "run", run)
        assert post(running, LONG | {"max_tokens": 3}).status_code == 200
        assert httpx.get(running.url + "/health").status_code == 200
        running.settle()


def test_a_request_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Limits(seconds=0.5), requests=2) as running:
        paced(running, monkeypatch, 0.1)
        late = post(running, LONG)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "timeout"
        with streaming(running, LONG) as lines:
            data = [line for line in lines if line]
        assert json.loads(data[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        running.settle()


def test_a_quiet_stream_is_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_QUIET", 0.1)
    with serving() as running:
        paced(running, monkeypatch, 0.35)
        with streaming(running, LONG | {"max_tokens": 2}) as found:
            lines = [line for line in found if line]
    comments = [line for line in lines if line.startswith(":")]
    assert lines[0] == ": waiting"
    assert len(comments) >= 3
    assert text_of([line for line in lines if line not in comments])


@contextlib.contextmanager
def process(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address it says it is at."""
    command = [sys.executable, "-m", "nemotriton.serve", "--port", "0", "--device", "cpu", *args]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert found.stderr is not None
        for line in found.stderr:
            if match := re.search(r"http://\S+/v1", line):
                yield found, match[0]
                return
        raise AssertionError("the server did not come up")
    finally:
        found.kill()
        found.communicate()


def test_the_first_signal_drains_and_the_second_stops() -> None:
    sizes = ("--max-requests", "2", "--max-context", "1024", "--name", "small")
    with process(*sizes) as (server, url):
        body = LONG | {"max_tokens": 100, "stream": True}
        with httpx.stream("POST", url + "/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            with pytest.raises(httpx.ConnectError):
                httpx.get(url + "/models")
            assert len(text_of([first, *lines])) >= 100
        assert server.wait(10) == 0
        assert server.stdout is not None
        assert server.stdout.read() == ""
        assert server.stderr is not None
        assert "1 answer is under way" in server.stderr.read()
    with process(*sizes) as (server, url):
        body = LONG | {"max_tokens": 1000, "stream": True}
        with httpx.stream("POST", url + "/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            started = time.monotonic()
            server.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            server.send_signal(signal.SIGTERM)
            assert '"stopping"' in "".join(lines)
        assert server.wait(10) == 0
        assert time.monotonic() - started < 4


@pytest.mark.parametrize(
    "args, message",
    [
        (("--port", "70000"), "--port 70000 is no port"),
        (("--timeout", "0"), "--timeout 0.0 is not above 0"),
        (("--host", "256.0.0.1"), "256.0.0.1:8000: "),
        (("--api-key", ""), "--api-key is empty"),
        (("preset:nano-30b",), "add --synthetic"),
    ],
)
def test_usage(args: tuple[str, ...], message: str) -> None:
    from typer.testing import CliRunner

    from nemotriton.serve.__main__ import app

    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_short_soak() -> None:
    report = soak(3.0)
    assert not report.failures, report.failures[:5]
    kinds = {kind for kind, _ in report.counts}
    assert kinds == {"whole", "leaves", "slow", "malformed", "oversized"}
    assert report.counts["leaves", "left"] > 0
    assert report.counts["oversized", "413"] > 0
    assert report.left == 0
    assert report.growth < 48 * 2**20


def test_the_benchmark_reads_every_stream_to_its_end() -> None:
    body = {"prompt": [300, 301], "max_tokens": 6, "ignore_eos": True, "stream": True}
    with serving(requests=2) as running:
        start, end = asyncio.run(stream_all(running.url, [body] * 3))
        assert end > start
        running.settle()
        assert running.llm.engine.meter.output_tokens == 3 * 6
        with pytest.raises(StreamError, match="a stream ended with"):
            asyncio.run(stream_all(running.url, [body | {"model": "another"}]))


def test_the_benchmark_compares_the_same_work() -> None:
    with LLM(device="cpu", max_context=64, max_requests=3) as llm:
        load = Load.random(llm, streams=3, prompt=8, tokens=12)
        for found in compare(llm, load, rounds=1):
            assert sum(tokens for _, tokens in found.steps) == 3 * 12
            assert len(found.submitted) == 3
            assert found.start < min(found.submitted) <= found.start + found.arrival < found.end
            before, during, after, rate = found.parts(3)
            assert min(before, during, after) > 0
            assert before + during + after == pytest.approx(found.seconds)
            assert 3 / during < rate <= 3 * 11 / during * 1.001
