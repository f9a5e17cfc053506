"""The server's promises to a client: every feature by OpenAI's own client, every refusal."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import torch

from nemotriton.engine.llm import LLM
from nemotriton.serve.app import Limits
from tests.serving import Running, serving

USER = [{"role": "user", "content": "hi"}]
CALL = r"<tool_call>\n<function=add>\n<parameter=a>\n[1-9]\n</parameter>\n</function>\n</tool_call>"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    with serving(Limits(body=100_000, prompt=400, tokens=100)) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """What the server must say."""
    with LLM(device="cpu", dtype="float32", max_context=512, max_requests=8) as found:
        yield found


def chat(client: openai.OpenAI, extra: dict[str, Any] | None = None, **given: Any) -> Any:
    given = {"model": "tiny", "messages": USER, "max_tokens": 12, "seed": 7} | given
    return client.chat.completions.create(**given, extra_body=extra)


def joined(chunks: Any) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            new = {"content": "", "reasoning": "", "calls": [], "logprobs": [], "reason": None}
            made = found.setdefault(choice.index, new)
            delta = choice.delta
            assert made["reason"] is None, "nothing follows the end"
            made["content"] += delta.content or ""
            made["reasoning"] += getattr(delta, "reasoning", None) or ""
            made["calls"] += [
                (c.function.name, c.function.arguments) for c in delta.tool_calls or ()
            ]
            made["logprobs"] += choice.logprobs.content if choice.logprobs else []
            made["reason"] = choice.finish_reason
    return [found[i] for i in sorted(found)]


def of_message(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning", None) or "",
        "calls": [(c.function.name, c.function.arguments) for c in message.tool_calls or ()],
        "logprobs": choice.logprobs.content if choice.logprobs else [],
        "reason": choice.finish_reason,
    }


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.models.retrieve("other")


def test_a_chat_is_what_the_engine_says(client: openai.OpenAI, llm: LLM) -> None:
    answer = chat(client, {"thinking_token_budget": 4}, max_completion_tokens=20)
    params = replace(llm.default_params, max_tokens=20, seed=7, thinking_token_budget=4)
    output = llm.chat(USER, params)[0]
    expected = output.outputs[0]
    message = answer.choices[0].message
    assert expected.thinking
    assert expected.text
    assert (message.content, message.reasoning) == (expected.text, expected.thinking)
    assert message.reasoning_content == message.reasoning
    usage = answer.usage
    counts = (len(output.prompt_token_ids), len(expected.token_ids))
    assert (usage.prompt_tokens, usage.completion_tokens) == counts
    assert usage.total_tokens == sum(counts)


@pytest.mark.parametrize(
    "extra, given",
    [
        ({"thinking_token_budget": 3}, {"logprobs": True, "top_logprobs": 3}),
        (NO_THOUGHT, {"n": 3, "temperature": 1.5}),
        ({"regex": "x" + CALL, **NO_THOUGHT}, {"tools": [TOOL], "max_tokens": 100}),
        (NO_THOUGHT, {"stop": ["e", "a", "<"]}),
    ],
)
def test_streams_joined_are_the_whole(
    client: openai.OpenAI, extra: dict[str, Any], given: dict[str, Any]
) -> None:
    whole = chat(client, extra, **given)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(chat(client, extra, **given, **options))
    assert joined(chunks) == [of_message(choice) for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert len({choice.message.content for choice in whole.choices}) == given.get("n", 1)
    assert not chunks[-1].choices


def test_tools_are_called_and_their_results_read(client: openai.OpenAI) -> None:
    answer = chat(client, {"regex": CALL, **NO_THOUGHT}, tools=[TOOL], max_tokens=100)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "add"
    assert isinstance(json.loads(call.function.arguments)["a"], int)
    assert answer.choices[0].message.content is None
    turns = [*USER, answer.choices[0].message, {"role": "tool", "content": "3"}]
    turns[-1]["tool_call_id"] = call.id
    again = chat(client, NO_THOUGHT, messages=turns, tools=[TOOL])
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens + 20
    silent = chat(client, NO_THOUGHT, tools=[TOOL], tool_choice="none")
    assert silent.usage.prompt_tokens == chat(client, NO_THOUGHT).usage.prompt_tokens


def test_response_formats(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"k": {"enum": [1, 2]}}, "required": ["k"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(client, NO_THOUGHT, response_format=form, max_tokens=100)
    assert json.loads(answer.choices[0].message.content)["k"] in (1, 2)
    plain = chat(client, NO_THOUGHT, response_format={"type": "text"})
    assert plain.choices[0].message == chat(client, NO_THOUGHT).choices[0].message


def test_parts_and_older_roles(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    same = chat(client, messages=[{"role": "user", "content": parts}])
    assert same.choices[0].message == chat(client).choices[0].message
    told = [{"role": "developer", "content": "be brief"}, *USER]
    system = [{"role": "system", "content": "be brief"}, *USER]
    first, second = chat(client, messages=told), chat(client, messages=system)
    assert first.choices[0].message == second.choices[0].message


def test_completions(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["one", "two"]
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "seed": 3, "n": 2}
    whole = client.completions.create(prompt=prompts, logprobs=2, **given)
    params = replace(llm.default_params, max_tokens=6, seed=3, n=2, logprobs=2)
    expected = [c for output in llm.generate(prompts, params) for c in output.outputs]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == [c.text for c in expected]
    for choice, completion in zip(whole.choices, expected):
        own = [row[t].logprob for t, row in zip(completion.token_ids, completion.logprobs)]
        assert choice.logprobs.token_logprobs == pytest.approx(own, abs=1e-4)
    texts, offsets = [""] * 4, [[] for _ in range(4)]
    for chunk in client.completions.create(prompt=prompts, logprobs=2, stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices]
    ids = llm.tokenizer.encode("one")
    by_ids = client.completions.create(prompt=ids, **given)
    assert [c.text for c in by_ids.choices] == texts[:2]
    assert len(client.completions.create(model="tiny", prompt="a").choices) == 1


def test_seeds(client: openai.OpenAI) -> None:
    warm = {"temperature": 1.5}
    said = [chat(client, seed=seed, **warm).choices[0].message.reasoning for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]
    free = {chat(client, seed=None, **warm).choices[0].message.reasoning for _ in range(3)}
    assert len(free) > 1, "without a seed each answer is another"


# body, path, status, code, message
REFUSED: list[tuple[Any, int, str | None, str]] = [
    ({"prompt": "a", "model": "other"}, 404, "model_not_found", "no model 'other'"),
    ({"prompt": "a", "top_k": "x"}, 400, "invalid_value", "top_k: "),
    ({"prompt": "a", "tempreature": 1}, 400, "unknown_parameter", "tempreature is not supported"),
    ({"prompt": []}, 400, "invalid_value", "prompt: "),
    ({"prompt": "a", "max_tokens": 101}, 400, None, "max_tokens=101 is more than"),
    ({"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens: "),
    ({"prompt": "0" * 405}, 400, "context_length_exceeded", "this server takes 400"),
    ({"prompt": "0" * 600}, 400, "context_length_exceeded", "max_context is 512"),
    ({"prompt": [999_999]}, 400, None, "token ids are 0 .. 2047"),
    ({"prompt": "a", "n": 2, "temperature": 0}, 400, None, "greedy completions are all the same"),
    ({"prompt": "a", "n": 100}, 400, "too_many_completions", "this server takes 72"),
    ({"prompt": "a", "regex": "("}, 400, None, "regex='('"),
    ({"prompt": "a", "suffix": "b"}, 400, "invalid_value", "suffix: "),
    ({"messages": []}, 400, "invalid_value", "messages: "),
    ({"messages": [{"role": "x", "content": "a"}]}, 400, "invalid_value", "messages.0.role: "),
    ({"messages": [*USER, {"role": "system"}]}, 400, None, "a message has the role system"),
    ({"messages": USER, "tool_choice": "required"}, 400, "invalid_value", "tool_choice: "),
    ({"messages": USER, "chat_template_kwargs": {"chat_template": "x"}}, 400, None, "no variable"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "'text'"),
    (b"{", 400, None, "JSON"),
    (b"[" * 50_000, 400, None, ""),
    (b'{"prompt": "\xff"}', 400, None, ""),
    (b'{"prompt": "a", "temperature": NaN}', 400, None, "temperature"),
    (b'{"prompt": "\\ud800"}', 400, None, ""),
    (b" " * 100_001, 413, "body_too_large", "100,000 bytes"),
]


@pytest.mark.parametrize("body, status, code, message", REFUSED)
def test_refusals(server: Running, body: Any, status: int, code: str | None, message: str) -> None:
    chats = isinstance(body, dict) and "messages" in body
    path = "/v1/chat/completions" if chats else "/v1/completions"
    kind = {"content-type": "application/json"}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(server.url + path, content=content, headers=kind)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert code is None or error["code"] == code
    assert server.service.loop.open == 0


def test_what_is_no_json_request(server: Running) -> None:
    url = server.url + "/v1/completions"
    plain = httpx.post(url, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 400, "a page of another origin can send this without asking"
    wrong = httpx.get(url)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    error = {"type": "invalid_request_error", "param": None}
    message = "/v1/completions does not take GET: use POST."
    told = error | {"message": message, "code": "method_not_allowed"}
    assert wrong.json() == {"error": told}
    wrong = httpx.post(server.url + "/v1/completion", json={})
    told = wrong.json()["error"]
    assert (wrong.status_code, told["code"]) == (404, "not_found")
    assert told["message"].startswith("there is no POST /v1/completion here. Did you mean /v1/comp")
    assert "There are POST /v1/chat/completions, POST /v1/completions, GET " in told["message"]

    def pieces() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    assert httpx.post(url, content=pieces(), headers={"content-type": "application/json"}).is_error
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}


def test_metrics(server: Running, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    before = read()
    chat(client, max_tokens=5, n=2)
    server.settle()
    after = read()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["nemotriton_output_tokens_total"] == 10
    assert grown['nemotriton_responses_total{path="/v1/chat/completions",status="200"}'] == 1
    for name in ("request", "first_token"):
        assert grown[f"nemotriton_{name}_seconds_count"] == 1
    assert grown["nemotriton_token_seconds_count"] == 2
    assert (after["nemotriton_slots"], after["nemotriton_slots_used"]) == (8, 0)
    assert (after["nemotriton_room"], after["nemotriton_open"]) == (72, 0)


def test_keys() -> None:
    with serving(key="secret") as running:
        url = running.url + "/v1"
        for key in ("wrong", "secre", "secrets"):
            refused = httpx.get(url + "/models", headers={"Authorization": "Bearer " + key})
            assert refused.status_code == 401, key
        assert httpx.get(url + "/models").status_code == 401
        assert httpx.get(url + "/models", headers={"Authorization": "secret"}).status_code == 401
        raw = {"Authorization": "Bearer sécret".encode("latin-1")}
        assert httpx.get(url + "/models", headers=raw).status_code == 401
        assert httpx.get(running.url + "/health").status_code == 200
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as found:
            assert found.models.list().data[0].id == "tiny"
        with (
            openai.OpenAI(base_url=url, api_key="other", max_retries=0) as found,
            pytest.raises(openai.AuthenticationError, match="wants its API key"),
        ):
            found.models.list()


def test_reuse_is_counted(server: Running) -> None:
    def ask(url: str, **given: Any) -> tuple[str, int]:
        body = {"max_tokens": 8, "seed": 1, "ignore_eos": True} | given
        found = httpx.post(url + "/v1/completions", json=body).json()
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    first, second = "a prompt that others begin with", "a prompt that others begin with, and more"
    n, m = (len(server.llm.tokenizer.encode(text)) for text in (first, second))
    with serving(Limits(reuse=2**28)) as running:
        url = running.url
        assert [ask(url, prompt=p)[1] for p in (first, first, second, first[:5])] == [0, 0, n, 0]
        assert ask(url, prompt=second)[0] == ask(server.url, prompt=second)[0]
        again = ask(url, prompt=second + "!", n=2)
        assert again == (ask(server.url, prompt=second + "!", n=2)[0], m)
        running.settle()
        text = httpx.get(url + "/metrics").text
        assert f"nemotriton_prompt_tokens_reused_total {2 * n + m}" in text
    assert ask(server.url, prompt=second)[1] == 0, "off by default"
