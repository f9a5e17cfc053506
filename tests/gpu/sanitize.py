"""A small run of every kernel, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.gpu.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m tests.gpu.sanitize

Without the caching allocator every buffer is an allocation of its own, so that a read or write
just beyond it is seen. Names behind the command run those kernels alone. Kernels written for other
architectures are left out, by name. Exits 1 if a result is wrong or a kernel cannot run.
"""

import sys
from collections.abc import Sequence

import torch

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton import device as devices
from nemotriton.autotune import parity
from nemotriton.kernels.op import DTYPES, SPECS, KernelSpec

_CASES = 2


def here(spec: KernelSpec, device: torch.device) -> bool:
    """Whether a kernel is written for this device's architecture."""
    major, minor = devices.info(device).capability
    return not spec.arches or 10 * major + minor in spec.arches


def problems(name: str, spec: KernelSpec, device: torch.device) -> list[str]:
    """What is wrong with a kernel's small cases; each is printed as it ends."""
    found = []
    for case in spec.small[:_CASES]:
        try:
            verdict = _verdict(spec, case, device)
            told = "ok" if verdict.ok else verdict.detail
        except Exception as problem:  # one kernel that cannot run must not hide the others
            told = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
        if told != "ok":
            found.append(f"{name} {case!r}: {told}")
        print(f"{name:24}{case!r:40} {told}", flush=True)
    return found


def _verdict(spec: KernelSpec, case: object, device: torch.device) -> parity.Verdict:
    tokens = max(spec.small_tokens)
    dtype = DTYPES[spec.dtypes[0]]
    args = spec.make(case, tokens, device, dtype, parity.generator(0, device))
    out = parity.run(spec, args)
    if device.type == "cuda":
        torch.cuda.synchronize()
    twin = parity.run(spec, args, ref=True)
    return parity.compare(spec, out, twin, parity.oracle(spec, args), case)


def main(names: Sequence[str], device: torch.device) -> int:
    """Run the kernels of these names, or all; the exit code."""
    unknown = sorted({*names} - {*SPECS})
    if unknown:
        print(f"no kernel {', '.join(unknown)}: there are {', '.join(SPECS)}")
        return 2
    chosen = {name: SPECS[name] for name in names or SPECS}
    own = {name: spec for name, spec in chosen.items() if here(spec, device)}
    others = [name for name in chosen if name not in own]
    found = [line for name, spec in own.items() for line in problems(name, spec, device)]
    print(f"ran {len(own)} kernels on {devices.info(device).name}; {len(found)} cases wrong")
    print(f"left out {len(others)} of other architectures: {', '.join(others) or 'none'}")
    for line in found:
        print(f"wrong: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], torch.device("cuda")))
