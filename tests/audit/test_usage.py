"""Wrong command lines: exit code 2, one message that names value and remedy, nothing on stdout."""

from pathlib import Path

import pytest

from tests.audit.command import invoke


@pytest.mark.parametrize(
    "args,words",
    [
        (["chekpoint", "x"], ["chekpoint", "checkpoint"]),
        (["memory"], ["MODEL is missing", "super-120b"]),
        (["checkpoint", "/no/such/place"], ["no directory /no/such/place", "owner/name"]),
        (["checkpoint", "preset:h-8b"], ["preset:h-8b has no files", "owner/name"]),
        (["checkpoint", "owner/name", "--offline"], ["local cache", "--offline"]),
        (["memory", "super-12b"], ["Did you mean preset:super-120b", "owner/name"]),
        (["memory", "preset:gpt"], ["gpt", "super-120b"]),
        (["memory", "tiny", "--gpu", "h20"], ["--gpu h20", "h200", "GiB"]),
        (["memory", "tiny", "--gpu", "0"], ["--gpu 0", "b200"]),
        (["memory", "tiny", "--memory", "1.5"], ["--memory 1.5", "(0, 1]"]),
        (["memory", "tiny", "--context", "0"], ["--context 0: give a number >= 1"]),
        (["memory", "tiny", "--requests", "0"], ["--requests 0: give a number >= 1"]),
        (["memory", "tiny", "--quant", "int4"], ["'int4'", "nvfp4"]),
        (["memory", "h-8b", "--drafts", "3"], ["no MTP block", "--drafts 0"]),
        (["memory", "tiny", "--kv-dtype", "int8"], ["int8", "auto, bf16, fp8"]),
        (["memory", "tiny", "--state-dtype", "fp8"], ["fp8", "float32"]),
        (["mtp", "--drafts", "0"], ["--drafts 0: give a number >= 1"]),
        (["mtp", "--drafts", "40"], ["--drafts 40", "0 to 32"]),
        (["mtp", "-p", ""], ["--prompt", "empty"]),
        (["mtp", "-f", "/no/file"], ["/no/file cannot be read", "No such file"]),
        (["mtp", "preset:nano-30b"], ["preset:nano-30b has no weights", "--synthetic"]),
        (["mtp", "--impl", "cuda"], ["--impl cuda", "OP=ref"]),
        (["mtp", "-n", "0"], ["--max-tokens 0: give a number >= 1"]),
        (["divergence", "--against", "vllm"], ["--against vllm", "ref or hf"]),
        (["divergence", "--against", "/no/trace.safetensors"], ["trace.safetensors", "no such"]),
        (["divergence", "--tokens", "1"], ["--tokens 1: give a number >= 2"]),
        (["divergence", "--tokens", "8", "--decoded", "8"], ["--decoded 8", "--tokens 8"]),
        (["divergence", "--device", "cpu"], ["on a CPU", "TRITON_INTERPRET=1", "--against hf"]),
        (
            ["divergence", "preset:tiny", "--against", "hf", "--synthetic", "0"],
            ["random weights have none", "--against ref"],
        ),
        (["divergence", "--tokens", "5000"], ["--tokens 5,000", "2,048"]),
        (["parity", "--text", "/no/file"], ["/no/file cannot be read", "No such file"]),
        (["parity", "--trace", "/no/place/trace"], ["/no/place/trace", "another path"]),
        (["parity", "--drafts", "33"], ["33 drafts", "1 .. 32"]),
        (["parity", "--tokens", "1"], ["--tokens 1: give a number >= 2"]),
        (["parity", "owner/name", "--offline"], ["local cache", "--offline"]),
        (["env", "--verbose"], ["--verbose"]),
    ],
)
def test_wrong_options(args: list[str], words: list[str]) -> None:
    code, out, err = invoke(*args)
    assert (code, out) == (2, ""), err
    for word in words:
        assert word in err


def test_a_file_of_blank_lines_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text("\n \n")
    code, _, err = invoke("mtp", "-f", str(tmp_path / "blank"))
    assert code == 2
    assert "holds no text" in err
