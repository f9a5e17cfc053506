"""Dependent launches: when they are asked for."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from nemotriton.kernels.dependent import dependent, independent, rehearsed, side_by_side
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


def test_a_rehearsal_launches_what_a_capture_will(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the second stream launches are plain: kernels of their own, compiled beforehand."""
    on_gpu = SimpleNamespace(is_cuda=True, device=META.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    seen: list[bool] = []

    def work() -> torch.Tensor:
        seen.append(dependent(META))
        return META

    with targeting(90):
        for block in (nullcontext(), rehearsed()):
            with block, side_by_side(on_gpu) as start:  # type: ignore[arg-type]
                start(work)()
    assert seen == [True, False]
