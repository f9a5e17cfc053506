"""Two small checkpoints, written once."""

from pathlib import Path

import pytest

from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.synth import write_checkpoint
from tests.checkpoint.files import CONFIG


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint with every layer kind and an MTP block, in one file."""
    path = tmp_path_factory.mktemp("checkpoints") / "plain"
    write_checkpoint(CONFIG, path)
    return path


@pytest.fixture(scope="session")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVFP4 experts among FP8 shared experts and Mamba projections."""
    path = tmp_path_factory.mktemp("checkpoints") / "quantised"
    write_checkpoint(CONFIG, path, scheme=release_scheme(CONFIG, "super-mixed"))
    return path
