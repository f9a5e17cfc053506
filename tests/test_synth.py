"""Synthetic weights: seeded, alike in every dtype, scaled for a hundred layers; their files."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import NemotronHForCausalLM

from nemotriton.errors import CheckpointError, ConfigError
from nemotriton.kernels.op import use
from nemotriton.model import training
from nemotriton.model.checkpoint import (
    destination_dtype,
    expected,
    load,
    make_plan,
    open_source,
)
from nemotriton.model.config import LayerKind, ModelConfig
from nemotriton.model.expected import Role, matrices
from nemotriton.model.formats import UNQUANTISED, Format, QuantScheme
from nemotriton.model.mixers import MoeMixer
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.nvfp4 import Fp8, Nvfp4, dequantize_fp8, dequantize_nvfp4
from nemotriton.model.release_schemes import QUANTS, release_scheme
from nemotriton.model.synth import fill, write_checkpoint
from nemotriton.model.training import train_mixer
from nemotriton.model.writer import CheckpointWriter

Tensors = dict[str, torch.Tensor]
TINY = ModelConfig.preset("tiny")
CPU = torch.device("cpu")


def synthetic(
    config: ModelConfig = TINY,
    scheme: QuantScheme = UNQUANTISED,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    skew: float = 0.0,
) -> Tensors:
    """All weights of a model, in buffers that held NaN (or 0x7f) before."""
    tensors = {}
    for name, entry in expected(config, scheme).items():
        kind = destination_dtype(entry.role, dtype)
        raw = torch.full((*entry.shape, kind.itemsize), 0x7F, dtype=torch.uint8)
        tensors[name] = raw.view(kind).squeeze(-1)
    fill(config, tensors, seed, skew)
    return tensors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


# --------------------------------------------------------------------------------------- the values
@pytest.mark.parametrize("quant", QUANTS)
def test_a_tensor_depends_on_the_seed_and_its_name_alone(quant: str) -> None:
    scheme = release_scheme(TINY, quant)
    first, other = synthetic(scheme=scheme), synthetic(scheme=scheme, seed=1)
    alone = {name: torch.empty_like(tensor) for name, tensor in reversed(first.items())}
    for name in alone:
        fill(TINY, {name: alone[name]}, 0)
        assert same(alone[name], first[name]), name
        constant = name.endswith("_scale") and first[name].dtype is torch.float32
        if not constant and not name.endswith("scale_2"):
            assert not same(first[name], other[name]), name
    up = [f"layers.{i}.mixer.experts.up_proj.weight" for i in (3, 5)]
    assert not same(first[up[0]], first[up[1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_hold_the_rounded_weights(dtype: torch.dtype) -> None:
    wide, narrow = synthetic(), synthetic(dtype=dtype)
    for name in wide:
        assert same(wide[name].to(narrow[name].dtype), narrow[name]), name


def test_deviations_and_ranges() -> None:
    tensors = synthetic()
    mixer = "layers.0.mixer"
    deviations = {
        "embeddings.weight": 1.0,
        "lm_head.weight": 2.5 / math.sqrt(192),
        f"{mixer}.in_proj.weight": 1 / math.sqrt(192),
        f"{mixer}.out_proj.weight": 0.5 / math.sqrt(384),
        "layers.1.mixer.k_proj.weight": 1.3 / math.sqrt(192),
        "layers.2.mixer.down_proj.weight": 0.5 / math.sqrt(1.5 * 512),
        "layers.3.mixer.gate.weight": 1 / math.sqrt(192),
        # K = 4 experts of weight 2.5 / 4 each and independent signs give an RMS of one
        "layers.3.mixer.experts.down_proj.weight": 4 / (2.5 * math.sqrt(4 * 1.5 * 96)),
        "mtp.layers.0.eh_proj.weight": 1 / math.sqrt(384),
    }
    for name, deviation in deviations.items():
        assert float(tensors[name].std()) == pytest.approx(deviation, rel=0.06), name
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), name
        if name.endswith("norm.weight") or name == "norm_f.weight":
            assert 0.9 < float(tensor.mean()) < 1.1
            assert 0.05 < float(tensor.std()) < 0.15
        if name.endswith("down_proj.weight"):
            assert float(tensor.sum(-1).abs().max()) < 1e-4, name
    decay = torch.cat([tensors[f"layers.{i}.mixer.A_log"] for i in (0, 4, 6)]).exp()
    assert bool(((decay >= 1) & (decay <= 16)).all())
    assert float(decay.max() - decay.min()) > 8
    step = torch.cat([tensors[f"layers.{i}.mixer.dt_bias"] for i in (0, 4, 6)])
    step = torch.nn.functional.softplus(step)
    assert bool(((step >= 0.99e-3) & (step <= 0.101)).all())
    assert float(step.max() / step.min()) > 10


def dequantised(tensors: Tensors, matrix: str, storage: Format) -> torch.Tensor:
    weight = tensors[f"{matrix}.weight"]
    if storage is Format.NVFP4:
        parts = (tensors[f"{matrix}.{part}"] for part in ("weight_scale", "weight_scale_2"))
        return dequantize_nvfp4(Nvfp4(weight, *parts))
    return dequantize_fp8(Fp8(weight, tensors[f"{matrix}.weight_scale"]))


@pytest.mark.parametrize("quant", ["fp8", "nvfp4", "super-mixed"])
def test_quantised_weights_have_the_same_deviations(quant: str) -> None:
    scheme = release_scheme(TINY, quant)
    plain, stored = synthetic(), synthetic(scheme=scheme)
    ratios = []
    for matrix in matrices(TINY):
        storage = scheme.of(matrix)
        if storage is Format.BF16:
            assert same(plain[f"{matrix}.weight"], stored[f"{matrix}.weight"])
            continue
        weight = dequantised(stored, matrix, storage)
        ratios.append(float(weight.std() / plain[f"{matrix}.weight"].std()))
        assert ratios[-1] == pytest.approx(1, rel=0.1), matrix  # few block scales are few draws
        if matrix.endswith("down_proj"):  # rows sum to zero, but for fp8's rounding
            independent = math.sqrt(weight.shape[-1]) * float(weight.std())
            assert float(weight.sum(-1).square().mean().sqrt()) < 0.05 * independent, matrix
    assert len(ratios) >= 10
    assert sum(ratios) / len(ratios) == pytest.approx(1, rel=0.03)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no weight layers\.9\.norm\.weight"):
        fill(TINY, {"layers.9.norm.weight": torch.empty(128)})


# ----------------------------------------------------------------------------------- a deep model
def deep_config(tied: bool = False) -> ModelConfig:
    """One hundred layers of every kind, in a width of 64."""
    sizes = {
        "hidden_size": 64,
        "hybrid_override_pattern": ("ME-M*E" * 17)[:100],
        "num_hidden_layers": 100,
        "intermediate_size": 128,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "moe_intermediate_size": 32,
        "moe_latent_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "tie_word_embeddings": tied,
    }
    return ModelConfig.from_json(TINY.to_json() | sizes)


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """How often each expert was chosen, one vector a call of a router."""
    counts: list[torch.Tensor] = []
    choose = training.choose_experts

    def counting(mixer: MoeMixer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = choose(mixer, x)
        counts.append(chosen.flatten(0, -2).sum(0))
        return weights, chosen

    monkeypatch.setattr(training, "choose_experts", counting)
    return counts


def run(config: ModelConfig, skew: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(final hidden states [T, D], logits [T, V]) of 192 random tokens."""
    model = NemotronH(config, torch.float32, CPU)
    fill(config, model.named_tensors(), seed=5, skew=skew)
    model.prepare()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab, (1, 192), generator=generator)
    with torch.no_grad(), use({"*": "ref"}):
        hidden = model.train_forward(ids)[0]
        return hidden, model.logits(hidden)


@pytest.mark.parametrize("tied", [False, True])
def test_a_hundred_layers_stay_in_range(tied: bool, usage: list[torch.Tensor]) -> None:
    config = deep_config(tied)
    assert config.layer_count == 100
    hidden, logits = run(config)
    assert logits.isfinite().all()
    assert 1.8 < float(logits.std()) < 3.5
    # neighbours are told apart, and the prediction is not the token itself over and over
    unit = torch.nn.functional.normalize(hidden, dim=-1)
    assert abs(float((unit[1:] * unit[:-1]).sum(-1).mean())) < 0.3
    assert len(logits.argmax(-1).unique()) > 60
    chosen = torch.stack(usage).float()  # [routers, E]
    assert chosen.shape == (config.pattern.count(LayerKind.MOE), 16)
    share = chosen.mean(0) / chosen.mean()
    assert 0.7 < float(share.min()) <= float(share.max()) < 1.4
    worst = chosen.amax(-1) / chosen.mean(-1)
    assert float(worst.mean()) < 2


def test_every_mixer_adds_its_part() -> None:
    """Each about half of the embedding's unit, so none is drowned and none drowns the rest."""
    config = deep_config()
    added: dict[str, list[float]] = {}
    model = NemotronH(config, torch.float32, CPU)
    fill(config, model.named_tensors(), seed=5)
    model.prepare()
    ids = torch.randint(0, config.vocab, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), use({"*": "ref"}):
        h = model.embeddings(ids)
        for kind, block in zip(config.kinds, model.layers, strict=True):
            delta = train_mixer(block.mixer, block.norm(h[0])[None])
            added.setdefault(kind.name, []).append(float(delta.square().mean().sqrt()))
            h = h + delta
    assert 4 < float(h.square().mean().sqrt()) < 7
    for kind, sizes in added.items():
        assert 0.25 < min(sizes) <= max(sizes) < 1.0, kind


def test_skew_makes_few_experts_work(usage: list[torch.Tensor]) -> None:
    def unevenness(skew: float) -> float:
        usage.clear()
        run(deep_config(), skew)
        chosen = torch.stack(usage).float()
        return float((chosen.amax(-1) / chosen.mean(-1)).mean())

    some, strong = unevenness(0.5), unevenness(4.0)
    assert 2 < some < strong  # without skew it is below 2, see above
    assert strong > 3.5  # of 4, where the same 4 of 16 experts would do all the work


# -------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("quant", QUANTS)
def test_a_written_checkpoint_loads_to_the_same_weights(
    tmp_path: Path, quant: str, stacked: bool
) -> None:
    scheme = release_scheme(TINY, quant)
    path = tmp_path / "model"
    write_checkpoint(TINY, path, 3, scheme=scheme, stacked=stacked, shard_bytes=600_000)
    assert ModelConfig.from_json(path) == TINY
    source = open_source(path)
    assert len(source.shards) > 1
    plan = make_plan(source, TINY)
    for matrix in matrices(TINY):
        assert plan.scheme.algorithm(matrix) is scheme.algorithm(matrix)
    assert plan.expected == expected(TINY, scheme)
    wanted = synthetic(scheme=scheme, dtype=torch.bfloat16, seed=3)
    found = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    load(source, plan, found.__getitem__)
    for name in wanted:
        assert same(found[name], wanted[name]), name
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.nbytes
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_checkpoint(TINY, path, dtype=torch.float32)
    model, report = NemotronHForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    ours = synthetic()
    theirs = model.state_dict()
    for name, tensor in ours.items():
        if not name.startswith("mtp."):
            key = name if name.startswith("lm_head") else f"model.{name}"
            key = key.removesuffix(".weight") if ".experts." in key else key
            assert torch.equal(theirs[key].view(tensor.shape), tensor), name


def test_release_dtypes_of_what_stays_fp32(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path / "m")
    roles = expected(TINY)
    plan = make_plan(open_source(tmp_path / "m"), TINY)
    for placement in plan.placements:
        wanted = "F32" if roles[placement.name].role is Role.FP32 else "BF16"
        assert placement.info.dtype == wanted, placement.name


def test_an_existing_path_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match=r"/m exists\. Remove it, or choose another"):
        write_checkpoint(TINY, tmp_path / "m")
    assert not list((tmp_path / "m").iterdir())


def test_a_run_that_stops_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    def write_and_stop() -> None:
        with CheckpointWriter(tmp_path / "m", shard_bytes=100) as writer:
            writer.add_json("config.json", {})
            for index in range(5):
                writer.add(f"t{index}", torch.ones(30))
            [partial] = tmp_path.iterdir()  # what a killed run would leave
            assert partial.name.startswith(".m.partial-")
            assert len(list(partial.glob("*.safetensors"))) == 4
            assert not list(partial.glob("*.json"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert not list(tmp_path.iterdir())
