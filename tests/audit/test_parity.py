"""Every way through the model on the same tokens: alike on the twins, and a wrong way is seen."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nemotriton.audit import parity
from nemotriton.audit.parity import Difference, Ways
from nemotriton.engine.llm import LLM
from nemotriton.kernels.op import OPS
from tests import harness
from tests.audit.command import invoke, invoke_json

IDS = [(53 * i + i * i) % 256 for i in range(23)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.synthetic(
        "tiny", dtype="float32", device="cpu", max_context=64, max_requests=1, graphs=True
    )


@pytest.mark.parametrize("rollback", ["lanes", "replay"])
@pytest.mark.parametrize("drafts", [1, 4])
def test_all_ways_give_the_logits_of_a_prefill(llm: LLM, drafts: int, rollback: str) -> None:
    ways = Ways(llm, {}, drafts, rollback)
    want, _ = harness.run(llm.runner.model, IDS)
    assert set(ways.all()) == {"decode", "drafts", "graphs"}
    with torch.no_grad():
        assert torch.equal(ways.prefill(IDS), want)
        for way in ways.all().values():
            torch.testing.assert_close(way(IDS), want, rtol=0, atol=1e-4 * float(want.abs().max()))
        assert 0 < float((ways.nudged(IDS) - want).abs().max()) < 1e-3 * float(want.abs().max())


def test_the_command_lists_ways_and_sequences(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one two three four\n\n1 1 1 1 1 1 1 1 1\nabcabcabcabc\n")
    code, found = invoke_json("parity", "--text", str(text), "--dtype", "float32")
    assert code == 0
    assert found["wrong"] == 0
    assert {r["way"] for r in found["worst"]} == {"decode", "drafts", "graphs"}
    assert {r["sequence"] for r in found["worst"]} == {1, 2, 3}
    largest = [r["largest"] for r in found["worst"]]
    assert largest == sorted(largest, reverse=True)
    assert 0 < largest[0] < found["limits"]["largest"] < 0.01
    code, out, _ = invoke("parity", "--text", str(text), "--dtype", "float32", "--tokens", "8")
    assert code == 0
    assert "wrong: none" in out


@pytest.mark.parametrize("op,ways", [("ssm_update", {"decode", "drafts", "graphs"})])
def test_a_wrong_decode_kernel_is_seen(
    op: str, ways: set[str], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = OPS[op].ref

    def wrong(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, *rest: Any, **named: Any) -> Any:
        return honest(x, dt, A, B, C, 0 * D, *rest, **named)

    monkeypatch.setattr(OPS[op], "ref", wrong)
    found = parity.compare(Ways(llm, {}, 2, "lanes"), [IDS])
    assert {r["way"] for r in found["worst"] if r["wrong"]} == ways


def test_a_wrong_decode_kernel_is_seen_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = OPS["causal_conv1d_update"].ref

    def shifted(x: Any, weight: Any, *rest: Any, **named: Any) -> Any:
        return honest(x, weight.roll(1, 1), *rest, **named)

    with LLM(None, device="cpu", max_context=64, max_requests=1, graphs=True) as llm:
        assert llm.dtype is torch.bfloat16
        found = parity.compare(Ways(llm, {}, 2), [IDS])
        assert (found["wrong"], found["wrong_ways"]) == (0, 0)
        monkeypatch.setattr(OPS["causal_conv1d_update"], "ref", shifted)
        found = parity.compare(Ways(llm, {}, 2), [IDS])
        assert (found["wrong"], found["wrong_ways"]) == (3, 3)


def test_a_lost_draft_state_is_seen_in_drafts_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = Ways(llm, {}, 2, "lanes")
    mamba = ways.verifying.mamba
    assert mamba is not None
    honest = mamba.commit
    monkeypatch.setattr(mamba, "commit", lambda slots, lane: honest(slots, lane - 1))
    found = parity.compare(ways, [IDS])
    assert {r["way"] for r in found["worst"] if r["wrong"]} == {"drafts"}


def row(sequence: int, largest: float, mean: float = 0.001) -> Difference:
    return Difference(sequence, "decode", 9, largest, mean, mean, 3, 0)


def test_one_sequence_far_from_the_others_is_an_outlier() -> None:
    rows = [row(i, 0.01) for i in range(1, 6)]
    noise = [row(1, 0.05)]  # so the limit is 0.22
    assert parity._judged(rows, noise, 0.02)["wrong"] == 0
    found = parity._judged([*rows, row(6, 0.2)], noise, 0.02)
    assert [r["sequence"] for r in found["worst"] if r["wrong"]] == [6]


def test_a_mean_is_judged_as_well() -> None:
    """Single large differences are rounding's, where experts change; so many of them are not."""
    noise = [row(1, 2.0, 0.01)]
    assert parity._judged([row(1, 2.0, 0.02)], noise, 0.02)["wrong"] == 0
    assert parity._judged([row(1, 2.0, 0.2)], noise, 0.02)["wrong"] == 1


def test_a_way_that_is_off_by_little_everywhere_is_seen() -> None:
    """No sequence is far out, the mean over all of them is."""
    noise = [row(i, 3.0, 1.0) for i in range(8)]
    fine = parity._judged([row(i, 3.0, 1.1) for i in range(8)], noise, 0.02)
    assert (fine["wrong"], fine["wrong_ways"]) == (0, 0)
    found = parity._judged([row(i, 3.0, 1.9) for i in range(8)], noise, 0.02)
    assert (found["wrong"], found["wrong_ways"]) == (0, 1)
    (way,) = found["ways"]
    assert (way["mean"], way["tokens"]) == (pytest.approx(1.9), 72)
    # rounding's mean, and three standard errors of 72 tokens' means
    assert way["limit"] == pytest.approx(0.005 + 1 + 3 * (1 + 1.9**2) ** 0.5 / 72**0.5)
    lines = list(parity.as_lines(found | {"seconds": {"prefill": 1.0}, "compiled": 0}))
    assert lines[-1] == "wrong: 1 of 1 ways"
    assert lines[2].endswith("!!")


def test_nan_is_wrong() -> None:
    good = torch.zeros(3, 5)
    found = parity._differ(1, "decode", torch.full_like(good, torch.nan), good, [0, 1, 2])
    assert found.largest == torch.inf
    judged = parity._judged([found], [row(1, 0.1)], 0.1)
    assert (judged["wrong"], judged["wrong_ways"]) == (1, 1)


def test_a_trace_holds_every_boundary(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "trace.safetensors"
    text.write_text("hello world\nbye\n")
    args = ("parity", "--text", str(text), "--trace", str(out), "--dtype", "float32")
    assert invoke(*args)[0] == 0
    tensors = load_file(out)
    with LLM(None, dtype="float32", device="cpu", max_context=64, max_requests=1) as llm:
        for number, line in enumerate(("hello world", "bye")):
            ids = llm.tokenizer.encode(line)
            assert tensors[f"{number}.input_ids"].tolist() == ids
            seen: dict[str, torch.Tensor] = {}

            def probe(name: str, x: torch.Tensor, seen: dict[str, torch.Tensor] = seen) -> None:
                seen[name] = x.clone()

            logits, _ = harness.run(llm.runner.model, ids, probe=probe)
            assert {n for n in tensors if n.startswith(f"{number}.")} == {
                f"{number}.{n}" for n in (*seen, "input_ids", "logits")
            }
            assert torch.equal(tensors[f"{number}.logits"], logits)
            assert all(torch.equal(tensors[f"{number}.{n}"], x) for n, x in seen.items())
            assert {"layers.8", "layers.8.norm", "layers.8.mixer", "norm_f"} <= set(seen)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"model": "tiny", "dtype": "float32"}
    code, stdout, err = invoke(*args)  # never over what is there
    assert (code, stdout) == (2, "")
    assert "exists: give another path" in err


def test_a_trace_is_compared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "trace.safetensors"
    size = ("--dtype", "float32", "--tokens", "9")
    assert invoke("parity", "--trace", str(out), *size)[0] == 0
    args = ("divergence", "--against", str(out), *size, "--device", "cpu")
    code, found = invoke_json(*args)
    assert code == 0
    assert (found["tokens"], len(found["layers"])) == (9, 10)
    tensors = load_file(out)
    honest = tensors["0.layers.3.mixer"].clone()
    tensors["0.layers.3.mixer"] = 1.01 * honest  # another engine's scaling factor, say
    save_file(tensors, out)
    code, found = invoke_json(*args)
    assert code == 1
    culprit = found["culprit"]
    assert (culprit["layer"], culprit["boundary"], culprit["ops"]) == (3, "mixer", [])
    tensors["0.layers.3.mixer"] = honest[:, :-1].contiguous()
    save_file(tensors, out)
    assert "is of another model: layers.3.mixer is [9, 191]" in invoke(*args)[2]
    del tensors["0.layers.3.mixer"]
    save_file(tensors, out)
    assert "lacks 1 tensors of sequence 0: layers.3.mixer" in invoke(*args)[2]
    out.write_bytes(b"nothing")
    code, _, err = invoke(*args)
    assert code == 2
    assert "cannot be read as a trace" in err


def test_json_is_one_object() -> None:
    code, out, _ = invoke("parity", "--dtype", "float32", "--tokens", "12", "--json")
    assert code == 0
    assert json.loads(out)["noise"]["mean"] > 0
