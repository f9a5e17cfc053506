"""What all command lines share: refusals in the words that were typed, one line, exit codes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import bench.kernels
import bench.report
import nemotriton.audit.__main__ as audit
import nemotriton.autotune.__main__ as autotune
import nemotriton.generate.__main__ as generate
import nemotriton.serve.__main__ as serve
from nemotriton import commandline, quantize
from nemotriton.commandline import Program, as_typed
from nemotriton.errors import CapacityError, RankError, RequestError

PACKAGE = Path(commandline.__file__).parent
APPS = {
    "generate": generate.app,
    "serve": serve.app,
    "audit": audit.app,
    "autotune": autotune.app,
    "quantize": quantize.app,
    "kernels": bench.kernels.app,
    "report": bench.report.app,
}


def flags() -> dict[str, tuple[str, str]]:
    command: Any = typer.main.get_command(generate.app)
    return commandline._flags_of(command.params)


@pytest.fixture
def generating() -> Iterator[None]:
    """As if `generate` ran."""
    token = commandline._FLAGS.set(flags())
    yield
    commandline._FLAGS.reset(token)


# ------------------------------------------------------------------------- keywords become options
@pytest.mark.parametrize(
    "said,typed",
    [
        ("max_tokens=0 is wrong: use 1.", "--max-tokens 0 is wrong: use 1."),
        ("max_context=4,096, or drafts=0.", "--max-context 4,096, or --drafts 0."),
        ("device='cuda:9': use device='cpu'.", "--device cuda:9: use --device cpu."),
        ("impl={'*': 'triton'} needs a GPU", "--impl triton needs a GPU"),
        ("impl={'*': 'ref', 'matmul': 'triton'}", "--impl ref matmul=triton"),
        ("stop=['a b', ''] is wrong", "--stop 'a b' '' is wrong"),
        ("graphs=True or graphs=False", "--graphs or --no-graphs"),
        ("chat with think=True.", "chat with --think."),
        ("invariant=True is for one", "--invariant is for one"),
        ("a CPU (memory=0.9) has", "a CPU (--memory 0.9) has"),
        ("thinking_token_budget=3: no", "--think-budget 3: no"),
        ("use stop_token_ids.", "use --stop-token."),
        ("lower tp or ep, or prefill_piece", "lower --tp or --ep, or --prefill-piece"),
        ("use 1, or None for none.", "use 1."),
        ("use a share of the memory, stop", "use a share of the memory, stop"),
        ("no directory x/seed=1.", "no directory x/seed=1."),
        ("regex='" + "a" * 99 + "' is", "--regex " + "a" * 60 + "... is"),
        ("num_nextn_predict_layers=1", "num_nextn_predict_layers=1"),
    ],
)
def test_a_keyword_is_said_as_its_option(generating: None, said: str, typed: str) -> None:
    assert as_typed(said) == typed


def test_a_line_of_a_batch_keeps_its_own(generating: None) -> None:
    said = as_typed("top_p=3 and max_context=5", ["top_p"])
    assert said == "top_p=3 and --max-context 5"


def test_python_keeps_its_keywords() -> None:
    assert as_typed("max_tokens=0, or None") == "max_tokens=0, or None"


def texts() -> Iterator[str]:
    """The texts of all messages of the package, with a value for what is filled in."""
    for folder in ("engine", "model", "text", "audit"):
        for path in (PACKAGE / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise | ast.Call):
                    for child in ast.walk(node):
                        if isinstance(child, ast.JoinedStr):
                            parts = child.values
                            yield "".join(map(filled, parts))


def filled(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return "'x'" if isinstance(part, ast.FormattedValue) and part.conversion == ord("r") else "1"


def test_no_message_of_the_package_speaks_python_to_a_command_line(generating: None) -> None:
    keyword = re.compile(rf"(?<![\w.'/-])({'|'.join(flags())})=")
    found = [text for text in texts() if keyword.search(text)]
    assert len(found) > 15
    for text in found:
        assert not keyword.search(as_typed(text)), text


# ---------------------------------------------------------------------------------- one line, code
@pytest.mark.parametrize(
    "line,words",
    [
        ("generate -p a --max-tokens abc", "--max-tokens abc: give a whole number."),
        ("generate -p a --temperature hot", "--temperature hot: give a number."),
        ("generate -p a --top-p=x", "--top-p x: give a number."),
        ("generate -p a --chat=yes", "--chat does not take a value. See --help."),
        ("generate -p a --tp x", "--tp x: give a whole number."),
        ("generate -p a -z", "there is no option -z. See --help."),
        ("generate -p a --device cuda:97", "--device cuda:97, but there are "),
        (
            "generate -p a --drafts 2 --tree 0",
            "--drafts 2, but --tree 0 has 1: leave out --drafts 2.",
        ),
        ("generate nano-30b -p a", "Did you mean preset:nano-30b, a configuration without files?"),
        (
            "generate preset:h-8b --synthetic -p a --drafts 1",
            "come from: use --drafts 0, or a model",
        ),
        ("serve --port abc", "--port abc: give a whole number."),
        ("serve --port 70000", "--port 70000 is no port: give 0 .. 65535."),
        ("serve --prot 80", "there is no option --prot: did you mean --port? See --help."),
        (
            "serve a b",
            "unexpected argument b: only MODEL stands without an option here. See --help.",
        ),
        (
            "audit chekpoint x",
            "there is no command chekpoint: did you mean checkpoint? There are: ",
        ),
        (
            "audit --json env",
            "there is no option --json before a command: give one of checkpoint, ",
        ),
        (
            "audit memory",
            "MODEL is missing: preset (super-120b, ...), directory or Hugging Face id.",
        ),
        (
            "audit memory super-121b",
            "Did you mean preset:super-120b, a configuration without files?",
        ),
        ("audit memory super-120b --context -1", "--context -1: give a number >= 1."),
        ("audit memory super-120b --context many", "--context many: give a whole number."),
        ("audit memory super-120b --kv-dtype int4", "--kv-dtype int4: use one of "),
        ("audit memory super-120b --quant q4", "q4"),
        ("audit memory super-120b --gpu h2000", "Did you mean h200?"),
        ("audit memory super-120b --tp 3", "cannot be cut for 3 GPUs: use one of --tp 1, 2, 4, 8."),
        ("audit memory super-120b --ep 3", "use one of --ep 1, 2, 4, 8."),
        ("audit mtp --drafts 0", "--drafts 0: give a number >= 1."),
        ("audit parity --tokens 1", "--tokens 1: give a number >= 2."),
        (
            "audit env x",
            "unexpected argument x: nothing stands without an option here. See --help.",
        ),
        (
            "autotune compile --kernel rms_nor",
            "there is no kernel rms_nor: did you mean rms_norm? ",
        ),
        ("autotune compile --arch sm_70", "there is no architecture sm_70: did you mean sm_"),
        ("autotune compile --model super-121b", "Did you mean super-120b?"),
        ("autotune compile --tiles some", "--tiles some: give default or all."),
        ("autotune compile --dtype int8", "--dtype int8: give bf16, fp16, fp32, or several"),
        ("autotune compile --jobs 1 --arch sm_90 --kernel rms_norm --out no/x", "no/x: No such"),
        ("autotune check --folder no/where", "no/where is no folder of tuned files: give another."),
        ("autotune list --dtype x --gpu h200", "--dtype x: give bf16, fp16, fp32, or several"),
        ("autotune sweep --top -1", "--top -1: give a number >= 0."),
        ("autotune compile --jobs 0", "--jobs 0: give a number >= 1."),
        ("autotune sweep --budget soon", "--budget soon: write it like 90s, 10m or 2h."),
        ("autotune sweep --tokens 0", "--tokens 0: write positive numbers, such as 1,64,8192."),
        ("autotune show --format xml", "--format xml: give md or json."),
        ("autotune check --gpu nvidia_h2000", "there is no GPU folder nvidia_h2000: did you mean "),
        ("autotune seed --gpu nvidia_t4", "there is no GPU to seed nvidia_t4"),
        ("autotune merge a b", "OUT is missing: folder to write; may be A or B. See --help."),
        ("quantize x y", "--scheme is missing: nvfp4: 4 bits"),
        ("quantize x y --scheme fp8", "no directory x."),
        ("serve --host 1.2.3.4 --port 1", "1.2.3.4:1: "),
        ("kernels --bogus", "there is no option --bogus. See --help."),
        ("kernels --kernel rms_nor", "there is no kernel rms_nor: did you mean rms_norm? "),
        ("report none.jsonl", "none.jsonl"),
    ],
)
def test_what_is_typed_wrongly_is_one_line_and_exit_code_2(line: str, words: str) -> None:
    name, *args = line.split()
    done = CliRunner().invoke(APPS[name], args)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    last = done.stderr.rstrip("\n").split("\n")[-1]
    assert last.startswith("error: ")
    assert words in last
    assert "None" not in last
    if "--synthetic" not in args:
        assert done.stderr.count("\n") == 1, "one line"


@pytest.mark.parametrize(
    "problem,code,said",
    [
        (RequestError("top_k=-2 is wrong."), 2, "error: top_k=-2 is wrong.\n"),
        (CapacityError("seed=3 does not fit."), 2, "error: --seed 3 does not fit.\n"),
        (
            PermissionError(13, "Permission denied", "/x"),
            2,
            "error: /x: Permission denied. Give another path.\n",
        ),
        (commandline.UsageError("line 3: seed=x."), 2, "error: line 3: seed=x.\n"),
        (RankError("rank 1 has gone."), 1, "error: rank 1 has gone.\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (BrokenPipeError(), 1, ""),
        (typer.Exit(1), 1, ""),
    ],
    ids=str,
)
def test_exit_codes(problem: BaseException, code: int, said: str) -> None:
    app = Program("one of two")

    @app.command("fail")
    def fail(seed: int = 0) -> None:
        raise problem

    @app.command("do")
    def do() -> None: ...

    done = CliRunner().invoke(app, ["fail"])
    assert (done.exit_code, done.stderr) == (code, said)
    assert CliRunner().invoke(app, ["do"]).exit_code == 0


@pytest.mark.parametrize(
    "args,code,words",
    [
        ([], 0, "python -m nemotriton.generate   answer prompts"),
        (
            ["genrate"],
            2,
            "there is no command genrate: did you mean generate? There are: generate, ",
        ),
        (
            ["audit", "env", "x"],
            2,
            "error: unexpected argument x: nothing stands without an option",
        ),
        (["autotune", "show", "--gpu", "h200", "--kernel", "rms_norm"], 0, "rms_norm"),
    ],
)
def test_the_package_names_and_runs_its_commands(args: list[str], code: int, words: str) -> None:
    line = [sys.executable, "-m", "nemotriton", *args]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == code
    assert words in done.stdout + done.stderr


def test_without_a_command_there_is_help() -> None:
    done = CliRunner().invoke(audit.app, [])
    assert done.exit_code == 2
    assert "checkpoint" in done.output
