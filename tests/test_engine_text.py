"""Tokens to text: stop strings, ends, deltas, logprobs; and the prompts that are refused."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotriton.engine.engine import Engine
from nemotriton.engine.outputs import Completion, Group
from nemotriton.engine.request import Request
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError
from nemotriton.text.tokens import SPECIALS, ByteTokenizer
from tests.fake_model import (
    VOCAB,
    finish,
    greedy,
    history,
    ids_of,
    logits_of,
    make_engine,
    submit,
)

BYTE = len(SPECIALS)  # the id of byte 0
TOKENIZER = ByteTokenizer(VOCAB, None, ())


def ids(text: str | bytes) -> list[int]:
    data = text.encode() if isinstance(text, str) else text
    return [BYTE + b for b in data]


class Scripted:
    """Puts fixed tokens in the place of the sampler's picks, one list a request."""

    def __init__(self, engine: Engine, *scripts: list[int]) -> None:
        self.scripts = scripts
        engine.runner.sampler.pick = self.pick  # type: ignore[method-assign]

    def pick(
        self,
        logits: torch.Tensor,
        requests: list[Request],
        drafts: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        assert not drafts, "nothing drafts here"
        return torch.tensor(
            [self.scripts[int(r.id.split("-")[0])][len(r.output)] for r in requests]
        )


def say(script: list[int], params: SamplingParams, eos: tuple[int, ...] = ()) -> Group:
    engine = make_engine(eos_ids=eos)
    Scripted(engine, script)
    group = submit(engine, "ab", params)
    finish(engine)
    return group


def params_of(
    count: int = 40,
    stop: list[str] | None = None,
    include: bool = False,
    stop_ids: list[int] | None = None,
    min_tokens: int = 0,
) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=count,
        stop=stop,
        include_stop_str_in_output=include,
        stop_token_ids=stop_ids,
        min_tokens=min_tokens,
    )


@pytest.mark.parametrize(
    "text, stop, include, printed, used",
    [
        ("hello world, bye", ["wor"], False, "hello ", 9),
        ("hello world, bye", ["wor"], True, "hello wor", 9),
        ("aaab", ["ab"], False, "aa", 4),
        ("abcabd", ["abd"], False, "abc", 6),
        ("one two", ["one t", "two"], False, "", 5),
        ("gr\u00fc\u00df dich", ["\u00fc\u00df"], False, "gr", 6),
        ("no stop here", ["xyz"], False, "no stop here", 12),
        ("ends with half: st", ["stop"], False, "ends with half: st", 18),
    ],
)
def test_stop_strings_across_tokens(
    text: str, stop: list[str], include: bool, printed: str, used: int
) -> None:
    script = ids(text)
    output = say(script, params_of(len(script), stop, include)).output().outputs[0]
    assert output.text == printed
    assert output.token_ids == script[:used]
    reasons = ("stop", stop[0]) if stop[0] in text else ("length", None)
    assert (output.finish_reason, output.stop_reason) == reasons


@settings(max_examples=60, deadline=None)
@given(st.text("ab\u00e9\U0001f600", min_size=1, max_size=14), st.data())
def test_streamed_text_is_the_text_and_never_shows_a_stop(text: str, data: st.DataObject) -> None:
    stop = data.draw(st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=3), max_size=2))
    engine = make_engine()
    Scripted(engine, ids(text))
    group = submit(engine, "ab", params_of(len(ids(text)), stop or None))
    parts, tokens, ends = [], [], []
    while not group.finished:
        engine.step()
        for delta in group.take():
            parts.append(delta.text)
            tokens += delta.token_ids
            ends.append(delta.finish_reason)
    assert not group.take()
    found = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    whole = "".join(parts)
    assert whole == group.output().outputs[0].text
    assert whole == text[: min(found)[1] if found else len(text)]
    assert tokens == ids_of(group)
    assert [e for e in ends if e] == [ends[-1]], "one end, in the last delta"


def test_a_limit_inside_a_character_shows_it_as_broken() -> None:
    output = say(ids("a\u00e9")[:2], params_of(2)).output().outputs[0]
    assert output.text == "a\ufffd" == TOKENIZER.decode(output.token_ids)


def test_the_end_token_is_counted_but_not_printed() -> None:
    eos = BYTE + ord("!")
    script = ids("ok!more")
    output = say(script, params_of(), eos=(eos,)).output().outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("ok", ids("ok!"), None)
    shown = say(script, params_of(include=True), eos=(eos,)).output().outputs[0]
    assert shown.text == "ok!"


def test_stop_strings_wait_for_min_tokens() -> None:
    """One may begin before, but not end."""
    output = say(ids("ababab"), params_of(6, ["ab"], min_tokens=3)).output().outputs[0]
    assert (output.text, output.token_ids) == ("ab", ids("abab"))
    early = say(ids("abcccc"), params_of(6, ["ab"], min_tokens=2)).output().outputs[0]
    assert (early.text, early.finish_reason) == ("abcccc", "length")


def test_a_stop_string_beats_the_limit_on_the_same_token() -> None:
    output = say(ids("abc"), params_of(3, ["bc"])).output().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "bc")


def test_tokens_behind_a_stop_string_in_one_accepted_run_are_taken_back() -> None:
    request = Request("r", 0, [1], params_of(stop=["b"]), 0, 99)
    completion = Completion(request, TOKENIZER)
    request.output = ids("abcd")
    assert completion.push(ids("abcd")) == "b"
    assert request.output == ids("ab")
    assert completion.text == "a"


def test_deltas_of_several_completions_keep_their_index() -> None:
    engine = make_engine()
    group = submit(engine, "abc", SamplingParams(n=3, max_tokens=9, seed=1))
    texts = ["", "", ""]
    while not group.finished:
        engine.step()
        for delta in group.take():
            assert delta.request_id == group.id
            texts[delta.index] += delta.text
    assert texts == [o.text for o in group.output().outputs]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    script = [*ids("a"), 10, 12, *ids("b")]
    assert say(script, params_of(4)).output().outputs[0].text == "a<think>b"
    shown = SamplingParams(temperature=0, max_tokens=4, skip_special_tokens=False)
    assert say(script, shown).output().outputs[0].text == "a<|im_start|><think>b"


@pytest.mark.parametrize("piece", [1, 3, 64])
def test_logprobs_of_prompt_and_completion(piece: int) -> None:
    prompt = random.Random(1).choices(range(VOCAB), k=10)
    engine = make_engine(piece=piece)
    params = SamplingParams(
        temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1, repetition_penalty=3.0
    )
    group = submit(engine, prompt, params)
    other = submit(engine, prompt[:4], params_of(5))
    finish(engine)
    output = group.output()
    whole = prompt + output.outputs[0].token_ids
    pairs = torch.tensor(history(whole), dtype=torch.float32)
    exact = torch.log_softmax(logits_of(pairs).double(), -1)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs[0] is None
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(rows) == len(whole) - 1
    for i, row in enumerate(rows):
        assert row is not None
        count = 1 if i + 1 < len(prompt) else 2
        assert {whole[i + 1], *exact[i].topk(count).indices.tolist()} == set(row)
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(float(exact[i, token]), abs=1e-5)
            assert entry.decoded_token == TOKENIZER.decode([token], False)
    total = sum(float(exact[i - 1, whole[i]]) for i in range(len(prompt), len(whole)))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-4)
    plain = other.output()
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None
    assert ids_of(other) == greedy(prompt[:4], 5)


# ------------------------------------------------------------------------------------- refusals
ODD = [
    ("", None, r"the prompt is empty: give it at least one character"),
    ([], None, r"the prompt is empty: give it at least one token id"),
    ([1, VOCAB], None, r"prompt\[1\] is 274, but token ids are 0 \.\. 273: use the tokenizer of"),
    ([5, 6, -1], None, r"prompt\[2\] is -1, but token ids are 0 \.\. 273"),
    ([1, "a"], None, r"prompt\[1\] is 'a', not a token id: give a text or a list of token ids"),
    ([1.0], None, r"prompt\[0\] is 1\.0, not a token id"),
    ([True], None, r"prompt\[0\] is True, not a token id"),
    ([[1, 2]], None, r"prompt\[0\] is \[1, 2\], not a token id"),
    (None, None, r"a prompt of type NoneType: give a text or a list of token ids"),
    (b"text", None, r"a prompt of type bytes: give a text or a list of token ids"),
    (torch.tensor([1, 2]), None, r"a prompt of type Tensor: give a text or a list of token ids"),
    ([1] * 129, None, r"the prompt is 129 tokens; max_context is 128: shorten the prompt or raise"),
    ("x" * 140_112, None, r"the prompt is 140,112 tokens; max_context is 128"),
    (
        [1] * 128,
        None,
        r"the prompt is 128 tokens and fills max_context=128: shorten it by at least",
    ),
    ("a\ud800", None, r"character 1 of the text, '\\ud800', is half a surrogate pair"),
    ([1], {"stop_token_ids": [VOCAB]}, r"stop_token_ids has 274, but token ids are 0 \.\. 273"),
    ([1], {"logprobs": VOCAB + 1}, r"logprobs=275 is more than the 274 tokens of the vocabulary"),
    ([1], {"prompt_logprobs": 999}, r"prompt_logprobs=999 is more than the 274 tokens"),
]


@pytest.mark.parametrize("prompt, values, message", ODD, ids=[m[:38] for _, _, m in ODD])
def test_odd_requests_are_refused_and_leave_nothing_behind(
    prompt: object, values: dict[str, object] | None, message: str
) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="^" + message) as caught:
        submit(engine, prompt, SamplingParams(**(values or {})))  # type: ignore[arg-type]
    assert type(caught.value) is RequestError
    assert not engine.busy
    group = submit(engine, [1, 2], params_of(3))
    finish(engine)
    assert ids_of(group) == greedy([1, 2], 3)


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    engine = make_engine()
    engine.tokenizer = None
    with pytest.raises(RequestError, match="a text prompt needs a tokenizer and this model has no"):
        engine.prepare("a", SamplingParams())
    with pytest.raises(RequestError, match=r"stop='x' needs a tokenizer .* use stop_token_ids"):
        engine.prepare([1], SamplingParams(stop="x"))
    group = submit(engine, [1, 2], SamplingParams(temperature=0, max_tokens=3, logprobs=1))
    finish(engine)
    output = group.output().outputs[0]
    assert (output.text, output.token_ids) == ("", greedy([1, 2], 3))
    assert output.logprobs is not None
    assert output.logprobs[0][output.token_ids[0]].decoded_token is None
