"""The texts that an audit runs a model on."""

from pathlib import Path

from nemotriton.commandline import UsageError

_ROUND = 8  # tokens, of which one is usual

DEFAULT_TEXTS = [
    "A hybrid model has three kinds of layer: state space, attention and feed-forward.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30",
    "def square(x):\n    return x * x\n\n\ndef cube(x):\n    return x * x * x\n",
]


def gather(given: list[str] | None, file: Path | None) -> list[str]:
    """Texts of the command line, then those of a file, one a line; UsageError names a bad one."""
    texts = list(given or ())
    if any(not text for text in texts):
        raise UsageError("--prompt: a text is empty; give at least one character.")
    if file is None:
        return texts
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{file} cannot be read: {reason}.") from None
    if not lines:
        raise UsageError(f"{file} holds no text; give one a line.")
    return texts + lines


def most_tokens(texts: list[str]) -> int:
    """No text is more tokens, whatever the tokenizer: one a byte, and what it puts round them."""
    return max(len(text.encode(errors="replace")) for text in texts) + _ROUND
