"""One request answered over HTTP while its client is watched: whole, or as server-sent events."""

import asyncio
import contextlib
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nemotriton.serve.failures import Failure
from nemotriton.serve.gate import DIRECT
from nemotriton.serve.loop import Done, EngineLoop, Job, Piece
from nemotriton.serve.wire import END, Voice, encode, event

_QUIET = 15.0  # seconds after which a comment keeps proxies from hanging up
_LAST_WORDS = 1.0  # seconds for a client that does not read to take the error


class Exchange(Response):
    """Answers a job that runs; whatever happens, the job does not outlive it.

    seconds: from here to the last byte. A client that goes away, or takes longer, ends the job
    before the engine's next step. Status and headers wait for the first words, or for a while, so
    that an early failure has its own.
    """

    def __init__(self, loop: EngineLoop, job: Job, voice: Voice, seconds: float) -> None:
        super().__init__()
        self._loop = loop
        self._job = job
        self._voice = voice
        self._seconds = seconds
        self._begun = False
        self._said = time.monotonic()  # when the last bytes went out
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = scope.get(DIRECT, send)
        talk = asyncio.create_task(self._talk(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait({talk, gone}, timeout=self._seconds, return_when=first)
            if talk in done:
                talk.result()
            elif not done:
                talk.cancel()
                await asyncio.wait({talk})
                late = f"the answer took longer than this server's {self._seconds:g} seconds."
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_WORDS):
                        await self._fail(send, Failure(504, late, "timeout"))
        finally:
            self._loop.cancel(self._job)
            if self._timer is not None:
                self._timer.cancel()
            for task in (talk, gone):
                task.cancel()
            await asyncio.gather(talk, gone, return_exceptions=True)

    async def _talk(self, send: Send) -> None:
        try:
            await (self._stream(send) if self._job.stream else self._whole(send))
        except Failure as failure:
            await self._fail(send, failure)

    async def _whole(self, send: Send) -> None:
        (event,) = await self._job.news.take()
        if isinstance(event, Failure):
            raise event
        # off the event loop: a long answer's log-probabilities take a while to spell
        body = await asyncio.to_thread(self._spell)
        await self._begin(send, 200, "application/json")
        await send({"type": "http.response.body", "body": body})

    def _spell(self) -> bytes:
        outputs = [group.output() for group in self._job.groups]
        return encode(self._voice.whole(outputs, self._job))

    async def _stream(self, send: Send) -> None:
        """One write for whatever has come since the last one, however many steps brought it."""
        news, voice = self._job.news, self._voice
        self._beat()
        while True:
            batch = await news.take()
            if not batch:
                await self._say(send, b": waiting\n\n")
                continue
            last = batch[-1]
            lines = b"".join([voice.piece(*e) for e in batch if isinstance(e, Piece)])
            if isinstance(last, Done):
                await self._say(send, lines + voice.last(self._job), more=False)
                return
            if lines:
                await self._say(send, lines)
            if isinstance(last, Failure):
                raise last

    def _beat(self) -> None:
        """Wake the stream where it has been quiet for too long, again and again."""
        rest = self._said + _QUIET - time.monotonic()
        if rest <= 0:
            self._job.news.put([])
            rest = _QUIET
        self._timer = asyncio.get_running_loop().call_later(rest, self._beat)

    async def _say(self, send: Send, data: bytes, more: bool = True) -> None:
        if not self._begun:
            await self._begin(send, 200, "text/event-stream; charset=utf-8")
        self._said = time.monotonic()
        await self._direct({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, send: Send, failure: Failure) -> None:
        """An error with its status, or as the last event of a stream that has begun."""
        if self._begun:
            await self._say(send, event(failure.body()) + END, more=False)
            return
        await self._begin(send, failure.status, "application/json", failure.headers)
        await send({"type": "http.response.body", "body": encode(failure.body())})

    async def _begin(
        self, send: Send, status: int, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self._begun = True
        found = {"content-type": kind, "cache-control": "no-cache", **(headers or {})}
        raw = [(name.encode(), value.encode()) for name, value in found.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
