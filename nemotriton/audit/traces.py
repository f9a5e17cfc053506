"""Hidden states at every boundary of a prefill, in a safetensors file: for other engines to read,
or from another engine to compare with.

N.input_ids [T] int64          N.layers.I.norm, N.layers.I.mixer, N.layers.I (the residual
N.norm_f [T, D]                behind layer I) [T, D]
N.logits [T, V] fp32           for the sequences N = 0, 1, ...
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemotriton.audit.parity import Ways
from nemotriton.audit.walk import TWINS, Entry, Passed, Walk
from nemotriton.errors import RequestError


@torch.no_grad()
def record(ways: Ways, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """All boundaries of all sequences, on the CPU."""
    found: dict[str, Tensor] = {}
    for number, ids in enumerate(sequences):

        def probe(name: str, x: Tensor, number: int = number) -> None:
            found[f"{number}.{name}"] = x.to("cpu", copy=True).contiguous()

        with ways.ready():
            logits = ways.prefill(ids, probe)
        found[f"{number}.logits"] = logits.cpu().contiguous()
        found[f"{number}.input_ids"] = torch.tensor(list(ids))
    return found


def write(path: Path, tensors: dict[str, Tensor], model: str, dtype: torch.dtype) -> None:
    """Save them with the model's name and dtype as metadata."""
    from safetensors.torch import save_file

    save_file(tensors, path, {"model": model, "dtype": str(dtype).removeprefix("torch.")})


def read(path: Path, layers: int, width: int) -> dict[str, Tensor]:
    """Sequence 0 of a file, by name without its number; RequestError where it does not hold all
    boundaries of a model of so many layers and that width."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise RequestError(f"{path} cannot be read as a trace: {problem}.") from problem
    found = {name[2:]: t for name, t in tensors.items() if name.startswith("0.")}
    names = [f"layers.{i}{tail}" for i in range(layers) for tail in (".norm", ".mixer", "")]
    lacking = [n for n in ("input_ids", *names, "norm_f", "logits") if n not in found]
    if lacking:
        raise RequestError(
            f"{path} lacks {len(lacking)} tensors of sequence 0: {', '.join(lacking[:3])}, ...: "
            "write it as parity --trace does, from the same model."
        )
    shape = (found["input_ids"].numel(), width)
    wrong = [n for n in (*names, "norm_f") if tuple(found[n].shape) != shape]
    if wrong or f"layers.{layers}" in found:
        more = f"{wrong[0]} is {list(found[wrong[0]].shape)}" if wrong else "it has more layers"
        raise RequestError(
            f"{path} is of another model: {more}, this one has {layers} layers and {list(shape)}."
        )
    return found


@torch.no_grad()
def passes(walk: Walk, trace: dict[str, Tensor]) -> list[Passed]:
    """A trace in the terms of a walk over its tokens. It has no routing: that is the twins' on the
    trace's own normed input."""
    here = {name: t.to(walk.ids.device) for name, t in trace.items()}
    entry, residual = walk.start(), walk.start().residual
    found = []
    for i in range(walk.head):
        at = {"residual": residual, "norm": here[f"layers.{i}.norm"]}
        sets = None
        if walk.is_moe(i):
            norm = at["norm"].to(walk.model.dtype)
            sets, at["router"] = walk.route(i, norm, TWINS)
        at["mixer"] = here[f"layers.{i}.mixer"]
        found.append(Passed(entry, at, sets))
        entry, residual = Entry(at["mixer"], residual), here[f"layers.{i}"]
        entry = _as(entry, walk)
    end = {"residual": residual, "norm": here["norm_f"], "logits": here["logits"].float()}
    return [*found, Passed(entry, end)]


def _as(entry: Entry, walk: Walk) -> Entry:
    """In the dtypes that the model's own entries have."""
    assert entry.delta is not None
    wide = torch.float32 if walk.model.config.residual_fp32 else walk.model.dtype
    return Entry(entry.delta.to(walk.model.dtype), entry.residual.to(wide))
