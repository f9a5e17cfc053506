"""The embedded model, trained: exact answers that need what was read long ago, on every path.

`figures.json` beside its weights records which examples of the tasks the model gets right in fp32
with nothing special; on every other path those must come out right too. A path that carries states,
windows or K/V wrongly gives other answers: that is shown first, by breaking each of them.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemotriton import LLM, ModelConfig, SamplingParams
from nemotriton.engine.loading import EMBEDDED
from nemotriton.engine.pool import Pool
from nemotriton.model import mamba, mixers
from nemotriton.text.tokens import SPECIALS
from tools.tiny_tasks import Symbols, examples

FIGURES = json.loads((EMBEDDED / "figures.json").read_text())
SYMBOLS = Symbols.of(tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")))
LENGTHS = {"recall": 512, "copy": 256, "depth": 64}
COUNT = 8  # examples of a task
Example = tuple[list[int], list[int]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def opened(model: Path | None = None, **options: Any) -> LLM:
    sizes = {"max_context": 640, "max_requests": 4, "dtype": "float32", "device": "cpu"}
    return LLM(model, **(sizes | options))


def known(task: str, count: int = COUNT) -> list[Example]:
    """Examples that the record says are right."""
    record = FIGURES["right"][f"{task}_{LENGTHS[task]}"]
    pairs = examples(SYMBOLS, task, LENGTHS[task], len(record), seed=LENGTHS[task])
    return [pair for pair, right in zip(pairs, record, strict=True) if right == "1"][:count]


def wrong(llm: LLM, pairs: list[Example], tokens: int = 8) -> int:
    """How many answers are not exact."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([prompt for prompt, _ in pairs], params)
    said = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(ids[: len(a)] != a for ids, (_, a) in zip(said, pairs, strict=True))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with opened() as made:
        yield made


# ------------------------------------------------------------------------------------ the package
def test_it_is_the_preset_and_holds_every_layer_kind() -> None:
    config = ModelConfig.from_json(EMBEDDED)
    assert config == ModelConfig.preset("tiny")
    assert set(config.pattern) == set("M*-E")
    assert 3e6 <= config.parameter_count(mtp=True) <= 4.5e6
    assert json.loads((EMBEDDED / "config.json").read_text())["time_step_min"] == 0


def test_it_is_small_and_loads_quickly() -> None:
    files = [f for f in EMBEDDED.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")]
    assert sum(f.stat().st_size for f in files) < 14e6
    opened().close()  # what is imported once
    before = time.process_time()
    opened().close()
    assert time.process_time() - before < 1


def test_control_tokens_have_the_familys_ids(llm: LLM) -> None:
    assert [llm.tokenizer.id_of(token) for token in SPECIALS] == list(range(len(SPECIALS)))
    text = "def f(x):\n    return 'ü€'  # <think>\n"
    ids = llm.tokenizer.encode(text)
    assert llm.tokenizer.decode(ids) == text
    assert max(ids) < llm.config.vocab == llm.tokenizer.vocab_size


def test_preset_tiny_names_it(llm: LLM) -> None:
    with opened("preset:tiny") as named:  # type: ignore[arg-type]
        assert named.directory == llm.directory == EMBEDDED


def test_the_mixed_copy_is_made_of_these_weights() -> None:
    """What the quantiser leaves alone is bit-equal, so the copy was made anew with the weights."""
    with (
        safe_open(EMBEDDED / "model.safetensors", "pt") as plain,
        safe_open(EMBEDDED / "mixed" / "model.safetensors", "pt") as mixed,
    ):
        names = set(mixed.keys())
        for name in plain.keys():  # noqa: SIM118, the file is no dictionary
            if f"{name}_scale" not in names:
                assert torch.equal(plain.get_tensor(name), mixed.get_tensor(name)), name
        assert any(name.endswith("weight_scale_2") for name in names)


def test_transformers_says_the_same(llm: LLM) -> None:
    """It ignores mtp.*; in fp32 no two logits are near enough for rounding to choose."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    text = "class Queue:\n    def __init__(self"
    given = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = model.generate(
            given, max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0
        )
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    ours = llm.generate([text], params)[0]
    assert ours.prompt_token_ids == given[0].tolist()
    assert list(ours.outputs[0].token_ids) == theirs[0, given.shape[1] :].tolist()
    assert ours.outputs[0].text == tokenizer.decode(
        theirs[0, given.shape[1] :], skip_special_tokens=True
    )


# ------------------------------------------------------------------------------------- the answers
@pytest.mark.parametrize("task", LENGTHS)
def test_answers_that_are_on_record(task: str, llm: LLM) -> None:
    pairs = known(task)
    assert len(pairs) == COUNT
    assert wrong(llm, pairs) == 0


def test_a_lost_ssm_state_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt goes in pieces; each begins without what the ones before left."""
    prefill = mamba.ssd_prefill

    def forgetting(*args: Any, **kwargs: Any) -> torch.Tensor:
        args[7].zero_()
        return prefill(*args, **kwargs)

    monkeypatch.setattr(mamba, "ssd_prefill", forgetting)
    with opened(prefill_piece=24) as llm:
        assert wrong(llm, known("depth")) >= COUNT // 2


def test_a_lost_window_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution's window is lost between decode steps."""
    update = mamba.causal_conv1d_update

    def forgetting(x: torch.Tensor, w: Any, b: Any, state: torch.Tensor, *rest: Any, **more: Any):  # type: ignore[no-untyped-def]
        state.zero_()
        return update(x, w, b, state, *rest, **more)

    monkeypatch.setattr(mamba, "causal_conv1d_update", forgetting)
    with opened() as llm:
        assert wrong(llm, known("copy")) >= COUNT // 2


def test_lost_keys_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest piece's keys are there."""
    write = mixers.write_kv

    def forgetting(k: Any, v: Any, k_cache: torch.Tensor, *rest: Any) -> None:
        k_cache.zero_()
        write(k, v, k_cache, *rest)

    monkeypatch.setattr(mixers, "write_kv", forgetting)
    with opened(prefill_piece=24) as llm:
        assert wrong(llm, known("recall", 4)) >= 3


PATHS: dict[str, dict[str, Any]] = {
    "pieces": {"prefill_piece": 37},
    "drafts": {"drafts": 3, "adapt_drafts": False},
    "a tree of drafts": {"tree": "0,0,1", "adapt_drafts": False},
    "replay": {"drafts": 2, "rollback": "replay", "adapt_drafts": False},
    "graphs": {"graphs": True, "drafts": 2, "adapt_drafts": False},
    "states in float16": {"state_dtype": "float16"},
    "states in int16": {"state_dtype": "int16", "prefill_piece": 64},
}


@pytest.mark.parametrize("path", PATHS)
def test_every_path_gives_the_answers(path: str) -> None:
    pairs = [pair for task in LENGTHS for pair in known(task, 3)]
    with opened(**PATHS[path]) as llm:
        assert wrong(llm, pairs) == 0
        if "drafts" in PATHS[path]:
            assert llm.stats()["drafts"]["accepted"] > 0


def test_preemption_gives_the_answers() -> None:
    pairs = known("copy", 4)
    with opened(prefill_piece=64) as llm:
        llm.engine.scheduler.pages = Pool(7, "pages")  # two have 3 each; both want a fourth
        assert wrong(llm, pairs, tokens=60) == 0
        assert llm.stats()["preemptions"] >= 1


def test_the_mixed_copy_answers() -> None:
    for task in ("recall", "copy"):
        record = FIGURES["right_mixed"][f"{task}_{LENGTHS[task]}"]
        assert record.count("1") >= 0.9 * len(record)
    pairs = known("copy", 4)
    with opened(EMBEDDED / "mixed") as llm:
        assert wrong(llm, pairs) <= 1
