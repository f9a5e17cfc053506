"""The trainer of the embedded model, on a CPU and much smaller: it learns, goes on, and is read."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from nemotriton import LLM, ModelConfig, SamplingParams
from nemotriton.engine.loading import EMBEDDED
from tools import train_tiny
from tools.tiny_tasks import Symbols

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 16, "moe_intermediate_size": 16, "moe_latent_size": 16,
    "moe_shared_expert_intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few words over and over."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("data")
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    Symbols.of(tokenizer).write(folder / "symbols.json")
    ids = np.array(tokenizer.encode("def f(x):\n    return x\n\n\n").ids * 200, np.uint16)
    np.savez(folder / "text.npz", train=ids, heldout_code=ids[:200], heldout_docs=ids[:200])
    config = ModelConfig.preset("tiny").to_json() | SMALL
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def trained(data: Path, out: Path, steps: int, *more: str) -> list[dict[str, float]]:
    """The log of a run."""
    args = ["--data", data, "--config", data / "config.json", "--out", out, "--steps", steps]
    args += ["--rows", 2, 1, 1, 1, "--width", 64, "--block", 5, "--warmup", 5, "--ramp", 30]
    args += ["--measured", 1, *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_tiny", *map(str, args)])
        patch.setattr(train_tiny, "measure", lambda *_, **__: {"code_loss": 0.0})
        patch.setattr(train_tiny.time, "process_time", lambda: 0.0)  # of other tests, before
        train_tiny.main()
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def test_it_learns_goes_on_exactly_and_is_read(data: Path, tmp_path: Path) -> None:
    whole = trained(data, tmp_path / "whole", 20)
    assert whole[-1]["text"] < 0.8 * whole[0]["text"]
    trained(data, tmp_path / "half", 10)
    both = trained(data, tmp_path / "rest", 10, "--resume", str(tmp_path / "half"))
    losses = [[row["loss"] for row in rows] for rows in (whole, both)]
    assert losses[0] == losses[1]
    for name in ("master", "momentum", "variance"):
        a, b = (load_file(tmp_path / run / f"{name}.safetensors") for run in ("whole", "rest"))
        assert all(torch.equal(a[key], b[key]) for key in a), name
    with LLM(tmp_path / "whole" / "model", device="cpu", max_context=64, drafts=2) as llm:
        output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 4
