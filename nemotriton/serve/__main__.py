"""The command: `python -m nemotriton.serve MODEL`; exit codes as those of `generate`."""

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nemotriton.commandline import Program, UsageError
from nemotriton.console import Console
from nemotriton.errors import UnsupportedError
from nemotriton.generate import options as o
from nemotriton.generate.shared import with_model
from nemotriton.generate.source import Machine, Source, machine_of, source_of

if TYPE_CHECKING:
    from nemotriton.engine.llm import LLM

app = Program()
_MIB = 2**20
_LOCAL = ("127.0.0.1", "::1", "localhost")


def _option(*names: str, help: str, default: str = "", envvar: str | None = None) -> Any:
    shown = default or False
    group = "Server"
    return typer.Option(*names, help=help, rich_help_panel=group, show_default=shown, envvar=envvar)


Host = Annotated[str, _option("--host", help="Address to listen on.", default="127.0.0.1")]
Port = Annotated[int, _option("--port", help="0 takes a free one.", default="8000")]
Name = Annotated[
    str | None, _option("--name", help="What clients call the model.", default="MODEL itself")
]
Key = Annotated[
    str | None,
    _option(
        "--api-key", help="Wanted of clients. Better in the variable.", envvar="NEMOTRITON_API_KEY"
    ),
]
Queue = Annotated[
    int,
    _option("--queue", help="Completions that may wait; above that clients get 429.", default="64"),
]
BodyLimit = Annotated[int, _option("--body-limit", help="Largest body, in MiB.", default="8")]
PromptLimit = Annotated[
    int | None, _option("--prompt-limit", help="Most tokens of a prompt.", default="the context")
]
TokenLimit = Annotated[
    int | None, _option("--token-limit", help="Most tokens of an answer.", default="the context")
]
Timeout = Annotated[
    float, _option("--timeout", help="Most seconds of a request, queue included.", default="600")
]
Reuse = Annotated[
    float,
    _option("--reuse", help="GiB of host memory for the ends of earlier prompts.", default="0"),
]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm/--no-warm",
        help="On a GPU, run prompts of every size first, so that no client waits for a compiler.",
        rich_help_panel="Server",
    ),
]


@dataclass(frozen=True, slots=True)
class Place:
    """Where to listen, and what to ask of clients; UsageError for what makes no sense."""

    host: str
    port: int
    name: str | None
    api_key: str | None
    queue: int
    body_limit: int
    prompt_limit: int | None
    token_limit: int | None
    timeout: float
    reuse: float

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise UsageError(f"--port {self.port} is no port: give 0 .. 65535.")
        for name in ("body_limit", "prompt_limit", "token_limit", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(
                    f"--{name.replace('_', '-')} {value} is not above 0: give a number that is."
                )
        for name in ("queue", "reuse"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"--{name} {getattr(self, name)} is below 0: give 0 or more.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise UsageError("--api-key is empty or not ASCII: give letters and digits.")

    def bound(self) -> socket.socket:
        """The address taken, before minutes are spent on loading; nobody is let in yet."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((self.host, self.port))
        except OSError as problem:
            found.close()
            raise UsageError(
                f"{self.host}:{self.port}: {problem.strerror or problem}: give another --host or "
                "--port."
            ) from None
        return found


@app.command()
@with_model
def main(
    ctx: typer.Context,
    model: o.Model = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Name = None,
    api_key: Key = None,
    queue: Queue = 64,
    body_limit: BodyLimit = 8,
    prompt_limit: PromptLimit = None,
    token_limit: TokenLimit = None,
    timeout: Timeout = 600.0,
    reuse: Reuse = 0.0,
    warm: Warm = True,
    quiet: o.Quiet = False,
    version: o.Version = False,
) -> None:
    """Serve a Nemotron-H model to OpenAI clients. SIGTERM or Ctrl-C drains, a second one stops."""
    place = Place(**{field: ctx.params[field] for field in Place.__dataclass_fields__})
    serve(place, source_of(ctx.params), machine_of(ctx.params), Console(quiet), warm)


def serve(
    place: Place, source: Source, machine: Machine, console: Console, warm: bool = True
) -> None:
    """Load the model and serve it until a signal comes."""
    try:
        from nemotriton.serve.app import Limits, Service
        from nemotriton.serve.server import Server
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"{missing.name} is not installed: pip install -e '.[serve]' in the project's folder."
        ) from None
    from nemotriton.generate.loading import opened

    with _listener(place) as listener, opened(source, machine, console) as llm:
        if warm:
            warm_up(llm, console)
        limits = Limits(
            queue=place.queue,
            body=place.body_limit * _MIB,
            prompt=place.prompt_limit,
            tokens=place.token_limit,
            seconds=place.timeout,
            reuse=int(place.reuse * 1024 * _MIB),
        )
        name = place.name or source.model or llm.config.name
        service = Service(llm, name, limits, place.api_key)
        service.warm()

        def ready() -> None:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            console.line("serving", f"{name} at http://{shown}:{port}/v1")
            if place.api_key is None and host not in _LOCAL:
                console.warn("anyone who reaches this address may use it: give --api-key.")

        def draining(count: int) -> None:
            answers = "1 answer is" if count == 1 else f"{count} answers are"
            console.line("stopping", f"{answers} under way; a second signal ends that")

        server = Server(service, ready, draining)
        service.loop.on_broken = server.end
        try:
            server.run(sockets=[listener])
        finally:
            service.close()
        if service.loop.broken is not None:
            raise service.loop.broken


def warm_up(llm: "LLM", console: Console) -> None:
    """Run prompts of every size where that compiles kernels, and tell how long it took."""
    if llm.device.type != "cuda":
        return
    with console.loading() as progress:
        llm.warm_up_prompts(progress.prompts)
        seconds = progress.seconds
    console.line("warm", f"prompts of every size, in {seconds:.0f} s")


def _listener(place: Place) -> socket.socket:
    """The address, which rank 0 alone takes where torchrun has started several."""
    return place.bound() if os.environ.get("RANK", "0") == "0" else socket.socket()


if __name__ == "__main__":
    app(prog_name="python -m nemotriton.serve")
