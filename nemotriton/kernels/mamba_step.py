"""A Mamba layer between its two projections, for one token of every sequence, in one launch.

    xBC = silu(conv(xBC))            `conv1d_update`: the window moves on by the token
    y   = selective update           `ssm_update`:    the state moves on by the token
    y   = RMS norm of y * silu(z)    `rms_norm.gated_rms_norm`, in groups of D / G columns

Numbers, dtypes and roundings are those of the three ops in turn: xBC and y are rounded to x's dtype
where they change hands. D = H P columns, C = D + 2 G N of xBC.

A program is one head's BLOCK_P rows of one sequence's state. It convolves what it needs itself: its
rows' channels, whose window nobody else reads, and its group's B and C, whose windows all programs
of the group read. A norm too needs all of them. So each counts itself in `arrivals` when it is
through, and the last one to arrive norms the group and moves the windows of B and C on; then it
sets the count back to zero. It adds in a fixed order, so which one is last changes no bit.

For one or two sequences (FEW) this is faster than the three launches, of which the first and the
last move next to nothing; for more, programs that wait for their count hold up the next ones, and
convolving B and C in every program costs more than reading them. A dependent launch: it reads its
filters first, and lets the next kernel come when it has counted itself.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.conv1d import check_inputs
from nemotriton.kernels.conv1d_update import causal_conv1d_update_ref
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.numerics import silu
from nemotriton.kernels.op import Args, Case, Cost, KernelSpec, Tile, cdiv, launch, next_pow2, op
from nemotriton.kernels.rms_norm import gated_rms_norm_ref
from nemotriton.kernels.ssm_state import (
    STATE_AXES,
    StateNoise,
    check_state,
    load_state,
    state_axis,
    store_state,
)
from nemotriton.kernels.ssm_step import _advance, _load_head, _noise_key, _rounded
from nemotriton.kernels.ssm_update import SSM_UPDATE, check_rows, meant, ssm_update_ref

WIDEST = 4  # taps: the window's rows stay in registers
FEW = 2  # sequences: more are faster with a launch for each of the three ops


# ------------------------------------------------------------------------------------------- twin
def mamba_step_ref(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm: torch.Tensor,
    groups: int,
    arrivals: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    cells: torch.Tensor,
    eps: float = 1e-5,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Twin of `mamba_step`: the three ops' twins."""
    xBC = causal_conv1d_update_ref(xBC, weight, bias, windows, cu, slots, 1)
    x, B, C = split_channels(xBC, state, groups)
    y = ssm_update_ref(
        x, dt, A, B, C, D, dt_bias, state, cu, cells, 1, dt_limit=dt_limit, scales=scales,
        noise=noise,
    )  # fmt: skip
    return gated_rms_norm_ref(y.flatten(1), z, norm, eps, groups)


def split_channels(
    xBC: torch.Tensor, state: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H, P], B and C [T, G, N] of xBC [T, C], as views; state [cells, H, P, N]."""
    H, P, N = state.shape[1:]
    require(
        xBC.ndim == 2 and xBC.shape[1] == H * P + 2 * groups * N,
        f"xBC of shape {tuple(xBC.shape)} does not hold {H} heads of {P} and {groups} groups of "
        f"2 * {N} channels",
    )
    x, B, C = xBC.split([H * P, groups * N, groups * N], dim=1)
    return x.unflatten(1, (H, P)), B.unflatten(1, (groups, N)), C.unflatten(1, (groups, N))


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _filter(w_ptr, b_ptr, w_stride, tap_stride, c, inside, W: tl.constexpr):
    """Taps of channels c, the newest token's first, and their bias; all as they are."""
    w_ptr += c * w_stride + (W - 1) * tap_stride
    w0 = tl.load(w_ptr, mask=inside, other=0.0)
    w1 = tl.load(w_ptr - tap_stride, mask=inside & (W > 1), other=0.0)
    w2 = tl.load(w_ptr - 2 * tap_stride, mask=inside & (W > 2), other=0.0)
    w3 = tl.load(w_ptr - 3 * tap_stride, mask=inside & (W > 3), other=0.0)
    bias = tl.zeros_like(w0)
    if b_ptr is not None:
        bias = tl.load(b_ptr + c, mask=inside, other=0.0)
    return w0, w1, w2, w3, bias


@triton.jit
def _tokens(x_at, window_at, row_stride, on, W: tl.constexpr):
    """The new token's channels and those of the three before it, as they are."""
    window_at += (W - 1) * row_stride
    new = tl.load(x_at, mask=on, other=0.0)
    past1 = tl.load(window_at - row_stride, mask=on & (W > 1), other=0.0)
    past2 = tl.load(window_at - 2 * row_stride, mask=on & (W > 2), other=0.0)
    past3 = tl.load(window_at - 3 * row_stride, mask=on & (W > 3), other=0.0)
    return new, past1, past2, past3


@triton.jit
def _convolve(tokens, filter):
    new, past1, past2, past3 = tokens
    w0, w1, w2, w3, bias = filter
    acc = new.to(tl.float32) * w0.to(tl.float32) + past1.to(tl.float32) * w1.to(tl.float32)
    acc = acc + past2.to(tl.float32) * w2.to(tl.float32) + past3.to(tl.float32) * w3.to(tl.float32)
    return silu(acc + bias.to(tl.float32)).to(new.dtype)


@triton.jit
def _move(window_at, row_stride, tokens, on, W: tl.constexpr):
    """The window moves on by the new token. Every thread has read its part of it before."""
    new, past1, past2, _ = tokens
    window_at += (W - 1) * row_stride
    tl.store(window_at - row_stride, new, mask=on & (W > 1))
    tl.store(window_at - 2 * row_stride, past1, mask=on & (W > 2))
    tl.store(window_at - 3 * row_stride, past2, mask=on & (W > 3))


@triton.jit
def _norm_group(
    raw_ptr, z_ptr, norm_ptr, y_ptr, row, g, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`gated_rms_norm` of a group; its y was written by other multiprocessors a moment ago."""
    d = g * WIDTH + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < WIDTH
    x = tl.load(raw_ptr + row * D + d, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    z = tl.load(z_ptr + d, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
    u = x * z * tl.sigmoid(z)
    y = u * tl.rsqrt(tl.sum(u * u, 0) / WIDTH + eps) * w
    tl.store(y_ptr + row * D + d, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _close_group(
    raw_ptr, z_ptr, norm_ptr, y_ptr, x_at, window_at, row, g, row_stride, apart, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, BLOCK_N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """What the last program of a group does: x_at and window_at are at the first channel of B, and
    `apart` channels further at that of C."""
    inside = tl.arange(0, BLOCK_N) < N
    b = g * N + tl.arange(0, BLOCK_N)
    c = b + apart
    B = _tokens(x_at + b, window_at + b, row_stride, inside, W)
    C = _tokens(x_at + c, window_at + c, row_stride, inside, W)
    _norm_group(raw_ptr, z_ptr, norm_ptr, y_ptr, row, g, eps, D, WIDTH, BLOCK)
    tl.debug_barrier()
    _move(window_at + b, row_stride, B, inside, W)
    _move(window_at + c, row_stride, C, inside, W)


@triton.jit
def _find(cu_idx, slots_idx, cells_idx, s):
    """A sequence's row, whether it has one, its slot and its cell."""
    row = tl.load(cu_idx + s).to(tl.int64)
    filled = tl.load(cu_idx + s + 1).to(tl.int64) > row
    return row, filled, tl.load(slots_idx + s).to(tl.int64), tl.load(cells_idx + s).to(tl.int64)


@triton.jit(do_not_specialize=["layer"])
def _mamba_step(
    x_ptr, dt_ptr, z_ptr, w_ptr, b_ptr, windows_ptr, A_ptr, D_ptr, bias_ptr, state_ptr, scales_ptr,
    norm_ptr, raw_ptr, y_ptr, arrivals_ptr, seeds_ptr, lengths_idx, cu_idx, slots_idx, cells_idx,
    layer, x_t, dt_t, z_t, w_stride, tap_stride, window_slot, window_row, state_cell, scales_cell,
    eps, low, high,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    PER_GROUP: tl.constexpr = H // G
    pid = tl.program_id(0).to(tl.int64)
    head, s = pid // TILES % H, pid // TILES // H
    g = (head // PER_GROUP).to(tl.int32)
    p = (pid % TILES * BLOCK_P).to(tl.int32) + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    rows = head * P + p  # of the state, and channels of x
    in_p, in_n = p < P, n < N
    apart, b = G * N, H * P + g * N + n  # channels from B to C; those of B
    x_filter = _filter(w_ptr, b_ptr, w_stride, tap_stride, rows, in_p, W)
    B_filter = _filter(w_ptr, b_ptr, w_stride, tap_stride, b, in_n, W)
    C_filter = _filter(w_ptr, b_ptr, w_stride, tap_stride, b + apart, in_n, W)
    A, D, dt_bias = _load_head(A_ptr + head, D_ptr + head, bias_ptr + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row, filled, slot, cell = _find(cu_idx, slots_idx, cells_idx, s)
    on = filled & (slot >= 0)
    on_p, on_n = on & in_p, on & in_n
    h_at = state_ptr + cell * state_cell + rows[:, None] * N + n[None, :]
    mask, scale_at = on_p[:, None] & in_n[None, :], cell * scales_cell + rows
    h = load_state(h_at, scales_ptr, scale_at, mask, on_p)  # [BLOCK_P, BLOCK_N]
    x_at, window_at = x_ptr + row * x_t, windows_ptr + slot * window_slot
    x_tokens = _tokens(x_at + rows, window_at + rows, window_row, on_p, W)
    B_tokens = _tokens(x_at + b, window_at + b, window_row, on_n, W)
    C_tokens = _tokens(x_at + b + apart, window_at + b + apart, window_row, on_n, W)
    dt = tl.load(dt_ptr + row * dt_t + head, mask=on, other=0.0)

    x, C = _convolve(x_tokens, x_filter), _convolve(C_tokens, C_filter)
    h = _advance(h, x, dt, _convolve(B_tokens, B_filter), A, dt_bias, low, high)
    y = tl.sum(h * C.to(tl.float32)[None, :], 1) + D * x.to(tl.float32)
    y_at = row * (H * P) + rows
    tl.store(raw_ptr + y_at, y.to(raw_ptr.dtype.element_ty), mask=on_p)
    tl.store(y_ptr + y_at, tl.zeros_like(x), mask=in_p & filled & (slot < 0))
    tl.debug_barrier()  # all threads have read the window, and stored their part of y
    # the state is stored behind the count, which else would wait until it has arrived
    arrived = arrivals_ptr + slot * G + g
    last = tl.atomic_add(arrived, 1, mask=on, sem="acq_rel") == PER_GROUP * TILES - 1
    if PDL:  # not before: where programs still sit, the next kernel's would spread unevenly
        tl.extra.cuda.gdc_launch_dependents()
    seed, position = _noise_key(seeds_ptr, lengths_idx, s, 1)
    stored, scale = _rounded(
        h, state_ptr, scales_ptr, seeds_ptr, seed, position, layer, rows, N, BLOCK_N
    )
    store_state(stored, scale, h_at, scales_ptr, scale_at, mask, on_p)
    _move(window_at + rows, window_row, x_tokens, on_p, W)
    if on & last:
        tl.store(arrived, 0)
        _close_group(
            raw_ptr, z_ptr + row * z_t, norm_ptr, y_ptr, x_at + H * P, window_at + H * P, row, g,
            window_row, apart, eps, H * P, PER_GROUP * P, BLOCK_G, N, BLOCK_N, W,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------- op
@op(ref=mamba_step_ref)
def mamba_step(
    xBC: torch.Tensor,
    dt: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    norm: torch.Tensor,
    groups: int,
    arrivals: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    cells: torch.Tensor,
    eps: float = 1e-5,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Advance every sequence by its new token, if it has one; returns y [T, D] in xBC's dtype.

    xBC [T, C], dt [T, H], z [T, D]: slices of the in-projection's rows; weight [C, W] of at most 4
    taps, bias [C]; A, D, dt_bias [H] fp32; norm [D]. In place: windows [slots, W-1, C] at slots[s]
    and state [cells, H, P, N] at cells[s] (with `scales`, see `ssm_update`). A pad has -1 in both.
    arrivals int32 [slots, G]: zeros, and zeros again afterwards; calls that run at the same time
    must not share it."""
    T, _, W = check_inputs(xBC, weight, bias, windows, cu, slots)
    x, B, C = split_channels(xBC, state, groups)
    _, N = check_rows(x, dt, B, C, state)
    check_state(state, scales, noise, slots.shape[0])
    H, P, width = *x.shape[1:], x.shape[1] * x.shape[2]
    _check(z, norm, (T, width), windows, arrivals, groups, slots, cells, W)
    raw = torch.empty((T, width), dtype=xBC.dtype, device=xBC.device)
    y = torch.empty((T, width), dtype=xBC.dtype, device=xBC.device)
    sizes = {"H": H, "P": P, "N": N, "G": groups, "W": W}
    tile = MAMBA_STEP.tile(T, xBC, **sizes, STATE=state_axis(state, noise))
    seeds, lengths, layer = (None, None, 0) if noise is None else noise
    tensors = (xBC, dt, z, weight, bias, windows, A, D, dt_bias, state, scales, norm, raw, y)
    index = (arrivals, seeds, lengths, cu, slots, cells)
    strides = (xBC.stride(0), dt.stride(0), z.stride(0), *weight.stride(), *windows.stride()[:2])
    states = (state.stride(0), 0 if scales is None else scales.stride(0))
    rest = (eps, float(dt_limit[0]), float(dt_limit[1]))
    grid = (slots.shape[0] * H * cdiv(P, int(tile["BLOCK_P"])),)
    constants = {**sizes, "BLOCK_G": next_pow2(width // groups), **as_dependent(xBC)}
    launch(
        _mamba_step, grid, *tensors, *index, layer, *strides, *states, *rest, **constants, **tile
    )
    return y


def _check(
    z: torch.Tensor,
    norm: torch.Tensor,
    shape: tuple[int, int],
    windows: torch.Tensor,
    arrivals: torch.Tensor,
    groups: int,
    slots: torch.Tensor,
    cells: torch.Tensor,
    W: int,
) -> None:
    require(W <= WIDEST, f"a filter of {W} taps is too wide: {WIDEST} at most")
    require(
        z.shape == shape and z.stride(1) == 1 and norm.shape == shape[1:],
        f"z must be {shape} with unit stride along the width and norm [{shape[1]}], got "
        f"{tuple(z.shape)} with strides {z.stride()} and {tuple(norm.shape)}",
    )
    require(
        arrivals.shape == (windows.shape[0], groups)
        and arrivals.dtype == torch.int32
        and arrivals.is_contiguous(),
        f"arrivals must be int32 [{windows.shape[0]}, {groups}], got {arrivals.dtype} "
        f"{tuple(arrivals.shape)}",
    )
    require(
        cells.shape == slots.shape, f"cells must name one for each of {slots.shape[0]} sequences"
    )


# ------------------------------------------------------------------------------------------- spec
def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    """One token a sequence and one without; the inputs of `ssm_update` with windows beside them."""
    step = SSM_UPDATE.make(Case(**case, NEW=1, TREE=0), T, dev, dtype, rng)
    width = case.H * case.P
    C = width + 2 * case.G * case.N
    ends, cells = step["cu"], step["slots"]
    empty = torch.tensor([-1], dtype=torch.int32, device=dev)
    slots = torch.where(cells < 0, -1, torch.arange(T, dtype=torch.int32, device=dev).flip(0))
    windows = torch.randn(T + 1, case.W - 1, C, generator=rng, device=dev).to(dtype)
    windows[T:] = float("nan")
    windows[:T].masked_fill_((cells < 0).flip(0)[:, None, None], float("nan"))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=dev).to(dtype)

    args: Args = {
        "xBC": normal(T, C),
        "dt": step["dt"],
        "z": normal(T, width),
        "weight": normal(case.W, C).t() * 0.5,
        "bias": normal(C),
        "windows": windows,
        **{name: step[name] for name in ("A", "D", "dt_bias", "state", "scales")},
        "norm": torch.rand(width, generator=rng, device=dev).to(dtype) + 0.5,
        "groups": case.G,
        "arrivals": torch.zeros(T + 1, case.G, dtype=torch.int32, device=dev),
        "cu": torch.cat((ends, ends[-1:])),
        "slots": torch.cat((slots, empty)),
        "cells": torch.cat((cells, empty)),
    }
    if "noise" in step:
        seeds, lengths, layer = step["noise"]
        more = seeds.new_zeros(1), lengths.new_ones(1)
        args["noise"] = StateNoise(
            torch.cat((seeds, more[0])), torch.cat((lengths, more[1])), layer
        )
    return args


def _default(case: Case, tokens: int) -> Tile:
    """One warp with a thousand elements of the state: on an H200 as fast as any other for one
    sequence, and the fastest for more."""
    width = next_pow2(case.N)
    rows = min(max(1024 // width, 1), next_pow2(case.P))
    return Tile(BLOCK_P=rows, BLOCK_N=width, num_warps=1, num_stages=1)


def _tiles(case: Case) -> list[Tile]:
    width = next_pow2(case.N)
    return [
        Tile(BLOCK_P=p, BLOCK_N=width, num_warps=w, num_stages=1)
        for p in (4, 8, 16, 32, 64)
        for w in (1, 2, 4, 8)
        if p <= next_pow2(case.P) and 8 <= p * width // (32 * w) <= 64
    ]


def _cases(config: Any) -> list[Case]:
    m = config.mamba
    if m is None or m.conv_width > WIDEST:
        return []
    sizes = {"H": m.heads, "P": m.head_dim, "N": m.state, "G": m.groups, "W": m.conv_width}
    return [Case(**sizes, STATE=state) for state in STATE_AXES]


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    width, bc = case.H * case.P, 2 * case.G * case.N
    state = 2 * T * case.H * case.P * STATE_AXES[case.STATE].row_bytes(case.N)
    windows = 2 * (case.W - 1) * T * (width + bc)
    rows = T * (3 * width + bc + case.H) + case.W * (width + bc)
    flops = T * (6 * width * case.N + (2 * case.W + 4) * (width + bc) + 8 * width)
    return Cost(flops, state + (windows + rows) * dtype.itemsize)


MAMBA_STEP = KernelSpec(
    terms=lambda case: case.N,
    op=mamba_step,
    kernels=(_mamba_step,),
    cases=_cases,
    small=[
        Case(H=2, P=8, N=16, G=2, W=4, STATE="fp32"),
        Case(H=4, P=5, N=20, G=2, W=3, STATE="bf16"),
        Case(H=2, P=24, N=16, G=1, W=2, STATE="int8"),
        Case(H=2, P=5, N=20, G=1, W=4, STATE="fp16-sr"),
    ],
    tokens=(1, 2),
    make=_make,
    tiles=_tiles,
    default=_default,
    cost=_cost,
    mutates=("windows", "state", "scales", "arrivals"),
    meaning=meant,
    per_token=("xBC", "dt", "z"),
    strided=("xBC", "dt", "z"),
)
