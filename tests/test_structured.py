"""JSON schemas and expressions: every answer matches, with and without drafts, and as without."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from nemotriton import LLM, SamplingParams
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine
from nemotriton.errors import RequestError, UnsupportedError
from nemotriton.text import structured
from nemotriton.text.chat import chat_prompt
from nemotriton.text.constraint import Rules
from nemotriton.text.tokens import ByteTokenizer
from tests.fake_model import VOCAB, finish, ids_of, make_engine, submit
from tests.test_engine_text import Scripted, ids
from tests.test_graphs import recorded

END = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 22, None]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), [0-9]{2,4}\.?"
USER = [{"role": "user", "content": "hi"}]


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["name", "size"]
    assert len(found["name"]) <= 6
    assert found["size"] in (1, 22, None)


def params_of(seed: int, **other: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=400, seed=seed, **other)


@pytest.mark.parametrize("shape", [None, "0", "0,1,2", "0,0,1,1,2"])
def test_answers_match_and_drafts_change_none(shape: str | None) -> None:
    """The fake model's draft block is right wherever its masks are: all of a chain is accepted."""

    def outputs(drafts: str | None) -> list[tuple[str, list[int]]]:
        made = None if drafts is None else DraftShape.parse(drafts)
        engine = make_engine(
            eos_ids=(END,), shape=made, pages=400, page_size=16, max_context=512, requests=12
        )
        groups = [submit(engine, "a", params_of(s, json_schema=SCHEMA)) for s in range(4)]
        groups += [submit(engine, "b", params_of(s, regex=REGEX)) for s in range(4)]
        groups += [submit(engine, "c", params_of(s, stop="e")) for s in range(2)]
        finish(engine)
        meter = engine.draft_meter
        if made is not None and made.is_chain:
            assert meter.accepted == meter.verified > 0
        return [(g.output().outputs[0].text, ids_of(g)) for g in groups]

    found = outputs(shape)
    for text, tokens in found[:4]:
        check(text)
        assert tokens[-1] == END
    for text, _ in found[4:8]:
        assert re.fullmatch(REGEX, text)
    assert len({text for text, _ in found[:8]}) > 5
    assert found == outputs(None)


@pytest.mark.parametrize("shape", [None, "0,1,2"])
def test_recorded_steps_give_way_to_constraints(shape: str | None) -> None:
    """Beside a request that is not constrained, with decode steps of fixed shape."""
    made = None if shape is None else DraftShape.parse(shape)

    def outputs(engine: Engine) -> list[list[int]]:
        params = [params_of(1, regex=REGEX), SamplingParams(max_tokens=14, seed=2)]
        groups = [submit(engine, "a", p) for p in params]
        finish(engine)
        assert re.fullmatch(REGEX, groups[0].output().outputs[0].text)
        return [ids_of(g) for g in groups]

    engine = recorded(eos_ids=(END,), shape=made)
    assert outputs(engine) == outputs(make_engine(eos_ids=(END,)))
    assert engine.runner.steps is not None
    assert engine.runner.steps.replays > 0


def test_the_real_model_behind_a_thought() -> None:
    """The grammar starts with the first token behind the thought, wherever that falls in a run."""
    with LLM(dtype="float32", max_context=200, drafts=3, adapt_drafts=False) as llm:
        params = [params_of(s, regex=REGEX, thinking_token_budget=s) for s in range(4)]
        for output in llm.chat([USER] * 4, params):
            reply = output.outputs[0]
            assert reply.finish_reason == "stop"
            assert re.fullmatch(REGEX, reply.text)
        (fixed,) = llm.chat(USER, params_of(3, json_schema='{"const": "said"}'), think=False)
        assert json.loads(fixed.outputs[0].text) == "said"
        assert llm.stats()["drafts"]["accepted"] >= 4, "what is forced is drafted right"


@pytest.mark.parametrize("shape", ["0,1,2", "0,0,1,1"])
def test_a_thought_that_ends_inside_an_accepted_run(shape: str) -> None:
    """Token by token: free, end of thought, then the grammar from the very next row."""
    tokenizer = ByteTokenizer(VOCAB, None, (END,), "<think>")
    engine = make_engine(tokenizer=tokenizer, eos_ids=(END,), shape=DraftShape.parse(shape))
    params = params_of(0, regex="ab*c")
    prepared = engine.prepare(chat_prompt(tokenizer, USER), params)
    assert prepared.rules is not None
    constraint = prepared.rules.constraint()
    assert allowed(constraint, ids("x"), [])[END] is False, "an end in the thought"
    assert allowed(constraint, ids("x"), ids("y"))[END] is False
    assert names(allowed(constraint, ids("x"), [*ids("y"), 13])) == ["a"]
    assert names(allowed(constraint, ids("x"), [13, *ids("ab")])) == ["b", "c"]
    assert allowed(constraint, ids("x"), [13, *ids("bb")]) == {}, "behind a draft that is refused"
    assert names(allowed(constraint, [*ids("x"), 13], ids("a"))) == ["b", "c"]
    assert names(allowed(constraint, [*ids("x"), 13, *ids("ab")], ids("bb"))) == ["b", "c"]
    assert allowed(constraint, [*ids("x"), 13, *ids("abc")], []) == {
        t: t == END for t in range(VOCAB)
    }
    assert allowed(constraint, [*ids("x"), 13, *ids("abc")], [END]) == {}


class Glued(ByteTokenizer):
    """Token 5 ends a tag and starts an answer at once."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(">a" if i == 5 else super(Glued, self).decode([i]) for i in ids)


def test_an_answer_that_starts_in_the_token_that_ends_the_thought() -> None:
    tokenizer = Glued(VOCAB, None, (END,))
    grammar = structured.Grammars(tokenizer.vocabulary(), VOCAB, [END]).compile(None, "ab*c")
    constraint = Rules(tokenizer, True, None, grammar, (END,)).constraint()
    for _ in range(2):
        assert names(allowed(constraint, ids("x"), [*ids("</think"), 5])) == ["b", "c"]
        assert names(allowed(constraint, ids("x"), [*ids("</think"), 5, *ids("b")])) == ["b", "c"]
        assert names(allowed(constraint, ids("x"), ids("</think>"))) == ["a"]
    assert names(allowed(constraint, [*ids("x</think"), 5, *ids("bb")], [])) == ["b", "c"]


def allowed(constraint: Any, output: Sequence[int], ahead: Sequence[int]) -> dict[int, bool]:
    import torch

    bits = torch.zeros(-(-VOCAB // 32), dtype=torch.int32)
    if not constraint.allow(bits, output, ahead):
        return {}
    words = bits.tolist()
    return {t: bool(words[t // 32] >> (t % 32) & 1) for t in range(VOCAB)}


def names(found: dict[int, bool]) -> list[str]:
    return [chr(t - 18) for t, ok in found.items() if ok]


def test_the_limit_cuts_and_says_so() -> None:
    engine = make_engine(eos_ids=(END,))
    group = submit(engine, "a", SamplingParams(max_tokens=5, seed=1, json_schema=SCHEMA))
    finish(engine)
    output = group.output().outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)


def test_several_completions_have_a_grammar_each() -> None:
    engine = make_engine(eos_ids=(END,), max_context=512, pages=400, page_size=16)
    group = submit(engine, "a", params_of(1, n=4, regex=REGEX))
    finish(engine)
    texts = [o.text for o in group.output().outputs]
    assert all(re.fullmatch(REGEX, t) for t in texts)
    assert len(set(texts)) > 1


def test_logprobs_are_the_models_own() -> None:
    engine = make_engine(eos_ids=(END,))
    group = submit(engine, "a", SamplingParams(temperature=0, regex="zq", logprobs=0, max_tokens=3))
    finish(engine)
    assert group.output().outputs[0].text == "zq"
    logprobs = group.output().outputs[0].logprobs
    assert logprobs is not None
    assert any(row[t].logprob < -0.5 for row, t in zip(logprobs, ids_of(group)))


BAD = [
    ({"json_schema": "{"}, r"json_schema='{' is not possible: use a JSON schema"),
    ({"json_schema": "[]"}, r"json_schema='\[\]' is not possible: use a JSON schema, which is"),
    ({"json_schema": 3}, r"json_schema=3 is not possible"),
    ({"json_schema": {"type": {1}}}, r"json_schema=.* not JSON serializable"),
    ({"json_schema": {"type": "nope"}}, r'json_schema=.* is not possible: .*type "nope"'),
    ({"json_schema": {"enum": []}}, r"json_schema=.* is not possible: .*enum"),
    ({"json_schema": {"$ref": "#/x"}}, r"json_schema=.* is not possible: .*#/x"),
    ({"regex": ""}, r"regex='' is not possible: use a regular expression"),
    ({"regex": "("}, r"regex='\(' is not possible: .*parenthesis is not closed"),
    ({"regex": "(?=a)b"}, r"regex=.* is not possible: .*Lookahead is not supported"),
    ({"regex": "a", "json_schema": {}}, r"regex='a' is not possible: json_schema is given too"),
    ({"regex": "a", "ignore_eos": True}, r"ignore_eos=True is not possible: a JSON schema or"),
    ({"regex": "a", "min_tokens": 2}, r"min_tokens=2 is not possible: a JSON schema or regex"),
]


@pytest.mark.parametrize("values, message", BAD, ids=[m[:36] for _, m in BAD])
def test_what_is_no_schema_and_no_expression(values: dict[str, Any], message: str) -> None:
    engine = make_engine(eos_ids=(END,))
    with pytest.raises(RequestError, match="(?s)^" + message) as caught:
        engine.prepare("a", SamplingParams(**values))
    assert type(caught.value) is RequestError
    assert "project/cpp" not in str(caught.value)
    assert not engine.busy


def test_what_a_grammar_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="needs an end token, and this checkpoint names none"):
        make_engine().prepare("a", SamplingParams(regex="a"))
    engine = make_engine(eos_ids=(END,))
    engine.tokenizer = None
    with pytest.raises(RequestError, match="needs a tokenizer and this model has none"):
        engine.prepare([3], SamplingParams(regex="a"))
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(UnsupportedError, match=r"needs xgrammar: pip install -e '.\[json\]'"):
        structured.check_grammar(None, "a")


def test_a_scripted_answer_is_followed_by_the_matcher() -> None:
    """Rows are masked by what was said, not by what was drawn last."""
    engine = make_engine(eos_ids=(END,))
    Scripted(engine, [*ids("yes, 12"), END])
    group = submit(engine, "a", SamplingParams(max_tokens=20, regex=REGEX))
    finish(engine)
    assert group.output().outputs[0].text == "yes, 12"
