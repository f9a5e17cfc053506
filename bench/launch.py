"""Host microseconds of one call of every op at one token: `python -m bench.launch` on a GPU.

The call returns when the launch is queued; what it costs is Python, Triton's launcher and the
driver. CUDA graphs take it out of a decode step; outside them it bounds how fast steps can start.
"""

import statistics
import time
from collections.abc import Callable

import torch

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton.autotune.parity import generator
from nemotriton.kernels.op import DTYPES, SPECS, launch
from nemotriton.kernels.rms_norm import _rms_norm

CALLS = 200


def host_us(call: Callable[[], object]) -> float:
    """Median over five rounds of the host time of one asynchronous call."""
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
        torch.cuda.synchronize()
    return statistics.median(rounds[1:])


def main() -> None:
    cuda = torch.device("cuda")
    x = torch.randn(1, 4096, device=cuda)
    w, y = torch.ones(4096, device=cuda), torch.empty_like(x)
    meta = {"BLOCK_D": 4096, "num_warps": 4}
    bare = host_us(lambda: _rms_norm[(1,)](x, w, y, x.stride(0), y.stride(0), 4096, 1e-5, **meta))
    through = host_us(
        lambda: launch(_rms_norm, (1,), x, w, y, x.stride(0), y.stride(0), 4096, 1e-5, **meta)
    )
    print(f"| one kernel, Triton's own launcher | {bare:.1f} |")
    print(f"| the same through launch() | {through:.1f} |")
    for name, spec in SPECS.items():
        args = spec.make(spec.small[0], 1, cuda, DTYPES[spec.dtypes[0]], generator(0, cuda))
        print(f"| {name} | {host_us(lambda a=args, s=spec: s.op(**a)):.1f} |", flush=True)


if __name__ == "__main__":
    main()
