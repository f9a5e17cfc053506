"""Does a row depend on its neighbours? An op's rows or sequences among others, and alone.

A call of a SPEC's inputs is run once whole, then for some of its sequences (rows, where an op knows
no sequences) as a call of their own; outputs and what was written in place are compared bit by bit.
"""

from collections.abc import Iterator
from typing import Any

import torch

from nemotriton.autotune.parity import copy, named
from nemotriton.kernels.moe_fixed import routing_row
from nemotriton.kernels.moe_route import Routing
from nemotriton.kernels.op import Args, KernelSpec

BY_SEQUENCE = ("slots", "lengths", "pages", "counts", "order", "fresh")
BY_ROW = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")


def alone(spec: KernelSpec, args: Args, index: int) -> tuple[Args, slice] | None:
    """The arguments of sequence (or row) `index` alone, and its rows; None for an empty one or a
    pad."""
    one = copy(args)
    if "cu" not in args:
        rows = slice(index, index + 1)
        for name in (*spec.per_token, *BY_ROW):
            if isinstance(one.get(name), torch.Tensor):
                one[name] = args[name][rows]
        if spec.op.name == "share_expert":  # logits in parts
            one["logits"] = args["logits"][:, rows]
        if "routing" in one:
            one["routing"] = routing_row(args["routing"], index)
        return one, rows
    start, end = args["cu"][index : index + 2].tolist()
    pad = "slots" in args and int(args["slots"][index]) < 0
    if start == end or pad or ("lengths" in args and int(args["lengths"][index]) == 0):
        return None
    rows, own = slice(start, end), slice(index, index + 1)
    for name in (*spec.per_token, "parents"):
        if isinstance(one.get(name), torch.Tensor):
            one[name] = args[name][rows]
    for name in BY_SEQUENCE:
        if isinstance(one.get(name), torch.Tensor):
            one[name] = args[name][own]
    one["cu"] = args["cu"].new_tensor([0, end - start])
    if "max_new" in one:
        one["max_new"] = end - start
    if "max_length" in one:
        one["max_length"] = int(args["lengths"][index])
    if one.get("noise") is not None:
        seeds, lengths, layer = args["noise"]
        one["noise"] = type(args["noise"])(seeds[own], lengths[own], layer)
    if one.get("chunks") is not None:
        mine = args["chunks"][args["chunks"][:, 0] == index].clone()
        mine[:, 0], mine[:, 1] = 0, mine[:, 1] - start
        one["chunks"] = mine
    return one, rows


def _outputs(spec: KernelSpec, args: Args) -> dict[str, torch.Tensor]:
    """What a call returned and wrote in place, but for what is all tokens' together."""
    return named(_of_rows(spec.op.triton(**args)), args, spec)


def _of_rows(result: Any) -> Any:
    if isinstance(result, Routing):  # the rest is of sorted pairs, or of blocks
        return result.ids, result.weights
    return tuple(map(_of_rows, result)) if isinstance(result, tuple) else result


def differing(spec: KernelSpec, args: Args, most: int = 6) -> Iterator[str]:
    """What of up to `most` sequences (or rows), spread over the call, is not the same alone."""
    whole = _outputs(spec, copy(args))
    count = args["cu"].shape[0] - 1 if "cu" in args else args[spec.per_token[0]].shape[0]
    chosen = sorted({i * (count - 1) // max(most - 1, 1) for i in range(most)} if count else ())
    for index in chosen:
        found = alone(spec, args, index)
        if found is None:
            continue
        one, rows = found
        for name, got in _outputs(spec, one).items():
            want = whole[name]
            if name in spec.mutates:
                at = int(args["slots"][index])
                got, want = got[at], want[at]
            elif spec.op.name == "enter_moe" and name == "out0":
                want = want[:, rows]
            else:
                want = want[rows]
            if not same_bits(got, want):
                off = float((got.float() - want.float()).abs().nan_to_num(0).max())
                yield f"{name} of {index} of {count}: {off:.3g}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN to NaN."""
    a, b = a.contiguous(), b.contiguous()
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
