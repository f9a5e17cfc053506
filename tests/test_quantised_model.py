"""Quantised checkpoints compute what the same model computes with its weights decoded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from nemotriton.engine.llm import LLM, SamplingParams
from nemotriton.engine.loading import Limits, place, random_weights
from nemotriton.errors import CheckpointError, ConfigError
from nemotriton.generate.__main__ import app
from nemotriton.kernels import route_experts
from nemotriton.kernels.op import counting_calls
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected
from nemotriton.model.formats import Algorithm, Format, QuantScheme
from nemotriton.model.layers import Experts, Linear, Matrix
from nemotriton.model.mtp import MtpBlock
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.synth import fill
from tests import harness
from tests.checkpoint.files import MOE, rewritten
from tests.flavours import CONFIG, FLAVOURS, plain

CPU = torch.device("cpu")
IDS = torch.randint(3, 320, (37,), generator=torch.Generator().manual_seed(1)).tolist()
STEPS = [30, -1, 4, -2]  # prefill, a decode step, more prompt, two tokens at once
LIMITS = {"device": "cpu", "max_context": 128, "max_requests": 2}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ModelConfig]]:
    root = tmp_path_factory.mktemp("flavours")
    found = {}
    for name, write in FLAVOURS.items():
        path = root / name.replace(" ", "-") / "model"
        path.parent.mkdir()
        found[name] = path, write(path)
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2."""
    return float((a - b).norm() / b.norm())


def sqnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Signal to noise in dB, of rows a against b; the median, as some are routed elsewhere."""
    return float(20 * torch.log10(b.norm(dim=-1) / (a - b).norm(dim=-1)).median())


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("bfloat16", 4e-3)])
def test_logits_are_those_of_the_decoded_weights(
    flavour: str, dtype: str, limit: float, paths: dict[str, Any]
) -> None:
    path, config = paths[flavour]
    with LLM(path, dtype=dtype, **LIMITS) as llm:
        model = llm.runner.model
        stored = {m.storage for m in model.modules() if isinstance(m, Matrix)}
        assert stored > {Format.BF16} or flavour.startswith(("all", "weight"))
        found, _ = harness.run(model, IDS, STEPS)
    with torch.no_grad():
        want, _ = harness.run(plain(model, config), IDS, STEPS)
    assert want.std() > 1
    assert distance(found, want) < limit


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_generate_runs(flavour: str, paths: dict[str, Any]) -> None:
    path = str(paths[flavour][0])
    args = [path, "-p", "a", "-n", "3", "--temperature", "0", "--device", "cpu"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("run as w") == (2 if flavour in TWO_FORMATS else 1)


TWO_FORMATS = ("super-mixed", "compressed-tensors", "stacked", "stacked without latent")


def test_what_runs_in_which_format_is_said(paths: dict[str, Any]) -> None:
    def notes(flavour: str, **options: Any) -> str:
        with LLM(paths[flavour][0], **LIMITS, **options) as llm:
            return "\n".join(llm.notes)

    said = notes("super-mixed")
    assert "8 NVFP4 matrices run as w4a16: activations stay bfloat16" in said
    assert "6 FP8 matrices run as w8a16: activations stay bfloat16" in said
    said = notes("super-mixed", act_quant=True)
    assert "8 NVFP4 matrices run as w4a4, emulated" in said
    assert "6 FP8 matrices run as w8a8" in said
    said = notes("super-mixed", act_quant="fp8")
    assert "8 NVFP4 matrices run as w4a16" in said
    assert (
        "6 FP8 matrices run as w8a8: activations are rounded to FP8 by their input scales" in said
    )
    assert "have none" not in said
    for act_quant in (False, True):
        said = notes("weight only", act_quant=act_quant)
        assert "W4A16_NVFP4 matrices run as w4a16, as they are labelled" in said
        assert "w4a4" not in said


@pytest.mark.parametrize("algorithm", [Algorithm.NVFP4, Algorithm.FP8])
def test_a_quantised_mtp_block(algorithm: Algorithm) -> None:
    scheme = QuantScheme(default=algorithm)
    block = MtpBlock(CONFIG, torch.float32, CPU, scheme)
    named = {f"mtp.{n}": p for n, p in block.named_parameters()}
    wanted = {n for n in expected(CONFIG, scheme) if n.startswith("mtp.")}
    assert named.keys() == wanted
    fill(CONFIG, named)
    generator = torch.Generator().manual_seed(0)
    embedded, hidden = torch.randn(2, 1, 19, CONFIG.width, generator=generator)
    with torch.no_grad():
        found = block.train_forward(embedded, hidden)
        want = plain(block, CONFIG).train_forward(embedded, hidden)
    assert distance(found, want) < 1e-5


@pytest.mark.parametrize("flavour", ["super-mixed", "fp8", "all nvfp4", "lm_head fp8"])
def test_drafts_change_no_token(flavour: str, paths: dict[str, Any]) -> None:
    """The drafter's matrices are bf16 or quantised, the head is the trunk's, the caches fp8."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for drafts in (0, 2):
        options: dict[str, Any] = {"dtype": "float32", "kv_dtype": "fp8", "drafts": drafts}
        with LLM(paths[flavour][0], **options, **LIMITS) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate([IDS, IDS[:3]], params)])
    assert found[0] == found[1]


def test_the_model_has_the_tensors_of_the_plan() -> None:
    for quant in ("bf16", "fp8", "nvfp4", "super-mixed"):
        scheme = release_scheme(CONFIG, quant)
        model = NemotronH(CONFIG, torch.bfloat16, CPU, scheme)
        wanted = expected(CONFIG, scheme, mtp_blocks=0)
        named = model.named_tensors()
        assert {n: p.shape for n, p in named.items()} == {n: e.shape for n, e in wanted.items()}
        size = sum(e.nbytes(2) for e in wanted.values())
        assert sum(p.nbytes for p in named.values()) == size


def test_the_plan_counts_the_bytes_as_stored() -> None:
    limits = Limits("cpu", None, None, 128, 1, None, None, 0.5)
    sizes = {}
    for quant in ("bf16", "fp8", "nvfp4", "super-mixed"):
        placed = place(random_weights("tiny", 0, quant=quant), limits)
        sizes[quant] = placed.plan.weights
        assert placed.plan.weights == sum(p.nbytes for p in placed.model.parameters())
    assert sizes["super-mixed"] < sizes["nvfp4"] < sizes["fp8"] < 0.7 * sizes["bf16"]


def test_a_release_is_what_a_preset_has() -> None:
    for name in ("super-120b", "9b-v2", "12b-v2", "tiny"):
        config = ModelConfig.preset(name)
        quant = "nvfp4" if name in ("super-120b", "9b-v2") else "bf16"
        assert release_scheme(config, "release") == release_scheme(config, quant)
    dense = release_scheme(ModelConfig.preset("9b-v2"), "release")
    kinds = ModelConfig.preset("9b-v2").kinds
    of = {str(kind): dense.of(f"layers.{i}.mixer.in_proj") for i, kind in enumerate(kinds)}
    assert of == {"M": Format.NVFP4, "-": Format.BF16, "*": Format.BF16}


# ----------------------------------------------------------------------- quantised activations
def test_quantised_activations_as_sqnr(paths: dict[str, Any]) -> None:
    """w4a4 against w4a16 and w8a8 against w8a16, same weights: two bits more are some 12 dB."""
    noise = {}
    for flavour in ("all nvfp4", "all fp8", "weight only"):
        runs = []
        for act_quant in (False, True):
            with LLM(paths[flavour][0], dtype="float32", act_quant=act_quant, **LIMITS) as llm:
                runs.append(harness.run(llm.runner.model, IDS)[0])
        noise[flavour] = sqnr(runs[1], runs[0])
    print("SQNR of logits, dB:", noise)
    assert 8 < noise["all nvfp4"] < 20
    assert noise["all nvfp4"] + 8 < noise["all fp8"] < 35
    assert noise["weight only"] == float("inf"), "labelled W4A16: activations stay"


def test_activations_at_fp8_matrices_alone(paths: dict[str, Any]) -> None:
    """act_quant="fp8": NVFP4 matrices give the bits of act_quant=False, FP8 ones those of True."""
    path, _ = paths["super-mixed"]
    products: dict[Any, dict[str, torch.Tensor]] = {}
    for act_quant in (False, True, "fp8"):
        with LLM(path, dtype="float32", act_quant=act_quant, **LIMITS) as llm:
            modules = dict(llm.runner.model.named_modules())
        found = products.setdefault(act_quant, {})
        for name, module in modules.items():
            if isinstance(module, Linear) and module.storage is not Format.BF16:
                columns = module.weight.shape[1] * (2 if module.storage is Format.NVFP4 else 1)
                x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
                found[f"{module.storage} {name}"] = module(x)
            elif isinstance(module, Experts):
                experts, _, half = module.up_proj.weight.shape
                rng = torch.Generator().manual_seed(1)
                x, logits = (torch.randn(5, n, generator=rng) for n in (2 * half, experts))
                routing = route_experts(logits, None, 2, 1, 1, True, 1.0)
                found[f"{module.up_proj.storage} {name}"] = module(x, routing)
    assert {name.split()[0] for name in products["fp8"]} == {"fp8", "nvfp4"}
    for name, y in products["fp8"].items():
        same, other = (True, False) if name.startswith("fp8") else (False, True)
        assert torch.equal(y, products[same][name]), name
        assert not torch.equal(y, products[other][name]), name
    mixed = {}
    for act_quant in (False, True, "fp8"):
        with LLM(path, dtype="float32", act_quant=act_quant, **LIMITS) as llm:
            mixed[act_quant] = harness.run(llm.runner.model, IDS)[0]
    assert not torch.equal(mixed["fp8"], mixed[False])
    assert sqnr(mixed["fp8"], mixed[False]) > sqnr(mixed[True], mixed[False])


def test_norms_hand_on_codes_that_their_reader_would_make(
    paths: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of norms in 16 bits, quantised in the product; fp32 hands on no codes."""
    path, _ = paths["super-mixed"]
    with LLM(path, dtype="bfloat16", act_quant="fp8", **LIMITS) as llm:
        model = llm.runner.model
        with counting_calls() as called:
            found = harness.run(model, IDS, [5, -1, len(IDS) - 6])[0]
        assert called["add_rms_norm_fp8"]
        assert called["gated_rms_norm_fp8"]
        monkeypatch.setattr(Linear, "code_scale", None)
        with counting_calls() as called:
            want = harness.run(model, IDS, [5, -1, len(IDS) - 6])[0]
        assert "add_rms_norm_fp8" not in called
        assert "gated_rms_norm_fp8" not in called
    assert torch.equal(found, want)
    monkeypatch.undo()
    with LLM(path, dtype="float32", act_quant="fp8", **LIMITS) as llm:
        assert all(block.code_scale is None for block in llm.runner.model.blocks)


def test_an_fp8_matrix_without_input_scale_stays_w8a16(
    paths: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = paths["super-mixed"]
    name = "backbone.layers.0.mixer.in_proj.input_scale"
    assert name in load_file(path / "model.safetensors")
    other = rewritten(path, tmp_path / "m", lambda t: {k: v for k, v in t.items() if k != name})
    with LLM(other, act_quant="fp8", **LIMITS) as llm:
        assert any("1 have none and run as w8a16" in note for note in llm.notes)
        layer = llm.runner.model.layers[0].mixer
        assert not layer.in_proj.quantises
        assert layer.out_proj.quantises
    with pytest.raises(CheckpointError, match="input_scale"):
        LLM(other, act_quant=True, **LIMITS)
    with pytest.raises(ConfigError, match="act_quant='int8': use False, True"):
        LLM(path, act_quant="int8", **LIMITS)


def test_input_scales_are_those_of_the_file(paths: dict[str, Any], tmp_path: Path) -> None:
    """One expert's scale moves the logits with act_quant, and only then."""
    name = f"{MOE}.experts.1.down_proj.input_scale"
    path, _ = paths["super-mixed"]
    other = rewritten(path, tmp_path / "m", lambda t: t | {name: t[name] * 40})
    for act_quant in (False, True):
        runs = []
        for p in (path, other):
            with LLM(p, dtype="float32", act_quant=act_quant, **LIMITS) as llm:
                runs.append(harness.run(llm.runner.model, IDS)[0])
        assert torch.equal(*runs) is not act_quant


# ---------------------------------------------------------------------------------- broken scales
@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("value", [0.0, float("nan"), None])
def test_a_broken_scale_stops_the_load_where_it_is_used(
    part: str, value: float | None, paths: dict[str, Any], tmp_path: Path
) -> None:
    name = f"{MOE}.experts.2.up_proj.{part}"
    path, _ = paths["super-mixed"]
    assert name in load_file(path / "model.safetensors")

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if value is None:
            return {n: t for n, t in tensors.items() if n != name}
        return tensors | {name: torch.full_like(tensors[name], value)}

    broken = rewritten(path, tmp_path / "m", change)
    where = rf"layers\.3\.mixer\.experts.*{part}.*expert 2"
    with pytest.raises(CheckpointError, match=where):
        LLM(broken, act_quant=True, **LIMITS)
    if part == "weight_scale_2":
        with pytest.raises(CheckpointError, match=where):
            LLM(broken, **LIMITS)
        return
    with LLM(broken, **LIMITS) as llm:  # unused: it may be anything
        logits, _ = harness.run(llm.runner.model, IDS)
        assert logits.isfinite().all()
        assert any("input scales" in note for note in llm.notes)
