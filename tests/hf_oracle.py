"""Tiny random NemotronH models of transformers, saved as checkpoints: the oracle of the engine.

transformers clamps dt at `time_step_min` in its chunked path only; the released models behave as
(0, inf), so every mixer's `time_step_limit` is set to that before anything is compared.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 4,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 48,
    "moe_latent_size": None,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name -> changes of BASE; each layer kind alone, all together, and every option a release may set
CASES: dict[str, dict[str, Any]] = {
    "mamba": {"hybrid_override_pattern": "MM"},
    "attention": {"hybrid_override_pattern": "**"},
    "mlp": {"hybrid_override_pattern": "--"},
    "mamba-moe": {"hybrid_override_pattern": "MEME"},
    "all-kinds": {"hybrid_override_pattern": "M*-EM*E"},
    "latent": {"hybrid_override_pattern": "M*-EM*E", "moe_latent_size": 32},
    "router-groups": {
        "hybrid_override_pattern": "ME*E",
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
    },
    "raw-weights": {"hybrid_override_pattern": "ME", "norm_topk_prob": False},
    "no-conv-bias": {"hybrid_override_pattern": "M-M", "use_conv_bias": False},
    "attention-bias": {"hybrid_override_pattern": "*-*", "attention_bias": True},
    "mlp-bias": {"hybrid_override_pattern": "--", "mlp_bias": True},
    "proj-bias": {"hybrid_override_pattern": "M*", "use_bias": True, "mamba_proj_bias": True},
    "tied": {"hybrid_override_pattern": "M*", "tie_word_embeddings": True},
    "wide-heads": {"hybrid_override_pattern": "*M", "head_dim": 48, "mamba_head_dim": 24},
    "one-group": {"hybrid_override_pattern": "M*", "n_groups": 1, "ssm_state_size": 64},
    "eight-groups": {"hybrid_override_pattern": "M-", "n_groups": 8, "ssm_state_size": 256},
    "conv-2": {"hybrid_override_pattern": "M*", "conv_kernel": 2},
    "conv-3": {"hybrid_override_pattern": "M*", "conv_kernel": 3},
    "one-kv-head": {"hybrid_override_pattern": "*E", "num_key_value_heads": 1},
    "fp32-residual": {"hybrid_override_pattern": "M*-E", "residual_in_fp32": True},
    "odd-chunk": {"hybrid_override_pattern": "M*", "chunk_size": 12},
}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> NemotronHForCausalLM:
    """A seeded model of CASES[name] whose mixers matter: default init would give flat logits."""
    torch.manual_seed(seed)
    config = NemotronHConfig(**(BASE | CASES[name]))
    model = NemotronHForCausalLM(config).to(torch.float32).eval()
    _honour(config, model)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith(("embeddings.weight", "embed_tokens.weight")):
                p.mul_(50.0)
            elif key.endswith("lm_head.weight"):
                p.mul_(10.0)
            elif p.dim() >= 2:
                p.mul_(3.0 if "conv1d" in key else 4.0)
            elif key.endswith(".D"):
                p.mul_(0.1)
            elif key.endswith("dt_bias"):  # steps large enough for the states to matter
                p.copy_(torch.rand_like(p) * 4 - 2)
            elif key.endswith("bias"):
                p.copy_(torch.randn_like(p) * 0.1)
            elif key.endswith("norm.weight") or "norm_f" in key:
                p.copy_(1 + 0.2 * torch.randn_like(p))
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b.copy_(torch.randn_like(b) * 0.2)
        if config.tie_word_embeddings:  # another key it ignores
            model.lm_head.weight.copy_(model.model.embeddings.weight)
    return settle(model)


def _honour(config: NemotronHConfig, model: NemotronHForCausalLM) -> None:
    """transformers reads the key for biases in attention and then ignores it."""
    if config.attention_bias:
        for module in model.modules():
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                plain = getattr(module, name, None)
                if isinstance(plain, torch.nn.Linear):
                    plain.bias = torch.nn.Parameter(torch.zeros(plain.out_features))


def settle(model: NemotronHForCausalLM) -> NemotronHForCausalLM:
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


def save(model: NemotronHForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype) -> NemotronHForCausalLM:
    """What transformers makes of the checkpoint; keeps the router in fp32 as a release would."""
    return settle(NemotronHForCausalLM.from_pretrained(folder, dtype=dtype).eval())


@torch.no_grad()
def forward(model: NemotronHForCausalLM, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(logits [T, V], the residual after every layer [T, D])."""
    residuals: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(
            lambda _m, _i, out: residuals.append((out[0] if isinstance(out, tuple) else out)[0])
        )
        for layer in model.model.layers
    ]
    try:
        out = model(torch.tensor([ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return out.logits[0].float(), [r.float() for r in residuals]


@torch.no_grad()
def greedy(model: NemotronHForCausalLM, ids: list[int], n: int) -> tuple[list[int], torch.Tensor]:
    """(the continuation by full forwards, the logits [n, V] each token was chosen from)."""
    tokens, rows = list(ids), []
    for _ in range(n):
        row = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        rows.append(row)
        tokens.append(int(row.argmax()))
    return tokens[len(ids) :], torch.stack(rows)


@torch.no_grad()
def expert_sets(model: NemotronHForCausalLM, ids: list[int]) -> list[torch.Tensor]:
    """Sorted expert ids [T, K] of every MoE layer."""
    found: list[torch.Tensor] = []
    gates = [m for m in model.modules() if type(m).__name__ == "NemotronHTopkRouter"]
    hooks = [g.register_forward_hook(lambda _m, _i, out: found.append(out[2])) for g in gates]
    try:
        model(torch.tensor([ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [f.sort(-1).values for f in found]


def routed_alike(
    a: NemotronHForCausalLM, b: NemotronHForCausalLM, ours: Any, ids: list[int]
) -> torch.Tensor:
    """bool [T]: tokens before and at which all three models choose the same experts everywhere."""
    from nemotriton.model.mixers import MoeMixer
    from tests import harness

    mine: list[torch.Tensor] = []
    model = ours.runner.model
    xs: dict[str, torch.Tensor] = {}
    harness.run(model, ids, probe=lambda key, x: xs.__setitem__(key, x.clone()))
    for i, block in enumerate(model.layers):
        if isinstance(block.mixer, MoeMixer):
            mine.append(block.mixer.route(xs[f"layers.{i}.norm"]).ids.long().sort(-1).values.cpu())
    same = torch.ones(len(ids), dtype=torch.bool)
    for p, q, r in zip(expert_sets(a, ids), expert_sets(b, ids), mine, strict=True):
        same &= (p == q).all(-1) & (p == r).all(-1)
    # a token that went another way changes the states and keys that later ones read
    return same.long().cumprod(0).bool()
