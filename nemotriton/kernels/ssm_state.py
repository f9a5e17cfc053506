"""How a recurrent state is stored: formats, stochastic rounding, and a scale a row.

A row is the N numbers of one (head, p) of a state [H, P, N]. It is stored as

    float32, bfloat16, float16  the nearest number of the format
    float16-sr                  one of the two fp16 numbers around h: stochastic rounding
    int16, int8                 code = round(h / scale), scale = max |row| / 32767 or / 127: one
                                fp32 a row

Stochastic rounding takes the upper neighbour with the probability of the part that lies above the
lower one. So its mean is h, and increments smaller than half a spacing, which rounding to the
nearest drops every time, count on average. The noise is 13 bits an element, as many as fp16 drops
of fp32; subnormal numbers too are rounded to 13 bits below fp16's spacing first. It is drawn by
Philox4x32-7 (Salmon et al. 2011; seven rounds are the fewest that pass BigCrush) with the request's
seed as key and the counter (row * ceil(N / 8) + n div 8, 1 + layer, position, 0): n mod 8 picks the
half of a word, low halves first. So it depends on the request, the layer, the position of the token
behind which the state is stored and the element, never on the batch, the slot or the number of
launches: a position rounds alike whether it is decoded, verified again after a rollback, or
replayed. (The sampler's counters have 0 where these have 1 + layer.)

Beyond what fp16 holds the state saturates; NaN stays NaN. In a scaled row it makes NaN of the whole
row, and so does an infinite element. A scale below fp32's normal numbers makes the row zeros. Rows
are rounded whole, as fp32 tiles [R, BLOCK_N] with zeros beyond N, BLOCK_N a power of two (at least
8 for stochastic rounding).

The twins are bit-equal to the jit functions. Given doubles stored as doubles they round nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.numerics import philox_ref

NOISE_GROUP = tl.constexpr(8)  # elements a call of Philox serves
NOISE_ROUNDS = tl.constexpr(7)
FP16_MAX = tl.constexpr(65504.0)
TINY = tl.constexpr(2.0**-126)  # the smallest normal fp32
CODE_MAX = {torch.int16: 32767, torch.int8: 127}
_INT16_MAX, _INT8_MAX = tl.constexpr(32767.0), tl.constexpr(127.0)
# adding 1.5 * 2^23 to a small number leaves no bits behind the point: its low bits are the integer
_UNIT = tl.constexpr(12582912.0)
_DROPPED = tl.constexpr(0x1FFF)  # the bits of fp32 that fp16 has not
_SIGN = tl.constexpr(-(2**31))
# 2^-14, the smallest normal fp16 number: added to a smaller one it fixes the exponent, so that the
# same bits are dropped
_PIN = tl.constexpr(2.0**-14)
_PIN_BITS = tl.constexpr(0x38800000)


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How states are stored: elements of `dtype`, rounded to the nearest or stochastically.

    `axis` is the name in a kernel's cases and tuning tables."""

    name: str
    axis: str
    dtype: torch.dtype
    stochastic: bool = False

    @property
    def scaled(self) -> bool:
        """Whether every row has an fp32 scale beside its elements."""
        return self.dtype in CODE_MAX

    def row_bytes(self, N: int) -> int:
        """Bytes of one row of N elements, its scale included."""
        return N * self.dtype.itemsize + 4 * self.scaled


STATE_FORMATS = {
    f.name: f
    for f in (
        StateFormat("float32", "fp32", torch.float32),
        StateFormat("bfloat16", "bf16", torch.bfloat16),
        StateFormat("float16", "fp16", torch.float16),
        StateFormat("float16-sr", "fp16-sr", torch.float16, stochastic=True),
        StateFormat("int16", "int16", torch.int16),
        StateFormat("int8", "int8", torch.int8),
    )
}


STATE_AXES = {f.axis: f for f in STATE_FORMATS.values()}


class StateNoise(NamedTuple):
    """What stochastic rounding is drawn from: seeds int64 [S], one a sequence of the call; lengths
    int32 [S], the tokens of a sequence once the call is over, so that the last of its new tokens
    has position lengths - 1; and the number of the layer."""

    seeds: torch.Tensor
    lengths: torch.Tensor
    layer: int


def state_axis(state: torch.Tensor, noise: StateNoise | None) -> str:
    """The name in STATE_AXES of what a state is stored as."""
    for axis, fmt in STATE_AXES.items():
        if fmt.dtype == state.dtype and fmt.stochastic == (noise is not None):
            return axis
    return "?"


def check_state(
    state: torch.Tensor, scales: torch.Tensor | None, noise: StateNoise | None, sequences: int
) -> None:
    """Raise UnsupportedError unless scales and noise fit the dtype of state [cells, H, P, N]."""
    if state.dtype in CODE_MAX:
        require(
            scales is not None
            and scales.shape == state.shape[:-1]
            and scales.dtype in (torch.float32, torch.float64)
            and scales[:1].is_contiguous(),
            f"a state of {state.dtype} needs fp32 scales {tuple(state.shape[:-1])} with contiguous "
            f"slots, got {None if scales is None else (tuple(scales.shape), scales.dtype)}",
        )
    else:
        require(scales is None, f"a state of {state.dtype} has no scales")
    if noise is not None:
        # float64 is the oracle's, which rounds nothing
        require(
            state.dtype in (torch.float16, torch.float64) and state.shape[-1] >= 8,
            f"stochastic rounding is for fp16 states of 8 or more columns, not {state.dtype} of "
            f"{state.shape[-1]}",
        )
        for name, value, dtype in (
            ("seeds", noise.seeds, torch.int64),
            ("lengths", noise.lengths, torch.int32),
        ):
            require(
                value.shape == (sequences,) and value.dtype == dtype,
                f"{name} must be {dtype} [{sequences}], got {value.dtype} {tuple(value.shape)}",
            )


# ------------------------------------------------------------------------------------------ twins
def state_noise_ref(
    seed: int,
    position: int,
    layer: int,
    rows: int,
    N: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Twin of `state_noise` for rows 0 .. rows-1: int32 [rows, N] in 0 .. 8191."""
    groups = -(-N // NOISE_GROUP.value)
    counter = torch.arange(rows * groups, device=device)
    same = torch.zeros_like(counter)
    words = torch.stack(
        philox_ref(
            same + seed, (counter, same + 1 + layer, same + position, same), NOISE_ROUNDS.value
        ),
        -1,
    )
    halves = torch.stack((words, words >> 16), -1).reshape(rows, -1)
    return (halves & _DROPPED.value).int()[:, :N]


def round_state_ref(
    h: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Twin of `round_state`: rows h [..., N] fp32 -> (elements of `dtype`, scales [...] or None).

    noise: 0 .. 8191 as h, from `state_noise_ref`, for fp16; None rounds to the nearest."""
    if dtype == torch.float64:
        return h.double(), None
    if dtype in CODE_MAX:
        scale = h.abs().amax(-1) / CODE_MAX[dtype]
        inverse = torch.where(scale >= TINY.value, 1.0 / scale, 0.0)
        return (h * inverse[..., None]).round().nan_to_num(0.0).to(dtype), scale
    if dtype != torch.float16:
        return h.to(dtype), None
    h = h.clamp(-FP16_MAX.value, FP16_MAX.value)
    if noise is not None:
        pin = torch.where(h.abs() < _PIN.value, torch.full_like(h, _PIN.value).copysign(h), 0.0)
        bits = ((h + pin).view(torch.int32) + noise) & ~_DROPPED.value
        h = torch.where(h.isnan(), h, bits.view(torch.float32) - pin)
    return h.to(dtype), None


def restore_state_ref(
    stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Twin of `restore_state`: a copy of the numbers meant by stored [..., N], in `dtype`."""
    h = stored.to(dtype, copy=True)
    return h if scales is None else h * scales[..., None].to(dtype)


def read_state_ref(
    state: torch.Tensor, scales: torch.Tensor | None, cell: int, dtype: torch.dtype
) -> torch.Tensor:
    """A copy of the state [H, P, N] of one cell of state [cells, H, P, N] as numbers of `dtype`."""
    return restore_state_ref(state[cell], None if scales is None else scales[cell], dtype)


def write_state_ref(
    stored: torch.Tensor,
    stored_scales: torch.Tensor | None,
    state: torch.Tensor | None,
    scales: torch.Tensor | None,
    *cell: int,
) -> None:
    """Put what `round_state_ref` returned into a cell; nothing where there is no `state`."""
    if state is not None:
        state[cell] = stored.to(state.dtype)
    if scales is not None and stored_scales is not None:
        scales[cell] = stored_scales


def drawn_ref(
    noise: StateNoise | None, s: int, offset: int, h: torch.Tensor
) -> torch.Tensor | None:
    """Noise for sequence s's h [H, P, N] at `offset` tokens from its end, -1 being the last."""
    if noise is None:
        return None
    position, (rows, N) = int(noise.lengths[s]) + offset, h.flatten(0, 1).shape
    drawn = state_noise_ref(int(noise.seeds[s]), position, noise.layer, rows, N, h.device)
    return drawn.view(h.shape)


# --------------------------------------------------------------------------------- jit functions
@triton.jit
def load_state(state_at, scales_ptr, scale_offsets, mask, mask_rows):
    """Rows of a state as fp32 [R, BLOCK_N], zeros where masked.

    state_at [R, BLOCK_N] pointers and mask; scales_ptr, or None for an unscaled format, with the
    rows' offsets [R] and mask."""
    stored = tl.load(state_at, mask=mask, other=0)
    scale = tl.full((), 1.0, tl.float32)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + scale_offsets, mask=mask_rows, other=0.0)
    return restore_state(stored, scale, scales_ptr)


@triton.jit
def restore_state(stored, scale, scales_ptr):
    """The fp32 numbers meant by what `round_state` returned."""
    h = stored.to(tl.float32)
    if scales_ptr is not None:
        h = h * scale[:, None]
    return h


@triton.jit
def store_state(stored, scale, state_at, scales_ptr, scale_offsets, mask, mask_rows):
    """Write what `round_state` returned; the arguments are those of `load_state`."""
    tl.store(state_at, stored, mask=mask)
    if scales_ptr is not None:
        tl.store(scales_ptr + scale_offsets, scale, mask=mask_rows)


@triton.jit
def state_noise(seed, position, layer, rows, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Noise of whole rows: int32 [R, BLOCK_N] in 0 .. 8191.

    seed int64, position (of the token behind which the state is stored) and layer: scalars. rows
    [R]: head * P + p. Eight elements share a call of Philox."""
    groups: tl.constexpr = (N + NOISE_GROUP - 1) // NOISE_GROUP
    column = tl.arange(0, BLOCK_N // NOISE_GROUP)
    counter = (rows[:, None] * groups + column[None, :]).to(tl.uint32)
    zero = tl.zeros_like(counter)
    c1, c2 = zero + (layer + 1).to(tl.uint32), zero + position.to(tl.uint32)
    w0, w1, w2, w3 = _philox(seed, counter, c1, c2, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & _DROPPED, (words >> 16) & _DROPPED)
    return tl.reshape(halves, [rows.shape[0], BLOCK_N]).to(tl.int32)


@triton.jit
def _philox(seed, c0, c1, c2, c3):
    """Philox4x32 by products of 64 bits: one instruction where two halves of them would be two."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(NOISE_ROUNDS):
        a, b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def round_state(h, state_ptr, scales_ptr, noise):
    """Rows h fp32 [R, BLOCK_N] as they are stored: (elements of state_ptr's type, scales [R]).

    scales_ptr: None for an unscaled format, whose scales are a meaningless scalar. noise: int32 of
    h's shape from `state_noise`, for fp16; None rounds to the nearest."""
    element: tl.constexpr = state_ptr.dtype.element_ty
    scale = tl.full((), 1.0, tl.float32)
    if scales_ptr is not None:
        most: tl.constexpr = _INT8_MAX if element == tl.int8 else _INT16_MAX
        # as integers, since their maximum lets NaN win
        peak = tl.max(h.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
        scale = tl.div_rn(peak, tl.full(peak.shape, most, tl.float32))
        some = scale >= TINY
        inverse = tl.where(some, tl.div_rn(1.0, tl.where(some, scale, 1.0)), 0.0)
        stored = (h * inverse[:, None] + _UNIT).to(tl.int32, bitcast=True).to(element)
    elif element == tl.float16:
        h = tl.minimum(h, FP16_MAX, propagate_nan=tl.PropagateNan.ALL)
        h = tl.maximum(h, -FP16_MAX, propagate_nan=tl.PropagateNan.ALL)
        if noise is not None:
            h = _round_up_or_down(h, noise)
        stored = h.to(element)
    else:
        tl.static_assert(noise is None, "stochastic rounding is for fp16")
        stored = h.to(element)
    return stored, scale


@triton.jit
def _round_up_or_down(h, noise):
    """One of the two fp16 numbers around h, up with the probability of what fp16 drops."""
    pin = ((h.to(tl.int32, bitcast=True) & _SIGN) | _PIN_BITS).to(tl.float32, bitcast=True)
    pin = tl.where(tl.abs(h) < _PIN, pin, 0.0)
    bits = ((h + pin).to(tl.int32, bitcast=True) + noise) & ~_DROPPED
    return tl.where(h == h, bits.to(tl.float32, bitcast=True) - pin, h)
