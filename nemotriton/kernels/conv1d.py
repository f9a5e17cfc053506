"""The causal depth-wise convolution in front of the Mamba scan, with SiLU.

    y[t, c] = silu(bias[c] + sum_w weight[c, w] * u[t - (W-1) + w, c])

u is the sequence's own past: its new tokens x, before them the window kept in the state, before
that zeros (Gu & Dao 2023; the layout of the reference implementation's weight).

x [T, C] packed tokens with a free row stride (a slice of the in-projection is read in place),
weight [C, W] with free strides (best where neighbouring channels touch), bias [C] or None,
windows [W-1, C] of raw inputs, oldest first, in x's dtype; y [T, C] contiguous. Sums are fp32 and
run from the newest tap to the oldest in all kernels, so how a sequence is cut into calls changes no
bit. `cu` int32 [S+1] token starts, `slots` int32 [S]; a sequence with slot -1 is a pad: its rows of
y are zeros. Sequences may be empty or shorter than the window.
"""

import itertools

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.conv1d_rows import _conv1d_rows
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.numerics import silu, silu_ref
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    acc_dtype,
    cdiv,
    launch,
    next_pow2,
    op,
)


# ------------------------------------------------------------------------------------------ twins
def conv_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor,
    cu: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution without any state in place: differentiable, the training forward calls it.

    x [T, C], initial windows [S, W-1, C], cu [S+1]; returns (y [T, C], final windows)."""
    bounds = cu.tolist()
    outputs, final = [x[:0]], initial.clone()
    for s, (start, end) in enumerate(itertools.pairwise(bounds)):
        u = torch.cat([initial[s], x[start:end]])  # [W-1 + n, C]
        outputs.append(filter_ref(u, weight, bias))
        final[s] = u[end - start :]
    return torch.cat(outputs), final


def filter_ref(u: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Outputs of the last n of u's n + W-1 rows."""
    f, W = acc_dtype(u), weight.shape[1]
    n = u.shape[0] - (W - 1)
    y = torch.zeros_like(u[:n], dtype=f)
    for w in reversed(range(W)):
        y = y + u[w : w + n].to(f) * weight[:, w].to(f)
    return silu_ref(y if bias is None else y + bias.to(f)).to(u.dtype)


def causal_conv1d_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor | None,
    max_new: int,
) -> torch.Tensor:
    """Twin of `causal_conv1d`."""
    index, owned = slots.long().clamp_min(0), slots >= 0
    kept = owned if fresh is None else owned & ~fresh
    initial = torch.where(kept[:, None, None], state[index], 0)
    y, final = conv_ref(x, weight, bias, initial, cu)
    state[index[owned]] = final[owned]
    return torch.where(owned.repeat_interleave(cu.diff().long())[:, None], y, 0)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _inputs(x_ptr, x_stride, window_ptr, row_stride, at, c, inside, owned, kept, W: tl.constexpr):
    """The rows `at` of a sequence's u: new tokens from zero on, rows of its window below."""
    new = (at >= 0)[:, None]
    x = x_ptr + at[:, None] * x_stride + c[None, :]
    old = window_ptr + (at + (W - 1))[:, None] * row_stride + c[None, :]
    fresh = tl.load(x, mask=inside & new & owned, other=0.0)
    return tl.where(new, fresh, tl.load(old, mask=inside & ~new & kept, other=0.0))


@triton.jit
def _before(parents_idx, start, at, live):
    """The row of u that stands before each row `at`: the one above, or a draft's parent."""
    if parents_idx is not None:
        token = (at >= 0) & live
        parent = tl.load(parents_idx + start + at, mask=token, other=-1).to(tl.int64)
        return tl.where(token, parent, at - 1)
    else:
        return at - 1


@triton.jit
def finish(acc, b_ptr, c, C, owned):
    if b_ptr is not None:
        acc += tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    return tl.where(owned, silu(acc), 0.0)


@triton.jit(do_not_specialize=["tiles"])
def _causal_conv1d(
    x_ptr, w_ptr, b_ptr, state_ptr, lanes_ptr, fresh_ptr, y_ptr,
    cu_idx, slots_idx, parents_idx,
    x_stride, y_stride, w_stride, tap_stride,
    slot_stride, row_stride, lane_slot_stride, lane_stride, lane_row_stride,
    C, tiles,
    W: tl.constexpr, UPDATE: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one sequence, for a block of channels.

    The program of a sequence's first tile is the only one that reads its window, and it alone
    writes the next one, after the last read."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    c = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = pid // blocks % tiles
    s = pid // blocks // tiles
    if PDL:
        tl.extra.cuda.gdc_wait()
    start = tl.load(cu_idx + s).to(tl.int64)
    n = tl.load(cu_idx + s + 1).to(tl.int64) - start
    if tile * BLOCK_T >= tl.maximum(n, 1):
        return
    slot = tl.load(slots_idx + s).to(tl.int64)
    owned = slot >= 0
    kept = owned
    if fresh_ptr is not None:
        kept = owned & (tl.load(fresh_ptr + s) == 0)
    x_ptr += start * x_stride
    window_ptr = state_ptr + slot * slot_stride
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)  # within the sequence
    inside = (t < n)[:, None] & (c < C)[None, :]
    w_ptr += c * w_stride

    acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    at = t  # the row of u under the tap
    for back in tl.static_range(W):
        u = _inputs(x_ptr, x_stride, window_ptr, row_stride, at, c, inside, owned, kept, W)
        w = tl.load(w_ptr + (W - 1 - back) * tap_stride, mask=c < C, other=0.0)
        acc = tl.fma(u.to(tl.float32), w.to(tl.float32)[None, :], acc)
        if back < W - 1:
            if lanes_ptr is not None:
                lane = lanes_ptr + slot * lane_slot_stride + (W - 2 - back) * lane_row_stride
                tl.store(lane + t[:, None] * lane_stride + c[None, :], u, mask=inside & owned)
            at = _before(parents_idx, start, at, t < n)
    y = finish(acc, b_ptr, c, C, owned).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (start + t)[:, None] * y_stride + c[None, :], y, mask=inside)

    if UPDATE and W > 1 and tile == 0:
        row = tl.arange(0, BLOCK_W)
        kept_rows = (row < W - 1)[:, None] & (c < C)[None, :]
        last = n - (W - 1) + row
        final = _inputs(x_ptr, x_stride, window_ptr, row_stride, last, c, kept_rows, owned, kept, W)
        tl.debug_barrier()  # every thread has read the window before any overwrites it
        place = window_ptr + row[:, None] * row_stride + c[None, :]
        tl.store(place, final, mask=kept_rows & owned)


def launch_tiles(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    max_new: int,
    tile: Tile,
    fresh: torch.Tensor | None = None,
    lanes: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    update: bool = True,
) -> torch.Tensor:
    (T, C), W = x.shape, weight.shape[1]
    y = torch.empty((T, C), dtype=x.dtype, device=x.device)
    tiles = max(cdiv(max_new, int(tile["BLOCK_T"])), 1)
    assert tiles == 1 or tile["BLOCK_T"] >= W - 1, "only a first tile may reach into the window"
    grid = (slots.shape[0] * tiles * cdiv(C, int(tile["BLOCK_C"])),)
    lane_strides = (0, 0, 0) if lanes is None else lanes.stride()[:3]
    tensors = (x, weight, bias, state, lanes, fresh, y, cu, slots, parents)
    strides = (x.stride(0), y.stride(0), *weight.stride(), *state.stride()[:2], *lane_strides)
    constants = {"W": W, "UPDATE": update, "BLOCK_W": next_pow2(W - 1), **as_dependent(x)}
    launch(_causal_conv1d, grid, *tensors, *strides, C, tiles, **constants, **tile)
    return y


def check_inputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[int, int, int]:
    require(x.ndim == 2, f"x must be [tokens, channels], got shape {tuple(x.shape)}")
    T, C = x.shape
    require(
        weight.ndim == 2 and weight.shape[0] == C,
        f"weight must be [{C}, width], got shape {tuple(weight.shape)}",
    )
    W = weight.shape[1]
    require(
        bias is None or bias.shape == (C,),
        f"bias must be [{C}], got shape {None if bias is None else tuple(bias.shape)}",
    )
    require(
        state.shape[1:] == (W - 1, C),
        f"state must be [slots, {W - 1}, {C}] for width {W}, got shape {tuple(state.shape)}",
    )
    require(
        state.dtype == x.dtype,
        f"state is {state.dtype} and x is {x.dtype}: windows keep x as it is, use one dtype",
    )
    require(
        x.stride(1) == 1 and state.stride(2) == 1,
        "x and state must have unit stride along the channels; call .contiguous()",
    )
    require(
        cu.shape == (slots.shape[0] + 1,),
        f"cu must be [{slots.shape[0] + 1}] for {slots.shape[0]} slots, not {tuple(cu.shape)}",
    )
    return T, C, W


# ----------------------------------------------------------------------------------- causal_conv1d
@op(ref=causal_conv1d_ref)
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    fresh: torch.Tensor | None,
    max_new: int,
) -> torch.Tensor:
    """Convolve packed prompts (or pieces of them) and leave the final windows in the state.

    x [T, C], state [slots, W-1, C], fresh bool [S] or None: True ignores the slot's contents (they
    may be NaN) and starts from zeros, also where the sequence is empty. `max_new` is the most
    tokens of one sequence, or more. Returns y [T, C]. No two sequences may share a slot."""
    T, C, W = check_inputs(x, weight, bias, state, cu, slots)
    tile = CAUSAL_CONV1D.tile(T, x, C=C, W=W)
    if W > 4:
        tile = Tile(BLOCK_T=32, BLOCK_C=128, num_warps=4, num_stages=1)
        return launch_tiles(x, weight, bias, state, cu, slots, max_new, tile, fresh=fresh)
    y = torch.empty((T, C), dtype=x.dtype, device=x.device)
    tiles = max(cdiv(max_new, int(tile["BLOCK_T"])), 1)
    grid = (slots.shape[0] * tiles * cdiv(C, int(tile["BLOCK_C"])),)
    strides = (x.stride(0), y.stride(0), *weight.stride(), *state.stride()[:2])
    tensors = (x, weight, bias, state, fresh, y, cu, slots)
    launch(_conv1d_rows, grid, *tensors, *strides, C, tiles, W=W, **tile)
    return y


def _prefill_tiles(case: Case) -> list[Tile]:
    """A thread has 8 channels of 16 bits, 16 bytes a load, or half as many."""
    return [
        Tile(BLOCK_T=t, BLOCK_C=lanes * 32 * w, num_warps=w, num_stages=1)
        for t in (8, 16, 32, 64, 128)
        for w, lanes in ((1, 8), (2, 8), (4, 8), (1, 4), (2, 4), (4, 4))
    ]


def _prefill_suits(tile: Tile, tokens: int) -> bool:
    """Short blocks for few tokens, which need the programs, and long ones for many."""
    return {64: 8, 256: 8, 1024: 8, 4096: 16}.get(tokens, 32) <= tile["BLOCK_T"] <= tokens // 4


def _prefill_default(case: Case, tokens: int) -> Tile:
    """Programs of one or two warps, enough of them to fill a large GPU."""
    rows = 64 if tokens > 4096 else 32 if tokens > 1024 else 16
    return Tile(BLOCK_T=rows, BLOCK_C=512, num_warps=2, num_stages=1)


def window_inputs(
    case: Case, lengths: list[int], dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    """Tensors both ops take; the last sequence is a pad, slots no one owns are NaN."""
    T, S = sum(lengths), len(lengths)
    slots = torch.randperm(S + 2, generator=rng, device=dev)[:S].int()
    slots[-1] = -1
    state = torch.full((S + 2, case.W - 1, case.C), float("nan"), device=dev, dtype=dtype)
    windows = torch.randn(S - 1, case.W - 1, case.C, generator=rng, device=dev)
    state[slots[:-1].long()] = windows.to(dtype)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        "x": torch.randn(T, case.C, generator=rng, device=dev).to(dtype),
        "weight": torch.randn(case.W, case.C, generator=rng, device=dev).to(dtype).t() * 0.5,
        "bias": torch.randn(case.C, generator=rng, device=dev).to(dtype),
        "state": state,
        "cu": ends.to(dev),
        "slots": slots,
        "max_new": max(lengths),
    }


def _make_causal_conv1d(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    half, pad = T // 2, T // 8
    one = min(1, T - half - pad)
    lengths = [half, 0, one, T - half - one - pad, 0, pad]
    args = window_inputs(case, lengths, dev, dtype, rng)
    args["fresh"] = torch.tensor([False, True, False, True, False, False], device=dev)
    args["state"][args["slots"][3:4].long()] = float("nan")  # to be ignored
    return args


def windows(config: object) -> list[Case]:
    mamba = getattr(config, "mamba", None)
    return [Case(C=mamba.conv_dim, W=mamba.conv_width)] if mamba else []


CAUSAL_CONV1D = KernelSpec(
    op=causal_conv1d,
    kernels=(_causal_conv1d, _conv1d_rows),
    cases=windows,
    small=[Case(C=48, W=4), Case(C=37, W=3), Case(C=130, W=2)],
    tokens=(64, 256, 1024, 4096, 16384, 65536),
    make=_make_causal_conv1d,
    tiles=_prefill_tiles,
    suits=_prefill_suits,
    default=_prefill_default,
    fixed=UNORDERED,
    cost=lambda case, T, dtype: Cost(
        (2 * case.W + 4) * T * case.C, (2 * T + case.W) * case.C * dtype.itemsize
    ),
    small_tokens=(0, 1, 3, 17, 150),
    mutates=("state",),
    per_token=("x",),
    strided=("x",),
)
