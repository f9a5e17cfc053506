"""Top-k, top-p and min-p as one threshold a row: the logit from which on tokens stay in play.

The filters apply in this order, each to what the one before left, at temperature > 0:

    top-k   keeps the logits >= the k-th largest (ties with it are kept); off at k <= 0 or k >= V
    top-p   keeps a token if the tokens with strictly larger logits hold less than top_p of the
            mass that top-k left: the smallest top set reaching top_p, whole ties kept, never
            empty; off at top_p >= 1
    min-p   keeps a token at least min_p times as probable as the likeliest; off at min_p <= 0

Each keeps the upper end of the logits (a temperature does not reorder them), so the largest of
three thresholds says it all; no sort. A token's mass is exp((x - max) / temperature) in units of
2^-40, made by integer arithmetic (a polynomial for the fraction's power of two, relative error
below 2e-6 with the rounding of the exponent) and summed as integers: exact, so the same in any
order and on every device, and a token on the edge falls to the same side everywhere.

NaN logits count as -inf and +inf as the largest float. Logits [R, V] fp32; temperature, top_p,
min_p [R] fp32; top_k [R] int32.
"""

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.op import Args, Case, Cost, KernelSpec, Tile, launch, next_pow2, op
from nemotriton.kernels.order import bits_value, order_bits

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
# 2^f on [0, 1) in units of 2^-30, by interpolation at Chebyshev nodes: relative error below 4e-9
C0, C1, C2, C3, C4, C5, C6 = EXP2 = tuple(
    map(tl.constexpr, (1073741824, 744260852, 257945486, 59571873, 10398316, 1330509, 234782))
)


# ------------------------------------------------------------------------------ logit_thresholds
def clean_ref(logits: torch.Tensor) -> torch.Tensor:
    """The logits as the sampler sees them: fp32, NaN -inf, +inf the largest float, one zero."""
    return logits.float().nan_to_num(-torch.inf, LARGEST.value, -torch.inf) + 0.0


def mass_ref(below: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp(below / temperature) in units of 2^-40, int64: below [R, n] fp32 <= 0, temperature [R].

    Every step is an integer or a single fp32 operation, so that no compiler can round it apart."""
    scale = (torch.full_like(temperature, LOG2E.value) / temperature).clamp_max(LARGEST.value)
    exponent = ((below * scale[:, None]).clamp_min(-62.0) * 2.0**24).long()
    fraction = (exponent & (2**24 - 1)) << 8
    m = torch.zeros_like(fraction)
    for c in reversed(EXP2):
        m = c.value + ((m * fraction) >> 32)
    return (m << 10) >> -(exponent >> 24)


def logit_thresholds_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Twin of `logit_thresholds`, by sorting."""
    _, V = check_rows(logits, temperature, top_k, top_p, min_p)
    temperature, floor = temperature.float(), min_p.double()
    x = clean_ref(logits).sort(-1, descending=True).values
    top = x[:, :1].clamp_min(-LARGEST.value)
    k = torch.where((top_k <= 0) | (top_k >= V), V, top_k).long()
    kth = x.gather(-1, k[:, None] - 1)
    threshold = torch.where(k == V, -torch.inf, kth[:, 0])
    warm = torch.where(temperature > 0, temperature, 1.0)
    mass = torch.where(x >= kth, mass_ref(x - top, warm), 0)
    first_equal = torch.searchsorted(-x, -x)
    above = (mass.cumsum(-1) - mass).gather(-1, first_equal)
    target = (top_p.float().double() * mass.sum(-1)).ceil().long().clamp_min(1)
    nucleus = torch.where((above < target[:, None]) & (x >= kth), x, torch.inf).amin(-1)
    threshold = torch.where(top_p < 1, torch.maximum(threshold, nucleus), threshold)
    lowest = (top[:, 0].double() + warm.double() * floor.clamp_min(1e-300).log()).float()
    lowest = torch.minimum(lowest, top[:, 0])
    threshold = torch.where(min_p > 0, torch.maximum(threshold, lowest), threshold)
    return torch.where(temperature > 0, threshold, -torch.inf)


def check_rows(logits: torch.Tensor, *per_row: torch.Tensor) -> tuple[int, int]:
    """(R, V) of the logits, once every parameter has a value a row."""
    require(logits.ndim == 2, f"logits must be [rows, vocabulary], got {tuple(logits.shape)}")
    R, V = logits.shape
    require(V > 0, "the vocabulary is empty")
    for p in per_row:
        require(p.shape == (R,), f"a sampling parameter of shape {tuple(p.shape)} for {R} rows")
    return R, V


@triton.jit
def load_logits(row_ptr, v, V: tl.constexpr):
    """The logits v of a row as `clean_ref` has them; -inf beyond the vocabulary."""
    x = tl.load(row_ptr + v, mask=v < V, other=float("-inf"))
    return tl.where(x == x, tl.minimum(x, LARGEST), float("-inf"))


@triton.jit
def _mass(below, scale):
    """Twin: `mass_ref`; scale is log2(e) / temperature."""
    exponent = (tl.maximum(below * scale, -62.0) * 16777216.0).to(tl.int32)
    fraction = (exponent & 0xFFFFFF).to(tl.uint32) << 8
    m = tl.full(below.shape, C6, tl.uint32)
    m = tl.umulhi(m, fraction) + C5
    m = tl.umulhi(m, fraction) + C4
    m = tl.umulhi(m, fraction) + C3
    m = tl.umulhi(m, fraction) + C2
    m = tl.umulhi(m, fraction) + C1
    m = tl.umulhi(m, fraction) + C0
    return (m.to(tl.int64) << 10) >> (-(exponent >> 24)).to(tl.int64)


@triton.jit
def _row_max(row_ptr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for v0 in range(0, V, BLOCK_V):
        best = tl.maximum(best, load_logits(row_ptr, v0 + tl.arange(0, BLOCK_V), V))
    return tl.maximum(tl.max(best, 0), -LARGEST)


@triton.jit
def _count_search(row_ptr, need, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The largest order (int64) that at least `need` logits of the row reach: four bits a pass."""
    digit = tl.arange(0, 16).to(tl.int64)
    found = tl.full([], -2147483648, tl.int64)
    for i in range(8):
        at = (found + (digit << (28 - 4 * i))).to(tl.int32)
        held = tl.zeros([BLOCK_V, 16], tl.int32)
        for v0 in range(0, V, BLOCK_V):
            v = v0 + tl.arange(0, BLOCK_V)
            order = order_bits(load_logits(row_ptr, v, V))
            held += ((order[:, None] >= at[None, :]) & (v < V)[:, None]).to(tl.int32)
        reached = (tl.sum(held, 0) >= need).to(tl.int64)
        found += tl.maximum(tl.sum(reached, 0) - 1, 0) << (28 - 4 * i)
    return found


@triton.jit
def _mass_search(row_ptr, least, share, top, scale, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The largest order that `share` of the mass reaches, of the logits of order >= `least`."""
    total = tl.zeros([BLOCK_V], tl.int64)
    for v0 in range(0, V, BLOCK_V):
        x = load_logits(row_ptr, v0 + tl.arange(0, BLOCK_V), V)
        total += tl.where(order_bits(x) >= least, _mass(x - top, scale), 0)
    need = tl.ceil(share.to(tl.float64) * tl.sum(total, 0).to(tl.float64)).to(tl.int64)
    need = tl.maximum(need, 1)
    digit = tl.arange(0, 16).to(tl.int64)
    found = tl.full([], -2147483648, tl.int64)
    for i in range(8):
        at = (found + (digit << (28 - 4 * i))).to(tl.int32)
        held = tl.zeros([BLOCK_V, 16], tl.int64)
        for v0 in range(0, V, BLOCK_V):
            x = load_logits(row_ptr, v0 + tl.arange(0, BLOCK_V), V)
            order = order_bits(x)
            mass = tl.where(order >= least, _mass(x - top, scale), 0)
            held += tl.where(order[:, None] >= at[None, :], mass[:, None], 0)
        reached = (tl.sum(held, 0) >= need).to(tl.int64)
        found += tl.maximum(tl.sum(reached, 0) - 1, 0) << (28 - 4 * i)
    return found


@triton.jit
def _logit_thresholds(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    threshold_ptr,
    logits_stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = logits_ptr + r * logits_stride
    heat, k = tl.load(temperature_ptr + r), tl.load(top_k_ptr + r)
    p, m = tl.load(top_p_ptr + r), tl.load(min_p_ptr + r)
    few = (k > 0) & (k < V)
    threshold = tl.full([], float("-inf"), tl.float32)
    if (heat > 0) & (few | (p < 1) | (m > 0)):
        top = _row_max(row, V, BLOCK_V)
        least = tl.full([], -2147483648, tl.int64)
        if few:
            least = _count_search(row, k, V, BLOCK_V)
        if p < 1:
            scale = tl.minimum(tl.div_rn(tl.full([], LOG2E, tl.float32), heat), LARGEST)
            least = tl.maximum(least, _mass_search(row, least, p, top, scale, V, BLOCK_V))
        threshold = bits_value(least.to(tl.int32))
        if m > 0:
            ratio = tl.log(tl.maximum(m.to(tl.float64), 1e-300))
            lowest = (top.to(tl.float64) + heat.to(tl.float64) * ratio).to(tl.float32)
            threshold = tl.maximum(threshold, tl.minimum(lowest, top))
    tl.store(threshold_ptr + r, threshold)


@op(ref=logit_thresholds_ref)
def logit_thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The logit [R] fp32 from which on a row's tokens stay in play (-inf: all).

    logits [R, V] fp32; temperature, top_p, min_p [R] fp32; top_k [R] int32. A row without filters
    costs nothing; top-k reads its logits 9 times, top-p 10 (18 together), from L2."""
    R, V = check_rows(logits, temperature, top_k, top_p, min_p)
    require(logits.dtype == torch.float32, f"logits must be float32, got {logits.dtype}")
    require(logits.stride(1) == 1, "logits must have unit stride along the vocabulary")
    threshold = torch.empty((R,), dtype=torch.float32, device=logits.device)
    tile = LOGIT_THRESHOLDS.tile(R, logits, V=V)
    args = (logits, temperature, top_k, top_p, min_p, threshold, logits.stride(0), V)
    launch(_logit_thresholds, (R,), *args, **as_dependent(logits), **tile)
    return threshold


def sampling_args(case: Case, R: int, dev: torch.device, rng: torch.Generator) -> Args:
    """Logits with ties, a masked stretch and one sick value; every mix of the parameters."""
    logits = torch.randn(R, case.V, device=dev, generator=rng) * 3
    logits[:, ::2] = logits[:, ::2].mul(4).round().div(4)
    logits[1::3, case.V // 3 : case.V // 2] = -torch.inf
    logits[2::5, case.V // 2] = torch.nan

    def cycle(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([values[r % len(values)] for r in range(R)], dtype=dtype, device=dev)

    return {
        "logits": logits,
        "temperature": cycle([1.0, 0.7, 0.0, 1.0, 1.6]),
        "top_k": cycle([0, 7, -1, 1, 50, case.V, 3], torch.int32),
        "top_p": cycle([0.95, 1.0, 0.5, 0.9]),
        "min_p": cycle([0.0, 0.05, 0.0]),
    }


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    return sampling_args(case, T, dev, rng)


LOGIT_THRESHOLDS = KernelSpec(
    op=logit_thresholds,
    kernels=(_logit_thresholds,),
    cases=lambda config: [Case(V=config.vocab)],
    small=[Case(V=130), Case(V=1100), Case(V=17)],
    small_tokens=(0, 1, 9),
    tokens=(1, 4, 16, 64, 256, 1024),
    make=_make,
    tiles=lambda case: [
        Tile(BLOCK_V=b, num_warps=w, num_stages=1)
        for b in (512, 1024, 2048)
        for w in (8, 16, 32)
        if b // w <= 64 and b * w <= 32768  # the rest spills
    ],
    default=lambda case, tokens: Tile(
        BLOCK_V=min(1024, next_pow2(case.V)), num_warps=16, num_stages=1
    ),
    fixed=UNORDERED,
    cost=lambda case, T, dtype: Cost(20 * T * case.V, 4 * T * case.V),
    dtypes=("fp32",),
    per_token=("logits",),
    strided=("logits",),
)
