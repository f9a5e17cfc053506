"""The kernels of the chunked scan against the fp64 recurrence, beyond the grid of its spec."""

import pytest
import torch

from nemotriton.kernels.numerics import softplus, softplus_ref
from nemotriton.kernels.op import launch
from nemotriton.kernels.ssd import chunk_table, recurrence_ref, ssd_prefill
from tests.conftest import Poison
from tests.test_ssd import Inputs, Sizes, close, inputs, state_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
) -> torch.Tensor:
    """Parameters are always fp32; `state` is updated in place."""
    rows = torch.tensor(table or chunk_table(lengths, chunk), dtype=torch.int32).reshape(-1, 3)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    index = torch.tensor(slots, dtype=torch.int32)
    where = (state, cu, index, torch.tensor(fresh), rows, chunk)
    return (ssd_prefill.ref if ref else ssd_prefill.triton)(*a.all(), *where)


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
) -> None:
    """At most twice the error of the twin rounded to `dtype`, plus one ulp of the largest value.

    `exponent`: the largest sum of dt A. Two of them that lie close together differ by their last
    digits only, in the twin as in the kernel, which is luck: an fp32 ulp of the sum is allowed."""
    assert bool(got.isfinite().all())
    own = float((twin.to(dtype).double() - want).abs().max())
    error = float((got.double() - want).abs().max())
    ulps = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * exponent
    assert error <= 2 * own + ulps * float(want.abs().max())


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("chunk,dtype", [*zip([8, 96, 8, 96, 128], [*DTYPES, *DTYPES[:2]])])
def test_ragged_pieces_against_the_recurrence(
    chunk: int, dtype: torch.dtype, extreme: bool, poison: Poison
) -> None:
    """An fp32 state whatever the dtype of x, as models keep it; its error is that of x's dtype,
    in which the kernels multiply."""
    sizes = Sizes(H=4, P=8, N=12, G=2)
    lengths = [chunk + 1, 0, 1, chunk - 1, 3]
    slots, fresh = [4, 2, 0, 6, -1], [False, True, True, False, True]
    a = as_model(inputs(sum(lengths), sizes, seed=chunk, extreme=extreme), dtype)
    state = torch.full((7, sizes.H, sizes.P, sizes.N), torch.nan)
    state[[4, 6]] = state_of(2, sizes).float()
    twin_state, before = state.clone(), state.double()
    y = prefill(a, state, lengths, slots, fresh, chunk)
    twin = prefill(a, twin_state, lengths, slots, fresh, chunk, ref=True)
    exact, start = a.to(torch.float64), 0
    for s, length in enumerate(lengths):
        part = slice(start, start + length)
        start += length
        if slots[s] < 0:
            assert not y[part].any()
            continue
        h = torch.zeros_like(before[0]) if fresh[s] else before[slots[s]]
        steps = exact.rows(part).steps()
        want, final = recurrence_ref(*steps, h)
        for head in range(sizes.H):
            sums = float((steps[1] * -steps[2]).sum(0)[head])
            for mine, its, true in (
                (y[part], twin[part], want),
                (state[slots[s]].unsqueeze(0), twin_state[slots[s]].unsqueeze(0), final[None]),
            ):
                if mine.numel():
                    within_twice(mine[:, head], its[:, head], true[:, head], dtype, sums)
    assert bool(state[[1, 3, 5]].isnan().all())


def test_a_piece_has_the_bits_it_has_alone() -> None:
    """Neighbours, their slots, and where a piece lies in the batch change nothing."""
    sizes = Sizes(H=2, P=8, N=16, G=1)
    lengths = [5, 11, 0, 9]
    a = as_model(inputs(25, sizes), torch.bfloat16)
    start = state_of(4, sizes).float()
    packed = start.clone()
    y = prefill(a, packed, lengths, [2, 0, 3, 1], [False] * 4, 8)
    for s, slot in enumerate([2, 0, 3, 1]):
        first = sum(lengths[:s])
        part = slice(first, first + lengths[s])
        alone = start[slot : slot + 1].clone()
        got = prefill(a.rows(part), alone, [lengths[s]], [0], [False], 8)
        assert torch.equal(got, y[part])
        assert torch.equal(alone[0], packed[slot])


def test_pieces_cut_on_the_grid_have_the_bits_of_the_whole() -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(29, sizes), torch.bfloat16)
    whole, cut = (torch.full((1, 2, 8, 16), torch.nan) for _ in range(2))
    want = prefill(a, whole, [29], [0], [True], 8)
    parts = [slice(0, 16), slice(16, 24), slice(24, 29)]
    got = [prefill(a.rows(p), cut, [p.stop - p.start], [0], [p.start == 0], 8) for p in parts]
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(cut, whole)


def test_nothing_but_empty_pieces(poison: Poison) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(0, sizes), torch.bfloat16)
    state = torch.full((3, 2, 8, 16), torch.nan)
    state[1] = 7.0
    y = prefill(a, state, [0, 0, 0], [0, 1, -1], [True, False, True], 8)
    assert y.shape == (0, 2, 8)
    assert not state[0].any()  # a fresh one begins at zero
    assert bool((state[1] == 7.0).all())
    assert bool(state[2].isnan().all())
    assert prefill(a, state, [], [], [], 8).shape == (0, 2, 8)


def test_padding_rows_of_the_chunk_table_do_nothing(poison: Poison) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(13, sizes), torch.float32)
    table = chunk_table([10, 3], 8)
    plain, padded = (torch.full((3, 2, 8, 16), torch.nan) for _ in range(2))
    want = prefill(a, plain, [10, 3], [2, 0], [True, True], 8)
    rows = [*table, (-1, 0, 0), (-1, 0, 0)]
    assert torch.equal(prefill(a, padded, [10, 3], [2, 0], [True, True], 8, table=rows), want)
    assert torch.equal(padded.nan_to_num(9.0), plain.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_final_state_is_rounded_once(dtype: torch.dtype) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a = as_model(inputs(20, sizes), dtype)
    full = torch.zeros(1, 2, 8, 16)
    low = full.to(dtype)
    prefill(a, full, [20], [0], [True], 8)
    prefill(a, low, [20], [0], [True], 8)
    assert torch.equal(low, full.to(dtype))


def test_steps_are_clamped(poison: Poison) -> None:
    sizes = Sizes(H=2, P=8, N=16, G=1)
    a, limits = as_model(inputs(11, sizes), torch.float32), (0.02, 0.05)
    table = torch.tensor(chunk_table([11], 8), dtype=torch.int32)
    cu, slot = torch.tensor([0, 11], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    state, twin = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)
    rest = (cu, slot, torch.tensor([True]), table, 8, limits)
    y = ssd_prefill.triton(*a.all(), state, *rest)
    close(y, ssd_prefill.ref(*a.all(), twin, *rest), 1e-5)
    close(state, twin, 1e-5)
    free = ssd_prefill.ref(*a.all(), torch.zeros(1, 2, 8, 16), *rest[:-1])
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
