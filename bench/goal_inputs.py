"""Inputs of exactly the shape that a goal names: no pads, every sequence of the same length.

The specs' own inputs are ragged and carry pads, which is right for a gate and wrong for a figure
that is to be held beside another library's.
"""

from collections.abc import Callable, Sequence

import torch

from nemotriton.kernels.moe_route import route_experts_ref
from nemotriton.kernels.op import DTYPES, Args, Case
from nemotriton.kernels.paged import attention_inputs
from nemotriton.kernels.ssd import chunk_table

Make = Callable[[Case, int, torch.device, torch.dtype, torch.Generator], Args]


def sequences(args: Args, lengths: Sequence[int], dev: torch.device) -> Args:
    """`args` with sequence boundaries of these lengths, each owning the slot of its number."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    slots = torch.arange(len(lengths), dtype=torch.int32, device=dev)
    return args | {"cu": ends.to(dev), "slots": slots}


def projection_slices(
    case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> Args:
    """x, dt, B, C of a Mamba layer as the slices of one in-projection, with its row stride."""
    inner, groups = case.H * case.P, case.G * case.N
    rows = torch.randn(T, 2 * inner + 2 * groups + case.H, generator=rng, device=dev).to(dtype)
    _, x, b, c, dt = rows.split([inner, inner, groups, groups, case.H], dim=1)
    return {
        "x": x.unflatten(1, (case.H, case.P)),
        "dt": dt,
        "A": -1 - 15 * torch.rand(case.H, generator=rng, device=dev),
        "B": b.unflatten(1, (case.G, case.N)),
        "C": c.unflatten(1, (case.G, case.N)),
        "D": torch.randn(case.H, generator=rng, device=dev),
        "dt_bias": torch.randn(case.H, generator=rng, device=dev) - 4,
    }


def states(
    case: Case, count: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
) -> torch.Tensor:
    return torch.randn(count, case.H, case.P, case.N, generator=rng, device=dev).to(dtype)


def decoding(new: int) -> Make:
    """T / new sequences that decode `new` tokens each; a verify pass keeps every token's state."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        state = states(case, T // new, dev, DTYPES[case.STATE], rng)
        args = projection_slices(case, T, dev, dtype, rng)
        args = sequences(args, [new] * (T // new), dev) | {"state": state, "max_new": new}
        if new > 1:
            args["lanes"] = torch.empty_like(state)[:, None].repeat(1, new, 1, 1, 1)
            args["update_state"] = False
        return args

    return make


def scanning(lengths: Sequence[int], fresh: bool) -> Make:
    """Whole prompts of these lengths, from empty states or from given ones."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        assert sum(lengths) == T
        args = projection_slices(case, T, dev, dtype, rng)
        table = torch.tensor(chunk_table(lengths, case.Q), dtype=torch.int32)
        return sequences(args, lengths, dev) | {
            "state": states(case, len(lengths), dev, torch.float32, rng),
            "fresh": torch.full((len(lengths),), fresh, device=dev),
            "chunks": table.reshape(-1, 3).to(dev),
            "chunk_size": case.Q,
        }

    return make


def convolving(new: int) -> Make:
    """A prompt of T tokens (`new` 0), or T / new sequences that decode `new` each; strided rows."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        lengths = [new] * (T // new) if new else [T]
        width = case.C + 8320  # beside it: the gate's columns and the time steps
        rows = torch.randn(T, width, generator=rng, device=dev).to(dtype)
        shape = (len(lengths), case.W - 1, case.C)
        state = torch.randn(shape, generator=rng, device=dev).to(dtype)
        args = {
            "x": rows[:, 8192 : 8192 + case.C],
            "weight": torch.randn(case.W, case.C, generator=rng, device=dev).to(dtype).t(),
            "bias": torch.randn(case.C, generator=rng, device=dev).to(dtype),
            "state": state,
            "max_new": max(lengths),
        }
        if not new:
            args["fresh"] = torch.ones(1, dtype=torch.bool, device=dev)
        elif new > 1:
            args["lanes"] = state[:, None].repeat(1, new, 1, 1)
            args["update_state"] = False
        return sequences(args, lengths, dev)

    return make


def attending(sequence_count: int, context: int, new: int) -> Make:
    """`new` tokens of each sequence over `context` keys before them."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        return attention_inputs(case, [(new, context + new)] * sequence_count, dev, dtype, rng)

    return make


def evenly_routed(spec_make: Make) -> Make:
    """A spec's experts with every expert equally likely."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        logits = torch.randn(T, case.E, device=dev, generator=rng)
        routing = route_experts_ref(logits, None, case.K, 1, 1, True, 2.5)
        return spec_make(case, T, dev, dtype, rng) | {"routing": routing}

    return make
