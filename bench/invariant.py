"""`python -m bench.invariant preset:super-120b --synthetic`: what the invariant mode costs.

First op by op, at the model's widths: which give a row (or sequence) the same bits alone and among
others as they are, which do in the mode, and the time of both, over cold inputs. Then whole steps
of a random model: decode steps at several numbers of sequences and a prompt to its first token, in
both modes on the same weights.
"""

import contextlib
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from bench import steps
from bench.cli import application, need_gpu, run
from bench.models import Layers, Model, Quant, Setup, Synthetic, numbers
from bench.prefill import prompt
from nemotriton import LLM
from nemotriton.autotune import parity
from nemotriton.autotune.alone import differing
from nemotriton.autotune.timing import CudaStopwatch, race
from nemotriton.engine.graphs import CudaGraphs
from nemotriton.engine.loading import find_grain
from nemotriton.kernels.fixed_order import DECODE, PREFILL, fixed_order
from nemotriton.kernels.op import DTYPES, SPECS, Args, Case, KernelSpec, target
from nemotriton.model.config import ModelConfig

app = application(__doc__)
PROMPT_OPS = ("causal_conv1d", "ssd_prefill", "attend_prefill")
STEP_OPS = ("causal_conv1d_update", "ssm_update", "attend_decode")
KERNELS = (
    "matmul,fp8_matmul,packed_matmul,run_experts_packed,route_experts,rms_norm,add_rms_norm,"
    "gated_rms_norm,causal_conv1d,causal_conv1d_update,ssd_prefill,ssm_update,attend_prefill,"
    "attend_decode,sample_tokens,logit_thresholds"
)
SETS = 3  # inputs that a graph takes in turn
ROOM = 8 << 30  # bytes of them


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of an op as it is and in the mode, and whether its bits stay the same alone."""

    us: float
    fixed_us: float
    same: bool
    fixed_same: bool


# --------------------------------------------------------------------------------------------- ops
def points(
    config: ModelConfig, kernels: str, where: torch.device
) -> Iterator[tuple[KernelSpec, Case, str]]:
    """What steps of the model call; of an op's cases those without drafts."""
    for name in kernels.split(","):
        spec = SPECS[name]
        if spec.arches and target(where) not in spec.arches:
            continue
        for case in spec.cases(config):
            plain = case.get("STATE", "fp32") == "fp32" and not case.get("fp8", case.get("Q", 0))
            alone = all(case.get(axis, 1) == 1 for axis in ("NEW", "new", "N"))
            if plain and (alone or "K" in case):
                for phase in (DECODE, PREFILL):
                    if name not in (STEP_OPS if phase == PREFILL else PROMPT_OPS):
                        yield spec, case, phase


def cost(spec: KernelSpec, case: Case, phase: str, tokens: int, watch: CudaStopwatch) -> Cost:
    seed = zlib.crc32(f"{spec.op.name}{case}{tokens}".encode())
    rng = parity.generator(seed, watch.where)
    args = spec.make(case, tokens, watch.where, DTYPES[spec.dtypes[0]], rng)
    same = []
    for mode in (None, phase):
        with fixed_order(mode):
            same.append(not list(differing(spec, args, most=3)))
    size = sum(v.nbytes for v in args.values() if isinstance(v, torch.Tensor))
    sets = [args, *(parity.copy(args) for _ in range(min(SETS - 1, ROOM // max(size, 1))))]
    times = race([watch.capture(calls(spec, sets, mode), False) for mode in (None, phase)])
    return Cost(times[0].us, times[1].us, *same)


def calls(spec: KernelSpec, sets: Sequence[Args], mode: str | None) -> list[Callable[[], object]]:
    def call(args: Args) -> object:
        with fixed_order(mode):
            return spec.op.triton(**args)

    return [lambda args=args: call(args) for args in sets]


def op_table(config: ModelConfig, kernels: str, counts: dict[str, list[int]]) -> None:
    where = torch.device("cuda", 0)
    watch = CudaStopwatch(where)
    print("| op | case | tokens | us | us in the mode | | alone as among others | in the mode |")
    print("|---|---|--:|--:|--:|--:|---|---|")
    for spec, case, phase in points(config, kernels, where):
        for tokens in counts[phase]:
            c = cost(spec, case, phase, tokens, watch)
            percent = f"{100 * (c.fixed_us / c.us - 1):+.0f} %"
            said = " | ".join("same" if same else "differs" for same in (c.same, c.fixed_same))
            name = f"{spec.op.name}, {phase}" if phase == PREFILL else spec.op.name
            times = f"{c.us:.1f} | {c.fixed_us:.1f} | {percent}"
            print(f"| {name} | {case} | {tokens} | {times} | {said} |", flush=True)
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------- steps
@contextlib.contextmanager
def invariant(llm: LLM, wanted: bool, batches: list[int]) -> Iterator[None]:
    """Inside the block the model runs in the mode, or not, with its decode steps recorded anew."""
    llm.invariant = wanted
    mamba = llm.runner.caches.mamba
    piece = llm.engine.scheduler.prefill_piece
    if mamba is not None:
        piece, grain = find_grain(piece, llm.config, mamba.format, wanted)
        llm.engine.scheduler.prefill_piece, llm.engine.scheduler.grain = piece, grain
    with steps.only_rungs(batches):
        sizes = {"requests": llm.plan.max_requests, "context": llm.plan.max_context}
        recorded = llm.runner.record(CudaGraphs(llm.device), **sizes)
    with llm._on_device():
        recorded.warm()
    yield
    llm.runner.steps = None


def step_table(setup: Setup, batches: list[int], context: int, length: int, count: int) -> None:
    """Milliseconds of decode steps and of a prompt in both modes, by one model."""
    found: dict[str, list[float]] = {}
    longest = max(context + (steps.WARM + count + 8) * 2 + 64, length + 8)
    sizes = {"requests": max(batches), "context": longest, "piece": 8192, "batches": batches}
    with setup.started(0, **sizes, graphs=False) as (llm, _):  # type: ignore[arg-type]
        for wanted in (False, True):
            with invariant(llm, wanted, batches):
                for batch in batches:
                    steps.begin(llm, batch, context)
                    took = steps.steps_of(llm, 0, count).wall
                    steps.end(llm)
                    name = f"step of {batch} sequences, {context:,} tokens each"
                    found.setdefault(name, []).append(statistics.median(took) / 1e3)
                times = []
                for i in range(4):
                    start = time.perf_counter()
                    prompt(llm, length, i)
                    times.append(1e3 * (time.perf_counter() - start))
                found.setdefault(f"prompt of {length:,}", []).append(statistics.median(times[1:]))
    print("\n| | ms | ms in the mode | |\n|---|--:|--:|--:|")
    for name, (plain, fixed) in found.items():
        print(f"| {name} | {plain:.2f} | {fixed:.2f} | {100 * (fixed / plain - 1):+.0f} % |")


@app.command()
def main(
    model: Model,
    synthetic: Synthetic = False,
    quant: Quant = "release",
    layers: Layers = None,
    batch: Annotated[str, typer.Option(help="Numbers of sequences.")] = "1,16,64",
    context: Annotated[int, typer.Option(help="Tokens behind each.")] = 1024,
    length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    each: Annotated[int, typer.Option("--steps", help="Steps behind each number.")] = 30,
    kernels: Annotated[str, typer.Option(help="Ops of the first table.")] = KERNELS,
    only: Annotated[str, typer.Option(help="ops or steps; default: both.")] = "",
) -> None:
    """Ops, then whole steps, in both modes."""
    if not synthetic:
        raise typer.BadParameter("only random weights are measured: add --synthetic")
    need_gpu()
    setup = Setup(model, quant, layers)
    counts = {DECODE: numbers(batch), PREFILL: [length]}
    if only != "steps":
        op_table(setup.weights(0).config, kernels, counts)
    if only != "ops":
        step_table(setup, numbers(batch), context, length, each)
    print("done", file=sys.stderr)


if __name__ == "__main__":
    run(app)
