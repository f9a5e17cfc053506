"""What every request passes before anything reads it: key, size of the body, time to send it."""

import asyncio
import hmac
from collections import Counter

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nemotriton.serve.failures import Failure
from nemotriton.serve.wire import encode

DIRECT = "nemotriton.send"  # of a scope: the server's own `send`, for what follows a stream's start


class Gate:
    """ASGI middleware.

    key: wanted of paths under /v1, None for none. body: most bytes. seconds: for the body to come.
    counts: of answers, by path and status.
    """

    def __init__(
        self,
        app: ASGIApp,
        key: str | None,
        body: int,
        seconds: float,
        paths: frozenset[str],
        counts: Counter[tuple[str, int]],
    ) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._body = body
        self._seconds = seconds
        self._paths = paths
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[path, message["status"]] += 1
            await send(message)

        scope[DIRECT] = send
        failure = self._refuse(scope["path"], Headers(scope=scope))
        if failure is None:
            await self._app(scope, self._limited(receive), counted)
            return
        headers = {"content-type": "application/json", **failure.headers}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await counted(
            {"type": "http.response.start", "status": failure.status, "headers": raw},
        )
        await counted({"type": "http.response.body", "body": encode(failure.body())})

    def _refuse(self, path: str, headers: Headers) -> Failure | None:
        if self._key is not None and path.startswith("/v1"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # latin-1 is how headers are read; in constant time for keys of one length
            same = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not same:
                message = "this server wants its API key: send it as Authorization: Bearer KEY."
                return Failure(401, message, "invalid_api_key")
        size = headers.get("content-length", "")
        if size.isdecimal() and (len(size) > 15 or int(size) > self._body):
            return Failure(413, self._too_large(), "body_too_large")
        return None

    def _too_large(self) -> str:
        return f"the body is larger than this server's {self._body:,} bytes: shorten it."

    def _limited(self, receive: Receive) -> Receive:
        size, whole = 0, False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._seconds

        async def limited() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body took too long to come.") from None
            size += len(message.get("body", b""))
            if size > self._body:
                raise HTTPException(413, self._too_large())
            whole = not message.get("more_body", False)
            return message

        return limited
