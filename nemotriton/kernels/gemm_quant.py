"""Linear layers with FP8 or NVFP4 weights: y = epilogue(scale * (x V^T) + bias).

    V      the weight's stored values without its fp32 scale: e4m3, or e2m1 * block scale. Both are
           exact in 16 bits, so tensor cores multiply them as x's dtype and sum in fp32.
    scale  the weight's scale, applied to the fp32 sum before bias, epilogue and the one rounding,
           so that fp16 outputs do not overflow before it

Activations stay as they are (w8a16, w4a16) unless `input_scale` is given: then x is quantised with
it, to e4m3 (w8a8) or in blocks of 16 to NVFP4 (w4a4), and its scale joins the weight's. The values
that x's codes stand for are exact in x's dtype; they take x's place.

x [T, K] with a free row stride; FP8 weight e4m3 [N, K]; NVFP4 codes uint8 [N, K/2] and scales e4m3
[N, K/16]; bias, epilogue, residual and out_dtype as in `gemm.matmul`.
"""

from collections.abc import Callable

import torch

from nemotriton.kernels.fp4 import fp8_codes_ref, nvfp4_round_ref, nvfp4_values_ref
from nemotriton.kernels.numerics import relu2_ref
from nemotriton.kernels.op import acc_dtype, op


def fp8_matmul_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `fp8_matmul`."""
    values = weight.to(acc_dtype(x))
    scales = (weight_scale, input_scale)
    return _linear_ref(x, values, scales, fp8_codes_ref, bias, epilogue, residual, out_dtype)


def nvfp4_matmul_ref(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `nvfp4_matmul`."""
    values = nvfp4_values_ref(codes, scales, acc_dtype(x))
    both = (global_scale, input_scale)
    return _linear_ref(x, values, both, nvfp4_round_ref, bias, epilogue, residual, out_dtype)


def _linear_ref(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor | None],
    quantise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None,
    epilogue: str,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    f = acc_dtype(x)
    scale, rows = scales[0].to(f).reshape(()), x
    if scales[1] is not None:
        rows = quantise(x, scales[1].reshape(()))
        scale = scale * scales[1].to(f).reshape(())
    y = (rows.to(f) @ values.T) * scale
    if bias is not None:
        y = y + bias.to(f)
    if epilogue == "relu2":
        y = relu2_ref(y)
    if residual is not None:
        y = y + residual.to(f)
    return y if f == torch.float64 else y.to(out_dtype or x.dtype)


@op(ref=fp8_matmul_ref)
def fp8_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """epilogue(weight_scale * (x weight^T) + bias) for x [T, K], weight e4m3 [N, K]: [T, N].

    With `input_scale` x is quantised to e4m3 first (w8a8), saturating; else it stays (w8a16)."""
    return fp8_matmul_ref(x, weight, weight_scale, input_scale, bias, epilogue, residual, out_dtype)


@op(ref=nvfp4_matmul_ref)
def nvfp4_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """epilogue(global_scale * (x w^T) + bias) for x [T, K], NVFP4 w [N, K]: [T, N].

    With `input_scale` x is quantised in blocks of 16 first (w4a4); else it stays (w4a16)."""
    return nvfp4_matmul_ref(
        x, codes, scales, global_scale, input_scale, bias, epilogue, residual, out_dtype
    )
