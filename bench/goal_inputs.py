"""Inputs of exactly the shape that a goal names: no pads, every sequence of the same length.

The specs' own inputs are ragged and carry pads, which is right for a gate and wrong for a figure
that is to be held beside another library's.
"""

from collections.abc import Callable, Sequence

import torch

from nemotriton.kernels.moe_few import FEWEST, FIRST, find_blocks_ref
from nemotriton.kernels.moe_route import route_experts_ref
from nemotriton.kernels.op import DTYPES, Args, Case
from nemotriton.kernels.paged import attention_inputs
from nemotriton.kernels.ssd import chunk_table
from nemotriton.kernels.ssm_replay import REPLAY_INTERVAL, ring_places
from nemotriton.kernels.ssm_state import STATE_AXES, round_state_ref
from nemotriton.kernels.ssm_update import make_noise

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


def replaying(new: int, tree: bool = False) -> Make:
    """T / new sequences, in all phases of their rings alike; some store a state in this call.

    A sequence holds 1 .. 16 entries with one token a call; in a verify pass up to two more, as
    many as are accepted on the average."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        S, places, fmt = T // new, ring_places(REPLAY_INTERVAL, new), STATE_AXES[case.STATE]
        state, scales = round_state_ref(states(case, S, dev, torch.float32, rng), fmt.dtype)
        most = REPLAY_INTERVAL + (2 if new > 1 else 0)
        counts = 1 + 5 * torch.arange(S, dtype=torch.int32, device=dev) % most
        shapes = {"x_ring": (case.H, places, case.P), "B_ring": (case.G, places, case.N)}
        args = projection_slices(case, T, dev, dtype, rng)
        for name, shape in shapes.items():
            args[name] = torch.randn(S, *shape, generator=rng, device=dev).to(dtype)
        steps = torch.rand(S, case.H, places, generator=rng, device=dev)
        args = sequences(args, [new] * S, dev) | {
            "state": state,
            "scales": scales,
            "dt_ring": 0.1 * steps,
            "counts": counts,
            "order": torch.arange(places, dtype=torch.int32, device=dev).repeat(S, 1),
            "max_new": new,
        }
        if fmt.stochastic:
            args["noise"] = make_noise(S, dev, rng)
        if tree:
            parents = [(t - 1) // 2 if t else -1 for t in range(new)] * S
            args["parents"] = torch.tensor(parents, dtype=torch.int32, device=dev)
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
    """A spec's experts with every expert equally likely; of a few tokens with the blocks of pairs
    that the router writes beside the shared expert (`share_expert`), as in a decode step."""

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        logits = torch.randn(T, case.E, device=dev, generator=rng)
        routing = route_experts_ref(logits, None, case.K, 1, 1, True, 2.5)
        if FIRST <= T <= FEWEST:
            routing = find_blocks_ref(routing)
        return spec_make(case, T, dev, dtype, rng) | {"routing": routing}

    return make
