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
from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import FixedOrder
from nemotriton.kernels.fp4 import (
    GROUP,
    fp8_codes_ref,
    fp8_round,
    load_fp8,
    load_nvfp4,
    nvfp4_round,
    nvfp4_round_ref,
    nvfp4_values_ref,
)
from nemotriton.kernels.gemm_quant import X_DTYPES, random_fp8, random_nvfp4
from nemotriton.kernels.moe_experts import RUN_EXPERTS, _combine, _find_block, add_rows, most_blocks
from nemotriton.kernels.moe_fixed import by_token, experts_order, fixed_quantised
from nemotriton.kernels.moe_route import Routing, pair_rows, route_experts_ref
from nemotriton.kernels.numerics import relu2, relu2_ref
from nemotriton.kernels.op import (
    Args,
    Case,
    Cost,
    KernelSpec,
    Tile,
    acc_dtype,
    cdiv,
    launch,
    next_pow2,
    op,
)
from nemotriton.kernels.quantize import check_scale, round_rows

Scales = tuple[torch.Tensor, torch.Tensor | None]  # of weights [E], and of activations [E]
Quantise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
E4M3 = torch.float8_e4m3fn
Matrices = tuple[torch.Tensor, torch.Tensor | None]  # bytes [E, N, ...], block scale bytes or None


# ------------------------------------------------------------------------------------------- twins
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


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _product(
    rows, w_ptr, s_ptr, n, DEPTH,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N]: rows (pointers) times rows n of a matrix [N, DEPTH]; s_ptr: NVFP4.

    The decoded weight is the right operand, which Hopper's wgmma reads from shared memory: its
    hazard of left operands in registers (triton issue 9433) cannot arise."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, DEPTH, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(rows[:, None] + k[None, :])
        else:
            x = tl.load(rows[:, None] + k[None, :], mask=(k < DEPTH)[None, :], other=0.0)
        if s_ptr is not None:
            w = load_nvfp4(w_ptr, s_ptr, n, k0, DEPTH, DEPTH // 2, DEPTH // 16, EVEN_K, BLOCK_K)
        else:
            w = load_fp8(w_ptr, n, k0, DEPTH, DEPTH, EVEN_K, BLOCK_K)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision="ieee")
    return acc


@triton.jit
def _up_quant(
    x_ptr, w_ptr, s_ptr, scale_ptr, x_scale_ptr, h_scale_ptr, h_ptr, order_idx, offsets_idx,
    x_stride, F, L, K, E: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """h [T*K, F] in the order of `order`. With x_scale_ptr x has that order too, a row a pair."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(F, BLOCK_N)
    expert, first, last = _find_block(offsets_idx, pid // tiles, E, BLOCK_M, BLOCK_E)
    if first < last:
        i = first + tl.arange(0, BLOCK_M)
        n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (i < last)[:, None] & (n < F)[None, :]
        # rows past the end repeat the last one; they are not stored
        i = tl.minimum(i, last - 1)
        n_in = tl.minimum(n, F - 1)
        scale = tl.load(scale_ptr + expert)
        if x_scale_ptr is not None:
            scale *= tl.load(x_scale_ptr + expert)
            rows = x_ptr + i * x_stride
        else:
            rows = x_ptr + tl.load(order_idx + i).to(tl.int64) // K * x_stride
        if s_ptr is not None:
            w, s = w_ptr + expert * F * (L // 2), s_ptr + expert * F * (L // 16)
        else:
            w, s = w_ptr + expert * F * L, None
        acc = _product(rows, w, s, n_in, L, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
        h = relu2(acc * scale)
        if h_scale_ptr is not None:
            h_scale = tl.load(h_scale_ptr + expert)
            if s_ptr is not None:
                h = nvfp4_round(h, h_scale)
            else:
                h = fp8_round(h, h_scale)
        tl.store(h_ptr + i[:, None] * F + n[None, :], h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _down_quant(
    h_ptr, w_ptr, s_ptr, scale_ptr, h_scale_ptr, rows_ptr, weights_ptr, order_idx, offsets_idx,
    F, L, E: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Weighted rows [T*K, L] fp32 in the order of the pairs."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(L, BLOCK_N)
    expert, first, last = _find_block(offsets_idx, pid // tiles, E, BLOCK_M, BLOCK_E)
    if first < last:
        i = first + tl.arange(0, BLOCK_M)
        n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (i < last)[:, None] & (n < L)[None, :]
        i = tl.minimum(i, last - 1)
        n_in = tl.minimum(n, L - 1)
        pair = tl.load(order_idx + i).to(tl.int64)
        scale = tl.load(scale_ptr + expert)
        if h_scale_ptr is not None:
            scale *= tl.load(h_scale_ptr + expert)
        if s_ptr is not None:
            w, s = w_ptr + expert * L * (F // 2), s_ptr + expert * L * (F // 16)
        else:
            w, s = w_ptr + expert * L * F, None
        acc = _product(h_ptr + i * F, w, s, n_in, F, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
        row = acc * scale * tl.load(weights_ptr + pair)[:, None]
        tl.store(rows_ptr + pair[:, None] * L + n[None, :], row, mask=mask)


# -------------------------------------------------------------------------------------------- ops
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
    for scales in (up_scales, down_scales):
        require(scales.dtype == E4M3, f"block scales must be float8_e4m3fn, got {scales.dtype}")
    up = (up_codes, up_scales.view(torch.uint8))
    down = (down_codes, down_scales.view(torch.uint8))
    both = ((up_global, up_input_scale), (down_global, down_input_scale))
    return _run(RUN_EXPERTS_NVFP4, x, up, down, *both, routing)


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
    for w in (up, down):
        require(w.dtype == E4M3, f"the weights must be float8_e4m3fn, got {w.dtype}")
    both = ((up_scale, up_input_scale), (down_scale, down_input_scale))
    matrices = ((up.view(torch.uint8), None), (down.view(torch.uint8), None))
    return _run(RUN_EXPERTS_FP8, x, *matrices, *both, routing)


def _check(
    x: torch.Tensor,
    up: Matrices,
    down: Matrices,
    up_scales: Scales,
    down_scales: Scales,
    routing: Routing,
) -> tuple[int, int, int]:
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    require(x.stride(1) == 1, "x must have unit stride along its width; call .contiguous()")
    require(x.dtype in X_DTYPES, f"x must be bf16, fp16 or fp32, got {x.dtype}")
    T, L = x.shape
    E, F = up[0].shape[:2]
    for name, (w, s), n, k in (("up", up, F, L), ("down", down, L, F)):
        bytes_, columns = (k, k) if s is None else (k // 2, k // GROUP * GROUP)
        fits = w.dtype == torch.uint8 and w.shape == (E, n, bytes_) and columns == k
        require(
            fits and (s is None or s.shape == (E, n, k // GROUP)),
            f"{name} of shape {tuple(w.shape)} does not match {E} matrices of [{n}, {k}]",
        )
        require(
            w.is_contiguous() and (s is None or s.is_contiguous()),
            f"{name} must be contiguous; call .contiguous() at load",
        )
    require(routing.ids.shape[0] == T, f"{T} tokens, but a routing of {routing.ids.shape[0]}")
    require(
        routing.offsets.shape == (E + 1,),
        f"the routing is over {routing.offsets.shape[0] - 1} experts, the weights have {E}",
    )
    require(
        (up_scales[1] is None) == (down_scales[1] is None),
        "up_input_scale and down_input_scale: give both (quantised activations) or none",
    )
    for scale in (*up_scales, *down_scales):
        if scale is not None:
            check_scale(scale, "the experts' scales", (E,))
    return E, F, L


def _run(
    spec: KernelSpec,
    x: torch.Tensor,
    up: Matrices,
    down: Matrices,
    up_scales: Scales,
    down_scales: Scales,
    routing: Routing,
) -> torch.Tensor:
    """Scratch: T*K*(F*itemsize + 4L) bytes; with quantised activations T*K*L*itemsize more."""
    E, F, L = _check(x, up, down, up_scales, down_scales, routing)
    (T, K), P = routing.ids.shape, routing.ids.numel()
    x_scale, h_scale = up_scales[1], down_scales[1]
    if x_scale is not None:
        x = round_rows(x, x_scale, up[1] is not None, routing)
    h = torch.empty((P, F), dtype=x.dtype, device=x.device)
    rows = pair_rows(routing, L, dtype=torch.float32)
    y = torch.empty((T, L), dtype=x.dtype, device=x.device)
    tile = spec.tile(T, x, E=E, F=F, L=L, K=K)
    if x.dtype == torch.float32:  # exact fp32 products have no tensor core: larger blocks spill
        tile = tile.but(BLOCK_M=16, BLOCK_N=64, BLOCK_K=32, num_warps=4)
    block_n, block_k = int(tile["BLOCK_N"]), int(tile["BLOCK_K"])
    blocks, table = most_blocks(P, E, int(tile["BLOCK_M"])), (routing.order, routing.offsets)
    size = {**tile, "E": E, "BLOCK_E": next_pow2(E), **as_dependent(x)}
    to_h = (x, *up, *up_scales, h_scale, h, *table, x.stride(0), F, L, K)
    launch(_up_quant, (blocks * cdiv(F, block_n),), *to_h, EVEN_K=L % block_k == 0, **size)
    to_rows = (h, *down, *down_scales, rows, routing.weights, *table, F, L)
    launch(_down_quant, (blocks * cdiv(L, block_n),), *to_rows, EVEN_K=F % block_k == 0, **size)
    return add_rows(rows, y, K)


# ------------------------------------------------------------------------------------------- specs
def _tiles(case: Case) -> list[Tile]:
    base = Tile(BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3)
    few = [base.but(BLOCK_N=n, num_warps=w) for n in (32, 64, 128) for w in (2, 4)]
    many = [
        base.but(BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, num_warps=w)
        for m in (32, 64, 128)
        for n in (64, 128)
        for w in (4, 8)
        if m * n // w <= 2048
    ]
    return few + many


def _default(case: Case, tokens: int) -> Tile:
    """The block that the tokens of a mean expert fill."""
    per_expert = tokens * case.K / case.E
    if per_expert > 64:
        return Tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=8, num_stages=3)
    rows, depth = (16, 128) if per_expert <= 16 else (64, 64)
    return Tile(BLOCK_M=rows, BLOCK_N=64, BLOCK_K=depth, num_warps=4, num_stages=3)


def _rows(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    """x and a routing that gives a third of the experts most of the tokens, and others none."""
    favour = 2.0 * (torch.arange(case.E, device=dev) % 3 == 0)
    logits = torch.randn(T, case.E, device=dev, generator=rng) + favour
    x = torch.randn(T, case.L, device=dev, generator=rng).to(dtype)
    return {"x": x, "routing": route_experts_ref(logits, None, case.K, 1, 1, True, 2.5)}


def _scales(case: Case, first: float, second: float, dev: torch.device) -> list[torch.Tensor]:
    """fp32 [E] each, different for every expert."""
    spread = torch.linspace(0.7, 1.4, case.E, device=dev)
    return [first * spread, second * spread.flip(0)]


def _maker(fp4: bool) -> Callable[..., Args]:
    most, size = (2688, 0.3) if fp4 else (448, 2.0)  # of a quantised row; of a weight

    def make(
        case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator
    ) -> Args:
        args = _rows(case, T, dev, dtype, rng)
        both = _scales(case, size * case.L**-0.5, size * case.F**-0.5, dev)
        inputs = _scales(case, 4 / most, 10 / most, dev) if case.get("Q") else [None, None]
        sizes = {"up": (case.E, case.F, case.L), "down": (case.E, case.L, case.F)}
        for (name, shape), scale, input_scale in zip(sizes.items(), both, inputs, strict=True):
            if fp4:
                weight = dict(zip(("codes", "scales"), random_nvfp4(shape, dev, rng), strict=True))
                args |= {f"{name}_{k}": v for k, v in weight.items()} | {f"{name}_global": scale}
            else:
                args |= {name: random_fp8(shape, dev, rng), f"{name}_scale": scale}
            args[f"{name}_input_scale"] = input_scale
        return args

    return make


def _spec(wrapper: Any, fp4: bool) -> KernelSpec:
    stored = 0.5625 if fp4 else 1.0  # bytes a weight

    def cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
        touched = case.E * (1 - (1 - case.K / case.E) ** T)  # under even routing
        read = touched * 2 * case.F * case.L * stored + 2 * T * case.L * dtype.itemsize
        return Cost(4 * T * case.K * case.F * case.L, int(read))

    return KernelSpec(
        terms=lambda case: case.F + case.L,
        op=wrapper,
        kernels=(_up_quant, _down_quant, _combine),
        cases=RUN_EXPERTS.cases,
        small=[
            Case(E=6, F=80, L=48, K=3),
            Case(E=5, F=48, L=80, K=2, Q=1),
            Case(E=11, F=64, L=32, K=4),
        ],
        tokens=RUN_EXPERTS.tokens,
        small_tokens=(0, 1, 17),
        make=_maker(fp4),
        tiles=_tiles,
        default=_default,
        fixed=FixedOrder(experts_order, fixed_quantised, twin=by_token(wrapper.ref)),
        cost=cost,
        per_token=("x",),
        strided=("x",),
    )


RUN_EXPERTS_NVFP4 = _spec(run_experts_nvfp4, True)
RUN_EXPERTS_FP8 = _spec(run_experts_fp8, False)
