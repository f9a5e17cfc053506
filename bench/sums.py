"""`python -m bench.sums --ranks 2`: microseconds of one sum over the ranks in a decode step.

Sums of the sizes of so many rows of a model, back to back in a CUDA graph: by NCCL, by the kernel
for small parts, by that with the residual add and norm behind it, and by the kernel that does all
three (`model.sums`). All are right before they are timed.
"""

from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from bench import rows, sums
from bench.cli import application, need_gpu, run
from bench.rows import BenchError
from nemotriton import LLM
from nemotriton.errors import require
from nemotriton.kernels import add_rms_norm
from nemotriton.model.parallel import Shard

app = application(__doc__)
EACH = 40  # sums in a graph
REPEATS = 20
COLUMNS = ("NCCL", "small", "small and norm", "fused")

Line = tuple[int, list[float | None]]


def times(llm: LLM, width: int, counts: list[int]) -> list[Line]:
    """(rows, microseconds by `COLUMNS`, None where a way does not take so many) on every rank."""
    assert llm._team is not None
    shard, found = llm._team.shard, []
    for count in counts:
        part = torch.full((count, width), 1.0 + shard.rank, device=llm.device, dtype=llm.dtype)
        found.append((count, [_time(w, llm.device) if w else None for w in _ways(shard, part)]))
    return found


def _ways(shard: Shard, part: torch.Tensor) -> list[Callable[[], object] | None]:
    ranks, own = shard.ranks, shard.sums
    weight, stream = torch.ones_like(part[0]), torch.zeros_like(part)
    wanted = add_rms_norm(torch.full_like(part, ranks * (ranks + 1) / 2), stream, weight)
    ways: list[Callable[[], object] | None] = [lambda: dist.all_reduce(part), None, None, None]
    if own is not None and own.takes(part):
        require(torch.equal(own.add(part), wanted[1]), "a small sum is wrong", BenchError)
        ways[1] = lambda: own.add(part)
        ways[2] = lambda: add_rms_norm(own.add(part), stream, weight)
    if own is not None and own.takes_rows(part):
        for _ in range(3):
            got = own.add_norm(part, stream, weight, 1e-5)
            require(torch.equal(got[1], wanted[1]), "a fused sum is wrong", BenchError)
        ways[3] = lambda: own.add_norm(part, stream, weight, 1e-5)
    return ways


def _time(work: Callable[[], object], device: torch.device) -> float:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(EACH):
            work()
        graph.capture_end()
        spans = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        graph.replay()
        spans[0].record()
        for _ in range(REPEATS):
            graph.replay()
        spans[1].record()
        stream.synchronize()
    return 1e3 * float(spans[0].elapsed_time(spans[1])) / REPEATS / EACH


@app.command()
def main(
    ranks: Annotated[int, typer.Option(help="GPUs.")] = 2,
    width: Annotated[int, typer.Option(help="Numbers in a row.")] = 4096,
) -> None:
    """A table of sizes."""
    need_gpu()
    small = {"max_context": 64, "max_requests": 1, "graphs": False}
    with LLM.synthetic("tiny", tp=ranks, **small) as llm:  # type: ignore[arg-type]
        # by the module's name: this one may be the program, which other ranks have none of
        found = llm.everywhere(sums.times, width, [1, 4, 16, 64, 128, 1024, 8192])
    print(f"| rows | KiB | {' us | '.join(COLUMNS)} us |\n|--:|--:|" + "--:|" * len(COLUMNS))
    for count, each in found:
        shown = " | ".join(rows.number(us, ".1f") for us in each)
        print(f"| {count} | {count * width * 2 / 1024:.0f} | {shown} |", flush=True)


if __name__ == "__main__":
    run(app)
