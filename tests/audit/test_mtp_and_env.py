"""Drafts on and off through the command line; the report of the environment when all is broken."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemotriton.audit import environment, mtp
from nemotriton.audit.compare import rounding
from nemotriton.engine.llm import LLM
from nemotriton.engine.runner import Runner
from nemotriton.errors import UnsupportedError
from tests.audit.command import invoke, invoke_json


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def test_drafts_change_no_token_of_the_twins() -> None:
    code, found = invoke_json("mtp", "-n", "8", "--dtype", "float32", "--drafts", "2")
    assert code == 0
    assert found["equal"]
    assert [row["tokens"] for row in found["prompts"]] == [8, 8, 8]
    assert len(found["acceptance"]) == 2
    assert found["verified"] > 0


def test_a_wrong_commit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts that stay in the state change what follows: that is no tie."""
    honest = Runner._commit

    def wrong(self: Runner, batch: Any, verdict: Any) -> None:
        drafts = batch.decode.max_new - 1
        honest(self, batch, verdict._replace(last=(verdict.last + drafts).clamp(max=drafts)))

    monkeypatch.setattr(Runner, "_commit", wrong)
    code, found = invoke_json("mtp", "-n", "16", "--dtype", "float32", "--drafts", "2")
    assert code == 1
    row = next(r for r in found["prompts"] if r["result"] == "differs")
    assert row["on"] != row["off"]
    assert row["gap"] > 0


def made(drafts: int) -> LLM:
    return LLM.synthetic(
        "tiny", seed=3, device="cpu", max_context=64, max_requests=2, drafts=drafts, memory=0.2
    )


def answers() -> mtp.Drafted:
    """Two answers of 16 bits with drafts, each pass of which rounds otherwise than it does."""
    with made(2) as llm, rounding(llm.runner.model, 77):
        return mtp.draft(llm, ["one text", "another text"], 24)


def test_rounding_in_16_bits_is_a_tie() -> None:
    """Random weights: neighbours among logits are near, so that rounding changes picks."""
    with made(0) as llm:
        found = mtp.compare(llm, answers(), 24)
    assert not found["equal"]
    assert found["faults"] == 0
    parted = [row for row in found["prompts"] if row["result"] == "tie"]
    assert parted
    for row in parted:
        assert abs(row["gap"]) <= row["worst"] <= found["rounding"] < 2
        assert row["picks"] > 0
    lines = list(mtp.as_lines(found, random=True))
    assert lines[-1] == "equal but for ties within rounding"
    assert not any("does not belong" in line for line in lines)


@pytest.mark.parametrize("where", ["commit", "verdict"])
def test_a_fault_in_16_bits_is_none(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts that stay in the state; or drafts that are taken for right."""
    if where == "commit":
        monkeypatch.setattr(Runner, "_commit", keeping_one(Runner._commit))
    else:
        monkeypatch.setattr(Runner, "_verify", believing(Runner._verify))
    drafted = answers()
    with made(0) as llm:
        found = mtp.compare(llm, drafted, 24)
    assert found["faults"] == 2
    for row in found["prompts"]:
        assert row["worst"] > 2 * found["rounding"]


def keeping_one(honest: Any) -> Any:
    def wrong(self: Runner, batch: Any, verdict: Any) -> None:
        last = (verdict.last + 1).clamp(max=batch.decode.max_new - 1)
        honest(self, batch, verdict._replace(last=last))

    return wrong


def believing(honest: Any) -> Any:
    def wrong(self: Runner, batch: Any, picked: torch.Tensor) -> Any:
        """The first draft of each sequence is what was picked before it."""
        ids, first = batch.ids, batch.decode.cu[:-1].long()
        two = batch.decode.cu.diff() > 1
        picked[first[two]] = ids[first[two] + 1]
        return honest(self, batch, picked)

    return wrong


def test_what_rounding_reaches_as_far_as_chance_is_not_judged() -> None:
    rows = [{"result": "differs", "worst": 1.0, "likely": 3.0}]
    with pytest.raises(UnsupportedError, match=r"by up to 4, .* 3 above .*--dtype float32"):
        mtp._judge([dict(rows[0])], 4.0)
    mtp._judge(rows, 0.5)
    assert rows[0]["result"] == "differs"
    nan = {"result": "differs", "worst": float("inf"), "likely": 3.0}
    mtp._judge([nan], 1.0)
    assert nan["result"] == "differs"


def test_an_answer_that_ends_early_is_a_fault() -> None:
    with made(0) as llm:
        off = llm.generate([[5, 6, 7]], mtp._greedy(4))[0].outputs[0].token_ids
        stats = {"acceptance": (0.0,), "verified": 60, "accepted": 0, "tokens_per_pass": 1.0}
        found = mtp.compare(llm, mtp.Drafted([[5, 6, 7]], [list(off)[:3]], stats), 4)
    assert (found["faults"], found["rounding"], found["prompts"][0]["at"]) == (1, None, 3)
    assert "none was accepted: the MTP block" in "\n".join(mtp.as_lines(found))


def test_the_environment_is_told() -> None:
    code, found = invoke_json("env")
    assert code == 0
    assert found["versions"]["torch"] == torch.__version__
    assert found["python"].startswith("3.")
    code, out, _ = invoke("env")
    assert code == 0
    assert "versions: triton" in out


def test_the_environment_never_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(environment, "import_module", broken)
    monkeypatch.setattr(environment.subprocess, "run", broken)
    monkeypatch.setattr(environment.os, "sysconf", broken)
    code, found = invoke_json("env")
    assert code == 0
    assert found["versions"] == "unknown (RuntimeError: no such thing here)"
    assert found["gpus"].startswith("unknown")
    assert invoke("env")[0] == 0


def test_tiles_by_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "nvidia_h200"
    folder.mkdir()
    for name, statuses in (("matmul", ["measured", "compiled"]), ("rms_norm", ["compiled"])):
        entries = [{"tokens": [{"status": status}]} for status in statuses]
        (folder / f"{name}.json").write_text(json.dumps({"entries": entries}))
    (folder / "broken.json").write_text("{}")
    monkeypatch.setenv("NEMOTRITON_TUNE_CACHE", str(tmp_path))
    found = invoke_json("env")[1]["tiles"]
    counts = {"kernels": 3, "measured": 1, "published": 0, "compiled": 2, "unreadable": 1}
    assert found == {"nvidia_h200": counts}
    out = invoke("env")[1]
    assert "1 measured, 0 published, 2 compiled, 1 unreadable; of 3 kernels" in out
