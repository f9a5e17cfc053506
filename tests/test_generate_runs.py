"""The command line as a program: batches that break off, refusals, pipes and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nemotriton.generate.__main__ import app
from nemotriton.model.config import ModelConfig
from tests.tokenizer_files import write_tokenizer

COMMAND = (sys.executable, "-m", "nemotriton.generate")
TALK = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def invoke(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stdout, result.stderr


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | extra


# batches


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return path


def run_batch(source: Path, out: Path, *args: str) -> tuple[int, list[dict[str, Any]], str]:
    code, stdout, err = invoke("--batch", str(source), "--out", str(out), "--seed", "1", *args)
    assert stdout == ""
    return code, [json.loads(x) for x in out.read_bytes().splitlines()], err


LINES: list[dict[str, Any]] = [
    {"prompt": "one", "max_tokens": 9},
    {"prompt": "two", "max_tokens": 2, "id": "second"},
    {"prompt": [3, 4, 5], "temperature": 0, "logprobs": 1},
    {"prompt": "four", "seed": 9},
    {"prompt": "five", "stop_token_ids": [7], "min_p": 0.01},
]


def test_a_batch_keeps_its_order_and_each_line_its_parameters(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", LINES)
    code, answers, err = run_batch(source, tmp_path / "out.jsonl", "-n", "5")
    assert code == 0, err
    assert [a["id"] for a in answers] == ["line-1", "second", "line-3", "line-4", "line-5"]
    assert [a["completion_tokens"] for a in answers] == [9, 2, 5, 5, 5]
    assert "logprobs" in answers[2]
    assert "5 answers" in err
    alone = invoke("-p", "four", "-n", "5", "--seed", "9", "--json")[1]
    assert json.loads(alone)["token_ids"] == answers[3]["token_ids"]


@pytest.mark.parametrize("kept", [0, 2, 4, 5])
def test_a_broken_off_batch_ends_as_if_it_had_not(tmp_path: Path, kept: int) -> None:
    source = write(tmp_path / "in.jsonl", LINES)
    _, whole, _ = run_batch(source, tmp_path / "whole.jsonl", "-n", "5")
    out = tmp_path / "out.jsonl"
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:kept]) + (lines[kept][:20] if kept < 5 else b""))
    code, answers, err = run_batch(source, out, "-n", "5")
    assert (code, answers) == (0, whole)
    assert (f"{kept} of 5 are answered already" in err) == (kept > 0)


def test_a_request_that_cannot_be_served_fails_alone(tmp_path: Path) -> None:
    long = {"prompt": "x" * 3000}
    openai = {"custom_id": "b", "url": "/v1/completions", "body": long}
    lines = [LINES[0], long, LINES[1], openai, {"messages": TALK}, {"prompt": [6000]}]
    source = write(tmp_path / "in.jsonl", lines)
    own = tmp_path / "own"  # without a chat template
    own.mkdir()
    (own / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_json()))
    model = (str(own), "--synthetic")
    code, answers, err = run_batch(source, tmp_path / "out.jsonl", *model)
    assert code == 1
    assert "4 of 6 requests failed" in err
    assert [a.get("completion_tokens") for a in answers] == [9, None, 2, None, None, None]
    assert "3,001 tokens; --max-context is 2,048" in answers[1]["error"]
    assert answers[3]["response"] is None
    assert "--max-context is 2,048" in answers[3]["error"]["message"]
    assert "no chat template" in answers[4]["error"]
    assert "token ids are 0 .. 2047" in answers[5]["error"]
    again, after, _ = run_batch(source, tmp_path / "out.jsonl", *model)
    assert (again, after) == (0, answers)


def test_openai_lines_get_openai_answers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_json()))
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": TALK, "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
    }
    plain = {
        "custom_id": "plain",
        "url": "/v1/completions",
        "body": {"prompt": "hello", "max_tokens": 3, "logprobs": 1},
    }
    source = write(tmp_path / "in.jsonl", [chat, plain, {"prompt": "hello"}])
    out = tmp_path / "out.jsonl"
    code, stdout, err = invoke(
        *(str(model), "--synthetic", "-n", "2", "--temperature", "0", "--ignore-eos"),
        *("--batch", str(source), "--out", str(out)),
    )
    assert (code, stdout) == (0, ""), err
    talk, text, own = (json.loads(x) for x in out.read_bytes().splitlines())
    assert (talk["custom_id"], talk["error"]) == ("chat", None)
    body = talk["response"]["body"]
    choice = body["choices"][0]
    assert (body["object"], choice["finish_reason"]) == ("chat.completion", "length")
    assert body["usage"]["completion_tokens"] == len(choice["logprobs"]["content"]) == 4
    assert choice["message"]["role"] == "assistant"
    for position in choice["logprobs"]["content"]:
        assert position["logprob"] == position["top_logprobs"][0]["logprob"]  # greedy
    body = text["response"]["body"]
    choice = body["choices"][0]
    assert body["object"] == "text_completion"
    assert len(choice["logprobs"]["tokens"]) == 3
    assert choice["logprobs"]["text_offset"][0] == 0
    # a plain line's prompt is a user's turn, as it is for --prompt
    assert own["prompt_tokens"] == talk["response"]["body"]["usage"]["prompt_tokens"]


# what cannot be done: exit code 1


@pytest.mark.parametrize(
    "args,words",
    [
        (["/no/such/folder"], ["no directory /no/such/folder", "owner/name"]),
        (["owner/name", "--offline"], ["owner/name", "--offline"]),
        (["preset:ultra-550b", "--synthetic"], ["needs", "GiB", "weights"]),
        (["--device", "tpu"], ["--device tpu", "cpu"]),
        (["--device", "cuda:97"], ["--device cuda:97", "CUDA devices"]),
        (["--impl", "nope=ref"], ["no op is called 'nope'", "rms_norm"]),
        (["--stop-token", "2048"], ["--stop-token has 2048", "0 .. 2047"]),
        (["--logprobs", "2049"], ["--logprobs 2049", "2048 tokens"]),
    ],
)
def test_what_cannot_be_done(args: list[str], words: list[str]) -> None:
    code, out, err = invoke(*args, "-p", "a")
    assert (code, out) == (2, ""), err
    for word in [*words, "error: "]:
        assert word in err


def test_other_architectures_and_empty_folders(tmp_path: Path) -> None:
    code, out, err = invoke(str(tmp_path), "-p", "a")
    assert (code, out) == (2, "")
    assert "config.json" in err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, out, err = invoke(str(tmp_path), "-p", "a")
    assert (code, out) == (2, "")
    assert "llama" in err
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_json()))
    code, out, err = invoke(str(tmp_path), "-p", "a")
    assert (code, out) == (2, "")
    assert "safetensors" in err


def test_a_prompt_longer_than_the_context() -> None:
    code, out, err = invoke("-p", "0" * 40, "--max-context", "30")
    assert (code, out) == (2, "")
    assert "the prompt is 40 tokens; --max-context is 30" in err


# as a program


def test_piped_in_and_out() -> None:
    done = subprocess.run(
        [*COMMAND, "-n", "4", "--temperature", "0"],
        input="hi 🙂\n".encode(),
        capture_output=True,
        env=environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8").endswith("\n")
    same = invoke("-p", "hi 🙂", "-n", "4", "--temperature", "0")
    assert done.stdout.decode("utf-8") == same[1]


def test_control_c_ends_with_130_and_keeps_what_was_said() -> None:
    started = subprocess.Popen(
        [*COMMAND, "-p", "hi", "-n", "2000", "--ignore-eos", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert started.stdout is not None
    first = started.stdout.read(1)
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 130, err
    assert (first + out).endswith(b"\n")
    assert b"interrupted" in err
    assert b"Traceback" not in err


def test_a_reader_that_leaves_ends_the_program() -> None:
    started = subprocess.Popen(
        [*COMMAND, "-p", "hi", "-n", "2000", "--ignore-eos", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.read(1)
    started.stdout.close()
    err = started.stderr.read()
    assert started.wait(timeout=60) == 1
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
