"""The invariant mode on kernels in the interpreter: a few requests, all that can cut their work."""

import pytest
import torch

from nemotriton import LLM
from nemotriton.autotune import parity
from nemotriton.autotune.alone import differing
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "case",
    [
        Case(C=48, W=4, N=1),
        Case(H=2, P=8, N=16, G=2, STATE="fp32", NEW=1, TREE=0),
    ],
    ids=["conv", "state"],
)
def test_a_plain_step_has_the_bits_of_one_that_keeps_lanes(case: Case, dtype: torch.dtype) -> None:
    args = schedules.one_token_step(case, 5, torch.device("cpu"), dtype)
    with fixed_order(DECODE):
        assert schedules.lanes_change_nothing(case, args)


# one row is a block of its own, among others it is one of many
OPS_IN_FP32 = (
    "matmul", "attend_decode", "run_experts", "rms_norm", "add_rms_norm", "gated_rms_norm",
    "causal_conv1d_update", "ssm_update", "route_experts",
)  # fmt: skip


@pytest.mark.parametrize("name", OPS_IN_FP32)
def test_rows_alone_and_among_others_in_fp32(name: str) -> None:
    """The interpreter sums as NumPy does, in an order that the shape of a tile decides."""
    spec, cpu = SPECS[name], torch.device("cpu")
    assert "fp32" in spec.dtypes
    args = spec.make(spec.small[0], 5, cpu, torch.float32, parity.generator(2, cpu))
    with fixed_order(DECODE):
        assert list(differing(spec, args, most=2)) == []
