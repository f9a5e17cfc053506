"""Selective state update by replay: outputs from the stored state and the inputs since (Mamba-2).

    y_t = exp(a_t) C_t h0^T + sum_{j on the way to t} exp(a_t - a_j) (C_t . B_j) dt_j x_j + D x_t

is the recurrence of `ssm_update` solved for the state h0 stored last: a_t is the sum of dt A over
the tokens behind it on the way to t (Dao & Gu 2024, the quadratic form). The inputs x, B and the
processed step size dt of the tokens since are kept in rings, so a step reads the state once and
seldom writes it. Exponents are never above zero.

Which state a token is computed from depends on its sequence alone: a state is stored at the end of
the prompt and behind every `interval` tokens from there, the borders. A token of a call that lies
beyond a border is computed from the border's state, rounded as it would be stored; what is stored
changes only in the next call, which is told by `counts` that the border's token was accepted.

x_ring [slots, H, R, P], dt_ring [slots, H, R] fp32, B_ring [slots, G, R, N]: R places a slot. Of
sequence s, order[s] int32 [R] is a permutation of them: its first counts[s] < 2 interval are the
committed entries since the stored state, oldest first; new token t is written to order[s,
counts[s] + t]. A call with a full window (counts[s] >= interval) stores the state behind it, and
the caller then drops these entries, see `replay_commit`. With `update=False` nothing is written.

A token's bits depend on the tokens before it alone: not on the number of new tokens, nor on how
they are cut into calls, nor on the tile, nor on a tree's other branches: on its path it is computed
as in a chain. What is not finite in a token's inputs reaches neither the tokens before it nor other
branches.

parents int32 [T] make the tokens of each sequence a tree, see `ssm_update`; no way through it may
have more than `interval` tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from nemotriton.errors import require
from nemotriton.kernels.dependent import dependent
from nemotriton.kernels.fixed_order import UNORDERED
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
    target,
)
from nemotriton.kernels.ssm_chain import _replay_chain
from nemotriton.kernels.ssm_replay_tiles import replay_default, replay_tiles
from nemotriton.kernels.ssm_state import (
    STATE_AXES,
    StateNoise,
    check_state,
    drawn_ref,
    read_state_ref,
    restore_state_ref,
    round_state_ref,
    state_axis,
    write_state_ref,
)
from nemotriton.kernels.ssm_tree import _replay_tree
from nemotriton.kernels.ssm_update import (
    check_rows,
    make_noise,
    meant,
    ssm_step_ref,
    time_step_ref,
    unowned_state,
)

REPLAY_INTERVAL = 16  # tokens between stored states; a window is one side of a tensor-core tile


def ring_places(interval: int, rows: int, depth: int | None = None) -> int:
    """Places of a ring, where a call has up to `rows` new tokens, `depth` of them in a row.

    Up to interval - 1 + depth are committed, and the new ones must not overwrite them."""
    return interval - 1 + (depth or rows) + rows


# ------------------------------------------------------------------------------------------ twins
def ssm_replay_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    x_ring: torch.Tensor,
    dt_ring: torch.Tensor,
    B_ring: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    order: torch.Tensor,
    max_new: int,
    interval: int = REPLAY_INTERVAL,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    update: bool = True,
    parents: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Twin of `ssm_replay`: the recurrence, token by token, from the stored state."""
    steps, y = time_step_ref(dt, dt_bias, dt_limit), torch.zeros_like(x)
    rings = (x_ring, x), (dt_ring, steps), (B_ring, B)
    for s, slot in enumerate(slots.tolist()):
        rows = range(int(cu[s]), int(cu[s + 1]) if slot >= 0 else int(cu[s]))
        held = int(counts[s]) if rows else 0
        places, walk = order[s].tolist(), _Walk(A, D, interval, noise, s, held + len(rows))
        stored = (state, scales) if update else (None, None)
        seen = [walk.past(state, scales, slot, [r for r, _ in rings], places[:held], stored)]
        for t, row in enumerate(rows):
            before = seen[t if parents is None else int(parents[row]) + 1]
            seen.append(walk.step(*before, x[row], steps[row], B[row], C[row], state.dtype))
            y[row] = walk.y.to(x.dtype)
            for ring, values in rings if update else ():
                ring[slot, :, places[held + t]] = values[row]
    return y


@dataclass
class _Walk:
    """Steps of a sequence in `ssm_replay_ref`; `end`: entries of the ring and new tokens."""

    A: torch.Tensor
    D: torch.Tensor
    interval: int
    noise: StateNoise | None
    s: int
    end: int
    y: torch.Tensor = field(init=False)  # of the last step
    kept: tuple[torch.Tensor, torch.Tensor | None] = field(init=False)  # the last border's state

    def step(
        self,
        h: torch.Tensor,
        i: int,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, int]:
        """The state behind token i from the stored state, as it would be stored at a border."""
        self.y, h = ssm_step_ref(h, x, dt, self.A, B, C, self.D)
        if (i + 1) % self.interval == 0:
            drawn = drawn_ref(self.noise, self.s, i - self.end, h)
            self.kept = round_state_ref(h, dtype, drawn)
            h = restore_state_ref(*self.kept, h.dtype)
        return h, i + 1

    def past(
        self,
        state: torch.Tensor,
        scales: torch.Tensor | None,
        slot: int,
        rings: list[torch.Tensor],
        places: list[int],
        target: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> tuple[torch.Tensor, int]:
        """The state behind the committed entries and their number; a full window is stored."""
        h, i = read_state_ref(state, scales, slot, acc_dtype(rings[1])), 0
        for at in places:
            x, dt, B = (ring[slot, :, at] for ring in rings)
            h, i = self.step(h, i, x, dt, B, B, state.dtype)
            if i == self.interval:
                write_state_ref(*self.kept, *target, slot)
        return h, i


# --------------------------------------------------------------------------------------------- op
@op(ref=ssm_replay_ref)
def ssm_replay(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    x_ring: torch.Tensor,
    dt_ring: torch.Tensor,
    B_ring: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    order: torch.Tensor,
    max_new: int,
    interval: int = REPLAY_INTERVAL,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    update: bool = True,
    parents: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Outputs y [T, H, P], in x's dtype, of 0..max_new new tokens a sequence.

    x [T, H, P], dt [T, H], B, C [T, G, N]: rows of packed tokens, `cu` [S+1] where they start.
    state [slots, H, P, N] in any format of `ssm_state`, with its scales and noise; the rings as
    above. slots, counts int32 [S], order int32 [S, R]; slot -1 is a pad. UnsupportedError where
    shapes do not fit or max_new tokens could cross two borders."""
    T, H, P = x.shape
    G, N = check_rows(x, dt, B, C, state)
    check_state(state, scales, noise, slots.shape[0])
    R = _check_rings(x, B, x_ring, dt_ring, B_ring, slots, counts, order)
    _check_interval(interval, max_new, R, parents)
    y = torch.empty((T, H, P), dtype=x.dtype, device=x.device)
    axes = {"H": H, "P": P, "N": N, "G": G, "STATE": state_axis(state, noise)}
    tile = SSM_REPLAY.tile(
        T, x, **axes, NEW=1 if max_new == 1 else 4, TREE=int(parents is not None)
    )
    grid = (slots.shape[0] * H * cdiv(P, int(tile["BLOCK_P"])),)
    seeds, lengths, layer = (None, None, 0) if noise is None else noise
    tensors = (x, dt, A, B, C, D, dt_bias, y, state, scales, x_ring, dt_ring, B_ring, seeds)
    indices = (lengths, cu, slots, counts, order)
    tokens = (x.stride(0), x.stride(1), dt.stride(0), *B.stride()[:2], *C.stride()[:2])
    pools = (state, scales, x_ring, dt_ring, B_ring)
    strides = (*tokens, *(0 if pool is None else pool.stride(0) for pool in pools))
    rest = (H, H // G, float(dt_limit[0]), float(dt_limit[1]), layer, P, N, R, interval)
    meta = _meta(tile, x, state, max_new) | {"UPDATE": update}
    meta["AHEAD"] &= update
    if parents is None:
        launch(_replay_chain, grid, *tensors, *indices, *strides, *rest, DRAFTS=max_new > 1, **meta)
    else:
        launch(_replay_tree, grid, *tensors, *indices, parents, *strides, *rest, **meta)
    return y


def _meta(tile: Tile, x: torch.Tensor, state: torch.Tensor, max_new: int) -> dict[str, Any]:
    """Constants and launch options of both kernels."""
    meta: dict[str, Any] = {"SLICE_P": 0, "AHEAD": False, "FETCH": False, **tile}
    meta["SLICE_P"] = meta["SLICE_P"] or meta["BLOCK_P"]
    meta["FETCH"] = bool(meta["FETCH"]) and target(x.device) > 0
    # what a loop hands on is no longer known to have been bytes, which products take otherwise
    meta["AHEAD"] = bool(meta["AHEAD"]) and state.dtype != torch.int8
    N, pdl = state.shape[-1], dependent(x)
    sizes = {"BLOCK_N": max(next_pow2(N), 16), "BLOCK_T": max(next_pow2(max_new), 8)}
    # what is one instruction in one form of the kernel and two in another would round otherwise
    return meta | sizes | {"PDL": pdl, "launch_pdl": pdl, "enable_fp_fusion": False}


def _check_interval(interval: int, max_new: int, R: int, parents: torch.Tensor | None) -> None:
    require(
        interval >= 16 and next_pow2(interval) == interval,
        f"the interval must be a power of two of at least 16, not {interval}",
    )
    require(
        max_new <= (interval if parents is None else R - interval),
        f"{max_new} new tokens a sequence are more than {interval} in a row, or more than a ring "
        f"of {R} places holds",
    )


def _check_rings(
    x: torch.Tensor,
    B: torch.Tensor,
    x_ring: torch.Tensor,
    dt_ring: torch.Tensor,
    B_ring: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    order: torch.Tensor,
) -> int:
    """R, the places of a ring."""
    (_, H, P), (_, G, N), R = x.shape, B.shape, x_ring.shape[2]
    rings = {
        "x_ring": (x_ring, (H, R, P), x.dtype),
        "dt_ring": (dt_ring, (H, R), acc_dtype(dt_ring)),
        "B_ring": (B_ring, (G, R, N), B.dtype),
    }
    for name, (ring, shape, dtype) in rings.items():
        require(
            ring.shape[1:] == shape and ring.dtype == dtype and ring[:1].is_contiguous(),
            f"{name} must be {dtype} [slots, {', '.join(map(str, shape))}] with contiguous slots, "
            f"got {ring.dtype} {tuple(ring.shape)}",
        )
    S = slots.shape[0]
    require(
        counts.shape == (S,) and order.shape == (S, R) and order.is_contiguous(),
        f"counts must be [{S}] and order a contiguous [{S}, {R}], got {tuple(counts.shape)} and "
        f"{tuple(order.shape)}",
    )
    return R


def _make_ssm_replay(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    """Sequences of 1..NEW tokens in all phases of their rings, a pad; what no one wrote is NaN."""
    lengths: list[int] = []
    left = T
    while left:
        lengths.append(min(left, len(lengths) % case.NEW + 1))
        left -= lengths[-1]
    lengths += [0] * (case.NEW > 1)
    S, R = len(lengths), ring_places(REPLAY_INTERVAL, case.NEW)
    H, P, N, G = case.H, case.P, case.N, case.G
    slots = torch.randperm(S + 2, generator=rng, device=dev)[:S].int()
    most = REPLAY_INTERVAL + case.NEW - 1
    phases = [(most - 5 * s) % (most + 1) for s in range(S)]
    counts = torch.tensor(phases, dtype=torch.int32, device=dev)
    order = torch.rand(S, R, generator=rng, device=dev).argsort(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=dev)

    fmt = STATE_AXES[case.STATE]
    state, scales = unowned_state((S + 2, H, P, N), fmt.dtype, dev)
    kept, kept_scales = round_state_ref(normal(S, H, P, N), fmt.dtype)
    state[slots.long()] = kept
    if scales is not None and kept_scales is not None:
        scales[slots.long()] = kept_scales
    live = torch.zeros(S + 2, R, dtype=torch.bool, device=dev)
    live[slots.long()] = order.argsort(1) < counts[:, None]
    x_ring = normal(S + 2, H, R, P).to(dtype).masked_fill_(~live[:, None, :, None], float("nan"))
    dt_ring = 0.1 * torch.rand(S + 2, H, R, generator=rng, device=dev)
    dt_ring.masked_fill_(~live[:, None], float("nan"))
    B_ring = normal(S + 2, G, R, N).to(dtype).masked_fill_(~live[:, None, :, None], float("nan"))
    if T > 1:
        slots[S // 2] = -1
    args: Args = {
        "x": normal(T, H, P).to(dtype),
        "dt": normal(T, H).to(dtype),
        "A": -1 - 15 * torch.rand(H, generator=rng, device=dev),
        "B": normal(T, G, N).to(dtype),
        "C": normal(T, G, N).to(dtype),
        "D": normal(H),
        "dt_bias": normal(H) - 4,
        "state": state,
        "x_ring": x_ring,
        "dt_ring": dt_ring,
        "B_ring": B_ring,
        "cu": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(dev),
        "slots": slots,
        "counts": counts,
        "order": order.int(),
        "max_new": case.NEW,
        "scales": scales,
    }
    if fmt.stochastic:
        args["noise"] = make_noise(S, dev, rng)
    if case.TREE:
        parents = [(t - 1) // 2 if t else -1 for n in lengths for t in range(n)]  # binary trees
        args["parents"] = torch.tensor(parents, dtype=torch.int32, device=dev)
    return args


def _cases(config: object) -> list[Case]:
    mamba = getattr(config, "mamba", None)
    if mamba is None:
        return []
    sizes = {"H": mamba.heads, "P": mamba.head_dim, "N": mamba.state, "G": mamba.groups}
    return [
        Case(**sizes, STATE=state, NEW=new, TREE=tree)
        for state in STATE_AXES
        for new, tree in ((1, 0), (4, 0), (4, 1))
    ]


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    """The mean of a cycle: windows half full, one state in REPLAY_INTERVAL tokens written."""
    S, size = cdiv(T, case.NEW), case.H * case.P * case.N
    rows = S * case.H * case.P * STATE_AXES[case.STATE].row_bytes(case.N)
    states = rows * (1 + 1 / REPLAY_INTERVAL)
    entry = (case.H * case.P + case.G * case.N) * dtype.itemsize + 4 * case.H
    tokens = T * ((2 * case.H * case.P + 2 * case.G * case.N + case.H) * dtype.itemsize + entry)
    return Cost(6 * T * size, int(states + S * (REPLAY_INTERVAL + 1) / 2 * entry) + tokens)


SSM_REPLAY = KernelSpec(
    terms=lambda case: case.N + REPLAY_INTERVAL,
    op=ssm_replay,
    kernels=(_replay_chain, _replay_tree),
    cases=_cases,
    small=[
        Case(H=2, P=8, N=16, G=2, STATE="fp32", NEW=1, TREE=0),
        Case(H=3, P=5, N=20, G=1, STATE="bf16", NEW=3, TREE=0),
        Case(H=2, P=24, N=48, G=2, STATE="fp16", NEW=6, TREE=1),
        Case(H=2, P=7, N=33, G=1, STATE="fp32", NEW=4, TREE=0),
        Case(H=2, P=5, N=20, G=1, STATE="fp16-sr", NEW=1, TREE=0),
        Case(H=1, P=6, N=24, G=1, STATE="fp16-sr", NEW=4, TREE=1),
        Case(H=2, P=5, N=20, G=2, STATE="int8", NEW=1, TREE=0),
        Case(H=1, P=7, N=16, G=1, STATE="int8", NEW=3, TREE=0),
        Case(H=1, P=6, N=20, G=1, STATE="int16", NEW=3, TREE=1),
    ],
    tokens=(1, 4, 16, 64, 256, 1024, 4096),
    make=_make_ssm_replay,
    tiles=replay_tiles,
    default=replay_default,
    fixed=UNORDERED,  # bits are those of the columns alone, whatever the tile
    cost=_cost,
    mutates=("state", "scales", "x_ring", "dt_ring", "B_ring"),
    meaning=meant,
    per_token=("x", "dt", "B", "C"),
    strided=("x", "dt", "B", "C"),
)
