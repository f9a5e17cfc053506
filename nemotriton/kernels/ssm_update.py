"""Selective state update: one to a few tokens a sequence against its stored state (Mamba-2).

    dt = clamp(softplus(dt + dt_bias), dt_limit)          A < 0 and D are one scalar a head
    h  = exp(dt A) h + (dt x) B^T                          h [P, N]; B, C of group head // (H / G)
    y  = h C + D x,   times silu(z) where a gate is given  (Dao & Gu 2024, the recurrent form)

x, z [T, H, P], dt [T, H], B, C [T, G, N] may be slices of a wider row; the state [slots, H, P, N]
is read and written in its own dtype, everything between is fp32, y has x's dtype.

With several tokens a sequence (draft verification) `lanes[slot, t]` keeps the state after token t,
`update_state=False` leaves the stored state alone, and `parents` makes the tokens a tree: token t
continues from the state of token parents[t] < t of its sequence, -1 from the stored one. A token of
a tree gives the result its path would give as a chain; nothing is rounded on the way.
"""

import torch
import torch.nn.functional as F
from einops import repeat

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.op import acc_dtype, op


def time_step_ref(
    dt: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float] = (0.0, float("inf"))
) -> torch.Tensor:
    """Step sizes clamp(softplus(dt + dt_bias), dt_limit): dt [..., H] -> fp32 (fp64 from fp64)."""
    f = acc_dtype(dt)
    return F.softplus(dt.to(f) + dt_bias.to(f)).clamp(*dt_limit)


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
) -> torch.Tensor:
    """Twin of `ssm_update`: sequence by sequence, token by token."""
    f = acc_dtype(x)
    dt, y, starts = time_step_ref(dt, dt_bias, dt_limit), torch.zeros_like(x), cu.tolist()
    for s, slot in enumerate(slots.tolist()):
        seen: list[torch.Tensor] = []
        for t, row in enumerate(range(starts[s], starts[s + 1] if slot >= 0 else starts[s])):
            parent = t - 1 if parents is None else int(parents[row])
            h = seen[parent] if parent >= 0 else state[slot].to(f)
            out, h = ssm_step_ref(h, x[row], dt[row], A, B[row], C[row], D)
            y[row] = (out if z is None else out * F.silu(z[row].to(f))).to(x.dtype)
            seen.append(h)
            if lanes is not None:
                lanes[slot, t] = h.to(lanes.dtype)
        if seen and update_state:
            state[slot] = seen[-1].to(state.dtype)
    return y


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
) -> torch.Tensor:
    """Advance every sequence by its 1..max_new new tokens; returns y [T, H, P] in x's dtype."""
    raise UnsupportedError("ssm_update has no kernel yet; use(ssm_update='ref')")
