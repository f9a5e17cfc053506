"""Static steps on kernels: pads write zeros and move nothing; all tiles are chosen beforehand."""

import pytest

from nemotriton import LLM, SamplingParams
from nemotriton.engine import graphs as recording

PROMPTS = [[20, 9, 200], [77, 3], [5]]


def test_padded_steps_on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests in a shape of four, one of which ends early, with a draft each."""
    monkeypatch.setattr(recording, "ladder", lambda requests: [requests])
    tokens = []
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (4, 2, 4)]
    sizes = {"dtype": "float32", "device": "cpu", "max_context": 256, "layers": 4, "drafts": 1}
    for impl, graphs in (("triton", True), ("ref", False)):
        with LLM.synthetic(
            "tiny", impl=impl, graphs=graphs, max_requests=4, adapt_drafts=False, **sizes
        ) as llm:
            asked = [llm.engine.prepare(p, s) for p, s in zip(PROMPTS, params)]
            groups = [llm.engine.submit(a) for a in asked]
            llm.step()  # the prompts
            steps = llm.runner.steps
            before = None if steps is None else steps.report()["tiles_looked_up_since"]
            while llm.engine.busy:
                llm.step()
            tokens.append([g.completions[0].request.output for g in groups])
            if steps is not None:
                assert steps.replays >= 2
                assert steps.report()["tiles_looked_up_since"] == before
                assert steps.others == 0
    assert tokens[0] == tokens[1]
