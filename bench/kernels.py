"""`python -m bench.kernels`: every kernel, case and token count against the GPU's own ceilings.

A row appears after its parity gate: the tile that the op takes is held against the twin, run twice
at full size, and raced against the default tile. A red gate leaves a row without numbers. Rows go
to `--out` as they are measured, the table to stdout at the end.
"""

import contextlib
import sys
from collections.abc import Iterator

import typer

from bench import rows
from bench.cli import (
    MODELS,
    Dtypes,
    Kernels,
    Models,
    Out,
    Tokens,
    application,
    command,
    need_gpu,
    points,
    run,
)
from bench.rows import Row
from nemotriton.autotune import cache
from nemotriton.autotune.child import ChildRunner, MeasuringFailed
from nemotriton.autotune.trial import Facts, Point, Runner, cuda_runner
from nemotriton.kernels.op import Tile

app = application(__doc__)


def tuned(point: Point, gpu: str) -> Tile | None:
    """The tile that the tune cache holds for a point; None where the default is taken."""
    spec = point.spec
    upto = next((b for b in spec.tokens if point.tokens <= b), point.tokens)
    found = cache.load(point.op, gpu, spec.source).lookup(point.key, upto)
    return None if found is None else Tile(**found)


def measure(wanted: dict[Point, str], runner: Runner) -> Iterator[Row]:
    """A row for every point, right or red."""
    facts = runner.facts()
    common = rows.environment(facts)
    for point, model in wanted.items():
        row = rows.empty(
            "kernels", point, "nemotriton", "nemotriton", command("kernels", point, model)
        )
        yield row | common | one(point, runner, facts)


def one(point: Point, runner: Runner, facts: Facts) -> Row:
    """Gate and time one point; numbers only behind a green gate."""
    tile = tuned(point, facts.gpu.slug)
    why = runner.trial(point, tile).failed or runner.vet(point, tile)
    if why:
        return {"status": "red", "note": why}
    try:
        timed = runner.race(point, [tile, point.default] if tile else [None])
    except MeasuringFailed as error:
        return {"status": "red", "note": str(error)}
    taken = tile or point.default
    numbers = rows.figures(point, timed[0], facts)
    return numbers | {"default_us": round(timed[-1].us, 3), "tile": dict(taken)}


@app.command()
def main(
    kernel: Kernels = None,
    model: Models = MODELS,
    dtype: Dtypes = "bf16",
    tokens: Tokens = "",
    out: Out = None,
) -> None:
    """Measure kernels; exits 1 when a gate is red."""
    wanted = points(kernel or [], model, dtype, tokens)
    need_gpu()
    runner = ChildRunner(cuda_runner)
    found: list[Row] = []
    with contextlib.closing(runner):
        for row in measure(wanted, runner):
            found.append(row)
            rows.append(row, out)
            said = rows.number(row["us"], ".2f") or f"{rows.said(row)}: {row['note']}"
            at = f"[{len(found)}/{len(wanted)}] {row['kernel']} {rows.case_text(row['case'])}"
            print(f"{at} T={row['tokens']}: {said}", file=sys.stderr)
    print(rows.markdown(found), end="")
    raise typer.Exit(1 if any(r["status"] == "red" for r in found) else 0)


if __name__ == "__main__":
    run(app)
