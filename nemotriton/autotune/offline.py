"""Compile kernels for Hopper and Blackwell on a machine with no GPU, and judge the result.

Every (kernel, case, tile) is built on `meta` tensors through the op's own wrapper, so that shapes,
strides and argument specialisation are those of a real launch. A default tile must not spill; no
tile may pass the card's shared or tensor memory, show the wgmma register hazard (see `sass`) or
read registers that nothing wrote (see `unwritten`).
"""

import concurrent.futures
import contextlib
import io
import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton.autotune.parity import generator
from nemotriton.autotune.sass import Resources, resources
from nemotriton.commandline import need_known
from nemotriton.errors import UnsupportedError
from nemotriton.kernels.op import DTYPES, SPECS, Case, Tile, compile_only, targeting, use_tile
from nemotriton.model.config import ModelConfig

SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448}
SHARED_LIMIT[120] = 101376
TENSOR_MEMORY_LIMIT = 512
ARCHES = tuple(sorted(SHARED_LIMIT))


@dataclass(frozen=True, slots=True)
class Job:
    """One wrapper call to compile."""

    op: str
    case: Case
    tokens: int
    dtype: str
    tile: Tile
    default: bool
    arch: int


@dataclass(frozen=True, slots=True)
class Row:
    """One compiled kernel of a job, with what is wrong with it (empty: nothing)."""

    job: Job
    kernel: str
    found: Resources | None
    faults: tuple[str, ...]
    seconds: float


def parse_arch(text: str) -> int:
    """`sm_90`, `sm_100a` or `90` -> 90; UsageError names what is known."""
    digits = text.lower().removeprefix("sm_").rstrip("af")
    if not digits.isdigit() or int(digits) not in ARCHES:
        need_known("architecture", text, [f"sm_{arch}" for arch in ARCHES])
    return int(digits)


def jobs(
    kernels: Sequence[str],
    configs: Iterable[ModelConfig],
    arches: Sequence[int],
    dtypes: Sequence[str] = ("bf16",),
    every_tile: bool = False,
) -> list[Job]:
    """The distinct compilations that the kernels need for these models.

    A kernel that has none of `dtypes` is compiled in its first, and one that is written for some
    architectures only for those."""
    for name in kernels:
        need_known("kernel", name, sorted(SPECS))
    seen: dict[tuple[str, Case, str, Tile, int], Job] = {}
    configs = list(configs)
    for name in kernels or sorted(SPECS):
        spec = SPECS[name]
        for case in dict.fromkeys(c for config in configs for c in spec.cases(config)):
            tiles = dict.fromkeys(spec.tiles(case)) if every_tile else {}
            for arch in [a for a in arches if a in (spec.arches or arches)]:
                with targeting(arch):
                    defaults = {spec.default(case, t): t for t in reversed(spec.tokens)}
                for tile in {**dict.fromkeys(defaults), **tiles}:
                    tokens = defaults.get(tile, max(t for t in spec.tokens if t <= 1024))
                    for dtype in [d for d in dtypes if d in spec.dtypes] or spec.dtypes[:1]:
                        job = Job(name, case, tokens, dtype, tile, tile in defaults, arch)
                        seen.setdefault((name, case, dtype, tile, arch), job)
    return list(seen.values())


def compile_job(job: Job) -> list[Row]:
    """Compile one job in this process; a failure is a row with its message."""
    spec = SPECS[job.op]
    meta = torch.device("meta")
    start = time.perf_counter()
    try:
        args = spec.make(
            job.case, job.tokens, meta, DTYPES[job.dtype], generator(0, torch.device("cpu"))
        )
        # Triton prints the whole PTX when the assembler refuses it
        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet, use_tile(job.op, job.tile), compile_only(job.arch) as done:
            spec.op.triton(**args)
            rows = [(c.name, resources(c.kernel)) for c in done]
    except UnsupportedError:
        raise
    except Exception as error:  # any compiler pass may raise anything: that is a finding
        first = str(error).strip().splitlines() or [""]
        took = time.perf_counter() - start
        return [Row(job, job.op, None, (f"{type(error).__name__}: {first[0][:160]}",), took)]
    if not rows:
        return [Row(job, job.op, None, ("no kernel was launched",), time.perf_counter() - start)]
    took = (time.perf_counter() - start) / len(rows)
    return [Row(job, name, found, faults(job, found, name), took) for name, found in rows]


def faults(job: Job, found: Resources, kernel: str = "") -> tuple[str, ...]:
    """What makes a compiled kernel unfit, in words."""
    wrong = []
    if found.shared > SHARED_LIMIT[job.arch]:
        wrong.append(f"{found.shared} bytes of shared memory, {SHARED_LIMIT[job.arch]} there are")
    if found.tensor_memory > TENSOR_MEMORY_LIMIT:
        wrong.append(f"{found.tensor_memory} columns of tensor memory of {TENSOR_MEMORY_LIMIT}")
    if found.hazards:
        wrong.append(f"{found.hazards} wgmma register hazards")
    if found.unwritten:
        wrong.append(f"{found.unwritten} instructions read registers that nothing wrote")
    native = SPECS[job.op].native.get(kernel, "")
    if not any(native in name for name in found.tensor_ops or ("",)):
        wrong.append(f"no {native} among its tensor-core instructions")
    if job.default and found.spills and kernel not in SPECS[job.op].may_spill:
        wrong.append(f"the default tile spills {found.spills} bytes")
    return tuple(wrong)


def run(todo: Sequence[Job], workers: int = 1) -> Iterator[list[Row]]:
    """Rows of every job, as they finish; `workers` processes of their own."""
    if workers <= 1:
        yield from map(compile_job, todo)
        return
    context = multiprocessing.get_context("spawn")
    deaf = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, signal.signal, deaf)
    try:
        pending = [pool.submit(compile_job, job) for job in todo]
        for future in concurrent.futures.as_completed(pending):
            yield future.result()
    finally:  # a caller that stops early does not wait for what it will not read
        pool.shutdown(cancel_futures=True)
