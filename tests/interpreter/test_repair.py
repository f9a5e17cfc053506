"""The repaired interpreter computes narrow floats as torch and the hardware do."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.interpreter import repair

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


# ---------------------------------------------------------------------------------------- kernels
@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def _cast_toward_zero(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.load(x_ptr + i).to(y_ptr.dtype.element_ty, fp_downcast_rounding="rtz")
    tl.store(y_ptr + i, y)


@triton.jit
def _arithmetic(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x - y)
    tl.store(out_ptr + 2 * N + i, x * y)
    tl.store(out_ptr + 3 * N + i, -x)
    tl.store(out_ptr + 4 * N + i, tl.abs(x))
    tl.store(out_ptr + 5 * N + i, tl.where(x < y, x, y))
    tl.store(out_ptr + 6 * N + i, tl.where(x == y, x, y))
    tl.store(out_ptr + 7 * N + i, tl.fma(x, y, x))
    tl.store(out_ptr + 8 * N + i, x * 1.5)


@triton.jit
def _extrema(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.maximum(x, y))
    tl.store(out_ptr + N + i, tl.minimum(x, y))
    tl.store(out_ptr + 2 * N + i, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out_ptr + 3 * N + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out_ptr + 4 * N + i, tl.clamp(x, -1.0, 1.0))


@triton.jit
def _largest_with_index(a, i, b, j):
    takes_b = b > a
    return tl.where(takes_b, b, a), tl.where(takes_b, j, i)


@triton.jit
def _reduce(x_ptr, out_ptr, at_ptr, M: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)
    x = tl.load(x_ptr + m[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out_ptr + m, tl.sum(x, 1))
    tl.store(out_ptr + M + m, tl.max(x, 1))
    tl.store(out_ptr + 2 * M + m, tl.min(x, 1))
    tl.store(out_ptr + 3 * M, tl.sum(tl.sum(x, 1), 0))
    n = tl.broadcast_to(tl.arange(0, N)[None, :], (M, N))
    top, at = tl.reduce((x, n), 1, _largest_with_index)
    tl.store(out_ptr + 4 * M + m, top)
    tl.store(at_ptr + m, at)
    tl.store(at_ptr + M + m, tl.argmax(x, 1))


@triton.jit
def _scan(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.cumsum(x, 0))
    tl.store(out_ptr + N + i, tl.cumsum(x, 0, reverse=True))


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    acc = tl.dot(a, b, tl.full((M, N), 1.0, tl.float32), input_precision="ieee")
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def _dot_scaled(
    a_ptr, sa_ptr, b_ptr, sb_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    m, n, h = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 2)
    g = tl.arange(0, K // GROUP)
    a = tl.load(a_ptr + m[:, None] * (K // 2) + h[None, :])
    b = tl.load(b_ptr + n[None, :] * (K // 2) + h[:, None])
    sa = tl.load(sa_ptr + m[:, None] * (K // GROUP) + g[None, :])
    sb = tl.load(sb_ptr + n[:, None] * (K // GROUP) + g[None, :])
    acc = tl.dot_scaled(a, sa, "e2m1", b, sb, "e2m1")
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def _atomic(out_ptr, at_ptr, x_ptr, old_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    old = tl.atomic_add(out_ptr + tl.load(at_ptr + i), tl.load(x_ptr + i), mask=i < n)
    tl.store(old_ptr + i, old)


@triton.jit
def _descriptor_add(out_ptr, x_ptr, M, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [N, N]).atomic_add([0, 0], x)


@triton.jit
def _swap_bytes(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x0123;", "=r,r", [tl.load(x_ptr + i)], tl.int32, True, 1
    )
    tl.store(y_ptr + i, y)


# ------------------------------------------------------------------------------------------ casts
def cast(x: torch.Tensor, dtype: torch.dtype, kernel=_cast) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    kernel[(1,)](x, y, N=x.numel())
    return y


def all_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)


def all_bytes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal numbers, NaN with NaN, and zeros of the same sign."""
    assert got.dtype == want.dtype
    a, b = got.double(), want.double()
    same = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    assert bool(same.all()), (a[~same][:5], b[~same][:5])


def test_every_bf16_decodes() -> None:
    assert_same(cast(all_bf16(), torch.float32), all_bf16().float())


@pytest.mark.parametrize("below", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_tie_to_bf16(below: int) -> None:
    """Each bf16 pattern followed by lower halves below, at and above the middle."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    x = (high | below).view(torch.float32)
    assert_same(cast(x, BF16), x.to(BF16))


def test_toward_zero_truncates() -> None:
    x = torch.randn(1024)
    want = (x.view(torch.int32) & -65536).view(torch.float32).to(BF16)
    assert_same(cast(x, BF16, _cast_toward_zero), want)


def test_fp16_and_bf16_meet_in_float32() -> None:
    x = torch.cat([torch.randn(1000) * 100, torch.tensor([1e-7, -6e-8, 65504.0, 0.0])])
    pad = torch.zeros(1024 - x.numel())
    half = torch.cat([x, pad]).half()
    assert_same(cast(half, BF16), half.float().to(BF16))
    assert_same(cast(half.to(BF16), torch.float16), half.to(BF16).float().half())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_fp8_code(dtype: torch.dtype) -> None:
    codes = all_bytes(dtype)
    assert_same(cast(codes, torch.float32), codes.float())
    assert_same(cast(codes, BF16), codes.to(BF16))
    finite = codes.float().isfinite()
    back = cast(codes.float(), dtype)
    assert torch.equal(back.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("source", [torch.float32, BF16, torch.float16])
def test_every_tie_to_fp8(dtype: torch.dtype, source: torch.dtype) -> None:
    """The middle of every two neighbours, and the numbers just beside it."""
    values = all_bytes(dtype).float()
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    step = (values[1:] - values[:-1]) / 64
    x = torch.cat([middle, middle - step, middle + step, torch.zeros(4096)])[:1024].to(source)
    assert_same(cast(x, dtype), x.float().to(dtype))


@pytest.mark.parametrize("dtype,largest", [(E4M3, 448.0), (E5M2, 57344.0)])
def test_fp8_saturates(dtype: torch.dtype, largest: float) -> None:
    """As cvt.rn.satfinite: too large and infinite become the largest number, NaN stays."""
    inf = float("inf")
    x = torch.tensor([largest * 1.01, largest * 1.2, 1e30, inf, -largest * 1.2, -inf, 0.0, 0.0])
    x[-1] = float("nan")
    got = cast(x, dtype).float()
    assert got[:6].tolist() == [largest] * 4 + [-largest] * 2
    assert got[-1].isnan()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
def test_integers_and_bf16(dtype: torch.dtype) -> None:
    x = torch.arange(-128, 128, dtype=dtype) * (3 if dtype == torch.int32 else 1)
    assert_same(cast(x, BF16), x.to(BF16))
    assert torch.equal(cast(x.to(BF16), dtype), x.to(BF16).to(dtype))


def test_e2m1_rounds_ties_to_the_even_code() -> None:
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100.0, np.inf])
    assert repair.E2M1.encode(middles).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7]
    assert repair.E2M1.encode(-middles).tolist() == [8, 10, 10, 12, 12, 14, 14, 15, 15, 15]
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert repair.E2M1.decode(np.arange(8, dtype=np.uint8)).tolist() == numbers


# ------------------------------------------------------------------------------------- arithmetic
def bf16_pair(n: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, generator=rng).to(BF16) for _ in range(2))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38])
    x[:7], y[7:14], x[14], y[14] = special.to(BF16), special.to(BF16), 2.0, 2.0
    return x, y


def test_bf16_arithmetic() -> None:
    x, y = bf16_pair()
    out = torch.zeros(9, x.numel(), dtype=BF16)
    _arithmetic[(1,)](x, y, out, N=x.numel())
    f, g = x.float(), y.float()
    fused = (f.double() * g.double() + f.double()).float()
    chosen = [torch.where(x < y, f, g), torch.where(x == y, f, g)]
    want = [f + g, f - g, f * g, 0 - f, f.abs(), *chosen, fused, f * 1.5]
    for got, number in zip(out, want, strict=True):
        a, b = got.float(), number.to(BF16).float()
        assert bool(((a == b) | (a.isnan() & b.isnan())).all())


def test_extrema_and_nan() -> None:
    """The plain forms give the operand that is not NaN, as max.f32 does; ALL keeps NaN."""
    x, y = bf16_pair()
    for a, b in ((x, y), (x.float(), y.float())):
        out = torch.zeros(5, a.numel(), dtype=a.dtype)
        _extrema[(1,)](a, b, out, N=a.numel())
        numbers = [torch.fmax(a, b), torch.fmin(a, b), torch.maximum(a, b), torch.minimum(a, b)]
        for got, want in zip(out, numbers):
            assert bool(((got == want) | (got.isnan() & want.isnan())).all())
        assert not out[4].isnan().any()
        assert torch.equal(out[4][1:], a.clamp(-1, 1)[1:])


def test_bf16_reductions() -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).to(BF16)
    out, at = torch.zeros(5 * 16, dtype=BF16), torch.zeros(32, dtype=torch.int32)
    _reduce[(1,)](x, out, at, M=16, N=64)
    sums = x.float().sum(1).to(BF16)
    assert (out[:16].float() - sums.float()).abs().max() <= sums.float().abs().max() / 128
    assert torch.equal(out[16:32], x.max(1).values)
    assert torch.equal(out[32:48], x.min(1).values)
    assert abs(float(out[48]) - float(out[:16].float().sum())) <= abs(float(out[48])) / 128
    assert torch.equal(out[64:], x.max(1).values)
    assert torch.equal(at[:16], x.float().argmax(1).int())
    assert torch.equal(at[16:], x.float().argmax(1).int())


def test_scans() -> None:
    x = torch.randint(-3, 4, (64,), generator=torch.Generator().manual_seed(3))
    for dtype in (BF16, torch.float32, torch.int32):
        out = torch.zeros(2, 64, dtype=dtype)
        _scan[(1,)](x.to(dtype), out, N=64)
        assert out[0].tolist() == x.cumsum(0).tolist()
        assert out[1].tolist() == x.flip(0).cumsum(0).flip(0).tolist()


# --------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, E4M3, E5M2])
def test_dot(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(4)
    a = torch.randn(16, 32, generator=rng).to(dtype)
    b = torch.randn(32, 16, generator=rng).to(dtype)
    c = torch.zeros(16, 16)
    _dot[(1,)](a, b, c, M=16, N=16, K=32)
    want = a.double() @ b.double() + 1
    assert float((c - want).abs().max()) < 1e-5 * float(want.abs().max())


def test_a_nan_row_stays_alone_in_a_dot() -> None:
    a, b, c = torch.randn(16, 32).to(BF16), torch.randn(32, 16).to(BF16), torch.zeros(16, 16)
    a[3] = float("nan")
    _dot[(1,)](a, b, c, M=16, N=16, K=32)
    assert c[3].isnan().all()
    assert not c[[i for i in range(16) if i != 3]].isnan().any()


@pytest.mark.parametrize("group", [16, 32])
def test_dot_scaled(group: int) -> None:
    rng = torch.Generator().manual_seed(5)
    M, N, K = 16, 8, 64
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = [torch.randint(0, 16, (rows, K), generator=rng) for rows in (M, N)]
    bytes_ = [(c[:, 0::2] | c[:, 1::2] << 4).to(torch.uint8) for c in codes]
    raw = [torch.randint(100, 126, (r, K // group), generator=rng).to(torch.uint8) for r in (M, N)]
    if group == 16:  # e4m3 scales
        scales = [r.view(E4M3) for r in raw]
        factors = [s.float() for s in scales]
    else:  # e8m0 scales
        scales = raw
        factors = [torch.exp2(r.double() - 127) for r in raw]
    spread = [f.double().repeat_interleave(group, 1) for f in factors]
    a, b = (table[c].double() * f for c, f in zip(codes, spread))
    out = torch.zeros(M, N)
    _dot_scaled[(1,)](bytes_[0], scales[0], bytes_[1], scales[1], out, M=M, N=N, K=K, GROUP=group)
    assert float((out - a @ b.T).abs().max()) <= 1e-6 * float((a @ b.T).abs().max())


# ------------------------------------------------------------------------------ atomics, assembly
def test_bf16_atomic_add_meets_the_same_place_twice() -> None:
    out, old = torch.ones(4, dtype=BF16), torch.zeros(8, dtype=BF16)
    at = torch.tensor([0, 1, 1, 3, 3, 3, 2, 2], dtype=torch.int32)
    x = torch.tensor([0.5, 1, 2, 3, 4, 5, 99, 99]).to(BF16)
    _atomic[(1,)](out, at, x, old, 6, N=8)
    assert out.tolist() == [1.5, 4, 1, 13]
    assert old[:6].tolist() == [1, 1, 2, 1, 4, 8]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_descriptor_add_leaves_rows_past_the_end(dtype: torch.dtype) -> None:
    out, x = torch.ones(16, 16, dtype=dtype), torch.full((16, 16), 2.0, dtype=dtype)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    _descriptor_add[(1,)](out, x, 11, N=16)
    assert out[:11].eq(3).all()
    assert out[11:].eq(1).all()


def test_assembly_runs_its_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "ASM", {})
    x, y = torch.tensor([1, 0x01020304], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(Exception, match="no emulation"):
        _swap_bytes[(1,)](x, y, N=2)
    repair.register_asm("prmt.b32  $0, $1, 0, 0x0123;", lambda v: [v.byteswap()])
    _swap_bytes[(1,)](x, y, N=2)
    assert y.tolist() == [0x01000000, 0x04030201]


def test_installing_twice_changes_nothing() -> None:
    repair.install()
    test_every_bf16_decodes()
