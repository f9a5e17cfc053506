"""The commands of docs/audit.md, as they stand there but for the names of models and files."""

from pathlib import Path

import pytest
import torch

from tests.audit.command import commands, invoke
from tests.audit.test_checkpoint import hub
from tests.pages import write_models

FEW = {"mtp": ("-n", "3", "-p", "One."), "parity": ("--tokens", "6"), "divergence": ()}
COMMANDS = [c for c in commands() if c[0] != "TRITON_INTERPRET=1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with an MTP block, and one that transformers has written."""
    return write_models(tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_a_command_of_the_page(
    args: list[str], models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = models
    hub(monkeypatch, own, ["model.safetensors"])
    folder = own.parent  # a trace stays for the command that reads it
    text = tmp_path / "text"
    text.write_text("the first text\nand another one\n")
    names = {"FILE": str(text), "OUT.safetensors": str(folder / "out.safetensors"), "DIR": str(own)}
    if "hf" in args:
        names["DIR"] = str(theirs)
    small: tuple[str, ...] = ()
    if "--synthetic" in args:  # full size on a GPU
        small = ("--layers", "7", "--width-scale", "0.05", "--memory", "0.2", *FEW[args[0]])
    code, out, err = invoke(*(names.get(arg, arg) for arg in args), *small)
    on_a_gpu = args[0] == "divergence" and "--against" not in args
    if on_a_gpu and not torch.cuda.is_available():
        assert (code, out) == (2, "")
        assert "run it on a GPU" in err
        return
    assert code == 0, out + err
    assert out


def test_the_page_shows_every_audit() -> None:
    assert {c[0] for c in COMMANDS} == {
        *("checkpoint", "memory", "divergence", "parity", "mtp", "env")
    }
