"""Checkpoints in every way that releases are stored, on compiled kernels: the twins' logits, and
text from the command line."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nemotriton import LLM
from nemotriton.generate.__main__ import app
from tests.flavours import FLAVOURS

PROMPTS = [[25, 90, 200, 31], [77] * 3 + list(range(20, 170)), [40]]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flavours")
    found = {}
    for name, write in FLAVOURS.items():
        found[name] = root / name.replace(" ", "-") / "model"
        found[name].parent.mkdir()
        write(found[name])
    return found


def logits(path: Path, dtype: str, device: str) -> list[torch.Tensor]:
    """Keys and values as the model's numbers: a last bit may flip a code of FP8 ones."""
    limits = {"max_context": 256, "max_requests": 4}
    with LLM(path, dtype=dtype, device=device, kv_dtype="bf16", **limits) as llm:
        return [x.cpu() for x in llm.logits(PROMPTS)]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_logits_are_the_twins(flavour: str, paths: dict[str, Path], cuda: torch.device) -> None:
    exact = logits(paths[flavour], "float32", "cpu")
    for e, o in zip(exact, logits(paths[flavour], "float32", "cuda"), strict=True):
        assert float((o - e).norm() / e.norm()) < 1e-5
    twin = logits(paths[flavour], "bfloat16", "cpu")
    ours = logits(paths[flavour], "bfloat16", "cuda")  # packed for Hopper where that is the GPU
    for e, t, o in zip(exact, twin, ours, strict=True):
        assert float((o - e).norm()) <= 2 * float((t - e).norm()) + 2**-8 * float(e.norm())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_generate_runs(flavour: str, paths: dict[str, Path], cuda: torch.device) -> None:
    args = [str(paths[flavour]), "-p", "a", "-n", "8", "--temperature", "0", "--device", "cuda"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.stderr
    assert "run as w" in result.stderr
