"""Linear layers: y = epilogue(x W^T + bias).

    epilogue "none"      y
             "relu2"     max(y, 0)^2                  (the up-projections)
             "residual"  y + residual                 (sums of branches)

x [T, K] with a free row stride, weight [N, K] as the checkpoint stores it, bias [N] or None,
residual [T, N]; y [T, N] in x's dtype or `out_dtype` (fp32 logits from bf16 inputs), rounded once.
bf16 and fp16 products are summed in fp32 on tensor cores. A fp32 weight beside bf16 x, as in the
router, is multiplied there too, in three bf16 parts that keep its 24 bits. Where else a side is
fp32, both are widened and multiplied in fp32 (no tf32).

A few tokens are a matter of streaming the weight (`gemm_stream`). For some more it still stands on
the tensor core's long side (SWAP), and K is split over programs (SPLITS), whose partial sums a
second kernel adds in a fixed order. Many tokens take square tiles in an order that keeps both
operands in L2 (GROUP). Within one form a row's sum does not depend on how many rows there are.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from nemotriton.errors import require
from nemotriton.kernels import fixed_order
from nemotriton.kernels.dependent import as_dependent
from nemotriton.kernels.gemm_fixed import fixed_matmul, product_order
from nemotriton.kernels.gemm_parts import LEAST_TOKENS, parts_matmul, takes_parts
from nemotriton.kernels.gemm_roles import NUMBERS, _roles, multiply_many
from nemotriton.kernels.gemm_square import _square, describable, square_tile
from nemotriton.kernels.gemm_stream import (
    STREAM_TOKENS,
    WIDE,
    _stream,
    dot_parts,
    finish,
    stream,
    stream_suits,
    stream_tile,
    stream_tiles,
)
from nemotriton.kernels.numerics import relu2_ref
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
    on_hopper,
    op,
)

EPILOGUES = ("none", "relu2", "residual")


def matmul_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twin of `matmul`."""
    f = acc_dtype(x)
    y = x.to(f) @ weight.to(f).T
    if bias is not None:
        y = y + bias.to(f)
    if epilogue == "relu2":
        y = relu2_ref(y)
    if residual is not None:
        y = y + residual.to(f)
    return y if f == torch.float64 else y.to(out_dtype or x.dtype)


# ---------------------------------------------------------------------------------------- kernels
@triton.jit(do_not_specialize=["T"])
def _matmul(
    x_ptr, w_ptr, b_ptr, r_ptr, y_ptr,
    x_stride, w_stride, r_stride, T, N, K,
    RELU2: tl.constexpr, IEEE: tl.constexpr, PARTS: tl.constexpr,
    EVEN_K: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of outputs over one of SPLITS parts of K, STEPS blocks long."""
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_t = tl.cdiv(T, BLOCK_T)
    split = pid // (tiles_n * tiles_t)
    pid = pid % (tiles_n * tiles_t)
    first = pid // (GROUP * tiles_n) * GROUP  # GROUP rows of tiles at a time, column by column
    rows = tl.minimum(tiles_t - first, GROUP)
    t = (first + pid % rows) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = pid % (GROUP * tiles_n) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    k = split * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    # rows past the end repeat the last one; their sums are not stored
    x_at = x_ptr + tl.minimum(t, T - 1)[:, None] * x_stride + k[None, :]  # [BLOCK_T, BLOCK_K]
    w_at = w_ptr + tl.minimum(n, N - 1)[:, None] * w_stride + k[None, :]  # [BLOCK_N, BLOCK_K]
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc = tl.zeros((BLOCK_N, BLOCK_T) if SWAP else (BLOCK_T, BLOCK_N), tl.float32)
    for step in range(STEPS):
        if EVEN_K:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            left = (k + step * BLOCK_K < K)[None, :]
            x = tl.load(x_at, mask=left, other=0.0)
            w = tl.load(w_at, mask=left, other=0.0)
        if IEEE:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        if PARTS and SWAP:
            acc = dot_parts(w, tl.trans(x), acc, True)
        elif PARTS:
            acc = dot_parts(tl.trans(w), x, acc, False)
        elif SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    y_ptr += split * T * N  # one plane of partial sums a split
    t, n = (t[None, :], n[:, None]) if SWAP else (t[:, None], n[None, :])
    finish(acc, b_ptr, r_ptr, y_ptr, t, n, T, N, r_stride, RELU2)


@triton.jit(do_not_specialize=["T"])
def _sum_splits(
    parts_ptr, b_ptr, r_ptr, y_ptr, r_stride, T, N,
    RELU2: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of one token, first split first."""
    pid = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(N, BLOCK_N)
    t = pid // blocks
    n = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    part = parts_ptr + t * N + n
    for _ in tl.static_range(SPLITS):
        acc += tl.load(part, mask=n < N, other=0.0)
        part += T.to(tl.int64) * N
    finish(acc, b_ptr, r_ptr, y_ptr, t, n, T, N, r_stride, RELU2)


# -------------------------------------------------------------------------------------------- op
@op(ref=matmul_ref)
def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str = "none",
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """epilogue(x weight^T + bias) for x [T, K] and weight [N, K]; returns [T, N].

    The dtypes of x and weight are equal, or one of them is fp32: then the product is fp32 too."""
    T, N, K = _check(x, weight, bias, epilogue, residual)
    y = torch.empty((T, N), dtype=out_dtype or x.dtype, device=x.device)
    wide = torch.float32 in (x.dtype, weight.dtype)
    parts_of_w = wide and x.dtype == torch.bfloat16
    ieee = wide and not parts_of_w
    tile = MATMUL.tile(T, x, N=N, K=K, ieee=int(wide))
    if ieee and ("STREAM" in tile or tile["BLOCK_T"] > IEEE_ROWS):
        tile = _ieee_tile(Case(N=N, K=K), 1 if fixed_order.phase() else T)
    squared = epilogue == "relu2"
    if parts_of_w and "TMA" in tile:
        if bias is None and epilogue == "none" and takes_parts(x, weight, y):
            return parts_matmul(x, weight)
        tile = _parts_tile(Case(N=N, K=K), T, PARTS_SHAPE)
    if not ieee and ("STREAM" in tile or ("TMA" in tile and describable(x, weight))):
        form = stream if "STREAM" in tile else multiply_many
        form(x, weight, (None, None), bias, squared, residual, y, tile)
        return y
    if "TMA" in tile:
        tile = _pointers(tile)
    block_k = int(tile["BLOCK_K"])
    tile = tile.but(SPLITS=min(int(tile["SPLITS"]), cdiv(K, block_k)))
    splits = int(tile["SPLITS"])
    steps = cdiv(K, block_k * splits)
    r_stride = 0 if residual is None else residual.stride(0)
    even = block_k * splits * steps == K
    constants = {"IEEE": ieee, "PARTS": parts_of_w, "STEPS": steps, "EVEN_K": even}
    constants |= as_dependent(x)
    grid = (cdiv(T, int(tile["BLOCK_T"])) * cdiv(N, int(tile["BLOCK_N"])) * splits,)
    shape = (x.stride(0), weight.stride(0), r_stride, T, N, K)
    if splits == 1:
        args = (x, weight, bias, residual, y, *shape)
        launch(_matmul, grid, *args, RELU2=squared, **constants, **tile)
        return y
    parts = torch.empty((splits, T, N), dtype=torch.float32, device=x.device)
    launch(_matmul, grid, x, weight, None, None, parts, *shape, RELU2=False, **constants, **tile)
    sum_splits(parts, bias, squared, residual, y)
    return y


def sum_splits(
    parts: torch.Tensor,
    bias: torch.Tensor | None,
    squared: bool,
    residual: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Launch the sum of parts [splits, T, N] into y [T, N]."""
    splits, T, N = parts.shape
    block = min(512, next_pow2(N))
    args = (parts, bias, residual, y, 0 if residual is None else residual.stride(0), T, N)
    constants = {"RELU2": squared, "SPLITS": splits, "BLOCK_N": block, "num_warps": 4}
    launch(_sum_splits, (T * cdiv(N, block),), *args, **constants, **as_dependent(y))


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str,
    residual: torch.Tensor | None,
) -> tuple[int, int, int]:
    require(x.ndim == 2, f"x must be [tokens, width], got shape {tuple(x.shape)}")
    T, K = x.shape
    require(
        weight.ndim == 2 and weight.shape[1] == K and K > 0,
        f"weight of shape {tuple(weight.shape)} does not match x of width {K}",
    )
    require(weight.stride(1) == 1, "weight must have unit stride along K; call .contiguous()")
    require(
        x.dtype == weight.dtype or torch.float32 in (x.dtype, weight.dtype),
        f"x is {x.dtype} and weight {weight.dtype}: use one dtype, or fp32 for one of them",
    )
    N = weight.shape[0]
    check_rows(x, N, bias, epilogue, residual)
    return T, N, K


def check_rows(
    x: torch.Tensor,
    N: int,
    bias: torch.Tensor | None,
    epilogue: str,
    residual: torch.Tensor | None,
) -> None:
    """Everything about a product with N outputs but its weight."""
    T = x.shape[0]
    require(x.stride(1) == 1, "x must have unit stride along its width; call .contiguous()")
    require(
        bias is None or bias.shape == (N,),
        f"bias must be [{N}], got shape {None if bias is None else tuple(bias.shape)}",
    )
    require(
        epilogue in EPILOGUES and (epilogue == "residual") == (residual is not None),
        f"epilogue {epilogue!r} {'without' if residual is None else 'with'} a residual: "
        "use 'none', 'relu2', or 'residual' with a residual to add",
    )
    require(
        residual is None or (residual.shape == (T, N) and residual.stride(1) == 1),
        f"residual must be [{T}, {N}] with unit stride along its width",
    )


# ------------------------------------------------------------------------------------------- spec
def _make(case: Case, T: int, dev: torch.device, dtype: torch.dtype, rng: torch.Generator) -> Args:
    weight = torch.randn(case.N, case.K, generator=rng, device=dev) * case.K**-0.5
    return {
        "x": torch.randn(T, case.K, generator=rng, device=dev).to(dtype),
        "weight": weight if case.ieee else weight.to(dtype),
        "out_dtype": torch.float32 if case.ieee else None,
    }


def _cases(config: Any) -> list[Case]:
    """Every matrix of the model that is not an expert's, by its size."""
    sizes = {(config.vocab, config.width): 0}
    sizes.update({(m.in_rows, config.width): 0 for m in _some(config.mamba)})
    sizes.update({(config.width, m.inner): 0 for m in _some(config.mamba)})
    for a in _some(config.attention):
        sizes[a.q_rows + 2 * a.kv_rows, config.width] = 0
        sizes[config.width, a.q_rows] = 0
    for m in (*_some(*config.moes), *_some(config.mtp_moe)):
        sizes[m.experts, config.width] = 1
        if m.latent:
            sizes.update({(m.latent, config.width): 0, (config.width, m.latent): 0})
    shared = [m.shared_width for m in (*_some(*config.moes), *_some(config.mtp_moe))]
    for width in (*config.mlp_widths, config.mtp_mlp_width, *shared):
        if width:
            sizes.update({(width, config.width): 0, (config.width, width): 0})
    if config.mtp:
        sizes[config.width, 2 * config.width] = 0
    return [Case(N=N, K=K, ieee=ieee) for (N, K), ieee in sizes.items()]


def _some(*parts: Any) -> Iterator[Any]:
    return (p for p in parts if p is not None)


# (BLOCK_T, BLOCK_N, BLOCK_K, num_warps, num_stages): the weight is the tall operand and read once,
SWAPPED = (
    (16, 64, 128, 4, 3),
    (32, 128, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 128, 4, 3),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 8, 3),
)
# or both operands are reused
SQUARE = (
    (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
)
PARTS_SHAPE = (64, 64, 64, 4, 3)  # of a fp32 weight in parts; by `gemm_parts` for many tokens
SWAP_TOKENS = 128
PROGRAMS = (132, 264)  # that splitting K aims at: one or two for each of a large GPU's processors


def _splits(case: Case, block_n: int, programs: int) -> int:
    """Parts of K, so that there are about as many programs, each with 512 columns or more."""
    splits = 1
    while splits < 8 and cdiv(case.N, block_n) * splits * 2 < 1.5 * programs:
        if 1024 * splits > case.K:
            break
        splits *= 2
    return splits


def _swapped(case: Case, shape: tuple[int, ...], programs: int) -> Tile:
    t, n, k, warps, stages = shape
    tile = Tile(BLOCK_T=t, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
    return tile.but(SWAP=True, GROUP=8, SPLITS=_splits(case, n, programs))


def _pointers(tile: Tile) -> Tile:
    """The tile of the form without descriptors that has the same blocks."""
    tile = square_tile(SQUARE[0]) if "ROLES" in tile else tile
    return tile.without("TMA", "HALVES").but(SWAP=False, SPLITS=1)


# Triton 3.6 and 3.7 turn an fp32 dot of 64 or more rows into tf32 on sm_100, "ieee" or not
IEEE_ROWS = 32


def _ieee_tile(case: Case, tokens: int) -> Tile:
    """A tile without tensor cores."""
    few = tokens <= 64
    shape = (16, 32, 64, 4, 2) if few else (IEEE_ROWS, 128, 64, 4, 2)
    tile = _pointers(square_tile(shape))
    return tile.but(SPLITS=_splits(case, 32, PROGRAMS[0]) if few else 1)


def _parts_tile(case: Case, tokens: int, shape: tuple[int, int, int, int, int]) -> Tile:
    """A tile for a fp32 weight in parts, K split until there are programs enough, and at least
    four times: Hopper's tensor cores cut their sums off, and over 12,288 products in a row that
    adds up to three times what an fp32 sum of the same length may be off."""
    tile = _pointers(square_tile(shape))
    tiles, splits = cdiv(tokens, shape[0]) * cdiv(case.N, shape[1]), 1
    while splits < 8 and (splits < 4 or tiles * splits < PROGRAMS[0]) and 512 * splits <= case.K:
        splits *= 2
    return tile.but(SPLITS=splits)


def _default(case: Case, tokens: int) -> Tile:
    """Good on Hopper without tuning; elsewhere sane, and within 100 KB of shared memory."""
    if case.ieee:
        if tokens <= STREAM_TOKENS:
            return stream_tile(case.N, tokens, 4)
        many = tokens >= LEAST_TOKENS and on_hopper()
        return square_tile(SQUARE[0]) if many else _parts_tile(case, tokens, PARTS_SHAPE)
    if tokens <= 8:
        return stream_tile(case.N, tokens, 2)
    if tokens <= SWAP_TOKENS:
        shape = next(s for s in SWAPPED if s[0] == max(16, next_pow2(tokens)))
        if shape[0] == 64 and case.N < WIDE:
            shape = SWAPPED[3]
        tile = _swapped(case, shape, PROGRAMS[1 if tokens <= 32 else 0])
        # with four warps Blackwell's compiler spills eight bytes of 64 tokens' parts
        return tile if tokens <= 32 or tokens > 64 or on_hopper() else tile.but(num_warps=8)
    if tokens <= 512:  # descriptors cost the host more time than the GPU has work
        splits = _splits(case, 128, 264 // cdiv(tokens, 128))
        return _pointers(square_tile(SQUARE[0])).but(SPLITS=splits)
    return NUMBERS if on_hopper() else square_tile(SQUARE[0])


def _tiles(case: Case) -> list[Tile]:
    if case.ieee:
        shapes = ((64, 64, 64, 4, 3), (64, 64, 32, 4, 4), (64, 128, 32, 4, 4), (128, 64, 32, 8, 4))
        square_tiles = [_pointers(square_tile(shape)) for shape in shapes]
        split = [tile.but(SPLITS=n) for tile in square_tiles for n in (4, 8)]
        return [*stream_tiles(4), *split]
    swapped = [_swapped(case, shape, p) for shape in SWAPPED for p in PROGRAMS]
    squares = [square_tile(shape) for shape in SQUARE]
    return [*stream_tiles(2), *dict.fromkeys(swapped), *squares, NUMBERS, *map(_pointers, squares)]


def _suits(tile: Tile, tokens: int) -> bool:
    """Whether the sweep measures a tile at this many tokens."""
    if "STREAM" in tile:  # how W is brought near is tried for one token
        plain = not (tile["AHEAD"] or tile["EARLY"] or tile["ROTATE"])
        return stream_suits(tile, tokens) and (tokens == 1 or plain)
    if tile.get("SWAP", False):
        return tile["BLOCK_T"] == max(16, next_pow2(tokens))
    if "TMA" in tile:  # descriptors cost the host more time than fewer tokens take
        return tokens > 512
    if tile["SPLITS"] == 1:
        return SWAP_TOKENS // 2 < tokens <= 512
    return tokens > (STREAM_TOKENS if tile["BLOCK_T"] == 64 else SWAP_TOKENS // 2)


def _cost(case: Case, T: int, dtype: torch.dtype) -> Cost:
    weight = case.N * case.K * (4 if case.ieee else dtype.itemsize)
    rows = T * (case.K * dtype.itemsize + case.N * (4 if case.ieee else dtype.itemsize))
    return Cost(2 * T * case.N * case.K, weight + rows)


MATMUL = KernelSpec(
    terms=lambda case: case.K,
    op=matmul,
    kernels=(_matmul, _sum_splits, _stream, _square, _roles),
    cases=_cases,
    small=[Case(N=80, K=64, ieee=0), Case(N=37, K=51, ieee=0), Case(N=33, K=1100, ieee=1)],
    tokens=(1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192),
    make=_make,
    tiles=_tiles,
    suits=_suits,
    default=_default,
    fixed=fixed_order.FixedOrder(
        product_order, fixed_matmul, twin=fixed_order.ByRow(matmul_ref, fixed_order.LINEAR_ROWS)
    ),
    cost=_cost,
    small_tokens=(0, 1, 3, 17, 130),
    per_token=("x",),
    strided=("x", "weight"),
)
