"""One token a row from logits: temperature, top-k, top-p, min-p, and a seeded pick.

Temperature 0 (or below) takes the largest logit, ties to the lowest id. Above 0 the tokens whose
logit reaches `logit_thresholds` (see there for the filters) compete by Gumbel-max: argmax of
x + temperature * g, ties to the lowest id, where g = -log(-log(u)) in float64 and u comes from word
(id mod 4) of Philox4x32-10 (Salmon et al. 2011) with key = seed and counter = (id div 4, 0,
position). A row's draw so depends on its own logits, seed and position alone, never on its
neighbours or on how the work was cut. Float64 logs are the one step that two devices may round
apart, by 1e-16 of a value.

NaN logits count as -inf and +inf as the largest float; a row with nothing above -inf gives id 0.
Logits [R, V] fp32; temperature, top_p, min_p [R] fp32; top_k [R] int32; seeds, positions [R] int64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.numerics import WORD, philox_ref
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    cdiv,
    launch,
    next_pow2,
    op,
)
from nemotriton.kernels.order import top_indices
from nemotriton.kernels.thresholds import (
    check_rows,
    clean_ref,
    load_logits,
    logit_thresholds,
    logit_thresholds_ref,
    sampling_args,
)


# --------------------------------------------------------------------------------- sample_tokens
def gumbel_ref(seeds: torch.Tensor, positions: torch.Tensor, V: int) -> torch.Tensor:
    """The noise g [R, V] float64 of rows with these seeds and positions [R]."""
    quad = torch.arange((V + 3) // 4, device=seeds.device)
    seed, position = seeds[:, None], positions[:, None]
    zero = torch.zeros_like(quad)
    words = philox_ref(seed, (quad, zero, position & WORD, position >> 32 & WORD))
    draw = torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2)[:, :V]
    return -(-((draw.double() + 0.5) * 2.0**-32).log()).log()


def sample_tokens_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Twin of `sample_tokens`."""
    _, V = check_rows(logits, temperature, top_k, top_p, min_p, seeds, positions)
    threshold = logit_thresholds_ref(logits, temperature, top_k, top_p, min_p)
    x, heat = clean_ref(logits), temperature.float().double()[:, None].clamp_min(0)
    value = torch.where(
        x >= threshold[:, None], x + heat * gumbel_ref(seeds, positions, V), -torch.inf
    )
    value = torch.where(heat > 0, value, x.double())
    ids = torch.arange(V, device=logits.device)
    return torch.where(value == value.amax(-1, keepdim=True), ids, V).amin(-1)


@triton.jit
def _gumbel(seed, position, quad, BLOCK_V: tl.constexpr):
    """The noise of ids 4*quad, 4*quad + 1, ...: float64 [BLOCK_V] from quad [BLOCK_V / 4]."""
    zero = tl.zeros_like(quad)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, quad, zero, zero + low, zero + high)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK_V])
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return -tl.log(-tl.log(u))


@triton.jit
def _pick(
    logits_ptr,
    temperature_ptr,
    threshold_ptr,
    seeds_ptr,
    positions_ptr,
    values_ptr,
    best_ptr,
    logits_stride,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best id of one block of one row, and its value."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(V, BLOCK_V)
    r, block = pid // blocks, pid % blocks
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    heat, threshold = tl.load(temperature_ptr + r), tl.load(threshold_ptr + r)
    x = load_logits(logits_ptr + r * logits_stride, v, V)
    value = tl.where(heat > 0, float("-inf"), x.to(tl.float64))
    if (heat > 0) & (tl.max(x, 0) >= threshold):  # else no token of the block is in play
        quad = (block * (BLOCK_V // 4) + tl.arange(0, BLOCK_V // 4)).to(tl.uint32)
        noise = _gumbel(tl.load(seeds_ptr + r), tl.load(positions_ptr + r), quad, BLOCK_V)
        drawn = x.to(tl.float64) + heat.to(tl.float64) * noise
        value = tl.where(x >= threshold, drawn, float("-inf"))
    best, at = tl.max(value, 0, return_indices=True)
    tl.store(values_ptr + pid, best)
    tl.store(best_ptr + pid, block * BLOCK_V + at)


@triton.jit
def _pick_row(
    values_ptr, best_idx, ids_ptr, BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr
):
    """The best of a row's blocks, ties to the first."""
    r = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b = tl.arange(0, BLOCK_B)
    value = tl.load(values_ptr + r * BLOCKS + b, mask=b < BLOCKS, other=float("-inf"))
    _, at = tl.max(value, 0, return_indices=True)
    tl.store(ids_ptr + r, tl.load(best_idx + r * BLOCKS + at).to(tl.int64))


@op(ref=sample_tokens_ref)
def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Pick one id [R] int64 a row; see the module's docstring.

    logits [R, V] fp32; temperature, top_p, min_p [R] fp32; top_k [R] int32; seeds [R] int64, any
    value; positions [R] int64, the index the new token will have in its sequence."""
    R, V = check_rows(logits, temperature, top_k, top_p, min_p, seeds, positions)
    for name, t in (("seeds", seeds), ("positions", positions)):
        require(t.dtype == torch.int64, f"{name} must be int64, got {t.dtype}")
    threshold = logit_thresholds(logits, temperature, top_k, top_p, min_p)
    tile = SAMPLE_TOKENS.tile(R, logits, V=V)
    blocks = cdiv(V, int(tile["BLOCK_V"]))
    values = torch.empty((R, blocks), dtype=torch.float64, device=logits.device)
    best = torch.empty((R, blocks), dtype=torch.int32, device=logits.device)
    ids = torch.empty((R,), dtype=torch.int64, device=logits.device)
    args = (logits, temperature, threshold, seeds, positions, values, best, logits.stride(0), V)
    late = as_dependent(logits)
    launch(_pick, (R * blocks,), *args, **late, **tile)
    row = {"BLOCK_B": next_pow2(blocks), "num_warps": 1}
    launch(_pick_row, (R,), values, best, ids, blocks, **row, **late)
    return ids


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    rows = torch.arange(T, device=dev)
    return sampling_args(case, T, dev, rng) | {
        "seeds": (rows - 1) * 0x123456789ABCDEF,  # of both signs, both words full
        "positions": rows * 7 + (rows % 2 << 33),
    }


SAMPLE_TOKENS = KernelSpec(
    op=sample_tokens,
    kernels=(_pick, _pick_row),
    cases=lambda config: [Case(V=config.vocab)],
    small=[Case(V=300), Case(V=17), Case(V=130)],
    small_tokens=(0, 1, 9),
    tokens=(1, 4, 16, 64, 256, 1024),
    make=_make,
    tiles=lambda case: [
        Tile(BLOCK_V=b, num_warps=w, num_stages=1)
        for b in (512, 1024, 2048, 4096)
        for w in (2, 4, 8, 16)
        if 2 <= b // (32 * w) <= 16
    ],
    default=lambda case, tokens: Tile(
        BLOCK_V=max(32, min(2048, next_pow2(case.V) // 2)), num_warps=8, num_stages=1
    ),
    fixed=UNORDERED,
    cost=lambda case, T, dtype: Cost(50 * T * case.V, 4 * T * case.V),
    dtypes=("fp32",),
    per_token=("logits",),
    strided=("logits",),
)


# --------------------------------------------------------------------------------------- logprobs
class Logprobs(NamedTuple):
    """Log-probabilities of rows: of every id [R, V], and the n best ids [R, n] with theirs."""

    every: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


def token_logprobs(logits: torch.Tensor, n: int) -> Logprobs:
    """log_softmax of logits [R, V] in fp32 and its n largest entries, ties to the lowest id.

    Plain PyTorch: a request for logprobs leaves the fast path. Give it the logits before
    temperature and filters for the model's own log-probabilities."""
    every = torch.log_softmax(logits.float(), -1)
    ids = top_indices(every, min(n, logits.shape[1]))
    return Logprobs(every, every.gather(-1, ids), ids)
