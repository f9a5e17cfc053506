"""The endpoints: bodies to jobs of the engine, and what stands beside them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from nemotriton import __version__
from nemotriton.errors import NemotritonError, RequestError
from nemotriton.serve.exchange import Exchange
from nemotriton.serve.failures import Failure, lost, malformed, refusal
from nemotriton.serve.gate import Gate
from nemotriton.serve.loop import EngineLoop, Job
from nemotriton.serve.metrics import Metrics
from nemotriton.serve.schemas import ChatRequest, CompletionRequest
from nemotriton.serve.wire import Voice, encode

if TYPE_CHECKING:
    from nemotriton.engine.engine import Prepared
    from nemotriton.engine.llm import LLM

_READERS = 4  # threads that tokenize, render templates and compile grammars


@dataclass(frozen=True, slots=True)
class Limits:
    """queue: completions that may wait behind those that run. body: bytes. prompt, tokens: most of
    a prompt and of an answer, None for what the context allows. seconds: of a request. reuse: bytes
    for the ends of earlier prompts, see `Prefixes`; 0 computes each prompt whole.
    """

    queue: int = 64
    body: int = 8 * 2**20
    prompt: int | None = None
    tokens: int | None = None
    seconds: float = 600.0
    reuse: int = 0


class Service:
    """A model behind the endpoints. name: what clients call it. key: theirs, None for none."""

    def __init__(self, llm: LLM, name: str, limits: Limits, key: str | None = None) -> None:
        self.llm = llm
        self.name = name
        self.limits = limits
        self.key = key
        self.started = int(time.time())
        self.metrics = Metrics()
        if limits.reuse:
            llm.engine.reuse(limits.reuse)
        room = llm.plan.max_requests + limits.queue
        self.loop = EngineLoop(llm, room, lambda job: self.metrics.end(job, time.perf_counter()))
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")

    async def answer(self, asked: ChatRequest | CompletionRequest) -> Response:
        """A response that runs the request while it is sent; Failure where it cannot be."""
        self.find(asked.model)
        prompts = 1 if isinstance(asked, ChatRequest) else len(asked.prompts)
        choices = asked.n or 1
        weight = choices * prompts
        self._reserve(weight)
        started = time.perf_counter()
        try:
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(self._readers, self._read, asked)
        except BaseException:
            self.loop.release(weight)
            raise
        job = Job(prepared, weight, asked.stream is True, arrived=started)
        self.loop.submit(job)
        chat = isinstance(asked, ChatRequest)
        voice = Voice(self.name, chat, choices, asked.wants_usage)
        left = max(0.0, self.limits.seconds - (time.perf_counter() - started))
        return Exchange(self.loop, job, voice, left)

    def find(self, model: str | None) -> None:
        """Failure where a client wants another model."""
        if model is not None and model != self.name:
            message = f"there is no model {model!r} here: this server has {self.name!r}."
            raise Failure(404, message, "model_not_found", "model")

    def _reserve(self, weight: int) -> None:
        room = self.loop.room
        if weight > room:
            message = f"{weight} completions at once; this server takes {room}: ask for fewer."
            raise Failure(400, message, "too_many_completions", "n")
        if not self.loop.reserve(weight):
            after = min(60, max(1, math.ceil(self.metrics.request.mean)))
            message = f"{self.loop.open} of {room} completions are open: try again in {after} s."
            raise Failure(429, message, "overloaded", retry_after=after)

    def _read(self, asked: ChatRequest | CompletionRequest) -> list[Prepared]:
        """Prompts checked and as tokens; on a thread of its own."""
        try:
            params = asked.sampling(self.llm.default_params, self.limits.tokens)
            if params.seed is None and not params.greedy:
                params = replace(params, seed=secrets.randbits(63))
            prompts: list[Any]
            if isinstance(asked, ChatRequest):
                messages = [message.plain() for message in asked.messages]
                tools, variables = asked.functions, asked.variables
                prompts = [self.llm.chat_prompt(messages, None, tools, variables)]
            else:
                prompts = asked.prompts
            prepared = [self.llm.engine.prepare(prompt, params) for prompt in prompts]
        except NemotritonError as problem:
            raise refusal(problem) from None
        except RecursionError:
            raise refusal(RequestError("the body is nested too deep: flatten it.")) from None
        longest, limit = max(len(p.ids) for p in prepared), self.limits.prompt
        if limit is not None and longest > limit:
            message = f"the prompt is {longest:,} tokens; this server takes {limit:,}: shorten it."
            raise Failure(400, message, "context_length_exceeded")
        return prepared

    def warm(self) -> None:
        """Load what the first conversation would wait for."""
        with contextlib.suppress(NemotritonError):
            self.llm.chat_prompt([{"role": "user", "content": "x"}])

    def close(self) -> None:
        """End the threads; what is open is answered by an error."""
        self.loop.stop()
        self._readers.shutdown(wait=False, cancel_futures=True)


def create_app(service: Service) -> FastAPI:
    """The ASGI application; its life span is that of the engine's thread."""

    @contextlib.asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="nemotriton", version=__version__, lifespan=life, docs_url=None, redoc_url=None
    )
    _completions(app, service)
    _others(app, service)
    _failures(app)
    paths = frozenset(str(getattr(route, "path", "")) for route in app.routes)
    limits = service.limits
    app.add_middleware(
        Gate,
        key=service.key,
        body=limits.body,
        seconds=limits.seconds,
        paths=paths,
        counts=service.metrics.responses,
    )
    return app


def _completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatRequest) -> Response:
        return await service.answer(body)

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest) -> Response:
        return await service.answer(body)


def _others(app: FastAPI, service: Service) -> None:
    def model() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.started,
            "owned_by": "nemotriton",
            "max_model_len": service.llm.plan.max_context,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.find(name)
        return model()

    @app.get("/health")
    async def health() -> Response:
        loop = service.loop
        state = "stopped" if not loop.alive else f"failed: {loop.fault}" if loop.fault else "ok"
        return _json(200 if state == "ok" else 503, {"status": state})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        text = service.metrics.text(service.llm, service.loop)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def ways(app: FastAPI) -> dict[str, str]:
    """The method of every endpoint, by its path."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return {route.path.replace(":path", ""): "/".join(sorted(route.methods)) for route in routes}


def _failures(app: FastAPI) -> None:
    def told(failure: Failure) -> Response:
        return _json(failure.status, failure.body(), failure.headers)

    @app.exception_handler(Failure)
    async def failed(_: Request, failure: Failure) -> Response:
        return told(failure)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, problem: RequestValidationError) -> Response:
        return told(malformed(problem.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, problem: HTTPException) -> Response:
        failure = Failure(problem.status_code, str(problem.detail))
        if problem.status_code in (404, 405):
            failure = lost(problem.status_code, request.method, request.url.path, ways(app))
        return _json(failure.status, failure.body(), dict(problem.headers or {}))

    @app.exception_handler(Exception)
    async def broken(_: Request, problem: Exception) -> Response:
        message = f"the server failed: {type(problem).__name__}. Its log says where."
        return told(Failure(500, message, "internal_error"))


def _json(status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")
