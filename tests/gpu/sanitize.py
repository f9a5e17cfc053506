"""A small run of every kernel, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.gpu.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m tests.gpu.sanitize

Without the caching allocator every buffer is an allocation of its own, so that a read or write
just beyond it is seen. Exits 1 if a result is wrong.
"""

import sys

import torch

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton.autotune import parity
from nemotriton.kernels.op import DTYPES, SPECS


def main() -> int:
    wrong = 0
    cuda = torch.device("cuda")
    for name, spec in SPECS.items():
        for case in spec.small[:2]:
            tokens = max(spec.small_tokens)
            args = spec.make(case, tokens, cuda, DTYPES[spec.dtypes[0]], parity.generator(0, cuda))
            out = parity.run(spec, args)
            torch.cuda.synchronize()
            verdict = parity.compare(
                spec, out, parity.run(spec, args, ref=True), parity.oracle(spec, args), case
            )
            wrong += not verdict.ok
            print(f"{name:24}{case!r:40} {'ok' if verdict.ok else verdict.detail}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
