"""The command line on the embedded model and on small checkpoints, answers compared exactly."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nemotriton.engine.llm import LLM, SamplingParams
from nemotriton.generate import loading
from nemotriton.generate.__main__ import app
from nemotriton.model.config import ModelConfig
from nemotriton.text.tokens import load_tokenizer
from tests import hf_oracle
from tests.tokenizer_files import write_tokenizer

GREEDY = ("--temperature", "0")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def invoke(*args: str, stdin: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    result = CliRunner().invoke(app, list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stdout, result.stderr


def records(*args: str, stdin: str | None = None) -> list[dict[str, Any]]:
    code, out, err = invoke(*args, "--json", stdin=stdin)
    assert code == 0, err
    return [json.loads(line) for line in out.split("\n") if line]


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM()


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with a tokenizer and a chat template; its weights are synthetic."""
    path = tmp_path_factory.mktemp("chatty")
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_json()))
    (path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 3}')
    return path


# answers


def test_stdout_is_the_answer_and_nothing_else(tiny: LLM) -> None:
    code, out, err = invoke("-p", "hello", "-n", "12", *GREEDY)
    expected = tiny.generate("hello", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert code == 0
    assert out == expected.text + ("" if expected.text.endswith("\n") else "\n")
    assert "random" not in err
    assert "warning: stopped at --max-tokens 12" in err
    for part in ("model    tiny", "memory   ", "12 tokens", "first token", "tok/s"):
        assert part in err


def test_streamed_whole_and_json_are_one_text(tiny: LLM) -> None:
    args = ("-p", "a text", "-n", "16", "--seed", "5")
    streamed = invoke(*args)[1]
    one = records(*args)[0]
    both = records(*args, "-p", "another")
    plain = invoke(*args, "-p", "another", "-q")[1]
    assert one["text"].removesuffix("\n") + "\n" == streamed
    assert both[0] == one
    assert plain == one["text"] + "\n" + both[1]["text"] + "\n"
    assert one["prompt"] == "a text"
    assert one["prompt_tokens"] == len(tiny.tokenizer.encode("a text")) < 6
    assert one["completion_tokens"] == len(one["token_ids"]) == 16
    assert tiny.tokenizer.decode(one["token_ids"]) == one["text"]
    assert records(*args[:-1], "6")[0]["text"] != one["text"]


def test_drafts_change_the_report_and_not_the_answer() -> None:
    args = ("-p", "hello", "-n", "40", "--dtype", "float32", "--ignore-eos", "--seed", "3")
    _, plain, err = invoke(*args)
    assert "drafts" not in err
    code, out, err = invoke(*args, "--drafts", "2", "--no-adapt-drafts")
    assert code == 0
    assert out == plain
    found = re.search(
        r"--- drafts accepted: (\d+) of (\d+) \(1st \d+ %, 2nd \d+ %\) · [\d.]+ tokens a step", err
    )
    assert found is not None
    accepted, verified = map(int, found.groups())
    assert accepted + verified // 2 >= 37
    for part in ("time: drafting ", "checking ", "keeping "):
        assert part in err
    assert ("none of" in err) == (accepted == 0), "a block that is never right is warned of"
    (record,) = records(*args, "--tree", "0,0,1", "--no-adapt-drafts")
    assert record["text"].removesuffix("\n") + "\n" == plain
    drafts = record["drafts"]
    assert (drafts["most"], drafts["current"]) == (3, 3)
    assert drafts["proposed"] == drafts["verified"]
    assert len(drafts["acceptance"]) == 2
    assert set(drafts["seconds"]) == {"draft", "verify", "commit"}


def test_prompts_come_from_options_files_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("from a file\n\n")
    (tmp_path / "dos.txt").write_bytes(b"dos\r\n")
    args = ("-n", "1", *GREEDY)
    found = records("-p", "one", "-p", "two", "-f", str(tmp_path / "prompt.txt"), *args)
    assert [r["prompt"] for r in found] == ["one", "two", "from a file\n"]
    assert records("-f", str(tmp_path / "dos.txt"), *args)[0]["prompt"] == "dos"
    piped = records(*args, stdin="héllo\n")
    assert [r["prompt"] for r in piped] == ["héllo"]
    assert records("-p", "-", *args, stdin="héllo\n") == piped
    assert records("-f", "-", *args, stdin="héllo\n") == piped
    assert records("-p", "héllo", *args, stdin="ignored") == piped


def test_without_a_seed_answers_differ_and_can_be_had_again() -> None:
    args = ("-p", "a", "-n", "8", "--ignore-eos")
    _, first, err = invoke(*args)
    seed = re.search(r"stop: length · seed (\d+)", err)
    assert seed is not None
    assert invoke(*args, "--seed", seed[1])[1] == first
    assert invoke(*args)[1] != first
    twice = records(*args, "-p", "a")
    assert twice[0]["token_ids"] != twice[1]["token_ids"]


def test_answers_to_several_prompts_are_told_apart() -> None:
    args = (*GREEDY, "-n", "4")
    alone = [invoke("-p", prompt, *args)[1] for prompt in ("def f(", "x" * 80)]
    heads = ["==> 1 of 2: def f( <==\n", f"==> 2 of 2: {'x' * 57}... <==\n"]
    code, out, _ = invoke("-p", "def f(", "-p", "x" * 80, *args, "--dtype", "float32")
    assert code == 0
    parts = [head + answer for head, answer in zip(heads, alone, strict=True)]
    assert out == "\n".join(parts)
    assert invoke("-p", "def f(", "-p", "x" * 80, *args, "-q")[1] == "".join(alone)


def test_quiet_and_no_stats() -> None:
    loud = invoke("-p", "a", "-n", "3", *GREEDY)
    bare = invoke("-p", "a", "-n", "3", *GREEDY, "--no-stats")
    quiet = invoke("-p", "a", "-n", "3", *GREEDY, "--quiet")
    assert loud[1] == bare[1] == quiet[1]
    assert "tok/s" in loud[2]
    assert "tok/s" not in bare[2]
    assert quiet[2] == "warning: stopped at --max-tokens 3; raise it for a longer answer.\n"


def test_stops_are_named(tiny: LLM) -> None:
    whole = records("-p", "stop", "-n", "24", *GREEDY)[0]
    text, ids = whole["text"], whole["token_ids"]
    stop = text[5:8]
    code, out, err = invoke("-p", "stop", "-n", "24", *GREEDY, "--stop", stop)
    assert out == text[: text.index(stop)].removesuffix("\n") + "\n"
    assert f"stop: {stop!r}" in err
    token = ids[4]
    args = ("-p", "stop", "-n", "24", *GREEDY, "--stop-token")
    found = records(*args, str(token))[0]
    assert found["token_ids"] == ids[: ids.index(token) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", token)
    assert f"stop: {token}" in invoke(*args, str(token))[2]
    words = {i: tiny.tokenizer.decode([i]) for i in ids}
    word = next(i for i, text in words.items() if tiny.tokenizer.id_of(text) == i)  # by its text
    assert records(*args, words[word])[0]["stop_reason"] == word
    code, out, err = invoke(*args, "no such token")
    assert (code, out) == (2, "")
    assert "--stop-token 'no such token' is no token" in err


def test_the_end_tokens_of_every_file_end_an_answer(tmp_path: Path) -> None:
    args = ("--synthetic", "-p", "stop", "-n", "12", *GREEDY)
    whole = records("preset:tiny", *args)[0]["token_ids"]
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_json()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [whole[5], 9]}))
    args = (str(tmp_path), *args)
    found = records(*args)[0]
    cut = whole.index(whole[5])
    assert found["token_ids"] == whole[: cut + 1]
    assert found["text"] == load_tokenizer(None, ModelConfig.preset("tiny")).decode(whole[:cut])
    assert found["finish_reason"] == "stop"
    assert f"--- {cut + 1} tokens · stop: eos" in invoke(*args)[2]
    assert records(*args, "--ignore-eos")[0]["token_ids"] == whole


def test_the_end_of_the_context_is_named() -> None:
    code, _, err = invoke("-p", "01234567", *GREEDY, "--ignore-eos", "--max-context", "12")
    assert code == 0
    assert "warning: stopped after 4 tokens: the context of 12 is full." in err


def test_sampling_options_arrive(tiny: LLM) -> None:
    options = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.01,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "max_tokens": 9,
    }
    args = [x for k, v in options.items() for x in ("--" + k.replace("_", "-"), str(v))]
    found = records("-p", "sample", "--ignore-eos", *args)[0]
    expected = tiny.generate("sample", SamplingParams(**options, ignore_eos=True))[0]
    assert found["token_ids"] == expected.outputs[0].token_ids
    rows = expected.outputs[0].logprobs
    assert rows is not None
    assert [p["logprob"] for p in found["logprobs"]] == [
        r[t].logprob for r, t in zip(rows, found["token_ids"], strict=True)
    ]
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == found["prompt_tokens"]
    _, out, err = invoke("-p", "sample", "--ignore-eos", *args)
    assert out == expected.outputs[0].text.removesuffix("\n") + "\n"
    assert f"{rows[0][found['token_ids'][0]].logprob:.4f}" in err


def test_a_long_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("-p", "a", "-n", "1", "--graphs", *GREEDY)
    assert "start " not in invoke(*args)[2]
    monkeypatch.setattr(loading, "_LONG", 0.0)
    said = r"start    \d+ s, \d+ of them recording decode steps$"  # nothing is compiled on a CPU
    assert re.search(said, invoke(*args)[2], re.MULTILINE)


def test_random_weights_of_a_preset_cut_down() -> None:
    args = ("preset:nano-30b", "-p", "a", "-n", "2", "--layers", "4", "--width-scale", "0.05")
    code, out, err = invoke(*args, "--synthetic", "7", *GREEDY)
    assert code == 0, err
    assert "nano-30b  bfloat16 · 4 layers" in err
    assert "text is bytes, other tokens are <number>" in err
    assert invoke("--synthetic", "7", *args, *GREEDY)[1] == out
    assert invoke(*args, "--synthetic", "8", *GREEDY)[1] != out
    assert invoke(*args, *GREEDY, "--synthetic")[1] == invoke(*args, *GREEDY, "--synthetic", "0")[1]


def test_types_and_implementations() -> None:
    args = ("-p", "a", "-n", "4", *GREEDY, "--dtype", "float32", "--state-dtype", "bfloat16")
    code, _, err = invoke(*args, "--impl", "ref", "--device", "cpu")
    assert code == 0
    assert "tiny  float32" in err
    assert invoke(*args, "--impl", "ssd_prefill=chunked", "--device", "cpu")[0] == 0


# chat templates


def prompt_of(directory: Path, *args: str) -> str:
    """The prompt as the model saw it."""
    base = (str(directory), "--synthetic", "-n", "1", *GREEDY, "--prompt-logprobs", "0")
    found = records(*base, *args)[0]
    ids = [p["token_id"] for p in found["prompt_logprobs"] if p is not None]
    tokenizer = load_tokenizer(directory, ModelConfig.preset("tiny"))
    return tokenizer.decode(ids, skip_special=False)


def test_chat_template(chatty: Path) -> None:
    start = "user\nhello<|im_end|>\n<|im_start|>assistant\n"  # less the first token, <|im_start|>
    assert prompt_of(chatty, "-p", "hello") == start + "<think>\n"
    off = prompt_of(chatty, "-p", "hello", "--template-arg", "enable_thinking=false")
    assert off == start + "<think></think>"
    system = prompt_of(chatty, "-p", "hello", "-s", "Be kind.")
    assert system == "system\nBe kind.<|im_end|>\n<|im_start|>" + start + "<think>\n"
    assert prompt_of(chatty, "-p", "hello hello", "--raw") == " hello"  # the first one is a token


def test_a_model_without_a_template_takes_nothing_for_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.preset("tiny").to_json()))
    for args in (("-s", "b"), ("--template-arg", "x=1"), ("--think",), ("--no-raw",), ("--chat",)):
        code, out, err = invoke(str(tmp_path), "--synthetic", "-p", "a", *args)
        assert (code, out) == (2, "")
        assert {"-s": "--system"}.get(args[0], args[0]) in err
        assert "needs a chat template; this model has none (bytes, no tokenizer file)" in err


def test_defaults_come_from_the_checkpoint(chatty: Path) -> None:
    llm = LLM.synthetic(chatty)
    assert (llm.default_params.temperature, llm.default_params.top_k) == (0.5, 3)
    ids = llm.tokenizer.encode("hello")
    args = (str(chatty), "--synthetic", "-p", "hello", "--raw", "-n", "8", "--seed", "1")
    for extra, params in (
        ((), SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=8)),
        (("--top-k", "0"), SamplingParams(temperature=0.5, seed=1, max_tokens=8)),
        (GREEDY, SamplingParams(temperature=0, top_k=3, seed=1, max_tokens=8)),
    ):
        expected = llm.generate([ids], params)[0].outputs[0].token_ids
        assert records(*args, *extra)[0]["token_ids"] == expected


def test_a_checkpoint_of_transformers_gives_its_greedy_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"hybrid_override_pattern": "M*-EM*E", "vocab_size": 352, "moe_latent_size": 32}
    monkeypatch.setitem(hf_oracle.CASES, "text", case)
    model = hf_oracle.build("text")
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, template=None)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer("hello world, the cat", return_tensors="pt")
    made = model.generate(
        inputs["input_ids"], max_new_tokens=24, do_sample=False, eos_token_id=[2, 4]
    )
    text = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    args = (str(tmp_path), "-p", "hello world, the cat", "-n", "24", *GREEDY)
    code, out, err = invoke(*args, "--dtype", "float32", "--device", "cpu")
    assert code == 0, err
    assert out == text + "\n"
