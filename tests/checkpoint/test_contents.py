"""Malformed contents, each by its message."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemotriton.errors import CheckpointError
from tests.checkpoint.files import (
    CONFIG,
    MOE,
    Tensors,
    added,
    chain,
    drop,
    planned,
    replaced,
    rewritten,
)

MALFORMED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "unmapped": (
        added("backbone.layers.0.mixer.rope.inv_freq"),
        r"1 tensor has no destination: backbone\.layers\.0\.mixer\.rope\.inv_freq\. Check that "
        r"config\.json and the weights belong together, or download both again\. Nothing was",
    ),
    "many unmapped": (
        chain(*(added(f"extra.{i}") for i in range(7))),
        r"7 tensors have no destination: extra\.0, extra\.1, extra\.2, extra\.3, extra\.4, \.{4} ",
    ),
    "layer too many": (added("backbone.layers.4.norm.weight"), "no destination: backbone.layers.4"),
    "expert too many": (
        added(f"{MOE}.experts.4.up_proj.weight", torch.ones(16, 16)),
        "no destination: backbone.layers.3.mixer.experts.4.up_proj.weight",
    ),
    "gate_proj": (added(f"{MOE}.experts.0.gate_proj.weight"), "experts.0.gate_proj.weight"),
    "unknown mtp": (added("mtp.embed.weight"), r"1 tensor has no destination: mtp\.embed\.weight"),
    "missing D": (drop("backbone.layers.0.mixer.D"), r"1 tensor is missing: layers\.0\.mixer\.D\."),
    "missing norm": (drop("backbone.norm_f"), r"1 tensor is missing: norm_f\.weight"),
    "missing conv bias": (drop("backbone.layers.0.mixer.conv1d.bias"), r"conv1d\.bias"),
    "missing expert": (
        drop(f"{MOE}.experts.2."),
        r"2 tensors are missing: layers\.3\.mixer\.experts\.up_proj\.weight of expert 2, "
        r"layers\.3\.mixer\.experts\.down_proj\.weight of expert 2\.",
    ),
    "missing layer": (
        drop("backbone.layers.3."),
        r"9 tensors are missing: layers\.3\.norm\.weight, .*, \.\.\.\.",
    ),
    "missing head": (
        drop("lm_head"),
        r"1 tensor is missing: lm_head\.weight\. If the head is the embedding matrix, set "
        "tie_word_embeddings to true",
    ),
    "shape": (
        replaced("backbone.layers.0.mixer.A_log", torch.ones(5)),
        r"1 tensor has the wrong shape: backbone\.layers\.0\.mixer\.A_log is \[5\], not \[4\]\.",
    ),
    "transposed": (
        replaced("backbone.layers.2.mixer.up_proj.weight", torch.ones(32, 48)),
        r"layers\.2\.mixer\.up_proj\.weight is \[32, 48\], not \[48, 32\]",
    ),
    "expert's shape": (
        replaced(f"{MOE}.experts.1.up_proj.weight", torch.ones(16, 32)),
        r"experts\.1\.up_proj\.weight is \[16, 32\], not \[16, 16\]",
    ),
    "conv with two inputs": (
        replaced("backbone.layers.0.mixer.conv1d.weight", torch.ones(64, 2, 4)),
        r"conv1d\.weight is \[64, 2, 4\], not \[64, 4\]",
    ),
    "integer norm": (
        replaced("backbone.norm_f.weight", torch.ones(32, dtype=torch.int32)),
        r"1 tensor has the wrong type: backbone\.norm_f\.weight is I32, not BF16 or F16 or F32",
    ),
    "int8 matrix": (
        replaced("backbone.layers.1.mixer.q_proj.weight", torch.ones(64, 32, dtype=torch.int8)),
        r"q_proj\.weight is I8, not BF16",
    ),
    "fp8 gate": (
        replaced(f"{MOE}.gate.weight", torch.ones(4, 32).to(torch.float8_e4m3fn)),
        r"gate\.weight is F8_E4M3, not BF16",
    ),
    "e5m2": (
        replaced("lm_head.weight", torch.ones(48, 32).to(torch.float8_e5m2)),
        r"lm_head\.weight is F8_E5M2, not BF16",
    ),
    "fp8 without scale": (
        replaced("lm_head.weight", torch.ones(48, 32).to(torch.float8_e4m3fn)),
        r"1 tensor is missing: lm_head\.weight_scale\.",
    ),
    "nvfp4 without scales": (
        replaced("lm_head.weight", torch.ones(48, 16, dtype=torch.uint8)),
        r"2 tensors are missing: lm_head\.weight_scale, lm_head\.weight_scale_2\.",
    ),
    "two aliases": (
        added("model.embed_tokens.weight", torch.ones(48, 32, dtype=torch.bfloat16)),
        r"1 tensor is given twice: model\.embed_tokens\.weight\. Keep one file",
    ),
    "stacked and single experts": (
        added(f"{MOE}.experts.up_proj", torch.ones(4, 16, 16, dtype=torch.bfloat16)),
        r"1 tensor is given twice: backbone\.layers\.3\.mixer\.experts\.up_proj\.",
    ),
    "experts in two formats": (
        replaced(f"{MOE}.experts.1.up_proj.weight", torch.ones(16, 8, dtype=torch.uint8)),
        r"the experts of 1 matrices are stored in several formats: "
        r"layers\.3\.mixer\.experts\.up_proj \(bf16 in .*experts\.0\.up_proj\.weight, nvfp4 in "
        r".*experts\.1\.up_proj\.weight\)",
    ),
    "everything at once": (
        chain(
            added("extra"),
            drop("backbone.norm_f"),
            replaced("backbone.layers.0.mixer.D", torch.ones(3)),
            replaced("backbone.layers.0.mixer.dt_bias", torch.ones(4, dtype=torch.int64)),
        ),
        r"1 tensor has no destination: extra\. 1 tensor is missing: norm_f\.weight\. 1 tensor has "
        r"the wrong type: .*dt_bias is I64.* 1 tensor has the wrong shape: .*mixer\.D is \[3\]",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_contents_are_named(plain: Path, tmp_path: Path, name: str) -> None:
    change, message = MALFORMED[name]
    with pytest.raises(CheckpointError, match=message):
        planned(rewritten(plain, tmp_path / "m", change))


def test_mtp_tensors_that_the_config_does_not_declare(plain: Path) -> None:
    without = replace(CONFIG, mtp=None, mtp_moe=None)
    with pytest.raises(
        CheckpointError, match="declares no MTP block: set num_nextn_predict_layers"
    ):
        planned(plain, without)
    assert planned(plain, without, mtp=False)[1].mtp == "none"


def test_a_tied_head_of_another_shape_is_refused(plain: Path, tmp_path: Path) -> None:
    change = replaced("lm_head.weight", torch.ones(50, 32))
    path = rewritten(plain, tmp_path / "m", change, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head.weight is \[50, 32\] and the embeddings"):
        planned(path)
