"""The attention twins: against PyTorch's own attention, and paged against dense."""

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.attention import attend_prefill, attend_prefill_ref, attention_ref
from nemotriton.kernels.attention_decode import attend_decode, attend_decode_ref
from nemotriton.kernels.kv_cache import write_kv, write_kv_ref

PAGE, HEADS, KV_HEADS, WIDTH = 16, 8, 2, 24
NAN = float("nan")


def dense(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shape = lambda heads: (tokens, heads, WIDTH)  # noqa: E731
    make = lambda heads: torch.randn(shape(heads), generator=rng, dtype=torch.float64)  # noqa: E731
    return make(HEADS), make(KV_HEADS), make(KV_HEADS)


def paged(
    keys: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches holding each (k, v) in scattered pages, NaN everywhere else, and the page table."""
    most = max(-(-len(k) // PAGE) for k, _ in keys)
    count = len(keys) * most + 3
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7))
    caches = [torch.full((count, PAGE, KV_HEADS, WIDTH), NAN).to(dtype) for _ in "kv"]
    table = torch.full((len(keys), most + 1), -1, dtype=torch.int32)
    for s, (k, v) in enumerate(keys):
        n = -(-len(k) // PAGE)
        table[s, :n] = order[s * most : s * most + n]
        at = torch.arange(len(k))
        write_kv_ref(k, v, caches[0], caches[1], table[s].long()[at // PAGE] * PAGE + at % PAGE)
    return caches[0], caches[1], table


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("heads", [2, 8, 32])
def test_matches_scaled_dot_product_attention(heads: int) -> None:
    q = torch.randn(2, 9, heads, 16, dtype=torch.float64)
    k, v = (torch.randn(2, 9, 2, 16, dtype=torch.float64) for _ in "kv")
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(attention_ref(q, k, v), want, rtol=1e-12, atol=1e-12)


def test_is_differentiable() -> None:
    q = torch.randn(1, 5, 4, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 5, 2, 3, dtype=torch.float64, requires_grad=True) for _ in "kv")
    assert torch.autograd.gradcheck(attention_ref, (q, k, v))


@pytest.mark.parametrize("attend", [attend_prefill_ref, attend_decode_ref])
def test_pieces_of_packed_sequences_equal_dense_attention(attend) -> None:  # type: ignore[no-untyped-def]
    """The last n tokens of each sequence in one call, a pad and an empty sequence between them."""
    sequences = [dense(41, 1), dense(16, 2), dense(1, 3), dense(33, 4)]
    new, lengths = [5, 16, 0, 2, 1, 3], [41, 16, 1, 0, 1, 33]
    k_cache, v_cache, table = paged([(k, v) for _, k, v in sequences])
    pages = torch.full((6, table.shape[1]), -1, dtype=torch.int32)
    rows = [0, 1, 2, 4, 5]  # sequence 3 is the pad
    pages[rows] = table[[0, 1, 2, 2, 3]]
    owner = {0: 0, 1: 1, 4: 2, 5: 3}
    q = torch.cat(
        [
            sequences[owner[s]][0][-n:] if s in owner else torch.full((n, HEADS, WIDTH), NAN)
            for s, n in enumerate(new)
        ]
    )
    cu = torch.tensor([0, *new]).cumsum(0).int()
    out = attend(q, k_cache, v_cache, pages, cu, int32(*lengths), 16, 41, 0.2)
    for s, n in enumerate(new):
        got = out[int(cu[s]) : int(cu[s + 1])]
        if s not in owner:
            assert not got.any()
            continue
        want = attention_ref(*(x[None] for x in sequences[owner[s]]), 0.2)[0, -n:]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_draft_tree_equals_its_paths_one_by_one() -> None:
    """Each tree token attends like the last token of the path from the root to it."""
    parents = [-1, 0, 0, 1, 2, 2, 5]
    context, new = 20, len(parents)
    q, k, v = dense(context + new, 5)
    k_cache, v_cache, pages = paged([(k, v)])
    args = (k_cache, v_cache, pages, int32(0, new), int32(context + new), new, 27, 0.3)
    out = attend_decode_ref(q[context:], *args, parents=int32(*parents))
    for i in range(new):
        path, node = [], i
        while node >= 0:
            path.insert(0, context + node)
            node = parents[node]
        at = torch.tensor([*range(context), *path])
        want = attention_ref(q[at][None], k[at][None], v[at][None], 0.3)[0, -1]
        torch.testing.assert_close(out[i], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k_scale,v_scale", [(0.02, 30.0), (30.0, 0.02)])
def test_fp8_scales_undo_each_other(k_scale: float, v_scale: float) -> None:
    """fp8 caches hold k / scale; attention over them equals attention over the decoded values."""
    q, k, v = (x.float() for x in dense(19, 6))
    scales = (torch.tensor(k_scale), torch.tensor(v_scale))
    table = int32(1, 0)[None]
    at = torch.arange(19)
    rows = table[0].long()[at // PAGE] * PAGE + at % PAGE
    stored = [torch.full((2, PAGE, KV_HEADS, WIDTH), NAN).to(torch.float8_e4m3fn) for _ in "kv"]
    write_kv_ref(k * k_scale, v * v_scale, *stored, rows, *scales)
    args = (table, int32(0, 19), int32(19), 19, 19, 0.2)
    got = attend_prefill_ref(q, *stored, *args, *scales)
    kd, vd = (c.flatten(0, 1)[rows].float() * s for c, s in zip(stored, scales, strict=True))
    torch.testing.assert_close(got, attention_ref(q[None], kd[None], vd[None], 0.2)[0])


GOOD = {
    "q": torch.zeros(3, 8, 16),
    "k_cache": torch.zeros(2, 16, 2, 16),
    "v_cache": torch.zeros(2, 16, 2, 16),
    "pages": torch.zeros(1, 2, dtype=torch.int32),
    "cu": int32(0, 3),
    "lengths": int32(3),
    "max_new": 3,
    "max_length": 3,
    "scale": 0.25,
}
ODD_PAGE = {name: torch.zeros(2, 24, 2, 16) for name in ("k_cache", "v_cache")}
THREE_HEADS = {name: torch.zeros(2, 16, 3, 16) for name in ("k_cache", "v_cache")}
HALF = {name: torch.zeros(2, 16, 2, 16).half() for name in ("k_cache", "v_cache")}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"q": torch.zeros(3, 128)}, r"q must be .* got shape \(3, 128\)"),
        ({"q": torch.zeros(3, 16, 8).mT}, "unit stride"),
        ({"q": torch.zeros(3, 8, 32)}, "does not hold 2 heads of width 32"),
        (ODD_PAGE, "page size 24"),
        (THREE_HEADS, "8 query heads are not a multiple of 3"),
        (HALF, "q is torch.float32: the caches must be so too"),
        ({"v_cache": torch.zeros(3, 16, 2, 16)}, "must agree"),
        ({"cu": int32(0, 1, 3)}, "cu has 3 entries for 1 sequences"),
        ({"pages": torch.zeros(2, 2, dtype=torch.int32)}, "page table must be"),
        ({"scale": -1.0}, "must be positive, got -1.0"),
        ({"k_scale": torch.ones(2)}, "one element"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    for op in (attend_prefill, attend_decode):
        with pytest.raises(UnsupportedError, match=message):
            op.triton(**GOOD | change)


def test_wrong_parents_and_rows_are_named() -> None:
    with pytest.raises(UnsupportedError, match="each of 3 tokens"):
        attend_decode.triton(**GOOD, parents=int32(-1, 0))
    new, cache = torch.zeros(3, 2, 16), GOOD["k_cache"]
    with pytest.raises(UnsupportedError, match="rows for 3 tokens"):
        write_kv.triton(new, new, cache, cache, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match=r"got .* and"):
        write_kv.triton(new, new[:2], cache, cache, torch.zeros(3, dtype=torch.int64))
