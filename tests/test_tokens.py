"""Text and tokens: ids, streaming, stop strings, ends, templates."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotriton.errors import ConfigError, NemotritonError, RequestError, UnsupportedError
from nemotriton.text.generation_config import GenerationConfig
from nemotriton.text.tokens import (
    SPECIALS,
    ByteTokenizer,
    JsonTokenizer,
    StopStrings,
    Tokenizer,
    load_tokenizer,
)
from tests.tokenizer_files import CONTROL, THINK, write_tokenizer


@dataclass
class Config:
    vocab: int = 512
    bos: int | None = 1
    eos: tuple[int, ...] = (2,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def real(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, Config())


BYTES = ByteTokenizer(512, 1, (2,))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    """The parts a stream gives when ids come in runs that end at `cuts`."""
    stream = tokenizer.stream(skip)
    ends = sorted({min(c, len(ids)) for c in cuts} | {len(ids)})
    parts = [stream.push(ids[a:b]) for a, b in zip([0, *ends], ends)]
    return [*parts, stream.finish()]


CUTS = st.lists(st.integers(0, 60), max_size=60)


@given(ids=st.lists(st.integers(0, 339), max_size=60), cuts=CUTS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_stream_of_any_ids_equals_decoding_them(
    real: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    ids = [i % real.vocab_size for i in ids]
    assert "".join(streamed(real, ids, cuts, skip)) == real.decode(ids, skip)


@given(ids=st.lists(st.integers(0, 511), max_size=60), cuts=CUTS, skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_byte_stream_of_any_ids_equals_decoding_them(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    assert "".join(streamed(BYTES, ids, cuts, skip)) == BYTES.decode(ids, skip)


@given(text=TEXTS)
@settings(max_examples=300, deadline=None)
def test_text_comes_back_and_no_part_holds_half_a_character(real: Tokenizer, text: str) -> None:
    for tokenizer in (real, BYTES):
        ids = tokenizer.encode(text, add_special=False)
        # control tokens in a text are read as tokens by tokenizer.json, and leave the text
        if tokenizer is real and any(c in text for c in CONTROL):
            continue
        parts = streamed(tokenizer, ids, list(range(len(ids))), skip=True)
        assert "".join(parts) == text
        assert sum(p.count("\ufffd") for p in parts) == text.count("\ufffd")


def test_emoji_comes_whole_and_the_limit_inside_it_is_marked() -> None:
    ids = BYTES.encode("a🙂b", add_special=False)
    stream = BYTES.stream()
    assert [stream.push([i]) for i in ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.finish() == ""
    cut = BYTES.stream()
    assert cut.push(ids[:3]) == "a"
    assert cut.finish() == "\ufffd"


def test_control_tokens_are_skipped_and_thinking_is_not(real: Tokenizer) -> None:
    ids = [
        i for t in (CONTROL[3], THINK[0], THINK[1], CONTROL[4]) if (i := real.id_of(t)) is not None
    ]
    assert len(ids) == 4
    assert real.decode(ids) == "<think></think>"
    assert real.decode(ids, skip_special=False) == "<|im_start|><think></think><|im_end|>"
    assert BYTES.decode([10, 18 + 65, 11]) == "A"
    assert BYTES.decode([10, 18 + 65, 11], skip_special=False) == "<|im_start|>A<|im_end|>"


def test_ids_are_those_of_the_file_and_nothing_is_truncated(folder: Path, real: Tokenizer) -> None:
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.no_truncation()
    text = "eBay mL 12345  the naïve cat 你好 " * 9
    assert real.encode(text) == plain.encode(text).ids
    assert len(real.encode(text)) > 5


def test_ids_match_transformers(folder: Path, real: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("hello world", "eBay 10 mL,  two", "<|im_start|>user\nhi<|im_end|>", "你好🙂"):
        assert real.encode(text) == theirs(text)["input_ids"]
        assert real.decode(real.encode(text)) == theirs.decode(
            theirs(text)["input_ids"], skip_special_tokens=True
        )


def test_chat_is_the_template_without_a_second_bos(folder: Path, real: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    assert real.chat_template
    for args in ({}, {"enable_thinking": False}):
        expected = theirs.apply_chat_template(
            talk, add_generation_prompt=True, tokenize=False, **args
        )
        ids = real.apply_chat(talk, template_args=args)
        assert real.decode(ids, skip_special=False) == expected
        assert ids == theirs(expected, add_special_tokens=False)["input_ids"]
    assert "assistant" not in real.decode(real.apply_chat(talk, add_generation_prompt=False))


def test_ends_are_the_union_of_all_files(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0], "bos_token_id": 1}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_start|>"}')
    tokenizer = load_tokenizer(tmp_path, Config(bos=None, eos=(6, 2)))
    assert tokenizer.eos_ids == (6, 2, 0, 3, 4)
    assert tokenizer.bos_id == 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(tmp_path, Config(bos=None, eos=())).eos_ids == (5, 3, 4)
    assert load_tokenizer(tmp_path, Config(bos=None, eos=())).bos_id == 1  # "<s>"
    assert load_tokenizer(None, Config(bos=None, eos=(2, 11))).eos_ids == (2, 11)


def test_models_without_tokenizer_files_read_bytes(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 11}')
    tokenizer = load_tokenizer(tmp_path, Config())
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.eos_ids == (2, 11)
    assert tokenizer.encode("é") == [1, 18 + 0xC3, 18 + 0xA9]
    assert tokenizer.decode([18 + 65, 400, 18 + 66]) == "A<400>B"
    assert tokenizer.id_of("<|im_end|>") == 11
    assert tokenizer.id_of("A") == 18 + 65
    assert tokenizer.id_of("AB") is None
    assert not tokenizer.chat_template
    assert len(set(SPECIALS)) == 18


def test_byte_fallback_files_stream_too(tmp_path: Path) -> None:
    """Not a format of this family: its decoder may rewrite what went before."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)} | {"▁hi": 257, "▁": 258}
    inner = Inner(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path, None, ())
    ids = [257, *(1 + b for b in "🙂".encode()), 257]
    assert "".join(streamed(tokenizer, ids, list(range(9)), True)) == " hi🙂 hi"
    broken = [1 + 0xA8, 258, 258, 1 + 0x1E, 1 + 0x2E, 1 + 0xFB, 1 + 0xA5, 1 + 0x70]
    streamed(tokenizer, broken, list(range(9)), True)  # no promise but that it ends


# stop strings


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, spelled out: grow the text by one character until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


SHORT = st.text("ab\n🙂", max_size=24)


@given(
    text=SHORT,
    stops=st.lists(st.text("ab\n🙂", min_size=1, max_size=5), max_size=3),
    cuts=CUTS,
    include=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_streamed_text_is_the_whole_cut_at_the_first_stop(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    stop = StopStrings(stops, include)
    ends = sorted({min(c, len(text)) for c in cuts} | {len(text)})
    given_out = ""
    for a, b in zip([0, *ends], ends):
        given_out += stop.push(text[a:b])
        expected, found = cut(text[:b], stops, include)
        assert stop.stopped == found, "a stop is reported with the text that completes it"
        # never past the cut, and everything but what may still become a stop string
        assert expected.startswith(given_out)
        held = expected[len(given_out) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)
    assert given_out + stop.finish() == cut(text, stops, include)[0]


@given(text=SHORT, stop=st.text("ab\n🙂", min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_stop_strings_across_token_borders(text: str, stop: str) -> None:
    """Tokens that are single bytes: a stop string's characters are split over several."""
    stops, stream = StopStrings([stop]), BYTES.stream()
    out = ""
    for token in BYTES.encode(text, add_special=False):
        out += stops.push(stream.push([token]))
        if stops.stopped:
            break
    if not stops.stopped:
        out += stops.push(stream.finish())
    out += stops.finish()
    at = text.find(stop)
    assert out == (text if at < 0 else text[:at])


def test_nothing_comes_after_the_stop() -> None:
    stop = StopStrings(["END"])
    assert stop.push("one E") == "one "
    assert stop.push("Nx") == "ENx"
    assert stop.push("two END three") == "two "
    assert stop.stopped == "END"
    assert stop.push("more") == ""
    assert stop.finish() == ""


# what goes wrong


def bad_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')


def bad_config(folder: Path) -> None:
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[1]")


def other_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')


def sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"\n")


def bad_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')


def negative_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": -1}')


def bad_temperature(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')


def bad_top_k(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": 1.5}')


@pytest.mark.parametrize(
    "make,error,words",
    [
        (bad_json, ConfigError, ["tokenizer.json", "cannot be read", "Copy it anew"]),
        (bad_config, ConfigError, ["tokenizer_config.json", "list", "not an object"]),
        (other_tokenizer, UnsupportedError, ["no tokenizer.json", "save_pretrained"]),
        (sentencepiece, UnsupportedError, ["tokenizer.model", "no tokenizer.json"]),
        (bad_eos, ConfigError, ["eos_token_id", "['</s>']", "token id"]),
        (negative_eos, ConfigError, ["eos_token_id", "-1"]),
        (bad_temperature, ConfigError, ["temperature", "'hot'", "a number"]),
        (bad_top_k, ConfigError, ["top_k", "1.5", "an integer"]),
    ],
)
def test_bad_files(
    tmp_path: Path, make: object, error: type[NemotritonError], words: list[str]
) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(error) as caught:
        load_tokenizer(tmp_path, Config())
    for word in words:
        assert word in str(caught.value)


def test_bad_texts(real: Tokenizer) -> None:
    for tokenizer in (real, BYTES):
        with pytest.raises(RequestError, match=r"character 1 of the text.*surrogate"):
            tokenizer.encode("a\ud800b")
    with pytest.raises(RequestError, match=r"byte 200 is token 218, but the model has 97 tokens"):
        ByteTokenizer(97, None, ()).encode("\u0200")
    with pytest.raises(RequestError, match="a stop string is empty"):
        StopStrings(["a", ""])


def test_bad_conversations(real: Tokenizer, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError, match=r"no chat template.*--raw"):
        BYTES.apply_chat(talk)
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(tmp_path, Config()).apply_chat(talk)
    with pytest.raises(RequestError, match="without messages"):
        real.apply_chat([])
    with pytest.raises(RequestError, match=r"message 0 is .*give it a role"):
        real.apply_chat([{"content": "hello"}])
    with pytest.raises(RequestError, match=r"chat template refused.*tokenize"):
        real.apply_chat(talk, template_args={"tokenize": True})
    write_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refused the conversation: roles must alternate"):
        load_tokenizer(tmp_path, Config()).apply_chat(talk)


def test_generation_config(tmp_path: Path) -> None:
    assert GenerationConfig.read(None) == GenerationConfig()
    assert GenerationConfig.read(tmp_path) == GenerationConfig()
    said = {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "eos_token_id": [2, 11]}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    read = GenerationConfig.read(tmp_path)
    assert (read.temperature, read.top_p, read.top_k, read.eos_ids) == (0.6, 0.95, None, (2, 11))
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 1.0}')
    assert GenerationConfig.read(tmp_path).temperature == 0.0
