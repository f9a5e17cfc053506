"""The ops: each a Triton kernel `foo` with its PyTorch twin `foo_ref`.

Shape letters, used in every docstring:

    T tokens          S sequences        D width           F feed-forward width   V vocabulary
    H heads           Hkv KV heads       Dh head width     P mamba head width     N state width
    G groups          Q chunk            W conv width      E experts              K experts a token

Index tensors are int32 (`kv_rows` int64); `cu` [S+1] holds cumulative token starts; -1 marks a pad
slot, page or row, whose outputs are zeros and whose state is left alone.
"""

from nemotriton.kernels.attention import attend_prefill, attend_prefill_ref, attention_ref
from nemotriton.kernels.attention_decode import attend_decode, attend_decode_ref
from nemotriton.kernels.conv1d import causal_conv1d, causal_conv1d_ref, conv_ref
from nemotriton.kernels.conv1d_update import causal_conv1d_update, causal_conv1d_update_ref
from nemotriton.kernels.gemm import matmul, matmul_ref
from nemotriton.kernels.gemm_packed import packed_matmul, packed_matmul_ref
from nemotriton.kernels.gemm_parts import parts_matmul, parts_matmul_ref
from nemotriton.kernels.gemm_quant import (
    fp8_matmul,
    fp8_matmul_ref,
    nvfp4_matmul,
    nvfp4_matmul_ref,
)
from nemotriton.kernels.gemm_scaled import scaled_matmul, scaled_matmul_ref
from nemotriton.kernels.kv_cache import write_kv, write_kv_ref
from nemotriton.kernels.mamba_step import mamba_step, mamba_step_ref
from nemotriton.kernels.moe_experts import experts_ref, run_experts, run_experts_ref
from nemotriton.kernels.moe_experts_packed import (
    run_experts_packed,
    run_experts_packed_ref,
)
from nemotriton.kernels.moe_experts_quant import (
    run_experts_fp8,
    run_experts_fp8_ref,
    run_experts_nvfp4,
    run_experts_nvfp4_ref,
)
from nemotriton.kernels.moe_experts_scaled import run_experts_scaled, run_experts_scaled_ref
from nemotriton.kernels.moe_few import enter_moe, enter_moe_ref, share_expert, share_expert_ref
from nemotriton.kernels.moe_route import (
    OwnRouting,
    Routing,
    route_experts,
    route_experts_ref,
)
from nemotriton.kernels.numerics import philox_ref
from nemotriton.kernels.quantize import (
    quantize_fp8,
    quantize_fp8_ref,
    quantize_nvfp4,
    quantize_nvfp4_ref,
    relu2_fp8,
    relu2_fp8_ref,
    relu2_nvfp4,
    relu2_nvfp4_ref,
)
from nemotriton.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_ref,
    gated_rms_norm,
    gated_rms_norm_ref,
    rms_norm,
    rms_norm_ref,
)
from nemotriton.kernels.rms_norm_quant import (
    add_rms_norm_fp8,
    add_rms_norm_fp8_ref,
    add_rms_norm_nvfp4,
    add_rms_norm_nvfp4_ref,
    gated_rms_norm_fp8,
    gated_rms_norm_fp8_ref,
    gated_rms_norm_nvfp4,
    gated_rms_norm_nvfp4_ref,
)
from nemotriton.kernels.sample import (
    Logprobs,
    sample_tokens,
    sample_tokens_ref,
    token_logprobs,
)
from nemotriton.kernels.ssd import (
    chunk_table,
    recurrence_ref,
    ssd_prefill_chunked,
    ssd_prefill_chunked_ref,
    ssd_prefill_ref,
    ssd_scan_ref,
)
from nemotriton.kernels.ssd_fused import ssd_prefill
from nemotriton.kernels.ssm_replay import (
    REPLAY_INTERVAL,
    ring_places,
    ssm_replay,
    ssm_replay_ref,
)
from nemotriton.kernels.ssm_state import STATE_FORMATS, StateFormat, StateNoise
from nemotriton.kernels.ssm_update import ssm_update, ssm_update_ref, time_step_ref
from nemotriton.kernels.thresholds import logit_thresholds, logit_thresholds_ref
from nemotriton.kernels.verify import Verdict, verify_drafts, verify_drafts_ref
from nemotriton.kernels.widen import widen_fp8, widen_fp8_ref, widen_packed, widen_packed_ref
from nemotriton.kernels.widen_keys import widen_keys, widen_keys_ref

__all__ = [
    "REPLAY_INTERVAL",
    "STATE_FORMATS",
    "Logprobs",
    "OwnRouting",
    "Routing",
    "StateFormat",
    "StateNoise",
    "Verdict",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_rms_norm_fp8_ref",
    "add_rms_norm_nvfp4",
    "add_rms_norm_nvfp4_ref",
    "add_rms_norm_ref",
    "attend_decode",
    "attend_decode_ref",
    "attend_prefill",
    "attend_prefill_ref",
    "attention_ref",
    "causal_conv1d",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
    "chunk_table",
    "conv_ref",
    "enter_moe",
    "enter_moe_ref",
    "experts_ref",
    "fp8_matmul",
    "fp8_matmul_ref",
    "gated_rms_norm",
    "gated_rms_norm_fp8",
    "gated_rms_norm_fp8_ref",
    "gated_rms_norm_nvfp4",
    "gated_rms_norm_nvfp4_ref",
    "gated_rms_norm_ref",
    "logit_thresholds",
    "logit_thresholds_ref",
    "mamba_step",
    "mamba_step_ref",
    "matmul",
    "matmul_ref",
    "nvfp4_matmul",
    "nvfp4_matmul_ref",
    "packed_matmul",
    "packed_matmul_ref",
    "parts_matmul",
    "parts_matmul_ref",
    "philox_ref",
    "quantize_fp8",
    "quantize_fp8_ref",
    "quantize_nvfp4",
    "quantize_nvfp4_ref",
    "recurrence_ref",
    "relu2_fp8",
    "relu2_fp8_ref",
    "relu2_nvfp4",
    "relu2_nvfp4_ref",
    "ring_places",
    "rms_norm",
    "rms_norm_ref",
    "route_experts",
    "route_experts_ref",
    "run_experts",
    "run_experts_fp8",
    "run_experts_fp8_ref",
    "run_experts_nvfp4",
    "run_experts_nvfp4_ref",
    "run_experts_packed",
    "run_experts_packed_ref",
    "run_experts_ref",
    "run_experts_scaled",
    "run_experts_scaled_ref",
    "sample_tokens",
    "sample_tokens_ref",
    "scaled_matmul",
    "scaled_matmul_ref",
    "share_expert",
    "share_expert_ref",
    "ssd_prefill",
    "ssd_prefill_chunked",
    "ssd_prefill_chunked_ref",
    "ssd_prefill_ref",
    "ssd_scan_ref",
    "ssm_replay",
    "ssm_replay_ref",
    "ssm_update",
    "ssm_update_ref",
    "time_step_ref",
    "token_logprobs",
    "verify_drafts",
    "verify_drafts_ref",
    "widen_fp8",
    "widen_fp8_ref",
    "widen_keys",
    "widen_keys_ref",
    "widen_packed",
    "widen_packed_ref",
    "write_kv",
    "write_kv_ref",
]
