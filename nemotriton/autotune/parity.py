"""Is a kernel right? One call of an op beside its twin, measured against the twin in float64.

The rule of `Twin`: the op's largest error, against the fp64 result, is at most twice the error of
the twin rounded to the op's dtype, plus one ulp of the largest value. It calibrates itself: no
hand-set tolerance. In fp32 no final rounding hides the order of summation, and two orders of an
n-term fp32 sum differ by about sqrt(n) half ulps (Higham, Accuracy and Stability, 4.2), so there
the ulp becomes sqrt(n) / 2 of them, n being the spec's `terms`. Integer outputs must be equal. The
tests, the sweep and the benchmarks gate on it alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nemotriton.kernels.op import Args, Case, Exact, KernelSpec, Relative, Tile, Twin, use_tile


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one comparison; `worst` is error over allowance (at most 1 when right)."""

    ok: bool
    worst: float
    detail: str


def generator(seed: int, where: torch.device) -> torch.Generator:
    return torch.Generator(device=where).manual_seed(seed)


def copy(args: Args) -> Args:
    """Args whose tensors are copies with the same strides, so that in-place ops may be repeated."""
    return {k: _clone(v) for k, v in args.items()}


def _clone(v: Any) -> Any:
    if isinstance(v, torch.Tensor):
        fresh = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
        return fresh.copy_(v)
    if isinstance(v, tuple) and hasattr(v, "_fields"):
        return type(v)(*(_clone(x) for x in v))
    return v


def _double(v: Any) -> Any:
    if isinstance(v, torch.Tensor) and v.is_floating_point():
        return v.double()
    if isinstance(v, tuple) and hasattr(v, "_fields"):
        return type(v)(*(_double(x) for x in v))
    return v


def named(result: Any, args: Args, spec: KernelSpec) -> dict[str, torch.Tensor]:
    """Every tensor an op returned or wrote in place, by name."""
    flat = list(_flatten(result))
    found = {f"out{i}": t for i, t in enumerate(flat)}
    found.update({k: args[k] for k in spec.mutates if args.get(k) is not None})
    return found


def _flatten(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for r in result:
            yield from _flatten(r)


def run(spec: KernelSpec, args: Args, *, ref: bool = False) -> dict[str, torch.Tensor]:
    """Call the op (or its twin) on a copy of `args`; returns outputs and mutated arguments."""
    mine = copy(args)
    result = (spec.op.ref if ref else spec.op.triton)(**mine)
    return named(result, mine, spec)


def oracle(spec: KernelSpec, args: Args) -> dict[str, torch.Tensor]:
    """The twin in float64 on the same values."""
    mine = {k: _double(v) for k, v in spec.meaning(copy(args)).items()}
    return named(spec.op.ref(**mine), mine, spec)


def compare(
    spec: KernelSpec,
    out: dict[str, torch.Tensor],
    twin: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    case: Case | None = None,
) -> Verdict:
    """Hold `out` against the spec's tolerance; names the worst tensor. Without `case` sums are
    taken to be short."""
    worst, detail = 0.0, "nothing compared"
    out, twin = spec.meaning(out), spec.meaning(twin)
    terms = spec.terms(case) if case is not None else 1
    for name, want in exact.items():
        got = out[name]
        if got.shape != want.shape:
            shapes = f"{tuple(got.shape)}, twin {tuple(want.shape)}"
            return Verdict(False, float("inf"), f"{name}: shape {shapes}")
        if got.dtype != twin[name].dtype:
            return Verdict(
                False, float("inf"), f"{name}: dtype {got.dtype}, not {twin[name].dtype}"
            )
        ratio, text = _ratio(spec, got, twin[name], want, terms)
        if ratio >= worst:
            worst, detail = ratio, f"{name}: {text}"
    return Verdict(worst <= 1.0, worst, detail)


def _ratio(
    spec: KernelSpec, got: torch.Tensor, twin: torch.Tensor, want: torch.Tensor, terms: int
) -> tuple[float, str]:
    if want.numel() == 0:
        return 0.0, "empty"
    if isinstance(spec.tolerance, Exact) or not got.is_floating_point():
        wrong = _differing(got, twin)
        share = spec.tolerance.share if isinstance(spec.tolerance, Exact) else 0.0
        allowed = share * got.numel()
        ratio = wrong / allowed if allowed >= 1 else float("inf") if wrong else 0.0
        return ratio, f"{wrong} of {got.numel()} elements differ"
    g, w, t = got.double(), want.double(), twin.double()
    if not torch.equal(g.isfinite(), w.isfinite()):
        return float("inf"), f"{int((~g.isfinite()).sum())} elements are not finite"
    g, w, t = (x.nan_to_num(0.0, 0.0, 0.0) for x in (g, w, t))
    if isinstance(spec.tolerance, Relative):
        error = float((g - w).norm() / w.norm().clamp_min(1e-30))
        return error / spec.tolerance.limit, f"relative error {error:.2e}"
    assert isinstance(spec.tolerance, Twin)
    error, own = float((g - w).abs().max()), float((t - w).abs().max())
    ulp = torch.finfo(got.dtype).eps * float(w.abs().max())
    if got.dtype == torch.float32:
        ulp *= max(1.0, terms**0.5 / 2)
    limit = spec.tolerance.times * own + ulp
    return error / max(limit, 1e-300), f"error {error:.2e}, twin's own {own:.2e}, ulp {ulp:.2e}"


def _differing(got: torch.Tensor, twin: torch.Tensor) -> int:
    """How many elements differ; NaN equals NaN."""
    if got.is_floating_point() and got.dtype.itemsize == 1:  # not every device compares fp8
        got, twin = got.view(torch.uint8), twin.view(torch.uint8)
    same = got.to(twin.dtype) == twin
    if got.is_floating_point():
        same |= got.isnan() & twin.isnan()
    return int((~same).sum())


def check(
    spec: KernelSpec,
    case: Case,
    tokens: int,
    where: torch.device,
    dtype: torch.dtype,
    tile: Tile | None = None,
    seed: int = 0,
) -> Verdict:
    """Build inputs, run op, twin and oracle once, and compare."""
    args = spec.make(case, tokens, where, dtype, generator(seed, where))
    if tile is None:
        out = run(spec, args)
    else:
        with use_tile(spec.op.name, tile):
            out = run(spec, args)
    return compare(spec, out, run(spec, args, ref=True), oracle(spec, args), case)
