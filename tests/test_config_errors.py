"""config.json: whatever is wrong is refused by key, value and remedy."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemotriton.errors import ConfigError
from nemotriton.model.config import MambaConfig, ModelConfig
from tests.test_config import NAMES, NO_LAYOUT, NO_MTP_KEYS, REMOVED, puzzle, tiny

INF = math.inf


def with_block(index: int, **entry: Any) -> dict[str, Any]:
    """The puzzle's JSON with one entry of block_configs extended."""
    blocks = copy.deepcopy(puzzle()["block_configs"])
    blocks[index] |= entry
    return puzzle(block_configs=blocks)


NAN = math.nan

# What is wrong: the JSON, then what the message must say: key, value, remedy.
MALFORMED: dict[str, tuple[Any, list[str]]] = {
    "other architecture": (
        tiny(model_type="llama"),
        ["model_type 'llama' is not a Nemotron-H model", "Supported: nemotron_h", "Nothing was"],
    ),
    "no model_type": (tiny(model_type=REMOVED), ["model_type", "None", "Supported: nemotron_h"]),
    "wrapper of another": ({"model_type": "x", "text_config": {}}, ["model_type 'x'", "Supported"]),
    "no layout": (tiny(**NO_LAYOUT), ["hybrid_override_pattern is missing", "Add one of them"]),
    "empty pattern": (tiny(hybrid_override_pattern="| "), ["hybrid_override_pattern", "Add one"]),
    "unknown letter": (
        tiny(hybrid_override_pattern="M*-EMXM*E"),
        ["hybrid_override_pattern", '"M*-EMXM*E"', "'X' at position 5", "M (mamba)"],
    ),
    "pattern of another type": (
        tiny(hybrid_override_pattern=["M"]),
        ["hybrid_override_pattern", "['M']", 'Write it as e.g. "M*-E"'],
    ),
    "unknown layer name": (
        tiny(**NO_LAYOUT, layers_block_type=["mamba", "rnn"]),
        ["layers_block_type[1]", '"rnn"', "Use one of: mamba"],
    ),
    "names of another type": (
        tiny(**NO_LAYOUT, layers_block_type="M*"),
        ["layers_block_type", '"M*"', "must be a list", "Use ["],
    ),
    "pattern against names": (
        tiny(layers_block_type=NAMES[:-1]),
        ["layers_block_type", "M*-EMEM*", "hybrid_override_pattern = 'M*-EMEM*E'", "Remove"],
    ),
    "pattern against count": (
        tiny(num_hidden_layers=8),
        ["num_hidden_layers is 8", "9 layers", "Remove num_hidden_layers"],
    ),
    "count of zero": (tiny(num_hidden_layers=0), ["num_hidden_layers is 0", "above zero", "Set"]),
    "MTP keys disagree": (
        tiny(mtp_layers_block_type=["attention"]),
        ["mtp_layers_block_type", '"*"', "mtp_hybrid_override_pattern = '*E'", "Remove"],
    ),
    "MTP without layers": (
        tiny(**NO_MTP_KEYS),
        ["num_nextn_predict_layers is 1", "Add mtp_hybrid_override_pattern"],
    ),
    "MTP count negative": (
        tiny(num_nextn_predict_layers=-1),
        ["num_nextn_predict_layers is -1", "above zero", "Set"],
    ),
    "MTP parts against count": (
        tiny(hybrid_override_pattern="M*-EMEM*E/*E/*E", num_nextn_predict_layers=3),
        ["num_nextn_predict_layers is 3", "2 MTP parts", "Make the two agree"],
    ),
    "slash in the MTP pattern": (
        tiny(mtp_hybrid_override_pattern="*E/*E"),
        ["mtp_hybrid_override_pattern", '"*E/*E"', "Give one block"],
    ),
    "MTP entries against pattern": (
        puzzle(mtp_hybrid_override_pattern="*E", mtp_block_configs=[{"n_routed_experts": 8}]),
        ["mtp_block_configs is 1", "2 layers", "Give one entry"],
    ),
    "aliases disagree": (
        tiny(mamba_num_groups=4),
        ["mamba_num_groups is 4", "n_groups = 2", "Keep the one"],
    ),
    "size missing": (tiny(hidden_size=REMOVED), ["hidden_size is missing", "Add hidden_size"]),
    "size null": (
        tiny(head_dim=None),
        ["head_dim is missing", "null", "Add head_dim or attention_head_dim"],
    ),
    "size zero": (tiny(hidden_size=0), ["hidden_size is 0", "above zero", "Set hidden_size"]),
    "size negative": (tiny(vocab_size=-5), ["vocab_size is -5", "above zero", "Set"]),
    "size a string": (tiny(mamba_num_heads="8"), ["mamba_num_heads", '"8"', "as an integer"]),
    "size a float": (tiny(ssm_state_size=32.0), ["ssm_state_size is 32.0", "as an integer"]),
    "size a boolean": (tiny(chunk_size=True), ["chunk_size is true", "as an integer"]),
    "size infinite": (tiny(hidden_size=INF), ["hidden_size is inf", "as an integer"]),
    "heads and groups": (
        tiny(n_groups=5),
        ["mamba_num_heads is 12", "n_groups = 5", "Correct either"],
    ),
    "query and KV heads": (
        tiny(num_key_value_heads=4),
        ["num_attention_heads is 6", "num_key_value_heads = 4", "Correct either"],
    ),
    "conv too wide": (tiny(conv_kernel=5), ["conv_kernel is 5", "2, 3 and 4", "Correct"]),
    "conv too narrow": (tiny(conv_kernel=1), ["conv_kernel is 1", "2, 3 and 4", "Correct"]),
    "too many experts chosen": (
        tiny(num_experts_per_tok=17),
        ["num_experts_per_tok is 17", "16 experts", "Lower it"],
    ),
    "chosen outside the groups": (
        tiny(n_group=8, topk_group=1),
        ["num_experts_per_tok is 4", "2 experts", "raise n_routed_experts or topk_group"],
    ),
    "groups do not divide": (tiny(n_group=3), ["n_group is 3", "= 16", "Correct either"]),
    "groups of one expert": (tiny(n_group=16), ["n_group is 16", "best two", "Use at most"]),
    "too many groups chosen": (
        tiny(n_group=2, topk_group=3),
        ["topk_group is 3", "n_group = 2", "Lower it"],
    ),
    "scale zero": (
        tiny(routed_scaling_factor=0),
        ["routed_scaling_factor is 0", "above zero", "Correct routed_scaling_factor"],
    ),
    "eps not a number": (tiny(norm_eps=NAN, layer_norm_epsilon=None), ["norm_eps is nan", "Corr"]),
    "eps a string": (
        tiny(layer_norm_epsilon="1e-5", norm_eps=None),
        ["layer_norm_epsilon", '"1e-5"', "Write"],
    ),
    "limit of NaN": (
        tiny(time_step_limit=[0.0, {"__float__": "NaN"}]),
        ["time_step_limit is [0.0, nan]", "low < high", "[0.0, Infinity]"],
    ),
    "limit reversed": (tiny(time_step_limit=[1, 0]), ["time_step_limit is [1, 0]", "Write it as"]),
    "limit of one": (tiny(time_step_limit=[0.0]), ["time_step_limit is [0.0]", "Write it as"]),
    "flag a number": (tiny(use_bias=1), ["use_bias is 1", "true or false", "JSON boolean"]),
    "dtype unknown": (tiny(dtype="int4"), ["dtype", '"int4"', "Use one of: bfloat16"]),
    "state dtype unknown": (
        tiny(mamba_ssm_cache_dtype="int4"),
        ["mamba_ssm_cache_dtype", '"int4"', "Use one of: float32, bfloat16, float16"],
    ),
    "other activation": (tiny(mlp_hidden_act="silu"), ["mlp_hidden_act", '"silu"', "relu2"]),
    "window": (tiny(sliding_window=4096), ["sliding_window is 4096", "Set it to null"]),
    "biases in MoE": (tiny(mlp_bias=True), ["mlp_bias is true", "MoE", "set mlp_bias to false"]),
    "eos outside": (
        tiny(eos_token_id=[2, 2048]),
        ["eos_token_id is [2, 2048]", "0..2047", "Correct"],
    ),
    "bos a list": (tiny(bos_token_id=[1]), ["bos_token_id is [1]", "one token id", "Write"]),
    "MLP list too short": (
        tiny(intermediate_size=[8, 8]),
        ["intermediate_size is [8, 8]", "2 entries for 1", "one for each '-' layer"],
    ),
    "MLP list with zero": (tiny(intermediate_size=[0]), ["intermediate_size[0] is 0", "above"]),
    "shared width missing": (
        tiny(moe_shared_expert_intermediate_size=None),
        ["moe_shared_expert_intermediate_size is missing", "Add"],
    ),
    "blocks of another type": (
        puzzle(block_configs={"0": {}}),
        ["block_configs", "must be a list of objects", "Give one object for each layer"],
    ),
    "blocks against count": (
        puzzle(num_hidden_layers=7),
        ["num_hidden_layers is 7", "6 layers", "Remove"],
    ),
    "unknown key of a block": (
        with_block(2, sliding_window=512),
        ["block_configs[2].sliding_window is 512", "not understood", "Known: block_type"],
    ),
    "Mamba sizes differ": (
        puzzle(
            block_configs=[{"block_type": "mamba"}, {"block_type": "mamba", "ssm_state_size": 16}],
            num_hidden_layers=2,
        ),
        ["block_configs: ssm_state_size is 16", "96", "Only MoE layers and MLPs may differ"],
    ),
    "size of one block": (
        with_block(3, moe_intermediate_size=-1),
        ["block_configs[3].moe_intermediate_size is -1", "above zero", "Set"],
    ),
    "text not JSON": ("{ nope", ["not valid JSON", "line 1 column 3", "Fetch the file again"]),
    "key written twice": (
        '{"model_type": "nemotron_h", "hidden_size": 8, "hidden_size": 9}',
        ["hidden_size is [8, 9]", "more than once", "Keep one"],
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_is_refused_by_key_value_and_remedy(case: str) -> None:
    source, needed = MALFORMED[case]
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(source)
    assert caught.type is ConfigError
    message = str(caught.value)
    assert message.startswith("block_configs") <= ("block_configs" in str(source))
    assert [text for text in needed if text not in message] == [], message


def refused(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(source)
    return str(caught.value)


WEIRD: list[Any] = [
    *(None, True, False, 0, -1, 3, 10**30, 2.5, NAN, INF, -INF),
    *("", "*", "M/", "nonsense", "Infinity", [], [None], [3], ["moe"], [[1]], [1, 2, 3]),
    *({}, {"__float__": "NaN"}, {"__float__": []}, [{}], [{"block_type": 3}], [{"block_type": []}]),
]


@pytest.mark.parametrize("model", ["tiny", "puzzle"])
def test_nothing_but_config_error_escapes(model: str) -> None:
    data = tiny() if model == "tiny" else puzzle()
    outcomes = {"read": 0, "refused": 0}
    for key in [*data, "layers_block_type", "layer_types", "mtp_layers_block_type"]:
        for value in WEIRD:
            try:
                read = ModelConfig.from_json(data | {key: value})
            except ConfigError:
                outcomes["refused"] += 1
            else:
                assert ModelConfig.from_json(read.to_json()) == read
                outcomes["read"] += 1
    assert min(outcomes.values()) > 100


def test_paths(tmp_path: Path) -> None:
    snapshot = tmp_path / "model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    file = snapshot / "config.json"
    file.write_text(json.dumps(tiny()), encoding="utf-8")
    for source in (snapshot, str(snapshot), file, str(file)):
        model = ModelConfig.from_json(source)
        assert model == ModelConfig.preset("tiny")
        assert model.name == "abc"
    assert ModelConfig.from_json(snapshot, name="mine").name == "mine"
    message = refused(tmp_path / "model")
    assert f"no config.json in {tmp_path / 'model'}. Did you mean {snapshot}?" in message
    assert "For a hub id use owner/name" in message
    assert "no config.json in" in refused(str(tmp_path / "nowhere"))
    file.write_bytes(b"\xff\xfe{")
    assert "Fetch the file again" in refused(file)
    file.write_text("[1]", encoding="utf-8")
    assert "[1], not a JSON object" in refused(file)


def test_presets_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'super-120'.*Did you mean super-120b.*nano-30b"):
        ModelConfig.preset("super-120")


@pytest.mark.parametrize(
    "layers, width_scale, message",
    [
        (0, None, "layers is 0"),
        (10, None, "layers is 10: the model has only 9 layers. Ask for 1 to 9."),
        (2.5, None, "layers is 2.5"),
        (None, 0, "width_scale is 0"),
        (None, 1.5, "width_scale is 1.5: must be above 0 and at most 1. Use e.g. 0.25"),
        (None, math.nan, "width_scale is nan"),
        (None, "half", 'width_scale is "half"'),
    ],
)
def test_impossible_cuts(layers: Any, width_scale: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.preset("tiny").cut(layers=layers, width_scale=width_scale)
    assert message in str(caught.value)


def test_checks_hold_without_json() -> None:
    model = ModelConfig.preset("tiny")
    assert model.mamba is not None
    assert model.moe is not None
    sizes: list[dict[str, Any]] = [{"heads": 7}, {"conv_width": 6}, {"state": 0}]
    for broken in sizes:
        with pytest.raises(ConfigError):
            dataclasses.replace(model.mamba, **broken)
    for changes in ({"mamba": None}, {"moes": ()}, {"mlp_widths": (1,) * 9}, {"kinds": ()}):
        with pytest.raises(ConfigError, match="hybrid_override_pattern"):
            dataclasses.replace(model, **changes)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.width = 1  # type: ignore[misc]
    assert isinstance(model.mamba, MambaConfig)
