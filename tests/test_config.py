"""config.json: every spelling of one model, every preset's printed numbers, legal cuts."""

import copy
import json
import math
from typing import Any

import pytest

from nemotriton.model.config import PRESETS, LayerKind, ModelConfig, MoeConfig

INF = math.inf
REMOVED = object()


def tiny(**changes: Any) -> dict[str, Any]:
    """The tiny preset's JSON with keys replaced; REMOVED takes a key out."""
    data = copy.deepcopy(PRESETS["tiny"]) | changes
    return {key: value for key, value in data.items() if value is not REMOVED}


TINY = ModelConfig.preset("tiny")

# Printed to three decimals (thousand millions); active parameters count embedding and head in full.
PRINTED = {
    "super-120b": ("120.669", "2.942", "12.77"),
    "nano-30b": ("31.578", "0.000", "3.58"),
    "ultra-550b": ("549.309", "11.216", "56.06"),
    "9b-v2": ("8.888", "0.000", "8.89"),
    "12b-v2": ("12.310", "0.000", "12.31"),
    "h-8b": ("8.101", "0.000", "8.10"),
    "h-4b": ("4.489", "0.000", "4.49"),
    "h-47b": ("46.792", "0.000", "46.79"),
    "h-56b": ("56.324", "0.000", "56.32"),
    "nano-4b": ("3.974", "0.000", "3.97"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_parameter_totals(name: str) -> None:
    model = ModelConfig.preset(name)
    total, mtp = model.parameter_count(), model.parameter_count(mtp=True) - model.parameter_count()
    active = model.active_parameter_count()
    assert (f"{total / 1e9:.3f}", f"{mtp / 1e9:.3f}", f"{active / 1e9:.2f}") == PRINTED[name]


@pytest.mark.parametrize(
    "name, size", [("super-120b", 247_222_108_160), ("ultra-550b", 1_121_049_257_984)]
)
def test_bf16_checkpoint_bytes_are_those_of_the_release_index(name: str, size: int) -> None:
    model = ModelConfig.preset(name)
    assert model.bf16_checkpoint_bytes() == size
    mtp_biases = 2 * 512  # fp32 instead of bf16
    mtp = model.parameter_count(mtp=True) - model.parameter_count()
    assert model.bf16_checkpoint_bytes(mtp=False) == size - 2 * mtp - mtp_biases


def test_fp32_gates_add_two_bytes_an_element() -> None:
    model = ModelConfig.preset("nano-30b")
    extra = model.bf16_checkpoint_bytes(gate_fp32=True) - model.bf16_checkpoint_bytes()
    assert extra == 23 * 128 * 2688 * 2


DESCRIBED = {
    "super-120b": "88 layers M40 E40 *8 · MTP 1 (*E)",
    "nano-30b": "52 layers M23 E23 *6 · MTP 0",
    "lightning-30b": "52 layers M23 E23 *6 · MTP 1 (*E)",
    "ultra-550b": "108 layers M48 E48 *12 · MTP 1 (*E)",
    "nano-4b": "42 layers M21 -17 *4 · MTP 0",
    "9b-v2": "56 layers M27 -25 *4 · MTP 0",
    "12b-v2": "62 layers M28 -28 *6 · MTP 0",
    "h-4b": "52 layers M24 -24 *4 · MTP 0",
    "h-8b": "52 layers M24 -24 *4 · MTP 0",
    "h-47b": "98 layers M45 -48 *5 · MTP 0",
    "h-56b": "118 layers M54 -54 *10 · MTP 0",
    "tiny": "9 layers M3 *2 -1 E3 · MTP 1 (*E)",
}


def test_biases_and_tied_head_count() -> None:
    tied = ModelConfig.from_json(tiny(tie_word_embeddings=True))
    assert TINY.parameter_count() - tied.parameter_count() == TINY.vocab * TINY.width
    biased = ModelConfig.from_json(tiny(attention_bias=True, use_bias=True))
    attention = 2 * (6 * 32 + 2 * 2 * 32 + 192)  # q, k, v and o of two layers
    mamba = 3 * (384 + 640 + 12 + 192)  # in- and out-projection of three layers
    assert biased.parameter_count() - TINY.parameter_count() == attention + mamba


def test_describe_names_every_preset() -> None:
    assert {name: ModelConfig.preset(name).describe() for name in PRESETS} == DESCRIBED


def test_layer_indices_and_derived_sizes() -> None:
    model = ModelConfig.preset("super-120b")
    assert model.attention_layers == (7, 16, 25, 36, 47, 58, 69, 78)
    assert model.moe_layers[:5] == (1, 3, 5, 8, 10)
    assert model.moe_layers[-2:] == (85, 87)
    assert model.mlp_layers == ()
    mamba, attention = model.mamba, model.attention
    assert mamba is not None
    assert attention is not None
    assert (mamba.inner, mamba.conv_dim, mamba.in_rows) == (8192, 10240, 18560)
    assert (attention.q_rows, attention.kv_rows) == (4096, 256)
    assert mamba.dt_limit == (0.0, INF)
    assert model.moe == MoeConfig(512, 22, 2688, 5376, 1024, 1, 1, True, 5.0)
    assert ModelConfig.preset("ultra-550b").attention_layers == (
        *(7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98),
    )
    nine = ModelConfig.preset("9b-v2")
    assert nine.attention is not None
    assert nine.attention.q_rows == 5120 != nine.width
    assert nine.eos == (2, 12)
    assert nine.pad == 12
    assert ModelConfig.preset("lightning-30b").max_context == 1048576


@pytest.mark.parametrize("name", PRESETS)
def test_written_json_reads_back_equal(name: str) -> None:
    model = ModelConfig.preset(name)
    text = json.dumps(model.to_json())
    again = ModelConfig.from_json(text)
    assert again == model
    assert again.name == ""
    assert model.name == name


NAMES = ["mamba", "attention", "mlp", "moe", "mamba", "moe", "mamba", "attention", "moe"]
HF_NAMES = [{"mamba": "linear_attention", "attention": "full_attention"}.get(n, n) for n in NAMES]
NO_LAYOUT = {"hybrid_override_pattern": REMOVED, "num_hidden_layers": REMOVED}
NO_MTP_KEYS = {"mtp_hybrid_override_pattern": REMOVED}
INERT = {
    "rope_theta": 5e6,
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"type": "yarn"},
    "expand": 99,
    "mamba_expand": 3,
    "time_step_min": 0.5,
    "time_step_max": 7.0,
    "time_step_floor": 3.0,
    "mamba_dt_min": 0.4,
    "mamba_dt_max": 3.0,
    "mamba_dt_init_floor": 1.0,
    "initializer_range": 3.0,
    "num_logits_to_keep": 7,
    "rescale_prenorm_residual": False,
    "moe_shared_expert_overlap": True,
    "use_mamba_kernels": False,
    "mamba_proj_bias": True,  # use_bias is there and decides
    "quantization_config": {"quant_algo": "NVFP4"},
    "transformers_version": "9.9",
}

SAME_AS_TINY: dict[str, dict[str, Any]] = {
    "pattern only": {"num_hidden_layers": REMOVED},
    "pattern with bars and spaces": {"hybrid_override_pattern": " M*-|EME|\nM* E "},
    "count null": {"num_hidden_layers": None},
    "names": NO_LAYOUT | {"layers_block_type": NAMES},
    "names of transformers": NO_LAYOUT | {"layers_block_type": HF_NAMES},
    "layer_types": NO_LAYOUT | {"layer_types": HF_NAMES},
    "pattern and names agree": {"layers_block_type": HF_NAMES, "layer_types": NAMES},
    "MTP after a slash": NO_MTP_KEYS | {"hybrid_override_pattern": "M*-EMEM*E/*E"},
    "MTP after a slash, no count": NO_MTP_KEYS
    | {"hybrid_override_pattern": "M*-EMEM*E/*E", "num_nextn_predict_layers": REMOVED},
    "MTP names": NO_MTP_KEYS | {"mtp_layers_block_type": ["attention", "moe"]},
    "MTP names of transformers": NO_MTP_KEYS | {"mtp_layers_block_type": ["full_attention", "moe"]},
    "Mamba aliases": {
        "n_groups": REMOVED,
        "conv_kernel": REMOVED,
        "ssm_state_size": REMOVED,
        "chunk_size": REMOVED,
        "use_conv_bias": REMOVED,
        "mamba_n_groups": 2,
        "mamba_d_conv": 4,
        "mamba_state_dim": 64,
        "mamba_chunk_size": 32,
        "mamba_conv_bias": True,
        "mamba_dt_limit": [0, "Infinity"],
    },
    "the other group alias": {"n_groups": REMOVED, "mamba_num_groups": 2},
    "both group keys agree": {"mamba_n_groups": 2, "mamba_num_groups": 2},
    "attention_head_dim": {"head_dim": REMOVED, "attention_head_dim": 32},
    "rms_norm_eps": {"layer_norm_epsilon": REMOVED, "norm_eps": REMOVED, "rms_norm_eps": 1e-5},
    "norm_eps": {"layer_norm_epsilon": REMOVED},
    "torch_dtype": {"dtype": REMOVED, "torch_dtype": "torch.bfloat16"},
    "num_local_experts": {"n_routed_experts": REMOVED, "num_local_experts": 16},
    "router group keys absent": {"n_group": REMOVED, "topk_group": REMOVED},
    "router group keys null": {"n_group": None, "topk_group": None},
    "limit as float": {"time_step_limit": [0.0, INF]},
    "limit as string": {"time_step_limit": [0.0, "Infinity"]},
    "limit as tagged float": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "limit as tagged number": {"time_step_limit": [0.0, {"__float__": INF}]},
    "limit in two spellings": {"time_step_limit": [0, INF], "mamba_dt_limit": [0.0, "Infinity"]},
    "intermediate_size list": {"intermediate_size": [512]},
    "two shared experts": {"n_shared_experts": 2, "moe_shared_expert_intermediate_size": 128},
    "eos list": {"eos_token_id": [2, 2]},
    "keys that change nothing": INERT,
    "puzzle without blocks": {"model_type": "nemotron_h_puzzle", "block_configs": []},
}


@pytest.mark.parametrize("case", SAME_AS_TINY)
def test_spellings_of_one_model(case: str) -> None:
    data = tiny(**SAME_AS_TINY[case])
    assert ModelConfig.from_json(data) == TINY
    assert ModelConfig.from_json(json.dumps(data)) == TINY  # json writes the bare word Infinity


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_multimodal_wrapper_is_opened(key: str) -> None:
    wrapper = {"model_type": "NemotronH_Nano_Omni", "vision_config": {}, key: tiny()}
    assert ModelConfig.from_json(wrapper) == TINY


def test_values_that_do_change_something() -> None:
    def read(**changes: Any) -> ModelConfig:
        return ModelConfig.from_json(tiny(**changes))

    assert read(eos_token_id=[2, 11]).eos == (2, 11)
    assert read(eos_token_id=None, pad_token_id=None).eos == ()
    assert read(pad_token_id=None).pad is None
    assert read(moe_latent_size=0).moe == read(moe_latent_size=None).moe
    latent = read(moe_latent_size=0).moe
    assert latent is not None
    assert latent.latent is None
    bias = read(use_bias=REMOVED, mamba_proj_bias=True).mamba
    assert bias is not None
    assert bias.proj_bias
    limited = read(time_step_limit=[0.001, 0.1]).mamba
    assert limited is not None
    assert limited.dt_limit == (0.001, 0.1)
    no_shared = read(n_shared_experts=0).moe
    assert no_shared is not None
    assert no_shared.shared_width == 0
    all_heads = read(num_key_value_heads=None).attention
    assert all_heads is not None
    assert all_heads.kv_heads == all_heads.heads == 6


@pytest.mark.parametrize("blocks", [1, 2])
def test_declared_mtp_blocks(blocks: int) -> None:
    mtp = ModelConfig.from_json(tiny(num_nextn_predict_layers=blocks)).mtp
    assert mtp is not None
    assert (mtp.blocks, mtp.pattern) == (blocks, (LayerKind.ATTENTION, LayerKind.MOE))


def test_no_mtp_when_the_count_is_zero() -> None:
    names = ["full_attention", "moe"]  # transformers writes these whatever the count
    model = ModelConfig.from_json(
        tiny(num_nextn_predict_layers=0, mtp_layers_block_type=names, mtp_block_configs=[{}])
    )
    assert (model.mtp, model.mtp_moe, model.mtp_mlp_width) == (None, None, 0)
    repeated = ModelConfig.from_json(
        tiny(hybrid_override_pattern="M*-EMEM*E/*E/*E", num_nextn_predict_layers=2)
    )
    assert repeated.mtp is not None
    assert repeated.mtp.blocks == 2


def test_mtp_block_with_mamba_and_mlp() -> None:
    data = tiny(
        hybrid_override_pattern="*E",
        num_hidden_layers=2,
        mtp_hybrid_override_pattern="M-",
        intermediate_size=96,
    )
    model = ModelConfig.from_json(data)
    assert model.mamba == TINY.mamba
    assert (model.mtp_mlp_width, model.mlp_widths, model.mtp_moe) == (96, (0, 0), None)
    assert ModelConfig.from_json(model.to_json()) == model


def test_mlp_widths_as_a_list() -> None:
    data = tiny(
        hybrid_override_pattern="M-*-E-",
        num_hidden_layers=6,
        intermediate_size=[64, 128, 32],
        num_nextn_predict_layers=0,
    )
    model = ModelConfig.from_json(data)
    assert model.mlp_widths == (0, 64, 0, 128, 0, 32)
    assert ModelConfig.from_json(model.to_json()) == model


def puzzle(**changes: Any) -> dict[str, Any]:
    blocks = [
        {"block_type": "mamba"},
        {"block_type": "moe", "moe_intermediate_size": 1280, "num_experts_per_tok": 4},
        {"block_type": "attention", "sliding_window": None},
        {"block_type": "moe", "moe_intermediate_size": 2688, "num_experts_per_tok": 18},
        {"block_type": "moe", "n_routed_experts": 32, "moe_latent_size": 0},
        {"block_type": "mlp", "intermediate_size": 48, "no_op": False},
    ]
    return (
        tiny(
            model_type="nemotron_h_puzzle",
            hybrid_override_pattern=REMOVED,
            num_hidden_layers=6,
            n_routed_experts=64,
            n_group=REMOVED,
            topk_group=REMOVED,
            ssm_state_size=96,
            block_configs=blocks,
            mtp_hybrid_override_pattern="",
            mtp_block_configs=[
                {"block_type": "attention"},
                {"block_type": "moe", "num_experts": 8},
            ],
        )
        | changes
    )


def test_puzzle_sizes_differ_from_layer_to_layer() -> None:
    model = ModelConfig.from_json(puzzle())
    assert model.pattern == "ME*EE-"
    moes = [moe for moe in model.moes if moe is not None]
    assert [(moe.width, moe.top_k, moe.experts, moe.latent) for moe in moes] == [
        (1280, 4, 64, 96),
        (2688, 18, 64, 96),
        (96, 4, 32, None),
    ]
    assert model.mlp_widths == (0, 0, 0, 0, 0, 48)
    assert model.mtp_moe is not None
    assert model.mtp_moe.experts == 8
    assert model.mamba is not None
    assert model.mamba.state == 96
    assert ModelConfig.from_json(model.to_json()) == model


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.5, 0.25, 0.1, 1 / 64, 1e-9])
def test_cut_is_legal_and_divides_as_before(name: str, scale: float | None) -> None:
    model = ModelConfig.preset(name)
    small = model.cut(layers=min(model.layer_count, 7), width_scale=scale)
    assert ModelConfig.from_json(small.to_json()) == small
    assert small.parameter_count(mtp=True) <= model.parameter_count(mtp=True)
    assert small.vocab == model.vocab
    assert small.mtp == model.mtp
    pairs = [(small.width, model.width)]
    assert small.mamba is not None
    assert small.attention is not None
    assert model.mamba is not None
    assert model.attention is not None
    if small.moe is not None and model.moe is not None:
        pairs += [(small.moe.width, model.moe.width), (small.moe.shared_width, small.moe.width)]
        pairs += [(small.moe.latent or 64, model.moe.latent or 64)]
        assert small.moe.top_k <= small.moe.experts
    pairs += [(new, 64) for new in small.mlp_widths if new]
    for new, old in pairs:
        assert new % math.gcd(old, 64) == 0
        assert new % 16 == 0, "an NVFP4 group of 16 would straddle rows"
    assert small.mamba.heads % model.mamba.groups == 0
    assert small.attention.heads % model.attention.kv_heads == 0
    assert small.mamba.head_dim == model.mamba.head_dim
    if scale == 1.0:
        assert small == model.cut(layers=7)


@pytest.mark.parametrize("name", PRESETS)
def test_cut_keeps_a_contiguous_run_with_the_most_kinds(name: str) -> None:
    model = ModelConfig.preset(name)
    for length in range(1, model.layer_count + 1):
        run = model.cut(layers=length).pattern
        windows = [model.pattern[i : i + length] for i in range(model.layer_count - length + 1)]
        assert run in windows
        assert len(set(run)) == max(len(set(window)) for window in windows)
        if len(set(windows[0])) == len(set(run)):
            assert run == windows[0]  # the first layers wherever they suffice


def test_cut_of_known_models() -> None:
    assert ModelConfig.preset("super-120b").cut(layers=3).pattern == "EM*"
    assert ModelConfig.preset("super-120b").cut(layers=8).pattern == "MEMEMEM*"
    one = ModelConfig.preset("nano-30b").cut(layers=1)
    assert (one.pattern, one.attention, one.moe) == ("M", None, None)
    assert ModelConfig.from_json(one.to_json()) == one
    half = ModelConfig.preset("super-120b").cut(width_scale=0.25)
    assert half.width == 1024
    assert half.layer_count == 88
    assert half.moe == MoeConfig(128, 6, 640, 1344, 256, 1, 1, True, 5.0)
    uneven = ModelConfig.from_json(puzzle()).cut(layers=5, width_scale=0.5)
    assert uneven.pattern == "ME*EE"
    assert [moe.width for moe in uneven.moes if moe] == [640, 1344, 64]


def hugging_face(**changes: Any) -> Any:
    """transformers' configuration class built from the tiny preset.

    Its model has no attention biases and no tied head whatever the keys say, so those two are
    counted by hand above.
    """
    transformers = pytest.importorskip("transformers")
    data = tiny(**changes)
    for key in ("model_type", "architectures", "num_hidden_layers"):
        data.pop(key, None)
    return transformers.NemotronHConfig(**data)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_latent_size": None, "use_conv_bias": False},
        {"use_bias": True, "conv_kernel": 3, "head_dim": 48},
        {"hybrid_override_pattern": "M-*-", "mlp_bias": True, "num_nextn_predict_layers": 0},
    ],
)
def test_transformers_writes_what_we_read_and_counts_as_we_do(changes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = hugging_face(**changes)
    ours = ModelConfig.from_json(tiny(**changes, num_hidden_layers=REMOVED))
    assert ModelConfig.from_json(theirs.to_json_string()) == ours
    written = ours.to_json()
    again = transformers.NemotronHConfig(**{k: v for k, v in written.items() if k != "model_type"})
    assert ModelConfig.from_json(again.to_json_string()) == ours
    with torch.device("meta"):
        model = transformers.NemotronHForCausalLM(theirs)
    tensors = [*model.parameters()]
    tensors += [t for name, t in model.named_buffers() if name.endswith("correction_bias")]
    assert sum(tensor.numel() for tensor in tensors) == ours.parameter_count()
