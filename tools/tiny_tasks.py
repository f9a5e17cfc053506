"""Three tasks with exact answers that need what was read long ago: recall, copy, brackets.

    recall: self73 print05 ... | print05 self73     a word's two digits, named anywhere before
    copy: print self ... | print self ...           the words again, in order
    depth: ( ( ) ( =2 ) =1 ...                      how many brackets are open, 0 to 9

Every word, sign and digit is one token, so an instance of any length is a row of ids. Words are the
vocabulary's own: the first 512 tokens that are a space and lower-case letters. Rows for training
are made in numpy, many at once; `examples` makes prompts with their answers for a test.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TASKS = ("recall", "copy", "depth")
WORDS = 512
DEEPEST = 9
_SAMPLE_WORDS = (
    "self",
    "print",
    "name",
    "value",
    "return",
    "the",
    "with",
    "from",
    "object",
    "line",
)


@dataclass(frozen=True)
class Symbols:
    """The ids that tasks are written with."""

    words: list[int]
    digits: list[int]
    heads: dict[str, list[int]]  # "recall:" and so on
    bar: int
    equals: int
    opening: int
    closing: int
    tail: list[int]  # a line's end and the document's

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Symbols:
        """Read off a tokenizer; AssertionError where a symbol is not one token."""
        vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        words = [i for t, i in vocab if len(t) > 2 and t[0] == "Ġ" and _plain(t[1:])][:WORDS]
        assert len(words) >= 340, f"{len(words)} words are too few for long recall"
        heads = {t: tokenizer.encode(f"{t}:", add_special_tokens=False).ids for t in TASKS}
        signs = [_single(tokenizer, sign) for sign in (" |", " =", " (", " )")]
        digits = [_single(tokenizer, str(d)) for d in range(10)]
        tail = [_single(tokenizer, "\n"), tokenizer.token_to_id("</s>")]
        return cls(words, digits, heads, *signs, tail)

    def write(self, path: Path) -> None:
        """For machines without the tokenizers library."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Symbols:
        return cls(**json.loads(path.read_text()))


def _plain(text: str) -> bool:
    return text.isascii() and text.isalpha() and text.islower()


def _single(tokenizer: Tokenizer, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == 1, f"{text!r} is {len(ids)} tokens"
    return int(ids[0])


def task_text(task: str, rng: random.Random) -> str:
    """A sample of a task as text, for the tokenizer to learn its signs from."""
    if task == "depth":
        return "depth:" + "".join(rng.choice([" (", " )", " =3"]) for _ in range(60)) + "\n"
    words = [rng.choice(_SAMPLE_WORDS) for _ in range(20)]
    if task == "copy":
        return f"copy: {' '.join(words)} | {' '.join(words)}\n"
    return f"recall: {' '.join(f'{w}{rng.randrange(100):02}' for w in words)} | {words[0]}\n"


# Bodies: [rows, n] ids, and which of them are answers, each row's own draw.
Body = tuple[np.ndarray, np.ndarray]


def recall_body(s: Symbols, rng: np.random.Generator, rows: int, pairs: int, asked: int) -> Body:
    """`pairs` words with two digits each, then `asked` of them again, in another order."""
    order = rng.random((rows, len(s.words))).argsort(1)[:, :pairs]
    values = rng.integers(0, 10, (rows, pairs, 2))
    told = np.concatenate(
        [np.array(s.words)[order][..., None], np.array(s.digits)[values]], 2
    )  # [rows, pairs, 3]
    picked = rng.random((rows, pairs)).argsort(1)[:, :asked]
    again = np.take_along_axis(told, picked[..., None], 1)
    bar = np.full((rows, 1), s.bar)
    ids = np.concatenate([told.reshape(rows, -1), bar, again.reshape(rows, -1)], 1)
    answers = np.zeros(ids.shape, bool)
    answers[:, 3 * pairs + 1 :] = np.tile([False, True, True], asked)
    return ids, answers


def copy_body(s: Symbols, rng: np.random.Generator, rows: int, length: int) -> Body:
    """`length` words and the same again."""
    words = np.array(s.words)[rng.integers(0, len(s.words), (rows, length))]
    ids = np.concatenate([words, np.full((rows, 1), s.bar), words], 1)
    answers = np.zeros(ids.shape, bool)
    answers[:, length + 1 :] = True
    return ids, answers


def depth_body(s: Symbols, rng: np.random.Generator, rows: int, length: int, gap: int) -> Body:
    """A walk of brackets, `length` tokens in all, with a depth told about every `gap` brackets."""
    ids = np.empty((rows, length), np.int64)
    answers = np.zeros((rows, length), bool)
    depth = np.zeros(rows, np.int64)
    telling = np.zeros(rows, bool)  # the digit comes now
    turn = rng.random((rows, length))
    tell = rng.random((rows, length)) < 1 / (gap + 1)
    tell[:, -2] = True  # the last answer always comes
    for t in range(length):
        up = (turn[:, t] < 0.5) & (depth < DEEPEST) | (depth == 0)
        asked = tell[:, t] & ~telling & (t < length - 1)
        bracket = np.where(up, s.opening, s.closing)
        ids[:, t] = np.where(telling, np.array(s.digits)[depth], np.where(asked, s.equals, bracket))
        answers[:, t] = telling
        depth += np.where(telling | asked, 0, np.where(up, 1, -1))
        telling = asked
    return ids, answers


def rows_of(
    s: Symbols, task: str, rng: np.random.Generator, rows: int, width: int, longest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [rows, width] full of instances, and what a token's loss is worth.

    longest in (0, 1]: how long an instance may be, as a share of half the row's width."""
    ids = np.full((rows, width), s.tail[1], np.int64)
    weights = np.zeros((rows, width), np.float32)
    start = 0
    while True:
        head = s.heads[task]
        room = width - start - len(head) - len(s.tail)
        body, answers = _body(s, task, rng, rows, room, longest * width / 2)
        if body is None:
            return ids, weights
        end = start + len(head) + body.shape[1]
        ids[:, start : start + len(head)] = head
        ids[:, start + len(head) : end] = body
        ids[:, end : end + len(s.tail)] = s.tail
        weights[:, start + len(head) : end] = answers
        start = end + len(s.tail)


def _body(
    s: Symbols, task: str, rng: np.random.Generator, rows: int, room: int, most: float
) -> tuple[np.ndarray | None, np.ndarray]:
    """An instance of a drawn length that fits into `room` tokens; None where none does."""
    told = int(np.exp(rng.uniform(np.log(12), np.log(max(13, most)))))  # tokens before the answers
    if task == "recall":
        pairs = min(told // 3, len(s.words))
        asked = max(2, min(pairs, 4 + pairs // 2))
        if 3 * (pairs + asked) + 1 > room:
            pairs = (room - 1) // 6
            asked = pairs
        if pairs < 2:
            return None, ids_none()
        return recall_body(s, rng, rows, pairs, asked)
    if task == "copy":
        length = min(told, (room - 1) // 2)
        return (None, ids_none()) if length < 4 else copy_body(s, rng, rows, length)
    length = min(4 * told, room)
    gap = int(np.exp(rng.uniform(np.log(2), np.log(max(3, most / 2)))))
    return (None, ids_none()) if length < 8 else depth_body(s, rng, rows, length, gap)


def ids_none() -> np.ndarray:
    """No answers."""
    return np.zeros((0, 0), bool)


def examples(
    s: Symbols, task: str, tokens: int, count: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts of about `tokens` ids and the ids that must follow.

    recall: one word is asked for, two digits. copy: the next eight words after the first eighth of
    the copy. depth: `tokens` brackets without any answer between, then the depth."""
    rng = np.random.default_rng(seed)
    makers: dict[str, Callable[[], tuple[np.ndarray, int, int]]] = {
        "recall": lambda: _one(recall_body(s, rng, 1, min(tokens // 3, len(s.words)), 1), 2, 2),
        "copy": lambda: _one(copy_body(s, rng, 1, tokens // 2), tokens // 2 * 7 // 8, 8),
        "depth": lambda: _one(depth_body(s, rng, 1, tokens + 2, 1 << 30), 1, 1),
    }
    found = []
    for _ in range(count):
        body, back, kept = makers[task]()
        ids = [*s.heads[task], *body.tolist()]
        cut = len(ids) - back
        found.append((ids[:cut], ids[cut : cut + kept]))
    return found


def _one(body: Body, back: int, kept: int) -> tuple[np.ndarray, int, int]:
    return body[0][0], back, kept
