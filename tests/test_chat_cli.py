"""Chat at the command line: what is shown where, the conversation, and what is refused."""

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

from nemotriton.engine.llm import LLM, SamplingParams
from nemotriton.generate import interactive
from nemotriton.text.tokens import ByteTokenizer, JsonTokenizer
from tests.test_generate import GREEDY, invoke, records
from tests.test_generate_usage import invoke as misuse

WORD = ("--regex", "[a-c]{3}")
BUDGET = ("--think-budget", "2")
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def test_the_answer_is_on_stdout_and_the_thought_on_stderr() -> None:
    args = ("-p", "hi", "-n", "20", "--seed", "1", *WORD, *BUDGET)
    (record,) = records(*args)
    assert record["thinking"]
    assert len(record["text"]) == 3
    for shown in ("--show-thinking", "--hide-thinking"):
        code, out, err = invoke(*args, shown)
        assert (code, out) == (0, record["text"] + "\n")
        assert (record["thinking"] in err) == (shown == "--show-thinking")
    assert record["thinking"] not in invoke(*args)[2], "stderr is no terminal"
    (off,) = records(*args[:-2], "--no-think")
    assert (off["thinking"], len(off["text"])) == ("", 3)
    both = invoke(*args, "-p", "hi", "--show-thinking")
    text = record["text"]
    assert both[1] == f"==> 1 of 2: hi <==\n{text}\n\n==> 2 of 2: hi <==\n{text}\n"
    code, out, err = invoke("-p", "hi", "--think", "-n", "3", "--seed", "1", "--show-thinking")
    assert (code, out) == (0, "\n")
    assert "stopped at --max-tokens 3; it was still thinking: raise it, or give --think-b" in err


def test_json_schemas_come_from_files_and_from_the_command_line(tmp_path: Path) -> None:
    schema = json.dumps({"enum": ["red", "green"]})
    (tmp_path / "s.json").write_text(schema)
    args = ("-p", "hi", "-n", "20", "--seed", "2", "--json-schema")
    found = records(*args, str(tmp_path / "s.json"))[0]["text"]
    assert json.loads(found) in ("red", "green")
    assert records(*args, schema, "--drafts", "2")[0]["finish_reason"] == "stop"


def test_a_batch_talks_and_calls(tmp_path: Path) -> None:
    body = {"messages": [USER], "max_tokens": 30, "seed": 1, "thinking_token_budget": 1}
    form = {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}
    lines = [
        {"custom_id": "a", "url": "/v1/chat/completions", "body": body | {"response_format": form}},
        {"prompt": "hi", "regex": "x{2}", "max_tokens": 9},
        {"messages": [USER], "tools": [{}]},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    where = ("--batch", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"))
    code, _, err = invoke(*where)
    assert (code, "1 of 3 requests failed" in err) == (1, True)
    talk, text, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    choice = talk["response"]["body"]["choices"][0]
    assert choice["message"]["content"] == "7"
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"]
    assert (text["text"], "thinking" in text) == ("xx", False)
    assert "tools[0] is {}" in bad["error"]


# --------------------------------------------------------------------------------- conversations
def talk(*lines: str, args: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
    """Exit code, answers, stderr."""
    base = ("--chat", "-n", "20", "--seed", "1", *WORD, "--no-think", *args)
    code, out, err = invoke(*base, stdin="".join(line + "\n" for line in lines))
    return code, out.splitlines(), err


def test_a_conversation_remembers_resets_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, Any]]] = []
    plain = JsonTokenizer.apply_chat

    def apply_chat(self: JsonTokenizer, messages: Any, *rest: Any, **named: Any) -> list[int]:
        seen.append([dict(m) for m in messages])
        return plain(self, messages, *rest, **named)

    monkeypatch.setattr(JsonTokenizer, "apply_chat", apply_chat)
    code, answers, err = talk(
        *("one", "", "/system Be kind.", " /two", "/nope x", "/help", "/reset", "three"),
        *("/system", "four", "/exit", "never"),
    )
    assert (code, len(answers)) == (0, 4), err
    turns = seen[1:]  # the first only asks whether the template can
    assert [m["content"] for m in turns[0]] == ["one"]
    assert [m["content"] for m in turns[1]] == ["Be kind.", "one", answers[0], "/two"]
    assert [m["role"] for m in turns[1]] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in turns[2]] == ["Be kind.", "three"]
    assert [m["content"] for m in turns[3]] == ["three", answers[2], "four"]
    assert "there is no /nope. /help lists" in err
    assert "/system TEXT" in err


def test_turns_of_the_command_line_come_first() -> None:
    code, answers, _ = talk("two", args=("-p", "one", "-s", "sys"))
    assert (code, len(answers)) == (0, 2)
    assert talk("one", "two", args=("-s", "sys"))[1] == answers
    assert talk(args=())[:2] == (0, [])


def test_a_preset_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights have no files; the family's template is the package's."""
    seen: list[Any] = []
    honest = ByteTokenizer.apply_chat

    def apply_chat(self: ByteTokenizer, messages: Any, *rest: Any, **named: Any) -> list[int]:
        seen.append([m["role"] for m in messages])
        return honest(self, messages, *rest, **named)

    monkeypatch.setattr(ByteTokenizer, "apply_chat", apply_chat)
    model = ("preset:nano-30b", "--synthetic", "0", "--layers", "4", "--width-scale", "0.1")
    limits = ("--max-context", "256", "--max-requests", "1", "-n", "4", "--seed", "1")
    code, _, err = invoke(*model, *limits, "--chat", "--no-think", "-p", "one", "-p", "two")
    assert code == 0, err
    assert seen == [["user"], ["user"], ["user", "assistant", "user"]]  # the first asks if it can
    assert invoke(*model, *limits, "-p", "hello")[0] == 0
    assert len(seen) == 3  # a plain prompt is completed


def test_a_turn_that_does_not_fit_or_says_nothing_is_dropped() -> None:
    code, answers, err = talk("0" * 200, "one", args=("--max-context", "150"))
    assert (code, len(answers)) == (1, 1)
    assert "--max-context is 150" in err
    assert "The turn is dropped" in err
    code, out, err = invoke("--chat", "-n", "2", "--seed", "1", stdin="one\n")
    assert (code, out) == (0, "\n")
    assert "without an answer the turn is dropped" in err


def test_control_c_stops_the_answer_and_then_the_program() -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", "nemotriton.generate", "--chat", "--no-think", "--seed", "1"]
        + ["-n", "1500", "--ignore-eos"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert started.stdin is not None
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdin.write(b"hi\n")
    started.stdin.flush()
    started.stdout.read(1)
    started.send_signal(signal.SIGINT)
    for line in started.stderr:
        if b"stopped after" in line:
            break
    started.stdin.write(b"/system x\n")
    started.stdin.flush()
    assert b"system prompt: x" in started.stderr.readline(), "it goes on"
    time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 130, err
    assert b"Traceback" not in err


def test_a_second_control_c_breaks_off() -> None:
    with interactive._stoppable() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not broken off")
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_embedded_model_completes_unless_it_is_asked_to_talk() -> None:
    with LLM(max_context=256) as llm:
        expected = llm.generate("hi", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0]
        assert records("-p", "hi", "-n", "3", *GREEDY)[0]["token_ids"] == expected.token_ids
        length = len(llm.chat_prompt([USER]).ids)
    for option in ("--no-raw", "--think"):
        assert records("-p", "hi", "-n", "1", option)[0]["prompt_tokens"] == length


# --------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "args,words",
    [
        (["-p", "a", "--raw", "--think"], ["--think goes into a chat template", "--raw"]),
        (["-p", "a", "--raw", "--no-think"], ["--no-think goes into a chat template", "--raw"]),
        (["-p", "a", "--raw", "--tools", "{tools}"], ["--tools goes into a chat template"]),
        (["--chat", "--raw"], ["--chat goes into a chat template", "--raw"]),
        (["-p", "a", "--no-think", "--think-budget", "3"], ["--think-budget", "--no-think"]),
        (["-p", "a", "--think-budget", "-1"], ["--think-budget -1", ">= 0"]),
        (["-p", "a", "--think-budget", "x"], ["--think-budget x", "whole number"]),
        (["-p", "a", "--json-schema", "{"], ["--json-schema { is", "JSON schema"]),
        (["-p", "a", "--json-schema", "[]"], ["--json-schema [] is", "an object"]),
        (["-p", "a", "--json-schema", '"x"'], ['--json-schema "x" is', "an object"]),
        (["-p", "a", "--json-schema", "no/file"], ["--json-schema no/file", "No such file"]),
        (["-p", "a", "--json-schema", '{"type": "nope"}'], ["is not possible", '"nope"']),
        (["-p", "a", "--json-schema", '{"$ref": "#/x"}'], ["is not possible", "#/x"]),
        (["-p", "a", "--regex", "("], ["--regex ( is", "parenthesis is not closed"]),
        (["-p", "a", "--regex", ""], ["--regex '' is", "regular expression"]),
        (["-p", "a", "--regex", r"(a)\1"], ["Backreference is not supported"]),
        (
            ["-p", "a", "--regex", "a", "--json-schema", "{}"],
            ["--regex a", "--json-schema is given too"],
        ),
        (["-p", "a", "--regex", "a", "--ignore-eos"], ["--ignore-eos is", "leave it out"]),
        (["-p", "a", "--tools", "no/file"], ["--tools no/file", "No such file"]),
        (["-p", "a", "--tools", "{bad}"], ["--tools", "is not JSON"]),
        (["-p", "a", "--tools", "{empty}"], ["--tools", "no list of functions"]),
        (["--chat", "--json"], ["--json does not go with --chat"]),
        (["--chat", "--file", "x"], ["--file does not go with --chat"]),
        (["--chat", "--batch", "x"], ["--batch does not go with --chat"]),
        (["--chat", "--out", "x"], ["--out does not go with --chat"]),
        (["--chat", "--logprobs", "0"], ["--logprobs does not go with --chat"]),
        (["--chat", "--prompt-logprobs", "1"], ["--prompt-logprobs does not go with --chat"]),
        (["--chat", "-p", "-"], ["--prompt - reads stdin", "--chat"]),
        (["-p", "a", "--thinking"], ["--thinking", "--think"]),
        (["-p", "a", "--template-arg", "=1"], ["'=1'", "NAME=VALUE"]),
    ],
)
def test_wrong_options(tmp_path: Path, args: list[str], words: list[str]) -> None:
    for name, text in (("tools", '[{"name": "f"}]'), ("bad", "{"), ("empty", "[]")):
        (tmp_path / name).write_text(text)
        args = [a.replace("{" + name + "}", str(tmp_path / name)) for a in args]
    code, out, err = misuse(*args)
    assert (code, out) == (2, ""), err
    for word in words:
        assert word in err
    assert "Traceback" not in err


def test_refused_by_the_model(tmp_path: Path) -> None:
    (tmp_path / "tools").write_text('[{"type": "function"}]')
    code, out, err = invoke("-p", "a", "--tools", str(tmp_path / "tools"))
    assert (code, out) == (2, "")
    assert "tools[0] is" in err
    code, out, err = invoke("-p", "a", "--raw", "--think-budget", "3")
    assert (code, out) == (2, "")
    assert (
        "--think-budget 3, but the prompt opens no thought: leave it out, or chat with --think"
        in err
    )


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    code, out, err = invoke("-p", "a", "--regex", "a")
    assert (code, out) == (2, "")
    assert "needs xgrammar: pip install -e '.[json]'" in err
