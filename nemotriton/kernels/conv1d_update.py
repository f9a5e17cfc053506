"""One to a few new tokens of every sequence through the causal convolution of `conv1d`.

Shapes, dtypes, the formula and the order of sums are those of `causal_conv1d`. A plain decode step
(one token, the window moves on by it) has a kernel of its own; verify passes, which keep the window
after every token, and draft trees take a tile a sequence of `conv1d._causal_conv1d`. Both add a tap
by one explicit fma: left to itself, the compiler rounds another product in each.
"""

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.conv1d import (
    _causal_conv1d,
    check_inputs,
    filter_ref,
    finish,
    launch_tiles,
    window_inputs,
    windows,
)
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import UNORDERED
from nemotriton.kernels.op import Args, Case, Cost, KernelSpec, Tile, cdiv, launch, next_pow2, op


def causal_conv1d_update_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    max_new: int,
    lanes: torch.Tensor | None = None,
    update_state: bool = True,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `causal_conv1d_update`."""
    bounds, y = cu.tolist(), torch.zeros_like(x)
    for s, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        windows: list[torch.Tensor] = []
        for t, token in enumerate(range(bounds[s], bounds[s + 1])):
            parent = t - 1 if parents is None else int(parents[token])
            u = torch.cat([state[slot] if parent < 0 else windows[parent], x[token, None]])
            y[token] = filter_ref(u, weight, bias)[0]
            windows.append(u[1:])
        if lanes is not None and windows:
            lanes[slot, : len(windows)] = torch.stack(windows)
        if update_state and windows:
            state[slot] = windows[-1]
    return y


@triton.jit
def _conv1d_step(
    x_ptr, w_ptr, b_ptr, state_ptr, y_ptr, cu_idx, slots_idx,
    x_stride, y_stride, w_stride, tap_stride, slot_stride, row_stride, C,
    W: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """At most one token of one sequence, for a block of channels; the window moves on by it.

    Each thread keeps to its own channels, so the order of its loads and stores is enough."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(C, BLOCK_C)
    c = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = pid // blocks
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.load(cu_idx + s).to(tl.int64)
    slot = tl.load(slots_idx + s).to(tl.int64)
    owned = slot >= 0
    inside = (c < C) & (tl.load(cu_idx + s + 1).to(tl.int64) > token)
    moved = inside & owned
    window = state_ptr + slot * slot_stride + c
    w_ptr += c * w_stride
    x = tl.load(x_ptr + token * x_stride + c, mask=moved, other=0.0)
    w = tl.load(w_ptr + (W - 1) * tap_stride, mask=c < C, other=0.0)
    acc = tl.fma(x.to(tl.float32), w.to(tl.float32), tl.zeros([BLOCK_C], tl.float32))
    for back in tl.static_range(1, W):
        u = tl.load(window + (W - 1 - back) * row_stride, mask=moved, other=0.0)
        w = tl.load(w_ptr + (W - 1 - back) * tap_stride, mask=c < C, other=0.0)
        acc = tl.fma(u.to(tl.float32), w.to(tl.float32), acc)
    y = finish(acc, b_ptr, c, C, owned).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * y_stride + c, y, mask=inside)
    for row in tl.static_range(W - 2):
        after = tl.load(window + (row + 1) * row_stride, mask=moved)
        tl.store(window + row * row_stride, after, mask=moved)
    if W > 1:
        tl.store(window + (W - 2) * row_stride, x, mask=moved)


@op(ref=causal_conv1d_update_ref)
def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    max_new: int,
    lanes: torch.Tensor | None = None,
    update_state: bool = True,
    parents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve 1..max_new new tokens of every sequence from its window.

    lanes [slots, >= max_new, W-1, C]: lanes[slot, t] becomes the window after new token t, to
    promote once drafts are accepted. update_state=False leaves the state as it is. parents int32
    [T]: the new token (counted within its sequence) that a draft token follows, -1 for the
    context; parents stand before their children. A tree has no one final window, so it needs
    update_state=False. Returns y [T, C]."""
    T, C, W = check_inputs(x, weight, bias, state, cu, slots)
    require(
        parents is None or not update_state,
        "a draft tree leaves no one final window: pass update_state=False with parents",
    )
    require(
        lanes is None or (lanes.shape[1] >= max_new and lanes.shape[2:] == (W - 1, C)),
        f"lanes must be [slots, at least {max_new}, {W - 1}, {C}], "
        f"got {None if lanes is None else tuple(lanes.shape)}",
    )
    N = next_pow2(max_new)
    tile = CAUSAL_CONV1D_UPDATE.tile(T, x, C=C, W=W, N=N)
    if max_new == 1 and update_state and lanes is None:
        y = torch.empty((T, C), dtype=x.dtype, device=x.device)
        grid = (slots.shape[0] * cdiv(C, int(tile["BLOCK_C"])),)
        strides = (x.stride(0), y.stride(0), *weight.stride(), *state.stride()[:2])
        args = (x, weight, bias, state, y, cu, slots, *strides, C)
        launch(_conv1d_step, grid, *args, W=W, **as_dependent(x), **tile)
        return y
    tile = tile.but(BLOCK_T=N)
    return launch_tiles(
        x, weight, bias, state, cu, slots, max_new, tile, None, lanes, parents, update_state
    )


def _make_causal_conv1d_update(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    """Sequences of 1..N tokens; where N > 1 a verify step: lanes written, the state left alone."""
    lengths: list[int] = []
    left = T
    while left:
        lengths.append(min(left, len(lengths) % case.N + 1))
        left -= lengths[-1]
    args = window_inputs(case, lengths or [0], dev, dtype, rng)
    args["max_new"] = case.N
    if case.N > 1:
        shape = (args["state"].shape[0], case.N + 1, case.W - 1, case.C)
        args["lanes"] = torch.full(shape, float("nan"), device=dev, dtype=dtype)
        args["update_state"] = False
    return args


def _update_tiles(case: Case) -> list[Tile]:
    return [
        Tile(BLOCK_C=c, num_warps=w, num_stages=1)
        for c in (64, 128, 256, 512, 1024)
        for w in (1, 2, 4)
        if 2 <= case.N * c // (32 * w) <= 64  # elements a thread
    ]


def _update_cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    windows = cdiv(T, case.N) * (1 + case.N) * (case.W - 1)  # read once, written after each step
    rows = 2 * T + windows + case.W
    return Cost((2 * case.W + 4) * T * case.C, rows * case.C * dtype.itemsize)


CAUSAL_CONV1D_UPDATE = KernelSpec(
    op=causal_conv1d_update,
    kernels=(_causal_conv1d, _conv1d_step),
    cases=lambda config: [Case(**case, N=n) for case in windows(config) for n in (1, 4, 8)],
    small=[Case(C=48, W=4, N=1), Case(C=37, W=3, N=4), Case(C=130, W=2, N=2)],
    tokens=(1, 4, 16, 64, 256, 1024),
    make=_make_causal_conv1d_update,
    tiles=_update_tiles,
    default=lambda case, tokens: Tile(
        BLOCK_C=256 if case.N == 1 else max(32, 512 // case.N), num_warps=1, num_stages=1
    ),
    fixed=UNORDERED,
    cost=_update_cost,
    mutates=("state", "lanes"),
    per_token=("x",),
    strided=("x",),
)
