"""The router of a mixture of experts, and the sort of (token, expert) pairs by expert.

    score  = sigmoid(logits)                                                         [T, E]
    choice = score + bias                      the bias chooses, it never weighs
    group limit (DeepSeek-V3, arXiv 2412.19437): the experts lie in `router_groups` equal groups; a
             group is worth the sum of its two best choices (a group of one: its only one) and the
             experts of the `top_groups` best groups stay
    ids    = the K largest choices, best first                                       [T, K]
    weight = score[ids], then / (sum + 1e-20) if `normalize`, then * scale           [T, K]

Ties, of experts and of groups, go to the lowest index. Choices are compared in fp32, where the
score is the float32 nearest to the true sigmoid (computed in float64 and rounded once): the twin
and the kernel then choose the same experts, which two float32 sigmoids an ulp apart would not.
The twin on float64 inputs (the oracle) chooses from the float32 score too, and weighs in float64.
A NaN choice sorts below every number, so the ids of such a row are valid and its weights NaN.

T tokens, E experts, K experts a token; logits and bias fp32, ids int32, weights fp32.
"""

from typing import NamedTuple

import torch

from nemotriton.errors import UnsupportedError, require
from nemotriton.kernels.op import acc_dtype, op
from nemotriton.kernels.order import top_indices


class Routing(NamedTuple):
    """Where each token goes, and the pairs of each expert.

    ids [T, K] int32 and weights [T, K] fp32 by token, best expert first; order [T*K] int32 holds
    the flat pairs t*K + j sorted by expert, in token order within one; expert e owns
    order[offsets[e]:offsets[e+1]], offsets [E+1] int32."""

    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor


# ---------------------------------------------------------------------------------- route_experts
def route_experts_ref(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Twin of `route_experts`; differentiable from logits to weights."""
    E = _check(logits, bias, top_k, router_groups, top_groups)
    score = torch.sigmoid(logits.double())
    choice = score.float().detach()
    if bias is not None:
        choice = choice + bias.float()
    if router_groups > 1:
        grouped = choice.unflatten(-1, (router_groups, -1))
        two = top_indices(grouped, min(2, grouped.shape[-1]))
        best = top_indices(grouped.gather(-1, two).sum(-1), top_groups).sort(-1).values
        # the experts of the kept groups, ascending, so that ties still go to the lowest index
        size = grouped.shape[-1]
        pool = (best[..., None] * size + torch.arange(size, device=best.device)).flatten(-2)
        ids = pool.gather(-1, top_indices(choice.gather(-1, pool), top_k))
    else:
        ids = top_indices(choice, top_k)
    weights = score.to(acc_dtype(logits)).gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    pairs, order = ids.flatten().sort(stable=True)
    experts = torch.arange(E + 1, device=ids.device)
    offsets = torch.searchsorted(pairs, experts)
    return Routing(ids.int(), weights * scale, order.int(), offsets.int())


def _check(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, groups: int, top_groups: int
) -> int:
    require(logits.ndim == 2, f"logits must be [tokens, experts], got {tuple(logits.shape)}")
    E = logits.shape[1]
    if bias is not None:
        require(bias.shape == (E,), f"a bias of shape {tuple(bias.shape)} for {E} experts")
    require(
        groups >= 1 and E % groups == 0, f"{E} experts cannot be split into {groups} equal groups"
    )
    require(1 <= top_groups <= groups, f"top_groups is {top_groups}, of {groups} router groups")
    reachable = E // groups * top_groups
    require(
        1 <= top_k <= reachable,
        f"top_k is {top_k}, but {top_groups} of {groups} groups hold {reachable} experts",
    )
    return E


@op(ref=route_experts_ref)
def route_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    router_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose and weigh K experts a token, and sort the pairs by expert.

    logits [T, E] fp32, bias [E] fp32 or None; see the module's docstring and `Routing`."""
    raise UnsupportedError("route_experts has no Triton kernel yet; use(route_experts='ref')")
