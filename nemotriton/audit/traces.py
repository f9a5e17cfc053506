"""Hidden states at every boundary of a prefill, in a safetensors file for other engines to read.

N.input_ids [T] int64          N.layers.I.norm, N.layers.I.mixer, N.layers.I (the residual
N.norm_f [T, D]                behind layer I) [T, D]
N.logits [T, V] fp32           for the sequences N = 0, 1, ...
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemotriton.audit.parity import Ways


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
