"""One token a row from logits: temperature, top-k, top-p, min-p, and a seeded pick.

Temperature 0 takes the largest logit, ties to the lowest id. Above 0 the filters apply in this
order, each to what the one before left:

    top-k   keeps the logits >= the k-th largest (ties with it are kept); off at k <= 0 or k >= V
    top-p   keeps a token if the tokens with strictly larger logits hold less than top_p of the
            mass that top-k left: the smallest top set reaching top_p, whole ties kept, never
            empty; off at top_p >= 1
    min-p   keeps a token at least min_p times as probable as the likeliest; off at min_p <= 0

As temperature > 0 does not reorder logits, all three together are one threshold on the raw logit,
`logit_thresholds`. The token's mass is a 40-bit fixed-point exp((x - max) / temperature), made by
integer arithmetic and summed as integers: exact, so in any order, and equal on every device.

The pick is Gumbel-max: argmax of x + temperature * g over the kept ids, ties to the lowest, where
g = -log(-log(u)) in float64 and u comes from word (id mod 4) of Philox4x32-10 (Salmon et al. 2011)
with key = seed and counter = (id div 4, 0, position): a row's draw depends on its own logits, seed
and position alone, never on its neighbours or on how the work was cut. (Floating-point logs are
the one step that devices may round apart, by 1e-16 of the value.)

NaN logits count as -inf and +inf as the largest float; a row with nothing above -inf gives id 0.
Logits [R, V] fp32; temperature, top_p, min_p [R] fp32; top_k [R] int32; seeds, positions [R] int64.
"""

from typing import NamedTuple

import torch

from nemotriton.errors import UnsupportedError, require
from nemotriton.kernels.op import op
from nemotriton.kernels.order import top_indices

LARGEST = torch.finfo(torch.float32).max
LOG2E = 1.4426950408889634
# 2^f on [0, 1) in units of 2^-30, from Chebyshev nodes: relative error below 4e-9
EXP2 = (1073741824, 744260852, 257945486, 59571873, 10398316, 1330509, 234782)
WORD = 2**32 - 1


# ------------------------------------------------------------------------------ logit_thresholds
def mass_ref(below: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp(below / temperature) in units of 2^-40, int64: below [R, n] fp32 <= 0, temperature [R].

    Every step is an integer or a single fp32 operation, so that no compiler can round it apart."""
    scale = (torch.full_like(temperature, LOG2E) / temperature).clamp_max(LARGEST)
    exponent = ((below * scale[:, None]).clamp_min(-62.0) * 2.0**24).long()
    fraction = (exponent & (2**24 - 1)) << 8
    m = torch.full_like(fraction, EXP2[-1])
    for c in EXP2[-2::-1]:
        m = c + ((m * fraction) >> 32)
    return (m << 10) >> -(exponent >> 24)


def logit_thresholds_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Twin of `logit_thresholds`."""
    V = logits.shape[1]
    temperature, floor = temperature.float(), min_p.double()
    x = _clean(logits).sort(-1, descending=True).values
    top = x[:, :1].clamp_min(-LARGEST)
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


def _clean(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().nan_to_num(-torch.inf, LARGEST, -torch.inf) + 0.0


@op(ref=logit_thresholds_ref)
def logit_thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The logit [R] fp32 from which on a row's tokens stay in play (-inf: all).

    logits [R, V] fp32; temperature, top_p, min_p [R] fp32; top_k [R] int32."""
    raise UnsupportedError("logit_thresholds has no kernel yet; use(logit_thresholds='ref')")


# --------------------------------------------------------------------------------- sample_tokens
def philox_ref(
    seed: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10: four random words (int64 in 0..2^32-1) of a 64-bit key and four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps as the 64-bit product must
        c0, c1, c2, c3 = (b >> 32 & WORD) ^ c1 ^ k0, b & WORD, (a >> 32 & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


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
    _check(logits, temperature, top_k, top_p, min_p, seeds, positions)
    V = logits.shape[1]
    threshold = logit_thresholds_ref(logits, temperature, top_k, top_p, min_p)
    x, heat = _clean(logits), temperature.float().double()[:, None].clamp_min(0)
    value = torch.where(
        x >= threshold[:, None], x + heat * gumbel_ref(seeds, positions, V), -torch.inf
    )
    value = torch.where(heat > 0, value, x.double())
    ids = torch.arange(V, device=logits.device)
    return torch.where(value == value.amax(-1, keepdim=True), ids, V).amin(-1)


def _check(logits: torch.Tensor, *per_row: torch.Tensor) -> tuple[int, int]:
    require(logits.ndim == 2, f"logits must be [rows, vocabulary], got {tuple(logits.shape)}")
    R, V = logits.shape
    require(V > 0, "the vocabulary is empty")
    for p in per_row:
        require(p.shape == (R,), f"a sampling parameter of shape {tuple(p.shape)} for {R} rows")
    return R, V


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
    raise UnsupportedError("sample_tokens has no Triton kernel yet; use(sample_tokens='ref')")


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
