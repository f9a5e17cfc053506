"""Every public spelling of a checkpoint gives the same destinations."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemotriton.errors import CheckpointError
from nemotriton.model.checkpoint import (
    expected,
    make_plan,
    open_source,
)
from nemotriton.model.renames import rename
from nemotriton.model.synth import write_checkpoint
from tests.checkpoint.files import (
    CONFIG,
    MOE,
    Tensors,
    drop,
    filled,
    loaded,
    planned,
    prefixed,
    renamed,
    rewritten,
    same,
    stack,
)


def flat_conv(tensors: Tensors) -> None:
    for name in tensors:
        if name.endswith("conv1d.weight"):
            tensors[name] = tensors[name].squeeze(1)


LAYOUTS = {
    "model.": prefixed("model."),
    "language_model.": prefixed("language_model."),
    "language_model.backbone.": prefixed("language_model.backbone."),
    "language_model.model.": prefixed("language_model.model."),
    "model.language_model.": prefixed("model.language_model."),
    "no prefix": prefixed(""),
    "stacked": stack(".weight"),
    "stacked without .weight": stack(""),
    "flat conv": flat_conv,
    "embedding": renamed("embeddings", "embedding"),
    "embed_tokens": renamed("backbone.embeddings", "model.embed_tokens"),
    "norm": renamed("backbone.norm_f", "model.norm"),
    "final_layernorm": renamed("backbone.norm_f", "backbone.final_layernorm"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_destinations(plain: Path, tmp_path: Path, layout: str) -> None:
    path = rewritten(plain, tmp_path / "m", LAYOUTS[layout])
    same(loaded(path), loaded(plain))


def test_transformers_in_memory_names_load(plain: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return stack("")(prefixed("model.")(tensors))

    same(loaded(rewritten(plain, tmp_path / "m", change)), loaded(plain))


@pytest.mark.parametrize("shard_bytes", [1, 3_000, 20_000])
def test_shards_give_the_same_destinations(plain: Path, tmp_path: Path, shard_bytes: int) -> None:
    write_checkpoint(CONFIG, tmp_path / "m", shard_bytes=shard_bytes)
    source, plan = planned(tmp_path / "m")
    assert len(source.shards) > 2
    same(filled(source, plan), loaded(plain))


def test_destinations_are_what_the_config_says(plain: Path) -> None:
    tensors = loaded(plain)
    assert {n: t.shape for n, t in tensors.items()} == {
        n: e.shape for n, e in expected(CONFIG).items()
    }
    stored = load_file(plain / "model.safetensors")
    assert torch.equal(
        tensors["layers.3.mixer.experts.up_proj.weight"][2],
        stored[f"{MOE}.experts.2.up_proj.weight"],
    )
    assert torch.equal(
        tensors["layers.0.mixer.conv1d.weight"],
        stored["backbone.layers.0.mixer.conv1d.weight"][:, 0],
    )
    assert torch.equal(
        tensors["mtp.layers.1.final_layernorm.weight"],
        stored["mtp.layers.1.final_layernorm.weight"],
    )


def test_a_file_of_misaligned_tensors_loads(plain: Path, tmp_path: Path) -> None:
    """Offsets need not be multiples of the item size."""
    tensors = load_file(plain / "model.safetensors")
    odd = [("odd.int8", torch.ones(3, dtype=torch.int8)), *tensors.items()]
    header, data = {}, b""
    for name, tensor in odd:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = {torch.int8: "I8", torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path = shutil.copytree(plain, tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(CheckpointError, match=r"1 tensor has no destination: odd\.int8\."):
        planned(path)
    source = open_source(path)
    shard = source.shards[0]
    kept = replace(shard, tensors=tuple(t for t in shard.tensors if t.name != "odd.int8"))
    source = replace(source, shards=(kept,))
    same(filled(source, make_plan(source, CONFIG)), loaded(plain))


def test_names_in_the_table() -> None:
    cases = {
        "backbone.layers.7.mixer.k_proj.k_scale": ("layers.7.mixer.k_proj.k_scale", None, False),
        "model.layers.7.mixer.attn.v_scale": ("layers.7.mixer.v_proj.v_scale", None, False),
        "model.layers.7.mixer.k_scale": ("layers.7.mixer.k_proj.k_scale", None, False),
        "model.layers.1.mixer.experts.31.up_proj.weight_packed": (
            "layers.1.mixer.experts.up_proj.weight",
            31,
            False,
        ),
        "model.layers.1.mixer.experts.0.down_proj.weight_global_scale": (
            "layers.1.mixer.experts.down_proj.weight_scale_2",
            0,
            True,
        ),
        "model.layers.1.mixer.in_proj.input_global_scale": (
            "layers.1.mixer.in_proj.input_scale",
            None,
            True,
        ),
        "model.layers.1.mixer.experts.up_proj_weight_scale": (
            "layers.1.mixer.experts.up_proj.weight_scale",
            None,
            False,
        ),
        "mtp.layers.1.final_layernorm.weight": ("mtp.layers.1.final_layernorm.weight", None, False),
        "model.mtp.layers.0.norm.weight": ("mtp.layers.0.norm.weight", None, False),
        "language_model.lm_head.weight": ("lm_head.weight", None, False),
        "something.else": ("something.else", None, False),
    }
    for name, wanted in cases.items():
        assert tuple(rename(name))[:3] == wanted


# ------------------------------------------------------------------------------------------ dtypes
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_dtype_asked_for_spares_routing_and_recurrence(plain: Path, dtype: torch.dtype) -> None:
    stored = load_file(plain / "model.safetensors")
    kept = ("gate.weight", "e_score_correction_bias", "A_log", ".D", "dt_bias")
    tensors = loaded(plain, dtype)
    for name, tensor in tensors.items():
        fp32 = name.endswith(kept)
        assert tensor.dtype == (torch.float32 if fp32 else dtype), name
        if "experts." not in name:
            original = stored.get(f"backbone.{name}", stored.get(name))
            assert original is not None
            assert torch.equal(tensor, original.view(tensor.shape).to(tensor.dtype)), name


def test_a_correction_bias_near_57_keeps_its_differences(plain: Path, tmp_path: Path) -> None:
    bias = 56.975 + torch.arange(4) * 0.0015
    name = f"{MOE}.gate.e_score_correction_bias"
    path = rewritten(plain, tmp_path / "a", lambda t: t | {name: bias})
    assert torch.equal(loaded(path)["layers.3.mixer.gate.e_score_correction_bias"], bias)
    narrow = rewritten(plain, tmp_path / "b", lambda t: t | {name: bias.bfloat16()})
    notes = planned(narrow)[1].notes
    assert any("1 router correction biases are stored in 16 bits" in n and name in n for n in notes)


# -------------------------------------------------------------------------------------- tied heads
def test_a_tied_head_may_be_absent_or_equal(plain: Path, tmp_path: Path) -> None:
    absent = rewritten(plain, tmp_path / "a", drop("lm_head"), tie_word_embeddings=True)
    tensors = loaded(absent)
    assert "lm_head.weight" not in tensors

    def equal(t: Tensors) -> Tensors:
        return t | {"lm_head.weight": t["backbone.embeddings.weight"].clone()}

    present = rewritten(plain, tmp_path / "b", equal, tie_word_embeddings=True)
    same(loaded(present), tensors)
    [(name, reason)] = planned(present)[1].ignored
    assert name == "lm_head.weight"
    assert "tied" in reason


def test_a_tied_head_that_differs_is_refused(plain: Path, tmp_path: Path) -> None:
    path = rewritten(plain, tmp_path / "m", lambda t: t, tie_word_embeddings=True)
    message = r"tie_word_embeddings is true, but lm_head.weight differs .* Set it to false"
    with pytest.raises(CheckpointError, match=message):
        loaded(path)


def test_a_tied_head_is_compared_to_its_last_row(plain: Path, tmp_path: Path) -> None:
    table = torch.randn(9000, 32, dtype=torch.bfloat16)
    head = table.clone()
    head[-1, -1] += 1

    def change(t: Tensors) -> Tensors:
        return t | {"lm_head.weight": head, "backbone.embeddings.weight": table}

    path = rewritten(plain, tmp_path / "m", change, tie_word_embeddings=True, vocab_size=9000)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from backbone\.embeddings"):
        loaded(path)


# --------------------------------------------------------------------------------------------- MTP
def test_mtp_states(plain: Path, tmp_path: Path) -> None:
    whole = planned(plain)[1]
    assert (whole.mtp, whole.mtp_blocks, whole.mtp_missing) == ("complete", 1, ())
    absent = planned(rewritten(plain, tmp_path / "absent", drop("mtp.")))[1]
    assert (absent.mtp, absent.mtp_blocks, absent.ignored) == ("absent", 0, ())
    assert not any(n.startswith("mtp.") for n in absent.expected)
    skipped = planned(plain, mtp=False)[1]
    assert (skipped.mtp, skipped.mtp_blocks) == ("skipped", 0)
    assert {reason for _, reason in skipped.ignored} == {"MTP was not asked for"}
    assert all(name.startswith("mtp.") for name, _ in skipped.ignored)
    none = replace(CONFIG, mtp=None, mtp_moe=None)
    assert planned(tmp_path / "absent", none)[1].mtp == "none"


@pytest.mark.parametrize(
    "lost", ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.experts.2.down_proj.weight"]
)
def test_half_an_mtp_block_is_reported_and_not_loaded(
    plain: Path, tmp_path: Path, lost: str
) -> None:
    path = rewritten(plain, tmp_path / "m", drop(lost))
    source, plan = planned(path)
    assert (plan.mtp, plan.mtp_blocks) == ("partial", 0)
    wanted = (
        lost
        if "experts" not in lost
        else ("mtp.layers.1.mixer.experts.down_proj.weight of expert 2")
    )
    assert plan.mtp_missing == (wanted,)
    assert (
        len(plan.ignored)
        == sum(n.startswith("mtp.") for n in load_file(plain / "model.safetensors")) - 1
    )
    assert {reason for _, reason in plan.ignored} == {"its MTP block is incomplete"}
    trunk = {n: t for n, t in loaded(plain).items() if not n.startswith("mtp.")}
    same(filled(source, plan), trunk)


def test_the_tensors_say_how_many_mtp_blocks_there_are(plain: Path, tmp_path: Path) -> None:
    def second(t: Tensors) -> Tensors:
        more = {n: v for n, v in t.items() if n.startswith("mtp.")}
        shift = {"mtp.layers.0.": "mtp.layers.2.", "mtp.layers.1.": "mtp.layers.3."}
        return t | {shift[n[:13]] + n[13:]: v.clone() for n, v in more.items()}

    plan = planned(rewritten(plain, tmp_path / "two", second))[1]
    assert (plan.mtp, plan.mtp_blocks) == ("complete", 2)
    assert "mtp.layers.3.final_layernorm.weight" in plan.expected
    seven = rewritten(plain, tmp_path / "seven", lambda t: t, num_nextn_predict_layers=7)
    plan = planned(seven)[1]  # one block, applied seven times
    assert (plan.mtp, plan.mtp_blocks) == ("complete", 1)


# -------------------------------------------------------------------------------------- multimodal
def test_a_vision_tower_is_left_out_and_reported(plain: Path, tmp_path: Path) -> None:
    def wrap(t: Tensors) -> Tensors:
        inner = {f"language_model.{n}": v for n, v in t.items()}
        return inner | {"vision_model.patch.weight": torch.ones(2), "mlp1.0.bias": torch.ones(1)}

    path = rewritten(plain, tmp_path / "m", wrap)
    same(loaded(path), loaded(plain))
    ignored = dict(planned(path)[1].ignored)
    assert set(ignored) == {"vision_model.patch.weight", "mlp1.0.bias"}
    assert set(ignored.values()) == {"outside the language model of a multimodal checkpoint"}
    inside = rewritten(path, tmp_path / "n", renamed("vision_model", "language_model.vision"))
    with pytest.raises(CheckpointError, match=r"no destination: language_model\.vision\.patch"):
        planned(inside)
    alone = rewritten(plain, tmp_path / "o", lambda t: t | {"vision_model.x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"no destination: vision_model\.x"):
        planned(alone)
