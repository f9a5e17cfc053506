"""Accepting drafts: the walk by hand, and the distribution of what comes out."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nemotriton.errors import UnsupportedError
from nemotriton.kernels import logit_thresholds_ref, sample_tokens_ref, verify_drafts
from nemotriton.kernels.verify import verify_drafts_ref

V, T, TOP_P = 16, 0.7, 0.9


def walk(ids: list[int], picked: list[int], parents: list[int] | None = None) -> tuple:
    n = len(ids)
    found = verify_drafts_ref(
        torch.tensor(ids), torch.tensor(picked), torch.tensor([0, n], dtype=torch.int32), n,
        None if parents is None else torch.tensor(parents, dtype=torch.int32),
    )  # fmt: skip
    return [r for r in found.path.tolist() if r >= 0], int(found.accepted), int(found.last)


def test_chains_and_trees_by_hand() -> None:
    assert walk([9, 1, 2, 3], [1, 2, 3, 4]) == ([0, 1, 2, 3], 3, 3)
    assert walk([9, 1, 2, 3], [5, 2, 3, 4]) == ([0], 0, 0)
    assert walk([9, 1, 2, 3], [1, 5, 3, 4]) == ([0, 1], 1, 1), "right again behind a wrong one"
    assert walk([9], [4]) == ([0], 0, 0)
    tree = [-1, 0, 0, 1, 2, 2]
    assert walk([9, 1, 2, 3, 3, 4], [2, 3, 4, 0, 0, 7], tree) == ([0, 2, 5], 2, 5)
    assert walk([9, 1, 2, 3, 3, 4], [1, 3, 4, 0, 0, 7], tree) == ([0, 1, 3], 2, 3)
    assert walk([9, 1, 1, 3, 3, 4], [1, 5, 3, 0, 0, 7], tree) == ([0, 1], 1, 1), "the first of two"
    assert walk([9, 1, 2, 3], [1, 2, -1, 4]) == ([0, 1], 1, 1), "never onto a broken row"
    assert walk([9, 1, 2, 3], [-1, 2, 3, 4]) == ([0], 0, 0)


def test_refusals() -> None:
    ids, cu = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 3], dtype=torch.int32)
    for wrong in (ids.int(), ids[:2]):
        with pytest.raises(UnsupportedError, match="must be int64 of one length"):
            verify_drafts.triton(ids, wrong, cu, 3)
    with pytest.raises(UnsupportedError, match="one parent for each of 3 rows"):
        verify_drafts.triton(ids, ids, cu, 3, parents=cu)


# ------------------------------------------------------------------------------ the distribution
def sampled(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    R = logits.shape[0]
    return sample_tokens_ref(
        logits, torch.full((R,), T), torch.zeros(R, dtype=torch.int32), torch.full((R,), TOP_P),
        torch.zeros(R), seeds, positions,
    )  # fmt: skip


def probabilities(table: Tensor) -> Tensor:
    """[V, V] of a token behind each token, filtered and tempered as the sampler does it."""
    heat, p = torch.full((V,), T), torch.full((V,), TOP_P)
    edge = logit_thresholds_ref(table, heat, torch.zeros(V, dtype=torch.int32), p, torch.zeros(V))
    kept = table.masked_fill(table < edge[:, None], -torch.inf)
    return (kept.double() / T).softmax(-1)


def generated(
    p: Tensor, draft: Callable[[Tensor, Tensor, Tensor], Tensor], seeds: Tensor, K: int, length: int
) -> tuple[Tensor, float]:
    """`length` tokens behind token 0, K drafts a pass, by seed; and how often draft 1 passes."""
    n = len(seeds)
    out = torch.zeros(n, 1 + length + K, dtype=torch.int64)
    have, first, passes = torch.zeros(n, dtype=torch.int64), 0, 0
    while bool((have < length).any()):
        live = (have < length).nonzero()[:, 0]
        seed, at = seeds[live], have[live]
        rows = [out[live, at]]
        for k in range(K):
            rows.append(draft(rows[-1], seed, at + 1 + k))
        ids = torch.stack(rows, 1)  # [live, K + 1]
        places = (at[:, None] + 1 + torch.arange(K + 1)).flatten()
        picked = sampled(p[ids.flatten()], seed.repeat_interleave(K + 1), places)
        cu = torch.arange(0, ids.numel() + 1, K + 1, dtype=torch.int32)
        verdict = verify_drafts_ref(ids.flatten(), picked, cu, K + 1)
        first, passes = first + int((verdict.accepted > 0).sum()), passes + len(live)
        for k in range(K + 1):
            on = verdict.accepted >= k
            out[live[on], at[on] + 1 + k] = picked.view(-1, K + 1)[on, k]
        have[live] += verdict.accepted + 1
    return out[:, 1 : 1 + length], first / passes


@pytest.mark.parametrize("K", [1, 2, 3])
def test_drafts_leave_the_distribution_alone(K: int) -> None:
    """Chi-square of 200,000 runs over all pairs of tokens; T = 0.7, top-p 0.9.

    Drafters: the model's own distribution disturbed, a point mass, and one that is always wrong."""
    rng = torch.Generator().manual_seed(K)
    p = torch.randn(V, V, generator=rng) * 2
    q = p + torch.randn(V, V, generator=rng)
    drafters = {
        "disturbed": lambda last, seed, at: sampled(q[last], seed, at),
        "greedy": lambda last, seed, at: p[last].argmax(-1),
        "absurd": lambda last, seed, at: p[last].argmin(-1),
    }
    P, n = probabilities(p), 200_000
    pairs = P[0][:, None] * P  # of tokens 1 and 2
    for name, draft in drafters.items():
        count = n if name == "disturbed" else n // 20
        seen = torch.zeros(V * V)
        for seeds in (torch.arange(count) * 7919 - n).split(10_000):
            tokens, accepted = generated(p, draft, seeds, K, 2)
            seen += (tokens[:, 0] * V + tokens[:, 1]).bincount(minlength=V * V)
            assert accepted == 0 if name == "absurd" else accepted > 0.3
        chi_square(seen.double(), pairs.flatten() * count)


def chi_square(seen: Tensor, expected: Tensor) -> None:
    live = expected > 0
    assert seen[~live].sum() == 0, "a token that top-p forbids"
    rare = live & (expected < 10)
    cells = live & ~rare
    seen, expected = (torch.cat([x[cells], x[rare].sum()[None]]) for x in (seen, expected))
    keep = expected > 0
    freedom = int(keep.sum()) - 1
    value = float(((seen - expected)[keep] ** 2 / expected[keep]).sum())
    assert abs(value - freedom) < 4 * (2 * freedom) ** 0.5 + 8, f"chi-square {value} of {freedom}"


def test_acceptance_is_nearly_what_any_lossless_rule_can_have() -> None:
    """At least (1 - TV) / (1 + TV), and all where the drafter is right about the distribution."""
    rng, n = torch.Generator().manual_seed(5), 4000
    seeds, at = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    for spread in (0.0, 0.3, 1.0, 3.0):
        table = torch.randn(1, V, generator=rng) * 2
        other = table + spread * torch.randn(1, V, generator=rng)
        p, q = (probabilities(t.expand(V, V))[0] for t in (table, other))
        tv = 0.5 * float((p - q).abs().sum())
        agree = sampled(table.expand(n, V), seeds, at) == sampled(other.expand(n, V), seeds, at)
        share = float(agree.double().mean())
        low, high = (1 - tv) / (1 + tv), 1 - tv
        assert low - 0.03 < share < high + 0.03
        assert spread > 0 or share == 1


def test_a_run_gives_the_tokens_of_plain_sampling_for_every_seed() -> None:
    rng = torch.Generator().manual_seed(9)
    p, n = torch.randn(V, V, generator=rng) * 2, 500
    seeds = torch.arange(n) * 7919 - n
    plain = [torch.zeros(n, dtype=torch.int64)]
    for at in range(1, 4):
        plain.append(sampled(p[plain[-1]], seeds, torch.full((n,), at)))
    want = torch.stack(plain[1:], 1)
    for K, wrong in itertools.product((1, 2, 3), (False, True)):
        drafts = (p.argmin(-1) if wrong else p.argmax(-1)).__getitem__
        found, _ = generated(p, lambda last, seed, at, d=drafts: d(last), seeds, K, 3)
        assert torch.equal(found, want)
