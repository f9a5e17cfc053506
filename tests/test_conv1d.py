"""The convolution's twins: against torch's own convolution, and against each other."""

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.conv1d import causal_conv1d, causal_conv1d_ref, conv_ref
from nemotriton.kernels.conv1d_update import causal_conv1d_update, causal_conv1d_update_ref

C = 32  # rows of whole vectors: torch's exp has other last bits in the tail of two


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def weights(W: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.randn(C, W + 1).to(dtype)
    return draw[:, :W].contiguous(), draw[:, W].contiguous()


@pytest.mark.parametrize("W", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("biased", [True, False])
def test_core_is_torch_conv1d_with_a_past(W: int, biased: bool) -> None:
    weight, bias = weights(W)
    lengths = [5, 0, 1, 2, 9]
    x = torch.randn(sum(lengths), C, dtype=torch.float64)
    initial = torch.randn(len(lengths), W - 1, C, dtype=torch.float64)
    cu = starts(*lengths)
    y, final = conv_ref(x, weight, bias if biased else None, initial, cu)
    for s, (a, b) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist())):
        u = torch.cat([initial[s], x[a:b]])
        if b > a:
            want = torch.nn.functional.conv1d(
                u.T[None], weight[:, None], bias if biased else None, groups=C
            )
            torch.testing.assert_close(y[a:b], torch.nn.functional.silu(want[0].T))
        assert torch.equal(final[s], u[len(u) - (W - 1) :])


def test_core_is_differentiable() -> None:
    weight, bias = weights(3)
    x, initial = torch.randn(5, C).double(), torch.randn(3, 2, C).double()
    inputs = [t.requires_grad_() for t in (x, weight, bias, initial)]
    cu = starts(3, 0, 2)
    assert torch.autograd.gradcheck(lambda x, w, b, i: conv_ref(x, w, b, i, cu), inputs)


def test_without_sequences() -> None:
    weight, bias = weights(4)
    x, state = torch.zeros(0, C).double(), torch.randn(2, 3, C).double()
    none = torch.zeros(0, dtype=torch.int32)
    before = state.clone()
    assert causal_conv1d_ref(x, weight, bias, state, starts(), none, none.bool(), 0).shape == (0, C)
    assert causal_conv1d_update_ref(x, weight, bias, state, starts(), none, 0).shape == (0, C)
    assert torch.equal(state, before)


def test_fresh_ignores_the_slot_and_pads_touch_nothing() -> None:
    weight, bias = weights(4)
    state = torch.full((5, 3, C), float("nan")).double()
    state[3] = 1.0
    x = torch.randn(9, C).double()
    slots = torch.tensor([2, 0, -1, 3]).int()
    fresh = torch.tensor([True, True, False, False])
    y = causal_conv1d_ref(x, weight, bias, state, starts(4, 0, 3, 2), slots, fresh, 4)
    zeros, ones = torch.zeros(1, 3, C).double(), torch.ones(1, 3, C).double()
    assert torch.equal(y[:4], conv_ref(x[:4], weight, bias, zeros, starts(4))[0])
    assert torch.equal(y[4:7], torch.zeros(3, C).double())
    assert torch.equal(y[7:], conv_ref(x[7:], weight, bias, ones, starts(2))[0])
    assert torch.equal(state[2], x[1:4])
    assert torch.equal(state[0], torch.zeros(3, C).double())  # empty and fresh
    assert torch.equal(state[3], torch.cat([torch.ones(1, C).double(), x[7:]]))
    assert state[[1, 4]].isnan().all()


@pytest.mark.parametrize("W", [2, 3, 4])
def test_any_cut_gives_the_same_bits(W: int) -> None:
    weight, bias = weights(W, torch.float32)
    x, state = torch.randn(23, C), torch.zeros(1, W - 1, C)
    slots, fresh = torch.tensor([0]).int(), torch.tensor([True])
    want = causal_conv1d_ref(x, weight, bias, state, starts(23), slots, fresh, 23)
    other = torch.full_like(state, float("nan"))
    got, at = [], 0
    for n in (1, 7, 0, 2, 5):
        piece, first = x[at : at + n], torch.tensor([at == 0])
        got.append(causal_conv1d_ref(piece, weight, bias, other, starts(n), slots, first, n))
        at += n
    for n in (1, 3, 1, 3):
        piece = x[at : at + n]
        got.append(causal_conv1d_update_ref(piece, weight, bias, other, starts(n), slots, n))
        at += n
    assert torch.equal(torch.cat(got), want)
    assert torch.equal(other, state)


def test_lanes_are_the_windows_of_every_step() -> None:
    weight, bias = weights(4)
    x, state = torch.randn(5, C).double(), torch.randn(3, 3, C).double()
    before, lanes = state.clone(), torch.full((3, 4, 3, C), float("nan")).double()
    slots, cu = torch.tensor([2, 0]).int(), starts(3, 2)
    verify = causal_conv1d_update_ref(
        x, weight, bias, state, cu, slots, 3, lanes, update_state=False
    )
    assert torch.equal(state, before)
    for s, slot in enumerate((2, 0)):
        for t in range(int(cu[s + 1] - cu[s])):
            token = int(cu[s]) + t
            one = x[token, None]
            y = causal_conv1d_update_ref(one, weight, bias, state, starts(1), slots[s, None], 1)
            assert torch.equal(lanes[slot, t], state[slot])
            assert torch.equal(verify[token], y[0])
    assert lanes[1].isnan().all()
    assert lanes[2, 3:].isnan().all()
    assert lanes[0, 2:].isnan().all()


def test_a_tree_follows_its_parents() -> None:
    """Each path of the tree equals the same tokens as a chain of their own."""
    weight, bias = weights(4)
    parents = torch.tensor([-1, 0, 0, 2, -1, 3, 1]).int()
    x, state = torch.randn(7, C).double(), torch.randn(1, 3, C).double()
    slots, lanes = torch.tensor([0]).int(), torch.zeros(1, 7, 3, C).double()
    y = causal_conv1d_update_ref(x, weight, bias, state, starts(7), slots, 7, lanes, False, parents)
    for path in ([0, 1, 6], [0, 2, 3, 5], [4]):
        n = len(path)
        chain, final = conv_ref(x[path], weight, bias, state, starts(n))
        assert torch.equal(y[path], chain)
        assert torch.equal(lanes[0, path[-1]], final[0])


@pytest.mark.parametrize(
    "change,message",
    [
        ({"weight": torch.zeros(C + 1, 4)}, "weight must be"),
        ({"bias": torch.zeros(C + 1)}, "bias must be"),
        ({"state": torch.zeros(2, 2, C)}, "state must be"),
        ({"state": torch.zeros(2, 3, C).half()}, "use one dtype"),
        ({"x": torch.zeros(C, 4).T}, "contiguous"),
        ({"cu": starts(4, 0)}, "cu must be"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict, message: str) -> None:
    args = {
        "x": torch.zeros(4, C),
        "weight": torch.zeros(C, 4),
        "bias": torch.zeros(C),
        "state": torch.zeros(2, 3, C),
        "cu": starts(4),
        "slots": torch.tensor([0]).int(),
    } | change
    with pytest.raises(UnsupportedError, match=message):
        causal_conv1d.triton(**args, fresh=None, max_new=4)
    with pytest.raises(UnsupportedError, match=message):
        causal_conv1d_update.triton(**args, max_new=4)


def test_a_tree_has_no_final_window() -> None:
    weight, bias = weights(4, torch.float32)
    x, state, slots = torch.zeros(2, C), torch.zeros(1, 3, C), torch.tensor([0]).int()
    parents = torch.tensor([-1, -1]).int()
    with pytest.raises(UnsupportedError, match="update_state=False"):
        causal_conv1d_update.triton(x, weight, bias, state, starts(2), slots, 2, parents=parents)
    with pytest.raises(UnsupportedError, match="lanes must be"):
        causal_conv1d_update.triton(
            x, weight, bias, state, starts(2), slots, 2, lanes=torch.zeros(1, 1, 3, C)
        )
