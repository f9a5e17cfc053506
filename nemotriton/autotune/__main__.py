"""`python -m nemotriton.autotune`: how the kernels are made fast, and known to compile."""

import contextlib
import itertools
import json
import logging
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nemotriton.autotune import commands
from nemotriton.autotune.seed import seed_command
from nemotriton.commandline import Program, UsageError

app = Program("Compile and tune the Triton kernels.")


@app.callback()
def main() -> None:
    """Compile and tune the Triton kernels."""


@app.command("compile")
def compile_command(
    arch: Annotated[str, typer.Option(help="Targets, comma-separated.")] = "sm_90,sm_100",
    kernel: Annotated[list[str] | None, typer.Option(help="Only this op (repeatable).")] = None,
    model: Annotated[str, typer.Option(help="Presets whose sizes are compiled.")] = (
        "super-120b,nano-30b,h-8b"
    ),
    dtype: Annotated[str, typer.Option(help="Of bf16, fp16, fp32; comma-separated.")] = "bf16",
    tiles: Annotated[str, typer.Option(help="'default' or 'all' of the search space.")] = "default",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a row.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write JSON rows here.")] = None,
) -> None:
    """Compile kernels with no GPU: registers, spills, memory, tensor-core instructions.

    Exits 1 when one fails, passes a limit, has the wgmma hazard or reads what nothing wrote, or
    when a default tile spills."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET is 1, and the interpreter does not compile: unset it.")
    if tiles not in ("default", "all"):
        raise UsageError(f"--tiles {tiles}: give default or all.")
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="nemotriton-compile-"))
    from nemotriton.autotune import offline
    from nemotriton.model.config import ModelConfig

    todo = offline.jobs(
        kernel or [],
        [ModelConfig.preset(name) for name in model.split(",")],
        [offline.parse_arch(a) for a in arch.split(",")],
        commands.parse_dtypes(dtype),
        tiles == "all",
    )
    bad = count = 0
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(out.open("w")) if out is not None else None
        for row in itertools.chain.from_iterable(offline.run(todo, jobs)):
            count += 1
            bad += bool(row.faults)
            line = json.dumps(_as_dict(row))
            print(line if as_json else _as_text(row), flush=True)
            if file is not None:
                print(line, file=file, flush=True)
    print(f"{count} kernels compiled, {bad} faults", file=sys.stderr)
    raise typer.Exit(1 if bad or not count else 0)


def _as_dict(row: Any) -> dict[str, Any]:
    job = row.job
    return {
        "kernel": row.kernel,
        "op": job.op,
        "case": dict(job.case),
        "tokens": job.tokens,
        "dtype": job.dtype,
        "tile": dict(job.tile),
        "default": job.default,
        "arch": f"sm_{job.arch}",
        "seconds": round(row.seconds, 2),
        "faults": list(row.faults),
        **(asdict(row.found) if row.found else {}),
    }


def _as_text(row: Any) -> str:
    job, found = row.job, row.found
    head = f"sm_{job.arch:<4}{row.kernel:28}{job.case!r:32}"
    if found is None:
        return f"{head} FAILED {'; '.join(row.faults)}"
    ops = " ".join(f"{n}x{name}" for name, n in found.tensor_ops.items())
    body = f"regs {found.registers:3} spills {found.spills:4} shared {found.shared:6} {ops}"
    tail = f"  FAULT: {'; '.join(row.faults)}" if row.faults else ""
    return f"{head} {body}  {dict(job.tile)}{tail}"


app.command("list")(commands.list_command)
app.command("sweep")(commands.sweep_command)
app.command("show")(commands.show_command)
app.command("check")(commands.check_command)
app.command("merge")(commands.merge_command)
app.command("seed")(seed_command)


def run() -> None:
    """The command line, with what the package logs."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    app(prog_name="python -m nemotriton.autotune")


if __name__ == "__main__":
    run()
