"""What the console writes: where, in which words, and what a terminal is spared."""

import pytest

from nemotriton import console as console_module
from nemotriton.console import Console, bytes_text, printable


def test_sizes() -> None:
    found = [bytes_text(n) for n in (0, 1536, 5 * 2**20, 140 * 2**30, 2**40)]
    assert found == ["0 KiB", "1.5 KiB", "5 MiB", "140 GiB", "1024 GiB"]


def test_terminals_get_no_control_characters() -> None:
    assert printable("a\tb\n🙂é") == "a\tb\n🙂é"
    assert printable("\x1b[2J\r\x00\x7f\x9b") == "␛[2J␍␀␡\ufffd"


def test_all_is_on_stderr_and_brackets_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.line("model", "[/INST] [bold]tiny[/bold]")
    console.memory(3 * 2**30, {"weights": 2**30, "free": 2**31}, "8 requests")
    console.warn("w" * 200)
    console.error("e")
    with console.loading() as progress, console.counting(3) as count:
        progress(1, 2, "norm_f.weight")
        count()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "model    [/INST] [bold]tiny[/bold]",
        "memory   3 GiB: weights 1 GiB · free 2 GiB · room for 8 requests",
        "warning: " + "w" * 200,
        "error: e",
    ]


def test_quiet_leaves_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    console.line("model", "tiny")
    console.say("a remark")
    console.memory(1, {}, "")
    console.logprobs([1], [None])
    console.warn("careful")
    console.error("no")
    assert capsys.readouterr() == ("", "warning: careful\nerror: no\n")


def test_a_log_is_told_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    with Console().loading() as progress, Console().counting(5, "layers") as count:
        for second in (4, 9, 11, 15, 30):
            clock[0] = float(second)
            count()
            progress(second * 2**30, 60 * 2**30, "norm_f.weight")
    assert capsys.readouterr().err.splitlines() == [
        "layers   3 of 5",
        "weights  11 GiB of 60 GiB",
        "layers   5 of 5",
        "weights  30 GiB of 60 GiB",
    ]
