"""What compute-sanitizer is given: every kernel of the GPU that is there, and nothing hidden."""

from typing import Any

import pytest
import torch

from nemotriton import device as devices
from nemotriton.autotune import parity
from nemotriton.kernels.op import SPECS
from tests.gpu import sanitize

CPU = torch.device("cpu")
SPEC = "rms_norm"


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins in the places of kernels, which the interpreter's tests run."""
    torch.set_num_threads(1)
    honest = parity.run
    monkeypatch.setattr(parity, "run", lambda spec, args, ref=False: honest(spec, args, ref=True))


def capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    info = type("Info", (), {"capability": (major, minor), "name": f"sm_{major}{minor}"})
    monkeypatch.setattr(devices, "info", lambda _: info)


@pytest.mark.parametrize("arch,family", [((9, 0), "Hopper"), ((10, 0), "Blackwell")])
def test_every_kernel_of_an_architecture_is_run(
    arch: tuple[int, int],
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capability(monkeypatch, *arch)
    code = 10 * arch[0] + arch[1]
    others = [name for name, spec in SPECS.items() if spec.arches and code not in spec.arches]
    assert 0 < len(others) < 8
    assert sanitize.main([], CPU) == 0
    *lines, ran, left = capsys.readouterr().out.splitlines()
    assert ran == f"ran {len(SPECS) - len(others)} kernels on sm_{code}; 0 cases wrong"
    assert left == f"left out {len(others)} of other architectures: {', '.join(others)}"
    assert {line.split()[0] for line in lines} == {*SPECS} - {*others}


def test_no_kernel_is_left_out_everywhere() -> None:
    """One of no architecture that is built for would never be run by anybody."""
    assert all(not spec.arches or {90, 100} & {*spec.arches} for spec in SPECS.values())


def test_a_wrong_kernel_and_one_that_cannot_run_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capability(monkeypatch, 9, 0)
    honest = parity.run

    def wrong(spec: Any, args: Any, ref: bool = False) -> Any:
        found = honest(spec, args, ref=ref)
        return found if ref else {name: t + 1 for name, t in found.items()}

    monkeypatch.setattr(parity, "run", wrong)
    assert sanitize.main([SPEC], CPU) == 1
    assert f"wrong: {SPEC} " in capsys.readouterr().out

    def broken(spec: Any, args: Any, ref: bool = False) -> Any:
        raise RuntimeError("an illegal address\nand more")

    monkeypatch.setattr(parity, "run", broken)
    assert sanitize.main([SPEC], CPU) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: an illegal address\n" in out
    assert "ran 1 kernels" in out


def test_a_name_that_is_none_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["nothing"], CPU) == 2
    assert "no kernel nothing: there are " in capsys.readouterr().out
