"""JSON schemas and regular expressions as masks over tokens: the adapter to xgrammar (extra json).

A mask is a row of bits, int32, ceil(V / 32) words, token t in bit t % 32 of word t // 32. Nothing
of xgrammar is seen outside this file.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemotriton.errors import RequestError, UnsupportedError, require

_CONTROL = re.compile(rb"[^\n\r -\xff]")
_SPACES = 16  # white space a JSON text may have in one place; a model could go on with it for ever

_KEPT = 256 * 2**20  # bytes of compiled grammars


def check_grammar(json_schema: str | Mapping[str, Any] | None, regex: str | None) -> None:
    """RequestError where the schema or expression is none, UnsupportedError without xgrammar."""
    _parse(_library(), json_schema, regex)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, and the tokens that no grammar of its vocabulary allows."""

    compiled: Any
    wordless: frozenset[int]


class Grammars:
    """Compiles grammars for one vocabulary; what was compiled is kept.

    vocabulary: the bytes of each id, b"" for ids that are no text. size: rows of the model's head.
    stop_ids: tokens that may follow where the grammar is complete, and nowhere else.
    """

    def __init__(self, vocabulary: Sequence[bytes], size: int, stop_ids: Sequence[int]) -> None:
        require(
            bool(stop_ids),
            "a JSON schema or regex needs an end token, and this checkpoint names none in its "
            "vocabulary: do without it.",
            RequestError,
        )
        self._words = [*vocabulary[:size], *[b""] * (size - len(vocabulary))]
        self._stop_ids = list(stop_ids)
        self._compilers: dict[bool, tuple[Any, frozenset[int]]] = {}

    def compile(self, json_schema: str | Mapping[str, Any] | None, regex: str | None) -> Grammar:
        """What `Matcher` takes; RequestError as in `check_grammar`."""
        grammar = _parse(_library(), json_schema, regex)
        is_json = regex is None
        if is_json not in self._compilers:
            self._compilers[is_json] = self._compiler(is_json)
        compiler, wordless = self._compilers[is_json]
        return Grammar(compiler.compile_grammar(grammar), wordless)

    def _compiler(self, is_json: bool) -> tuple[Any, frozenset[int]]:
        # xgrammar lets strings of limited length hold control characters, which JSON forbids
        words = [b"" if is_json and _CONTROL.search(word) else word for word in self._words]
        info = _library().TokenizerInfo(words, stop_token_ids=self._stop_ids)
        wordless = {i for i, word in enumerate(words) if not word} - set(self._stop_ids)
        compiler = _library().GrammarCompiler(info, cache_limit_bytes=_KEPT)
        return compiler, frozenset(wordless)


class Matcher:
    """Where one text stands in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._inner = _library().GrammarMatcher(grammar.compiled)
        self._wordless = grammar.wordless

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and no change, where the grammar forbids it."""
        if token in self._wordless or self._inner.is_terminated():
            return False
        return bool(self._inner.accept_token(token))

    def accept_text(self, text: str) -> bool:
        """Go on by text, as one step."""
        return bool(self._inner.accept_string(text))

    def back(self, steps: int) -> None:
        """Take the last steps back."""
        if steps:
            self._inner.rollback(steps)

    def mask(self, bits: Any) -> bool:
        """Write a row of bits, a contiguous int32 tensor; False where every token is allowed."""
        ended = self._inner.is_terminated()
        return not ended and bool(self._inner.fill_next_token_bitmask(bits[None], 0))


def _parse(library: Any, json_schema: str | Mapping[str, Any] | None, regex: str | None) -> Any:
    try:
        if regex is not None:
            return library.Grammar.from_regex(regex)
        text = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
        return library.Grammar.from_json_schema(text, max_whitespace_cnt=_SPACES)
    except (RuntimeError, TypeError, ValueError) as problem:
        name, value = ("regex", regex) if regex is not None else ("json_schema", json_schema)
        reason = re.sub(r"^\[[^]]*\] \S+:\d+: ", "", str(problem).strip())  # clock, C++ line
        raise RequestError(f"{name}={value!r} is not possible: {reason.strip()}") from None


def _library() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise UnsupportedError(
            "a JSON schema or regex needs xgrammar: pip install -e '.[json]' in the project's "
            "folder."
        ) from None
    return xgrammar
