"""Writing checkpoints: tensors stream into shards, and the directory appears whole or never."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nemotriton.errors import CheckpointError
from nemotriton.model.formats import NVFP4_GROUP, Algorithm, Format, QuantScheme


class CheckpointWriter:
    """A checkpoint being written to `path`: use as a context manager, `add` tensors, `add_json`.

    Everything goes to a hidden directory beside `path`, which takes that name at the end; a run
    that fails removes it, and one that is killed leaves it without its index and config.json. The
    host holds at most `shard_bytes` and one tensor. Raises CheckpointError if `path` exists or
    cannot be written.
    """

    def __init__(self, path: Path, shard_bytes: int = 5 << 30) -> None:
        if path.exists():
            raise CheckpointError(f"{path} exists. Remove it, or choose another directory.")
        self.path, self.shard_bytes = path, shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._json: dict[str, Any] = {}
        self._files: list[Path] = []
        self._total = 0

    def __enter__(self) -> CheckpointWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = Path(
            tempfile.mkdtemp(prefix=f".{self.path.name}.partial-", dir=self.path.parent)
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor under the name it has in the file; it is copied to the host."""
        size = tensor.numel() * tensor.dtype.itemsize
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._flush()
        # clone: safetensors refuses tensors that share memory, as rows of stacked experts do
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total += size

    def add_json(self, name: str, data: dict[str, Any]) -> None:
        """Add a JSON file, written at the very end."""
        self._json[name] = data

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors so far."""
        return self._total

    def add_file(self, file: Path) -> None:
        """Add a copy of a file, made at the very end."""
        self._files.append(file)

    def _shard_file(self, index: int, total: int | None = None) -> str:
        if total == 1:
            return "model.safetensors"
        return f"model-{index + 1:05d}-of-{total or 0:05d}.safetensors"

    def _flush(self) -> None:
        file = self._partial / self._shard_file(len(self._shards))
        try:
            save_file(self._pending, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be written ({error}).") from error
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = self._shard_file(index, count)
            (self._partial / self._shard_file(index)).rename(self._partial / file)
            (self._partial / file).chmod(0o644)  # safetensors writes for the owner alone
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index_json = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            self._write("model.safetensors.index.json", index_json)
        for name, data in self._json.items():
            self._write(name, data)
        for companion in self._files:
            shutil.copy(companion, self._partial / companion.name)
        self._partial.chmod(0o755)  # mkdtemp's directories are private
        self._partial.rename(self.path)

    def leftovers(self) -> list[Path]:
        """Hidden directories that killed runs to the same path have left."""
        found = self.path.parent.glob(f".{self.path.name}.partial-*")
        return sorted(found) if self.path.parent.is_dir() else []

    def _write(self, name: str, data: dict[str, Any]) -> None:
        text = json.dumps(data, indent=2, sort_keys=True) + "\n"
        (self._partial / name).write_text(text, encoding="utf-8")


def stored_names(name: str, experts: int = 0, prefix: str = "backbone.") -> list[str]:
    """The names in release files of a canonical tensor: one, or one for each of `experts`."""
    full = name if name.startswith(("lm_head.", "mtp.")) else prefix + name
    if not experts:
        return [full]
    return [full.replace(".experts.", f".experts.{expert}.") for expert in range(experts)]


def export_scheme(scheme: QuantScheme, modules: Mapping[str, str]) -> dict[str, Any]:
    """Return an `hf_quant_config.json`: a table of every quantised module.

    modules: name in the files -> canonical matrix.
    """
    table: dict[str, dict[str, Any]] = {}
    for module, matrix in modules.items():
        algorithm = scheme.algorithm(matrix)
        if algorithm is not Algorithm.NONE:
            group = {"group_size": NVFP4_GROUP} if algorithm.storage is Format.NVFP4 else {}
            table[module] = {"quant_algo": str(algorithm), **group}
    return {
        "producer": {"name": "nemotriton"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8" if scheme.kv == "fp8" else None,
            "quantized_layers": table,
        },
    }


def quantization_config(exported: Mapping[str, Any]) -> dict[str, Any]:
    """The same table as `config.json` holds it, from what `export_scheme` gives."""
    quantization = exported["quantization"]
    fp8 = quantization["kv_cache_quant_algo"] == "FP8"
    return {
        "quant_method": "modelopt",
        "producer": exported["producer"],
        "quant_algo": quantization["quant_algo"],
        "quantized_layers": quantization["quantized_layers"],
        "ignore": [],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"} if fp8 else None,
    }
