"""How a recurrent state is stored: formats, stochastic rounding, and a scale a row.

A row is the N numbers of one (head, p) of a state [H, P, N]. It is stored as

    float32, bfloat16           nearest
    float16                     nearest, or stochastic
    int16, int8                 code = round(h / scale), scale = max |row| / 32767 or / 127: one
                                fp32 a row; nearest, or stochastic

Stochastic rounding takes the upper of the two neighbours with the probability of what lies below:
its mean is h, so that many small increments do not get lost between two stored numbers. The noise
is 16 bits an element, drawn by Philox4x32-10 (Salmon et al. 2011) with the request's seed as key
and the counter (row * ceil(N / 8) + n div 8, 1 + layer, position, 0): n mod 8 picks the half of the
word, low halves first. So it depends on the request, the layer, the position of the token behind
which the state is stored and the element, never on the batch, the slot or the number of launches:
the same position rounds alike whether decoded, verified again after a rollback, or replayed. (The
sampler's counters have 0 where these have 1 + layer.)

Beyond what a format holds the state saturates; NaN stays NaN, in scaled rows as a NaN of the whole
row, and so does an infinite element of one. A scale too small for fp32's normal numbers makes the
row zeros. Rows are rounded whole, as fp32 tiles [R, BLOCK_N] with zeros beyond N, BLOCK_N a power
of two (at least 8 for stochastic rounding).

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
FP16_MAX = tl.constexpr(65504.0)
TINY = tl.constexpr(2.0**-126)  # the smallest normal fp32
CODE_MAX = {torch.int16: 32767, torch.int8: 127}
_INT16_MAX, _INT8_MAX = tl.constexpr(32767.0), tl.constexpr(127.0)
_HALF = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bits behind the point


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How states are stored: elements of `dtype`, rounded to the nearest or stochastically."""

    name: str
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
        StateFormat("float32", torch.float32),
        StateFormat("bfloat16", torch.bfloat16),
        StateFormat("float16", torch.float16),
        StateFormat("float16-sr", torch.float16, stochastic=True),
        StateFormat("int16", torch.int16),
        StateFormat("int8", torch.int8),
    )
}


class StateNoise(NamedTuple):
    """What stochastic rounding is drawn from: seeds int64 [S], one a sequence of the call; lengths
    int32 [S], the tokens of a sequence once the call is over, so that the last of its new tokens
    has position lengths - 1; and the number of the layer."""

    seeds: torch.Tensor
    lengths: torch.Tensor
    layer: int


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
        stochastic = (torch.float16, torch.float64, *CODE_MAX)  # float64: the oracle's, unrounded
        require(
            state.dtype in stochastic and state.shape[-1] >= 8,
            f"stochastic rounding is for fp16, int16 and int8 states of 8 or more columns, not "
            f"{state.dtype} of {state.shape[-1]}",
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
    """Twin of `state_noise` for rows 0 .. rows-1: int64 [rows, N] in 0 .. 65535."""
    groups = -(-N // NOISE_GROUP.value)
    counter = torch.arange(rows * groups, device=device)
    same = torch.zeros_like(counter)
    words = torch.stack(
        philox_ref(same + seed, (counter, same + 1 + layer, same + position, same)), -1
    )
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return halves.reshape(rows, -1)[:, :N]


def round_state_ref(
    h: torch.Tensor, dtype: torch.dtype, noise: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Twin of `round_state`: rows h [..., N] fp32 -> (elements of `dtype`, scales [...] or None).

    noise: 0 .. 65535 as h, from `state_noise_ref`; None rounds to the nearest."""
    if dtype == torch.float64:
        return h.double(), None
    if dtype in CODE_MAX:
        scale = h.abs().amax(-1) / CODE_MAX[dtype]
        inverse = torch.where(scale >= TINY.value, 1.0 / scale, 0.0)
        v = h * inverse[..., None]
        v = v.round() if noise is None else _round_up_or_down_ref(v, noise)
        return v.clamp(-CODE_MAX[dtype], CODE_MAX[dtype]).nan_to_num(0.0).to(dtype), scale
    if dtype != torch.float16:
        return h.to(dtype), None
    h = h.clamp(-FP16_MAX.value, FP16_MAX.value)
    if noise is None:
        return h.to(dtype), None
    exponent = h.view(torch.int32) & 0x7F800000
    exponent = exponent.clamp_min(113 << 23)  # below it the spacing stays 2^-24
    spacing = (exponent - (10 << 23)).view(torch.float32)
    per_unit = ((137 << 23) - (exponent - (127 << 23))).view(torch.float32)
    return (_round_up_or_down_ref(h * per_unit, noise) * spacing).to(dtype), None


def _round_up_or_down_ref(v: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    magnitude = v.abs()
    low = magnitude.floor()
    up = magnitude - low > (noise.to(v.dtype) + 0.5) * 2.0**-16
    magnitude = low + up.to(v.dtype)
    return torch.where(v < 0, -magnitude, magnitude)


def restore_state_ref(
    stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Twin of `restore_state`: a copy of the numbers meant by stored [..., N], in `dtype`."""
    h = stored.to(dtype, copy=True)
    return h if scales is None else h * scales[..., None].to(dtype)


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
    """Noise of whole rows: int32 [R, BLOCK_N] in 0 .. 65535.

    seed int64, position (of the token behind which the state is stored) and layer: scalars. rows
    [R]: head * P + p. Eight elements share a call of Philox."""
    groups: tl.constexpr = (N + NOISE_GROUP - 1) // NOISE_GROUP
    column = tl.arange(0, BLOCK_N // NOISE_GROUP)
    counter = (rows[:, None] * groups + column[None, :]).to(tl.uint32)
    zero = tl.zeros_like(counter)
    c1, c2 = zero + (layer + 1).to(tl.uint32), zero + position.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, counter, c1, c2, zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, [rows.shape[0], BLOCK_N]).to(tl.int32)


@triton.jit
def round_state(h, state_ptr, scales_ptr, noise):
    """Rows h fp32 [R, BLOCK_N] as they are stored: (elements of state_ptr's type, scales [R]).

    scales_ptr: None for an unscaled format, whose scales are a meaningless scalar. noise: int32 of
    h's shape from `state_noise`, or None to round to the nearest."""
    element: tl.constexpr = state_ptr.dtype.element_ty
    scale = tl.full((), 1.0, tl.float32)
    if scales_ptr is not None:
        most: tl.constexpr = _INT8_MAX if element == tl.int8 else _INT16_MAX
        # as integers, since their maximum lets NaN win
        bits = tl.max(h.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.zeros_like(bits) + most)
        some = scale >= TINY
        inverse = tl.where(some, tl.div_rn(1.0, tl.where(some, scale, 1.0)), 0.0)
        v = h * inverse[:, None]
        if noise is None:
            v = (v + _HALF) - _HALF
        else:
            v = _round_up_or_down(v, noise)
        stored = tl.minimum(tl.maximum(v, -most), most).to(tl.int32).to(element)
    elif element == tl.float16:
        h = tl.where(h > FP16_MAX, FP16_MAX, tl.where(h < -FP16_MAX, -FP16_MAX, h))
        if noise is not None:
            exponent = tl.maximum(h.to(tl.int32, bitcast=True) & 0x7F800000, 113 << 23)
            spacing = (exponent - (10 << 23)).to(tl.float32, bitcast=True)
            per_unit = ((137 << 23) - (exponent - (127 << 23))).to(tl.float32, bitcast=True)
            h = _round_up_or_down(h * per_unit, noise) * spacing
        stored = h.to(element)
    else:
        tl.static_assert(noise is None, "stochastic rounding is for fp16, int16 and int8")
        stored = h.to(element)
    return stored, scale


@triton.jit
def _round_up_or_down(v, noise):
    """To one of the two integers around v, up with the probability of its fraction to 2^-16."""
    magnitude = tl.abs(v)
    low = tl.floor(magnitude)
    up = magnitude - low > (noise.to(tl.float32) + 0.5) * 0.0000152587890625  # 2^-16
    magnitude = low + tl.where(up, 1.0, 0.0)
    return tl.where(v < 0, -magnitude, magnitude)
