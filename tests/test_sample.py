"""The sampler's twin: its generator's known answers, its filters by hand, its distribution."""

import math

import pytest
import torch

from nemotriton.errors import UnsupportedError
from nemotriton.kernels.sample import gumbel_ref, philox_ref, sample_tokens_ref, token_logprobs
from nemotriton.kernels.thresholds import logit_thresholds_ref, mass_ref

INF = float("inf")


def word(x: int) -> torch.Tensor:
    return torch.tensor(x)


def rows(n: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n,), value, dtype=dtype)


def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> list[int]:
    R = logits.shape[0]
    i64 = torch.int64
    return sample_tokens_ref(
        logits, rows(R, temperature), rows(R, top_k, torch.int32), rows(R, top_p),
        rows(R, min_p), rows(R, seed, i64), rows(R, position, i64),
    ).tolist()  # fmt: skip


def kept(logits: torch.Tensor, **parameters: float) -> list[list[int]]:
    R = logits.shape[0]
    p = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters
    threshold = logit_thresholds_ref(
        logits, rows(R, p["temperature"]), rows(R, p["top_k"], torch.int32),
        rows(R, p["top_p"]), rows(R, p["min_p"]),
    )  # fmt: skip
    return [(x >= t).nonzero()[:, 0].tolist() for x, t in zip(logits, threshold)]


@pytest.mark.parametrize(
    "counter,key,want",
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple, key: int, want: tuple) -> None:
    """The vectors that Random123 publishes for philox4x32-10."""
    got = philox_ref(word(key), tuple(map(word, counter)))  # type: ignore[arg-type]
    assert tuple(int(w) for w in got) == want


def test_mass_is_the_exponential() -> None:
    below = -torch.rand(1, 4000, generator=torch.Generator().manual_seed(0)) * 25
    below[0, 0] = 0
    for heat in (0.3, 1.0, 7.0):
        got = mass_ref(below, torch.tensor([heat]))[0].double() / 2**40
        want = (below[0].double() / heat).exp()
        assert got[0] == 1
        assert float(((got - want).abs() / (want + 1e-6)).max()) < 1e-5
    assert mass_ref(torch.tensor([[-INF, -1e30]]), torch.tensor([1.0])).tolist() == [[0, 0]]


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -1.0, -1.0], [-INF, -INF, -INF]])
    assert sample(logits, temperature=0.0) == [1, 0, 0]
    nan = float("nan")
    assert sample(torch.tensor([[nan, 1.0, nan], [nan, nan, nan], [0.0, INF, 5.0]]), 0.0) == [
        1,
        0,
        1,
    ]


def test_top_k_keeps_ties_with_the_kth() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, 3.0, 2.0]])
    want = {1: [1], 2: [1, 2, 3], 3: [1, 2, 3], 4: [1, 2, 3, 4], 5: [*range(5)], 0: [*range(5)]}
    for k, ids in want.items():
        assert kept(logits, top_k=k) == [ids]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for p, ids in [(0.0, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]),
                   (0.91, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])]:  # fmt: skip
        assert kept(logits, top_p=p) == [ids], p
    flat = torch.zeros(1, 6)
    assert kept(flat, top_p=0.01) == [[*range(6)]]  # a tie is kept whole


def test_filters_apply_in_order() -> None:
    """top-p is a share of what top-k left, min-p of the likeliest."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(logits, top_p=0.55) == [[0, 1]]
    assert kept(logits, top_k=2, top_p=0.55) == [[0]]  # 0.4 / 0.7 = 0.571
    assert kept(logits, min_p=0.49) == [[0, 1, 2]]
    assert kept(logits, min_p=0.51) == [[0, 1]]
    assert kept(logits, min_p=5.0) == [[0]]
    assert kept(logits, min_p=0.49, temperature=0.5) == [[0, 1]]  # 0.25 of the square
    assert kept(logits, top_p=0.55, temperature=0.5) == [[0, 1]]
    assert kept(logits, top_p=0.55, temperature=0.4) == [[0]]
    assert kept(logits, top_k=1, temperature=0.0) == [[0, 1, 2, 3]]  # greedy needs no filter


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_equal_sorting_by_hand(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(20, 97, generator=rng) * 3).mul(4).round().div(4)  # with ties
    for heat, k, p, m in [(1.0, 10, 0.9, 0.01), (0.7, 0, 0.5, 0.0), (1.5, 40, 0.99, 0.05)]:
        got = kept(logits, temperature=heat, top_k=k, top_p=p, min_p=m)
        for row, ids in zip(logits.tolist(), got):
            live = [v for v in row if not k or v >= sorted(row)[-k]]
            weight = {v: math.exp((v - max(row)) / heat) for v in live}
            total = sum(weight[v] for v in live)
            want = []
            for i, v in enumerate(row):
                above = sum(weight[u] for u in live if u > v)
                if v in weight and above < p * total and weight[v] >= m:
                    want.append(i)
            assert ids == want


def test_draws_follow_the_distribution() -> None:
    """Chi-square of 40,000 draws over the filtered, tempered softmax of 16 tokens."""
    n, logits = 40_000, torch.randn(1, 16, generator=torch.Generator().manual_seed(7)) * 2
    heat, i64 = 0.7, torch.int64
    ids = sample_tokens_ref(
        logits.expand(n, -1), rows(n, heat), rows(n, 12, torch.int32), rows(n, 0.95),
        rows(n, 0.0), torch.arange(n) // 200, torch.arange(n, dtype=i64) % 200,
    )  # fmt: skip
    (keep,) = kept(logits, temperature=heat, top_k=12, top_p=0.95)
    assert 2 < len(keep) < 12
    p = torch.softmax(logits[0, keep].double() / heat, 0) * n
    seen = ids.bincount(minlength=16).double()
    assert seen[keep].sum() == n
    chi2 = ((seen[keep] - p) ** 2 / p).sum().item()
    assert chi2 < 4 * len(keep)


def test_noise_is_uniform_in_its_own_scale() -> None:
    g = gumbel_ref(torch.arange(40), torch.full((40,), 9), 501)
    u = (-(-g).exp()).exp().flatten().sort().values
    grid = (torch.arange(u.numel(), dtype=torch.float64) + 0.5) / u.numel()
    assert float((u - grid).abs().max()) < 1.63 / u.numel() ** 0.5  # Kolmogorov, 1 %
    assert g.shape == (40, 501)
    assert g.unique().numel() > 40 * 501 - 3  # 32-bit words: a clash or two may happen


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    alone = [sample(logits[i : i + 1], seed=5, position=11)[0] for i in range(3)]
    assert sample(logits, seed=5, position=11) == alone
    same = logits[:1].expand(64, -1)
    draws = [sample(same[:1], seed=s, position=p)[0] for s in range(8) for p in range(8)]
    assert len(set(draws)) > 5
    assert sample(logits, seed=-3) == sample(logits, seed=-3)
    flat = torch.zeros(3, 1000)  # the high words count; a clash of three draws: 1e-9
    assert sample(flat, seed=2**40 + 1) != sample(flat, seed=1)
    assert sample(flat, position=2**33) != sample(flat, position=0)


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((200, 30), -INF)
    logits[:, 17] = -50.0
    assert set(sample(logits, temperature=5.0)) == {17}
    assert set(sample(logits, temperature=5.0, top_p=0.9, top_k=3, min_p=0.1)) == {17}


def test_logprobs_are_the_log_softmax() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    out = token_logprobs(logits, 3)
    assert out.top_ids.tolist() == [[1, 2, 0]]
    torch.testing.assert_close(out.every, logits.log_softmax(-1))
    torch.testing.assert_close(out.top, out.every.gather(1, out.top_ids))
    assert token_logprobs(logits, 9).top_ids.shape == (1, 4)


def test_rows_must_agree() -> None:
    with pytest.raises(UnsupportedError, match="for 2 rows"):
        sample_tokens_ref(torch.zeros(2, 3), *[torch.zeros(1)] * 6)
