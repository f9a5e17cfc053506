"""The kernels of the chunked scan against the fp64 recurrence, beyond the grid of its spec."""

from dataclasses import dataclass

import pytest
import torch

from nemotriton.kernels.numerics import softplus, softplus_ref
from nemotriton.kernels.op import Op, launch
from nemotriton.kernels.ssd import chunk_table, recurrence_ref, ssd_prefill_chunked
from nemotriton.kernels.ssd_fused import ssd_prefill
from tests.conftest import Poison
from tests.test_ssd import Inputs, Sizes, close, inputs, state_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("op", [ssd_prefill, ssd_prefill_chunked], ids=lambda op: op.name)


def prefill(
    a: Inputs,
    state: torch.Tensor,
    lengths: list[int],
    slots: list[int],
    fresh: list[bool],
    chunk: int,
    *,
    ref: bool = False,
    table: list[tuple[int, int, int]] | None = None,
    op: Op = ssd_prefill_chunked,
) -> torch.Tensor:
    """Parameters are always fp32; `state` is updated in place."""
    rows = torch.tensor(table or chunk_table(lengths, chunk), dtype=torch.int32).reshape(-1, 3)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    index = torch.tensor(slots, dtype=torch.int32)
    where = (state, cu, index, torch.tensor(fresh), rows, chunk)
    return (op.ref if ref else op.triton)(*a.all(), *where)


def as_model(a: Inputs, dtype: torch.dtype) -> Inputs:
    """x, dt, B, C in the model's dtype, the parameters of the heads in fp32."""
    rows = {k: getattr(a, k).to(dtype) for k in ("x", "dt", "B", "C")}
    return Inputs(**rows, A=a.A.float(), D=a.D.float(), dt_bias=a.dt_bias.float())


def within_twice(
    got: torch.Tensor,
    twin: torch.Tensor,
    want: torch.Tensor,
    dtype: torch.dtype,
    exponent: float = 0.0,
    roundings: int = 0,
) -> None:
    """At most twice the error of the twin rounded to `dtype`, plus one ulp of the largest value.

    `roundings`: of factors to `dtype` that the twin does not make, half an ulp each.

    `exponent`: the largest sum of dt A. Two of them that lie close together differ by their last
    digits only, in the twin as in the kernel, which is luck: an fp32 ulp of the sum is allowed."""
    assert bool(got.isfinite().all())
    own = float((twin.to(dtype).double() - want).abs().max())
    error = float((got.double() - want).abs().max())
    ulps = torch.finfo(dtype).eps * (1 + roundings / 2) + torch.finfo(torch.float32).eps * exponent
    assert error <= 2 * own + ulps * float(want.abs().max())


@dataclass
class Ragged:
    """Pieces, their slots, and the chunk table (None: the one `chunk_table` makes)."""

    sizes: Sizes
    chunk: int
    lengths: list[int]
    slots: list[int]
    fresh: list[bool]
    table: list[tuple[int, int, int]] | None = None

    @classmethod
    def around(cls, chunk: int, sizes: Sizes) -> "Ragged":
        lengths = [chunk + 1, 0, 1, chunk - 1, 3]
        return cls(sizes, chunk, lengths, [4, 2, 0, 6, -1], [False, True, True, False, True])

    def check(self, op: Op, a: Inputs, dtype: torch.dtype, roundings: int = 0) -> None:
        """Every piece of an op's result against the recurrence in float64; the state is fp32
        whatever the dtype of x, as models keep it, its error that of x's dtype, in which the
        kernels multiply. The fused kernels round more factors, but bound their exponents."""
        H, P, N = self.sizes.H, self.sizes.P, self.sizes.N
        state = torch.full((7, H, P, N), torch.nan)
        kept = [slot for slot, f in zip(self.slots, self.fresh) if slot >= 0 and not f]
        state[kept] = state_of(len(kept), self.sizes).float()
        twin_state, before = state.clone(), state.double()
        where = (self.lengths, self.slots, self.fresh, self.chunk)
        y = prefill(a, state, *where, table=self.table, op=op)
        twin = prefill(a, twin_state, *where, table=self.table, ref=True)
        exact, start = a.to(torch.float64), 0
        for slot, length, fresh in zip(self.slots, self.lengths, self.fresh):
            part = slice(start, start + length)
            start += length
            if slot < 0:
                assert not y[part].any()
                continue
            h = torch.zeros_like(before[0]) if fresh else before[slot]
            steps = exact.rows(part).steps()
            want, final = recurrence_ref(*steps, h)
            for head in range(H):
                sums = 0.0 if roundings else float((steps[1] * -steps[2]).sum(0)[head])
                for mine, its, true in (
                    (y[part], twin[part], want),
                    (state[slot][None], twin_state[slot][None], final[None]),
                ):
                    if mine.numel():
                        far = (mine[:, head], its[:, head], true[:, head])
                        within_twice(*far, dtype, sums, roundings)
        unowned = sorted(set(range(7)) - set(self.slots))
        assert bool(state[unowned].isnan().all())


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("chunk,dtype", [*zip([8, 96, 8, 96, 128], [*DTYPES, *DTYPES[:2]])])
def test_ragged_pieces_against_the_recurrence(
    chunk: int, dtype: torch.dtype, extreme: bool, poison: Poison
) -> None:
    case = Ragged.around(chunk, Sizes(H=4, P=8, N=12, G=2))
    T = sum(case.lengths)
    a = as_model(inputs(T, case.sizes, seed=chunk, extreme=extreme), dtype)
    case.check(ssd_prefill_chunked, a, dtype)


@both
def test_a_piece_has_the_bits_it_has_alone(op: Op) -> None:
    """Neighbours, their slots, and where a piece lies in the batch change nothing."""
    sizes = Sizes(H=2, P=8, N=16, G=1)
    lengths = [5, 11, 0, 9]
    a = as_model(inputs(25, sizes), torch.bfloat16)
    start = state_of(4, sizes).float()
    packed = start.clone()
    y = prefill(a, packed, lengths, [2, 0, 3, 1], [False] * 4, 8, op=op)
    for s, slot in enumerate([2, 0, 3, 1]):
        first = sum(lengths[:s])
        part = slice(first, first + lengths[s])
        alone = start[slot : slot + 1].clone()
        got = prefill(a.rows(part), alone, [lengths[s]], [0], [False], 8, op=op)
        assert torch.equal(got, y[part])
        assert torch.equal(alone[0], packed[slot])


@both
def test_pieces_cut_on_the_grid_have_the_bits_of_the_whole(op: Op) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(29, sizes), torch.bfloat16)
    whole, cut = (torch.full((1, 2, 8, 16), torch.nan) for _ in range(2))
    want = prefill(a, whole, [29], [0], [True], 8, op=op)
    parts = [slice(0, 16), slice(16, 24), slice(24, 29)]
    got = [
        prefill(a.rows(p), cut, [p.stop - p.start], [0], [p.start == 0], 8, op=op) for p in parts
    ]
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(cut, whole)


@both
def test_nothing_but_empty_pieces(op: Op, poison: Poison) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(0, sizes), torch.bfloat16)
    state = torch.full((3, 2, 8, 16), torch.nan)
    state[1] = 7.0
    y = prefill(a, state, [0, 0, 0], [0, 1, -1], [True, False, True], 8, op=op)
    assert y.shape == (0, 2, 8)
    assert not state[0].any()  # a fresh one begins at zero
    assert bool((state[1] == 7.0).all())
    assert bool(state[2].isnan().all())
    assert prefill(a, state, [], [], [], 8, op=op).shape == (0, 2, 8)


@both
def test_padding_rows_of_the_chunk_table_do_nothing(op: Op, poison: Poison) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(13, sizes), torch.bfloat16)
    table = chunk_table([10, 3], 8)
    plain, padded = (torch.full((3, 2, 8, 16), torch.nan) for _ in range(2))
    want = prefill(a, plain, [10, 3], [2, 0], [True, True], 8, op=op)
    rows = [*table, (-1, 0, 0), (-1, 0, 0)]
    assert torch.equal(
        prefill(a, padded, [10, 3], [2, 0], [True, True], 8, table=rows, op=op), want
    )
    assert torch.equal(padded.nan_to_num(9.0), plain.nan_to_num(9.0))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_final_state_is_rounded_once(dtype: torch.dtype, op: Op) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(20, sizes), dtype)
    full = torch.zeros(1, 2, 8, 16)
    low = full.to(dtype)
    prefill(a, full, [20], [0], [True], 8, op=op)
    prefill(a, low, [20], [0], [True], 8, op=op)
    assert torch.equal(low, full.to(dtype))


@both
@pytest.mark.parametrize("dtype,limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_steps_are_clamped(op: Op, dtype: torch.dtype, limit: float, poison: Poison) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a, limits = as_model(inputs(11, sizes), dtype), (0.02, 0.05)
    table = torch.tensor(chunk_table([11], 8), dtype=torch.int32)
    cu, slot = torch.tensor([0, 11], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    state, twin = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
    rest = (cu, slot, torch.tensor([True]), table, 8, limits)
    y = op.triton(*a.all(), state, *rest)
    close(y, op.ref(*a.all(), twin, *rest), limit)
    close(state, twin, limit)
    free = op.ref(*a.all(), torch.zeros(1, 2, 8, 16), *rest[:-1])
    assert float((free - y).abs().max()) > 1e-2  # the limits were felt


def test_softplus_keeps_its_digits() -> None:
    """Steps of 1e-9 to 100; log(1 + exp(x)) alone has none left below 1e-7."""
    import triton
    import triton.language as tl

    @triton.jit
    def apply(x_ptr, y_ptr, BLOCK: tl.constexpr):
        n = tl.arange(0, BLOCK)
        tl.store(y_ptr + n, softplus(tl.load(x_ptr + n)))

    x = torch.cat([torch.linspace(-21, 40, 253), torch.tensor([-torch.inf, torch.inf, torch.nan])])
    y = torch.empty_like(x)
    apply.fn.__globals__.update(softplus=softplus, tl=tl)
    launch(apply, (1,), x, y, BLOCK=256)
    want = softplus_ref(x.double())
    error = ((y.double() - want).abs() / want)[:253]
    assert float(error.max()) < 5e-7
    assert y[253] == 0
    assert y[254] == torch.inf
    assert bool(y[255].isnan())
