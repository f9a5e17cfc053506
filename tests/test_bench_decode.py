"""Benchmarks of whole models: the card, floors, and their walk through the engine, on a model and a
device that are small; times are nobody's business here."""

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bench import (
    cost,
    decode,
    drafts,
    figures,
    layers,
    load,
    model,
    prefill,
    rows,
    start,
    steps,
    transformers,
)
from bench.cost import Load, Part, Rates
from bench.forced import Forced, expected_tokens
from bench.models import Setup, blank
from bench.rows import Row
from bench.steps import Span
from nemotriton.autotune.timing import summary
from nemotriton.engine.loading import random_weights
from nemotriton.errors import CapacityError
from nemotriton.kernels import verify_drafts
from nemotriton.model.config import ModelConfig
from tests.fake_runner import FACTS

RATES = Rates(4000.0, 700.0, 1300.0)
TINY = Setup("tiny", device="cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# -------------------------------------------------------------------------------------------- card
def card(model: str, load: Load, quant: str = "bf16", drafting: bool = False) -> dict[str, float]:
    return cost.by_line(cost.parts(random_weights(model, 0, quant=quant, drafting=drafting), load))


def test_the_card_of_one_token_is_the_active_weights() -> None:
    config = ModelConfig.preset("nano-30b")
    parts = card("nano-30b", Load(1, 0, 0))
    states = parts.pop("M states") + parts.pop("* K/V")
    table = 2 * config.vocab * config.width  # of which one row is read
    active = 2 * config.active_parameter_count() - table
    active += 2 * 128 * config.width * len(config.moe_layers)  # routers are fp32
    assert sum(parts.values()) == pytest.approx(active, rel=1e-4)
    m = config.mamba
    assert m is not None
    windows = 2 * 2 * len(config.mamba_layers) * 3 * m.conv_dim
    kv = 2 * 2 * len(config.attention_layers) * config.attention.kv_rows  # type: ignore[union-attr]
    assert states == 2 * 46 * 2**20 + windows + kv


def test_super_moves_thirteen_gigabytes_a_token() -> None:
    parts = card("super-120b", Load(1, 1024), quant="release")
    assert sum(parts.values()) == pytest.approx(13.0e9, rel=0.02)
    assert parts["E experts"] == pytest.approx(2.73e9, rel=0.01)
    assert parts["head"] == pytest.approx(1.07e9, rel=0.01)


def test_many_rows_reach_all_experts_and_drafts_read_more() -> None:
    assert cost.reached(128, 6, 1) == pytest.approx(6)
    assert cost.reached(128, 6, 10_000) == pytest.approx(128)
    plain = card("super-120b", Load(16, 1024), quant="release", drafting=True)
    replayed, drafting = (
        card("super-120b", Load(16, 1024, d, rollback="replay"), "release", True) for d in (0, 3)
    )
    assert drafting["head"] == 2.5 * plain["head"], "drafts by the copy in half the bytes"
    assert drafting["M weights"] == plain["M weights"]
    assert drafting["M states"] < plain["M states"], "a state is seldom written"
    assert 0.5 < replayed["M states"] / plain["M states"] < 0.6, "and read as often as ever"
    lanes = card("super-120b", Load(16, 1024, 3, rollback="lanes"), "release", True)
    assert lanes["M states"] > 2 * plain["M states"], "a state a row is"
    assert plain["MTP weights"] == 0 < drafting["MTP weights"]


def test_smaller_states_and_keys_are_fewer_bytes() -> None:
    wide = card("super-120b", Load(4, 4096))
    small = card("super-120b", Load(4, 4096, kv_item=1, state_item=1, state_scale=4))
    assert small["* K/V"] == wide["* K/V"] / 2
    assert small["M states"] < wide["M states"] / 3


def test_operations_of_a_prompt_are_twice_its_active_weights() -> None:
    """And those of attention, which grow with the square, and of the scan."""
    weights = random_weights("nano-30b", 0)
    config, tokens = weights.config, 4096
    found = cost.parts(weights, Load(1, 0, tokens=tokens), activations=True)
    products = sum(p.flops for p in found if p.name not in ("attention", "states"))
    table = config.vocab * config.width
    assert products == pytest.approx(
        2 * tokens * (config.active_parameter_count() - 2 * table) + 2 * table, rel=1e-3
    )
    attention = sum(p.flops for p in found if p.name == "attention")
    a = config.attention
    assert a is not None
    assert attention == len(config.attention_layers) * 2 * tokens**2 * a.q_rows
    scan = cost.scan_flops(ModelConfig.preset("super-120b"), 1)
    assert scan == pytest.approx(6.5e6, rel=0.02)


def test_a_piece_after_others_reads_their_keys() -> None:
    weights = random_weights("nano-30b", 0)
    whole, cut = (prefill.parts(weights, Load(1, 0), 8192, piece) for piece in (8192, 2048))
    for kind in ("M", "E", "*", "head"):
        flops = [sum(p.flops for p in found if p.kind == kind) for found in (whole, cut)]
        assert flops[0] == pytest.approx(flops[1])
    assert sum(p.nbytes for p in cut) > sum(p.nbytes for p in whole)


def test_a_part_takes_the_longer_of_bytes_and_operations() -> None:
    moving, computing = Part("a", "M", "a", 4e6), Part("a", "E", "b", 4e6, 1.3e10, "fp8")
    assert RATES.us(moving) == pytest.approx(1.0)
    assert RATES.us(computing) == pytest.approx(10.0)
    assert (RATES.bound(moving), RATES.bound(computing)) == ("copy", "fp8")
    assert cost.floor_us([moving, computing], RATES) == pytest.approx(11.0)
    kinds = cost.by_kind([computing, moving, moving], RATES)
    assert list(kinds) == ["M", "E"]
    assert kinds["M"] == {"bytes": 8e6, "flops": 0.0, "floor_us": pytest.approx(2.0)}


# ------------------------------------------------------------------------------- forced acceptance
def test_forced_drafts_are_accepted_as_told() -> None:
    forced = Forced(3, 3, "cpu")
    ids = torch.tensor([5, 1, 1, 1, 5, 1, -2, -2, 5])
    picked = torch.full_like(ids, 9)
    cu = torch.tensor([0, 4, 8, 9], dtype=torch.int32)
    for accepted in range(4):
        forced.always(accepted)
        path, count, last = forced.verify(ids, picked, cu, 4)
        assert count.tolist() == [accepted, min(accepted, 1), 0]
        assert last.tolist() == count.tolist()
        walked = [[*range(n + 1), *[-1] * (3 - n)] for n in count.tolist()[:2]]
        assert path.tolist() == [*walked[0], *walked[1], 0]
    own = verify_drafts(ids, picked, cu, 4)
    assert [(x.shape, x.dtype) for x in own] == [(x.shape, x.dtype) for x in (path, count, last)]


def test_a_rate_gives_its_mean() -> None:
    forced = Forced(64, 3, "cpu")
    forced.at_rate(0.73)
    assert float(forced.table.float().mean()) + 1 == pytest.approx(
        expected_tokens(0.73, 3), abs=0.02
    )
    assert expected_tokens(0.73, 3) == pytest.approx(2.65, abs=0.01)
    assert expected_tokens(None, 3) == 1.0


# --------------------------------------------------------------------------------- through engines
def rows_of(found: Iterator[Row]) -> list[Row]:
    return list(found)


@pytest.mark.parametrize("rate, gained", [(None, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("rollback", [None, "replay"])
def test_steps_over_contexts_that_nobody_computed(
    rate: float | None, gained: float, rollback: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    k = 2 if rate or rollback else 0
    setup = replace(TINY, acceptance=rate, rollback=rollback)
    wanted = decode.loads("1,2", "100", k, setup)
    found = rows_of(decode.measure(setup, wanted, k, FACTS, 3, True, "again"))
    assert [r["tokens"] for r in found] == [1, 2]
    for row in found:
        assert row["tokens_per_step"] == gained
        assert row["host_us"] <= row["p80"]
        assert row["experts"] >= ModelConfig.preset("tiny").moe.top_k  # type: ignore[union-attr]
        assert set(row["kinds"]) >= {"M", "E", "*", "head"}
        assert row["case"]["rollback"] == (rollback or "lanes")
        assert set(row["split_us"]) == ({"draft", "verify", "commit"} if k else {"verify"})
    told = capsys.readouterr()
    assert "'other_steps': 0" in told.err
    table = [text for text in told.out.splitlines() if text.startswith("| ")]
    assert table[0] == decode.HEAD
    assert {text.count("|") for text in table[:3]} == {decode.HEAD.count("|")}


def test_contexts_that_do_not_fit_have_a_row_that_says_so() -> None:
    with TINY.started(0, requests=2, context=160, piece=8, batches=[1, 2], graphs=True) as (llm, _):
        pages = llm.engine.scheduler.pages
        assert pages is not None
        pages.take(pages.free - 3)
        with pytest.raises(steps.BenchError, match=r"1 of 2 contexts of 128 tokens fit"):
            steps.begin(llm, 2, 128)
        assert not llm.engine.busy
        steps.begin(llm, 1, 128)


def test_prompts_of_every_length_and_piece(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_of(prefill.measure(TINY, [20, 70], FACTS, RATES, 32, 1))
    assert [(r["tokens"], r["case"]["piece"]) for r in found] == [(20, 32), (70, 32)]
    assert all(r["floor_us"] > 0 and r["tflops"] is not None for r in found)
    text = capsys.readouterr().out.splitlines()
    table = [row for row in text if row.startswith("| ")][:3]
    assert {row.count("|") for row in table} == {prefill.HEAD.count("|")}


def test_a_batch_that_does_not_fit_is_told_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(wanted: list[Load]) -> Iterator[Row]:
        if max(x.batch for x in wanted) > 4:
            raise CapacityError("8 requests do not fit")
        yield from ({"tokens": x.batch} for x in wanted)

    wanted = decode.loads("1,8,4,16", "100", 3, TINY)
    found = rows_of(decode.fitting(wanted, measured))
    assert [row["tokens"] for row in found] == [1, 4]
    told = capsys.readouterr().out
    assert told.count("does not fit: 8 requests do not fit") == 2
    assert rows_of(decode.fitting(wanted[1:2], measured)) == []


@pytest.mark.parametrize("k", [0, 2])
def test_a_load_gets_all_its_tokens(k: int, capsys: pytest.CaptureFixture[str]) -> None:
    setup = replace(TINY, acceptance=0.7)
    traffic = [load.Traffic(given=24, wanted=9, most=n, prompts=3) for n in (1, 2)]
    found = rows_of(load.measure(setup, traffic, k, FACTS, RATES, 32))
    assert [r["tokens"] for r in found] == [1, 2]
    assert all(r["first_token_ms"] > 0 and r["between_ms"] > 0 for r in found)
    assert all(r["case"]["in"] == 24 for r in found)
    table = [row for row in capsys.readouterr().out.splitlines() if row.startswith("| ")]
    assert {row.count("|") for row in table} == {load.HEAD.count("|")}


def test_a_load_takes_its_lengths_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "rows.jsonl", []

    def measured(setup: Any, traffic: Any, *rest: Any) -> Iterator[Row]:
        seen.extend(traffic)
        yield blank("load", "tiny", "bf16", 2, "measure")

    for name, result in (("need_gpu", None), ("facts_here", None), ("rates_here", None)):
        monkeypatch.setattr(load, name, lambda *_, result=result: result)
    monkeypatch.setattr(load, "measure", measured)
    words = ["preset:tiny", "--synthetic", "--in", "24", "--answer", "9", "--out", str(file)]
    done = CliRunner().invoke(load.app, [*words, "--concurrency", "2"])
    assert done.exit_code == 0, done.output
    assert seen == [load.Traffic(given=24, wanted=9, most=2, prompts=8)]
    assert [r["suite"] for r in rows.load([file])] == ["load"]


def test_drafts_are_measured_at_every_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows_of(drafts.run_all(TINY, [2], 2, 9, 2, FACTS))
    assert [(r["case"]["drafts"], r["case"]["accepted"]) for r in found] == [
        (0, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]
    assert all(r["split_us"]["draft"] > 0 for r in found[1:])
    table = [row for row in capsys.readouterr().out.splitlines() if row.startswith("| ")]
    assert {row.count("|") for row in table} == {drafts.HEAD.count("|")}


# ------------------------------------------------------------------------------------------ traces
def test_kernels_belong_to_the_layer_before_their_marker() -> None:
    mark = Span("void erfc_kernel", 0, 0)
    spans = [Span("a", 0, 2), mark, Span("b", 3, 5), Span("c", 4, 6), mark, Span("d", 7, 8), mark]
    found = steps.by_layer([*spans, Span("head", 9, 19)], ["M", "E", "M"])
    assert found == {
        "M": {"launches": 2, "us": 3.0},
        "E": {"launches": 2, "us": 3.0},
        "rest": {"launches": 1, "us": 10.0},
    }
    lacking = steps.by_layer(spans, ["M", "E", "M", "M"])
    assert lacking == {"rest": {"launches": 4, "us": 6.0}}


def test_every_layer_of_a_step_is_marked() -> None:
    with TINY.started(2, requests=1, context=64, piece=16, batches=[1], graphs=True) as (llm, _):
        steps.begin(llm, 1, 20)
        llm.engine.depth = None
        llm.engine.scheduler.drafts = 2
        with steps.piece_by_piece(llm), steps.marked(llm) as order:
            llm.step()
        kinds = [k.value for k in llm.config.kinds]
        at = order.index(kinds[0], order.index("MTP"))
        assert order[at : at + len(kinds)] == kinds
        assert order.count("MTP") == 2, "one more draft, and all rows behind the trunk"


# ------------------------------------------------------------------------------------ transformers
def test_the_gate_before_transformers_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.preset("tiny")
    cpu = torch.device("cpu")
    assert transformers.gate(config, cpu, 12, 3) < 1e-5
    wrong: Callable[..., Any] = transformers.settled

    def spoiled(model: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
        return wrong(model)

    monkeypatch.setattr(transformers, "settled", spoiled)
    with pytest.raises(transformers.BenchError, match="of the largest apart"):
        transformers.gate(config, cpu, 12, 3)


def test_transformers_takes_our_configuration() -> None:
    config = ModelConfig.preset("tiny")
    model = transformers.peer(config, torch.device("cpu"), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} <= {torch.bfloat16, torch.float32}
    times = transformers.seconds(model, 8, config.vocab, 3)
    assert len(times) == 3
    assert times == sorted(times)


# ------------------------------------------------------------------------------------------ layers
class HostWatch:
    """Times on the host, for a device that has no other clock."""

    def capture(self, calls: Any, repeat: bool) -> Callable[[], float]:
        def replay() -> float:
            start = time.perf_counter()
            for call in calls:
                call()
            return 1e6 * (time.perf_counter() - start)

        return replay

    single = capture


def test_a_layer_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "race", lambda replays: [summary([r()]) for r in replays])
    watch: Any = HostWatch()
    found = rows_of(layers.measure(TINY, [1, 2], [20], 40, watch, FACTS, RATES))
    kinds = list(dict.fromkeys(k.value for k in ModelConfig.preset("tiny").kinds))
    assert [r["case"]["layer"] for r in found] == kinds * 3
    assert [r["tokens"] for r in found[:: len(kinds)]] == [1, 2, 20]
    assert all(r["us"] > 0 and r["floor_us"] > 0 and r["bytes"] > 0 for r in found)
    assert found[0]["layers"] == ModelConfig.preset("tiny").pattern.count(kinds[0])


# ------------------------------------------------------------------------------------- predictions
def made_row(batch: int, launches: int, streaming: float, each: float, **more: Any) -> Row:
    """A decode row of Nano's whose time is what the formula says."""
    row = blank("decode", "nano-30b", "bf16", batch, "", context=1024, drafts=0)
    row |= {"ceilings": {"copy_gbs": 4280.0, "bf16_tflops": 700.0}, "launches": launches}
    row |= {"experts": None, "us": 1.0} | more
    (known,) = model.known([row])
    return row | {"us": model.Fit(streaming, each).us(known.parts, launches, known.rates)}


def test_what_made_the_rows_is_found_again() -> None:
    found = [made_row(n, 400 + n, 0.9, 3.5) for n in (1, 16, 64, 256)]
    steps = model.known(found)
    by = model.fit(steps)
    assert by.streaming == pytest.approx(0.9)
    assert by.launch_us == pytest.approx(3.5, rel=1e-3)
    assert "| +0 % |" in model.held_against(steps, by).replace("-0", "+0")
    with pytest.raises(model.BenchError, match="three measured"):
        model.fit(steps[:2])


def test_other_gpus_are_predictions(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for n in (1, 16, 64):
        rows.append(made_row(n, 400, 0.9, 3.5), file)
    done = CliRunner().invoke(
        model.app, ["preset:nano-30b", "--quant", "bf16", "--rows", str(file), "--batch", "1,16"]
    )
    assert done.exit_code == 0, done.output
    head = next(text for text in done.stdout.splitlines() if text.startswith("| sequences"))
    assert head.count("(prediction)") == 2
    here = Rates(4280.0, 700.0, 1300.0)
    assert model.elsewhere(here, "H200") == here
    there = model.elsewhere(here, "B200")
    assert there.copy_gbs == pytest.approx(4280 * 7.7 / 4.8)
    assert there.bf16_tflops == pytest.approx(700 * 2250 / 989)


def test_a_start_is_told_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child runs in this process here: starting two takes too long for a test."""

    def inside_this_one(line: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        assert line[1:3] == ["-m", "bench.start"]
        assert Path(given["env"]["TRITON_CACHE_DIR"]).is_dir()
        done = CliRunner().invoke(start.app, line[3:])
        return subprocess.CompletedProcess(line, done.exit_code, done.stdout)

    monkeypatch.setattr(start.subprocess, "run", inside_this_one)
    file = tmp_path / "rows.jsonl"
    words = ["preset:tiny", "--synthetic", "--device", "cpu", "--tokens", "9", "--requests", "1"]
    done = CliRunner().invoke(start.app, [*words, "--quant", "bf16", "--out", str(file)])
    assert done.exit_code == 0, done.output
    first, second = rows.load([file])
    assert [r["case"]["start"] for r in (first, second)] == ["first", "second"]
    for row in (first, second):
        seconds = row["seconds"]
        assert all(seconds[part] > 0 for part in start.PARTS)
        inside = sum(seconds[part] for part in ("import", "weights", "steps", "first"))
        assert inside < seconds["all"]
        assert seconds["beyond"] == pytest.approx(seconds["all"] - seconds["weights"])


def test_all_figures_by_one_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.traffics([""]) == []
    traffic = figures.traffics(["24:9:2:3", "24:40:1:1"])
    alone = figures.measure(TINY, 0, [], [20], [], 3, 32, FACTS, RATES)
    assert [r["suite"] for r in alone] == ["prefill"]
    for k, suites in ((0, ["decode"] * 2 + ["prefill"] + ["load"] * 2), (2, ["decode"] * 2)):
        setup = replace(TINY, acceptance=0.7 if k else None)
        sizes = ([1, 2], [70], traffic if not k else [])
        found = rows_of(figures.measure(setup, k, *sizes, 3, 32, FACTS, RATES))
        assert [r["suite"] for r in found] == suites
        assert {r["case"].get("drafts", 0) for r in found} == {k}
        assert all(f"bench.{r['suite']} tiny" in r["command"].replace("preset:", "") for r in found)
    told: list[Row] = []

    def failing() -> Iterator[Row]:
        raise steps.BenchError("no")
        yield

    told += figures.each([failing, lambda: iter([{"us": 1}])])
    assert told == [{"us": 1}]
    assert "BenchError: no" in capsys.readouterr().err
