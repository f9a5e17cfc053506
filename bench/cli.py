"""What the commands of this folder share: options, the GPU they need, how errors end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from nemotriton.autotune.commands import (
    MODELS,
    Kernels,
    Models,
    configs,
    parse_dtypes,
    parse_tokens,
)
from nemotriton.autotune.sweep import plan
from nemotriton.autotune.trial import Point
from nemotriton.commandline import Program
from nemotriton.errors import require

__all__ = [
    "MODELS",
    "Dtypes",
    "Kernels",
    "Models",
    "Out",
    "Tokens",
    "application",
    "command",
    "need_gpu",
    "points",
    "run",
]

Tokens = Annotated[str, typer.Option("--tokens", help="Exact counts; default: the buckets.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="Of bf16, fp16, fp32; comma-separated.")]
Out = Annotated[Path | None, typer.Option("--out", help="JSONL file that rows are added to.")]


def application(about: str | None) -> typer.Typer:
    return Program(about)


def points(kernels: Sequence[str], model: str, dtype: str, tokens: str) -> dict[Point, str]:
    """What to measure, each with the model that asks for it. Token counts are taken as they are."""
    exact = parse_tokens(tokens)
    found: dict[Point, str] = {}
    for name, config in zip(model.split(","), configs(model), strict=True):
        for p in plan(kernels, [config], parse_dtypes(dtype)):
            counts = [t for t in exact if t <= p.spec.tokens[-1]] if exact else [p.tokens]
            for t in counts:
                found.setdefault(Point(p.op, p.case, t, p.dtype), name)
    require(
        bool(found),
        f"no kernel has a case for --model {model} --tokens {tokens or 'any'}: give others.",
    )
    return found


def command(suite: str, point: Point, model: str) -> str:
    """The line that measures a point again, with the model's other cases of that kernel."""
    return (
        f"python -m bench.{suite} --kernel {point.op} --model {model} "
        f"--dtype {point.dtype} --tokens {point.tokens}"
    )


def need_gpu() -> None:
    require(torch.cuda.is_available(), "no CUDA device: nothing can be measured here.")


def run(app: typer.Typer) -> None:
    app()
