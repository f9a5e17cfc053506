"""Batch files: what is read, what is refused, and that a broken-off run goes on where it was."""

import json
from pathlib import Path

import pytest

from nemotriton.errors import RequestError
from nemotriton.text.batch_file import BatchOutput, read_batch

CHAT = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
TALK = [{"role": "user", "content": "hi"}]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_every_kind_of_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl",
        {"prompt": "one", "temperature": 0, "max_tokens": 5, "stop": ["x"]},
        "",
        {"id": "mine", "messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": [3, 4], "logprobs": 2},
        CHAT | {"body": {"model": "m", "messages": TALK, "max_completion_tokens": 7}},
        CHAT | {"custom_id": "b", "body": {"messages": TALK, "logprobs": True, "top_logprobs": 3}},
        {
            "custom_id": "c",
            "url": "/v1/completions",
            "body": {"prompt": "p", "logprobs": 1, "seed": 4, "n": 1, "stream": False},
        },
    )
    one, mine, ids, chat, probs, plain = read_batch(path)
    assert (one.number, one.id, one.prompt) == (1, "line-1", "one")
    assert one.params == {"temperature": 0, "max_tokens": 5, "stop": ["x"]}
    assert (mine.id, mine.messages) == ("mine", TALK)
    assert mine.template_args == {"enable_thinking": False}
    assert (ids.prompt, ids.params, ids.id) == ([3, 4], {"logprobs": 2}, "line-4")
    assert (chat.id, chat.messages, chat.params) == ("a", TALK, {"max_tokens": 7})
    assert probs.params == {"logprobs": 3}
    assert (plain.prompt, plain.params) == ("p", {"logprobs": 1, "seed": 4})
    assert plain.url == "/v1/completions"


@pytest.mark.parametrize(
    "line,words",
    [
        ("{", ["not JSON", "one JSON object a line"]),
        ("[1]", ["a list", "one JSON object a line"]),
        ({}, ["not exactly one of prompt and messages"]),
        ({"promt": "a"}, ["one of prompt and messages: its keys are promt"]),
        ({"prompt": "a", "messages": TALK}, ["not exactly one of prompt and messages"]),
        ({"prompt": ""}, ["an empty prompt", "at least one"]),
        ({"prompt": []}, ["an empty prompt"]),
        ({"prompt": 3}, ["prompt is 3", "a string or a list of token ids"]),
        ({"prompt": [1, -2]}, ["[1, -2]", "token ids"]),
        ({"prompt": [True]}, ["[True]", "token ids"]),
        ({"messages": "hi"}, ["messages is 'hi'", '"role"']),
        ({"messages": [{"content": "hi"}]}, ["messages is", '"role"']),
        ({"prompt": "a", "tools": []}, ["tools is []", "and messages"]),
        ({"messages": TALK, "tools": {}}, ["tools is {}", "Give a list"]),
        ({"messages": TALK, "tool_choice": "required"}, ["tool_choice is not 'auto'", "Leave"]),
        ({"prompt": "a", "response_format": "json"}, ["response_format is 'json'", "json_schema"]),
        (
            {"prompt": "a", "response_format": {"type": "json_schema"}},
            ["response_format is {'type': 'json_schema'}", '"schema"'],
        ),
        (
            {"prompt": "a", "temprature": 1},
            ["'temprature' is not supported", "Did you mean temperature?"],
        ),
        ({"prompt": "a", "n": 2}, ["n is not 1", "different ids"]),
        ({"prompt": "a", "stream": True}, ["stream is true", "leave it out"]),
        ({"prompt": "a", "id": 7}, ["id is 7", "a string"]),
        ({"prompt": "a", "chat_template_kwargs": 1}, ["chat_template_kwargs is 1", "an object"]),
        (CHAT, ["body is None", "JSON object"]),
        (CHAT | {"body": {"prompt": "a"}}, ["prompt for /v1/chat/completions", "messages"]),
        (CHAT | {"url": "/v1/embeddings", "body": {}}, ["'/v1/embeddings' is not served"]),
        (CHAT | {"method": "GET", "body": {}}, ["method 'GET'", "POST"]),
        (CHAT | {"custom_id": "", "body": {"messages": TALK}}, ["custom_id is ''"]),
        (CHAT | {"extra": 1, "body": {}}, ["unknown key 'extra'", "custom_id"]),
        ({"id": "line-1", "prompt": "b"}, ["'line-1' is that of line 1 too"]),
    ],
)
def test_bad_lines(tmp_path: Path, line: object, words: list[str]) -> None:
    path = write(tmp_path / "in.jsonl", {"prompt": "good"}, line)
    with pytest.raises(RequestError) as caught:
        read_batch(path)
    for word in [*words, f"{path} line 2: "]:
        assert word in str(caught.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read.*No such file"):
        read_batch(tmp_path / "none.jsonl")
    with pytest.raises(RequestError, match="holds no request"):
        read_batch(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(RequestError, match=r"cannot be read.*UTF-8"):
        read_batch(tmp_path / "latin.jsonl")


def test_a_broken_off_run_goes_on(tmp_path: Path) -> None:
    lines = read_batch(write(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(4))))
    out = tmp_path / "out.jsonl"
    with BatchOutput(out, lines) as output:
        assert output.done == 0
        output.append({"id": "line-1", "text": "é\u2028x"})
        output.append({"id": "line-2", "text": "b\nc"})
    torn = out.read_bytes() + b'{"id": "line-3", "te'
    out.write_bytes(torn)
    with BatchOutput(out, lines) as output:
        assert output.done == 2
        output.append({"id": "line-3", "text": "d"})
    answers = [json.loads(x) for x in out.read_bytes().splitlines()]
    assert [a["id"] for a in answers] == ["line-1", "line-2", "line-3"]
    assert answers[0]["text"] == "é\u2028x"
    assert answers[1]["text"] == "b\nc"


@pytest.mark.parametrize(
    "there,words",
    [
        ('{"id": "other"}\n', ["line 1 answers 'other', not 'line-1'", "--out"]),
        ('{"custom_id": "line-1"}\nhello\n', ["line 2 is no answer"]),
        ('{"id": "line-1"}\n{"id": "line-2"}\n{"id": "line-3"}\n', ["3 answers to 2 requests"]),
    ],
)
def test_answers_to_other_requests_are_left_alone(
    tmp_path: Path, there: str, words: list[str]
) -> None:
    lines = read_batch(write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    out = tmp_path / "out.jsonl"
    out.write_text(there)
    with pytest.raises(RequestError) as caught:
        BatchOutput(out, lines)
    assert out.read_text() == there
    for word in words:
        assert word in str(caught.value)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    lines = read_batch(write(tmp_path / "in.jsonl", {"prompt": "a"}))
    with pytest.raises(RequestError, match=r"cannot be written: No such file.*Give a path"):
        BatchOutput(tmp_path / "no" / "out.jsonl", lines)
