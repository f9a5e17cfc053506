"""A mixed checkpoint on kernels in the interpreter: the twins' logits, w4a16 and w4a4."""

from pathlib import Path

import pytest
import torch

from nemotriton.engine.llm import LLM
from nemotriton.kernels.op import use
from nemotriton.model.layers import Experts, Linear
from nemotriton.model.packing import forced_packing
from tests import harness
from tests.flavours import FLAVOURS, super_mixed

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


def test_norms_hand_on_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels: the bits of norms in bf16 whose rows are quantised in the product."""
    super_mixed(tmp_path / "m")
    options = {"dtype": "bfloat16", "device": "cpu", "max_context": 128}
    with LLM(tmp_path / "m", act_quant="fp8", **options) as llm:
        found, _ = harness.run(llm.runner.model, IDS, [5, -1, 1])
        monkeypatch.setattr(Linear, "code_scale", None)
        want, _ = harness.run(llm.runner.model, IDS, [5, -1, 1])
    assert torch.equal(found, want)


@pytest.mark.parametrize("flavour", ["super-mixed", "all nvfp4"])
def test_packed_matrices_in_a_whole_model(flavour: str, tmp_path: Path) -> None:
    """bf16 on kernels with repacked weights: as near to the twins in fp32 as bf16 twins are."""
    FLAVOURS[flavour](tmp_path / "m")

    def logits(dtype: str, packed: bool, kernels: bool) -> torch.Tensor:
        options = {"dtype": dtype, "device": "cpu", "max_context": 128}
        with forced_packing(packed), LLM(tmp_path / "m", **options) as llm:
            layers = [m for m in llm.runner.model.modules() if isinstance(m, Experts)]
            assert all(layer.packed == packed for layer in layers)
            with use({} if kernels else {"*": "ref"}):
                return harness.run(llm.runner.model, IDS, [5, -2])[0].double()

    exact = logits("float32", packed=False, kernels=False)
    twins = logits("bfloat16", packed=False, kernels=False)
    found = logits("bfloat16", packed=True, kernels=True)
    assert float((found - exact).norm()) < 2 * float((twins - exact).norm())
