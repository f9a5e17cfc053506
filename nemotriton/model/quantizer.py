"""Write a bf16 checkpoint again with its matrices in FP8 or NVFP4, tensor by tensor.

    fp8     weight_scale = max|w| / 448, one a matrix and expert. input_scale = 1: w8a8 needs one,
            and without calibration 1 lets activations up to 448 through unharmed, with e4m3's full
            precision from 2^-6 on.
    nvfp4   weight_scale_2 = max|w| / 2688, one a matrix and expert; block scales from the largest
            number of each block, in the order of operations of `kernels.fp4`. Labelled
            W4A16_NVFP4: activations are not quantised, so no input scale is needed or written.

Which matrices: `release_scheme`, but those whose columns are not whole groups of 16 stay as they
are. Everything else is copied in its stored dtype, under the names of the releases; keys and
values stay bf16, since scales for them need calibration. The formats are written to both
`hf_quant_config.json` and `config.json`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from nemotriton.errors import CapacityError, CheckpointError, UnsupportedError
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected
from nemotriton.model.formats import NVFP4_GROUP, Algorithm, Format, QuantScheme
from nemotriton.model.load_plan import LoadPlan, Placement, make_plan
from nemotriton.model.nvfp4 import (
    Nvfp4,
    fp8_global_scale,
    nvfp4_global_scale,
    quantize_fp8,
    quantize_nvfp4,
)
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.shards import ShardReader, TensorInfo
from nemotriton.model.sources import Source, open_source
from nemotriton.model.writer import (
    CheckpointWriter,
    export_scheme,
    quantization_config,
    stored_names,
)

FP8_INPUT_SCALE = 1.0
_CHUNK = 1 << 24  # elements quantised at a time
_REWRITTEN = ("config.json", "hf_quant_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".index.json")

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Written:
    """What was done: matrices of every format (experts counted one by one), bytes, remarks."""

    counts: dict[Format, int]
    before: int
    after: int
    notes: tuple[str, ...]


def quantize_checkpoint(
    directory: Path,
    out: Path,
    quant: str,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    shard_bytes: int = 5 << 30,
) -> Written:
    """Write the checkpoint in `directory` to `out` in the mix `quant`, whole or not at all.

    device: where the numbers are computed; they are the same everywhere. The host holds a shard and
    a matrix. Raises CheckpointError where `out` exists, where a tensor would be lost, is quantised
    already or holds NaN or infinity, and CapacityError where the disk is too small.
    """
    config = ModelConfig.from_json(directory)
    source = open_source(directory)
    plan = make_plan(source, config)
    _check_source(plan)
    scheme, notes = weight_scheme(config, quant)
    wanted = expected(config, scheme, plan.mtp_blocks)
    _check_room(out, sum(entry.nbytes(2) for entry in wanted.values()))
    work = _Work(CheckpointWriter(out, shard_bytes), plan, scheme, torch.device(device), progress)
    notes += [f"an unfinished run left {path}: remove it" for path in work.writer.leftovers()]
    with work.writer as writer:
        work.run(source)
        exported = export_scheme(scheme, work.modules)
        writer.add_json("hf_quant_config.json", exported)
        data = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        data["quantization_config"] = quantization_config(exported)
        writer.add_json("config.json", data)
        for file in _companions(directory):
            writer.add_file(file)
    return Written(work.counts, plan.nbytes, work.writer.nbytes, (*plan.notes, *notes))


def weight_scheme(config: ModelConfig, quant: str) -> tuple[QuantScheme, list[str]]:
    """The formats of a quantised copy without calibration, and remarks about exceptions."""
    columns = {e.matrix: e.shape[-1] for e in expected(config).values() if e.matrix}
    listed: dict[str, Algorithm] = {}
    odd = []
    for matrix, algorithm in release_scheme(config, quant).listed.items():
        if algorithm.storage is Format.NVFP4:
            algorithm = Algorithm.W4A16_NVFP4
            if columns[matrix] % NVFP4_GROUP:
                odd.append(f"{matrix} ({columns[matrix]})")
                continue
        listed[matrix] = algorithm
    fp8 = frozenset(m for m, algorithm in listed.items() if algorithm is Algorithm.FP8)
    notes = []
    if odd:
        notes.append(
            f"{len(odd)} matrices stay as they are, since their columns are not whole groups of "
            f"{NVFP4_GROUP}: {', '.join(odd[:5])}"
        )
    return QuantScheme(listed=listed, input_scaled=fp8), notes


def _check_source(plan: LoadPlan) -> None:
    matrices = dict.fromkeys(e.matrix for e in plan.expected.values() if e.matrix)
    quantised = [m for m in matrices if plan.scheme.of(m) is not Format.BF16]
    if quantised:
        raise CheckpointError(
            f"{len(quantised)} matrices are quantised already, such as {quantised[0]}: give the "
            "bf16 checkpoint."
        )
    lost = [f"{name} ({why})" for name, why in plan.ignored if name != "lm_head.weight"]
    if lost:
        raise UnsupportedError(
            f"{len(lost)} tensors would be lost, such as {lost[0]}: only complete text models can "
            "be written."
        )


def _check_room(out: Path, needed: int) -> None:
    parent = next(p for p in (out.parent, *out.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CapacityError(
            f"{out} needs {needed / 2**30:.1f} GiB, {parent} has {free / 2**30:.1f} GiB: free some "
            "space, or choose another disk."
        )


def _companions(directory: Path) -> Iterator[Path]:
    """Tokenizer, templates, licence, code: all files beside the weights."""
    for file in sorted(directory.iterdir()):
        hidden = file.name.startswith(".") or file.name in _REWRITTEN
        if file.is_file() and not hidden and not file.name.endswith(_WEIGHTS):
            yield file


@dataclass
class _Work:
    """The state of one `quantize_checkpoint`."""

    writer: CheckpointWriter
    plan: LoadPlan
    scheme: QuantScheme
    device: torch.device
    progress: Progress | None

    def __post_init__(self) -> None:
        self.counts: dict[Format, int] = {}
        self.modules: dict[str, str] = {}
        self.done = 0

    def run(self, source: Source) -> None:
        shards = {shard.path: shard for shard in source.shards}
        for head, _ in self.plan.equal:  # beside tied embeddings, for whoever reads it
            with ShardReader(shards[head.path]) as reader:
                self.writer.add("lm_head.weight", reader.read(head))
        for path, placements in groupby(self.plan.placements, key=lambda p: p.info.path):
            with ShardReader(shards[path]) as reader:
                for placement in placements:
                    self._tensor(placement, reader.read(placement.info))
                    self.done += placement.info.nbytes
                    if self.progress is not None:
                        self.progress(self.done, self.plan.nbytes, placement.info.name)

    def _tensor(self, placement: Placement, data: torch.Tensor) -> None:
        """One tensor of a file: a vector, a matrix, or the stacked matrices of all experts."""
        entry, name = self.plan.expected[placement.name], placement.name
        if name.endswith("conv1d.weight"):
            data = data.reshape(entry.shape[0], 1, entry.shape[1])
        if not entry.experts:
            self._matrix(stored_names(name)[0], entry.matrix, data, placement.info)
            return
        names = stored_names(name, entry.experts)
        if placement.expert is not None:
            self._matrix(names[placement.expert], entry.matrix, data, placement.info)
            return
        for stored, one in zip(names, data.unbind(), strict=True):
            self._matrix(stored, entry.matrix, one, placement.info)

    def _matrix(self, name: str, matrix: str | None, data: torch.Tensor, info: TensorInfo) -> None:
        weight = matrix is not None and name.endswith(".weight")
        storage = self.scheme.of(matrix) if matrix is not None and weight else Format.BF16
        if weight:
            self.counts[storage] = self.counts.get(storage, 0) + 1
        if storage is Format.BF16:
            self.writer.add(name, data)
            return
        assert matrix is not None
        module = name.removesuffix(".weight")
        self.modules[module] = matrix
        for part, tensor in self._quantised(data.to(self.device), storage, info).items():
            self.writer.add(f"{module}.{part}", tensor)

    def _quantised(
        self, data: torch.Tensor, storage: Format, info: TensorInfo
    ) -> dict[str, torch.Tensor]:
        """The tensors that stand for a matrix [N, K]."""
        nvfp4 = storage is Format.NVFP4
        scale = nvfp4_global_scale(data) if nvfp4 else fp8_global_scale(data)
        if not bool(scale.isfinite()):
            raise CheckpointError(
                f"{info.name} holds NaN or infinity, which no scale can hold: get the checkpoint "
                "again."
            )
        rows = data.split(max(1, _CHUNK // data.shape[1]))
        if not nvfp4:
            codes = torch.cat([quantize_fp8(part, scale).codes for part in rows])
            inputs = torch.tensor(FP8_INPUT_SCALE)
            return {"weight": codes, "weight_scale": scale, "input_scale": inputs}
        parts = [quantize_nvfp4(part, scale) for part in rows]
        whole = Nvfp4(
            torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), scale
        )
        return {"weight": whole.codes, "weight_scale": whole.scales, "weight_scale_2": scale}
