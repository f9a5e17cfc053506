"""What Nsight Compute says of a kernel, from its table of counters to ours."""

import pytest

from bench import stalls
from bench.rows import BenchError
from nemotriton.errors import NemotritonError

COLUMNS = [
    "ID", "Kernel Name", *stalls.METRICS.values(),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_barrier_not_issued_per_warp_active.pct",
]  # fmt: skip


def line(*values: str) -> str:
    return ",".join(f'"{v}"' for v in values)


def text(*kernels: tuple[str, str]) -> str:
    units = ["", "", "ns", *["%"] * (len(COLUMNS) - 3)]
    rows = [
        line(str(i), kernel, ns, "71.25", "30", "0", "12.5", "23.8", "168", "1,024", "3", "1",
             "1", "99")
        for i, (kernel, ns) in enumerate(kernels)
    ]  # fmt: skip
    return "\n".join(["==PROF== Connected", line(*COLUMNS), line(*units), *rows]) + "\n"


def test_kernels_stand_with_the_goal_that_launched_them() -> None:
    chosen = stalls.wanted(["norm"], "")
    assert len(chosen) == 2
    mark = ("void erfc_kernel(float*)", "900")
    found = text(("_add_rms_norm", "66,800"), mark, ("_a(int)", "1500"), ("_b", "1000"), mark)
    table = stalls.table(stalls.by_goal(stalls.kernels(found), chosen)).splitlines()
    assert len(table) == 5
    assert table[2] == (
        "| add_rms_norm: add + norm, 8,192 tokens | _add_rms_norm | 66.8 | 71 | 30 | 0 | 12 | 23.8 "
        "| 168 | 1,024 | long scoreboard 75 %, barrier 25 % |"
    )
    assert [row.split(" | ")[:3] for row in table[3:]] == [
        ["| add_rms_norm: add + norm, 1 tokens", "_a", "1.5"],
        ["| add_rms_norm: add + norm, 1 tokens", "_b", "1.0"],
    ]


def test_a_goal_nobody_knows_is_refused() -> None:
    with pytest.raises(NemotritonError, match="no goal of any area is called 'nothing'"):
        stalls.wanted(None, "nothing")


def test_a_machine_without_the_profiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BenchError, match=r"ncu .* is not on the PATH"):
        stalls.profiled([])


def test_what_the_profiler_refuses_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM no permission' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BenchError, match="ERR_NVGPUCTRPERM"):
        stalls.profiled([])
