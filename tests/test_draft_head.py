"""The e4m3 copy of the head that drafts are picked by: when there is one, and that it changes no
token."""

import pytest
import torch

from nemotriton import LLM, SamplingParams
from nemotriton import device as devices
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected
from nemotriton.model.packing import copies_head, forced_packing, padding_bytes
from nemotriton.model.release_schemes import release_scheme

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16
OPTIONS = {"device": "cpu", "dtype": "bfloat16", "max_context": 128, "max_requests": 4}
PROMPTS = ["def add(a, b):", "for i in range(3):", "import os\n", "class A:"]


def test_the_rule_and_what_the_copy_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.preset("super-120b")
    head = config.vocab * config.width
    for major, wanted in ((9, head), (10, 0)):
        info = type("Info", (), {"capability": (major, 0)})
        monkeypatch.setattr(devices, "info", lambda _, info=info: info)
        scheme = release_scheme(config, "release")
        found = [
            padding_bytes(expected(config, scheme, mtp_blocks=n), False, BF16, CUDA) for n in (0, 1)
        ]
        assert found == [0, wanted], "only a model that drafts has one"
        assert copies_head(head, BF16, CUDA) == bool(wanted)
        assert not copies_head(head, torch.float32, CUDA)
        assert not copies_head(head, BF16, CPU)
        assert not copies_head(2048 * 256, BF16, CUDA), "too small to matter"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_changes_no_token_and_hardly_what_is_accepted(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
    with LLM(**OPTIONS) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    accepted = {}
    for forced in (False, True):
        with forced_packing(forced), LLM(**OPTIONS, drafts=2, adapt_drafts=False) as llm:
            model = llm.runner.model
            assert (model.head_copy is not None) == forced
            assert any("e4m3 copy of the head" in note for note in llm.notes) == forced
            found = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
            accepted[forced] = llm.stats()["drafts"]["accepted"]
        assert found == want
    assert accepted[False] > 20
    assert accepted[True] >= 0.9 * accepted[False]


def test_its_logits_are_the_heads_within_e4m3() -> None:
    with forced_packing(True), LLM(**OPTIONS, drafts=1) as llm:
        model = llm.runner.model
        hidden = torch.randn(32, model.config.width, dtype=BF16)
        want, found = model.logits(hidden), model.draft_logits(hidden)
        assert found.dtype == torch.float32
        off = (found - want).norm(dim=1) / want.norm(dim=1)
        assert off.max() < 2**-4, "half of e4m3's last place of every weight"
        assert off.min() > 0, "it is the copy that was read"
