"""Dependent launches: when they are asked for."""

import subprocess
import sys

import pytest
import torch

from nemotriton.kernels.dependent import dependent, independent, side_by_side
from nemotriton.kernels.op import targeting

META = torch.empty(1, device="meta")


@pytest.mark.parametrize("arch,wanted", [(80, False), (89, False), (90, True), (100, True)])
def test_only_from_hopper_on(arch: int, wanted: bool) -> None:
    with targeting(arch):
        assert dependent(META) is wanted
    assert not dependent(META)


def test_a_block_without() -> None:
    with targeting(90):
        with independent():
            assert not dependent(META)
        assert dependent(META)
    assert not dependent(torch.empty(1))


@pytest.mark.parametrize("variable", ["NEMOTRITON_PDL=0", "TRITON_INTERPRET=1"])
def test_switched_off_by_the_environment(variable: str) -> None:
    program = (
        "import torch; from nemotriton.kernels.dependent import dependent as d\n"
        "from nemotriton.kernels.op import targeting\n"
        "with targeting(90): print(d(torch.empty(1, device='meta')))"
    )
    command = ["env", variable, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_a_capture_work_is_done_at_once() -> None:
    seen: list[str] = []

    def work() -> torch.Tensor:
        seen.append("work")
        return torch.ones(2)

    with side_by_side(torch.empty(1)) as start:
        result = start(work)
        seen.append("beside")
        assert torch.equal(result(), torch.ones(2))
    assert seen == ["work", "beside"]
