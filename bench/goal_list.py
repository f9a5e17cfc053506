"""What the kernels are to reach on one H200, at Nemotron 3 Super's shapes, and who is fastest else.

`reach` and the peers' figures are microseconds of one H200 (torch 2.11, Triton 3.6), each the best
of what was tried; the peers were checked for correctness before they were timed. Where a peer runs
in this process (torch), it is timed again beside the kernel and `reach` is a share of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench import goal_inputs as inputs
from nemotriton.kernels.op import SPECS, Args, Case, Cost, Tile

Rival = Callable[[Args], Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure to reach. `tokens` are all new tokens of the call.

    reach: microseconds; with a `rival`, the share of its speed. make: else the spec's own inputs.
    cost: else the spec's. tile: else the one that the op takes."""

    area: str
    label: str
    op: str
    case: Case
    tokens: int
    reach: float
    peer: str = ""
    make: inputs.Make | None = None
    cost: Cost | None = None
    rival: Rival | None = None
    tile: Tile | None = None


MAMBA = {"H": 128, "P": 64, "N": 128, "G": 8}
CONV = {"C": 10240, "W": 4}
ATTENTION = {"H": 32, "Hkv": 2, "Dh": 128, "page": 64, "fp8": 0}


def goals() -> list[Goal]:
    """All of them, in the order of a layer's work."""
    return [
        *norms(),
        *linears(),
        *convolutions(),
        *states(),
        *replays(),
        *scans(),
        *attention(),
        *experts(),
    ]


def norms() -> Iterator[Goal]:
    case = Case(D=4096)
    yield Goal("norm", "add + norm", "add_rms_norm", case, 8192, 67.0, "torch.compile 70.8")
    yield Goal("norm", "add + norm", "add_rms_norm", case, 1, 2.3, "torch.compile 2.6")


def linears() -> Iterator[Goal]:
    case = Case(N=18560, K=4096, ieee=0)
    for tokens in (1, 16, 64):
        yield Goal("linear", "bf16 in-projection", "matmul", case, tokens, 39.6, "cuBLAS 44-46")
    for tokens in (2048, 8192):
        yield Goal(
            "linear", "bf16 in-projection", "matmul", case, tokens, 0.9, "cuBLAS", rival=cublas
        )
    for (N, K), reach in {(18560, 4096): 0.88, (4096, 8192): 0.85, (5376, 4096): 0.70}.items():
        for tokens in (1, 16):
            us = N * K / 4.28e6 / reach
            peer = "cuBLAS 25.3" if N == 18560 else ""
            label = f"FP8 {N:,} x {K:,}"
            yield Goal("linear", label, "fp8_matmul", Case(N=N, K=K, Q=0), tokens, us, peer)
    case = Case(N=18560, K=4096, Q=1)
    label = "FP8, inputs quantised in it"
    yield Goal("linear", label, "fp8_matmul", case, 2048, 0.85, "cuBLAS", rival=cublas_fp8)
    for tokens in (1, 16):
        us = 0.5625 * 18560 * 4096 / 4.28e6 / 0.85
        yield Goal("linear", "NVFP4", "packed_matmul", Case(N=18560, K=4096), tokens, us)


def cublas(args: Args) -> torch.Tensor:
    return torch.nn.functional.linear(args["x"], args["weight"])


def cublas_fp8(args: Args) -> torch.Tensor:
    """The product alone: x's codes are taken once, before the timing."""
    if "codes" not in args:
        args["codes"] = (args["x"].float() / args["input_scale"]).to(torch.float8_e4m3fn)
    one = torch.ones((), device=args["x"].device)
    return torch._scaled_mm(
        args["codes"], args["weight"].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def convolutions() -> Iterator[Goal]:
    for tokens, reach, peer in ((8192, 85.0, 90), (51200, 532.0, 541)):
        op, made = "causal_conv1d", inputs.convolving(0)
        yield Goal("conv", "prompt", op, Case(**CONV), tokens, reach, f"CUDA {peer}", made)
    for tokens, reach, peer in ((1, 2.5, 2.2), (64, 4.5, 6.4), (256, 13.0, 20.0)):
        op, made = "causal_conv1d_update", inputs.convolving(1)
        case = Case(**CONV, N=1)
        yield Goal("conv", "one token", op, case, tokens, reach, f"vLLM {peer}", made)


def states() -> Iterator[Goal]:
    rows = {
        "bf16": {1: (3.3, 3.7), 16: (15.0, 18.0), 64: (67.0, 73.0), 256: (258.0, 276.0)},
        "fp32": {64: (131.0, 143.0), 256: (510.0, 563.0)},
    }
    for state, batches in rows.items():
        case = Case(**MAMBA, STATE=state, NEW=1, TREE=0)
        for batch, (reach, peer) in batches.items():
            label = f"{state} state, one token"
            made = inputs.decoding(1)
            yield Goal("state", label, "ssm_update", case, batch, reach, f"best {peer}", made)
    for new, peer in ((4, 378), (6, 531)):
        case = Case(**MAMBA, STATE="fp32", NEW=new, TREE=0)
        us = 64 * (1 + new) * 4.194304 / 4.28 / 0.92
        label, made = f"fp32 states of {new} tokens", inputs.decoding(new)
        yield Goal("state", label, "ssm_update", case, 64 * new, us, f"best {peer}", made)


def replays() -> Iterator[Goal]:
    """Mixed phases, so a call is the mean of a cycle: 1.15 times the best peer's speed, or nine
    tenths of the floor of the bytes that must move; batch 1 beside the plain update's best."""
    peers = {
        (1, "bf16"): {1: 3.7, 16: 19, 64: 55, 256: 183},
        (1, "fp32"): {1: 4.1, 16: 28, 64: 87, 256: 319},
        (4, "bf16"): {1: 5.1, 16: 21, 64: 61, 256: 217},
        (4, "fp32"): {1: 5.6, 16: 30, 64: 100, 256: 367},
        (6, "bf16"): {1: 5.4, 16: 22.9, 64: 68, 256: 247},
        (6, "fp32"): {1: 6.4, 16: 33.1, 64: 111, 256: 410},
        (1, "int8"): {256: 183 / 1.15 / 1.4 * 1.15},
    }
    for (new, state), batches in peers.items():
        for tree in (False, True) if new > 1 else (False,):
            case = Case(**MAMBA, STATE=state, NEW=1 if new == 1 else 4, TREE=int(tree))
            for batch, peer in batches.items():
                exact = Case(**{**case, "NEW": new})  # the kernel's own cases end at 4
                cost = SPECS["ssm_replay"].cost(exact, batch * new, torch.bfloat16)
                reach = peer if batch == 1 else max(peer / 1.15, cost.bytes / 4.28e6 / 0.9)
                label = f"{state} state, {new} token{'s' * (new > 1)}{' of a tree' * tree}"
                made, told = inputs.replaying(new, tree), f"best {peer:.3g}"
                what = ("replay", label, "ssm_replay", case, batch * new, reach, told)
                yield Goal(*what, made, cost)


def scans() -> Iterator[Goal]:
    case = Case(**MAMBA, Q=128)
    ragged = (1024, 33, 700, 512, 129, 1500, 64, 300, 900, 1, 640, 257, 400, 128, 812, 792)
    for lengths, reach, plainly, peer in (
        ((2048,), 44, 62, 160),
        ((8192,), 145, 225, 575),
        ((51200,), 850, 1300, 3760),
        (ragged, 200, 320, 629),
    ):
        tokens, made = sum(lengths), inputs.scanning(lengths, fresh=True)
        label = f"{len(lengths)} prompt" + "s, ragged" * (len(lengths) > 1)
        what = ("ssd_prefill", case, tokens)
        yield Goal("scan", label, *what, reach, f"best {peer}", made)
        tile = SPECS["ssd_prefill"].default(case, tokens).but(ROLES=False)
        label += ", plain Triton"
        yield Goal("scan", label, *what, plainly, f"best {peer}", made, tile=tile)


def attention() -> Iterator[Goal]:
    heads, size = ATTENTION["H"], ATTENTION["Dh"]
    tokens = 8192
    flops = 4 * heads * size * tokens * (tokens + 1) // 2
    yield Goal(
        *("attention", "causal prompt", "attend_prefill", Case(**ATTENTION), tokens, 1150.0),
        *("cuDNN 990", inputs.attending(1, 0, tokens), Cost(flops, 4 * tokens * heads * size)),
    )
    for batch in (1, 16):
        for new in (1, 4):
            case = Case(**ATTENTION, new=new, tree=0)
            keys = batch * (65536 + new)
            cost = Cost(4 * keys * new * heads * size, keys * 2 * ATTENTION["Hkv"] * size * 2)
            made = inputs.attending(batch, 65536, new)
            us = cost.bytes / 4.42e6 / 0.85
            label = f"{new} token{'s' * (new > 1)} over 65,536 keys, batch {batch}"
            yield Goal(
                *("attention", label, "attend_decode", case, batch * new, us, "", made, cost)
            )


def experts() -> Iterator[Goal]:
    case = Case(E=512, K=22, G=1, TG=1)
    for tokens, reach, peer in (
        *((1, 6, 28), (16, 6, 28), (64, 10, 36), (256, 10, 50)),
        *((8192, 30, 240), (51200, 120, 1372)),
    ):
        label = "router with its sort"
        told = f"torch, no sort {peer}"
        yield Goal("experts", label, "route_experts", case, tokens, reach, told)
    case = Case(E=512, F=2688, L=1024, K=22, O=1)
    made = inputs.evenly_routed(SPECS["run_experts_packed"].make)
    for tokens, reach, peer in (
        *((1, 24, 48.6), (4, 70, 114), (8, 115, 185), (16, 190, 294), (64, 360, 530)),
        *((256, 420, 655), (1024, 720, 1377), (2048, 1300, 2464), (8192, 4300, 8600)),
    ):
        label, told = "NVFP4 experts of a layer", f"Marlin {peer}"
        op = "run_experts_packed"
        yield Goal("experts", label, op, case, tokens, reach, told, made)
