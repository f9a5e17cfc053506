"""Repacking at load: when, what stays in memory, and that a model's numbers do not move."""

from pathlib import Path

import pytest
import torch

from nemotriton import device as devices
from nemotriton.engine.llm import LLM
from nemotriton.kernels.hopper_pack import packed_bytes
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected, matrices
from nemotriton.model.formats import Algorithm, Format, QuantScheme
from nemotriton.model.layers import Experts, Linear
from nemotriton.model.packing import (
    forced_packing,
    packs_for_hopper,
    padding_bytes,
    tiles_for_blackwell,
    widened_bytes,
)
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.synth import write_checkpoint
from tests import harness
from tests.checkpoint.files import BASE
from tests.flavours import FLAVOURS, NO_LATENT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16
LATENT = ModelConfig.from_json(BASE | {"vocab_size": 320, "moe_latent_size": 64})
IDS = torch.randint(3, 320, (40,), generator=torch.Generator().manual_seed(1)).tolist()
LIMITS = {"device": "cpu", "dtype": "bfloat16", "max_context": 128, "max_requests": 2}


def capability(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    info = type("Info", (), {"capability": (major, minor)})
    monkeypatch.setattr(devices, "info", lambda _: info)


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, 9, 0)
    assert packs_for_hopper(2688, 1024, BF16, CUDA)
    assert packs_for_hopper(1856, 2688, torch.float16, CUDA)
    assert not packs_for_hopper(2688, 1024, torch.float32, CUDA), "no tensor core for it"
    assert not packs_for_hopper(64, 64, BF16, CUDA), "four times the bytes"
    assert not packs_for_hopper(2688, 1024, BF16, CPU)
    for other in ((8, 9), (10, 0), (12, 0)):
        capability(monkeypatch, *other)
        assert not packs_for_hopper(2688, 1024, BF16, CUDA)
    with forced_packing(True):
        assert packs_for_hopper(64, 64, BF16, CPU)
        assert not packs_for_hopper(64, 64, torch.float32, CPU)
        with forced_packing(False):
            assert not packs_for_hopper(64, 64, BF16, CPU)


def test_what_padding_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Super's matrices are whole tiles; Nano's experts and in-projections are half a tile short."""

    def extra(name: str, act_quant: bool = False) -> int:
        config = ModelConfig.preset(name)
        wanted = expected(config, release_scheme(config, "nvfp4"), mtp_blocks=0)
        return padding_bytes(wanted, act_quant, BF16, CUDA)

    capability(monkeypatch, 9, 0)
    assert extra("super-120b") == 0
    nano = ModelConfig.preset("nano-30b")
    layers, experts = len(nano.moe_layers), nano.moes[nano.moe_layers[0]].experts
    short = layers * experts * 2 + len(nano.mamba_layers)
    release = release_scheme(nano, "nvfp4")
    bf16 = [m for m in matrices(nano) if m.endswith("in_proj") and release.of(m) is Format.BF16]
    assert extra("nano-30b") == (short - len(bf16)) * 64 * 2688 * 9 // 16
    assert extra("nano-30b", act_quant=True) == 0
    capability(monkeypatch, 10, 0)
    assert extra("nano-30b") == 0
    # scales: of up [1856, 2688] and of in_proj the last tile is half empty, those of down fit
    halves = layers * experts + len(nano.mamba_layers) - len(bf16)
    assert extra("nano-30b", act_quant=True) == halves * 64 * 2688 // 16


def logits(path: Path, packed: bool, **more: object) -> tuple[torch.Tensor, list[Experts], str]:
    with forced_packing(packed), LLM(path, **LIMITS | more) as llm:
        model = llm.runner.model
        found, _ = harness.run(model, IDS, [39, -1])
        layers = [m for m in model.modules() if isinstance(m, Experts)]
        return found, layers, "\n".join(llm.notes)


@pytest.mark.parametrize("latent", [True, False])
def test_a_packed_model_gives_the_same_bits(latent: bool, tmp_path: Path) -> None:
    """On the twins, which unpack: the words are the checkpoint's numbers, order and all."""
    config = LATENT if latent else NO_LATENT
    write_checkpoint(config, tmp_path / "m", scheme=release_scheme(config, "super-mixed"))
    want, layers, notes = logits(tmp_path / "m", False)
    assert not any(layer.packed for layer in layers)
    assert "repacked" not in notes
    found, layers, notes = logits(tmp_path / "m", True)
    assert torch.equal(found, want)
    assert all(layer.packed for layer in layers)
    assert all(layer.ordered == latent for layer in layers)
    assert "NVFP4 matrices are repacked for Hopper" in notes
    up = layers[0].up_proj
    left = {name for name, _ in up.named_parameters()}
    assert left == {"words", "weight_scale_2", "input_scale"}, "only the packed copy stays"
    assert up.words.nbytes == up.words.shape[0] * packed_bytes(layers[0].width, 64)


def test_quantised_activations_and_other_dtypes_stay_as_they_are(tmp_path: Path) -> None:
    FLAVOURS["super-mixed"](tmp_path / "m")
    for more in ({"act_quant": True}, {"dtype": "float32"}):
        _, layers, notes = logits(tmp_path / "m", True, **more)
        assert layers
        assert not any(layer.packed for layer in layers)
        assert "repacked" not in notes


@pytest.mark.parametrize("flavour", ["super-mixed", "all nvfp4"])
def test_quantised_activations_on_blackwell_take_scales_in_tiles(
    flavour: str, tmp_path: Path
) -> None:
    """On the twins, which bring the scales back into rows: the same bits."""
    FLAVOURS[flavour](tmp_path / "m")
    want, layers, notes = logits(tmp_path / "m", False, act_quant=True)
    assert not any(layer.tiled for layer in layers)
    assert "w4a4, emulated" in notes
    with forced_packing(True), LLM(tmp_path / "m", **LIMITS, act_quant=True) as llm:
        model, notes = llm.runner.model, "\n".join(llm.notes)
        found, _ = harness.run(model, IDS, [39, -1])
    assert torch.equal(found, want)
    assert "codes multiplied by codes" in notes
    tiled = [m for m in model.modules() if isinstance(m, Linear | Experts) and m.tiled]
    assert any(isinstance(m, Experts) for m in tiled)
    assert any(isinstance(m, Linear) for m in tiled) == (flavour == "all nvfp4")
    for m in tiled:
        names = {name.rpartition(".")[2] for name, _ in m.named_parameters()}
        assert "scale_tiles" in names
        assert "weight_scale" not in names


def test_scales_go_to_tiles_on_blackwell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, 10, 3)
    assert tiles_for_blackwell(BF16, CUDA)
    assert not tiles_for_blackwell(torch.float32, CUDA), "w4a4 is emulated in fp32"
    assert not tiles_for_blackwell(BF16, CPU)
    for other in ((9, 0), (12, 0)):
        capability(monkeypatch, *other)
        assert not tiles_for_blackwell(BF16, CUDA)


@pytest.mark.parametrize("algorithm", [Algorithm.NVFP4, Algorithm.FP8])
def test_latent_projections_in_any_format_give_columns_in_order(
    algorithm: Algorithm, tmp_path: Path
) -> None:
    listed = dict.fromkeys((m for m in matrices(LATENT) if "experts." in m), Algorithm.NVFP4)
    scheme = QuantScheme(default=algorithm, listed=listed)
    write_checkpoint(LATENT, tmp_path / "m", scheme=scheme)
    want, _, _ = logits(tmp_path / "m", False)
    found, layers, _ = logits(tmp_path / "m", True)
    assert torch.equal(found, want)
    assert all(layer.ordered for layer in layers)


@pytest.mark.parametrize("flavour", ["all nvfp4", "weight only", "lm_head nvfp4"])
def test_dense_matrices_are_packed_too(flavour: str, tmp_path: Path) -> None:
    """The head among them; biases and epilogues stay where they are."""
    FLAVOURS[flavour](tmp_path / "m")
    want, _, _ = logits(tmp_path / "m", False)
    with forced_packing(True), LLM(tmp_path / "m", **LIMITS) as llm:
        model = llm.runner.model
        found, _ = harness.run(model, IDS, [39, -1])
    assert torch.equal(found, want)
    dense = [m for m in model.modules() if isinstance(m, Linear) and m.storage is Format.NVFP4]
    assert model.lm_head in dense
    for layer in dense:
        left = {name for name, _ in layer.named_parameters()}
        assert "words" in left
        assert not left & {"weight", "weight_scale"}


def test_the_largest_matrix_that_is_decoded_for_a_prompt() -> None:
    config = ModelConfig.preset("super-120b")
    wanted = expected(config, release_scheme(config, "release"))
    assert widened_bytes(wanted, BF16) == 2 * 18560 * 4096, "Mamba's in-projection"
    assert widened_bytes(wanted, torch.float32) == 0
    assert widened_bytes(expected(config), BF16) == 0, "nothing is quantised"
