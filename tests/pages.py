"""What the pages in docs/ show: fenced blocks and commands, as tests run them.

The word behind a fence's language says where it runs: nothing is a CPU, `gpu` a GPU (elsewhere its
options are parsed), `interpreted` Triton's interpreter.
"""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nemotriton.model.synth import write_checkpoint
from tests import hf_oracle
from tests.flavours import CONFIG

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)```(\w+)(?: (\w+))?\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block: its language, the word behind it ("" for none) and its dedented text."""

    language: str
    where: str
    code: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of a page. program: a module behind `python -m`, or `make`."""

    program: str
    args: list[str]
    variables: tuple[str, ...] = ()


def fences(page: Path) -> list[Fence]:
    """The fenced blocks of a page, in order."""
    found = _FENCE.findall(page.read_text())
    return [Fence(lang, where, textwrap.dedent(code)) for _, lang, where, code in found]


def command(line: str) -> Command | None:
    """`line` as a command; None if it starts neither a module nor make."""
    words = shlex.split(line, comments=True)
    first = next((i for i, word in enumerate(words) if "=" not in word), len(words))
    variables, words = tuple(words[:first]), words[first:]
    if words[:2] == ["python", "-m"]:
        return Command(words[2], words[3:], variables)
    return Command("make", words[1:], variables) if words[:1] == ["make"] else None


def indented(page: Path) -> Iterator[Command]:
    """The commands of a page's indented lines."""
    for line in page.read_text().splitlines():
        before, program, rest = line.partition("python -m ")
        shown = line if "|" not in before else program + rest  # what is piped in is left out
        found = command(shown) if line.startswith("    ") and program else None
        if found:
            yield found


def write_models(folder: Path) -> tuple[Path, Path]:
    """What the pages' commands run on: a checkpoint with an MTP block, and one that transformers
    has written."""
    torch.set_num_threads(1)
    write_checkpoint(CONFIG, folder / "own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hf_oracle.BASE, "vocab_size", 320)
        hf_oracle.save(hf_oracle.build("latent"), folder / "hf")
    return folder / "own", folder / "hf"
