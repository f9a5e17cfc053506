"""The benches of several GPUs, without any: what they would measure, and what they say."""

import json
from pathlib import Path

import pytest

from bench import parallel, rank_killed, scaling
from bench.models import Setup
from bench.ranks import Ranks, Work, line
from bench.rows import BenchError, Row
from nemotriton.errors import CapacityError, RankError
from nemotriton.model.config import ModelConfig
from nemotriton.model.parallel import Shard


def row(tp: int, us: float, drafts: int = 0) -> Row:
    case = {"tp": tp, "ep": 1, "drafts": drafts, "context": 1024, "model": "m", "quant": "q"}
    numbers = {"us": us, "tokens_per_s": 1e6 / us, "floor_us": us / 2, "roofline_pct": 50}
    named = {"suite": "parallel", "kernel": "step", "tokens": 1, "case": case}
    return named | {"sums_us": 9.5, "launches": 700} | numbers


def test_a_line_and_how_much_faster() -> None:
    one, two = row(1, 6000.0), row(2, 4000.0)
    shown = "| tp2 | 1 x 1,024, 0 drafts | 4.000 | 250 | 2.000 | 50 | 700 | 0.009 |  |"
    assert line(two) == shown
    assert parallel.ratio([one], two) == " 1.50 x one"
    assert parallel.ratio([one], row(2, 4000.0, drafts=3)) == ""
    assert parallel.ratio([two], two) == ""
    prompt = two | {"kernel": "prompt", "tokens": 65536}
    assert line(prompt).startswith("| tp2 | prompt of 65,536 |")
    assert parallel.ratio([one | {"tokens": 65536}], prompt) == "", "a step is no prompt"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_everything_about_n_gpus_can_be_cut(ranks: int) -> None:
    found = scaling.works(ranks, None)
    names = [(w.setup.model, w.setup.quant, w.drafts) for w in found]
    assert ("preset:super-120b", "bf16", 0) in names
    assert {d for m, _, d in names if m == "preset:ultra-550b"} == {0, 3}
    assert any(w.ranks.ep == 2 for w in found) == (ranks > 2)
    for work in found:
        shard = Shard(work.ranks.count - 1, work.ranks.tp, work.ranks.ep)
        config = ModelConfig.preset(work.setup.model.removeprefix("preset:"))
        shard.parts(config, work.setup.weights(work.drafts).expected)
        assert work.command().startswith(f"python -m bench.parallel {work.setup.model}")


def test_the_small_model_can_be_shared_by_four(tmp_path: Path) -> None:
    config = ModelConfig.from_json(Path(scaling.small_model(str(tmp_path))))
    assert Shard(3, 4).local(config).mamba is not None


def test_a_killed_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    small = Setup(scaling.small_model(str(tmp_path)), "nvfp4", layers=3, device="cpu")
    seconds, said = rank_killed.until_gone(small, Ranks(2))
    assert 0 <= seconds < 10
    assert said.endswith("rank 1 was ended by signal 9 (killed)")


def test_ranks_that_cannot_start_are_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no rank was killed: .*no_such_model"):
        rank_killed.until_gone(Setup("preset:no_such_model", "bf16", device="cpu"), Ranks(2))


def test_a_gate_counts_once_for_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ranks] = []
    said = {"one": 0.01, "ranks": 0.01}
    monkeypatch.setattr(parallel, "gate", lambda setup, ranks: asked.append(ranks) or said)
    monkeypatch.setattr(parallel, "commit", lambda: ("abc", False))
    kept, setup = tmp_path / "gates.jsonl", Setup("preset:tiny")
    for _ in range(2):
        assert parallel.judge(setup, Ranks(2), kept) == said
    assert asked == [Ranks(2)]
    assert json.loads(kept.read_text())["said"] == said
    monkeypatch.setattr(parallel, "commit", lambda: ("abd", False))
    parallel.judge(setup, Ranks(2), kept)
    parallel.judge(setup, Ranks(1, 2), kept)
    parallel.judge(setup, Ranks(2), None)
    assert asked == [Ranks(2), Ranks(2), Ranks(1, 2), Ranks(2)]


def test_one_rank_needs_no_gate() -> None:
    assert scaling.Judge()(Work(Setup("preset:tiny"), Ranks())) == {}


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (CapacityError("needs 168 GiB; it has 124"), "x: does not fit: needs 168 GiB\n"),
        (RankError("rank 1 has gone"), "x: rank 1 has gone\n"),
        (BenchError("too far"), "x: too far\n"),
    ],
    ids=["memory", "rank", "gate"],
)
def test_what_cannot_be_measured_is_a_line(
    problem: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise problem

    scaling.attempt("x", float("inf"), fails)
    assert capsys.readouterr().out == said
    scaling.attempt("x", 0.0, fails)
    assert capsys.readouterr().out == "x: left out, the time is over\n"
