"""Makes Triton's CPU interpreter compute narrow floats as a GPU does.

The stock interpreter keeps bf16 as uint16 and fp8 as uint8 and forgets this in most operations:
bf16 arithmetic, dots and sums work on bit patterns, casts to bf16 truncate, casts to fp8 lose
carries and do not saturate, NaN, infinity and sub-normals decode to other numbers, bf16 atomics,
scaled dots and inline assembly are missing. Here every operation on a narrow float decodes its
operands to float32, computes, and rounds once to nearest even.

`install()` swaps the interpreter's builder, reductions, scans and semantics for the subclasses
below; compiled kernels are not touched. Written against Triton 3.6 to 3.9.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

Array = np.ndarray
Handle = stock.TensorHandle


# ------------------------------------------------------------------------------- number formats
class Bfloat16:
    """The upper half of a float32."""

    def decode(self, codes: Array) -> Array:
        return (codes.astype(np.uint32) << 16).view(np.float32)

    def encode(self, values: Array, toward_zero: bool = False) -> Array:
        wide = np.ascontiguousarray(values, np.float32)
        bits = wide.view(np.uint32).reshape(wide.shape).astype(np.uint64)
        if not toward_zero:
            bits += 0x7FFF + ((bits >> 16) & 1)  # a tie carries only into an odd code
        return np.where(np.isnan(wide), 0x7FFF, bits >> 16).astype(np.uint16)


class Minifloat:
    """A float of at most 8 bits with saturation, as `cvt.rn.satfinite` has it.

    `finite` codes per sign hold finite values; above them stand infinity, if there is one, and
    NaN, which is encoded as all ones."""

    def __init__(self, exponent_bits: int, mantissa_bits: int, finite: int, infinity: bool) -> None:
        magnitudes = 1 << (exponent_bits + mantissa_bits)
        bias = (1 << (exponent_bits - 1)) - 1
        exponent, mantissa = np.divmod(np.arange(magnitudes), 1 << mantissa_bits)
        hidden = np.where(exponent == 0, 0, 1 << mantissa_bits)
        scale = np.maximum(exponent, 1) - bias - mantissa_bits
        positive = np.ldexp((hidden + mantissa).astype(np.float64), scale)
        positive[finite:] = np.nan
        if infinity:
            positive[finite] = np.inf
        self.values = np.concatenate([positive, -positive]).astype(np.float32)
        self.midpoints = (positive[: finite - 1] + positive[1:finite]) / 2
        self.nan, self.sign = magnitudes - 1, magnitudes

    def decode(self, codes: Array) -> Array:
        return self.values[codes.view(np.uint8)]

    def encode(self, values: Array, toward_zero: bool = False) -> Array:
        assert not toward_zero, "only rounding to nearest is emulated for fp8 and fp4"
        wide = np.asarray(values, np.float64)
        size = np.abs(wide)
        code = np.searchsorted(self.midpoints, size)  # a tie falls to the lower neighbour,
        last = len(self.midpoints) - 1
        tie = (size == self.midpoints[np.minimum(code, last)]) & (code <= last)
        code += tie & (code % 2 == 1)  # which is kept only if it is even
        code = np.where(np.isnan(wide), self.nan, code)
        return np.where(np.signbit(wide), code | self.sign, code).astype(np.uint8)


E2M1 = Minifloat(2, 1, finite=8, infinity=False)
NARROW: dict[tl.dtype, Bfloat16 | Minifloat] = {
    tl.bfloat16: Bfloat16(),
    tl.float8e4nv: Minifloat(4, 3, finite=127, infinity=False),
    tl.float8e5: Minifloat(5, 2, finite=124, infinity=True),
}


def is_narrow(handle: Any) -> bool:
    return handle.dtype.scalar in NARROW


def widen(handle: Any) -> Array:
    """The numbers of a handle: float32 for narrow floats, else the data as it is."""
    form = NARROW.get(handle.dtype.scalar)
    return handle.data if form is None else form.decode(handle.data)


def pack(values: Array, dtype: tl.dtype, toward_zero: bool = False) -> Any:
    """A handle of `dtype` from numbers."""
    scalar = dtype.scalar
    form = NARROW.get(scalar)
    if form is not None:
        return Handle(form.encode(values, toward_zero), scalar)
    return Handle(np.asarray(values).astype(stock._get_np_dtype(scalar)), scalar)


# ------------------------------------------------------------------------------- inline assembly
ASM: dict[str, Callable[..., Sequence[Array]]] = {}


def register_asm(text: str, emulation: Callable[..., Sequence[Array]]) -> None:
    """Let `emulation(*inputs)` stand for the assembly `text`: numpy in, one array a result out.

    Arrays hold the storage types (uint16 for bf16, uint8 for fp8)."""
    ASM[" ".join(text.split())] = emulation


@dataclass(frozen=True)
class _AsmResults:
    handles: Sequence[Any]

    def get_result(self, i: int) -> Any:
        return self.handles[i]


# -------------------------------------------------------------------------------- the interpreter
_COMPARISONS = (
    np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal,
)  # fmt: skip


class Builder(stock.InterpreterBuilder):
    """The interpreter's operations, narrow floats included."""

    # ------------------------------------------------------------------------------------ casts
    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        if is_narrow(src) or dst_type.scalar in NARROW:
            return pack(widen(src), dst_type)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if is_narrow(src) or dst_type.scalar in NARROW:
            return pack(widen(src), dst_type, rounding_mode == stock._ir.ROUNDING_MODE.RTZ)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def get_bf16(self, value: float) -> Any:
        return pack(np.array([value], np.float32), tl.bfloat16)

    # ------------------------------------------------------------------------------- arithmetic
    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if not is_narrow(lhs):
            return super().binary_op(lhs, rhs, op)
        result = op(widen(lhs), widen(rhs))
        kind = lhs.dtype.scalar
        return Handle(result, kind) if op in _COMPARISONS else pack(result, kind)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return pack(op(widen(arg)), arg.dtype) if is_narrow(arg) else super().unary_op(arg, op)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if not is_narrow(z):
            return super().create_fma(x, y, z)
        return pack(widen(x).astype(np.float64) * widen(y) + widen(z), z.dtype)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)  # as on the GPU: the operand that is not NaN

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        keeps_nan = propagate_nans == stock._ir.PROPAGATE_NAN.ALL
        low, high = (np.maximum, np.minimum) if keeps_nan else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, lo, low), hi, high)

    # --------------------------------------------------------------------------------- products
    def create_dot(self, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if not a.dtype.scalar.is_floating():
            return super().create_dot(a, b, d, *precision)
        wide = np.promote_types(np.float32, d.data.dtype if not is_narrow(d) else np.float32)
        return pack(np.matmul(widen(a), widen(b), dtype=wide) + widen(d), d.dtype)

    def create_dot_scaled(
        self, a: Any, a_scale: Any, a_form: Any, b: Any, b_scale: Any, b_form: Any,
        fast_math: bool, a_packs_k: bool, b_packs_k: bool, acc: Any,
    ) -> Any:  # fmt: skip
        lhs = _scaled(a, a_scale, a_form, -1, a_packs_k)
        rhs = _scaled(b, b_scale, b_form, -2, b_packs_k)
        return pack(np.matmul(lhs, rhs, dtype=np.float32) + widen(acc), acc.dtype)

    # ---------------------------------------------------------------------------------- atomics
    def create_atomic_rmw(
        self, kind: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if val.dtype.scalar != tl.bfloat16:
            return super().create_atomic_rmw(kind, ptr, val, mask, sem, scope)
        assert kind in (stock._ir.ATOMIC_OP.FADD, stock._ir.ATOMIC_OP.ADD), kind
        places, addends, wanted = np.broadcast_arrays(ptr.data, widen(val), mask.data)
        before = np.zeros(places.shape, np.uint16)
        yes, nothing = np.ones(1, bool), np.zeros(1, np.uint16)
        for at in np.argwhere(wanted):  # one after the other: places may repeat
            i = tuple(at)
            place = np.array([places[i]], np.uint64)
            old = stock._interpreter.load(place, yes, nothing, np.dtype(np.uint16))
            new = NARROW[tl.bfloat16].encode(NARROW[tl.bfloat16].decode(old) + addends[i])
            stock._interpreter.store(place, new, yes)
            before[i] = old[0]
        return Handle(before, tl.bfloat16)

    def create_descriptor_reduce(self, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        assert kind == stock._ir.DESCRIPTOR_REDUCE_KIND.ADD, f"descriptor reduction {kind}"
        ptrs, mask = desc.materialize_pointers(indices)
        mask = mask if isinstance(mask, Handle) else Handle(mask, tl.int1)
        add = "FADD" if value.dtype.scalar.is_floating() else "ADD"
        kind, relaxed = getattr(stock._ir.ATOMIC_OP, add), stock._ir.MEM_SEMANTIC.RELAXED
        self.create_atomic_rmw(kind, ptrs, value, mask, relaxed, None)

    # --------------------------------------------------------------------------------- assembly
    def create_inline_asm(
        self, text: str, constraints: str, values: Any, types: Any, is_pure: bool, lanes: int
    ) -> _AsmResults:
        emulation = ASM.get(" ".join(text.split()))
        if emulation is None:
            raise NotImplementedError("no emulation of this inline assembly is registered")
        results = emulation(*(v.data for v in values))
        return _AsmResults(
            [Handle(r.astype(stock._get_np_dtype(t)), t.scalar) for r, t in zip(results, types)]
        )


def _scaled(operand: Any, scale: Any, form: Any, k_axis: int, packs_k: bool) -> Array:
    """One operand of a scaled dot in float32, its scales ([rows, K / 16 or 32]) multiplied in."""
    if form == stock._ir.ScaleDotElemTypeTY.E2M1:
        axis = k_axis if packs_k else -3 - k_axis
        codes = np.moveaxis(operand.data.view(np.uint8), axis, -1)
        pairs = np.stack([codes & 15, codes >> 4], -1)  # the low nibble comes first
        values = np.moveaxis(E2M1.decode(pairs.reshape(*codes.shape[:-1], -1)), -1, axis)
    else:
        values = widen(operand)
    if scale is None:
        return values
    if scale.dtype.scalar.is_floating():
        factors = widen(scale)
    else:  # e8m0: a biased exponent, 255 is NaN
        exponents = scale.data.view(np.uint8).astype(np.int32)
        factors = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
        factors = np.where(exponents == 255, np.float32(np.nan), factors)
    factors = np.repeat(factors, values.shape[k_axis] // factors.shape[-1], axis=-1)
    return values * (factors if k_axis == -1 else np.swapaxes(factors, -1, -2))


def _in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction or scan over one tensor, computed in float32 and rounded once if it is narrow."""

    def call(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_narrow(tensor.handle):
            return method(self, tensor, *args, **kwargs)
        wide = self.to_tensor(widen(tensor.handle), tl.float32)
        result = method(self, wide, *args, **kwargs)
        if isinstance(result, list | tuple):
            return type(result)(_round(r, tensor.dtype) for r in result)
        return _round(result, tensor.dtype)

    return call


def _round(result: Any, dtype: tl.dtype) -> Any:
    if result.dtype != tl.float32:  # the index of an extremum
        return result
    kind = tl.block_type(dtype, result.shape) if result.type.is_block() else dtype
    return tl.core.tensor(pack(result.handle.data, dtype), kind)


class Reductions(stock.ReduceOps):
    sum = _in_float32(stock.ReduceOps.sum)
    min_max = _in_float32(stock.ReduceOps.min_max)


class Scans(stock.ScanOps):
    cumsum = _in_float32(stock.ScanOps.cumsum)
    cumprod = _in_float32(stock.ScanOps.cumprod)


class _Name(str):
    """A format's name that also answers `.value`, as Triton before 3.8 asks of it."""

    @property
    def value(self) -> str:
        return str(self)


class Semantic(stock.TritonSemantic):
    def dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any,
        *rest: Any,
    ) -> Any:  # fmt: skip
        left, right = (_Name(getattr(f, "value", f)) for f in (lhs_format, rhs_format))
        return super().dot_scaled(lhs, lhs_scale, left, rhs, rhs_scale, right, *rest)


def install() -> None:
    """Repair the interpreter of this process; a second call changes nothing."""
    np.seterr(over="ignore", invalid="ignore", divide="ignore")  # NaN and inf are ordinary here
    stock.InterpreterBuilder = Builder
    stock.ReduceOps, stock.ScanOps = Reductions, Scans
    stock.TritonSemantic = Semantic
    stock.interpreter_builder.__class__ = Builder
    stock.interpreter_semantic.__class__ = Semantic
