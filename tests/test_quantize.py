"""Writing quantised checkpoints: every byte, what is copied, and what is refused."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from nemotriton.engine.llm import LLM
from nemotriton.errors import CapacityError, CheckpointError, UnsupportedError
from nemotriton.model import quantizer
from nemotriton.model.formats import Format, parse_config, parse_hf_quant
from nemotriton.model.nvfp4 import quantize_fp8, quantize_nvfp4
from nemotriton.model.quantizer import quantize_checkpoint, weight_scheme
from nemotriton.model.synth import write_checkpoint
from nemotriton.model.writer import stored_names
from nemotriton.quantize import app
from tests import harness
from tests.checkpoint.files import (
    BASE,
    Tensors,
    drop,
    loaded,
    planned,
    prefixed,
    rewritten,
    same,
    stack,
)
from tests.flavours import CONFIG, NO_LATENT, decoded
from tests.tokenizer_files import write_tokenizer

IDS = torch.randint(3, 320, (37,), generator=torch.Generator().manual_seed(1)).tolist()
LIMITS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_context": 128}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "plain"
    write_checkpoint(CONFIG, path)
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / ".hidden").write_text("no")
    (path / "pytorch_model.bin").write_text("no")
    return path


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("quant", ["nvfp4", "fp8", "super-mixed"])
def test_every_tensor_is_the_quantised_or_the_old_one(
    quant: str, plain: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int, str]] = []
    done = quantize_checkpoint(plain, tmp_path / "out", quant, progress=lambda *a: seen.append(a))
    before = load_file(plain / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    scheme, _ = weight_scheme(CONFIG, quant)
    counts = {Format.BF16: 0, Format.FP8: 0, Format.NVFP4: 0}
    for name, entry in planned(plain)[1].expected.items():
        for stored in stored_names(name, entry.experts):
            old, new = before.pop(stored), after.pop(stored)
            storage = scheme.of(entry.matrix or "")
            counts[storage] += entry.matrix is not None
            module = stored.removesuffix(".weight")
            if storage is Format.BF16:
                assert old.dtype == new.dtype
                assert torch.equal(old, new), stored
            elif storage is Format.FP8:
                want = quantize_fp8(old)
                assert torch.equal(raw(new), raw(want.codes)), stored
                assert torch.equal(after.pop(f"{module}.weight_scale"), want.global_scale)
                assert after.pop(f"{module}.input_scale") == 1.0
            else:
                want4 = quantize_nvfp4(old)
                assert torch.equal(new, want4.codes), stored
                assert torch.equal(raw(after.pop(f"{module}.weight_scale")), raw(want4.scales))
                assert torch.equal(after.pop(f"{module}.weight_scale_2"), want4.global_scale)
    assert not before
    assert not after
    assert done.counts == {f: n for f, n in counts.items() if n}
    assert seen[-1][:2] == (done.before, done.before)
    assert done.after < done.before


def test_both_files_say_what_is_stored(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path / "out", "super-mixed")
    scheme, _ = weight_scheme(CONFIG, "super-mixed")
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    inner = data.pop("quantization_config")
    assert data == json.loads((plain / "config.json").read_text())
    exported = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    for said in (parse_config(inner), parse_hf_quant(exported)):
        assert said.listed == scheme.listed
        assert said.kv == "bf16"
    plan = planned(tmp_path / "out", act_quant=True)[1]
    assert (plan.notes, plan.ignored, plan.mtp) == ((), (), "complete")
    assert plan.scheme.weight_only("layers.3.mixer.experts.up_proj")
    assert not plan.scheme.weight_only("layers.0.mixer.in_proj")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    ours = {"model.safetensors", "config.json", "hf_quant_config.json", "chat_template.jinja"}
    assert names == ours | {"tokenizer.json", "tokenizer_config.json"}


def test_any_layout_and_sharding_gives_the_same_copy(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path / "a", "nvfp4")
    wanted = loaded(tmp_path / "a")
    changes = (prefixed("model."), stack(".weight"), stack(""))
    for i, change in enumerate(changes):
        other = rewritten(plain, tmp_path / f"from{i}", change)
        quantize_checkpoint(other, tmp_path / f"to{i}", "nvfp4", shard_bytes=20_000)
        assert len(list((tmp_path / f"to{i}").glob("*.safetensors"))) > 1
        same(loaded(tmp_path / f"to{i}"), wanted)


def test_large_matrices_are_quantised_piece_by_piece(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(plain, tmp_path / "a", "super-mixed")
    monkeypatch.setattr(quantizer, "_CHUNK", 100)
    quantize_checkpoint(plain, tmp_path / "b", "super-mixed")
    same(loaded(tmp_path / "a"), loaded(tmp_path / "b"))


def test_logits_are_near_those_of_the_original(plain: Path, tmp_path: Path) -> None:
    def logits(path: Path, act_quant: bool = False) -> torch.Tensor:
        with LLM(path, act_quant=act_quant, **LIMITS) as llm:
            return harness.run(llm.runner.model, IDS)[0]

    def sqnr(a: torch.Tensor) -> float:
        return float(20 * torch.log10(want.norm(dim=-1) / (a - want).norm(dim=-1)).median())

    want, noise = logits(plain), {}
    for quant in ("nvfp4", "fp8", "super-mixed"):
        quantize_checkpoint(plain, tmp_path / quant, quant)
        noise[quant] = sqnr(logits(tmp_path / quant))
        noise[f"{quant}, activations too"] = sqnr(logits(tmp_path / quant, True))
    print("SQNR of logits, dB:", noise)
    assert noise["nvfp4"] > 10
    assert noise["nvfp4, activations too"] == noise["nvfp4"], "the label is weight only"
    assert noise["fp8"] > noise["nvfp4"] + 6
    assert noise["fp8"] > noise["fp8, activations too"] > noise["nvfp4"]
    assert noise["super-mixed"] > 10


def test_weights_survive_as_well_as_the_formats_allow(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path / "m", "super-mixed")
    with LLM(tmp_path / "m", **LIMITS) as llm, LLM(plain, **LIMITS) as original:
        for name, least in (("experts.up_proj", 18), ("shared_experts.up_proj", 29)):
            path = f"layers.3.mixer.{name}"
            a = decoded(llm.runner.model.get_submodule(path))
            b = original.runner.model.get_submodule(path).weight
            assert 20 * torch.log10(b.norm() / (a - b).norm()) > least


def test_columns_that_are_no_groups_stay(tmp_path: Path) -> None:
    config = type(CONFIG).from_json(BASE | {"intermediate_size": 40, "vocab_size": 320})
    write_checkpoint(config, tmp_path / "m")
    done = quantize_checkpoint(tmp_path / "m", tmp_path / "out", "nvfp4")
    assert done.notes == (
        "1 matrices stay as they are, since their columns are not whole groups of 16: "
        "layers.2.mixer.down_proj (40)",
    )
    assert planned(tmp_path / "out")[1].scheme.of("layers.2.mixer.down_proj") is Format.BF16


# ---------------------------------------------------------------------------------------- refusals
def test_what_cannot_be_quantised(plain: Path, tmp_path: Path) -> None:
    def refuse(source: Path, message: str, error: type[Exception] = CheckpointError) -> None:
        with pytest.raises(error, match=message):
            quantize_checkpoint(source, tmp_path / "out", "nvfp4")
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*"))

    name = "backbone.layers.3.mixer.experts.1.up_proj.weight"
    infinite = rewritten(plain, tmp_path / "inf", spoil(name, float("inf")))
    refuse(infinite, r"experts\.1\.up_proj\.weight holds NaN or infinity")
    nan = rewritten(plain, tmp_path / "nan", spoil(name, float("nan")))
    refuse(nan, r"experts\.1\.up_proj\.weight holds NaN or infinity")
    quantize_checkpoint(plain, tmp_path / "done", "fp8")
    refuse(tmp_path / "done", r"matrices are quantised already, such as layers\.0\.mixer\.in_proj")
    half = rewritten(plain, tmp_path / "half", drop("mtp.layers.0.eh_proj"))
    refuse(half, r"tensors would be lost, such as mtp\..*incomplete", UnsupportedError)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"exists\. Remove it"):
        quantize_checkpoint(plain, tmp_path / "out", "nvfp4")
    assert not list((tmp_path / "out").iterdir())


def spoil(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[name][3, 5] = value
        return tensors

    return change


def test_a_full_disk(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(quantizer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CapacityError, match=r"needs 0\.0 GiB, .* has 0\.0 GiB: free some space"):
        quantize_checkpoint(plain, tmp_path / "deep" / "out", "nvfp4")
    monkeypatch.undo()

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("nemotriton.model.writer.save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left"):
        quantize_checkpoint(plain, tmp_path / "out", "nvfp4")
    assert not list(tmp_path.iterdir())


def killer(moment: float) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, name: str) -> None:
        if done >= moment * total:
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def test_a_killed_run_leaves_nothing_that_looks_finished(plain: Path, tmp_path: Path) -> None:
    """Killed at the first tensor, in the middle, and when only the renaming is left."""
    for moment in (0.0, 0.5, 1.0):
        child = os.fork()
        if child == 0:
            kill = killer(moment)
            quantize_checkpoint(plain, tmp_path / "out", "nvfp4", "cpu", kill, 10_000)
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert not (tmp_path / "out").exists()
    left = list(tmp_path.iterdir())
    assert len(left) == 3
    for path in left:
        assert path.name.startswith(".out.partial-")
        assert not list(path.glob("*.json"))
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            LLM(path)
    done = quantize_checkpoint(plain, tmp_path / "out", "nvfp4")
    assert [note.startswith("an unfinished run left") for note in done.notes] == [True] * 3
    assert planned(tmp_path / "out")[1].mtp == "complete"


# ------------------------------------------------------------------------------------ command line
def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    return result.exit_code, " ".join(result.stderr.split())


def test_the_command(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = invoke(str(plain), str(out), "--scheme", "super-mixed", "--device", "cpu")
    assert code == 0, said
    assert "8 nvfp4" in said
    assert "6 fp8" in said
    assert f"written {out}" in said
    with LLM(out, **LIMITS) as llm:
        assert len(llm.generate(IDS)[0].outputs[0].token_ids) > 0
    code, said = invoke(str(plain), str(out), "--scheme", "fp8")
    assert code == 2
    assert "exists: remove it" in said
    code, said = invoke(str(plain), str(tmp_path / "b"), "--scheme", "int4")
    assert code == 2
    assert "--scheme int4: give one of nvfp4, fp8, super-mixed" in said
    code, said = invoke(str(tmp_path), str(tmp_path / "b"), "--scheme", "fp8")
    assert code == 2
    assert "no config.json" in said


def test_a_preset_is_written_with_random_weights(tmp_path: Path) -> None:
    code, said = invoke("preset:tiny", str(tmp_path / "out"), "--scheme", "nvfp4", "-q")
    assert (code, said) == (0, "")
    assert len(planned(tmp_path / "out")[1].placements) > 100
    code, said = invoke("preset:tony", str(tmp_path / "b"), "--scheme", "nvfp4")
    assert code == 2
    assert "tony" in said


def test_models_without_latent_experts_or_heads(tmp_path: Path) -> None:
    tied = type(CONFIG).from_json(BASE | {"tie_word_embeddings": True, "vocab_size": 320})
    for i, config in enumerate((NO_LATENT, tied)):
        write_checkpoint(config, tmp_path / f"a{i}")
        quantize_checkpoint(tmp_path / f"a{i}", tmp_path / f"b{i}", "nvfp4")
        with LLM(tmp_path / f"b{i}", **LIMITS) as llm:
            assert harness.run(llm.runner.model, IDS)[0].isfinite().all()
    table = {"lm_head.weight": load_file(tmp_path / "a1" / "model.safetensors")}
    head = table["lm_head.weight"]["backbone.embeddings.weight"].clone()
    both = rewritten(tmp_path / "a1", tmp_path / "c", lambda t: t | {"lm_head.weight": head})
    quantize_checkpoint(both, tmp_path / "d", "nvfp4")
    assert torch.equal(load_file(tmp_path / "d" / "model.safetensors")["lm_head.weight"], head)
