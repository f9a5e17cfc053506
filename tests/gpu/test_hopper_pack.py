"""Packed NVFP4 words on the device: the interpreter's checks on compiled kernels, both decodes."""

from pathlib import Path

import pytest
import torch

from nemotriton.engine.llm import LLM
from nemotriton.model.layers import Experts
from nemotriton.model.packing import forced_packing
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.synth import write_checkpoint
from tests import harness
from tests.interpreter.test_hopper_pack import (  # noqa: F401
    test_a_product_with_packed_weights,
    test_decodes_every_code_under_every_scale,
    test_orders_in_kernels_are_the_hosts,
    test_sums_over_part_of_the_columns_and_output_in_order,
)
from tests.test_packing import IDS, LATENT


@pytest.mark.parametrize("pieces", [[39, -1], [2, *(-1 for _ in IDS[2:])]], ids=["prompt", "steps"])
def test_a_packed_model_is_as_near_as_the_plain_one(
    pieces: list[int], cuda: torch.device, tmp_path: Path
) -> None:
    """bf16 logits with and without repacked experts, against fp32 on the CPU."""
    write_checkpoint(LATENT, tmp_path / "m", scheme=release_scheme(LATENT, "super-mixed"))

    def logits(device: str, dtype: str, packed: bool) -> torch.Tensor:
        options = {"dtype": dtype, "device": device, "max_context": 128, "max_requests": 2}
        with forced_packing(packed), LLM(tmp_path / "m", **options) as llm:
            layers = [m for m in llm.runner.model.modules() if isinstance(m, Experts)]
            assert all(layer.packed == packed for layer in layers)
            return harness.run(llm.runner.model, IDS, pieces)[0].cpu().double()

    exact = logits("cpu", "float32", packed=False)
    plain = logits(str(cuda), "bfloat16", packed=False)
    found = logits(str(cuda), "bfloat16", packed=True)
    assert float((found - exact).norm()) < 2 * float((plain - exact).norm())
