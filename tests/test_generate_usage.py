"""Wrong command lines: exit code 2, one message that names value and remedy, nothing on stdout."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemotriton.commandline import UsageError
from nemotriton.engine.sampling import SamplingParams
from nemotriton.generate.__main__ import app
from nemotriton.generate.prompts import gather

OK = {"prompt": "a"}


def invoke(*args: str, stdin: bytes | None = None) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, list(args), input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "args,words",
    [
        (["--temprature", "1"], ["--temprature", "--temperature"]),
        (["-p", "a", "--max-tokens", "many"], ["--max-tokens many", "give a whole number"]),
        (["-p", "a", "--act-quant", "--act-quant-fp8"], ["--act-quant-fp8", "give one"]),
        (["-p"], ["-p", "requires an argument"]),
        (["Hello there"], ["no model 'Hello there'", "a prompt goes behind -p"]),
        (["one", "two", "-p", "a"], ["unexpected argument two", "only MODEL"]),
        (["-p", "a", "--memory", "1.5"], ["--memory 1.5", "(0, 1]"]),
        (["-p", "a", "--memory", "0"], ["--memory 0", "(0, 1]"]),
        (["-p", "a", "--max-context", "0"], ["--max-context 0", "above 0"]),
        (["-p", "a", "--max-requests", "-1"], ["--max-requests -1", "above 0"]),
        (["-p", "a", "--prefill-piece", "0"], ["--prefill-piece 0", "above 0"]),
        (["-p", "a", "--dtype", "int4"], ["--dtype int4", "bfloat16"]),
        (["-p", "a", "--state-dtype", "fp8"], ["--state-dtype fp8", "float32"]),
        (["-p", "a", "--kv-dtype", "int8"], ["--kv-dtype int8", "auto, bf16, fp8"]),
        (["-p", "a", "--quant", "fp8"], ["--quant", "random weights", "--synthetic"]),
        (["-p", "a", "--synthetic", "--quant", "int4"], ["--quant int4", "super-mixed, release"]),
        (["-p", "a", "--impl", "cuda"], ["--impl cuda", "OP=ref"]),
        (["-p", "a", "--impl", "=ref"], ["--impl =ref", "OP=ref"]),
        (["-p", "a", "--impl", "ssd_prefill=fast"], ["--impl ssd_prefill=fast", "OP=triton"]),
        (["-p", "a", "--drafts", "-3"], ["--drafts -3", "0 to 32"]),
        (["-p", "a", "--tree", "0,2"], ["--tree", "0,2", "draft 2 follows 2", "0,0,1"]),
        (
            ["-p", "a", "--tree", "0,0", "--drafts", "3"],
            ["0,0 has 2", "leave out --drafts 3"],
        ),
        (["preset:nano-30b", "-p", "a"], ["preset:nano-30b", "no weights", "--synthetic"]),
        (["preset:nano-30", "-p", "a"], ["no preset 'nano-30'", "Did you mean preset:nano-30b?"]),
        (["preset:gpt", "--synthetic", "-p", "a"], ["no preset 'gpt'", "super-120b"]),
        (["DIR", "-p", "a", "--layers", "2"], ["--layers", "real weights", "--synthetic"]),
        (["-p", "a", "--width-scale", "0.5"], ["--width-scale", "--synthetic"]),
        (["-p", "a", "--synthetic", "--layers", "0"], ["--layers 0", "above 0"]),
        (["-p", "a", "--synthetic", "--width-scale", "2"], ["--width-scale 2", "above 1"]),
        (["DIR", "-p", "a", "--synthetic", "x"], ["unexpected argument x", "only MODEL"]),
        (["-p", "a", "--revision", "main"], ["--revision", "Hugging Face id"]),
        (["-p", ""], ["a prompt is empty", "at least one character"]),
        (["-p", "a", "--raw", "-s", "b"], ["--system", "--raw"]),
        (["-p", "a", "--raw", "--template-arg", "x=1"], ["--template-arg", "--raw"]),
        (["-p", "a", "--template-arg", "thinking"], ["'thinking'", "NAME=VALUE"]),
        (["-p", "a", "--template-arg", "a b=1"], ["'a b=1'", "NAME=VALUE"]),
        (["-f", "no/such/file"], ["--file no/such/file", "No such file"]),
        (["--batch", "in.jsonl"], ["--batch needs --out"]),
        (["--out", "out.jsonl"], ["--out needs --batch"]),
        (["--batch", "no.jsonl", "--out", "o"], ["no.jsonl", "cannot be read"]),
        (["--batch", "no.jsonl", "--out", "no/o"], ["--out no/o", "no folder no; make it"]),
        (["--file", "no.txt"], ["--file no.txt", "Name a file that can be read"]),
        (["-p", "a", "--temperature", "-1"], ["--temperature -1.0", "0 for greedy"]),
        (["-p", "a", "--top-p", "0"], ["--top-p 0.0", "(0, 1]"]),
        (["-p", "a", "--top-k", "-2"], ["--top-k -2", "0 for all"]),
        (["-p", "a", "--min-p", "1.1"], ["--min-p 1.1", "[0, 1]"]),
        (["-p", "a", "-n", "0"], ["--max-tokens 0", ">= 1"]),
        (["-p", "a", "--stop", ""], ["--stop ''", "none of them empty"]),
        (["-p", "a", "--repetition-penalty", "0"], ["--repetition-penalty 0.0", "> 0"]),
        (["-p", "a", "--presence-penalty", "3"], ["--presence-penalty 3.0", "[-2, 2]"]),
        (["-p", "a", "--frequency-penalty", "-3"], ["--frequency-penalty -3.0", "[-2, 2]"]),
        (["-p", "a", "--seed", str(2**64)], ["--seed 18", "64-bit"]),
        (["-p", "a", "--logprobs", "-1"], ["--logprobs -1", ">= 0"]),
        (["-p", "a", "--prompt-logprobs", "-1"], ["--prompt-logprobs -1", ">= 0"]),
    ],
)
def test_wrong_options(args: list[str], words: list[str]) -> None:
    code, out, err = invoke(*args)
    assert (code, out) == (2, ""), err
    for word in words:
        assert word in err
    assert re.fullmatch(r"error: \S.*\n", err), "one line"
    assert "None" not in err


TALK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "lines,extra,words",
    [
        ([OK, "{"], [], ["line 2: not JSON"]),
        ([OK], ["-p", "a"], ["--batch brings its own prompts", "--prompt"]),
        ([OK], ["-s", "a"], ["--system does not reach into a batch"]),
        ([OK, TALK], ["--raw"], ["--raw", "line 2", "conversation"]),
        ([OK, OK | {"temperature": -1}], [], ["line 2: temperature=-1", "greedy"]),
        ([OK | {"stop": 3}], [], ["line 1: stop=3", "a string"]),
        ([OK | {"max_tokens": "9"}], [], ["line 1: max_tokens='9'", ">= 1"]),
        ([OK], ["--out", "{in}"], ["is the batch file itself"]),
    ],
)
def test_wrong_batches(
    tmp_path: Path, lines: list[object], extra: list[str], words: list[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    args = ["--batch", str(path), "--out", str(tmp_path / "out.jsonl"), *extra]
    code, out, err = invoke(*(a.replace("{in}", str(path)) for a in args))
    assert (code, out) == (2, ""), err
    for word in words:
        assert word in err
    assert not (tmp_path / "out.jsonl").exists()


def test_wrong_standard_input() -> None:
    code, _, err = invoke(stdin=b"")
    assert code == 2
    assert "no prompt: give --prompt TEXT" in err
    code, out, err = invoke(stdin=b"caf\xe9")
    assert (code, out) == (2, "")
    assert "stdin is not UTF-8 at byte 3" in err
    code, out, err = invoke("-p", "-", stdin=b"\n")
    assert (code, out) == (2, "")
    assert "a prompt is empty" in err


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    code, out, err = invoke("-f", str(tmp_path / "latin"))
    assert (code, out) == (2, "")
    assert "latin is not UTF-8 at byte 3" in err


def test_no_prompt_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="no prompt: give --prompt TEXT, --file PATH, or pipe"):
        gather(None, None, None, None)


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_and_version_import_no_torch(args: list[str]) -> None:
    code = (
        "import sys, runpy; sys.argv = ['generate', *sys.argv[1:]]\n"
        "try: runpy.run_module('nemotriton.generate', run_name='__main__')\n"
        "finally: sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'triton')) * 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nemotriton ") or "--temperature" in done.stdout


def test_help_shows_the_defaults() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    assert str(SamplingParams().max_tokens) in out
    for option in ("--batch", "--synthetic", "--impl", "--max-context", "--json", "--revision"):
        assert option in out
