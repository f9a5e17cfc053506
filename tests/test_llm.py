"""LLM over the real model with random weights: forms of input, cuts of the work, life and death."""

import json
import threading
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from nemotriton import LLM, ModelConfig, RequestOutput, SamplingParams
from nemotriton.engine.loading import EMBEDDED
from nemotriton.engine.pool import Pool
from nemotriton.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    NemotritonError,
    RequestError,
    UnsupportedError,
)
from nemotriton.model.synth import write_checkpoint
from nemotriton.text.tokens import load_tokenizer
from tests.conftest import fill

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
WARM = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=10, seed=3, ignore_eos=True)


def tiny(piece: int = 512, requests: int = 8, context: int = 384) -> LLM:
    return LLM.synthetic(
        "tiny",
        dtype="float32",
        device="cpu",
        max_context=context,
        max_requests=requests,
        prefill_piece=piece,
        seed=7,
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny() as made:
        yield made


def prompt_of(length: int) -> list[int]:
    g = torch.Generator().manual_seed(length)
    return torch.randint(18, 500, (length,), generator=g).tolist()


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def poison(llm: LLM) -> None:
    """Everything no request owns, which is everything between calls."""
    caches = llm.runner.caches
    assert caches.kv is not None
    assert caches.mamba is not None
    mamba = caches.mamba
    for cache in (caches.kv.k, caches.kv.v, mamba.ssm, mamba.scales, mamba.conv):
        if cache is not None:
            fill(cache)


# --------------------------------------------------------------------------- forms of input
def test_text_ids_and_lists_of_either(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    one = llm.generate("hello", GREEDY)
    assert [o.prompt for o in one] == ["hello"]
    assert one[0].prompt_token_ids == ids
    assert one[0].finished
    assert ids_of(llm.generate(ids, GREEDY)) == ids_of(one)
    mixed = llm.generate(["hello", ids], [GREEDY, WARM])
    assert ids_of(mixed) == ids_of(one) + ids_of(llm.generate(ids, WARM))
    assert [o.prompt for o in mixed] == ["hello", None]
    assert llm.generate([], GREEDY) == []


def test_streaming_gives_what_generate_gives(llm: LLM) -> None:
    want = llm.generate("hello", WARM)[0].outputs[0]
    deltas = list(llm.stream("hello", WARM))
    assert "".join(d.text for d in deltas) == want.text
    assert [t for d in deltas for t in d.token_ids] == want.token_ids
    assert deltas[-1].finish_reason == "length"


def test_streams_side_by_side(llm: LLM) -> None:
    texts = ["", ""]
    for pair in zip_longest(*(llm.stream(p, WARM) for p in ("one", "another prompt"))):
        for i, delta in enumerate(pair):
            texts[i] += delta.text if delta is not None else ""
    assert texts == [llm.generate(p, WARM)[0].outputs[0].text for p in ("one", "another prompt")]


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=300, ignore_eos=True))
    next(stream)
    assert llm.engine.busy
    stream.close()
    assert not llm.engine.busy


def test_cancel_from_another_thread(llm: LLM) -> None:
    seen = []
    for delta in llm.stream("hello", SamplingParams(max_tokens=300, ignore_eos=True)):
        seen.append(delta)
        if len(seen) == 3:
            thread = threading.Thread(target=llm.cancel, args=(delta.request_id,))
            thread.start()
            thread.join()
    assert seen[-1].finish_reason == "abort"
    assert sum(len(d.token_ids) for d in seen) == 3


def test_on_finish_sees_every_output_once(llm: LLM) -> None:
    seen: list[RequestOutput] = []
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(["aaa", "b"], [GREEDY, short], on_finish=seen.append)
    assert seen == outputs[::-1]


def test_an_error_in_on_finish_leaves_nothing_running(llm: LLM) -> None:
    def fail(output: RequestOutput) -> None:
        raise ValueError("disk full")

    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with pytest.raises(ValueError, match="disk full"):
        llm.generate(["a", "b"], [GREEDY, short], on_finish=fail)
    assert not llm.engine.busy


def test_all_prompts_are_checked_before_any_runs(llm: LLM) -> None:
    steps = llm.stats()["steps"]
    with pytest.raises(RequestError, match=r"prompt\[0\] is 2048, but token ids are 0 \.\. 2047"):
        llm.generate([[5], [2048]], GREEDY)
    assert llm.stats()["steps"] == steps
    assert not llm.engine.busy


ODD = [
    (3, None, r"prompts of type int: give a text, token ids or a list"),
    (b"x", None, r"prompts of type bytes: give a text"),
    ([[]], None, r"the prompt is empty: give it at least one token id"),
    (["a", "b"], [GREEDY], r"1 SamplingParams for 2 prompts: give one for all or one each"),
    (["a"], [None], r"params has None: give SamplingParams"),
    ("a" * 400, GREEDY, r"the prompt is 401 tokens; max_context is 384"),
]


@pytest.mark.parametrize("prompts, params, message", ODD, ids=[m[:30] for _, _, m in ODD])
def test_odd_calls(llm: LLM, prompts: object, params: object, message: str) -> None:
    with pytest.raises(RequestError, match="^" + message):
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert not llm.engine.busy


def test_a_bad_stream_fails_at_the_call(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.stream([])


def test_chat_without_a_template_says_so(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(ModelConfig.preset("tiny").to_json()))
    with (
        LLM.synthetic(tmp_path, device="cpu", max_context=64, max_requests=1) as own,
        pytest.raises(RequestError, match="no chat template"),
    ):
        own.chat([{"role": "user", "content": "hi"}])


def test_a_preset_talks_as_the_embedded_model_does(llm: LLM) -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    prompt = llm.chat_prompt(turns)
    assert prompt.thinking
    text = llm.tokenizer.decode(prompt.ids, skip_special=False)
    assert text == load_tokenizer(EMBEDDED, llm.config).decode(
        load_tokenizer(EMBEDDED, llm.config).apply_chat(turns), skip_special=False
    )
    assert {10, 11, 12} <= set(prompt.ids)  # <|im_start|>, <|im_end|> and <think> are tokens
    assert not llm.chat_prompt(turns, think=False).thinking
    answer = llm.chat(turns, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(answer[0].outputs[0].token_ids) == 3


# ------------------------------------------------------------------------- cuts of the work
Traces = tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]


def traces(made: LLM) -> Traces:
    """Greedy tokens behind a prompt of 130, its logits, and the states they leave in slot 0."""
    tokens = ids_of(made.generate(prompt_of(130), GREEDY))[0]
    logits = made.logits(prompt_of(130))
    mamba = made.runner.caches.mamba
    assert mamba is not None
    return tokens, logits, mamba.ssm[:, 0].clone(), mamba.conv[:, 0].clone()


@pytest.fixture(scope="module")
def whole() -> Traces:
    with tiny() as uncut:
        return traces(uncut)


@pytest.mark.parametrize("piece", [1, 3, 16, 31, 32, 33, 127, 128, 129])
def test_pieces(piece: int, whole: Traces) -> None:
    """The tiny model's SSD chunk is 32."""
    with tiny(piece) as cut:
        poison(cut)
        got = traces(cut)
    assert got[0] == whole[0]
    for a, b in zip(got[1:], whole[1:]):
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_seven_mixed_requests_in_reused_poisoned_memory(llm: LLM, params: SamplingParams) -> None:
    lengths = [1, 40, 7, 130, 3, 64, 19]
    alone = []
    for n in lengths:
        poison(llm)
        alone += ids_of(llm.generate([prompt_of(n)], params))
    with tiny(piece=50, requests=3) as crowded:
        poison(crowded)
        assert ids_of(crowded.generate([prompt_of(n) for n in lengths], params)) == alone


def test_preemption(llm: LLM) -> None:
    prompts = [prompt_of(n) for n in (60, 62, 63)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = [ids_of(llm.generate([p], params))[0] for p in prompts]
    with tiny() as small:
        poison(small)
        small.engine.scheduler.pages = Pool(5, "pages")
        assert ids_of(small.generate(prompts, params)) == want
        assert small.stats()["preemptions"] == 1


def test_logits_of_several_sequences(llm: LLM) -> None:
    both = llm.logits([prompt_of(5), prompt_of(9)])
    assert [tuple(x.shape) for x in both] == [(5, 2048), (9, 2048)]
    for got, n in zip(both, (5, 9)):
        want = llm.logits(prompt_of(n))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_stats_count_what_was_done() -> None:
    with tiny() as fresh:
        assert fresh.stats()["tokens_per_s"] is None
        fresh.generate([prompt_of(20), prompt_of(30)], GREEDY)
        stats = fresh.stats()
    assert (stats["requests"], stats["prompt_tokens"], stats["output_tokens"]) == (2, 50, 20)
    assert stats["tokens_per_s"] > 0
    assert stats["first_token_s"] > 0
    assert stats["memory"]["weights"] == sum(t.nbytes for t in fresh_weights().values())


def fresh_weights() -> dict[str, torch.Tensor]:
    with tiny() as fresh:
        return fresh.runner.model.named_tensors()  # type: ignore[attr-defined,no-any-return]


# -------------------------------------------------------------------------- life and death
def test_a_stored_checkpoint_speaks_as_the_weights_it_was_made_of(tmp_path: Path, llm: LLM) -> None:
    path = tmp_path / "model"
    write_checkpoint(ModelConfig.preset("tiny"), path, seed=7, dtype=torch.float32)
    seen: list[tuple[int, int, str]] = []
    with LLM(
        path,
        dtype="float32",
        device="cpu",
        max_context=64,
        max_requests=2,
        progress=lambda *now: seen.append(now),
    ) as stored:
        assert ids_of(stored.generate("hello", GREEDY)) == ids_of(llm.generate("hello", GREEDY))
        assert stored.directory == path
    assert seen[-1][0] == seen[-1][1] > 0


def test_a_closed_llm_says_so() -> None:
    closed = tiny(context=64)
    closed.close()
    closed.close()
    with pytest.raises(RequestError, match="this LLM is closed: make a new one"):
        closed.generate("a", GREEDY)


REFUSED = [
    ({"max_context": 0}, ConfigError, r"max_context=0: use a number >= 1, or None"),
    ({"max_requests": True}, ConfigError, r"max_requests=True: use a number >= 1"),
    ({"prefill_piece": 1.5}, ConfigError, r"prefill_piece=1.5: use a number >= 1"),
    ({"memory": 0}, ConfigError, r"memory=0: use a share of the free memory in \(0, 1\]"),
    ({"memory": 1.2}, ConfigError, r"memory=1.2: use a share of the free memory"),
    ({"dtype": "int8"}, ConfigError, r"dtype='int8': use one of bfloat16, float16, float32"),
    ({"state_dtype": torch.int32}, ConfigError, r"state_dtype=torch.int32: use one of float32"),
    ({"device": "tpu"}, UnsupportedError, r"device='tpu' is unknown: use cuda, cuda:1 or cpu"),
    ({"device": "meta"}, UnsupportedError, r"device='meta': use cuda, cuda:1 or cpu"),
    ({"device": "cuda:99"}, UnsupportedError, r"device='cuda:99', but there are \d+ CUDA devices"),
    ({"drafts": -1}, ConfigError, r"drafts=-1: use a number from 0 to 32"),
    ({"drafts": True}, ConfigError, r"drafts=True: use a number from 0 to 32"),
    ({"drafts": 2, "tree": "0,0,1"}, ConfigError, r"drafts=2, but tree='0,0,1' has 3"),
    ({"tree": "0,1,0"}, ConfigError, r"tree='0,1,0': draft 3 is on level 1 behind one of level 2"),
    ({"tree": "a"}, ConfigError, r"tree='a': give numbers with commas, as in 0,0,1"),
    ({"impl": "fast"}, UnsupportedError, r"op '\*': implementation 'fast' is unknown"),
    ({"impl": {"sdd": "ref"}}, UnsupportedError, r"no op is called 'sdd'"),
    ({"memory": 1e-6}, CapacityError, r"needs .* MiB \(weights .*; CPU \(memory=1e-06\) has"),
]


@pytest.mark.parametrize("values, error, message", REFUSED, ids=[str(v) for v, _, _ in REFUSED])
def test_what_an_llm_cannot_be(
    values: dict[str, object], error: type[NemotritonError], message: str
) -> None:
    with pytest.raises(error, match="^" + message) as caught:
        LLM.synthetic("tiny", **({"device": "cpu"} | values))  # type: ignore[arg-type]
    assert type(caught.value) is error


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no weights: LLM.synthetic\('nano-30b'\) draws"):
        LLM("preset:nano-30b")
    with pytest.raises(ConfigError, match=r"'tinny' is unknown.* Did you mean tiny"):
        LLM("preset:tinny")
    with pytest.raises(ConfigError, match="'gpt' is unknown"):
        LLM.synthetic("gpt")
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        LLM(tmp_path)


def test_cut_down_presets_run_every_kind() -> None:
    with LLM.synthetic(
        "super-120b",
        layers=9,
        width_scale=1 / 64,
        device="cpu",
        max_context=64,
        max_requests=2,
    ) as small:
        assert set(small.config.pattern) == set("ME*")
        output = small.generate([1, 2, 3], GREEDY)[0].outputs[0]
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 10


# ------------------------------------------------------------------- one model in two LLMs
def test_weights_of_another_llm_are_used_as_they_are() -> None:
    sizes = {"max_context": 64, "max_requests": 2, "device": "cpu", "dtype": "float32"}
    with LLM.synthetic("tiny", drafts=2, seed=7, **sizes) as first:
        before = ids_of(first.generate([prompt_of(9), prompt_of(20)], GREEDY))
        weights, model = first.weights, first.runner.model
        assert first.plan.weights > 0
    with LLM(weights, **sizes) as second:
        assert second.runner.model is model
        assert second.runner.drafter is None
        assert second.plan.weights == 0  # of the memory that is free they take nothing more
        assert second.config.name == "tiny"
        assert ids_of(second.generate([prompt_of(9), prompt_of(20)], GREEDY)) == before
        without = second.weights
    with LLM(without, drafts=1, **sizes) as third:  # its MTP block came along
        assert ids_of(third.generate([prompt_of(9), prompt_of(20)], GREEDY)) == before
    for wrong in ({"dtype": "bfloat16"}, {"dtype": "float16"}):
        with pytest.raises(ConfigError, match="the weights of another LLM stay as they are"):
            LLM(weights, **sizes | wrong)
    with LLM.synthetic("tiny", **sizes) as bare:
        weights = bare.weights
    with pytest.raises(ConfigError, match="drafts only where it had some"):
        LLM(weights, drafts=1, **sizes)
