"""How other libraries are called for the same work, from an op's own arguments.

A builder takes the op's keyword arguments and returns what is timed: everything that is set up once
a model or a step (layouts, tables, expanded views) is made before. It returns None where the peer
cannot do these arguments. Nothing here is needed by the project; what is not installed is said so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from nemotriton.autotune import parity
from nemotriton.kernels.op import OPS, Args

Work = Callable[[], Any]
Build = Callable[[Args], Work | None]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation of `op`. `package` is its distribution, `module` what it imports as.

    `alone`: it takes one sequence that starts from nothing, so both are given such inputs.
    `result` makes the op's `output` out of what the call returned, outside the timing."""

    op: str
    name: str
    package: str
    module: str
    build: Build
    alone: bool = False
    result: Callable[[Any, Args], torch.Tensor] = lambda got, args: got
    output: str = "out0"

    @property
    def installed(self) -> bool:
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:  # a parent package is missing
            return False


def first(got: Any, args: Args) -> torch.Tensor:
    return got[0]


def second(got: Any, args: Args) -> torch.Tensor:
    return got[1]


def one_sequence(args: Args) -> Args:
    """The same tokens as one sequence that starts from nothing."""
    T, where = args["x"].shape[0], args["x"].device
    new = {
        "cu": torch.tensor([0, T], dtype=torch.int32, device=where),
        "slots": torch.tensor([1], dtype=torch.int32, device=where),
        "fresh": torch.ones(1, dtype=torch.bool, device=where),
        "state": torch.zeros_like(args["state"][:2]),
    }
    if "max_new" in args:
        new["max_new"] = T
    if "chunks" in args:
        Q = args["chunk_size"]
        rows = [(0, at, min(Q, T - at)) for at in range(0, T, Q)]
        new["chunks"] = torch.tensor(rows, dtype=torch.int32, device=where)
    return args | new


# ------------------------------------------------------------------------------------------ torch
def twin(name: str) -> Build:
    """The op's own PyTorch twin."""
    return lambda args: lambda: OPS[name].ref(**args)


def compiled(name: str) -> Build:
    def build(args: Args) -> Work:
        fast = torch.compile(OPS[name].ref, dynamic=False)
        return lambda: fast(**args)

    return build


def torch_rms_norm(args: Args) -> Work:
    x, weight = args["x"], args["weight"]
    return lambda: F.rms_norm(x, (x.shape[1],), weight, args["eps"])


def torch_linear(args: Args) -> Work | None:
    x, weight = args["x"], args["weight"]
    if x.dtype != weight.dtype or args.get("residual") is not None:
        return None
    bias, squared = args.get("bias"), args.get("epilogue") == "relu2"
    if squared:
        return lambda: F.relu(F.linear(x, weight, bias)).square()
    return lambda: F.linear(x, weight, bias)


def sdpa(args: Args) -> Work | None:
    """One call a sequence over keys and values that were gathered from their pages before."""
    if args.get("k_scale") is not None or args.get("parents") is not None:
        return None
    calls = []
    for s, rows, length in live(args):
        k, v = (gathered(args[name], args["pages"][s], length) for name in ("k_cache", "v_cache"))
        q = args["q"][rows]
        mask = causal_lower_right(len(q), length) if len(q) > 1 else None
        calls.append((q.transpose(0, 1)[None], k, v, mask))

    def work() -> list[torch.Tensor]:
        scale = args["scale"]
        return [
            F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=scale, enable_gqa=True)
            for q, k, v, m in calls
        ]

    return work


def live(args: Args) -> Iterator[tuple[int, slice, int]]:
    """The sequences that have new tokens and a context: index, rows, length."""
    cu = args["cu"].tolist()
    for s, length in enumerate(args["lengths"].tolist()):
        if 0 < cu[s + 1] - cu[s] <= length:
            yield s, slice(cu[s], cu[s + 1]), length


def gathered(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """[1, Hkv, length, Dh] of a sequence's pages."""
    used = pages[: -(-length // cache.shape[1])].long()
    return cache[used].flatten(0, 1)[:length].transpose(0, 1)[None].contiguous()


def sdpa_result(got: list[torch.Tensor], args: Args) -> torch.Tensor:
    out = torch.zeros_like(args["q"])
    for o, (_, rows, _) in zip(got, live(args), strict=True):
        out[rows] = o[0].transpose(0, 1)
    return out


def grouped_mm(args: Args) -> Work | None:
    """Both products as torch has them for groups; the tokens gathered, weighted and summed."""
    x, up, down, routing = (args[k] for k in ("x", "up", "down", "routing"))
    if x.dtype != torch.bfloat16 or x.device.type != "cuda":
        return None
    K = routing.ids.shape[1]
    ends, order = routing.offsets[1:].contiguous(), routing.order.long()
    weights = routing.weights.flatten()[order, None]

    def work() -> torch.Tensor:
        h = torch._grouped_mm(x[order // K], up.transpose(1, 2), offs=ends)
        y = torch._grouped_mm(F.relu(h).square(), down.transpose(1, 2), offs=ends)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.index_add_(0, order // K, y * weights).to(x.dtype)

    return work


# ------------------------------------------------------------------------------ other libraries
def flashinfer_rms_norm(args: Args) -> Work:
    norm = import_module("flashinfer.norm").rmsnorm
    return lambda: norm(args["x"], args["weight"], args["eps"])


def flashinfer_add_rms_norm(args: Args) -> Work | None:
    """In place: x becomes the norm, residual the sum."""
    if args["residual"].dtype != args["x"].dtype:
        return None
    norm, mine = import_module("flashinfer.norm").fused_add_rmsnorm, parity.copy(args)

    def work() -> torch.Tensor:
        norm(mine["x"], mine["residual"], mine["weight"], mine["eps"])
        return mine["x"]

    return work


def mamba_gated_rms_norm(args: Args) -> Work:
    norm = import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
    x, z, weight = args["x"], args["z"], args["weight"]
    size = x.shape[1] // args["groups"]
    return lambda: norm(
        x, weight, None, z=z, eps=args["eps"], group_size=size, norm_before_gate=False
    )


def conv1d_fn(args: Args) -> Work:
    conv = import_module("causal_conv1d").causal_conv1d_fn
    x = args["x"].transpose(0, 1)[None]  # [1, C, T], channels last
    return lambda: conv(x, args["weight"], args["bias"], activation="silu")


def conv1d_result(got: torch.Tensor, args: Args) -> torch.Tensor:
    return got[0].transpose(0, 1)


def conv1d_update(args: Args) -> Work | None:
    if args["max_new"] != 1:
        return None
    update, state = import_module("causal_conv1d").causal_conv1d_update, owned(args)
    windows, slots = state["state"].transpose(1, 2), state["slots"]
    weight, bias = args["weight"], args["bias"]
    return lambda: update(
        args["x"], windows, weight, bias, activation="silu", conv_state_indices=slots
    )


def owned(args: Args) -> Args:
    """A copy whose pad sequences own a spare slot: these libraries would read slot -1."""
    mine, slots = parity.copy(args), args["slots"].tolist()
    spare = next(s for s in range(args["state"].shape[0]) if s not in slots)
    mine["state"][spare] = 0
    mine["slots"][mine["slots"] < 0] = spare
    return mine


def without_pads(got: torch.Tensor, args: Args) -> torch.Tensor:
    """One token a sequence: zeros where the op writes zeros."""
    keep = (args["slots"][: got.shape[0]] >= 0).view(-1, *[1] * (got.ndim - 1))
    return torch.where(keep, got, 0)


def state_update(module: str, cast: bool) -> Build:
    """mamba-ssm's and FlashInfer's update share an interface; the latter wants D in dt's dtype."""

    def build(args: Args) -> Work | None:
        limited = args.get("dt_limit", (0.0, float("inf"))) != (0.0, float("inf"))
        if args["max_new"] != 1 or args.get("z") is not None or limited:
            return None
        update, mine = import_module(module).selective_state_update, owned(args)
        H, P, N = args["state"].shape[1:]
        A = args["A"].view(H, 1, 1).expand(H, P, N)
        D, bias = (args[k].view(H, 1).expand(H, P) for k in ("D", "dt_bias"))
        if cast:
            D, bias = (v[:, :1].to(args["dt"].dtype).expand(H, P) for v in (D, bias))
        dt = args["dt"][..., None].expand(-1, H, P)
        x, B, C, state, slots = args["x"], args["B"], args["C"], mine["state"], mine["slots"]
        return lambda: update(
            state, x, dt, A, B, C, D, dt_bias=bias, dt_softplus=True, state_batch_indices=slots
        )

    return build


def chunk_scan(args: Args) -> Work:
    scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    x, dt, B, C = (args[k][None] for k in ("x", "dt", "B", "C"))
    return lambda: scan(
        x,
        dt,
        args["A"],
        B,
        C,
        args["chunk_size"],
        D=args["D"],
        dt_bias=args["dt_bias"],
        dt_softplus=True,
        return_final_states=True,
    )


def batch_one(got: Any, args: Args) -> torch.Tensor:
    return got[0][0]


TORCH = ("torch", "torch")
CONV = ("causal-conv1d", "causal_conv1d")
FLASHINFER = ("flashinfer-python", "flashinfer.norm")
FLASHINFER_MAMBA = ("flashinfer-python", "flashinfer.mamba")
NORM = ("mamba-ssm", "mamba_ssm.ops.triton.layernorm_gated")
SCAN = ("mamba-ssm", "mamba_ssm.ops.triton.ssd_combined")
UPDATE = ("mamba-ssm", "mamba_ssm.ops.triton.selective_state_update")

PEERS = [
    Peer("rms_norm", "torch rms_norm", *TORCH, torch_rms_norm),
    Peer("rms_norm", "torch.compile", *TORCH, compiled("rms_norm")),
    Peer("rms_norm", "flashinfer", *FLASHINFER, flashinfer_rms_norm),
    Peer("add_rms_norm", "torch", *TORCH, twin("add_rms_norm"), result=first),
    Peer("add_rms_norm", "torch.compile", *TORCH, compiled("add_rms_norm"), result=first),
    Peer("add_rms_norm", "flashinfer", *FLASHINFER, flashinfer_add_rms_norm),
    Peer("gated_rms_norm", "torch.compile", *TORCH, compiled("gated_rms_norm")),
    Peer("gated_rms_norm", "mamba-ssm", *NORM, mamba_gated_rms_norm),
    Peer("matmul", "torch linear", *TORCH, torch_linear),
    Peer("attend_prefill", "torch sdpa", *TORCH, sdpa, result=sdpa_result),
    Peer("attend_decode", "torch sdpa", *TORCH, sdpa, result=sdpa_result),
    Peer("route_experts", "torch", *TORCH, twin("route_experts"), result=second, output="out1"),
    Peer("run_experts", "torch grouped_mm", *TORCH, grouped_mm),
    Peer("causal_conv1d", "causal-conv1d", *CONV, conv1d_fn, True, conv1d_result),
    Peer("causal_conv1d_update", "causal-conv1d", *CONV, conv1d_update, result=without_pads),
    Peer("ssm_update", "mamba-ssm", *UPDATE, state_update(UPDATE[1], False), result=without_pads),
    Peer(
        "ssm_update",
        "flashinfer",
        *FLASHINFER_MAMBA,
        state_update(FLASHINFER_MAMBA[1], True),
        result=without_pads,
    ),
    Peer("ssd_prefill", "mamba-ssm", *SCAN, chunk_scan, True, batch_one),
    Peer("sample_tokens", "torch", *TORCH, twin("sample_tokens")),
]
