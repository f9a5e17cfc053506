"""The comparison of expert schedules, as far as it goes without a GPU."""

from pathlib import Path

import pytest
import torch

from bench import rows, schedules
from nemotriton.autotune.parity import generator
from nemotriton.kernels.op import Case

CPU = torch.device("cpu")
CASE = Case(E=512, F=2688, L=1024, K=22, O=1)


def test_rows_that_share_experts() -> None:
    assert schedules.shared_experts(torch.tensor([[0, 1], [1, 2], [3, 4]])) == 0.25
    assert schedules.shared_experts(torch.tensor([[0, 1], [1, 0]])) == 1.0


def test_skewed_draws_favour_the_first_experts() -> None:
    shares = []
    for skew in schedules.SKEWS:
        logits = schedules.draw(2048, 64, skew, CPU, generator(0, CPU))
        counts = torch.bincount(logits.topk(4).indices.flatten(), minlength=64).float()
        shares.append(float(counts[:8].sum() / counts.sum()))
    assert shares[0] == pytest.approx(8 / 64, abs=0.02)
    assert shares == sorted(shares)
    assert shares[-1] > 0.4


def test_overlap_of_uniform_draws_is_what_chance_gives() -> None:
    ((_, uniform), *skewed) = schedules.drawn_overlap(512, 22)
    assert uniform == pytest.approx(22 / 512, abs=0.005)
    assert all(share > uniform for _, share in skewed)


@pytest.mark.parametrize("tokens", schedules.TOKENS)
def test_tiles_differ_in_their_blocks(tokens: int) -> None:
    blocks = {s: schedules.tile_of(CASE, s, tokens)["BLOCKS"] for s in schedules.SCHEDULES}
    assert blocks == {"token": 0, "expert": 1 if tokens <= 8 else 2, "sorted": 2}


def test_table_and_picture(tmp_path: Path) -> None:
    found = [
        {"skew": k, "tokens": t, "provider": s, "us": 10.0 + t, "experts": 22.0, "gpu": "G"}
        for k in schedules.SKEWS
        for t in (1, 128)
        for s in schedules.SCHEDULES
        if schedules.applies(s, t, CASE)
    ]
    text = schedules.table(found)
    assert "| 0.5 | 128 | 22 | 138.0 |  | 138.0 |" in text
    assert len(text.splitlines()) == 2 + 2 * len(schedules.SKEWS)
    pytest.importorskip("matplotlib")
    schedules.draw_picture(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_overlap_of_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.flavours import FLAVOURS
    from tests.tokenizer_files import write_tokenizer

    FLAVOURS["super-mixed"](tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    monkeypatch.setattr(schedules, "TEXT", "abcabcabc")
    out = tmp_path / "rows.jsonl"
    schedules.main(overlap=str(tmp_path / "m"), out=out)
    (row,) = rows.load([out])
    assert (row["suite"], row["gpu"], row["us"]) == ("overlap", "CPU", None)
    assert row["tokens"] == 9
    assert row["chance"] == row["case"]["K"] / row["case"]["E"]
    assert 0 < row["shuffled"] <= 1
    assert 0 < row["neighbours"] <= 1
    told = capsys.readouterr().out
    assert "drawn, skew 0.5" in told
    assert str(tmp_path / "m") in told
