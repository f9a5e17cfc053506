"""The invariant mode on kernels in the interpreter: a few requests, all that can cut their work."""

import pytest

from nemotriton import LLM
from tests import schedules
from tests.schedules import raw_logits  # noqa: F401


@pytest.mark.usefixtures("raw_logits")
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_schedules_change_no_bit(dtype: str) -> None:
    wanted = schedules.wishes(2, seed=4, vocab=512, longest=40, tokens=4)
    sizes = {"device": "cpu", "dtype": dtype, "max_context": 128, "memory": 0.05, "layers": 4}
    with LLM.synthetic("tiny", max_requests=1, invariant=True, **sizes) as llm:
        want = schedules.alone(llm, wanted)
    way = {"max_requests": 3, "prefill_piece": 32, "drafts": 2}
    with LLM.synthetic("tiny", invariant=True, **way, **sizes) as llm:
        found = schedules.run(llm, wanted, schedules.chance(llm, want, seed=3))
        assert llm.engine.draft_meter.accepted > 0
    schedules.check(found, want, wanted)
