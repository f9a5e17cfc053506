"""Selective state update: one to a few tokens a sequence against its stored state (Mamba-2).

    dt = clamp(softplus(dt + dt_bias), dt_limit)          A < 0 and D are one scalar a head
    h  = exp(dt A) h + (dt x) B^T                          h [P, N]; B, C of group head // (H / G)
    y  = h C + D x,   times silu(z) where a gate is given  (Dao & Gu 2024, the recurrent form)

x, z [T, H, P], dt [T, H], B, C [T, G, N] may be slices of a wider row; y [T, H, P] has x's dtype.
Everything is computed in fp32; the state [slots, H, P, N] is rounded to its own format after every
token, so that several tokens in one call give the bits of as many calls with one. The formats, with
a scale a row or stochastic rounding, are in `ssm_state.py`.

With several tokens a sequence (draft verification) `lanes[slot, t]` keeps the state after token t,
`update_state=False` leaves the stored one alone, and `parents` makes the tokens a tree: token t
continues from the state after token parents[t] < t of its sequence, from the stored one at -1. A
token of a tree gets the bits of the chain that leads to it: its path is computed again from the
stored state (the work is quadratic in the few tokens, the traffic is not), since reading back a
lane would need a barrier and a buffer. The kernels are in `ssm_step.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from einops import repeat

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import FixedOrder
from nemotriton.kernels.numerics import silu_ref, softplus_ref
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
from nemotriton.kernels.ssm_state import (
    CODE_MAX,
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
from nemotriton.kernels.ssm_step import _ssm_update, _update_chain, _update_tree


# ------------------------------------------------------------------------------------------ twins
def time_step_ref(
    dt: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float] = (0.0, float("inf"))
) -> torch.Tensor:
    """Step sizes clamp(softplus(dt + dt_bias), dt_limit): dt [..., H] -> fp32 (fp64 from fp64)."""
    f = acc_dtype(dt)
    return softplus_ref(dt.to(f) + dt_bias.to(f)).clamp(*dt_limit)


def ssm_step_ref(
    h: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of the recurrence in h's dtype: h [H, P, N], x [H, P], dt [H] (a step size from
    `time_step_ref`), B, C [G, N] -> (y [H, P], the next h)."""
    f, per_group = h.dtype, x.shape[-2] // B.shape[-2]
    B, C = (repeat(v.to(f), "g n -> (g r) n", r=per_group) for v in (B, C))
    x, dt, A, D = x.to(f), dt.to(f), A.to(f), D.to(f)
    h = h * (dt * A).exp()[:, None, None] + (dt[:, None] * x)[..., None] * B[:, None, :]
    return (h * C[:, None, :]).sum(-1) + D[:, None] * x, h


def ssm_update_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    max_new: int,
    z: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    lanes: torch.Tensor | None = None,
    update_state: bool = True,
    parents: torch.Tensor | None = None,
    lane_slots: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    lane_scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Twin of `ssm_update`: sequence by sequence, token by token."""
    f, starts, y = acc_dtype(x), cu.tolist(), torch.zeros_like(x)
    dt = time_step_ref(dt, dt_bias, dt_limit)
    for s, slot in enumerate(slots.tolist()):
        count = starts[s + 1] - starts[s] if slot >= 0 else 0
        seen = {-1: (read_state_ref(state, scales, slot, f), 0)}  # with the length of the path
        for t, row in enumerate(range(starts[s], starts[s] + count)):
            parent = t - 1 if parents is None else int(parents[row])
            h, depth = seen[parent]
            out, h = ssm_step_ref(h, x[row], dt[row], A, B[row], C[row], D)
            y[row] = (out if z is None else out * silu_ref(z[row].to(f))).to(x.dtype)
            kept = round_state_ref(h, state.dtype, drawn_ref(noise, s, depth - count, h))
            seen[t] = restore_state_ref(*kept, f), depth + 1
            home = slot if lane_slots is None else int(lane_slots[s])
            write_state_ref(*kept, lanes, lane_scales, home, t)
            if update_state and t == count - 1:
                write_state_ref(*kept, state, scales, slot)
    return y


# --------------------------------------------------------------------------------------------- op
@op(ref=ssm_update_ref)
def ssm_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    cu: torch.Tensor,
    slots: torch.Tensor,
    max_new: int,
    z: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    lanes: torch.Tensor | None = None,
    update_state: bool = True,
    parents: torch.Tensor | None = None,
    lane_slots: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    lane_scales: torch.Tensor | None = None,
    noise: StateNoise | None = None,
) -> torch.Tensor:
    """Advance every sequence by its 0..max_new new tokens; returns y [T, H, P] in x's dtype.

    x [T, H, P], dt [T, H], B, C [T, G, N]: rows of packed tokens, `cu` [S+1] where they start.
    state [slots, H, P, N]: slots[s] is read and, with update_state, written; slot -1 is a pad.
    lanes [slots, >= max_new, H, P, N] in state's dtype: lanes[slot, t] becomes the state after new
    token t; lane_slots int32 [S] says which slot of `lanes` where it is not that of `state`, and
    then a lane may be the very memory that the state is read from. parents int32 [T]: the new
    token, counted within its sequence, that each continues from, -1 for the stored state; parents
    stand before their children. A tree has no one final state, so it needs update_state=False.
    scales fp32 [slots, H, P] and lane_scales [slots, >= max_new, H, P]: of int16 and int8 states.
    noise: for fp16 states with stochastic rounding. A token of a tree has its path's position."""
    T, H, P = x.shape
    G, N = check_rows(x, dt, B, C, state, z)
    check_state(state, scales, noise, slots.shape[0])
    _check_lanes(state, lanes, lane_scales, slots, lane_slots, max_new, update_state, parents)
    y = torch.empty((T, H, P), dtype=x.dtype, device=x.device)
    single = max_new == 1 and lanes is None and parents is None
    axes = {"H": H, "P": P, "N": N, "G": G, "STATE": state_axis(state, noise)}
    tile = SSM_UPDATE.tile(T, x, **axes, NEW=1 if single else 4, TREE=int(parents is not None))
    each, tile = int(tile.get("EACH", 1)) if single else 1, tile.without("EACH")
    grid = (slots.shape[0] * H * cdiv(P, int(tile["BLOCK_P"]) * each),)
    seeds, lengths, layer = (None, None, 0) if noise is None else noise
    tensors = (x, dt, A, B, C, D, dt_bias, z, y, state, scales, seeds, lengths)
    strides = (x.stride(0), x.stride(1), dt.stride(0), *B.stride()[:2], *C.stride()[:2])
    gate = (0, 0) if z is None else z.stride()[:2]
    ints = (layer, *strides, *gate, state.stride(0), _slot_stride(scales))
    rest = (H, H // G, float(dt_limit[0]), float(dt_limit[1]), P, N)
    late = {"UPDATE": update_state, **as_dependent(x)}
    if single:
        launch(_ssm_update, grid, *tensors, cu, slots, *ints, *rest, EACH=each, **late, **tile)
        return y
    index = (lanes, lane_scales, cu, slots, lane_slots)
    where = (*ints, _slot_stride(lanes), _slot_stride(lane_scales), *rest)
    if parents is None:
        launch(_update_chain, grid, *tensors, *index, *where, **late, **tile)
    else:
        launch(_update_tree, grid, *tensors, *index, parents, *where, **tile)
    return y


def _slot_stride(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def check_rows(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    z: torch.Tensor | None = None,
) -> tuple[int, int]:
    """G and N, once shapes and strides fit together; UnsupportedError names what does not."""
    T, H, P = x.shape
    G, N = B.shape[1:]
    require(H % G == 0, f"{H} heads cannot share {G} groups evenly")
    shapes = {"dt": (dt, (T, H)), "B": (B, (T, G, N)), "C": (C, (T, G, N)), "x": (x, (T, H, P))}
    if z is not None:
        shapes["z"] = (z, (T, H, P))
    for name, (value, shape) in shapes.items():
        require(
            value.shape == shape and (value.stride(-1) == 1 or value.shape[-1] == 1),
            f"{name} must be {shape} with unit stride in its last dimension, got "
            f"{tuple(value.shape)} with strides {value.stride()}",
        )
    require(
        state.shape[1:] == (H, P, N) and state[:1].is_contiguous(),
        f"the state must be [slots, {H}, {P}, {N}] with contiguous slots, got {tuple(state.shape)}",
    )
    return G, N


def _check_lanes(
    state: torch.Tensor,
    lanes: torch.Tensor | None,
    lane_scales: torch.Tensor | None,
    slots: torch.Tensor,
    lane_slots: torch.Tensor | None,
    max_new: int,
    update_state: bool,
    parents: torch.Tensor | None,
) -> None:
    require(
        lane_slots is None or lane_slots.shape == slots.shape,
        f"lane_slots must name a slot for each of {slots.shape[0]} sequences",
    )
    if lanes is not None:
        wanted = tuple(lanes.shape[:-1]) if state.dtype in CODE_MAX else None
        got = None if lane_scales is None else tuple(lane_scales.shape)
        require(got == wanted, f"lanes of {state.dtype} need lane_scales {wanted}, got {got}")
        require(
            lanes.shape[1] >= max_new and lanes.shape[2:] == state.shape[1:],
            f"lanes must be [slots, at least {max_new}, {', '.join(map(str, state.shape[1:]))}], "
            f"got {tuple(lanes.shape)}",
        )
        require(lanes.dtype == state.dtype, f"lanes are {lanes.dtype}, the state {state.dtype}")
        require(lanes[:1].is_contiguous(), "the lanes of a slot must be contiguous")
    if parents is not None:
        require(not update_state, "a draft tree has no one final state: pass update_state=False")
        require(max_new <= 63, f"a tree may have up to 63 tokens a sequence, not {max_new}")


def _make_ssm_update(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    """Sequences of 1..NEW tokens, a pad at the end; where NEW > 1 a verify step."""
    lengths: list[int] = []
    left = T
    while left:
        lengths.append(min(left, len(lengths) % case.NEW + 1))
        left -= lengths[-1]
    lengths += [0] * (case.NEW > 1)
    S = len(lengths)
    slots = torch.randperm(S + 2, generator=rng, device=dev)[:S].int()
    if T > 1:
        slots[len(lengths) // 2] = -1
    H, P, N, G = case.H, case.P, case.N, case.G

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=dev)

    fmt = STATE_AXES[case.STATE]
    state, scales = unowned_state((S + 2, H, P, N), fmt.dtype, dev)
    kept, kept_scales = round_state_ref(normal(S, H, P, N), fmt.dtype)
    state[slots.long()] = kept
    if scales is not None and kept_scales is not None:
        scales[slots.long()] = kept_scales
    args: Args = {
        "x": normal(T, H, P).to(dtype),
        "dt": normal(T, H).to(dtype),
        "A": -1 - 15 * torch.rand(H, generator=rng, device=dev),
        "B": normal(T, G, N).to(dtype),
        "C": normal(T, G, N).to(dtype),
        "D": normal(H),
        "dt_bias": normal(H) - 4,
        "state": state,
        "cu": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(dev),
        "slots": slots,
        "max_new": case.NEW,
        "scales": scales,
    }
    if case.NEW > 1:
        lanes = unowned_state((S + 2, case.NEW + 1, H, P, N), fmt.dtype, dev)
        args |= {"lanes": lanes[0], "lane_scales": lanes[1], "update_state": False}
    if fmt.stochastic:
        args["noise"] = make_noise(S, dev, rng)
    if case.TREE:
        parents = [(t - 1) // 2 if t else -1 for n in lengths for t in range(n)]  # binary trees
        args["parents"] = torch.tensor(parents, dtype=torch.int32, device=dev)
    return args


def unowned_state(
    shape: tuple[int, ...], dtype: torch.dtype, dev: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States (and scales) that nobody wrote yet: NaN."""
    if dtype not in CODE_MAX:
        return torch.full(shape, float("nan"), device=dev, dtype=dtype), None
    codes = torch.full(shape, 77, device=dev, dtype=dtype)
    return codes, torch.full(shape[:-1], float("nan"), device=dev)


def make_noise(S: int, dev: torch.device, rng: torch.Generator) -> StateNoise:
    """Seeds of both signs and long contexts, for S sequences of at most 1,000 new tokens."""
    seeds = torch.randint(-(2**62), 2**62, (S,), generator=rng, device=dev)
    lengths = torch.randint(1000, 2**20, (S,), generator=rng, device=dev).int()
    return StateNoise(seeds, lengths, layer=39)


def meant(values: Mapping[str, Any]) -> dict[str, Any]:
    """Codes and scales among named tensors replaced by the numbers they mean."""
    found = dict(values)
    for name, scales in (("state", "scales"), ("lanes", "lane_scales")):
        if found.get(scales) is not None:
            found[name] = restore_state_ref(found[name], found.pop(scales))
    return found


def _default_tile(case: Case, tokens: int) -> Tile:
    """One warp with a few rows of the state, more of them as the batch fills the machine."""
    heads, width = cdiv(tokens, case.NEW) * case.H, next_pow2(case.N)
    if case.NEW == 1 and width >= 128 and case.P >= 32:
        raced = _raced(case.STATE, heads)
        if raced is not None:
            return _tile(case, *raced)
    lane = 16 if heads < 1024 else 32 if heads < 16384 else 64  # elements a thread
    if case.STATE != "fp32":
        lane = min(2 * lane, 64)  # half the bytes, or a quarter
    if case.NEW > 1:
        lane = min(lane, 32)  # the next token's inputs, or a path's state, take registers too
    if case.TREE and case.STATE in ("fp16-sr", "int16"):
        lane = min(lane, 16)  # and so does their rounding: 32 spill
    return _tile(case, min(max(lane * 32 // width, 1), next_pow2(case.P)))


def _raced(state: str, heads: int) -> tuple[int, int, int] | None:
    """(rows, warps, blocks of a program) that were the fastest on an H200."""
    if state in ("bf16", "fp16"):
        return 32, 2, 1
    if heads < 2048:
        return None
    if state == "fp32":
        return 8 if heads < 32768 else 16, 1, 2
    return (8, 1, 4) if state == "int8" else None


def _tile(case: Case, rows: int, warps: int = 1, each: int = 1) -> Tile:
    """EACH: blocks of rows that a program of one token takes, one after the other."""
    tile = Tile(BLOCK_P=rows, BLOCK_N=next_pow2(case.N), num_warps=warps, num_stages=1)
    return tile if case.NEW > 1 else tile.but(EACH=each)


def _tiles(case: Case) -> list[Tile]:
    whole = [
        _tile(case, p, w)
        for p in (2, 4, 8, 16, 32, 64)
        for w in (1, 2, 4)
        if p <= next_pow2(case.P) and 8 <= p * next_pow2(case.N) // (32 * w) <= 64
    ]
    if case.NEW > 1:
        return whole
    several = ((4, 4), (4, 8), (4, 16), (8, 2), (8, 4), (8, 8), (16, 2), (16, 4))
    return [*whole, *(_tile(case, p, each=n) for p, n in several if p * n <= next_pow2(case.P))]


def _suits(tile: Tile, tokens: int) -> bool:
    """Small programs while they do not fill the machine, none of the smallest beyond."""
    lane = tile["BLOCK_P"] * tile["BLOCK_N"] // (32 * tile["num_warps"])
    return lane <= 32 if tokens <= 4 else lane >= 16


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
    S, size = cdiv(T, case.NEW), case.H * case.P * case.N
    one = case.H * case.P * STATE_AXES[case.STATE].row_bytes(case.N)
    states = S * one * (2 if case.NEW == 1 else 1 + case.NEW)
    rows = T * (2 * case.H * case.P + 2 * case.G * case.N + case.H)
    return Cost(6 * T * size, states + rows * dtype.itemsize)


SSM_UPDATE = KernelSpec(
    terms=lambda case: case.N,
    op=ssm_update,
    kernels=(_ssm_update, _update_chain, _update_tree),
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
    make=_make_ssm_update,
    tiles=_tiles,
    suits=_suits,
    default=_default_tile,
    fixed=FixedOrder(
        # rows of a state share no sum
        lambda tile: (tile["BLOCK_N"], tile["num_warps"]),
        blind={"NEW": 4, "TREE": 1},
    ),
    cost=_cost,
    mutates=("state", "scales", "lanes", "lane_scales"),
    meaning=meant,
    per_token=("x", "dt", "B", "C"),
    strided=("x", "dt", "B", "C"),
)
