"""The public Nemotron-H models' geometry, as the `config.json` keys of each release. Data only.

Keys that change nothing (rope_theta, expand, time_step_min, ...) stand here where the releases have
them, so that reading a preset exercises the same path as reading a file.
"""

from __future__ import annotations

from typing import Any

from nemotriton.model.layer_kinds import LayerKind

_SHARED: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}

_MOE: dict[str, Any] = _SHARED | {
    "max_position_embeddings": 262144,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "topk_group": 1,
}

_NANO: dict[str, Any] = _MOE | {
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5,
}

_NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

_DENSE: dict[str, Any] = _SHARED | {
    "mamba_head_dim": 80,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}

# The 9B and 12B files spell two Mamba sizes a second way; end-of-turn is <SPECIAL_12>.
_V2: dict[str, Any] = _DENSE | {
    "eos_token_id": [2, 12],
    "mamba_num_groups": 8,
    "mamba_num_heads": 128,
    "mamba_state_dim": 128,
    "max_position_embeddings": 131072,
    "pad_token_id": 12,
    "rms_norm_eps": 1e-5,
}

_H: dict[str, Any] = {key: value for key, value in _SHARED.items() if key != "head_dim"} | {
    "attention_head_dim": 128,
    "mamba_head_dim": 64,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
}

_H_SMALL_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

_ULTRA_PATTERN = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*"
    "EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
)

PRESETS: dict[str, dict[str, Any]] = {
    "super-120b": _MOE
    | {
        "hidden_size": 4096,
        "hybrid_override_pattern": (
            "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
            "EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
        ),
        "intermediate_size": 2688,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "moe_shared_expert_intermediate_size": 5376,
        "mtp_hybrid_override_pattern": "*E",
        "n_routed_experts": 512,
        "num_attention_heads": 32,
        "num_experts_per_tok": 22,
        "num_hidden_layers": 88,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 5.0,
    },
    "nano-30b": _NANO | {"hybrid_override_pattern": _NANO_PATTERN, "num_hidden_layers": 52},
    # Nano geometry; whether the release has a latent expert width is not known: assumed none.
    "lightning-30b": _NANO
    | {
        "layers_block_type": [LayerKind(letter).word for letter in _NANO_PATTERN],
        "max_position_embeddings": 1048576,
        "mtp_layers_block_type": ["attention", "moe"],
        "num_nextn_predict_layers": 1,
    },
    "ultra-550b": _MOE
    | {
        "hidden_size": 8192,
        "intermediate_size": 5120,
        "layers_block_type": [LayerKind(letter).word for letter in _ULTRA_PATTERN],
        "mamba_head_dim": 64,
        "mamba_num_heads": 256,
        "moe_intermediate_size": 5120,
        "moe_latent_size": 2048,
        "moe_shared_expert_intermediate_size": 10240,
        "mtp_layers_block_type": ["attention", "moe"],
        "n_routed_experts": 512,
        "num_attention_heads": 64,
        "num_experts_per_tok": 22,
        "num_hidden_layers": None,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 5.0,
    },
    "nano-4b": {key: value for key, value in _DENSE.items() if key != "layer_norm_epsilon"}
    | {
        "chunk_size": 256,
        "hidden_size": 3136,
        "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        "intermediate_size": 12544,
        "mamba_num_heads": 96,
        "max_position_embeddings": 262144,
        "num_hidden_layers": 42,
        "rms_norm_eps": 1e-5,
    },
    "9b-v2": _V2
    | {
        "hidden_size": 4480,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        "intermediate_size": 15680,
        "num_hidden_layers": 56,
    },
    "12b-v2": _V2
    | {
        "hidden_size": 5120,
        "hybrid_override_pattern": (
            "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"
        ),
        "intermediate_size": 20480,
        "num_hidden_layers": 62,
    },
    "h-4b": _H
    | {
        "hidden_size": 3072,
        "hybrid_override_pattern": _H_SMALL_PATTERN,
        "intermediate_size": 12288,
        "mamba_num_heads": 112,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
    },
    "h-8b": _H
    | {
        "hidden_size": 4096,
        "hybrid_override_pattern": _H_SMALL_PATTERN,
        "intermediate_size": 21504,
        "mamba_num_heads": 128,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
    },
    "h-47b": _H
    | {
        "hidden_size": 8192,
        "hybrid_override_pattern": (
            "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
            "M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
        ),
        "intermediate_size": 30720,
        "mamba_num_heads": 256,
        "num_attention_heads": 64,
        "num_hidden_layers": 98,
        "ssm_state_size": 256,
    },
    "h-56b": _H
    | {
        "hidden_size": 8192,
        "hybrid_override_pattern": (
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
            "M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        ),
        "intermediate_size": 32768,
        "mamba_num_heads": 256,
        "num_attention_heads": 64,
        "num_hidden_layers": 118,
        "ssm_state_size": 256,
    },
    # Not a release: every layer kind, latent experts and an MTP block at a size a laptop runs.
    "tiny": _MOE
    | {
        "chunk_size": 32,
        "head_dim": 32,
        "hidden_size": 192,
        "hybrid_override_pattern": "M*-EMEM*E",
        "intermediate_size": 512,
        "mamba_head_dim": 32,
        "mamba_num_heads": 12,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 96,
        "moe_latent_size": 96,
        "moe_shared_expert_intermediate_size": 256,
        "mtp_hybrid_override_pattern": "*E",
        "n_groups": 2,
        "n_routed_experts": 16,
        "num_attention_heads": 6,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 9,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 64,
        "vocab_size": 2048,
    },
}
