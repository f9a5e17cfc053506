"""Requests made up from the served OpenAPI document: none of them makes the server fail."""

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from nemotriton.serve.app import Limits
from tests.serving import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    with serving(Limits(queue=4, tokens=4), requests=4, context=128) as running:
        yield running
        running.settle()


PATHS = {
    "/v1/chat/completions": 20,  # examples of each mode
    "/v1/completions": 20,
    "/v1/models": 2,
    "/v1/models/{name}": 5,
    "/health": 2,
    "/metrics": 2,
}


def ask(case: schemathesis.Case) -> None:
    body = case.body
    if isinstance(body, dict):  # what only this server knows
        body["model"] = "tiny"
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 4)
    response = case.call(timeout=30)
    assert response.status_code < 500, response.text


@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_makes_it_fail(server: Running, mode: GenerationMode) -> None:
    # not through schemathesis's own test decorator, which wants an older pytest
    document = schemathesis.openapi.from_url(server.url + "/openapi.json")
    found = {found.ok().path: found.ok() for found in document.get_all_operations()}
    assert set(found) == set(PATHS)
    bodies = [path for path, examples in PATHS.items() if examples > 10]
    for path in PATHS if mode is GenerationMode.POSITIVE else bodies:
        bounds = settings(
            max_examples=PATHS[path],
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        bounds(given(case=found[path].as_strategy(generation_mode=mode))(ask))()
    answered = server.service.metrics.responses
    for path in bodies:
        expected = 200 if mode is GenerationMode.POSITIVE else 400
        assert answered[path, expected] > 0, "the examples reach what they are for"


def test_the_document_says_what_is_taken(server: Running) -> None:
    found = httpx.get(server.url + "/openapi.json").json()
    fields = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "tools", "stream_options", "chat_template_kwargs"} <= set(fields)
