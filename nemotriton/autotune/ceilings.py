"""What this GPU can do at most, measured: copy and read bandwidth, matrix products.

Datasheet rates are not reached by any kernel; a roofline share is told against these. Matrix
products run long enough for the power cap to set the clock, as it does under real work.
"""

import functools
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from nemotriton.autotune.timing import Replay, Stopwatch, race
from nemotriton.kernels.op import Cost, cdiv, launch

BYTES = 2 << 30  # far beyond any L2
BLOCK = 8192
COPIES = ((1024, 4), (2048, 4), (4096, 8), (8192, 8), (8192, 16))  # elements and warps of a program


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates in GB/s (10^9 bytes; a copy counts what it reads and writes) and TFLOP/s."""

    copy_gbs: float
    read_gbs: float
    bf16_tflops: float
    fp32_tflops: float

    def bound(self, cost: Cost, dtype: str) -> tuple[float, str]:
        """The least microseconds `cost` can take, and the name of what sets them."""
        rate = self.fp32_tflops if dtype == "fp32" else self.bf16_tflops
        moving, computing = cost.bytes / self.copy_gbs / 1e3, cost.flops / rate / 1e6
        name = "fp32 matmul" if dtype == "fp32" else "bf16 matmul"
        return (moving, "copy") if moving >= computing else (computing, name)

    def as_dict(self) -> dict[str, float]:
        return {k: round(v, 1) for k, v in asdict(self).items()}


@triton.jit
def _read(x_ptr, out_ptr, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64)
    at = i * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    tl.store(out_ptr + i, tl.sum(x, 0))


@triton.jit
def _copy(x_ptr, out_ptr, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < N), mask=at < N)


def measure(watch: Stopwatch, where: torch.device, size: int = BYTES, side: int = 8192) -> Ceilings:
    """Measure all of them with buffers of `size` bytes and side x side matrices: about a second."""
    a = torch.randn(size // 4, device=where)
    b = torch.empty_like(a)
    out = torch.empty(cdiv(a.numel(), BLOCK), device=where)

    def read() -> None:
        launch(_read, (out.numel(),), a, out, a.numel(), BLOCK=BLOCK, num_warps=8)

    # a kernel: in a graph, torch's copy becomes a node of the copy engine, which is far slower
    def copy(block: int, warps: int) -> None:
        programs = cdiv(a.numel(), block)
        launch(_copy, (programs,), a, b, a.numel(), BLOCK=block, num_warps=warps)

    copies = [watch.capture([functools.partial(copy, *shape)], True) for shape in COPIES]
    copy_us = min(timing.us for timing in race(copies, samples=15))
    read_us = _median(watch.capture([read], True))
    flops = 2 * side**3 / 1e6
    matmul_us = [_median(_matmul(watch, where, dtype, side)) for dtype in ("bf16", "fp32")]
    return Ceilings(
        copy_gbs=2 * size / copy_us / 1e3,
        read_gbs=size / read_us / 1e3,
        bf16_tflops=flops / matmul_us[0],
        fp32_tflops=flops / matmul_us[1],
    )


def _matmul(watch: Stopwatch, where: torch.device, dtype: str, side: int) -> Replay:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    x, y = (torch.randn(side, side, device=where).to(kind) for _ in range(2))
    return watch.capture([lambda: x @ y], True)


def _median(replay: Replay) -> float:
    return race([replay], samples=15)[0].us
