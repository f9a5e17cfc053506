"""Every SPEC at full model widths on the device, and every tile of its search space."""

import gc
import zlib
from collections.abc import Iterator

import pytest
import torch

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton.autotune import parity
from nemotriton.kernels.op import DTYPES, SPECS, Case, KernelSpec, Tile, use_tile
from nemotriton.model.config import ModelConfig
from tests.gpu.sanitize import here

PRESETS = ("super-120b", "nano-30b", "h-8b")
TOKENS = (1, 5, 64, 300)
LARGE = 2049
# where twin and fp64 oracle at full width take seconds, or tens of gigabytes
HEAVY = {
    "run_experts": (1, 5, 64),
    "run_experts_fp8": (1, 5, 64),
    "run_experts_nvfp4": (1, 5, 64),
    "run_experts_packed": (1, 5, 64),
    "attend_prefill": (5, 300),
    "attend_decode": (1, 5, 64, 300),
    "ssd_prefill": (64, 300),
    "ssd_prefill_chunked": (64, 300),
    "ssm_update": (1, 5, 64, 300),
    "ssm_replay": (1, 5, 64),
    "mamba_step": (1, 5, 64),
    "sample_tokens": (1, 5, 64),
    "logit_thresholds": (1, 5, 64),
}


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def skip_other_arches(spec: KernelSpec, cuda: torch.device) -> None:
    if not here(spec, cuda):
        pytest.skip(f"written for {spec.arches}")


def widths(spec: KernelSpec) -> list[Case]:
    return list(dict.fromkeys(c for p in PRESETS for c in spec.cases(ModelConfig.preset(p))))


FULL = [
    pytest.param(spec, case, T, dtype, id=f"{name}-{case}-T{T}-{dtype}")
    for name, spec in SPECS.items()
    for case in widths(spec)
    for T in (*HEAVY.get(name, TOKENS), *(() if name in HEAVY else (LARGE,)))
    for dtype in (spec.dtypes if T == 5 else spec.dtypes[:1])
]


@pytest.mark.parametrize("spec,case,T,dtype", FULL)
def test_full_width(spec: KernelSpec, case: Case, T: int, dtype: str, cuda: torch.device) -> None:
    skip_other_arches(spec, cuda)
    seed = zlib.crc32(f"{spec.op.name}{case}{T}{dtype}".encode())
    verdict = parity.check(spec, case, T, cuda, DTYPES[dtype], seed=seed)
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("T", [17, 520])
def test_every_tile_is_right_and_repeats_its_bits(
    spec: KernelSpec, T: int, cuda: torch.device
) -> None:
    """A race shows as a hash that moves; the register hazard of wgmma does so too."""
    skip_other_arches(spec, cuda)
    case = widths(spec)[0]
    dtype = DTYPES[spec.dtypes[0]]
    args = spec.make(case, T, cuda, dtype, parity.generator(1, cuda))
    twin, exact = parity.run(spec, args, ref=True), parity.oracle(spec, args)
    wrong, fitted = [], 0
    for tile in spec.tiles(case):
        verdict, steady = _five_runs(spec, case, tile, args, twin, exact)
        if verdict is None:
            continue
        fitted += 1
        if not verdict.ok or not steady:
            wrong.append(f"{tile}: {verdict.detail}{'' if steady else ', bits move between runs'}")
    assert fitted, "no tile of the space fits this device"
    assert not wrong, "\n".join(wrong)


def _five_runs(
    spec: KernelSpec, case: Case, tile: Tile, args: dict, twin: dict, exact: dict
) -> tuple[parity.Verdict | None, bool]:
    from triton.runtime.errors import OutOfResources

    with use_tile(spec.op.name, tile):
        try:
            first = parity.run(spec, args)
        except OutOfResources:
            return None, True
        verdict = parity.compare(spec, first, twin, exact, case)
        steady = all(same_bits(first, parity.run(spec, args)) for _ in range(5))
    return verdict, steady


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Compared on the device; NaN equals the same NaN."""
    raw = [(a[k].contiguous().view(torch.uint8), b[k].contiguous().view(torch.uint8)) for k in a]
    return all(torch.equal(x, y) for x, y in raw)
