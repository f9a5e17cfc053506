"""The pages in docs/: their commands and examples run, their tables are the measured rows, their
messages are the code's, their links lead somewhere."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

from bench import pages, rows
from bench.goal_list import goals
from nemotriton.kernels.op import OPS, SPECS
from nemotriton.model.config import PRESETS
from tests.flavours import CONFIG
from tests.pages import DOCS, ROOT, Command, Fence, command, fences, indented, write_models

NAMES = ("how-it-works", "port-a-kernel", "tune", "troubleshooting", "articles")
LAYERS = ("mamba", "attention", "moe", "mlp", "mtp")
PAGES = [DOCS / f"{name}.md" for name in NAMES] + [DOCS / f"layers/{name}.md" for name in LAYERS]
RESULTS = ROOT / "bench/results/nvidia_h200"
TRIED = [(page, fence) for page in PAGES for fence in fences(page)]


def lines(where: str) -> list[Any]:
    """The commands of all pages' shell blocks that run there, each once."""
    found = {
        line: pytest.param(line, id=f"{page.stem}: {line[:90]}")
        for page, fence in TRIED
        if fence.language == "bash" and fence.where == where
        for line in fence.code.splitlines()
    }
    return list(found.values())


def examples(where: str) -> list[Any]:
    return [
        pytest.param(fence, id=page.stem)
        for page, fence in TRIED
        if fence.language == "python" and fence.where == where
    ]


def parsed(line: str) -> Command:
    found = command(line)
    assert found, f"no command: {line!r}"
    return found


def app_of(module: str) -> Any:
    """The typer application behind `python -m module`."""
    package = importlib.import_module(module)
    return importlib.import_module(f"{module}.__main__" if hasattr(package, "__path__") else module)


def check_options(module: str, args: list[str]) -> None:
    """Parse `args` as `python -m module` would, and look at the names in them."""
    program = app_of(module)
    if not hasattr(program, "app"):
        assert not args, f"{module} takes no options"
        return
    entry: Any = typer.main.get_command(program.app)
    if hasattr(entry, "commands"):
        entry, args = entry.commands[args[0]], args[1:]
    own, dashes, behind = (args, "", []) if "--" not in args else split(args)
    given = entry.make_context(module, [*own, *([dashes, *behind] if dashes else [])]).params
    kernels = given.get("kernel") or []
    assert {*([kernels] if isinstance(kernels, str) else kernels)} <= {*SPECS}
    if isinstance(given.get("area"), list):
        assert set(given["area"]) <= {g.area for g in goals()}
    model = str(given.get("model") or "")
    if re.fullmatch(r"(preset:)?[a-z0-9,-]+", model):
        assert set(model.removeprefix("preset:").split(",")) <= set(PRESETS)
    if behind:
        check_options(behind[0], behind[1:])


def split(args: list[str]) -> tuple[list[str], str, list[str]]:
    at = args.index("--")
    return args[:at], "--", args[at + 1 :]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the pages' names of models and files stand for."""
    folder = tmp_path_factory.mktemp("pages")
    own, theirs = write_models(folder)
    (folder / "text").write_text("the first text\nand another one\n")
    return {"DIR": str(own), "HF": str(theirs), "FILE": str(folder / "text")}


@pytest.mark.parametrize("line", lines(""))
def test_a_command_runs(
    line: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parsed(line)
    if found.program == "pytest":
        check_tests(found)
        return
    check_options(found.program, found.args)
    names = places | ({"DIR": places["HF"]} if "hf" in found.args else {})
    args = [names.get(arg, arg) for arg in found.args]
    if "--pages" in args:  # the tables that stand there are held by a test of their own
        copy = tmp_path / "layers"
        copy.mkdir()
        (copy / "mamba.md").write_text((DOCS / "layers/mamba.md").read_text())
        args[args.index("--pages") + 1] = str(copy)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    done = CliRunner().invoke(app_of(found.program).app, args)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    assert done.stdout or "--pages" in args or "check" in args


def check_tests(found: Command) -> None:
    """A line of pytest: its files are there, and -k names an op."""
    files = [arg for arg in found.args if arg.startswith("tests")]
    assert files
    assert all((ROOT / file).exists() for file in files)
    if "-k" in found.args:
        assert found.args[found.args.index("-k") + 1].split()[0] in OPS


@pytest.mark.parametrize("line", lines("gpu"))
def test_a_command_for_a_gpu_is_understood(line: str) -> None:
    found = parsed(line)
    if found.program == "make":
        assert f"\n{found.args[0]}:" in (ROOT / "Makefile").read_text()
    elif found.program == "pytest":
        check_tests(found)
    else:
        check_options(found.program, found.args)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.stem
)
def test_indented_commands_are_understood(page: Path) -> None:
    """Those of the README and of the other pages, up to a pipe."""
    for found in indented(page):
        args = found.args[: found.args.index("|")] if "|" in found.args else found.args
        if found.program == "pytest":
            check_tests(found)
        else:
            check_options(found.program, args)


@pytest.mark.parametrize("fence", examples(""))
def test_an_example_runs(fence: Fence) -> None:
    torch.set_num_threads(1)
    exec(compile(fence.code, "<page>", "exec"), {"__name__": "page"})


def test_the_example_of_the_readme_runs(places: dict[str, str]) -> None:
    found = [f for f in fences(ROOT / "README.md") if f.language == "python"]
    (code,) = [f.code for f in found if f.where != "served"]  # that one: see test_serve_docs
    for shown, tried in (('"DIR"', repr(places["DIR"])), ("max_context=32768", "max_context=64")):
        assert shown in code
        code = code.replace(shown, tried)
    here: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), here)
    assert here["logits"].shape == (3, CONFIG.vocab)


@pytest.mark.parametrize("fence", examples("interpreted"))
def test_an_example_runs_in_the_interpreter(fence: Fence, tmp_path: Path) -> None:
    file = tmp_path / "page.py"
    file.write_text(fence.code)
    line = ["env", "TRITON_INTERPRET=1", "OMP_NUM_THREADS=1", sys.executable, str(file)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" right\n") == 8


def test_nothing_in_the_pages_is_left_out() -> None:
    kinds = {(fence.language, fence.where) for _, fence in TRIED}
    ways = {("bash", ""), ("bash", "gpu"), ("python", ""), ("python", "interpreted")}
    assert kinds == {*ways, ("text", "")}
    assert {page.name for page in DOCS.rglob("*.md")} >= {page.name for page in PAGES}


# ---------------------------------------------------------------------------------- what they say
@pytest.mark.parametrize("name", LAYERS)
def test_tables_are_the_measured_rows(name: str) -> None:
    """If not: python -m bench.report bench/results/nvidia_h200/goals.jsonl --pages docs/layers"""
    text = (DOCS / f"layers/{name}.md").read_text()
    assert pages.MARKED.search(text)
    assert pages.written(text, rows.load([RESULTS / "goals.jsonl"])) == text


@pytest.mark.parametrize("name", LAYERS)
def test_ops_of_a_layer_are_where_it_says(name: str) -> None:
    text = (DOCS / f"layers/{name}.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| `kernels/(\w+)\.py` \| `(\w+)` \| `(\w+)` \|$", text, re.M)
    assert len(table) == text.count("| `kernels/")
    for op, file, twin, spec in table:
        assert OPS[op].module == f"nemotriton.kernels.{file}"
        assert OPS[op].ref.__name__ == twin
        assert getattr(sys.modules[OPS[op].module], spec) is SPECS[op]


def functions() -> Iterator[str]:
    """The texts inside every function of the package, in order."""
    for path in sorted((ROOT / "nemotriton").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                texts = [n for n in ast.walk(node) if isinstance(n, ast.Constant)]
                texts.sort(key=lambda n: (n.lineno, n.col_offset))
                yield "\n".join(n.value for n in texts if isinstance(n.value, str))


def test_messages_are_those_of_the_code() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    bullets = re.findall(r"^\* ((?:`[^`]+`(?: / |, then )?)+)", text, re.M)
    said = [" ".join(m.split()) for bullet in bullets for m in re.findall(r"`([^`]+)`", bullet)]
    assert len(said) > 25
    code = list(functions())
    for message in said:
        parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
        found = re.compile(".*".join(parts), re.DOTALL)
        assert any(found.search(body) for body in code), message


def links(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    return {(page.parent / t).resolve() for t in targets if "://" not in t}


def test_links_lead_to_every_page() -> None:
    seen: set[Path] = set()
    ahead = {ROOT / "README.md"}
    while ahead:
        page = ahead.pop()
        assert page.exists(), page
        seen.add(page)
        ahead |= {t for t in links(page) if t.suffix == ".md"} - seen
        assert all(t.exists() for t in links(page)), page
    assert set(DOCS.rglob("*.md")) <= seen


def test_pictures_are_small() -> None:
    found = list((DOCS / "pictures").iterdir())
    assert len(found) <= 5
    assert all(picture.stat().st_size < 100_000 for picture in found)
