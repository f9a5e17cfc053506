"""Counts against what was written, and every way a checkpoint may lack something, by name."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch

from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected
from nemotriton.model.load_plan import make_plan
from nemotriton.model.shards import read_header
from nemotriton.model.sources import open_source
from nemotriton.model.synth import write_checkpoint
from tests.audit.command import invoke, invoke_json
from tests.checkpoint.files import CONFIG, MOE, Tensors, drop, renamed, replaced, rewritten
from tests.flavours import FLAVOURS


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "good"
    write_checkpoint(CONFIG, path)
    return path


def test_without_a_model_it_is_the_embedded_one() -> None:
    for args in ((), ("preset:tiny",)):
        code, found = invoke_json("checkpoint", *args)
        assert code == 0
        assert found["tensors"] > 100


def test_every_tensor_of_a_whole_checkpoint_is_counted(good: Path) -> None:
    code, found = invoke_json("checkpoint", str(good))
    assert code == 0
    assert found["complete"]
    assert found["unmapped"] == found["missing"] == found["wrong"] == []
    wanted = expected(CONFIG)
    assert sum(row["expected"] for row in found["rows"]) == sum(
        max(1, entry.experts) for entry in wanted.values()
    )
    assert all(row["found"] == row["expected"] for row in found["rows"])
    stored = read_header(good / "model.safetensors").tensors
    assert found["tensors"] == len(stored) == sum(row["found"] for row in found["rows"])
    assert found["bytes"] == sum(t.nbytes for t in stored) == sum(r["bytes"] for r in found["rows"])
    experts = {(r["kind"], r["tensor"]): r for r in found["rows"]}
    row = experts["mtp moe", "mixer.experts.up_proj.weight"]
    assert (row["found"], row["shapes"], row["dtypes"]) == (4, [[16, 16]], ["BF16"])


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_every_quantised_release_is_complete_and_names_its_schemes(
    flavour: str, tmp_path: Path
) -> None:
    FLAVOURS[flavour](tmp_path / "model")
    code, found = invoke_json("checkpoint", str(tmp_path / "model"))
    assert code == 0
    assert all(row["found"] == row["expected"] for row in found["rows"])
    schemes = {s for row in found["rows"] for s in row["schemes"]}
    source = open_source(tmp_path / "model")
    config = ModelConfig.from_json(tmp_path / "model")
    plan = make_plan(source, config)
    named = {str(plan.scheme.algorithm(e.matrix)) for e in plan.expected.values() if e.matrix}
    assert schemes == {"bf16" if name == "none" else name for name in named}


def test_the_table_shows_what_the_object_holds(good: Path) -> None:
    code, out, _ = invoke("checkpoint", str(good))
    assert code == 0
    assert "mixer.gate.e_score_correction_bias" in out
    assert "unmapped: none\nmissing: none\nwrong: none" in out


# a change of the tensors -> what is listed where
FAULTS = {
    "a tensor nobody knows": (
        lambda t: t | {"backbone.layers.0.mixer.extra": torch.zeros(2)},
        "unmapped",
        "backbone.layers.0.mixer.extra",
    ),
    "an expert too many": (
        lambda t: t | {f"{MOE}.experts.4.up_proj.weight": torch.zeros(16, 16)},
        "unmapped",
        f"{MOE}.experts.4.up_proj.weight",
    ),
    "a skip weight lacks": (drop("backbone.layers.0.mixer.D"), "missing", "layers.0.mixer.D"),
    "an expert lacks": (
        drop(f"{MOE}.experts.2.up_proj"),
        "missing",
        "layers.3.mixer.experts.up_proj.weight of expert 2",
    ),
    "a latent projection of MTP lacks": (
        drop("mtp.layers.1.mixer.fc1_latent_proj"),
        "missing",
        "mtp.layers.1.mixer.fc1_latent_proj.weight",
    ),
    "all of MTP lacks": (drop("mtp."), "missing", "mtp.layers.0.eh_proj.weight"),
    "a misspelt tensor": (
        renamed("norm_f", "norm_g"),
        "missing",
        "norm_f.weight",
    ),
    "a wrong shape": (
        replaced("backbone.layers.0.mixer.dt_bias", torch.zeros(5)),
        "wrong",
        "backbone.layers.0.mixer.dt_bias is [5], not [4]",
    ),
    "integers for weights": (
        replaced("backbone.norm_f.weight", torch.zeros(32, dtype=torch.int32)),
        "wrong",
        "backbone.norm_f.weight is I32, not BF16 or F16 or F32 or F64",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_listed_and_exits_1(name: str, good: Path, tmp_path: Path) -> None:
    change, where, what = FAULTS[name]
    bad = rewritten(good, tmp_path / "bad", change)
    code, found = invoke_json("checkpoint", str(bad))
    assert code == 1
    assert not found["complete"]
    assert what in found[where]
    code, out, _ = invoke("checkpoint", str(bad))
    assert code == 1
    assert what in out


def test_without_mtp_its_tensors_are_left_out_on_purpose(good: Path, tmp_path: Path) -> None:
    bare = rewritten(good, tmp_path / "bare", drop("mtp."))
    assert invoke_json("checkpoint", str(bare), "--no-mtp")[0] == 0
    code, out, _ = invoke("checkpoint", str(good), "--no-mtp")
    assert code == 0
    assert "MTP was not asked for" in out


def test_a_16_bit_router_bias_is_noted(good: Path, tmp_path: Path) -> None:
    def narrow(t: Tensors) -> Tensors:
        return {n: v.bfloat16() if "correction_bias" in n else v for n, v in t.items()}

    code, found = invoke_json("checkpoint", str(rewritten(good, tmp_path / "narrow", narrow)))
    assert code == 0
    assert any("router correction biases are stored in 16 bits" in n for n in found["notes"])


def hub(monkeypatch: pytest.MonkeyPatch, directory: Path, files: list[str]) -> list[str]:
    """The hub, holding the checkpoint of `directory`; gives the files that were downloaded."""
    fetched: list[str] = []

    def snapshot(model: str, **given: object) -> str:
        fetched.extend(given["allow_patterns"])  # type: ignore[arg-type]
        return str(directory)

    def metadata(model: str, **given: object) -> SimpleNamespace:
        found = {}
        for name in files:
            shard = read_header(directory / name)
            tensors = {
                t.name: SimpleNamespace(
                    dtype=t.dtype, shape=list(t.shape), data_offsets=(t.begin, t.end)
                )
                for t in shard.tensors
            }
            found[name] = SimpleNamespace(tensors=tensors)
        return SimpleNamespace(files_metadata=found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    return fetched


def test_an_id_is_audited_without_its_weights(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = hub(monkeypatch, good, ["model.safetensors"])
    here = invoke_json("checkpoint", str(good))
    there = invoke_json("checkpoint", "owner/name")
    assert there == here
    assert not any("safetensors" in name for name in fetched)


def broken(good: Path, path: Path, name: str) -> Path:
    """A copy of a checkpoint with one file spoilt."""
    rewritten(good, path, lambda tensors: tensors)
    weights, config = path / "model.safetensors", path / "config.json"
    raw = weights.read_bytes()
    match name:
        case "no weights":
            weights.unlink()
        case "cut off":
            weights.write_bytes(raw[:-100])
        case "a pointer":
            weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        case "not one":
            weights.write_bytes(b"\xff" * 64)
        case "no configuration":
            config.unlink()
        case "not JSON":
            config.write_text("{")
        case "another model":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama"}))
    return path


@pytest.mark.parametrize(
    "name,words",
    [
        ("no weights", ["no *.safetensors file", "Download the weights"]),
        ("cut off", ["model.safetensors is truncated", "Download the file again"]),
        ("a pointer", ["Git LFS pointer", "git lfs pull"]),
        ("not one", ["is not a safetensors file", "Download the file again"]),
        ("no configuration", ["no config.json in", "owner/name"]),
        ("not JSON", ["config.json", "JSON"]),
        ("another model", ["llama", "nemotron_h"]),
    ],
)
def test_what_cannot_be_read_exits_2(
    name: str, words: list[str], good: Path, tmp_path: Path
) -> None:
    code, out, err = invoke("checkpoint", str(broken(good, tmp_path / "bad", name)))
    assert (code, out) == (2, "")
    for word in words:
        assert word in err
