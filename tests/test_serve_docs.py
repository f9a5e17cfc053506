"""The examples of docs/serve.md and of the README's section on serving, as they stand there but for
the address and the model's name."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.pages import DOCS, ROOT, fences
from tests.serving import Running, serving

README = [f for f in fences(ROOT / "README.md") if f.where == "served"]
BLOCKS = [(f.language, f.code) for f in [*fences(DOCS / "serve.md"), *README]]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    with serving(context=256) as running:
        yield running


def test_there_are_examples() -> None:
    assert [kind for kind, _ in BLOCKS] == ["bash", "python"] * 2


@pytest.mark.parametrize(
    "kind, code", BLOCKS, ids=["bash", "python", "bash-readme", "python-readme"]
)
def test_examples_run(server: Running, kind: str, code: str) -> None:
    assert "127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", server.url).replace("MODEL", "tiny")
    command = ["bash", "-ec"] if kind == "bash" else [sys.executable, "-c"]
    if kind == "bash":
        code = code.replace("curl ", "curl --silent --show-error --fail ")
    done = subprocess.run([*command, code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    found = done.stdout.decode()
    if kind == "bash":
        assert '"finish_reason":' in found
        assert "data: [DONE]" in found
        assert "nemotriton_slots 8" in found
    else:
        assert "completion_tokens=" in found
    assert done.stderr == b""
