"""One request that is not finite among others: what these get and keep has the same bits."""

from typing import Any

import torch
from torch import Tensor

from nemotriton.autotune import parity
from nemotriton.kernels.op import Args, Case, KernelSpec

POOLS = ("state", "scales", "lanes", "lane_scales", "x_ring", "dt_ring", "B_ring")
INF, NAN = float("inf"), float("nan")
ALL = {"x": INF, "dt": NAN, "B": NAN, "C": NAN, "state": NAN}
SPOILT = [{"x": INF}, dict.fromkeys(("x", "dt", "B", "C"), INF), ALL]


def check_others(
    spec: KernelSpec, case: Case, tokens: int, where: torch.device, spoilt: list[dict[str, float]]
) -> None:
    """Spoil a sequence of several tokens, where there are any, with others before and behind it."""
    args = spec.make(case, tokens, where, torch.bfloat16, parity.generator(5, where))
    cu, slots = args["cu"].tolist(), args["slots"].tolist()
    counts = [b - a if slot >= 0 else 0 for a, b, slot in zip(cu, cu[1:], slots)]
    live = [s for s, n in enumerate(counts) if n]
    sick = max(live[1:-1], key=lambda s: counts[s])
    well = run(spec, args)
    rows = [*range(cu[sick], cu[sick + 1])]
    for values in spoilt:
        found = run(spec, spoil(args, values, sick))
        assert not found["y"][rows].isfinite().any(), f"{values} left no trace"
        for name, value in found.items():
            rest = torch.ones(len(value), dtype=torch.bool)
            rest[rows if name == "y" else [slots[sick]]] = False
            same = (bits(value) == bits(well[name]))[rest.to(where)]
            assert bool(same.all()), f"{values} in one request changes {name} of another"


def spoil(args: Args, values: dict[str, float], sick: int) -> Args:
    mine = parity.copy(args)
    first, end = mine["cu"][sick : sick + 2].tolist()
    for name, value in values.items():
        if name == "state":
            pool = mine["state"] if mine.get("scales") is None else mine["scales"]
            pool[int(mine["slots"][sick])] = value
        else:
            mine[name][first:end] = value
    return mine


def run(spec: KernelSpec, args: Args) -> dict[str, Tensor]:
    """y and all that the call may have written; `args` stay as they are."""
    mine = parity.copy(args)
    found: dict[str, Any] = {"y": spec.op.triton(**mine)}
    return found | {name: mine[name] for name in POOLS if mine.get(name) is not None}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).flatten(1)
