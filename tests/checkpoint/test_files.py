"""Damaged files, incomplete folders and wrong paths, each by its message."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotriton.errors import CheckpointError
from nemotriton.model.checkpoint import (
    find_checkpoint,
    make_plan,
    open_source,
)
from nemotriton.model.synth import write_checkpoint
from tests.checkpoint.files import (
    CONFIG,
    filled,
    loaded,
    planned,
    same,
)


def header_of(file: Path) -> tuple[dict, bytes]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_header(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def edited(change: Callable[[dict], object]) -> Callable[[Path], bytes]:
    def edit(file: Path) -> bytes:
        header, data = header_of(file)
        change(header)
        return with_header(header, data)

    return edit


NORM = "backbone.norm_f.weight"
BAD_FILES: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "empty": (lambda f: b"", r"\(0 bytes\) is not a safetensors file\. Download the file again"),
    "short": (lambda f: b"abc", r"\(3 bytes\) is not a safetensors file"),
    "pickle": (lambda f: b"\x80\x02}q\x00(X\xff\xff\xff" * 9, "is not a safetensors file"),
    "lfs pointer": (
        lambda f: b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
        r"Git LFS pointer of \d+ bytes, not the weights\. Run git lfs pull",
    ),
    "cut in the header": (lambda f: f.read_bytes()[:100], "truncated inside its header: 100 bytes"),
    "cut in the data": (
        lambda f: f.read_bytes()[:-1],
        r"model\.safetensors is truncated: \d+ bytes, \d+ were expected",
    ),
    "too long": (lambda f: f.read_bytes() + b"x", "longer than its header says"),
    "no json": (lambda f: with_header(b"{]", b""), "has a corrupt header"),
    "no object": (lambda f: with_header([1], b""), "no JSON object"),
    "no dtype": (edited(lambda h: h[NORM].pop("dtype")), "entry 'backbone.norm_f.weight' is"),
    "no offsets": (edited(lambda h: h[NORM].update(data_offsets=[0])), "entry 'backbone.norm_f"),
    "shape against bytes": (
        edited(lambda h: h[NORM].update(shape=[31])),
        r"backbone\.norm_f\.weight is BF16 \[31\] in 64 bytes",
    ),
    "hole": (
        edited(lambda h: h.pop(NORM)),
        r"has a corrupt header: the data of .* begins at byte \d+, \d+ was expected",
    ),
    "overlap": (
        edited(lambda h: h.update(again=h[NORM])),
        r"the data of again begins at byte|the data of backbone.norm_f.weight begins at byte",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_files_are_named(plain: Path, tmp_path: Path, name: str) -> None:
    damage, message = BAD_FILES[name]
    path = shutil.copytree(plain, tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(damage(file))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_source(path)
    assert str(file) in str(caught.value)


def test_an_unknown_dtype_is_a_wrong_type(plain: Path, tmp_path: Path) -> None:
    path = shutil.copytree(plain, tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(edited(lambda h: h[NORM].update(dtype="F4"))(file))
    with pytest.raises(CheckpointError, match=r"backbone\.norm_f\.weight is F4, not BF16"):
        planned(path)


def test_a_file_that_grows_after_its_header_was_read(plain: Path, tmp_path: Path) -> None:
    path = shutil.copytree(plain, tmp_path / "m")
    source, plan = planned(path)
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(
        CheckpointError, match=r"has \d+ bytes, but had \d+ when its header was read"
    ):
        filled(source, plan)


# ----------------------------------------------------------------------------------------- folders
@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    write_checkpoint(CONFIG, path, shard_bytes=20_000)
    return path


def test_a_missing_shard_is_named(sharded: Path) -> None:
    files = sorted(sharded.glob("*.safetensors"))
    files[1].unlink()
    message = rf"1 of {len(files)} files named in model.safetensors.index.json are missing .*: "
    with pytest.raises(CheckpointError, match=message + re.escape(files[1].name)):
        open_source(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    last = sorted(sharded.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=re.escape(f"{last} is truncated: ")):
        open_source(sharded)


def test_an_index_of_other_files(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    files = sorted(set(data["weight_map"].values()))
    data["weight_map"]["lm_head.weight"] = files[0]
    data["weight_map"]["no.such.tensor"] = files[0]
    index.write_text(json.dumps(data))
    message = (
        "2 tensors are not in the file that .* names: lm_head.weight, no.such.tensor. The index"
    )
    with pytest.raises(CheckpointError, match=message):
        open_source(sharded)
    del data["weight_map"]["lm_head.weight"], data["weight_map"]["no.such.tensor"]
    index.write_text(json.dumps(data))
    source = open_source(sharded)
    assert source.notes == ("1 tensors are in the files but not in model.safetensors.index.json",)
    assert "lm_head.weight" in make_plan(source, CONFIG).expected  # and it is loaded all the same


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', "[]"])
def test_a_broken_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        open_source(sharded)


def test_shards_without_an_index(sharded: Path, plain: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    same(loaded(sharded), loaded(plain))
    files = sorted(sharded.glob("*.safetensors"))
    files[2].unlink()
    with pytest.raises(
        CheckpointError, match=rf"has {len(files) - 1} of {len(files)} files; missing: 3"
    ):
        open_source(sharded)
    files[0].rename(sharded / "other.safetensors")
    with pytest.raises(
        CheckpointError, match=r"no model\.safetensors\.index\.json to say which belong"
    ):
        open_source(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    file = sharded / data["weight_map"]["backbone.embeddings.weight"]
    other = next(f for f in sorted(sharded.glob("*.safetensors")) if f != file)
    save_file(load_file(other) | {NORM: torch.ones(32)}, other)
    if data["weight_map"][NORM] == other.name:
        save_file(load_file(file) | {NORM: torch.ones(32)}, file)
    with pytest.raises(CheckpointError, match=f"1 tensor is given twice: {NORM}"):
        planned(sharded)


def test_other_files_in_the_folder_are_noted(plain: Path, tmp_path: Path) -> None:
    path = shutil.copytree(plain, tmp_path / "m")
    save_file({"x": torch.ones(1)}, path / "consolidated.safetensors")
    [note] = planned(path)[1].notes
    assert note == "1 safetensors files are not part of it: consolidated.safetensors"


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file in .* Download the weights"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Only pytorch_model\.bin there: convert it"):
        open_source(tmp_path)


# ----------------------------------------------------------------------------------------- finding
def test_wrong_paths(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "snapshot-1")
    message = f"no config.json in {tmp_path}. Did you mean {tmp_path}/snapshot-1? For a hub id use"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        find_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no directory /no/such/dir. For a hub id use owner/"
    ):
        find_checkpoint("/no/such/dir")
    with pytest.raises(
        CheckpointError, match=r"is a file; give the directory that holds config\.json"
    ):
        find_checkpoint(plain / "model.safetensors")


def test_hub_ids(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls = []

    def fetch(model: str, **options: object) -> str:
        calls.append((model, options["revision"], options["local_files_only"]))
        return str(plain)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_checkpoint("owner/name", revision="abc", offline=True) == plain
    assert calls == [("owner/name", "abc", True)]

    def missing(model: str, **options: object) -> str:
        raise LocalEntryNotFoundError("nothing there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    with pytest.raises(
        CheckpointError, match="owner/name is not in the local cache, and --offline"
    ):
        find_checkpoint("owner/name", offline=True)
    message = "owner/name at revision v2 is not in the local cache, and the hub cannot be reached"
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint("owner/name", revision="v2")

    def unreachable(model: str, **options: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        CheckpointError, match=r"could not be downloaded \(OSError: disk full\)\. Try"
    ):
        find_checkpoint("owner/name")
