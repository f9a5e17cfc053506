"""The sampling kernels bit for bit against their twins: edges of filters, sizes, neighbours."""

import pytest
import torch

from nemotriton.kernels.op import Tile, use_tile
from nemotriton.kernels.sample import SAMPLE_TOKENS, sample_tokens
from nemotriton.kernels.thresholds import LOGIT_THRESHOLDS, logit_thresholds
from tests.conftest import Poison

INF, NAN = float("inf"), float("nan")


def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def both(
    logits: torch.Tensor, parameters: list[tuple[float, int, float, float]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds and ids of rows with (temperature, top_k, top_p, min_p), equal to the twins'."""
    heat, k, p, m = zip(*parameters)
    filters = (column(heat), column(k, torch.int32), column(p), column(m))
    thresholds = logit_thresholds.triton(logits, *filters)
    assert thresholds.tolist() == logit_thresholds.ref(logits, *filters).tolist()
    rows = torch.arange(len(heat))
    draw = (rows * 7 - 3, rows + (rows << 32))
    ids = sample_tokens.triton(logits, *filters, *draw)
    assert ids.tolist() == sample_tokens.ref(logits, *filters, *draw).tolist()
    return thresholds, ids


EDGES = [
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1e-7, 0.0),
    (1.0, 0, 0.9999999, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 39, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (1.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 1.0),
    (1.0, 0, 1.0, 1e-30),
    (1e-4, 0, 0.9, 0.0),
    (1e-30, 7, 0.9, 0.5),
    (500.0, 0, 0.3, 0.0),
    (0.0, 5, 0.5, 0.5),
]


@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "wide"])
def test_edges_of_every_filter(kind: str, poison: Poison) -> None:
    logits = torch.randn(len(EDGES), 40, generator=torch.Generator().manual_seed(5)) * 4
    if kind == "ties":
        logits = logits.div(4).round()  # zeros of both signs too
    elif kind == "flat":
        logits = torch.full_like(logits, -3.25)
    elif kind == "wide":
        logits = logits.mul(30).exp().clamp_max(1e38) * logits.sign()
    both(logits, EDGES)


def test_sick_and_masked_rows(poison: Poison) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(6))
    logits[0], logits[1] = NAN, -INF
    logits[2, ::3] = NAN
    logits[3, 7:] = -INF
    logits[4, [9, 30]] = INF
    logits[5, 1:] = -INF
    for parameters in [(1.0, 0, 1.0, 0.0), (0.7, 3, 0.9, 0.05), (0.0, 0, 1.0, 0.0)]:
        _, ids = both(logits, [parameters] * 6)
        assert ids[[0, 1, 5]].tolist() == [0, 0, 0]
        assert ids[4] in (9, 30) if parameters[0] else ids[4] == 9
        assert ids[2] % 3
        assert ids[3] < 7


def test_many_rows_of_each_mix(poison: Poison) -> None:
    logits = torch.randn(12, 150, generator=torch.Generator().manual_seed(7)) * 2
    mixes = [(0.8, 0, 0.9, 0.0), (1.0, 20, 1.0, 0.02), (1.2, 50, 0.95, 0.0)]
    both(logits, mixes * 4)


def test_a_full_vocabulary() -> None:
    """131,072 ids: masses add up past 2^40, and ids past 2^16."""
    logits = torch.randn(1, 131_072, generator=torch.Generator().manual_seed(8))
    wide = Tile(BLOCK_V=32_768, num_warps=16, num_stages=1)
    with use_tile("logit_thresholds", wide), use_tile("sample_tokens", wide):
        thresholds, ids = both(logits, [(1.0, 0, 0.9, 0.0)])
    assert logits[0, ids[0]] >= thresholds[0]
    assert 0.5 < float((logits >= thresholds).float().mean()) < 0.9


def test_blocks_and_neighbours_change_nothing() -> None:
    args = SAMPLE_TOKENS.make(
        SAMPLE_TOKENS.small[0], 9, torch.device("cpu"), torch.float32,
        torch.Generator().manual_seed(9),
    )  # fmt: skip
    whole = sample_tokens.triton(**args)
    small = Tile(BLOCK_V=32, num_warps=1, num_stages=1)
    with use_tile("sample_tokens", small), use_tile("logit_thresholds", small):
        for r in (0, 4, 6):
            alone = {k: v[r : r + 1] for k, v in args.items()}
            assert sample_tokens.triton(**alone)[0] == whole[r]


def test_specs_cover_the_vocabulary_of_a_model() -> None:
    class Config:
        vocab = 131_072

    for spec in (SAMPLE_TOKENS, LOGIT_THRESHOLDS):
        (case,) = spec.cases(Config)
        assert case.V == 131_072
        assert spec.default(case, 1) in spec.tiles(case)
