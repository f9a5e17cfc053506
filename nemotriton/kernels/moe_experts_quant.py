"""Routed experts with FP8 or NVFP4 weights; see moe_experts for what they compute.

    h[p]   = relu(up_scale[e] * (V_up[e] x[t]))^2                                        [F]
    row[p] = w[p] * down_scale[e] * (V_down[e] h[p])               fp32, not rounded     [L]
    y[t]   = sum of row[t*K + j] over j = 0..K-1 in that order, fp32, rounded to x's dtype

V are the stored values without the experts' fp32 scales: e4m3, or e2m1 * block scale, exact in 16
bits. Sums are fp32; the epilogue of the up-projection works on them in this order: the scale that
dequantises, relu^2, then the quantiser, and stores h once. Weight-only (w8a16, w4a16) x stays as it
is and h is rounded to x's dtype. With `up_input_scale` and `down_input_scale` (both or none, one
number an expert: w8a8, w4a4) x and h are quantised with their expert's scale, h straight from fp32,
and these scales join the weights'. What h's codes stand for is exact in x's dtype, and so stored.
"""

from collections.abc import Callable

import torch

from nemotriton.errors import require
from nemotriton.kernels.fp4 import fp8_codes_ref, nvfp4_round_ref, nvfp4_values_ref
from nemotriton.kernels.moe_route import Routing
from nemotriton.kernels.numerics import relu2_ref
from nemotriton.kernels.op import acc_dtype, op

Scales = tuple[torch.Tensor, torch.Tensor | None]  # of weights [E], and of activations [E]
Quantise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run_experts_nvfp4_ref(
    x: torch.Tensor,
    up_codes: torch.Tensor,
    up_scales: torch.Tensor,
    up_global: torch.Tensor,
    down_codes: torch.Tensor,
    down_scales: torch.Tensor,
    down_global: torch.Tensor,
    routing: Routing,
    up_input_scale: torch.Tensor | None = None,
    down_input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `run_experts_nvfp4`."""
    f = acc_dtype(x)
    return _experts_ref(
        x,
        lambda e: nvfp4_values_ref(up_codes[e], up_scales[e], f),
        lambda e: nvfp4_values_ref(down_codes[e], down_scales[e], f),
        (up_global, up_input_scale),
        (down_global, down_input_scale),
        routing,
        nvfp4_round_ref,
    )


def run_experts_fp8_ref(
    x: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    routing: Routing,
    up_input_scale: torch.Tensor | None = None,
    down_input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `run_experts_fp8`."""
    f = acc_dtype(x)
    return _experts_ref(
        x,
        lambda e: up[e].to(f),
        lambda e: down[e].to(f),
        (up_scale, up_input_scale),
        (down_scale, down_input_scale),
        routing,
        fp8_codes_ref,
    )


def _experts_ref(
    x: torch.Tensor,
    up: Callable[[int], torch.Tensor],
    down: Callable[[int], torch.Tensor],
    up_scales: Scales,
    down_scales: Scales,
    routing: Routing,
    quantise: Quantise,
) -> torch.Tensor:
    """The experts one after the other; up(e) and down(e) are their weights' stored values."""
    f = acc_dtype(x)
    T, K = routing.ids.shape
    order, offsets = routing.order.long(), routing.offsets.tolist()
    rows = x.new_zeros((T * K, x.shape[1]), dtype=f)
    for e in range(len(offsets) - 1):
        pairs = order[offsets[e] : offsets[e + 1]]
        if len(pairs) == 0:
            continue
        xs = _quantised_ref(x[pairs // K], up_scales[1], e, x.dtype, quantise)
        h = relu2_ref((xs.to(f) @ up(e).T) * _scale_ref(up_scales, e, f))
        h = _quantised_ref(h, down_scales[1], e, x.dtype, quantise)
        rows[pairs] = (h.to(f) @ down(e).T) * _scale_ref(down_scales, e, f)
    y = rows.unflatten(0, (T, K)) * routing.weights[..., None].to(f)
    return y.sum(1).to(x.dtype)


def _quantised_ref(
    x: torch.Tensor, scale: torch.Tensor | None, e: int, dtype: torch.dtype, quantise: Quantise
) -> torch.Tensor:
    return x.to(dtype) if scale is None else quantise(x, scale[e])


def _scale_ref(scales: Scales, e: int, f: torch.dtype) -> torch.Tensor:
    weight, activation = scales
    return weight[e].to(f) if activation is None else weight[e].to(f) * activation[e].to(f)


def _check_scales(up: torch.Tensor | None, down: torch.Tensor | None) -> None:
    require(
        (up is None) == (down is None),
        "up_input_scale and down_input_scale: give both (quantised activations) or none",
    )


@op(ref=run_experts_nvfp4_ref)
def run_experts_nvfp4(
    x: torch.Tensor,
    up_codes: torch.Tensor,
    up_scales: torch.Tensor,
    up_global: torch.Tensor,
    down_codes: torch.Tensor,
    down_scales: torch.Tensor,
    down_global: torch.Tensor,
    routing: Routing,
    up_input_scale: torch.Tensor | None = None,
    down_input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run every routed expert on its tokens and sum them by weight; NVFP4 weights.

    x [T, L]; up_codes uint8 [E, F, L/2], up_scales e4m3 [E, F, L/16], up_global fp32 [E]; down_*
    [E, L, F/2], [E, L, F/16], [E]; *_input_scale fp32 [E] or None. Returns [T, L] in x's dtype."""
    return run_experts_nvfp4_ref(
        x, up_codes, up_scales, up_global, down_codes, down_scales, down_global, routing,
        up_input_scale, down_input_scale,
    )  # fmt: skip


@op(ref=run_experts_fp8_ref)
def run_experts_fp8(
    x: torch.Tensor,
    up: torch.Tensor,
    up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    routing: Routing,
    up_input_scale: torch.Tensor | None = None,
    down_input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run every routed expert on its tokens and sum them by weight; FP8 weights.

    x [T, L]; up e4m3 [E, F, L], up_scale fp32 [E]; down e4m3 [E, L, F], down_scale fp32 [E];
    *_input_scale fp32 [E] or None. Returns [T, L] in x's dtype."""
    return run_experts_fp8_ref(
        x, up, up_scale, down, down_scale, routing, up_input_scale, down_input_scale
    )
