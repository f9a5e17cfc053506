"""`python -m bench.model preset:super-120b`: a step's time from bytes, operations and launches.

    time = sum over parts of max(bytes / (e copy), operations / (f rate)) + launches * l

Parts are those of `bench.cost`. e is the share of the copy rate that a step's kernels reach while
they stream, l what every launch loses before and behind that (gap, ramp, tail, in us), f the share
of the matmul rate. The three are fitted to measured rows of one GPU, e and l to decode steps, f to
prompts, so that the relative errors have the least squares: two numbers for all batch sizes, and
what is left over is shown row by row.

For GPUs that nobody has measured here the ceilings are their data sheets' rates times the share of
its own data sheet that the measured GPU's ceilings reach; e, f and l are kept. Those columns are
predictions. Rates of the data sheets, dense, per GPU: memory TB/s, bf16 and fp8 TFLOP/s:

    H200    4.8     989   1,979   NVIDIA H200 data sheet; half of what it prints, with sparsity
    B200    7.7   2,250   4,500   NVIDIA Blackwell data sheet, HGX B200 (1,000 W); half as above
    GB200   8.0   2,500   5,000   the same, GB200 NVL72 (1,200 W)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import cost, prefill, rows
from bench.cli import application, run
from bench.cost import Load, Part, Rates
from bench.models import KvDtype, Model, Quant, StateDtype, numbers
from bench.rows import BenchError, Row
from nemotriton.engine.loading import Weights, random_weights
from nemotriton.engine.replay import MANY
from nemotriton.errors import require
from nemotriton.kernels import STATE_FORMATS

app = application(__doc__)
RESULTS = Path(__file__).parent / "results"
SHEETS = {
    "H200": Rates(4800.0, 989.0, 1979.0),
    "B200": Rates(7700.0, 2250.0, 4500.0),
    "GB200": Rates(8000.0, 2500.0, 5000.0),
}
AXES = ("model", "quant", "context", "drafts", "piece", "activations")  # of a case; a step's figure
FP8_OVER_BF16 = 1.75  # of measured matmul rates, where rows were taken without the former


@dataclass(frozen=True, slots=True)
class Fit:
    """Shares of the copy and the matmul rate, and microseconds lost a launch."""

    streaming: float
    launch_us: float
    computing: float = 1.0

    def us(self, found: Iterable[Part], launches: float, rates: Rates) -> float:
        """What these parts and launches take."""
        e, f = self.streaming, self.computing
        slower = Rates(e * rates.copy_gbs, f * rates.bf16_tflops, f * rates.fp8_tflops)
        return cost.floor_us(found, slower) + launches * self.launch_us


@dataclass(frozen=True, slots=True)
class Known:
    """A measured step: its parts, launches, microseconds and the ceilings of its run."""

    row: Row
    parts: Sequence[Part]
    launches: float
    us: float
    rates: Rates


def rates_of(row: Row) -> Rates:
    """The ceilings of a row's run."""
    limits = row["ceilings"]
    bf16 = limits["bf16_tflops"] or SHEETS["H200"].bf16_tflops
    return Rates(limits["copy_gbs"], bf16, limits.get("fp8_tflops") or FP8_OVER_BF16 * bf16)


def load_of(case: dict[str, Any], batch: int) -> Load:
    """The load that a row's case describes."""
    state = STATE_FORMATS[case.get("state", "float32")]
    fp8 = case.get("kv", "") == "float8_e4m3fn"
    many = batch >= MANY or case.get("drafts")
    return Load(
        batch,
        case.get("context", 0),
        case.get("drafts", 0),
        kv_item=1 if fp8 else 2,
        state_item=state.dtype.itemsize,
        state_scale=state.row_bytes(0),
        rollback=case.get("rollback") or ("replay" if many else "lanes"),
    )


def known(found: Iterable[Row]) -> list[Known]:
    """The measured decode steps and prompts among rows, the latest of each."""
    latest: dict[tuple[object, ...], Row] = {}
    for row in found:
        ours = row["suite"] in ("decode", "prefill") and row["provider"] == "nemotriton"
        if ours and row["us"] is not None and row["launches"] is not None:
            what = [row["case"].get(axis) for axis in AXES]
            what[-1] = what[-1] or "bf16"
            latest[row["suite"], row["tokens"], *what] = row
    steps: list[Known] = []
    for row in latest.values():
        decoding, case = row["suite"] == "decode", row["case"]
        drafting = case.get("drafts", 0) > 0
        weights = random_weights(case["model"], 0, quant=case["quant"], drafting=drafting)
        if decoding:
            parts = cost.parts(weights, load_of(case, row["tokens"]), row["experts"], True)
        else:
            parts = prefill.parts(weights, load_of(case, 1), row["tokens"], case["piece"])
        steps.append(Known(row, parts, row["launches"], row["us"], rates_of(row)))
    return steps


def fit(steps: Sequence[Known]) -> Fit:
    """The three numbers with the least squares of relative errors, by trying them all."""
    decoding = [s for s in steps if s.row["suite"] == "decode"]
    require(len(decoding) >= 3, "a fit needs three measured decode steps or more", BenchError)

    def error(tried: Fit, of: Sequence[Known]) -> float:
        return sum((tried.us(s.parts, s.launches, s.rates) / s.us - 1) ** 2 for s in of)

    best, least = Fit(1.0, 0.0), float("inf")
    for e in (0.5 + 0.01 * i for i in range(61)):  # reads alone are faster than a copy
        whole = [Fit(e, 0.0).us(s.parts, 0, s.rates) / s.us for s in decoding]
        each = [s.launches / s.us for s in decoding]
        # for a given e the best l solves sum (whole + l each - 1) each = 0
        rest = sum((1 - w) * x for w, x in zip(whole, each))
        tried = Fit(e, max(rest / sum(x * x for x in each), 0.0))
        if (found := error(tried, decoding)) < least:
            best, least = tried, found
    prompts = [s for s in steps if s.row["suite"] == "prefill"]
    shares = [Fit(best.streaming, best.launch_us, 0.2 + 0.01 * i) for i in range(81)]
    return min(shares, key=lambda t: error(t, prompts)) if prompts else best


def elsewhere(here: Rates, gpu: str) -> Rates:
    """Ceilings of another GPU: its data sheet, times what `here` reaches of its own."""
    own, other = SHEETS["H200"], SHEETS[gpu]
    return Rates(
        here.copy_gbs * other.copy_gbs / own.copy_gbs,
        here.bf16_tflops * other.bf16_tflops / own.bf16_tflops,
        here.fp8_tflops * other.fp8_tflops / own.fp8_tflops,
    )


def launches_near(steps: Sequence[Known], model: str, quant: str, batch: int, drafts: int) -> float:
    """Launches of the model's measured step whose batch is nearest."""
    wanted = {"model": model, "quant": quant, "drafts": drafts}
    same = [
        s
        for s in steps
        if s.row["suite"] == "decode" and {k: s.row["case"][k] for k in wanted} == wanted
    ]
    said = f"no measured step of {model} in {quant} has {drafts} drafts"
    require(bool(same), said, BenchError)
    return min(same, key=lambda s: abs(s.row["tokens"] - batch)).launches


# ---------------------------------------------------------------------------------------- printing
def held_against(steps: Sequence[Known], by: Fit) -> str:
    """The fit against every row it was made from."""
    lines = ["| step | rows | predicted ms | measured ms | off |", "|---|--:|--:|--:|--:|"]
    for s in steps:
        case = s.row["case"]
        activations = " w8a8" if case.get("activations") == "fp8" else ""
        what = f"{case['model']} {case['quant']}{activations}, " + (
            f"context {case['context']:,}, drafts {case['drafts']}"
            if s.row["suite"] == "decode"
            else "prompt"
        )
        us = by.us(s.parts, s.launches, s.rates)
        off = f"{100 * (us / s.us - 1):+.0f} %"
        lines.append(
            f"| {what} | {s.row['tokens']:,} | {us / 1e3:.2f} | {s.us / 1e3:.2f} | {off} |"
        )
    return "\n".join(lines)


def predicted(
    weights: Weights,
    quant: str,
    loads: Sequence[Load],
    steps: Sequence[Known],
    by: Fit,
    here: Rates,
) -> list[Row]:
    """Microseconds of each load on every GPU of `SHEETS`."""
    found = []
    for load in loads:
        parts = cost.parts(weights, load, activations=True)
        name = weights.config.name
        launches = launches_near(steps, name, quant, load.batch, load.drafts)
        times = {gpu: by.us(parts, launches, elsewhere(here, gpu)) for gpu in SHEETS}
        found.append({"load": load, "launches": launches, "us": times})
    return found


def table(found: Sequence[Row]) -> str:
    names = [name if name == "H200" else f"{name} (prediction)" for name in SHEETS]
    lines = ["| sequences | context | drafts | launches | " + " | ".join(names) + " |"]
    lines.append("|--:|--:|--:|--:|" + "--:|" * len(names))
    for row in found:
        load, cells = row["load"], []
        for us in row["us"].values():
            cells.append(f"{us / 1e3:.2f} ms, {1e6 * load.batch / us:,.0f} tok/s")
        what = f"| {load.batch} | {load.context:,} | {load.drafts} | {row['launches']:.0f} | "
        lines.append(what + " | ".join(cells) + " |")
    return "\n".join(lines)


@app.command()
def main(
    model: Model,
    quant: Quant = "release",
    batch: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,4,16,64,256",
    context: Annotated[str, typer.Option(help="Tokens behind each.")] = "1024",
    drafts: Annotated[int, typer.Option(help="Drafts a step.")] = 0,
    state_dtype: StateDtype = None,
    kv_dtype: KvDtype = None,
    measured: Annotated[
        list[Path] | None, typer.Option("--rows", help="JSONL files; default: those of the H200.")
    ] = None,
) -> None:
    """The fit, held against the rows it was made from; then steps, measured GPU or not."""
    files = measured or sorted((RESULTS / "nvidia_h200").glob("*.jsonl"))
    steps = known(rows.load(files))
    by = fit(steps)
    print(
        f"{by.streaming:.0%} of the copy rate, {by.launch_us:.2f} us a launch, "
        f"{by.computing:.0%} of the matmul rate, from {len(steps)} rows\n"
    )
    print(held_against(steps, by))
    weights = random_weights(model, 0, quant=quant, drafting=drafts > 0)
    case = {"drafts": drafts, "state": state_dtype or "float32"}
    small = (kv_dtype or weights.scheme.kv) == "fp8"
    case["kv"] = "float8_e4m3fn" if small else "bfloat16"
    loads = [load_of(case | {"context": n}, b) for n in numbers(context) for b in numbers(batch)]
    print(f"\n{weights.config.name}, weights as in {quant}\n")
    print(table(predicted(weights, quant, loads, steps, by, steps[0].rates)))


if __name__ == "__main__":
    run(app)
