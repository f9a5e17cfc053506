"""`python -m bench.sums --ranks 2`: microseconds of one sum over the ranks in a decode step.

Sums of the sizes of so many rows of a model, back to back in a CUDA graph, by NCCL and by the
kernel for small parts (`model.sums`); both are right before they are timed.
"""

from typing import Annotated

import torch
import torch.distributed as dist
import typer

from bench.cli import application, need_gpu, run
from nemotriton import LLM
from nemotriton.errors import require

app = application(__doc__)
EACH = 40  # sums in a graph
REPEATS = 20


def times(llm: LLM, width: int, counts: list[int]) -> list[tuple[int, float, float | None]]:
    """(rows, microseconds by NCCL, by the small kernel) on every rank."""
    assert llm._team is not None
    shard, found = llm._team.shard, []
    for count in counts:
        part = torch.full((count, width), 1.0 + shard.rank, device=llm.device, dtype=llm.dtype)
        nccl = _time(lambda p=part: dist.all_reduce(p), llm.device)  # type: ignore[misc]
        small = None
        if shard.sums is not None and shard.sums.takes(part):
            part.fill_(1.0 + shard.rank)
            wanted = shard.ranks * (shard.ranks + 1) / 2
            right = bool((shard.sums.add(part) == wanted).all())
            require(right, f"a sum of {count} rows is wrong: not measured")
            small = _time(lambda p=part: shard.sums.add(p), llm.device)  # type: ignore[misc, union-attr]
        found.append((count, nccl, small))
    return found


def _time(work, device: torch.device) -> float:  # type: ignore[no-untyped-def]
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
        found = llm.everywhere(times, width, [1, 4, 16, 64, 256, 1024, 8192])
    print("| rows | KiB | NCCL us | small us |\n|--:|--:|--:|--:|")
    for count, nccl, own in found:
        shown = "" if own is None else f"{own:.1f}"
        print(f"| {count} | {count * width * 2 / 1024:.0f} | {nccl:.1f} | {shown} |")


if __name__ == "__main__":
    run(app)
