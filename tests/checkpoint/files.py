"""A small model, changes of its checkpoint's files, and ways to plan and load the result."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nemotriton.model.checkpoint import (
    LoadPlan,
    Source,
    destination_dtype,
    find_checkpoint,
    load,
    make_plan,
    open_source,
)
from nemotriton.model.config import ModelConfig

Tensors = dict[str, torch.Tensor]

BASE = ModelConfig.preset("tiny").to_json() | {
    "hidden_size": 32,
    "vocab_size": 48,
    "hybrid_override_pattern": "M*-E",
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "head_dim": 16,
}
CONFIG = ModelConfig.from_json(BASE)
MOE = "backbone.layers.3.mixer"
UP = "layers.3.mixer.experts.up_proj"  # the matrix most tests look at


def rewritten(
    source: Path, path: Path, change: Callable[[Tensors], Tensors | None], **config: object
) -> Path:
    """A copy of a one-file checkpoint with its tensors and its config.json changed."""
    shutil.copytree(source, path)
    tensors = load_file(path / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    data = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(data))
    return path


def planned(
    path: Path, config: ModelConfig | None = None, mtp: bool = True, act_quant: bool = False
) -> tuple[Source, LoadPlan]:
    source = open_source(find_checkpoint(path))
    config = config or ModelConfig.from_json(path)
    return source, make_plan(source, config, mtp, act_quant)


def loaded(path: Path, dtype: torch.dtype = torch.bfloat16, act_quant: bool = False) -> Tensors:
    source, plan = planned(path, act_quant=act_quant)
    return filled(source, plan, dtype)


def filled(source: Source, plan: LoadPlan, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Load into destinations that hold NaN (or 0x7f) first."""
    destinations = {}
    for name, entry in plan.expected.items():
        kind = destination_dtype(entry.role, dtype)
        raw = torch.full((*plan.local_shape(name), kind.itemsize), 0x7F, dtype=torch.uint8)
        destinations[name] = raw.view(kind).squeeze(-1)
    load(source, plan, destinations.__getitem__)
    return destinations


def same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        raw = [t[name].contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*raw), name


# ---- changes of the tensors of a file
def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + n.removeprefix("backbone."): t for n, t in tensors.items()}


def stack(weight: str) -> Callable[[Tensors], Tensors]:
    """Experts in one 3-D tensor a matrix (and 1-D scales); `weight` stands for ".weight"."""

    def change(tensors: Tensors) -> Tensors:
        out: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            merged, hits = re.subn(r"experts\.\d+\.", "experts.", name)
            if hits and merged.endswith(".weight"):
                merged = merged.removesuffix(".weight") + weight
            out.setdefault(merged, []).append(tensor)
        return {n: torch.stack(t) if ".experts." in n else t[0] for n, t in out.items()}

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n.replace(old, new): t for n, t in tensors.items()}


def drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {n: v for n, v in t.items() if not n.startswith(names)}


def replaced(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    def change(t: Tensors) -> Tensors:
        assert name in t
        return t | {name: tensor}

    return change


def added(name: str, tensor: torch.Tensor | None = None) -> Callable[[Tensors], Tensors]:
    return lambda t: t | {name: torch.ones(1) if tensor is None else tensor}


def chain(*changes: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    def change(t: Tensors) -> Tensors:
        for one in changes:
            t = one(t)
        return t

    return change
