"""The engine against transformers' own NemotronH: logits, every layer boundary, greedy text."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemotriton import LLM, SamplingParams
from tests import harness, hf_oracle

BOUND = 2e-5  # of the largest logit
LENGTHS = {"odd-chunk": 61, "mamba": 41}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hf")
    made = {}
    for name in hf_oracle.CASES:
        made[name] = hf_oracle.save(hf_oracle.build(name), folder / name)
        if name == "tied":
            _drop_head(made[name])
    return made


def _drop_head(folder: Path) -> None:
    """Store the tied checkpoint as others do: no lm_head, the flag in the config."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, file, metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def prompt(name: str) -> list[int]:
    g = torch.Generator().manual_seed(len(name))
    return torch.randint(3, 128, (LENGTHS.get(name, 37),), generator=g).tolist()


def llm(folder: Path, device: str, dtype: str = "float32") -> LLM:
    return LLM(str(folder), dtype=dtype, device=device, max_context=256, max_requests=4)


@pytest.mark.parametrize("name", hf_oracle.CASES)
def test_logits_and_every_layer_boundary(
    name: str, checkpoints: dict[str, Path], device: str
) -> None:
    ids = prompt(name)
    want, residuals = hf_oracle.forward(hf_oracle.build(name), ids)
    ours = llm(checkpoints[name], device)
    got = ours.logits(ids).cpu()
    assert got.dtype == torch.float32
    assert got.shape == (len(ids), 128)
    limit = BOUND * float(want.abs().max())
    assert float((got - want).abs().max()) <= limit

    seen: dict[str, torch.Tensor] = {}
    harness.run(ours.runner.model, ids, probe=lambda key, x: seen.__setitem__(key, x.cpu()))
    assert len(residuals) == ours.config.layer_count
    for i, r in enumerate(residuals):
        error = float((seen[f"layers.{i}"].float() - r).abs().max())
        assert error <= BOUND * float(r.abs().max()), f"layer {i} ({ours.config.kinds[i].name})"


@pytest.mark.parametrize("name", hf_oracle.CASES)
def test_greedy_continuation_of_64_tokens(
    name: str, checkpoints: dict[str, Path], device: str
) -> None:
    ids = prompt(name)[:11]
    model = hf_oracle.build(name)
    want, rows = hf_oracle.greedy(model, ids, 64)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    got = llm(checkpoints[name], device).generate([ids], params)[0].outputs[0].token_ids
    assert len(got) == 64
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            gap = float(rows[i][b] - rows[i][a])
            assert gap <= BOUND * float(rows[i].abs().max()), f"token {i}: {a} for {b}, gap {gap}"
            break  # a tie: what follows is another text


def test_the_oracle_is_sensitive(checkpoints: dict[str, Path], device: str) -> None:
    """A shifted bias in one layer moves the logits beyond the bound: the comparison has teeth."""
    ids = prompt("latent")
    want, _ = hf_oracle.forward(hf_oracle.build("latent"), ids)
    ours = llm(checkpoints["latent"], device)
    tensor = ours.runner.model.named_tensors()["layers.0.mixer.dt_bias"]
    tensor += 1e-2
    got = ours.logits(ids).cpu()
    assert float((got - want).abs().max()) > BOUND * float(want.abs().max())


BF16 = ["mamba", "attention", "mlp", "all-kinds", "latent", "router-groups", "wide-heads"]


@pytest.mark.parametrize("name", BF16)
def test_bf16_within_twice_their_own_distance(
    name: str, checkpoints: dict[str, Path], device: str
) -> None:
    """Over eight prompts, on the tokens up to which the expert sets agree in all three runs."""
    reference = hf_oracle.build(name)
    theirs_model = hf_oracle.load(checkpoints[name], torch.bfloat16)
    ours_llm = llm(checkpoints[name], device, "bfloat16")
    ours_error, theirs_error = [], []
    for start in range(0, 96, 12):
        ids = (prompt("long") * 3)[start : start + 12]
        same = hf_oracle.routed_alike(reference, theirs_model, ours_llm, ids)
        exact = hf_oracle.forward(reference, ids)[0][same]
        theirs_error.append(hf_oracle.forward(theirs_model, ids)[0][same] - exact)
        ours_error.append(ours_llm.logits(ids).cpu()[same] - exact)
    ours, theirs = torch.cat(ours_error), torch.cat(theirs_error)
    assert ours.shape[0] >= 24, f"only {ours.shape[0]} of 96 tokens can be compared"
    assert float(ours.norm()) <= 2 * float(theirs.norm())
    assert float(ours.abs().max()) <= 2 * float(theirs.abs().max())


def test_router_precision_survives_a_bf16_load(checkpoints: dict[str, Path], device: str) -> None:
    tensors = llm(checkpoints["latent"], device, "bfloat16").runner.model.named_tensors()
    for key, t in tensors.items():
        fp32 = key.endswith(("gate.weight", "e_score_correction_bias", "A_log", ".D", "dt_bias"))
        assert t.dtype == (torch.float32 if fp32 else torch.bfloat16), key
