"""write_kv's twin: which rows change, and how fp8 values are made."""

import pytest
import torch

from nemotriton.kernels.kv_cache import write_kv_ref

PAGE = 16


def caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.full((5, PAGE, 2, 8), float("nan")).to(dtype) for _ in "kv")  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_writes_the_named_rows_and_no_other(dtype: torch.dtype) -> None:
    k, v = torch.randn(4, 2, 8).to(dtype), torch.randn(4, 2, 8).to(dtype)
    k_cache, v_cache = caches(dtype)
    rows = torch.tensor([3 * PAGE + 15, -1, 0, 4 * PAGE])
    write_kv_ref(k, v, k_cache, v_cache, rows)
    for new, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[rows[[0, 2, 3]]], new[[0, 2, 3]])
        assert int((~flat.isnan()).sum()) == 3 * 2 * 8


def test_fp8_divides_rounds_to_even_and_saturates() -> None:
    """Codes by hand: 1.0625 and 1.1875 lie between e4m3 neighbours 1, 1.125 and 1.25."""
    values = torch.tensor([1.0, 1.0625, 1.1875, 448.0, 465.0, -1e30, float("nan"), 2**-10])
    k = (values * 0.5).expand(1, 2, 8)
    k_cache, v_cache = caches(torch.float8_e4m3fn)
    scale = torch.tensor(0.5)
    write_kv_ref(k, values.expand(1, 2, 8), k_cache, v_cache, torch.tensor([17]), scale)
    want = [0x38, 0x38, 0x3A, 0x7E, 0x7E, 0xFE, 0x7F, 0x00]
    assert k_cache[1, 1, 0].view(torch.uint8).tolist() == want
    assert v_cache[1, 1, 1].view(torch.uint8).tolist() == want
