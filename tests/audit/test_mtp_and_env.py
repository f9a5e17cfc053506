"""Drafts on and off through the command line; the report of the environment when all is broken."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemotriton.audit import environment, mtp
from nemotriton.engine.llm import LLM
from nemotriton.engine.runner import Runner
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


def test_a_tie_is_told_from_a_fault() -> None:
    with LLM(None, dtype="float32", max_requests=1, max_context=64) as llm:
        prompt = [5, 6, 7]
        row = llm.logits(prompt)[-1]
        best, second, *_ = row.topk(2).indices.tolist()
        found = mtp._parting(llm, prompt, [second], [best])
        assert found["result"] == "differs"
        assert found["gap"] == pytest.approx(float(row[best] - row[second]))
        assert mtp._parting(llm, prompt, [best], [best, second])["result"] == "differs"
        wide = mtp._ROUNDINGS
        try:
            mtp._ROUNDINGS = 1e9
            assert mtp._parting(llm, prompt, [second], [best])["result"] == "tie"
        finally:
            mtp._ROUNDINGS = wide


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


def test_tuned_kernels_by_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia_h200").mkdir()
    (tmp_path / "nvidia_h200" / "matmul.json").write_text(json.dumps({}))
    monkeypatch.setenv("NEMOTRITON_TUNE_CACHE", str(tmp_path))
    assert invoke_json("env")[1]["tuned_kernels"] == {"nvidia_h200": ["matmul"]}
