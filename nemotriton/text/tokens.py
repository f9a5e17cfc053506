"""Text to token ids and back: tokenizer files, bytes, streaming that never breaks a character.

`tokenizer.json` is read by the tokenizers library as it stands, so ids are the file's own; the
chat template is rendered by transformers, the library it was written for, imported on first use.
"""

import abc
import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from nemotriton.errors import ConfigError, RequestError, UnsupportedError, require
from nemotriton.text.generation_config import GenerationConfig, read_json
from nemotriton.text.template import FAMILY, read_template, refusals, render, require_messages

if TYPE_CHECKING:
    import tokenizers

BYTE_CLASS = "NemotritonByteTokenizer"  # `tokenizer_class` of a model that reads plain bytes
# The family's control tokens at the family's ids; the 256 bytes follow. As in the family's files,
# those from <think> on are not special: they stay in a decoded text.
SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
_FIRST_SHOWN = SPECIALS.index("<think>")


class VocabularyConfig(Protocol):
    """What of a ModelConfig matters here."""

    @property
    def vocab(self) -> int: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def eos(self) -> tuple[int, ...]: ...


class TextStream(abc.ABC):
    """Token ids in, text out as soon as it is certain; all parts joined equal the whole decoded."""

    @abc.abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """The text these ids complete; what may be half a character waits for the next call."""

    @abc.abstractmethod
    def finish(self) -> str:
        """What still waits, with U+FFFD for bytes that never became a character."""


class Tokenizer(abc.ABC):
    """Text to ids and back, and the ids a text begins and ends with.

    bos_id, eos_ids: the union of what config.json, generation_config.json and the tokenizer's files
    name, config.json's first. vocab_size: ids this tokenizer knows, not rows of the model.
    chat_template: the template's text, None where there is none. description: one line for the eye.
    """

    vocab_size: int
    description: str
    chat_template: str | None = None

    def __init__(self, bos_id: int | None, eos_ids: Iterable[int]) -> None:
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))

    @abc.abstractmethod
    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of `text`; `add_special` adds what the tokenizer puts round a bare text (a bos)."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no character become U+FFFD."""

    @abc.abstractmethod
    def stream(self, skip_special: bool = True) -> TextStream:
        """A decoder for one completion."""

    @abc.abstractmethod
    def id_of(self, token: str) -> int | None:
        """The id of one token by its text, None where there is none."""

    @abc.abstractmethod
    def vocabulary(self) -> list[bytes]:
        """The bytes of every id, b"" for control tokens; UnsupportedError where they have none."""

    def encode_control(self, text: str) -> list[int]:
        """Ids of a text whose control tokens are meant as such, with nothing put round it."""
        return self.encode(text, add_special=False)

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_args: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a conversation in the checkpoint's own format, ready for the model's answer.

        messages: `{"role": ..., "content": ...}` in order. template_args: the template's own
        variables, such as enable_thinking. RequestError where there is no template or it refuses.
        """
        raise RequestError(f"{self.description}: no chat template. Give a plain prompt (--raw).")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, without the truncation and padding some files ask for."""

    def __init__(self, directory: Path, bos_id: int | None, eos_ids: Iterable[int]) -> None:
        import tokenizers

        path = directory / "tokenizer.json"
        try:
            self._inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as problem:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read: {problem}. Copy it anew.") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        self._directory = directory
        self._template: Any = None
        declared = read_json(directory, "tokenizer_config.json")
        self.chat_template = read_template(directory)
        self.vocab_size = self._inner.get_vocab_size()
        self.description = f"tokenizer.json, {self.vocab_size} tokens"
        named = [read_json(directory, "special_tokens_map.json"), declared]
        own_bos, own_eos = (
            [i for d in named if (i := self._named(d, key)) is not None]
            for key in ("bos_token", "eos_token")
        )
        first = bos_id if bos_id is not None else next(iter(own_bos), None)
        super().__init__(first, (*eos_ids, *own_eos))

    def _named(self, data: dict[str, Any], key: str) -> int | None:
        """The id of a token given as text or as a dictionary with its `content`."""
        token = data.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        return self._inner.token_to_id(text) if isinstance(text, str) else None

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        _require_unicode(text)
        return list(self._inner.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=skip_special))

    def stream(self, skip_special: bool = True) -> TextStream:
        return _JsonStream(self._inner, skip_special)

    def id_of(self, token: str) -> int | None:
        found: int | None = self._inner.token_to_id(token)
        return found

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_args: Mapping[str, object] | None = None,
    ) -> list[int]:
        if self.chat_template is None:
            return super().apply_chat(messages, add_generation_prompt, template_args)
        require_messages(messages)
        with refusals():
            text = self._renderer().apply_chat_template(
                [dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **dict(template_args or {}),
            )
        return self.encode(str(text), add_special=False)  # the template writes its own bos

    def vocabulary(self) -> list[bytes]:
        decoder = json.loads(self._inner.to_str()).get("decoder") or {}
        require(
            any(
                part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ()))
            ),
            f"{self.description}: only byte-level tokens are known byte by byte. Do without "
            "--json-schema and --regex.",
        )
        control = self._inner.get_added_tokens_decoder()
        of_letter = _byte_letters()
        tokens = (self._inner.id_to_token(i) or "" for i in range(self.vocab_size))
        return [
            b"" if i in control else bytes(of_letter[c] for c in token if c in of_letter)
            for i, token in enumerate(tokens)
        ]

    def _renderer(self) -> Any:
        if self._template is None:
            from transformers import PreTrainedTokenizerFast

            self._template = PreTrainedTokenizerFast.from_pretrained(
                self._directory, local_files_only=True
            )
        return self._template


class _JsonStream(TextStream):
    """DecodeStream and the text it held back at the end.

    Decoders that rewrite what went before (byte fallback, where a run of bytes is no character)
    make DecodeStream raise: from there on the text waits for `finish`.
    """

    def __init__(self, inner: "tokenizers.Tokenizer", skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._inner = inner
        self._skip = skip_special
        self._stream: Any = DecodeStream(skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        parts: list[str] = []
        for token in ids:
            if self._stream is None:
                break
            try:
                parts.append(self._stream.step(self._inner, token) or "")
            except Exception:  # the library raises bare Exception
                self._stream = None
        text = "".join(parts)
        self._sent += len(text)
        return text

    def finish(self) -> str:
        whole = self._inner.decode(self._ids, skip_special_tokens=self._skip)
        return str(whole[self._sent :])


class ByteTokenizer(Tokenizer):
    """Every byte of UTF-8 is a token: for models without tokenizer files, and the embedded one.

    Ids 0 .. 17 are the family's control tokens, id 18 + b is the byte b. Ids above (a model's
    vocabulary may be larger) decode to their number in angle brackets. A control token is read out
    of a template's text, never out of a plain one.
    """

    def __init__(
        self,
        vocab: int,
        bos_id: int | None,
        eos_ids: Iterable[int],
        chat_template: str | None = None,
    ) -> None:
        super().__init__(bos_id, eos_ids)
        self.chat_template = chat_template
        self.vocab_size = min(vocab, len(SPECIALS) + 256)
        self.description = "bytes, no tokenizer file"

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        _require_unicode(text)
        ids = [len(SPECIALS) + b for b in text.encode()]
        if ids and max(ids) >= self.vocab_size:
            raise RequestError(
                f"byte {max(ids) - len(SPECIALS)} is token {max(ids)}, but the model has "
                f"{self.vocab_size} tokens. Give token ids, or a tokenizer.json beside the weights."
            )
        return [self.bos_id, *ids] if add_special and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        stream = self.stream(skip_special)
        return stream.push(ids) + stream.finish()

    def stream(self, skip_special: bool = True) -> TextStream:
        return _ByteStream(skip_special)

    def id_of(self, token: str) -> int | None:
        if token in SPECIALS and SPECIALS.index(token) < self.vocab_size:
            return SPECIALS.index(token)
        raw = token.encode(errors="replace")
        found = len(SPECIALS) + raw[0] if len(raw) == 1 else self.vocab_size
        return found if found < self.vocab_size else None

    def vocabulary(self) -> list[bytes]:
        every = [b""] * len(SPECIALS) + [bytes([b]) for b in range(256)]
        return every[: self.vocab_size]

    def encode_control(self, text: str) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text)
        return [
            i
            for part in parts
            for i in ([SPECIALS.index(part)] if part in SPECIALS else self.encode(part, False))
        ]

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_args: Mapping[str, object] | None = None,
    ) -> list[int]:
        if self.chat_template is None:
            return super().apply_chat(messages, add_generation_prompt, template_args)
        require_messages(messages)
        args = template_args or {}
        return self.encode_control(
            render(self.chat_template, messages, add_generation_prompt, args)
        )


class _ByteStream(TextStream):
    def __init__(self, skip_special: bool) -> None:
        self._skip = skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token in ids:
            byte = token - len(SPECIALS)
            if 0 <= byte < 256:
                parts.append(self._bytes.decode(bytes([byte])))
            elif token >= _FIRST_SHOWN or not self._skip:
                name = SPECIALS[token] if byte < 0 else f"<{token}>"
                parts.append(self._bytes.decode(b"", final=True) + name)
        return "".join(parts)

    def finish(self) -> str:
        return self._bytes.decode(b"", final=True)


class StopStrings:
    """Cuts a streamed text at the first stop string, wherever token borders fall.

    The first is the one that is complete first; of several complete at once, the longest. Text that
    may still become a stop string waits, and nothing behind the cut is ever given out.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        for stop in stops:
            require(stop != "", "a stop string is empty. Give it characters.", RequestError)
        self._stops = tuple(stops)
        self._include = include
        self._waiting = ""
        self.stopped: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Text that is certain; "" from the stop on."""
        if self.stopped is not None:
            return ""
        whole = self._waiting + text
        end, start, stop = self._first(whole, len(self._waiting))
        if stop:
            self.stopped, self._waiting = stop, ""
            return whole[: end if self._include else start]
        return self._hold(whole)

    def skip(self, text: str) -> str:
        """As `push`, for text in which no stop string ends; one may begin in it."""
        return self._hold(self._waiting + text)

    def _hold(self, whole: str) -> str:
        kept = len(whole) - self._possible(whole)
        self._waiting = whole[kept:]
        return whole[:kept]

    def finish(self) -> str:
        """What waited in vain."""
        rest, self._waiting = self._waiting, ""
        return rest

    def _first(self, whole: str, known: int) -> tuple[int, int, str]:
        """(end, start, stop) of the first stop string; a stop of "" for none.

        The first `known` characters hold no complete one.
        """
        best = (len(whole) + 1, 0, "")
        for stop in self._stops:
            start = whole.find(stop, max(0, known - len(stop) + 1))
            if start >= 0:
                best = min(best, (start + len(stop), start, stop))
        return best

    def _possible(self, whole: str) -> int:
        """Length of the longest end of `whole` that a stop string may begin with."""
        longest = min(len(whole), max(map(len, self._stops), default=1) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(whole[len(whole) - size :]) for stop in self._stops):
                return size
        return 0


def load_tokenizer(directory: Path | str | None, config: VocabularyConfig) -> Tokenizer:
    """The tokenizer beside a checkpoint; bytes where `directory` has none of its files, and where
    there is no directory, as of a preset, bytes and the family's chat template.

    ConfigError where a file is unreadable, UnsupportedError where there are files but no
    `tokenizer.json`.
    """
    where = None if directory is None else Path(directory)
    generation = GenerationConfig.read(where)
    bos = config.bos if config.bos is not None else generation.bos_id
    eos = (*config.eos, *generation.eos_ids)
    if where is not None and (where / "tokenizer.json").is_file():
        return JsonTokenizer(where, bos, eos)
    if where is not None:
        declared = read_json(where, "tokenizer_config.json").get("tokenizer_class", BYTE_CLASS)
        others = [n for n in ("tokenizer.model", "vocab.json") if (where / n).is_file()]
        if declared != BYTE_CLASS or others:
            _no_tokenizer_json(where, others or ["tokenizer_config.json"])
    return ByteTokenizer(config.vocab, bos, eos, read_template(FAMILY if where is None else where))


def _byte_letters() -> dict[str, int]:
    """The byte each letter of a byte-level vocabulary stands for: printable ones for themselves,
    the others, in order, for U+0100 and up (Radford et al. 2019, GPT-2's tokenizer)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def _no_tokenizer_json(directory: Path, others: list[str]) -> NoReturn:
    raise UnsupportedError(
        f"{directory} has {others[0]} but no tokenizer.json. Save one there: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes it."
    )


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RequestError(
            f"character {problem.start} of the text, {text[problem.start]!r}, is half a surrogate "
            "pair and no character. Give valid Unicode."
        ) from None
