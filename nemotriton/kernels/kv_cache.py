"""Write the keys and values of new tokens into the paged cache.

    k_cache[page, offset] = k / k_scale,    rows = page * page_size + offset        (v alike)

k, v [T, Hkv, Dh] with free row strides; caches [pages, page size, Hkv, Dh] in bf16, fp16, fp32 or
fp8 e4m3; rows int64 [T], -1 writes nothing; scales are fp32 tensors of one element, None = 1. The
division is IEEE fp32; e4m3 values saturate at +-448 (NaN stays NaN) and round to nearest even, as
`cvt.rn.satfinite.e4m3x2.f32` does. Two live tokens with the same row are a fault of the caller:
which of them stays is undefined.
"""

import torch

from nemotriton.kernels.op import acc_dtype

E4M3_MAX = 448.0


# --------------------------------------------------------------------------------------- write_kv
def write_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Twin of `write_kv`."""
    live = rows >= 0
    page_size = k_cache.shape[1]
    pages, offsets = rows[live] // page_size, rows[live] % page_size
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        value = new[live].to(acc_dtype(new))
        if scale is not None:
            value = value / scale.to(value.dtype)
        if cache.dtype == torch.float8_e4m3fn:
            value = value.clamp(-E4M3_MAX, E4M3_MAX)
        cache[pages, offsets] = value.to(cache.dtype)
