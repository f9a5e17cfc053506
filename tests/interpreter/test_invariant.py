"""The invariant mode on kernels in the interpreter: a few requests, all that can cut their work."""

import pytest
import torch

from nemotriton import LLM
from nemotriton.autotune import parity
from nemotriton.kernels.fixed_order import DECODE, fixed_order
from nemotriton.kernels.op import SPECS, Case
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


def test_a_token_of_a_tree_has_the_bits_of_its_path() -> None:
    spec, cpu = SPECS["attend_decode"], torch.device("cpu")
    case = Case(H=4, Hkv=2, Dh=16, page=16, fp8=0, new=5, tree=1)
    args = spec.make(case, 6, cpu, torch.bfloat16, parity.generator(0, cpu))
    with fixed_order(DECODE):
        assert parity.check(spec, case, 6, cpu, torch.bfloat16).ok
        whole = spec.op.triton(**args)
        for s, length in enumerate(args["lengths"].tolist()):
            first, end = args["cu"][s : s + 2].tolist()
            for i in range(end - first if length else 0):
                alone = spec.op.triton(**schedules.path_alone(args, s, i))
                assert torch.equal(alone[0], whole[first + i]), f"token {i} of sequence {s}"
