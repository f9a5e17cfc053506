"""Quantised checkpoints: what is stored decides, and scales that cannot be stop the load."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemotriton.errors import CheckpointError
from nemotriton.model.formats import Algorithm, Format
from nemotriton.model.nvfp4 import Nvfp4, dequantize_nvfp4
from tests.checkpoint.files import (
    MOE,
    UP,
    Tensors,
    added,
    chain,
    drop,
    filled,
    loaded,
    planned,
    renamed,
    rewritten,
    same,
    stack,
)


def test_quantised_tensors_arrive_as_stored(quantised: Path) -> None:
    source, plan = planned(quantised)
    tensors = filled(source, plan)
    stored = load_file(quantised / "model.safetensors")
    for expert in range(4):
        for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            a = tensors[f"{UP}.{part}"][expert]
            b = stored[f"{MOE}.experts.{expert}.up_proj.{part}"]
            assert torch.equal(a.float(), b.float()), part
    assert tensors[f"{UP}.weight_scale_2"].shape == (4,)
    assert tensors["layers.0.mixer.in_proj.weight"].dtype is torch.float8_e4m3fn
    assert tensors["layers.0.mixer.in_proj.weight_scale"].shape == ()
    assert plan.scheme.of(UP) is Format.NVFP4
    assert plan.scheme.of("layers.0.mixer.in_proj") is Format.FP8
    assert plan.scheme.of("layers.1.mixer.q_proj") is Format.BF16
    assert plan.scheme.kv_scaled == {"layers.1.mixer"}
    assert plan.notes == ()


def test_stacked_scales_and_single_ones_are_alike(quantised: Path, tmp_path: Path) -> None:
    same(loaded(rewritten(quantised, tmp_path / "m", stack(".weight"))), loaded(quantised))


def stack_flat_names(tensors: Tensors) -> Tensors:
    """experts.up_proj, experts.up_proj_weight_scale, ..."""
    merged = stack("")(tensors)
    return {
        re.sub(r"(\.experts\.(?:up|down)_proj)\.(\w+scale\w*)", r"\1_\2", n): t
        for n, t in merged.items()
    }


def test_stacked_scales_with_flat_names(quantised: Path, tmp_path: Path) -> None:
    path = rewritten(quantised, tmp_path / "m", stack_flat_names)
    assert any(
        n.endswith("experts.up_proj_weight_scale_2") for n in load_file(path / "model.safetensors")
    )
    same(loaded(path), loaded(quantised))


def test_compressed_tensors_globals_are_divisors(quantised: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        out = {}
        for name, tensor in tensors.items():
            base, _, part = name.rpartition(".")
            four_bits = f"{base}.weight_scale_2" in tensors
            if four_bits and part == "weight":
                out[f"{base}.weight_packed"] = tensor
            elif part == "weight_scale_2":
                out[f"{base}.weight_global_scale"] = tensor.reciprocal().view(1)
            elif four_bits and part == "input_scale":
                out[f"{base}.input_global_scale"] = tensor.reciprocal().view(1)
            else:
                out[name] = tensor
        return out

    path = rewritten(quantised, tmp_path / "m", change)
    theirs, ours = loaded(path), loaded(quantised)
    assert theirs.keys() == ours.keys()
    for name in ours:
        if name.endswith(("weight_scale_2", "input_scale")):
            assert torch.allclose(theirs[name], ours[name], rtol=3e-7, atol=0)  # two divisions
        else:
            same({name: theirs[name]}, {name: ours[name]})
    values = [
        dequantize_nvfp4(
            Nvfp4(*(t[f"{UP}.{p}"] for p in ("weight", "weight_scale", "weight_scale_2")))
        )
        for t in (theirs, ours)
    ]
    assert torch.allclose(*values, rtol=3e-7, atol=0)


def test_what_is_stored_decides_and_differences_are_named(quantised: Path, tmp_path: Path) -> None:
    path = shutil.copytree(quantised, tmp_path / "m")
    (path / "hf_quant_config.json").unlink()
    plan = planned(path)[1]
    assert plan.scheme.algorithm(UP) is Algorithm.NVFP4
    assert plan.scheme.algorithm("layers.0.mixer.in_proj") is Algorithm.FP8
    [note] = plan.notes
    assert note.startswith(
        "no quantisation config; the formats of 8 matrices were taken from their"
    )
    everything = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (path / "hf_quant_config.json").write_text(json.dumps(everything))
    plan = planned(path)[1]
    [note] = plan.notes
    assert "matrices are stored otherwise than declared" in note
    assert "layers.0.mixer.in_proj (fp8, declared nvfp4)" in note
    assert plan.scheme.of("lm_head") is Format.BF16
    assert plan.scheme.of("mtp.layers.1.mixer.experts.up_proj") is Format.BF16
    assert plan.scheme.kv == "fp8"


def test_weight_only_label_survives(quantised: Path, tmp_path: Path) -> None:
    table = {
        "backbone.layers.3.mixer.experts": {"quant_algo": "W4A16_NVFP4"},
        "backbone.layers.3.mixer.shared_experts": {"quant_algo": "FP8"},
        "backbone.layers.0.mixer": {"quant_algo": "FP8"},
        "backbone.layers.2.mixer": {"quant_algo": "FP8"},
    }
    path = shutil.copytree(quantised, tmp_path / "m")
    data = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": table}}
    (path / "hf_quant_config.json").write_text(json.dumps(data))
    plan = planned(path, act_quant=True)[1]
    assert plan.notes == ()
    assert plan.scheme.weight_only(UP)
    assert not plan.scheme.weight_only("layers.0.mixer.in_proj")
    assert f"{UP}.input_scale" in plan.expected  # stored, so it has a place, used or not


def scaled(name: str, value: float) -> Callable[[Tensors], Tensors]:
    return lambda t: t | {name: torch.full_like(t[name], value)}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "matrix",
    [f"{MOE}.experts.2.up_proj.weight_scale_2", "backbone.layers.0.mixer.in_proj.weight_scale"],
)
def test_a_used_scale_that_cannot_be(
    quantised: Path, tmp_path: Path, matrix: str, value: float
) -> None:
    path = rewritten(quantised, tmp_path / "m", scaled(matrix, value))
    expert = " (expert 2)" if "experts" in matrix else ""
    message = re.escape(f"{matrix}{expert} is {value}; a scale must be finite and above zero")
    with pytest.raises(CheckpointError, match=message):
        loaded(path)


def test_a_wrong_scale_in_a_stack_names_its_expert(quantised: Path, tmp_path: Path) -> None:
    name = f"{MOE}.experts.3.down_proj.weight_scale_2"
    path = rewritten(quantised, tmp_path / "m", chain(scaled(name, 0.0), stack(".weight")))
    message = (
        r"experts.down_proj.weight_scale_2 \(expert 3\) is 0.0; .* layers.3.mixer.experts.down_proj"
    )
    with pytest.raises(CheckpointError, match=message):
        loaded(path)


def test_input_scales_matter_only_where_they_are_used(quantised: Path, tmp_path: Path) -> None:
    """Expert 3 lacks one, expert 0 has a zero: weight-only neither needs nor checks them."""
    lost, zero = (f"{MOE}.experts.{e}.up_proj.input_scale" for e in (3, 0))
    path = rewritten(quantised, tmp_path / "m", chain(drop(lost), scaled(zero, 0.0)))
    plan = planned(path)[1]
    assert plan.absent_scales == {f"{UP}.input_scale": (3,)}
    assert plan.notes == (f"experts lack input scales, which are not used: {UP}.input_scale (1)",)
    scales = loaded(path)[f"{UP}.input_scale"]
    assert scales[:3].isfinite().all()
    assert scales[3].isnan()
    with pytest.raises(CheckpointError, match=f"1 tensor is missing: {UP}.input_scale of expert 3"):
        planned(path, act_quant=True)
    path = rewritten(quantised, tmp_path / "n", scaled(zero, 0.0))
    assert loaded(path)[f"{UP}.input_scale"][0] == 0
    with pytest.raises(CheckpointError, match=r"input_scale \(expert 0\) is 0.0"):
        loaded(path, act_quant=True)
    none = rewritten(
        quantised, tmp_path / "o", lambda t: {n: v for n, v in t.items() if "input_scale" not in n}
    )
    assert not any("input_scale" in n for n in loaded(none))
    with pytest.raises(CheckpointError, match=r"8 tensors are missing: .*input_scale"):
        planned(none, act_quant=True)


def test_an_input_scale_of_a_bf16_matrix_is_left_out(quantised: Path, tmp_path: Path) -> None:
    name = "backbone.layers.1.mixer.q_proj.input_scale"
    plan = planned(rewritten(quantised, tmp_path / "m", added(name)))[1]
    assert plan.ignored == ((name, "the input scale of a matrix that is not quantised"),)
    with pytest.raises(
        CheckpointError, match=r"no destination: backbone\.layers\.1\.mixer\.q_proj\.weight_s"
    ):
        planned(rewritten(quantised, tmp_path / "n", added(name.replace("input", "weight"))))


def test_a_nan_block_scale_matters_only_over_numbers(quantised: Path, tmp_path: Path) -> None:
    scale, codes = (f"{MOE}.experts.1.up_proj.{p}" for p in ("weight_scale", "weight"))

    def poison(clear: bool) -> Callable[[Tensors], Tensors]:
        def change(t: Tensors) -> Tensors:
            t[scale].view(torch.uint8)[2, 0] = 0xFF
            t[codes][2] = 0x80 if clear else 0x10  # minus zeros, or one half
            return t

        return change

    tensors = loaded(rewritten(quantised, tmp_path / "m", poison(True)))
    assert tensors[f"{UP}.weight_scale"][1, 2, 0] == 0
    assert not tensors[f"{UP}.weight_scale"].float().isnan().any()
    message = re.escape(f"{scale} is NaN for 1 blocks that are not zero, the first at [2, 0]")
    with pytest.raises(CheckpointError, match=message):
        loaded(rewritten(quantised, tmp_path / "n", poison(False)))
    with pytest.raises(
        CheckpointError, match=r"experts.up_proj.weight_scale is NaN .* at \[1, 2, 0\]"
    ):
        loaded(rewritten(quantised, tmp_path / "o", chain(poison(False), stack(".weight"))))


def test_kv_scales(quantised: Path, tmp_path: Path) -> None:
    names = {"layers.1.mixer.k_proj.k_scale", "layers.1.mixer.v_proj.v_scale"}
    tensors = loaded(quantised)
    assert names <= tensors.keys()
    other = renamed("mixer.k_proj.k_scale", "mixer.attn.k_scale")
    same(loaded(rewritten(quantised, tmp_path / "m", other)), tensors)
    without = drop(
        "backbone.layers.1.mixer.k_proj.k_scale", "backbone.layers.1.mixer.v_proj.v_scale"
    )
    plan = planned(rewritten(quantised, tmp_path / "n", without))[1]
    assert (plan.notes, plan.scheme.kv, plan.scheme.kv_scaled) == ((), "fp8", frozenset())
    half = drop("backbone.layers.1.mixer.v_proj.v_scale")
    with pytest.raises(
        CheckpointError, match=r"1 tensor is missing: layers.1.mixer.v_proj.v_scale"
    ):
        planned(rewritten(quantised, tmp_path / "o", half))
