"""Routed experts: for every (token, expert) pair a relu^2 MLP, summed with the router's weights.

    h[p]   = relu(up[e] x[t])^2          fp32 accumulate, rounded once to x's dtype       [F]
    row[p] = w[p] * (down[e] h[p])       fp32, not rounded                                [L]
    y[t]   = sum of row[t*K + j] over j = 0..K-1 in that order, fp32, rounded to x's dtype

for pair p = t*K + j of token t and expert e = ids[t, j]. T tokens, K experts a token, E experts,
F expert width, L what an expert reads (the latent width, or the model's). x [T, L], up [E, F, L]
and down [E, L, F] in one dtype. No bias, no gate, no shared expert: those are not routed.

Expert-major (BLOCK_M >= 16): a program multiplies up to BLOCK_M tokens of one expert. Programs find
their expert in the router's offsets, so the host never waits for them: the grid has as many blocks
as any routing can need, and programs beyond the last block leave at once. Token-major (BLOCK_M = 1,
for a few tokens): a program is one pair and one slice of its expert's rows, without tensor cores.
Either way the rows of a pair are written once, and no result depends on the order of programs.
"""

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.fixed_order import FixedOrder
from nemotriton.kernels.moe_fixed import by_token, experts_order, fixed_experts
from nemotriton.kernels.moe_route import Routing, pair_rows, route_experts_ref
from nemotriton.kernels.numerics import relu2
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


# ------------------------------------------------------------------------------------ run_experts
def experts_ref(
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The experts from ids [T, K] and weights [T, K] alone; differentiable in all but the ids."""
    f = acc_dtype(x)
    T, K = ids.shape
    flat, order = ids.flatten().sort(stable=True)
    rows = []
    for e, pairs in zip(flat.unique_consecutive().tolist(), _runs(flat, order)):
        if e < 0:  # an expert of another rank
            rows.append(x.new_zeros(len(pairs), down.shape[1], dtype=f))
            continue
        h = torch.relu(x[pairs // K].to(f) @ up[e].to(f).T).square().to(x.dtype)
        rows.append(h.to(f) @ down[e].to(f).T)
    if not rows:
        return x.new_zeros(T, down.shape[1])
    y = torch.cat(rows)[order.argsort()].unflatten(0, (T, K))
    return (y * weights[..., None].to(f)).sum(1).to(x.dtype)


def _runs(flat: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return order.split(flat.unique_consecutive(return_counts=True)[1].tolist())


def run_experts_ref(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Twin of `run_experts`."""
    _check(x, up, down, routing)
    return experts_ref(x, up, down, routing.ids, routing.weights)


def _check(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, routing: Routing) -> None:
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    T, L = x.shape
    E, F = up.shape[:2]
    shapes = f"up {tuple(up.shape)}, down {tuple(down.shape)}"
    require(up.shape == (E, F, L) and down.shape == (E, L, F), f"x of width {L} with {shapes}")
    require(routing.ids.shape[0] == T, f"{T} tokens, but a routing of {routing.ids.shape[0]}")
    require(
        routing.offsets.shape == (E + 1,),
        f"the routing is over {routing.offsets.shape[0] - 1} experts, the weights have {E}",
    )


@triton.jit
def _find_block(offsets_idx, block, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """(expert, first, last): the block holds order[first:last]; first = last beyond the blocks."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_idx + e, mask=e < E, other=0).to(tl.int64)
    end = tl.load(offsets_idx + e + 1, mask=e < E, other=0).to(tl.int64)
    blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(blocks, 0)
    expert = tl.sum((until <= block).to(tl.int64), 0)
    here = e == expert
    first = tl.sum(tl.where(here, start + (block - until + blocks) * BLOCK_M, 0), 0)
    last = tl.sum(tl.where(here, end, 0), 0)
    return expert, first, last


@triton.jit
def _rows_times_weight(
    rows,
    live,
    w_ptr,
    n,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N]: rows (pointers) times rows n of w [N, DEPTH], transposed.

    Both operands are plain loads: Triton then feeds Hopper's wgmma from shared memory, where its
    hazard of A operands in registers (triton issue 9433) cannot arise."""
    k = tl.arange(0, BLOCK_K)
    x_ptrs = rows[:, None] + k[None, :]
    w_ptrs = w_ptr + n[None, :].to(tl.int64) * DEPTH + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, DEPTH, BLOCK_K):
        x_mask, w_mask = live[:, None], (n < N)[None, :]
        if DEPTH % BLOCK_K != 0:
            x_mask = x_mask & (k0 + k < DEPTH)[None, :]
            w_mask = w_mask & (k0 + k < DEPTH)[:, None]
        x = tl.load(x_ptrs + k0, mask=x_mask, other=0.0)
        w = tl.load(w_ptrs + k0, mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _up(
    x_ptr,
    up_ptr,
    h_ptr,
    order_idx,
    offsets_idx,
    x_stride,
    E: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T*K, F] in the order of `order`."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(F, BLOCK_N)
    expert, first, last = _find_block(offsets_idx, pid // tiles, E, BLOCK_M, BLOCK_E)
    if first < last:
        i = first + tl.arange(0, BLOCK_M)
        n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        live = i < last
        pair = tl.load(order_idx + i, mask=live, other=0).to(tl.int64)
        rows, w = x_ptr + pair // K * x_stride, up_ptr + expert * F * L
        acc = _rows_times_weight(rows, live, w, n, F, L, BLOCK_M, BLOCK_N, BLOCK_K)
        mask = live[:, None] & (n < F)[None, :]
        h = relu2(acc).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + i[:, None] * F + n[None, :], h, mask=mask)


@triton.jit
def _down(
    h_ptr,
    down_ptr,
    rows_ptr,
    weights_ptr,
    order_idx,
    offsets_idx,
    E: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weighted rows [T*K, L] fp32 in the order of the pairs."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(L, BLOCK_N)
    expert, first, last = _find_block(offsets_idx, pid // tiles, E, BLOCK_M, BLOCK_E)
    if first < last:
        i = first + tl.arange(0, BLOCK_M)
        n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        live = i < last
        pair = tl.load(order_idx + i, mask=live, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + pair, mask=live, other=0.0)
        w = down_ptr + expert * L * F
        acc = _rows_times_weight(h_ptr + i * F, live, w, n, L, F, BLOCK_M, BLOCK_N, BLOCK_K)
        mask = live[:, None] & (n < L)[None, :]
        tl.store(rows_ptr + pair[:, None] * L + n[None, :], acc * weight[:, None], mask=mask)


@triton.jit
def _vector_times_weight(
    x_ptr,
    w_ptr,
    n,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_N]: rows n of w [N, DEPTH] times the vector x [DEPTH]."""
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * DEPTH + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k0 in range(0, DEPTH, BLOCK_K):
        inside = k0 + k < DEPTH
        x = tl.load(x_ptr + k0 + k, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptrs + k0, mask=(n < N)[:, None] & inside[None, :], other=0.0)
        acc += w.to(tl.float32) * x[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _up_pair(
    x_ptr,
    up_ptr,
    h_ptr,
    ids_idx,
    x_stride,
    F: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [T*K, F] in the order of the pairs."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(F, BLOCK_N)
    pair = pid // tiles
    n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids_idx + pair).to(tl.int64)
    if expert >= 0:
        x, w = x_ptr + pair // K * x_stride, up_ptr + expert * F * L
        acc = _vector_times_weight(x, w, n, F, L, BLOCK_N, BLOCK_K)
        tl.store(h_ptr + pair * F + n, relu2(acc).to(h_ptr.dtype.element_ty), mask=n < F)


@triton.jit
def _down_pair(
    h_ptr,
    down_ptr,
    rows_ptr,
    weights_ptr,
    ids_idx,
    F: tl.constexpr,
    L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weighted rows [T*K, L] fp32 in the order of the pairs."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(L, BLOCK_N)
    pair = pid // tiles
    n = (pid % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids_idx + pair).to(tl.int64)
    if expert >= 0:
        w = down_ptr + expert * L * F
        acc = _vector_times_weight(h_ptr + pair * F, w, n, L, F, BLOCK_N, BLOCK_K)
        tl.store(rows_ptr + pair * L + n, acc * tl.load(weights_ptr + pair), mask=n < L)


@triton.jit
def _combine(
    rows_ptr, y_ptr, L: tl.constexpr, K: tl.constexpr, BLOCK_L: tl.constexpr, PDL: tl.constexpr
):
    """y [T, L]: the K rows of a token added in the order of its slots."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(L, BLOCK_L)
    t = pid // tiles
    n = (pid % tiles) * BLOCK_L + tl.arange(0, BLOCK_L)
    acc = tl.zeros([BLOCK_L], tl.float32)
    for j in range(K):
        acc += tl.load(rows_ptr + (t * K + j) * L + n, mask=n < L, other=0.0)
    tl.store(y_ptr + t * L + n, acc.to(y_ptr.dtype.element_ty), mask=n < L)


@op(ref=run_experts_ref)
def run_experts(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Run every routed expert on its tokens and sum them by weight.

    x [T, L], up [E, F, L], down [E, L, F] in one dtype; returns [T, L] in x's dtype. Takes scratch
    of T*K*(F*itemsize + 4L) bytes."""
    _check(x, up, down, routing)
    for name, w in (("up", up), ("down", down)):
        require(w.dtype == x.dtype, f"{name} is {w.dtype}, but x is {x.dtype}")
        require(w.is_contiguous(), f"{name} must be contiguous; call .contiguous() at load")
    require(x.stride(1) == 1, "x must have unit stride along its width; call .contiguous()")
    (T, K), (E, F, L) = routing.ids.shape, up.shape
    P = T * K
    h = torch.empty((P, F), dtype=x.dtype, device=x.device)
    rows = pair_rows(routing, L, dtype=torch.float32)
    y = torch.empty((T, L), dtype=x.dtype, device=x.device)
    tile = RUN_EXPERTS.tile(T, x, E=E, F=F, L=L, K=K)
    if x.dtype == torch.float32 and tile["BLOCK_M"] > 32:
        # exact fp32 products have no tensor core: larger blocks spill
        tile = tile.but(BLOCK_M=32, BLOCK_N=64, BLOCK_K=32)
    block_n = int(tile["BLOCK_N"])
    up_tiles, down_tiles = cdiv(F, block_n), cdiv(L, block_n)
    late = as_dependent(x)
    if tile["BLOCK_M"] == 1:
        size = {**tile.without("BLOCK_M"), **late}
        ids, weights = routing.ids, routing.weights
        launch(_up_pair, (P * up_tiles,), x, up, h, ids, x.stride(0), F, L, K, **size)
        launch(_down_pair, (P * down_tiles,), h, down, rows, weights, ids, F, L, **size)
    else:
        blocks = most_blocks(P, E, int(tile["BLOCK_M"]))
        size = {**tile, "BLOCK_E": next_pow2(E), **late}
        table = (routing.order, routing.offsets)
        launch(_up, (blocks * up_tiles,), x, up, h, *table, x.stride(0), E, F, L, K, **size)
        weights = routing.weights
        launch(_down, (blocks * down_tiles,), h, down, rows, weights, *table, E, F, L, **size)
    return add_rows(rows, y, K)


def add_rows(rows: torch.Tensor, y: torch.Tensor, K: int) -> torch.Tensor:
    """y [T, L], of every token's K rows [T*K, L]."""
    T, L = y.shape
    block = {"BLOCK_L": min(1024, next_pow2(L)), "num_warps": 4, **as_dependent(y)}
    launch(_combine, (T * cdiv(L, block["BLOCK_L"]),), rows, y, L, K, **block)
    return y


def most_blocks(pairs: int, experts: int, block: int) -> int:
    """The most blocks of `block` pairs that any routing of `pairs` over `experts` can need."""
    return pairs if pairs <= experts else experts + (pairs - experts) // block


def _tiles(case: Case) -> list[Tile]:
    pair = [
        Tile(BLOCK_M=1, BLOCK_N=n, BLOCK_K=k, num_warps=w, num_stages=1)
        for n in (4, 8, 16)
        for k in (256, 512)
        for w in (2, 4)
    ]
    few = [
        Tile(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=4, num_stages=s)
        for m in (16, 32)
        for n, k in ((32, 128), (64, 64), (64, 128), (128, 64))
        for s in (3, 4)
    ]
    many = [
        Tile(BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, num_warps=w, num_stages=s)
        for m in (64, 128)
        for n in (128, 256)
        for w in (4, 8)
        for s in (3, 4)
        if m * n // w <= 4096  # 128 accumulators a lane: more spill
    ]
    return pair + few + many


def _suits(tile: Tile, tokens: int) -> bool:
    """Whether the sweep measures a tile at this many tokens: blocks of about an expert's rows."""
    fits = {1: (0, 4), 16: (2, 512), 32: (256, 1024), 64: (512, 4096), 128: (1024, 1 << 20)}
    low, high = fits[int(tile["BLOCK_M"])]
    return low < tokens <= high


def _default(case: Case, tokens: int) -> Tile:
    """The block that the tokens of a mean expert fill; a pair a program at one or two tokens."""
    per_expert = tokens * case.K / case.E
    if tokens <= 2:
        return Tile(BLOCK_M=1, BLOCK_N=8, BLOCK_K=512, num_warps=4, num_stages=1)
    if per_expert <= 16:
        return Tile(BLOCK_M=16, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4)
    if per_expert <= 32:
        return Tile(BLOCK_M=32, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3)
    if per_expert <= 96:
        return Tile(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3)
    return Tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3)


def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, device=dev, generator=rng, dtype=dtype).mul_(scale)

    x = normal(T, case.L, scale=1.0)
    up = normal(case.E, case.F, case.L, scale=case.L**-0.5)
    down = normal(case.E, case.L, case.F, scale=case.F**-0.5)
    # a third of the experts get most of the tokens, others none
    logits = torch.randn(T, case.E, device=dev, generator=rng)
    logits[:, ::3] += 2.0
    routing = route_experts_ref(logits, None, case.K, 1, 1, True, 2.5)
    return {"x": x, "up": up, "down": down, "routing": routing}


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    touched = case.E * (1 - (1 - case.K / case.E) ** T)  # under even routing
    read = touched * 2 * case.F * case.L + 2 * T * case.L
    return Cost(4 * T * case.K * case.F * case.L, int(read) * dtype.itemsize)


RUN_EXPERTS = KernelSpec(
    terms=lambda case: case.F + case.L,
    op=run_experts,
    kernels=(_up, _down, _up_pair, _down_pair, _combine),
    cases=lambda config: [
        Case(E=m.experts, F=m.width, L=m.latent or config.width, K=m.top_k)
        for m in dict.fromkeys((*config.moes, config.mtp_moe))
        if m is not None
    ],
    small=[
        Case(E=6, F=80, L=48, K=3),
        Case(E=5, F=37, L=64, K=1),
        Case(E=11, F=64, L=33, K=4),
    ],
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768),
    make=_make,
    tiles=_tiles,
    suits=_suits,
    default=_default,
    fixed=FixedOrder(experts_order, fixed_experts, twin=by_token(run_experts_ref)),
    cost=_cost,
    per_token=("x",),
    strided=("x",),
)
