"""Conversations: templates, thoughts, tool calls; pieces of a reply against the whole of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotriton import LLM, SamplingParams
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.outputs import Completion, CompletionOutput
from nemotriton.engine.request import Request
from nemotriton.errors import RequestError
from nemotriton.text.chat import chat_prompt, opens_thought
from nemotriton.text.constraint import Rules
from nemotriton.text.reply import Reply, ReplyParser, ToolCall, parse_reply
from nemotriton.text.template import switch_thinking
from nemotriton.text.tokens import ByteTokenizer, load_tokenizer
from tests.fake_model import VOCAB, finish, make_engine
from tests.test_engine_text import Scripted, ids
from tests.tokenizer_files import write_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
XML = "<tool_call>\n<function=weather>\n{}</function>\n</tool_call>"
CITY = "<parameter=city>\n{}\n</parameter>\n"
USER = [{"role": "user", "content": "hi"}]
OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think></think>"


def call(**arguments: Any) -> list[ToolCall]:
    return [ToolCall("weather", arguments)]


# ------------------------------------------------------------------------------ a reply's parts
REPLIES: list[tuple[str, bool, Reply]] = [
    ("I see.\n</think>\n\nYes.", True, Reply("I see.", "Yes.")),
    ("\n\n a\n\n b \n</think>  ", True, Reply("a\n\n b", "")),
    ("never closed </thin", True, Reply("never closed </thin", "")),
    ("</think></think> x", True, Reply("", "</think> x")),
    ("Yes.\n", False, Reply("", "Yes.\n")),
    ("  two <think>not at the start", False, Reply("", "  two <think>not at the start")),
    (" \n<think> own </think> Yes", False, Reply("own", "Yes")),
    ("<thi", False, Reply("", "<thi")),
    ("a<tool_cal b < c", False, Reply("", "a<tool_cal b < c")),
    (
        "Let me look.\n" + XML.format(CITY.format("Bern") + "<parameter=days>\n3\n</parameter>\n"),
        False,
        Reply("", "Let me look.", call(city="Bern", days=3)),
    ),
    (
        "t</think>\n" + XML.format(CITY.format("12")) + "\n" + XML.format("") + "\n done ",
        True,
        Reply("t", "done ", call(city="12") + call()),
    ),
    (XML.format(CITY.format("\n<b>\n")), False, Reply("", "", call(city="\n<b>\n"))),
    (XML.format("<parameter=new>[1]</parameter>"), False, Reply("", "", call(new=[1]))),
    (XML.format("<parameter=days>soon</parameter>"), False, Reply("", "", call(days="soon"))),
    (
        "x\n<tool_call>no call</tool_call> y",
        False,
        Reply("", "x\n<tool_call>no call</tool_call> y"),
    ),
    ("x <tool_call>\n<function=f>", False, Reply("", "x <tool_call>\n<function=f>")),
    (
        'ok <TOOLCALL>[{"name": "weather", "arguments": {"city": "x"}}, '
        '{"name": "weather", "arguments": "{}"}]</TOOLCALL>',
        False,
        Reply("", "ok", call(city="x") + call()),
    ),
    ("<TOOLCALL>[{]</TOOLCALL>", False, Reply("", "<TOOLCALL>[{]</TOOLCALL>")),
    (
        '<TOOLCALL>[{"name": 3}]</TOOLCALL>.',
        False,
        Reply("", '<TOOLCALL>[{"name": 3}]</TOOLCALL>.'),
    ),
]


def in_pieces(pieces: list[str], thinking: bool, tools: list[Any]) -> Reply:
    parser = ReplyParser(thinking, tools)
    whole = Reply()
    for part in [*(parser.push(p) for p in pieces), parser.finish()]:
        whole.thinking += part.thinking
        whole.text += part.text
        whole.tool_calls += part.tool_calls
    return whole


@pytest.mark.parametrize("text, thinking, wanted", REPLIES)
def test_parts_of_a_reply_whole_and_split_everywhere(
    text: str, thinking: bool, wanted: Reply
) -> None:
    assert parse_reply(text, thinking, TOOLS) == wanted
    assert in_pieces(list(text), thinking, TOOLS) == wanted
    for cut in range(len(text) + 1):
        assert in_pieces([text[:cut], text[cut:]], thinking, TOOLS) == wanted


SCRAPS = st.sampled_from(
    ["a", "\u00e9", "\n", " ", "<", "</", "<thi", "nk>", "<think>", "</think>", "<tool_call>"]
    + ["</tool_call>", "<function=f>", "</function>", "<parameter=p>", "</parameter>"]
    + ["<TOOLCALL>", "</TOOLCALL>", '[{"name":"f"}]', "\U0001f642"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(SCRAPS, max_size=12), st.booleans(), st.booleans(), st.data())
def test_streamed_equals_whole(
    scraps: list[str], thinking: bool, tools: bool, data: st.DataObject
) -> None:
    text, described = "".join(scraps), TOOLS if tools else []
    whole = parse_reply(text, thinking, described)
    assert in_pieces(list(text), thinking, described) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert in_pieces(pieces, thinking, described) == whole
    if not tools:  # nothing but tags and white space beside them is ever lost
        kept = "".join((whole.thinking + whole.text).split())
        bare = "".join(text.split())
        if thinking or text.lstrip().startswith("<think>"):  # whole, not "<thi nk>"
            bare = bare.removeprefix("" if thinking else "<think>").replace("</think>", "", 1)
        assert kept == bare


def test_calls_are_text_where_no_tools_were_given() -> None:
    text = XML.format("")
    assert parse_reply(text, False) == Reply("", text)


def test_the_answer_streams_as_it_comes() -> None:
    parser = ReplyParser(True, TOOLS)
    assert [parser.push(p).thinking for p in ("ab", "c ", "d")] == ["ab", "c", " d"]
    parser.push("</think>")
    assert [parser.push(p).text for p in ("x", " <", "tool", "box")] == ["x", "", "", " <toolbox"]


# ------------------------------------------------------------------------------------- templates
@pytest.fixture(scope="module")
def tiny() -> Any:
    with LLM(dtype="float32", device="cpu", max_context=512) as llm:
        yield llm


def shown(llm: LLM, messages: list[Any], **options: Any) -> str:
    prompt = llm.chat_prompt(messages, **options)
    assert prompt.thinking == prompt_text(llm, prompt.ids).endswith("<think>\n")
    return prompt_text(llm, prompt.ids)


def prompt_text(llm: LLM, tokens: list[int]) -> str:
    return llm.tokenizer.decode(tokens, skip_special=False)


def test_the_embedded_models_template(tiny: LLM) -> None:
    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert shown(tiny, USER) == "<|im_start|>system\n<|im_end|>\n" + user + OPENED
    assert shown(tiny, USER, think=False).endswith(user + CLOSED)
    assert shown(tiny, USER, template_args={"enable_thinking": False}).endswith(CLOSED)
    both = shown(tiny, USER, think=True, template_args={"enable_thinking": False})
    assert both.endswith(OPENED), "the argument with the plain name wins"
    told = shown(tiny, [{"role": "system", "content": "Be kind."}, *USER], tools=TOOLS)
    assert told.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n\n<tools>\n<function>\n<name>")
    talk = [*USER, {"role": "assistant", "content": "yo", "reasoning_content": "hm"}, *USER]
    assert f"{user}<|im_start|>assistant\n<think></think>yo<|im_end|>\n{user}" in shown(tiny, talk)
    asked = {"function": {"name": "weather", "arguments": {"city": "Bern", "days": 3}}}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "content": "sunny"},
    ]
    text = shown(tiny, [*USER, *called], tools=TOOLS)
    reply = text.split("<think></think>")[1].split("<|im_end|>")[0]
    assert parse_reply(reply, False, TOOLS).tool_calls == call(city="Bern", days=3)
    assert "<tool_response>\nsunny\n</tool_response>" in text


def test_control_tokens_come_from_the_template_alone() -> None:
    tokenizer = ByteTokenizer(VOCAB, 1, (2,), "{{ messages[0].content }}<think>")
    assert tokenizer.encode("<think>") == [1, *ids("<think>")]
    assert tokenizer.apply_chat([{"role": "user", "content": "a"}]) == [*ids("a"), 12]
    assert tokenizer.decode([10, 12, *ids("a"), 17]) == "<think>a</tool_response>"


def test_nano_v2_is_switched_by_words() -> None:
    template = "{% if '/no_think' in messages[-1].content %}off{% endif %}"
    system = {"role": "system", "content": "s"}
    assert switch_thinking(template, USER, {}, None) == (USER, {})
    assert switch_thinking(template, [system, *USER], {}, False)[0] == [
        system,
        {"role": "user", "content": "hi /no_think"},
    ]
    assert switch_thinking(template, USER, {}, True)[0][0]["content"] == "hi /think"
    only = [{"role": "assistant", "content": "x"}]
    assert switch_thinking(template, only, {}, False)[0][0] == {
        "role": "system",
        "content": "/no_think",
    }


def test_a_checkpoints_own_template_and_its_thought(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)

    class Config:
        vocab, bos, eos = 352, None, (2,)

    tokenizer = load_tokenizer(tmp_path, Config())
    prompt = chat_prompt(tokenizer, USER)
    assert prompt.thinking
    assert opens_thought(tokenizer, prompt.ids)
    assert not chat_prompt(tokenizer, USER, think=False).thinking
    assert not opens_thought(tokenizer, tokenizer.encode("hi <think> there"))
    words = tokenizer.vocabulary()
    assert words[tokenizer.id_of("<think>") or 0] == b""
    text = "naïve café 你好 🙂\n"
    assert b"".join(words[i] for i in tokenizer.encode(text, False)) == text.encode()
    with pytest.raises(
        RequestError, match="the call has tools, but the chat template of this model"
    ):
        chat_prompt(tokenizer, USER, tools=TOOLS)


def test_nano_v2s_own_way_through(tmp_path: Path) -> None:
    """Its tags are no tokens, its switch is a word, its tools are JSON."""
    template = (
        "{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>{% endif %}"
        "{% for m in messages %}{{ m.content.replace('/no_think', '') }}\n{% endfor %}"
        "{{ '<think></think>' if '/no_think' in messages[-1].content else '<think>\n\n' }}"
    )
    write_tokenizer(tmp_path, template)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if "think" not in t["content"]]
    file.write_text(json.dumps(data))

    class Config:
        vocab, bos, eos = 352, None, (2,)

    tokenizer = load_tokenizer(tmp_path, Config())
    on, off = (chat_prompt(tokenizer, USER, think, tools=TOOLS) for think in (None, False))
    assert (on.thinking, off.thinking) == (True, False)
    text = tokenizer.decode(on.ids, False)
    assert text.startswith('<AVAILABLE_TOOLS>[{"type": "function"')
    assert text.endswith("hi\n<think>\n\n")
    rules = Rules(tokenizer, True, 3, None, ())
    assert tokenizer.decode(rules.closing) == "\n</think>"
    bits, constraint = torch.zeros(11, dtype=torch.int32), rules.constraint()
    closed = tokenizer.encode("a</think>x", False)
    assert [constraint.allow(bits, closed[:3], closed[3:n]) for n in (3, len(closed))] == [
        True,
        False,
    ]


# ------------------------------------------------------------------------------------- the engine
def test_deltas_carry_thoughts_answers_and_calls(tiny: LLM) -> None:
    script = [*ids("so\n"), 13, *ids("\n\nyes "), 14, *ids("\n<function=weather>\n</function>\n")]
    script += [15, 11]
    engine = make_engine(eos_ids=(11,), max_context=512, pages=200)
    Scripted(engine, script)
    reader = ByteTokenizer(512, 1, (2,), tiny.tokenizer.chat_template)
    prompt = chat_prompt(reader, USER, tools=TOOLS)
    group = engine.submit(engine.prepare(prompt, SamplingParams(max_tokens=99)))
    deltas = []
    while not group.finished:
        engine.step()
        deltas += group.take()
    output = group.output().outputs[0]
    assert (output.thinking, output.text, output.tool_calls) == ("so", "yes", call())
    assert "".join(d.thinking for d in deltas) == "so"
    assert "".join(d.text for d in deltas) == "yes"
    assert [c for d in deltas for c in d.tool_calls] == call()
    assert output.token_ids == script


def test_stop_strings_end_the_answer_and_not_the_thought() -> None:
    tokenizer = ByteTokenizer(VOCAB, None, (2,), "<think>")
    engine = make_engine(tokenizer=tokenizer)
    Scripted(engine, [*ids("a stop"), 13, *ids("b stop c")])
    params = SamplingParams(max_tokens=15, stop="stop")
    group = engine.submit(engine.prepare(chat_prompt(tokenizer, USER), params))
    finish(engine)
    output = group.output().outputs[0]
    assert (output.thinking, output.text, output.stop_reason) == ("a stop", "b ", "stop")


@pytest.mark.parametrize("shape", [None, "0,1,2", "0,0,1"])
def test_a_budget_closes_the_thought(shape: str | None) -> None:
    tokenizer = ByteTokenizer(VOCAB, None, (), "<think>")
    prompt = chat_prompt(tokenizer, USER)

    def outputs(budgets: list[int | None], drafts: str | None) -> list[CompletionOutput]:
        made = None if drafts is None else DraftShape.parse(drafts)
        engine = make_engine(tokenizer=tokenizer, shape=made, pages=400)
        params = [
            SamplingParams(max_tokens=24, seed=s, thinking_token_budget=b)
            for s, b in enumerate(budgets)
        ]
        groups = [engine.submit(engine.prepare(prompt, p)) for p in params]
        finish(engine)
        return [g.output().outputs[0] for g in groups]

    budgets = [0, 1, 2, 5, 9, 23, 30]
    free = outputs([None] * 7, None)
    for budget, output, unbound in zip(budgets, outputs(list(budgets), shape), free):
        forced = output.token_ids[budget : budget + 2]
        assert forced == [*ids("\n"), 13][: 24 - budget if budget < 24 else 0]
        assert output.token_ids[:budget] == unbound.token_ids[:budget]
        assert (output.text == "") == (budget > 22)
        assert output.thinking == tokenizer.decode(output.token_ids[:budget]).strip()


def test_the_embedded_model_streams_its_chat(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=10, seed=1, thinking_token_budget=4, ignore_eos=True)
    output = tiny.chat(USER, params)[0].outputs[0]
    deltas = list(tiny.stream(USER, params))
    assert "".join(d.text for d in deltas) == output.text != ""
    assert "".join(d.thinking for d in deltas) == output.thinking != ""
    assert [t for d in deltas for t in d.token_ids] == output.token_ids


def test_a_thought_that_ends_in_time_is_left_alone() -> None:
    """Closed by the model itself within the budget, as a token or letter by letter."""
    tokenizer = ByteTokenizer(VOCAB, None, (2,), "<think>")
    for close in ([13], ids("</think>")):
        engine = make_engine(tokenizer=tokenizer)
        params = SamplingParams(max_tokens=20, temperature=0, thinking_token_budget=9)
        prepared = engine.prepare(chat_prompt(tokenizer, USER), params)
        assert prepared.rules is not None
        constraint = prepared.rules.constraint()
        bits = torch.zeros(9, dtype=torch.int32)
        output = [*ids("a"), *close]
        assert not constraint.allow(bits, output, [])
        assert not constraint.allow(bits, output, ids("b" * 12))
        late = prepared.rules.constraint()
        assert not late.allow(bits, ids("x" * 8), [])
        assert late.allow(bits, ids("x" * 9), [])
        assert late.allow(bits, ids("x" * 9), ids("\n"))
        assert not late.allow(bits, ids("x" * 9), [*ids("\n"), 13])


def test_completions_of_plain_prompts_are_not_taken_apart(tiny: LLM) -> None:
    output = tiny.generate("hi", SamplingParams(max_tokens=3))[0].outputs[0]
    assert (output.thinking, output.tool_calls) == (None, [])
    completion = Completion(Request("r", 0, [1], SamplingParams(), 0, 9), tiny.tokenizer)
    completion.request.output = [12, *tiny.tokenizer.encode("a")]
    completion.push(completion.request.output)
    assert completion.text == "<think>a"


BAD_CALLS = [
    ({"messages": []}, "a conversation without messages"),
    ({"messages": [*USER, "hi"]}, "message 1 is 'hi'"),
    ({"messages": [{"content": "hi"}]}, "message 0 is .* give it a role"),
    ({"messages": [{"role": "pope", "content": "hi"}]}, "a message has the role pope; use system"),
    ({"tools": "weather"}, "tools of type str: give a list"),
    ({"tools": [3]}, r"tools\[0\] is 3: give a list"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\] is {'type': 'function'}"),
    ({"template_args": {"tools": [{}]}}, r"tools\[0\] is {}"),
    ({"think": False, "budget": 3}, "thinking_token_budget=3, but the prompt opens no thought"),
    ({"budget": -1}, "thinking_token_budget=-1 is not possible: use a number >= 0"),
    ({"budget": 1.5}, "thinking_token_budget=1.5 is not possible"),
]


@pytest.mark.parametrize("options, message", BAD_CALLS, ids=[m[:30] for _, m in BAD_CALLS])
def test_chats_that_cannot_be(tiny: LLM, options: dict[str, Any], message: str) -> None:
    options = dict(options)
    messages = options.pop("messages", USER)
    budget = options.pop("budget", None)
    with pytest.raises(RequestError, match=message) as caught:
        tiny.chat(messages, SamplingParams(thinking_token_budget=budget), **options)
    assert type(caught.value) is RequestError
    assert not tiny.engine.busy


def test_switches_need_something_to_switch(tiny: LLM) -> None:
    plain = ByteTokenizer(VOCAB, None, (2,), "{{ messages[0].content }}")
    with pytest.raises(RequestError, match="think=False, but the chat template of this model has"):
        chat_prompt(plain, USER, think=False)
    with pytest.raises(RequestError, match="tools, but the chat template"):
        chat_prompt(plain, USER, tools=TOOLS)
    with pytest.raises(RequestError, match="no chat template"):
        chat_prompt(ByteTokenizer(VOCAB, None, ()), USER)
