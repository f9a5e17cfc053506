"""Peers: torch's own are held against our oracles here; the others' calling is, with stand-ins."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import peers, rows
from bench.peer_calls import PEERS, Peer, one_sequence
from nemotriton.autotune.child import MeasuringFailed
from nemotriton.autotune.parity import generator
from nemotriton.autotune.timing import Timing
from nemotriton.autotune.trial import Point
from nemotriton.kernels.op import SPECS, Case, KernelSpec
from tests.fake_runner import TILES, FakeRunner, FakeStopwatch, toy

CPU = torch.device("cpu")
# torch.compile calls a C++ compiler on the CPU: seconds a case, and nothing of ours is in it
HERE = [i for i, p in enumerate(PEERS) if p.module == "torch" and p.name != "torch.compile"]


def point_of(name: str, **axes: Any) -> Point:
    """A small point of an op, with some axes changed, in the widest dtype it has."""
    spec = SPECS[name]
    case = next(c for c in spec.small if all(c.get(k) == v for k, v in axes.items()))
    return Point(name, case, min(t for t in spec.small_tokens if t > 1), spec.dtypes[-1])


@pytest.mark.parametrize("i", HERE, ids=lambda i: f"{PEERS[i].op}-{PEERS[i].name}")
def test_torchs_own_peers_are_right(i: int) -> None:
    p = PEERS[i]
    status, note = peers.PeerRunner(CPU, FakeStopwatch()).peer(point_of(p.op), i)
    if p.name == "torch grouped_mm":
        assert (status, note) == ("unsupported", "not for these arguments"), "bf16 on a GPU only"
    else:
        assert (status, note) == ("ok", "")


@pytest.fixture
def toy_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelSpec]:
    with toy(list(TILES)) as spec:
        made = [
            Peer("twice", "right", "torch", "torch", lambda args: lambda: args["x"] * 2),
            Peer("twice", "wrong", "torch", "torch", lambda args: lambda: args["x"] * 2.1),
            Peer("twice", "missing", "no-such-package", "no_such_package.ops", lambda args: None),
            Peer("twice", "picky", "torch", "torch", lambda args: None),
        ]
        monkeypatch.setattr(peers, "PEERS", made)
        yield spec


class FakePeers(FakeRunner):
    """Peers are checked for real on the CPU; the race is made up."""

    def call(self, name: str, *args: Any) -> Any:
        if name == "peer":
            return peers.PeerRunner(CPU, FakeStopwatch()).peer(*args)
        times = [Timing(10.0, 9.9, 10.1, 15)] * (1 + len(args[1]))
        return [(t, True) for t in times]


def test_every_peer_has_a_row_and_only_right_ones_a_number(toy_peer: KernelSpec) -> None:
    point = Point("twice", Case(D=64), 16, "bf16")
    found = {r["provider"]: r for r in peers.measure({point: "tiny"}, FakePeers())}
    assert {k: r["status"] for k, r in found.items()} == {
        "nemotriton": "ok",
        "right": "ok",
        "wrong": "red",
        "missing": "not installed",
        "picky": "unsupported",
    }
    assert {k for k, r in found.items() if r["us"] is not None} == {"nemotriton", "right"}
    assert "from the oracle" in found["wrong"]["note"]
    text = rows.markdown(list(found.values()))
    assert "| missing | not installed |" in text
    assert "| wrong | parity failed |" in text


def test_no_peer_is_timed_beside_a_wrong_op_of_ours(toy_peer: KernelSpec) -> None:
    point = Point("twice", Case(D=64), 16, "bf16")
    runner = FakePeers(act={point.default: "parity: 3"})
    found = list(peers.measure({point: "tiny"}, runner))
    assert [r["us"] for r in found] == [None] * 5
    assert found[0]["status"] == "red"


def test_a_peer_that_kills_the_process_is_red(toy_peer: KernelSpec) -> None:
    class Dying(FakePeers):
        def call(self, name: str, *args: Any) -> Any:
            raise MeasuringFailed("the measuring process crashed (SIGSEGV)")

    point = Point("twice", Case(D=64), 16, "bf16")
    found = {r["provider"]: r for r in peers.measure({point: "tiny"}, Dying())}
    assert found["right"]["status"] == "red"
    assert "SIGSEGV" in found["right"]["note"]


def test_a_race_prepares_ours_first_and_says_what_was_captured(toy_peer: KernelSpec) -> None:
    class NoGraphs(FakeStopwatch):
        made = 0

        def capture(self, calls: Any, repeat: bool) -> Any:
            self.made += 1
            if self.made == 2:
                raise RuntimeError("operation not permitted when stream is capturing")
            return self.single(calls)

    runner = peers.PeerRunner(CPU, NoGraphs(us=4.0))
    point = Point("twice", Case(D=64), 16, "bf16")
    timed = runner.peer_race(point, [0])
    assert [(t.us, graph) for t, graph in timed] == [(4.0, True), (4.0, False)]


# ------------------------------------------------- stand-ins with the other libraries' interfaces
def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> Any:
    """causal_conv1d_fn: x [1, C, T], weight [C, W]."""
    assert activation == "silu"
    W = weight.shape[1]
    y = F.conv1d(F.pad(x, (W - 1, 0)), weight[:, None], bias, groups=x.shape[1])
    return F.silu(y)


def conv_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """causal_conv1d_update: x [S, C], state [slots, C, W-1]."""
    assert bool((conv_state_indices >= 0).all())
    window = torch.cat([state[conv_state_indices.long()], x[..., None]], -1)
    return F.silu((window * weight).sum(-1) + bias)


def state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
) -> torch.Tensor:
    """selective_state_update: x, dt [S, H, P], A [H, P, N], B, C [S, G, N], D, dt_bias [H, P]."""
    assert dt_softplus
    assert x.shape == dt.shape
    assert A.stride()[1:] == (0, 0)
    slots = state_batch_indices.long()
    repeat = x.shape[1] // B.shape[1]
    B, C = (v.repeat_interleave(repeat, 1)[:, :, None] for v in (B, C))
    step = F.softplus(dt + dt_bias)[..., None]
    new = state[slots] * torch.exp(step * A) + step * B * x[..., None]
    return (new * C).sum(-1) + D * x


def chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    return_final_states: bool,
) -> Any:
    """mamba_chunk_scan_combined, a token at a time: x [1, T, H, P], B, C [1, T, G, N]."""
    assert dt_softplus
    assert return_final_states
    assert chunk_size > 0
    H, P, N = x.shape[2], x.shape[3], B.shape[3]
    state, out = torch.zeros(1, H, P, N, dtype=x.dtype), []
    for t in range(x.shape[1]):
        wide = dt[:, t, :, None].expand(-1, H, P)
        bias, skip = (v.view(H, 1).expand(H, P) for v in (dt_bias, D))
        rate = A.view(H, 1, 1).expand(H, P, N)
        step = F.softplus(wide + bias)[..., None]
        mine = [v[:, t].repeat_interleave(H // B.shape[2], 1)[:, :, None] for v in (B, C)]
        state = state * torch.exp(step * rate) + step * mine[0] * x[:, t, ..., None]
        out.append((state * mine[1]).sum(-1) + skip * x[:, t])
    return torch.stack(out, 1), state


def gated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    z: torch.Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> torch.Tensor:
    """rmsnorm_fn of layernorm_gated."""
    assert not norm_before_gate
    u = (x * F.silu(z)).unflatten(-1, (-1, group_size))
    return F.rms_norm(u, (group_size,), None, eps).flatten(-2) * weight


STAND_INS = {
    ("causal_conv1d", "causal-conv1d"): ("causal_conv1d", "causal_conv1d_fn", conv, {}),
    ("causal_conv1d_update", "causal-conv1d"): (
        "causal_conv1d",
        "causal_conv1d_update",
        conv_update,
        {"N": 1},
    ),
    ("ssm_update", "mamba-ssm"): (
        "mamba_ssm.ops.triton.selective_state_update",
        "selective_state_update",
        state_update,
        {"NEW": 1},
    ),
    ("ssm_update", "flashinfer"): (
        "flashinfer.mamba",
        "selective_state_update",
        state_update,
        {"NEW": 1},
    ),
    ("ssd_prefill", "mamba-ssm"): (
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        chunk_scan,
        {},
    ),
    ("gated_rms_norm", "mamba-ssm"): (
        "mamba_ssm.ops.triton.layernorm_gated",
        "rmsnorm_fn",
        gated_norm,
        {},
    ),
}


@pytest.mark.parametrize("key", STAND_INS, ids=lambda k: f"{k[0]}-{k[1]}")
def test_other_libraries_get_the_arguments_they_document(
    key: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, name, stand_in, axes = STAND_INS[key]
    module = ModuleType(home)
    setattr(module, name, stand_in)
    monkeypatch.setitem(sys.modules, home, module)
    i = next(i for i, p in enumerate(PEERS) if (p.op, p.name) == key)
    status, note = peers.PeerRunner(CPU, FakeStopwatch()).peer(point_of(key[0], **axes), i)
    assert (status, note) == ("ok", "")


@pytest.mark.parametrize("name", ["ssd_prefill", "causal_conv1d"])
def test_one_sequence_is_what_the_op_computes_for_fresh_tokens(name: str) -> None:
    point = point_of(name)
    args = point.spec.make(point.case, point.tokens, CPU, torch.float32, generator(0, CPU))
    alone = one_sequence(args)
    assert alone["cu"].tolist() == [0, point.tokens]
    y = point.spec.op.ref(**alone)
    assert bool(y.isfinite().all())
    poisoned = one_sequence(args)
    poisoned["state"] = torch.full_like(poisoned["state"], float("nan"))
    assert torch.equal(point.spec.op.ref(**poisoned), y), "nothing is carried in"
