"""Kernels that decode without assembly, on the device."""

import pytest
import torch

from nemotriton.autotune import parity
from nemotriton.autotune.trial import same_bits
from nemotriton.kernels.op import SPECS
from nemotriton.model.config import ModelConfig

CALLS = [("run_experts_packed", 1), ("run_experts_packed", 8), ("run_experts_packed", 2048)]
CALLS += [(name, tokens) for name in ("fp8_matmul", "packed_matmul") for tokens in (1, 16, 64)]


@pytest.mark.parametrize("name,tokens", CALLS)
def test_the_same_bits_without_assembly(
    name: str, tokens: int, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[name]
    case = spec.cases(ModelConfig.preset("super-120b"))[0]
    args = spec.make(case, tokens, cuda, torch.bfloat16, parity.generator(0, cuda))
    found = []
    for value in ("1", "0"):
        monkeypatch.setenv("NEMOTRITON_ASM", value)
        found.append(parity.run(spec, args))
    assert all(same_bits(value, found[1][key]) for key, value in found[0].items())
