"""The text that the embedded model learns: CPython's library and documentation, as token ids.

    python -m tools.tiny_text --stdlib LIB --docs SOURCES --out build/tiny

LIB is a CPython's `lib/python3.12` (default: the running one's), SOURCES the reStructuredText of
its documentation (`_sources` of Debian's python3-doc, or `Doc/` of CPython's own tree). Both are
under the PSF licence. Left out: site-packages, character tables, files that are mostly data. One
file in fifty, by a hash of its name, is held out. Questions about documented functions, answered by
the first paragraph of their docstrings, stand in the family's chat format.

Writes tokenizer.json, symbols.json (the ids that tasks are written with), text.npz (uint16 ids of
the parts train, heldout_code and heldout_docs, every document ended by `</s>`) and text.json (what
was read, with digests).
"""

import argparse
import ast
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemotriton.text.tokens import SPECIALS
from tools.tiny_tasks import TASKS, Symbols, task_text

VOCAB = 2048
HELD_OUT = 50  # one file in so many
LARGEST = 300_000  # bytes; larger files of the library are tables
END = "</s>"
# A word with the sign before it; one digit; signs; line ends; spaces, the last of them apart.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TABLES = ("encodings/", "pydoc_data/", "lib2to3/tests/data/", "test/test_importlib/resources/")
_QUESTIONS = (
    "What does {} do?",
    "What is {} for?",
    "Explain {}.",
    "Tell me about {} of Python's standard library.",
)


def code_files(stdlib: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the library's modules and tests, in order of their names."""
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        foreign = name.startswith("site-packages/") or "_vendor" in name or "_bundled" in name
        if foreign or name.startswith(_TABLES) or path.stat().st_size > LARGEST:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield name, text


def doc_files(docs: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the documentation's pages."""
    for path in sorted([*docs.rglob("*.rst"), *docs.rglob("*.rst.txt")]):
        yield path.relative_to(docs).as_posix(), path.read_text(encoding="utf-8")


def chats(name: str, text: str, rng: random.Random) -> Iterator[str]:
    """Questions and answers about the documented functions and classes of a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        answer = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        if node.name.startswith("_") or not 20 <= len(answer) <= 400:
            continue
        subject = f"{module}.{node.name}"
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        thought = f"{subject} is a {kind}.\n" if rng.random() < 0.5 else None
        opened = "<think></think>" if thought is None else f"<think>\n{thought}</think>\n"
        yield (
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n"
            f"{rng.choice(_QUESTIONS).format(subject)}<|im_end|>\n<|im_start|>assistant\n"
            f"{opened}{answer}<|im_end|>\n"
        )


def held_out(name: str) -> bool:
    """Whether a file is kept from training."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) % HELD_OUT == 0


def train_tokenizer(texts: list[str], vocab: int = VOCAB) -> Tokenizer:
    """Byte-level BPE with the family's control tokens at the family's ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    data = json.loads(tokenizer.to_str())
    shown = SPECIALS.index("<think>")  # from here on they stay in a decoded text
    for token in data["added_tokens"]:
        token["special"] = token["id"] < shown
    return Tokenizer.from_str(json.dumps(data))


def ids_of(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """All documents behind each other."""
    end = tokenizer.token_to_id(END)
    parts = []
    for encoded in tokenizer.encode_batch(documents, add_special_tokens=False):
        parts.append(np.array([*encoded.ids, end], dtype=np.uint16))
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("build/tiny"))
    given = parser.parse_args()
    rng = random.Random(0)
    code, docs = list(code_files(given.stdlib)), list(doc_files(given.docs))
    talk = [chat for name, text in code if not held_out(name) for chat in chats(name, text, rng)]
    parts = {
        "train": [text for name, text in code + docs if not held_out(name)] + talk,
        "heldout_code": [text for name, text in code if held_out(name)],
        "heldout_docs": [text for name, text in docs if held_out(name)],
    }
    rng.shuffle(parts["train"])
    tasks = [task_text(task, rng) for task in TASKS for _ in range(300)]
    tokenizer = train_tokenizer(parts["train"] + tasks)
    given.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(given.out / "tokenizer.json"))
    Symbols.of(tokenizer).write(given.out / "symbols.json")
    report: dict[str, object] = {
        "files": {"code": len(code), "docs": len(docs)},
        "chats": len(talk),
    }
    arrays = {name: ids_of(tokenizer, texts) for name, texts in parts.items()}
    np.savez_compressed(given.out / "text.npz", **arrays)
    for name, texts in parts.items():
        size = sum(len(text.encode()) for text in texts)
        digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()
        report[name] = {"tokens": len(arrays[name]), "bytes": size, "blake2b": digest}
    (given.out / "text.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
