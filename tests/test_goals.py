"""The figures to reach: their inputs, their arithmetic and their table."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from bench import goal_inputs, goals
from bench.goal_list import Goal
from bench.goal_list import goals as all_goals
from nemotriton.autotune.ceilings import Ceilings
from nemotriton.autotune.timing import Timing
from nemotriton.autotune.trial import Facts, Point
from nemotriton.device import DeviceInfo
from nemotriton.kernels.moe_combine import combining
from nemotriton.kernels.op import SPECS, Case, Cost

CPU = torch.device("cpu")
MAMBA = {"H": 4, "P": 8, "N": 16, "G": 2}
ATTENTION = {"H": 4, "Hkv": 2, "Dh": 16, "page": 16, "fp8": 0}

INPUTS = [
    ("ssm_update", Case(**MAMBA, STATE="fp32", NEW=1, TREE=0), 3, goal_inputs.decoding(1)),
    ("ssm_update", Case(**MAMBA, STATE="bf16", NEW=6, TREE=0), 12, goal_inputs.decoding(6)),
    ("ssm_replay", Case(**MAMBA, STATE="bf16", NEW=1, TREE=0), 5, goal_inputs.replaying(1)),
    ("ssm_replay", Case(**MAMBA, STATE="int8", NEW=4, TREE=0), 12, goal_inputs.replaying(6)),
    ("ssm_replay", Case(**MAMBA, STATE="fp32", NEW=4, TREE=1), 8, goal_inputs.replaying(4, True)),
    ("ssd_prefill", Case(**MAMBA, Q=16), 40, goal_inputs.scanning((33, 7), True)),
    ("ssd_prefill", Case(**MAMBA, Q=16), 8, goal_inputs.scanning((8,), False)),
    ("causal_conv1d", Case(C=48, W=4), 20, goal_inputs.convolving(0)),
    ("causal_conv1d_update", Case(C=48, W=4, N=1), 5, goal_inputs.convolving(1)),
    ("causal_conv1d_update", Case(C=48, W=4, N=4), 8, goal_inputs.convolving(4)),
    ("attend_prefill", Case(**ATTENTION), 20, goal_inputs.attending(1, 0, 20)),
    ("attend_decode", Case(**ATTENTION, new=4, tree=0), 8, goal_inputs.attending(2, 50, 4)),
    (
        "run_experts_packed",
        Case(E=6, F=128, L=128, K=3, O=1),
        5,
        goal_inputs.evenly_routed(SPECS["run_experts_packed"].make),
    ),
]


@pytest.mark.parametrize("op,case,tokens,make", INPUTS)
def test_inputs_are_whole(op, case, tokens, make) -> None:
    rng = torch.Generator().manual_seed(0)
    args = make(case, tokens, CPU, torch.float32, rng)
    assert "slots" not in args or int(args["slots"].min()) >= 0, "a figure has no pads"
    result = SPECS[op].op.ref(**args)
    assert result.shape[0] == tokens
    assert bool(result.isfinite().all())


def test_every_goal_names_an_op_and_asks_for_less_time_than_its_peer() -> None:
    found = all_goals()
    assert {g.area for g in found} >= {"norm", "linear", "conv", "state", "scan", "experts"}
    for goal in found:
        assert goal.op in SPECS
        assert SPECS[goal.op].cost(goal.case, goal.tokens, torch.bfloat16).bytes > 0
        assert goal.reach > 0
        assert goal.rival is None or goal.reach < 1


def facts() -> Facts:
    gpu = DeviceInfo("NVIDIA H200", "nvidia_h200", (9, 0), 132, 232448, 60 << 20, 140 << 30)
    return Facts(gpu, "1", Ceilings(4000.0, 4200.0, 700.0, 50.0))


def test_a_share_of_a_rival_becomes_microseconds() -> None:
    case = Case(N=64, K=64, ieee=0)
    goal = Goal("linear", "x", "matmul", case, 4, 0.5, "other", rival=lambda args: args)
    point = Point("matmul", case, 4, "bf16")
    timed = [Timing(10.0, 9.0, 11.0, 15), Timing(6.0, 6.0, 6.0, 15)]
    row = goals.numbers(goal, point, timed, facts())
    assert row["reach"] == 12.0
    assert row["peer"] == "other 6.0"


def test_a_goal_may_count_its_own_bytes() -> None:
    case = Case(**ATTENTION, new=1, tree=0)
    goal = Goal("attention", "x", "attend_decode", case, 1, 5.0, cost=Cost(1, 8_000_000))
    point = Point("attend_decode", case, 1, "bf16")
    row = goals.numbers(goal, point, [Timing(4.0, 4.0, 4.0, 15)], facts())
    assert row["gbps"] == 2000.0
    assert row["roofline_pct"] == 50.0


@pytest.mark.parametrize("way", ["ordered", "atomic"])
def test_rows_added_atomically_have_a_label_of_their_own(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not be the same bits twice, and never take the place of the ordered ones."""
    runs = itertools.count()
    watch = SimpleNamespace(where=CPU, capture=lambda calls, repeat: calls)
    runner = SimpleNamespace(facts=facts)
    gate = SimpleNamespace(verdict=lambda tile: SimpleNamespace(ok=True))
    for name, value in (
        ("CudaStopwatch", lambda where: watch),
        ("TileRunner", lambda where, watch: runner),
        ("Gate", lambda *args: gate),
        ("input_sets", lambda *args: ([{}], True)),
        ("race", lambda work: [Timing(10.0, 10.0, 10.0, 15)]),
    ):
        monkeypatch.setattr(goals, name, value)
    monkeypatch.setattr(goals.parity, "run", lambda *args: {"y": torch.tensor([next(runs)])})
    wanted = [g for g in all_goals() if g.area in ("experts", "norm")]
    with combining(way):
        found = list(goals.measure(wanted, CPU))
    for goal, row in zip(wanted, found, strict=True):
        many = goal.tokens >= 1024  # by the form that stores every row
        added = way == "atomic" and goal.op == "run_experts_packed" and not many
        assert row["label"] == goal.label + ", atomic" * added
        assert row["status"] == ("ok" if added else "red")
        assert row["note"] == (goals.ATOMIC if added else "y differs between two runs")


def test_the_table_says_what_was_met_and_what_was_not() -> None:
    base = {
        "kernel": "matmul",
        "label": "x",
        "tokens": 2048,
        "p20": 9.0,
        "p80": 11.0,
        "gbps": 1.0,
        "tflops": 2.0,
        "roofline_pct": 50.0,
        "peer": "cuBLAS 9",
        "status": "ok",
        "note": "",
    }
    text = goals.table([base | {"us": 10.0, "reach": 8.0}, base | {"us": 7.0, "reach": 8.0}])
    assert "8.0 (1.25x)" in text
    assert "8.0 met" in text
    red = {
        "us": None,
        "status": "red",
        "note": "y is wrong",
        "p20": None,
        "p80": None,
        "reach": 8.0,
    }
    text = goals.table([base | red])
    assert "parity failed" in text
    assert "y is wrong" in text
