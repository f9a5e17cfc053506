"""Where a checkpoint is: a directory, or a Hugging Face id fetched into the local cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nemotriton.errors import CheckpointError, nearest
from nemotriton.model.presets import PRESETS
from nemotriton.model.shards import Shard, TensorInfo, read_header

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer*", "*.model", "*.txt")
_SAMPLE = 4096  # bytes
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint directory with the headers of its files; `notes` is for the reader."""

    directory: Path
    shards: tuple[Shard, ...]
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> list[TensorInfo]:
        """All tensors, file by file, in the order of their data."""
        return [info for shard in self.shards for info in shard.tensors]


def find_checkpoint(model: str | Path, revision: str | None = None, offline: bool = False) -> Path:
    """Return the directory of `model`, downloading a Hugging Face id unless `offline`.

    A directory that exists wins over an id of the same spelling; `revision` is a branch, tag or
    commit of the id. Raises CheckpointError if there is no such model, or no config.json in it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _with_config(path)
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json.")
    if str(model).startswith("preset:"):
        raise CheckpointError(f"{model} has no files: give a directory, or a hub id owner/name.")
    if not _HUB_ID.fullmatch(str(model)):
        near = nearest(str(model), PRESETS)
        hint = f" Did you mean preset:{near}, a configuration without files?" if near else ""
        raise CheckpointError(f"no directory {path}.{hint} For a hub id use owner/name.")
    return _with_config(_download(str(model), revision, offline))


def _with_config(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    inside = sorted(p.parent for p in path.glob("*/config.json"))
    hint = f" Did you mean {inside[0]}?" if inside else ""
    raise CheckpointError(f"no config.json in {path.resolve()}.{hint} For a hub id use owner/name.")


def _download(model: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    with hub_errors(model, revision, offline):
        return Path(
            snapshot_download(
                model, revision=revision, local_files_only=offline, allow_patterns=list(_FILES)
            )
        )


@contextlib.contextmanager
def hub_errors(model: str, revision: str | None, offline: bool) -> Iterator[None]:
    """What the hub refuses inside the block becomes a CheckpointError with its remedy."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named = model if revision is None else f"{model} at revision {revision}"
    try:
        yield
    except LocalEntryNotFoundError as error:
        if offline:
            problem = "is not in the local cache, and --offline was asked for"
        else:
            problem = "is not in the local cache, and the hub cannot be reached"
        raise CheckpointError(f"{named} {problem}. Download it first, or connect.") from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{named} is gated. Accept its licence on the hub and log in with hf auth login."
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{named} was not found on the hub ({type(error).__name__}). Check the spelling; there "
            f"is no local directory {model} either."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{named} could not be downloaded ({type(error).__name__}: {error}). Try again; what "
            "is there already is kept."
        ) from error


def fingerprint(source: Source) -> str:
    """A few letters that tell checkpoints apart: of their headers, and of samples of their data."""
    digest = hashlib.blake2b(digest_size=6)
    for shard in source.shards:
        for info in shard.tensors:
            digest.update(f"{info.name} {info.dtype} {info.shape} {info.begin}".encode())
        with shard.path.open("rb") as file:
            for eighth in range(8):
                file.seek(shard.size * (2 * eighth + 1) // 16)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def open_source(directory: Path) -> Source:
    """Read the headers of a checkpoint directory: sharded with an index, or one file.

    Raises CheckpointError for a missing, truncated or corrupt file, for an index that does not
    fit the files, and where there is no safetensors file at all.
    """
    index = directory / _INDEX
    if index.is_file():
        return _from_index(directory, index)
    present = sorted(p.name for p in directory.glob("*.safetensors"))
    if not present:
        others = sorted(p.name for p in directory.glob("*.bin"))
        seen = f" Only {', '.join(others[:5])} there: convert it to safetensors." if others else ""
        raise CheckpointError(f"no *.safetensors file in {directory}.{seen} Download the weights.")
    names = [_SINGLE] if _SINGLE in present else present
    if len(names) > 1:
        _require_numbered(directory, names)
    shards = tuple(read_header(directory / name) for name in names)
    return Source(directory, shards, _extra_note(set(present) - set(names)))


def _require_numbered(directory: Path, names: list[str]) -> None:
    """Without an index, several files are a checkpoint only as a full set 1..N of N."""
    numbers = [_NUMBERED.fullmatch(name) for name in names]
    if not all(numbers):
        raise CheckpointError(
            f"{len(names)} safetensors files in {directory} and no {_INDEX} to say which belong to "
            f"the model: {', '.join(names[:5])}. Download the index."
        )
    found = {int(match[1]) for match in numbers if match}
    total = {int(match[2]) for match in numbers if match}
    wanted = set(range(1, max(total) + 1))
    if len(total) > 1 or found != wanted:
        missing = ", ".join(str(n) for n in sorted(wanted - found)[:5])
        raise CheckpointError(
            f"{directory} has {len(found)} of {max(total)} files; missing: {missing or 'none'}. "
            "Download the missing files."
        )


def _from_index(directory: Path, index: Path) -> Source:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors files ({type(error).__name__}: {error}). "
            "Download it again."
        ) from error
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(files)} files named in {_INDEX} are missing in {directory}: "
            f"{', '.join(missing[:5])}. Download them."
        )
    shards = tuple(read_header(directory / name) for name in files)
    stored = {(info.name, shard.path.name) for shard in shards for info in shard.tensors}
    wrong = [name for name, file in weight_map.items() if (name, file) not in stored]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors are not in the file that {_INDEX} names: "
            f"{', '.join(wrong[:5])}. The index belongs to other files; download it again."
        )
    unlisted = len({name for name, _ in stored} - set(weight_map))
    notes = (f"{unlisted} tensors are in the files but not in {_INDEX}",) if unlisted else ()
    present = {p.name for p in directory.glob("*.safetensors")}
    return Source(directory, shards, notes + _extra_note(present - set(files)))


def _extra_note(names: set[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (f"{len(names)} safetensors files are not part of it: {', '.join(sorted(names)[:5])}",)
