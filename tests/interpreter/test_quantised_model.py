"""A mixed checkpoint on kernels in the interpreter: the twins' logits, w4a16 and w4a4."""

from pathlib import Path

import pytest
import torch

from nemotriton.engine.llm import LLM
from nemotriton.kernels.op import use
from tests import harness
from tests.flavours import super_mixed

IDS = torch.randint(3, 320, (7,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("act_quant", [False, True])
def test_kernels_and_twins_agree_on_a_whole_model(act_quant: bool, tmp_path: Path) -> None:
    super_mixed(tmp_path / "m")
    options = {"dtype": "float32", "device": "cpu", "max_context": 128}
    with LLM(tmp_path / "m", act_quant=act_quant, **options) as llm:
        model = llm.runner.model
        found, _ = harness.run(model, IDS, [5, -2])
        with use({"*": "ref"}):
            want, _ = harness.run(model, IDS, [5, -2])
    assert float((found - want).norm() / want.norm()) < 1e-5
