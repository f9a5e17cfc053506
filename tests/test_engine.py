"""The engine over a model that notices any misuse of pages, slots, pieces or order."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemotriton.engine.batch import Span
from nemotriton.engine.caches import MambaStates, PagedKV
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.engine import Engine
from nemotriton.engine.outputs import Group
from nemotriton.engine.request import State
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import CapacityError
from nemotriton.kernels import STATE_FORMATS
from nemotriton.text.tokens import ByteTokenizer
from tests.fake_model import (
    MAMBA,
    VOCAB,
    finish,
    greedy,
    history,
    ids_of,
    logits_of,
    make_engine,
    submit,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)
WARM = SamplingParams(temperature=1.3, max_tokens=12, seed=5)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(VOCAB), k=length)


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    engine = make_engine()
    group = submit(engine, prompt, params)
    finish(engine)
    return ids_of(group)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 16, 64])
@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_pieces_change_nothing(length: int, piece: int) -> None:
    engine = make_engine(piece=piece)
    group = submit(engine, prompt_of(length), GREEDY)
    finish(engine)
    assert ids_of(group) == greedy(prompt_of(length), 12)
    assert group.output().outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "pages, slots", [(None, 8), (64, None), (None, None)], ids=["mamba", "attention", "neither"]
)
def test_models_without_mamba_or_attention(pages: int | None, slots: int | None) -> None:
    engine = make_engine(pages=pages, slots=slots, piece=3)
    groups = [submit(engine, prompt_of(n), GREEDY) for n in (1, 9, 20)]
    finish(engine)
    assert all(len(ids_of(g)) == 12 for g in groups)
    for group, n in zip(groups, (1, 9, 20)):
        pair = [h * (slots is not None) for h in history(prompt_of(n))[-1][:1]]
        pair += [h * (pages is not None) for h in history(prompt_of(n))[-1][1:]]
        first = logits_of(torch.tensor([pair], dtype=torch.float32)).argmax()
        assert ids_of(group)[0] == first


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_seven_mixed_requests_joining_and_leaving(params: SamplingParams) -> None:
    engine = make_engine(requests=4, slots=4, piece=11)
    lengths = [1, 30, 5, 17, 2, 44, 9]
    groups = []
    for n in lengths:
        groups.append(submit(engine, prompt_of(n), params))
        engine.step()
        engine.step()
    finish(engine)
    for n, group in zip(lengths, groups):
        assert ids_of(group) == alone(prompt_of(n), params), f"prompt of {n}"
    assert max(engine.runner.model.rows) > 11  # type: ignore[attr-defined]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_preemption_changes_nothing(params: SamplingParams) -> None:
    engine = make_engine(pages=16, piece=6, max_context=64)
    params = replace(params, max_tokens=40)
    lengths = [10, 8, 12, 6, 9]
    groups = [submit(engine, prompt_of(n), params) for n in lengths]
    finish(engine)
    assert engine.scheduler.preemptions >= 2
    for n, group in zip(lengths, groups):
        assert ids_of(group) == alone(prompt_of(n), params), f"prompt of {n}"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_what_each_gives_alone(data: st.DataObject) -> None:
    pages = data.draw(st.integers(8, 30), "pages")
    tree = data.draw(st.sampled_from(["", "", "0", "0,1,2", "0,1,2,3,4", "0,0,1,1,3"]), "drafts")
    shape = DraftShape.parse(tree) if tree else None
    engine = make_engine(
        shape=shape,
        pages=pages,
        slots=data.draw(st.integers(1, 4), "slots"),
        requests=data.draw(st.integers(1, 6), "requests"),
        piece=data.draw(st.integers(1, 20), "piece"),
        max_context=4 * pages,
    )
    groups: list[tuple[Group, list[int], SamplingParams]] = []
    for number in range(data.draw(st.integers(1, 7), "count")):
        length = data.draw(st.integers(1, 20), "length")
        temperature = data.draw(st.sampled_from([0, 0.8]))
        count = data.draw(st.integers(1, 11), "tokens")
        params = SamplingParams(temperature=temperature, max_tokens=count, seed=number)
        groups.append((submit(engine, prompt_of(length, number), params), [length], params))
        for _ in range(data.draw(st.integers(0, 4), "steps")):
            engine.scheduler.drafts = data.draw(st.integers(0, len(shape or ())), "depth")
            engine.step()
        if data.draw(st.booleans(), "cancel"):
            engine.cancel(data.draw(st.sampled_from(groups))[0].id)
    finish(engine)
    meter = engine.draft_meter
    assert meter.proposed == meter.verified
    if shape is not None and shape.is_chain:
        assert meter.accepted == meter.verified, "the draft block's caches miss something"
    for number, (group, (length,), params) in enumerate(groups):
        got, whole = ids_of(group), alone(prompt_of(length, number), params)
        if group.output().outputs[0].finish_reason == "abort":
            assert got == whole[: len(got)]
        else:
            assert got == whole


def test_seeds_do_not_depend_on_neighbours_or_order() -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=9, seed=s) for s in (1, 2, 3)]
    prompt = prompt_of(6)
    solo = [alone(prompt, p) for p in params]
    assert len({tuple(s) for s in solo}) == 3, "three seeds, three texts"
    for order in ([0, 1, 2], [2, 0, 1]):
        engine = make_engine(piece=4)
        groups = {i: submit(engine, prompt, params[i]) for i in order}
        finish(engine)
        assert [ids_of(groups[i]) for i in range(3)] == solo


def test_requests_without_a_seed_draw_it_from_the_engines() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=9)

    def texts(seed: int) -> list[list[int]]:
        engine = make_engine(seed=seed)
        groups = [submit(engine, prompt_of(6), params) for _ in range(3)]
        finish(engine)
        return [ids_of(g) for g in groups]

    assert texts(0) == texts(0)
    assert len({tuple(t) for t in texts(0) + texts(1)}) == 6


def test_several_completions_of_a_prompt() -> None:
    params = SamplingParams(n=3, temperature=1.0, max_tokens=7, seed=11)
    engine = make_engine()
    group = submit(engine, prompt_of(5), params)
    finish(engine)
    output = group.output()
    texts = [tuple(o.token_ids) for o in output.outputs]
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    scored = SamplingParams(n=2, max_tokens=2, prompt_logprobs=0)
    group = submit(engine, prompt_of(5), scored)
    finish(engine)
    rows = [c.request.prompt_logprobs for c in group.completions]
    assert [len(r) for r in rows] == [5, 1], "the prompt is scored once"
    one = SamplingParams(temperature=1.0, max_tokens=7, seed=11)
    assert list(texts[0]) == alone(prompt_of(5), one), "the first has the seed itself"


def test_cancelling_frees_at_once_and_harms_nobody() -> None:
    engine = make_engine(pages=16, slots=2, requests=2, max_context=64)
    kept = submit(engine, prompt_of(8), GREEDY)
    gone = submit(engine, prompt_of(9), GREEDY)
    queued = submit(engine, prompt_of(10), GREEDY)
    for _ in range(3):
        engine.step()
    for group in (gone, queued):
        engine.cancel(group.id)
    engine.cancel("no such request")
    engine.step()
    assert engine.scheduler.slots is not None
    assert engine.scheduler.slots.taken == 1
    finish(engine)
    assert gone.output().outputs[0].finish_reason == "abort"
    assert ids_of(gone) == greedy(prompt_of(9), 12)[: len(ids_of(gone))]
    assert 1 <= len(ids_of(gone)) < 12
    assert queued.output().outputs[0].token_ids == []
    assert ids_of(kept) == greedy(prompt_of(8), 12)


def test_a_cancelled_request_may_be_preempted_at_the_time() -> None:
    engine = make_engine(pages=8, slots=2, requests=2, max_context=32)
    old, new = (submit(engine, prompt_of(n), GREEDY) for n in (12, 8))
    while not engine.scheduler.preemptions:
        engine.step()
    request = new.completions[0].request
    assert request.state is State.WAITING
    assert request.saved is not None
    engine.cancel(new.id)
    finish(engine)
    assert request.saved is None
    assert ids_of(old) == greedy(prompt_of(12), 12)


def test_a_failing_step_ends_its_requests_and_the_engine_lives_on() -> None:
    engine = make_engine(slots=1, requests=1)
    first, second = (submit(engine, prompt_of(n), GREEDY) for n in (4, 5))
    engine.step()
    engine.runner.model.fail = RuntimeError("device lost")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    assert first.output().outputs[0].finish_reason == "abort"
    assert not second.finished
    finish(engine)
    assert ids_of(second) == greedy(prompt_of(5), 12)


def test_running_out_of_device_memory_says_what_to_lower() -> None:
    engine = make_engine()
    submit(engine, prompt_of(4), GREEDY)
    engine.runner.model.fail = torch.OutOfMemoryError("CUDA")  # type: ignore[attr-defined]
    with pytest.raises(CapacityError, match=r"step of 4 tokens: lower prefill_piece"):
        engine.step()
    finish(engine)


def test_nan_of_one_request_ends_that_request_alone() -> None:
    engine = make_engine(piece=8)
    engine.runner.model.broken = {200}  # type: ignore[attr-defined]
    good = submit(engine, [t % 200 for t in prompt_of(5)], GREEDY)
    bad = submit(engine, [3, 200], GREEDY)
    finish(engine)
    output = bad.output().outputs[0]
    assert (output.finish_reason, output.stop_reason, output.token_ids) == (
        "error",
        "the model's logits are not finite",
        [],
    )
    expected = greedy([t % 200 for t in prompt_of(5)], 12)
    cut = expected.index(200) + 1 if 200 in expected else 12
    assert ids_of(good) == expected[:cut]


@pytest.mark.parametrize("piece", [1, 4, 64])
def test_scoring_gives_every_rows_logits(piece: int) -> None:
    engine = make_engine(piece=piece)
    prompt = prompt_of(23)
    scored = engine.submit(engine.prepare(prompt, SamplingParams(), keep_logits=True))
    other = submit(engine, prompt_of(7), GREEDY)
    finish(engine)
    logits = torch.cat(scored.completions[0].request.logits)
    pairs = torch.tensor(history(prompt), dtype=torch.float32)
    assert torch.equal(logits, logits_of(pairs))
    assert ids_of(other) == greedy(prompt_of(7), 12)


def test_a_prompt_may_fill_the_context_when_scored_but_not_when_completed() -> None:
    engine = make_engine(max_context=16)
    full = submit(engine, prompt_of(15), GREEDY)
    scored = engine.submit(engine.prepare(prompt_of(16), SamplingParams(), keep_logits=True))
    finish(engine)
    output = full.output().outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")
    assert sum(len(x) for x in scored.completions[0].request.logits) == 16


def test_max_tokens_shrinks_at_the_end_of_the_context() -> None:
    engine = make_engine(max_context=20)
    group = submit(engine, prompt_of(14), SamplingParams(temperature=0, max_tokens=None))
    finish(engine)
    assert ids_of(group) == greedy(prompt_of(14), 6)


def test_an_empty_text_is_a_bos_where_there_is_one() -> None:
    engine = make_engine(tokenizer=ByteTokenizer(VOCAB, 1, ()))
    assert engine.prepare("", GREEDY).ids == [1]


def test_the_first_of_all_ends_counts(engine_with_end: tuple[Engine, int]) -> None:
    engine, end = engine_with_end
    prompt = prompt_of(9)
    group = submit(engine, prompt, GREEDY)
    ignoring = submit(engine, prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    finish(engine)
    whole = greedy(prompt, 12)
    assert ids_of(group) == whole[: whole.index(end) + 1]
    output = group.output().outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert ids_of(ignoring) == whole


@pytest.fixture
def engine_with_end() -> tuple[Engine, int]:
    end = greedy(prompt_of(9), 5)[-1]
    return make_engine(eos_ids=(end,)), end


def test_a_stop_token_is_named_and_min_tokens_forbids_it() -> None:
    prompt = prompt_of(9)
    whole = greedy(prompt, 12)
    engine = make_engine()
    stop = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[whole[4]])
    late = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[whole[4]], min_tokens=8)
    first, second = submit(engine, prompt, stop), submit(engine, prompt, late)
    finish(engine)
    assert ids_of(first) == whole[: whole.index(whole[4]) + 1]
    assert first.output().outputs[0].stop_reason == whole[4]
    assert ids_of(second)[:4] == whole[:4]
    assert whole[4] not in ids_of(second)[:8]


def test_caches_move_requests_bit_for_bit() -> None:
    kv = PagedKV(3, 6, 2, 4, torch.bfloat16, "cpu", page_size=8)
    kv.k.normal_()
    kv.v.normal_()
    whole = kv.k.clone(), kv.v.clone()
    saved = kv.save([4, 1])
    kv.k[:, [4, 1]] = float("nan")
    kv.restore([0, 5], saved)
    assert torch.equal(kv.k[:, [0, 5]], whole[0][:, [4, 1]])
    assert torch.equal(kv.v[:, [0, 5]], whole[1][:, [4, 1]])
    assert torch.equal(kv.k[:, [2, 3]], whole[0][:, [2, 3]])

    states = MambaStates(MAMBA, 3, 4, torch.bfloat16, "cpu", STATE_FORMATS["float16"])
    assert states.conv.dtype == torch.bfloat16
    assert states.ssm.dtype == torch.float16
    states.ssm.normal_()
    states.conv.normal_()
    ssm, conv = states.ssm.clone(), states.conv.clone()
    moved = states.save(2)
    states.ssm[:, 2] = float("nan")
    states.restore(0, moved)
    assert torch.equal(states.ssm[:, 0], ssm[:, 2])
    assert torch.equal(states.conv[:, 0], conv[:, 2])
    assert torch.equal(states.ssm[:, [1, 3]], ssm[:, [1, 3]])


def test_commit_points_at_one_lane_and_reads_no_other() -> None:
    states = MambaStates(MAMBA, 2, 5, torch.float32, "cpu", lanes=4)
    states.ssm.fill_(float("nan"))
    states.conv.fill_(-1)
    for lanes in map(torch.stack, zip(*(states.layer_lanes(i) for i in range(2)))):
        assert lanes.shape[:3] == (2, 5, 4)
    slots = torch.tensor([3, 1, 4], dtype=torch.int32)
    before = states.ssm.data_ptr()
    for accepted in ([0, 2, 3], [3, 3, 0], [1, 1, 1]):
        for layer in range(2):
            conv, ssm = states.layer_lanes(layer)
            conv.fill_(float("nan"))
            ssm.fill_(float("nan"))
            for slot, lane in zip((3, 1, 4), accepted):
                conv[slot, lane] = ssm[slot, lane] = 100 * layer + 10 * slot + lane
        states.commit(slots, torch.tensor(accepted, dtype=torch.int32))
        cells = states.cells(span_of([3, -1, 1, 4]))
        assert cells.dtype == torch.int32
        assert cells[1] == -1
        for layer in range(2):
            want = [100.0 * layer + 10 * s + lane for s, lane in zip((3, 1, 4), accepted)]
            assert states.ssm[layer, cells[[0, 2, 3]].long()].flatten().tolist() == want
            assert states.conv[layer, [3, 1, 4]].flatten(1)[:, 0].tolist() == want
        assert (states.conv[:, [0, 2]] == -1).all()
        saved = states.save(4)
        states.restore(2, saved)
        (cell,) = states.cells(span_of([2])).tolist()
        assert torch.equal(states.ssm[:, cell], saved.ssm)
        states.conv[:, 2] = -1
    assert states.ssm.data_ptr() == before


def span_of(slots: list[int]) -> Span:
    index = torch.tensor(slots, dtype=torch.int32)
    return Span(0, len(slots), index, index, index, index[:, None], 1, 1)


def test_moving_cells_reads_all_before_it_writes_any() -> None:
    kv = PagedKV(2, 3, 1, 2, torch.float32, "cpu", page_size=4)
    kv.k.copy_(torch.arange(12.0).view(1, 3, 4, 1, 1).expand_as(kv.k))
    kv.v.copy_(-kv.k)
    kv.move(torch.tensor([7, 5, 2, 11]), torch.tensor([5, 2, 7, 11]))
    want = [0.0, 1, 5, 3, 4, 7, 6, 2, 8, 9, 10, 11]
    assert kv.k[1, ..., 0, 1].flatten().tolist() == want
    assert kv.v[0, ..., 0, 0].flatten().neg().tolist() == want
