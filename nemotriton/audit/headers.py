"""The headers of a checkpoint, of a directory or over the network, without its weights."""

from pathlib import Path
from typing import Any

from nemotriton.errors import CheckpointError
from nemotriton.model.shards import Shard, TensorInfo
from nemotriton.model.sources import Source, find_checkpoint, hub_errors, open_source

_CONFIGS = ["config.json", "hf_quant_config.json"]


def open_headers(model: str, revision: str | None = None, offline: bool = False) -> Source:
    """The headers of a directory, or of a Hugging Face id (some megabytes, read from the hub).

    `offline` reads an id from the local cache. CheckpointError as `find_checkpoint`."""
    path = Path(model).expanduser()
    if offline or path.exists() or model.count("/") != 1:
        return open_source(find_checkpoint(model, revision, offline))
    return _remote(model, revision)


def _remote(model: str, revision: str | None) -> Source:
    from huggingface_hub import get_safetensors_metadata, snapshot_download
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    with hub_errors(model, revision, offline=False):
        directory = Path(snapshot_download(model, revision=revision, allow_patterns=_CONFIGS))
        try:
            found = get_safetensors_metadata(model, revision=revision)
        except (NotASafetensorsRepoError, SafetensorsParsingError) as problem:
            raise CheckpointError(
                f"{model} has no readable safetensors headers ({problem}). Give the id of a "
                "checkpoint in safetensors."
            ) from problem
        except Exception as problem:
            # a lost connection is an error of the hub's HTTP library, whichever that is
            if not type(problem).__module__.startswith(("httpx", "requests")):
                raise
            raise CheckpointError(
                f"the headers of {model} could not be read ({problem}). Connect, or read a copy in "
                "the local cache with --offline."
            ) from problem
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"no config.json in {model}. Give the id of a whole checkpoint.")
    shards = [_shard(directory / name, file) for name, file in found.files_metadata.items()]
    return Source(directory, tuple(shards))


def _shard(path: Path, file: Any) -> Shard:
    tensors = [
        TensorInfo(name, str(t.dtype), tuple(t.shape), path, *t.data_offsets)
        for name, t in file.tensors.items()
    ]
    tensors.sort(key=lambda info: (info.begin, info.end))
    return Shard(path, max((info.end for info in tensors), default=0), tuple(tensors))
