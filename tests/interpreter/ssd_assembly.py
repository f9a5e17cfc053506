"""What the packed bf16 instructions of the fused scan compute, for the interpreter.

Arrays hold bf16 as uint16. Products and sums are exact in float64, so each rounding below is the
instruction's one."""

import numpy as np
import triton.language as tl

from nemotriton.kernels.ssd_blocks import DECAYED, LOG2, WEIGHTED
from tests.interpreter.repair import NARROW, Array, register_asm

BF16 = NARROW[tl.bfloat16]
LARGEST = np.float32(2.0**127 * (2 - 2.0**-7))


def rounded(values: Array) -> Array:
    return BF16.decode(BF16.encode(values.astype(np.float32)))


def decayed(scores: Array, cum: Array, fold: Array) -> list[Array]:
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp2(cum - fold)
        e = np.where(e < np.finfo(np.float32).tiny, np.float32(0), e)  # .ftz
        e = rounded(np.where(np.isinf(e), LARGEST, e))
        e = np.where(np.isinf(e), LARGEST, e)  # satfinite: what rounds up past the largest, too
        return [BF16.encode((BF16.decode(scores) * e).astype(np.float32))]


def weighted(x: Array, high: Array, low: Array) -> list[Array]:
    with np.errstate(over="ignore", invalid="ignore"):
        x, high, low = (BF16.decode(v).astype(np.float64) for v in (x, high, low))
        return [BF16.encode((x * high + rounded(x * low)).astype(np.float32))]


def log2(x: Array) -> list[Array]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return [np.log2(np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x))]


def register() -> None:
    register_asm(LOG2.value, log2)
    register_asm(DECAYED.value, decayed)
    register_asm(WEIGHTED.value, weighted)
