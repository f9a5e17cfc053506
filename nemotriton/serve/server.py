"""uvicorn with two signals: the first drains, the second stops."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from nemotriton.serve.app import Service, create_app

_LAST_WORDS = 0.1  # seconds in which clients are told that there will be no answer

_START = 60.0  # seconds


class Server(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then answers what it has accepted; the next one ends that.

    ready: called once requests are taken. draining: with the number of answers that are open when
    it is to end.
    """

    should_exit: bool
    force_exit: bool

    def __init__(
        self,
        service: Service,
        ready: Callable[[], None],
        draining: Callable[[int], None] = lambda _: None,
    ) -> None:
        # no access log: uvicorn's goes to stdout; warnings go to stderr as Python's logging has it
        config = uvicorn.Config(
            create_app(service), log_config=None, access_log=False, ws="none", server_header=False
        )
        super().__init__(config)
        self._ready, self._draining, self._loop = ready, draining, service.loop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._loop.open and not self.force_exit:
            self._draining(self._loop.open)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the engine's thread and whoever waits for it
            await self.lifespan.shutdown()
            await asyncio.sleep(_LAST_WORDS)

    def end(self) -> None:
        """Stop without answering what is open, from any thread: there is no engine any more."""
        self.should_exit = self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ending = (signal.SIGINT, signal.SIGTERM)
        before = {sig: signal.signal(sig, self.handle_exit) for sig in ending}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


@contextlib.contextmanager
def background(service: Service) -> Iterator[str]:
    """Serve from a thread of this process, on a free port; gives the address."""
    ready = threading.Event()
    server = Server(service, ready.set)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        ready.wait(_START)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
            service.close()
