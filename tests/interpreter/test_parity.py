"""Every SPEC, dtype and odd size in the interpreter, against the twins."""

import zlib

import pytest
import torch

import nemotriton.kernels  # noqa: F401  (registers the specs)
from nemotriton.autotune import parity
from nemotriton.kernels.op import DTYPES, SPECS, Case, KernelSpec
from tests.conftest import Poison, fill

CPU = torch.device("cpu")
GRID = [
    pytest.param(spec, case, T, dtype, id=f"{name}-{case}-T{T}-{dtype}")
    for name, spec in SPECS.items()
    for i, case in enumerate(spec.small)
    for T in spec.small_tokens
    for j, dtype in enumerate(spec.dtypes)
    # every dtype meets every token count, and every case does so in one dtype
    if i == 0 or j == i % len(spec.dtypes)
]
ONE = [
    pytest.param(spec, spec.small[-1], max(spec.small_tokens), spec.dtypes[0], id=name)
    for name, spec in SPECS.items()
]


def build(spec: KernelSpec, case: Case, T: int, dtype: str) -> dict:
    seed = zlib.crc32(f"{spec.op.name}{case}{T}{dtype}".encode())
    return spec.make(case, T, CPU, DTYPES[dtype], parity.generator(seed, CPU))


@pytest.mark.parametrize("spec,case,T,dtype", GRID)
def test_matches_twin(spec: KernelSpec, case: Case, T: int, dtype: str, poison: Poison) -> None:
    args = build(spec, case, T, dtype)
    out = parity.run(spec, args)
    verdict = parity.compare(
        spec, out, parity.run(spec, args, ref=True), parity.oracle(spec, args), case
    )
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize("spec,case,T,dtype", ONE)
def test_second_run_is_bit_equal(spec: KernelSpec, case: Case, T: int, dtype: str) -> None:
    args = build(spec, case, T, dtype)
    first, second = parity.run(spec, args), parity.run(spec, args)
    for name in first:
        assert_bits(first[name], second[name], name)


@pytest.mark.parametrize("spec,case,T,dtype", ONE)
def test_strided_and_misaligned_inputs(
    spec: KernelSpec, case: Case, T: int, dtype: str, poison: Poison
) -> None:
    """The same bits when inputs are slices of wider rows that start one element off."""
    args = build(spec, case, T, dtype)
    wide = {k: embed(v) if k in spec.strided else v for k, v in args.items()}
    plain, sliced = parity.run(spec, args), parity.run(spec, wide)
    for name in plain:
        assert_bits(plain[name], sliced[name], name)


@pytest.mark.parametrize("spec,case,T,dtype", ONE)
def test_a_sick_neighbour_changes_no_bit(spec: KernelSpec, case: Case, T: int, dtype: str) -> None:
    """NaN in the first sequence (or row) leaves every other row as it was."""
    if not spec.per_token:
        pytest.skip("this op has no rows that must be independent")
    args = build(spec, case, T, dtype)
    first = int(args["cu"][1]) if "cu" in args else 1
    sick = parity.copy(args)
    for name in spec.per_token:
        if sick[name] is not None and sick[name].is_floating_point():
            sick[name][:first] = float("nan")
    healthy, ill = parity.run(spec, args), parity.run(spec, sick)
    for name in healthy:
        if name.startswith("out") and healthy[name].shape[:1] == (T,):
            assert_bits(healthy[name][first:], ill[name][first:], name)


def embed(x: torch.Tensor) -> torch.Tensor:
    """x as a slice of a wider NaN-filled buffer: row stride larger by 5, base one element off."""
    rows, width = x.shape[0], x[0].numel() if x.shape[0] else 0
    whole = torch.zeros(rows * (width + 5) + 1, dtype=x.dtype)
    fill(whole)
    inner = x.contiguous().stride()[1:]
    view = whole[1:].as_strided(x.shape, (width + 5, *inner), storage_offset=1)
    return view.copy_(x)


def assert_bits(a: torch.Tensor, b: torch.Tensor, name: str) -> None:
    same = (a == b) | (a.isnan() & b.isnan()) if a.is_floating_point() else a == b
    assert bool(same.all()), f"{name}: {int((~same).sum())} of {a.numel()} elements differ"
