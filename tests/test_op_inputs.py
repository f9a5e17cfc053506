"""What ops are given where the engine runs them: kernels count on more than twins do.

A twin indexes tensors of any strides; a kernel reads a row of numbers one behind the other.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton.kernels.op import Op

PROMPTS = [[5, 9, 200, 31], list(range(10, 80)), [400]]
WAYS: dict[str, dict[str, Any]] = {
    "pieces": {"prefill_piece": 33},
    "chain": {"drafts": 3, "rollback": "replay", "graphs": True},
    "tree": {"tree": "0,0,1", "rollback": "lanes", "graphs": True},
    "as they come": {"drafts": 3, "graphs": False},
    "invariant": {"drafts": 2, "invariant": True, "state_dtype": "float16-sr", "graphs": True},
}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


@pytest.mark.parametrize("way", WAYS)
def test_numbers_in_a_row_lie_one_behind_the_other(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: set[str] = set()
    wrong: set[str] = set()
    own = Op.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.add(self.name)
        for x in tensors([*args, *kwargs.values()]):
            row = x.ndim == 1 or not x.is_floating_point()  # wrappers ask what they need of others
            if row and x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
                wrong.add(f"{self.name}: {x.dtype} {tuple(x.shape)} by {x.stride()}")
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Op, "__call__", call)
    sizes: dict[str, Any] = {"device": "cpu", "max_context": 128, "max_requests": 3, "memory": 0.05}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM.synthetic("tiny", layers=4, adapt_drafts=False, **sizes | WAYS[way]) as llm:
        llm.generate(PROMPTS, params)
    assert not wrong, "; ".join(sorted(wrong))
    assert {"write_kv", "attend_decode", "attend_prefill", "sample_tokens"} <= called
