"""Drafting from a checkpoint's own block: whole, absent, half, declared otherwise, not wanted."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemotriton.engine.llm import LLM, SamplingParams
from nemotriton.errors import CheckpointError, ConfigError
from nemotriton.model.config import ModelConfig
from tests.checkpoint.files import Tensors, drop, rewritten

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LOST = ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.experts.2.down_proj.weight"]


def tokens(path: Path, **options: object) -> list[int]:
    with LLM(path, dtype="float32", device="cpu", max_context=64, max_requests=2, **options) as llm:  # type: ignore[arg-type]
        (output,) = llm.generate([[1, 7, 11]], GREEDY)
        drafts = llm.stats()["drafts"]
        assert (drafts is None) == (not options)
        if drafts is not None:
            assert drafts["proposed"] == drafts["verified"] > 0
        return output.outputs[0].token_ids


def test_a_whole_block_drafts(plain: Path, quantised: Path) -> None:
    for path in (plain, quantised):  # the latter with a bf16 block on a quantised trunk
        want = tokens(path)
        assert tokens(path, drafts=3, adapt_drafts=False) == want
        assert tokens(path, tree="0,0,1", adapt_drafts=False) == want


def test_the_weights_of_the_block_are_the_files(plain: Path) -> None:
    stored = load_file(plain / "model.safetensors")
    with LLM(plain, dtype="float32", device="cpu", max_context=64, drafts=1) as llm:
        held = llm.runner.model.named_tensors()  # type: ignore[attr-defined]
    for name in ("mtp.layers.0.eh_proj.weight", "mtp.layers.1.final_layernorm.weight"):
        assert torch.equal(held[name], stored[name].float())


def test_what_is_not_whole_is_refused_by_name_and_only_if_wanted(
    plain: Path, tmp_path: Path
) -> None:
    want = tokens(plain)
    absent = rewritten(plain, tmp_path / "absent", drop("mtp."))
    none = rewritten(
        plain, tmp_path / "none", drop("mtp."),
        num_nextn_predict_layers=0, mtp_hybrid_override_pattern=None,
    )  # fmt: skip
    half = rewritten(plain, tmp_path / "half", drop(*LOST))
    problems = {
        absent: r"config.json declares one, but the files hold no mtp\.\* tensor: use drafts=0",
        none: r"config.json declares none \(num_nextn_predict_layers\): use drafts=0",
        half: r"2 of its tensors are absent: mtp\.layers\.0\.eh_proj\.weight, "
        r"mtp\.layers\.1\.mixer\.experts\.down_proj\.weight of expert 2: use drafts=0",
    }
    for path, message in problems.items():
        assert tokens(path) == want
        for options in ({"drafts": 2}, {"tree": "0,0"}):
            with pytest.raises(CheckpointError, match=message):
                tokens(path, **options)


def test_the_files_say_how_many_blocks_there_are(plain: Path, tmp_path: Path) -> None:
    """One block declared as two is one, applied for as many drafts as asked; two are refused."""
    want = tokens(plain)
    declared = rewritten(plain, tmp_path / "declared", lambda t: t, num_nextn_predict_layers=2)
    assert tokens(declared, drafts=5, adapt_drafts=False) == want

    def twice(t: Tensors) -> Tensors:
        more = {n: v.clone() for n, v in t.items() if n.startswith("mtp.")}
        shift = {"mtp.layers.0.": "mtp.layers.2.", "mtp.layers.1.": "mtp.layers.3."}
        for old, new in shift.items():
            more = {n.replace(old, new): v for n, v in more.items()}
        return t | more

    two = rewritten(plain, tmp_path / "two", twice, num_nextn_predict_layers=2)
    assert tokens(two) == want
    with pytest.raises(CheckpointError, match="there are 2, and drafting by several"):
        tokens(two, drafts=2)


def test_presets_draft_if_they_have_a_block() -> None:
    with pytest.raises(ConfigError, match=r"nano-30b.* has no MTP block"):
        LLM.synthetic("nano-30b", layers=6, width_scale=1 / 64, device="cpu", drafts=1)
    assert ModelConfig.preset("super-120b").mtp is not None
    outputs = []
    for options in ({}, {"drafts": 2, "adapt_drafts": False}):
        with LLM.synthetic(
            "super-120b", layers=9, width_scale=1 / 64, dtype="float32", device="cpu",
            max_context=64, max_requests=2, **options,
        ) as llm:  # fmt: skip
            outputs.append(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids)
    assert outputs[0] == outputs[1]
