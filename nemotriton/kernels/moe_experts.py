"""Routed experts: for every (token, expert) pair a relu^2 MLP, summed with the router's weights.

    h[p]   = relu(up[e] x[t])^2          fp32 accumulate, rounded once to x's dtype       [F]
    row[p] = w[p] * (down[e] h[p])       fp32, not rounded                                [L]
    y[t]   = sum of row[t*K + j] over j = 0..K-1 in that order, fp32, rounded to x's dtype

for pair p = t*K + j of token t and expert e = ids[t, j]. T tokens, K experts a token, E experts,
F expert width, L what an expert reads (the latent width, or the model's). x [T, L], up [E, F, L]
and down [E, L, F] in one dtype. No bias, no gate, no shared expert: those are not routed.
"""

import torch

from nemotriton.errors import UnsupportedError, require
from nemotriton.kernels.moe_route import Routing
from nemotriton.kernels.op import acc_dtype, op


# ------------------------------------------------------------------------------------ run_experts
def experts_ref(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The experts from ids [T, K] and weights [T, K] alone; differentiable in all but the ids."""
    f = acc_dtype(x)
    T, K = ids.shape
    flat, order = ids.flatten().sort(stable=True)
    rows = []
    for e, pairs in zip(flat.unique_consecutive().tolist(), _runs(flat, order)):
        h = torch.relu(x[pairs // K].to(f) @ up[e].to(f).T).square().to(x.dtype)
        rows.append(h.to(f) @ down[e].to(f).T)
    if not rows:
        return x.new_zeros(T, down.shape[1])
    y = torch.cat(rows)[order.argsort()].unflatten(0, (T, K))
    return (y * weights[..., None].to(f)).sum(1).to(x.dtype)


def _runs(flat: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return order.split(flat.unique_consecutive(return_counts=True)[1].tolist())


def run_experts_ref(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Twin of `run_experts`."""
    _check(x, up, down, routing)
    return experts_ref(x, up, down, routing.ids, routing.weights)


def _check(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, routing: Routing) -> None:
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    T, L = x.shape
    E, F = up.shape[:2]
    shapes = f"up {tuple(up.shape)}, down {tuple(down.shape)}"
    require(up.shape == (E, F, L) and down.shape == (E, L, F), f"x of width {L} with {shapes}")
    require(routing.ids.shape[0] == T, f"{T} tokens, but a routing of {routing.ids.shape[0]}")
    require(
        routing.offsets.shape == (E + 1,),
        f"the routing is over {routing.offsets.shape[0] - 1} experts, the weights have {E}",
    )


@op(ref=run_experts_ref)
def run_experts(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Run every routed expert on its tokens and sum them by weight.

    x [T, L], up [E, F, L], down [E, L, F] in one dtype; returns [T, L] in x's dtype."""
    raise UnsupportedError("run_experts has no Triton kernel yet; use(run_experts='ref')")
