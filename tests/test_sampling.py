"""SamplingParams and the sampler: what is refused, penalties, forbidden ends, logprobs, seeds."""

import math
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemotriton.engine.request import Request
from nemotriton.engine.sampler import Sampler, describe
from nemotriton.engine.sampling import DEFAULT_MAX_TOKENS, SamplingParams, mix_seed
from nemotriton.errors import RequestError

V = 12

BAD = [
    ({"n": 0}, r"n=0 is not possible: use a number >= 1"),
    ({"n": 1.5}, r"n=1.5 is not possible: use a number >= 1"),
    ({"n": True}, r"n=True is not possible: use a number >= 1"),
    (
        {"n": 2, "temperature": 0},
        r"n=2 is not possible: greedy completions are all the same: use n",
    ),
    ({"temperature": -0.1}, r"temperature=-0.1 is not possible: use 0 for greedy or a number > 0"),
    ({"temperature": math.nan}, r"temperature=nan is not possible: use 0 for greedy"),
    ({"temperature": math.inf}, r"temperature=inf is not possible: use 0 for greedy"),
    ({"temperature": "hot"}, r"temperature='hot' is not possible: use 0 for greedy"),
    ({"temperature": None}, r"temperature=None is not possible: use 0 for greedy"),
    ({"top_p": 0}, r"top_p=0 is not possible: use a number in \(0, 1\], or temperature=0"),
    ({"top_p": 1.01}, r"top_p=1.01 is not possible: use a number in \(0, 1\]"),
    ({"top_k": -2}, r"top_k=-2 is not possible: use a number >= 1, or 0 for all tokens"),
    ({"top_k": 2.0}, r"top_k=2.0 is not possible: use a number >= 1, or 0 for all tokens"),
    ({"min_p": -1}, r"min_p=-1 is not possible: use a number in \[0, 1\]"),
    ({"presence_penalty": 2.1}, r"presence_penalty=2.1 is not possible: use a number in \[-2, 2\]"),
    ({"frequency_penalty": -3}, r"frequency_penalty=-3 is not possible: use a number in \[-2, 2\]"),
    (
        {"repetition_penalty": 0},
        r"repetition_penalty=0 is not possible: use a number > 0; 1 is off",
    ),
    ({"seed": 2**63}, r"seed=9223372036854775808 is not possible: use a 64-bit integer or None"),
    ({"seed": "1"}, r"seed='1' is not possible: use a 64-bit integer or None"),
    ({"max_tokens": 0}, r"max_tokens=0 is not possible: use a number >= 1, or None to go on"),
    ({"max_tokens": -5}, r"max_tokens=-5 is not possible: use a number >= 1"),
    ({"min_tokens": -1}, r"min_tokens=-1 is not possible: use a number >= 0"),
    ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9 is not possible: lower it to max_tokens=8"),
    ({"stop": ""}, r"stop='' is not possible: use a string or a list of strings, none of them em"),
    ({"stop": ["a", ""]}, r"stop=\['a', ''\] is not possible: use a string or a list"),
    ({"stop": 3}, r"stop=3 is not possible: use a string or a list of strings"),
    ({"stop": ["a", 3]}, r"stop=\['a', 3\] is not possible: use a string or a list of strings"),
    ({"stop_token_ids": [-1]}, r"stop_token_ids=\[-1\] is not possible: use a list of token ids"),
    ({"stop_token_ids": 5}, r"stop_token_ids=5 is not possible: use a list of token ids >= 0"),
    ({"stop_token_ids": "5"}, r"stop_token_ids='5' is not possible: use a list of token ids"),
    ({"ignore_eos": 1}, r"ignore_eos=1 is not possible: use True or False"),
    ({"skip_special_tokens": None}, r"skip_special_tokens=None is not possible: use True or False"),
    ({"logprobs": -1}, r"logprobs=-1 is not possible: use a number >= 0, or None for none"),
    ({"prompt_logprobs": 0.5}, r"prompt_logprobs=0.5 is not possible: use a number >= 0"),
]


@pytest.mark.parametrize("values, message", BAD, ids=[str(values) for values, _ in BAD])
def test_what_cannot_be_is_refused_by_value_and_remedy(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match="^" + message) as caught:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert type(caught.value) is RequestError
    assert str(caught.value).endswith(".")


def test_borders_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, presence_penalty=-2, seed=-(2**63))
    SamplingParams(top_k=0, frequency_penalty=2, repetition_penalty=0.01, max_tokens=None)
    SamplingParams(min_tokens=4, max_tokens=4, stop=("a", "b"), stop_token_ids=(0,), logprobs=0)
    assert SamplingParams().max_tokens == DEFAULT_MAX_TOKENS == 4096
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(temperature=1e-6).greedy


def test_params_are_frozen_and_need_no_torch() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]
    code = "import sys; from nemotriton import SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6), st.integers(1, 1000))
def test_mixed_seeds_are_64_bit_and_differ(seed: int, index: int, step: int) -> None:
    a, b = mix_seed(seed, index), mix_seed(seed, index + step)
    assert 0 <= a < 2**63
    assert a == mix_seed(seed, index)
    assert a != b
    assert mix_seed(1, 0) != mix_seed(0, 1)


# ---------------------------------------------------------------------------------- the sampler
def request(
    params: SamplingParams,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    seed: int = 0,
    name: str = "r",
    stop_ids: Sequence[int] = (),
) -> Request:
    made = Request(name, 0, list(prompt), params, seed, 99, frozenset(stop_ids))
    made.output = list(output)
    return made


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def pick(rows: torch.Tensor, *requests: Request) -> list[int]:
    found: list[int] = Sampler(V, "cpu").pick(rows, requests).tolist()
    return found


def penalised_by_hand(row: list[float], made: Request) -> list[float]:
    """The three penalties, one token at a time, as vLLM's documentation words them."""
    params, found = made.params, []
    for token, value in enumerate(row):
        count = made.output.count(token)
        if token in made.prompt or count:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (count > 0)
        found.append(value)
    return found


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.7),
        SamplingParams(temperature=0, repetition_penalty=0.6),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=-0.9),
        SamplingParams(
            temperature=0, repetition_penalty=1.3, presence_penalty=-1, frequency_penalty=0.7
        ),
    ],
    ids=["repetition", "encouragement", "presence", "frequency", "all"],
)
def test_penalties_count_what_they_should(params: SamplingParams) -> None:
    rows = logits(40)
    sampler = Sampler(V, "cpu")
    made = request(params, prompt=[0, 3, 3, 11])
    for row in rows:  # the counts grow with the request, as they do when it runs
        want = penalised_by_hand(row.tolist(), made)
        adjusted = sampler._adjust(row[None], [made])[0]
        torch.testing.assert_close(adjusted, torch.tensor(want), rtol=1e-6, atol=1e-6)
        token = sampler.pick(row[None], [made]).item()
        assert token == want.index(max(want))
        made.output.append(int(token))


def test_penalties_touch_neither_neighbours_nor_the_logits_given() -> None:
    rows = logits(2)
    before = rows.clone()
    strong = request(SamplingParams(temperature=0, repetition_penalty=50.0), range(V), name="a")
    plain = request(SamplingParams(temperature=0), range(V), name="b")
    assert pick(rows, strong, plain)[1] == before[1].argmax()
    assert torch.equal(rows, before)


def test_a_sampler_forgets_requests_that_ended() -> None:
    sampler = Sampler(V, "cpu")
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    first = request(params, output=[5, 5], name="same")
    sampler.pick(logits(1), [first])
    sampler.forget(first)
    second = request(params, name="same")
    assert torch.equal(sampler._adjust(logits(1), [second]), logits(1))


def test_no_end_before_min_tokens() -> None:
    row = torch.zeros(1, V)
    row[0, 4], row[0, 7], row[0, 2] = 9, 8, 7
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=9)
    assert pick(row, request(params, stop_ids=[4, 7])) == [2]
    assert pick(row, request(params, output=[1], stop_ids=[4, 7])) == [2]
    assert pick(row, request(params, output=[1, 1], stop_ids=[4, 7])) == [4]
    assert pick(row, request(SamplingParams(temperature=0), stop_ids=[4])) == [4]


def test_drafts_before_a_row_count_as_if_they_were_output() -> None:
    """Penalties, min_tokens and the noise of a row in a verify pass."""
    params = SamplingParams(
        temperature=0.9, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.9,
        min_tokens=4, max_tokens=9,
    )  # fmt: skip
    drafts = torch.tensor([5, 3, 5, 11])
    for seed in range(6):
        made = request(params, [5, 2], [1, 3], seed, stop_ids=[7, 8])
        rows = logits(5, seed)
        rows[:, 7] += 3
        ahead = [drafts[:n] for n in range(5)]
        found = Sampler(V, "cpu").pick(rows, [made] * 5, ahead).tolist()
        for n in range(5):
            later = request(params, [5, 2], [1, 3, *drafts[:n].tolist()], seed, stop_ids=[7, 8])
            assert pick(rows[n : n + 1], later) == [found[n]]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = torch.full((1, V), -1.0)
    row[0, [5, 9]] = 2.0
    assert pick(row, request(SamplingParams(temperature=0))) == [5]


@pytest.mark.parametrize("seed", range(5))
def test_a_rows_token_depends_on_itself_alone(seed: int) -> None:
    rows = logits(6, seed)
    made = [
        request(
            SamplingParams(temperature=0.5 + i / 4, top_k=i * 2, top_p=1 - i / 10),
            output=[1] * i,
            seed=seed * 10 + i,
            name=str(i),
        )
        for i in range(6)
    ]
    together = pick(rows, *made)
    assert together == [pick(rows[i : i + 1], made[i])[0] for i in range(6)]
    assert pick(rows.flip(0), *made[::-1]) == together[::-1]


def test_seed_and_position_make_the_noise() -> None:
    flat = torch.zeros(1, V)
    params = SamplingParams()

    def draws(seed: int) -> list[int]:
        return [pick(flat, request(params, output=[1] * i, seed=seed))[0] for i in range(30)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) > 5


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=1), SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0)],
    ids=["top-k", "top-p", "min-p"],
)
def test_the_narrowest_filters_are_greedy(params: SamplingParams) -> None:
    rows = logits(20)
    made = [request(params, seed=i, name=str(i)) for i in range(20)]
    assert pick(rows, *made) == rows.argmax(-1).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_row_is_marked_and_its_neighbours_are_not(value: float) -> None:
    rows = logits(3)
    rows[1] = value
    made = [request(SamplingParams(temperature=0), name=str(i)) for i in range(3)]
    assert pick(rows, *made) == [rows[0].argmax(), -1, rows[2].argmax()]


def test_one_nan_among_good_logits_breaks_the_row() -> None:
    rows = logits(1)
    rows[0, 3] = math.nan
    assert pick(rows, request(SamplingParams())) == [-1]


# ----------------------------------------------------------------------------------- log-probs
def test_logprobs_of_the_chosen_and_the_most_likely() -> None:
    rows = logits(3)
    exact = torch.log_softmax(rows.double(), -1)
    order = rows.argsort(-1, descending=True)
    last = int(order[1, -1])
    found = describe(rows, [int(order[0, 0]), last, int(order[2, 2])], [2, 0, 3])
    assert [list(row) for row in found] == [
        order[0, :2].tolist(),
        [last],
        [int(order[2, 2]), int(order[2, 0]), int(order[2, 1])],
    ]
    for i, row in enumerate(found):
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(float(exact[i, token]), abs=1e-6)
            assert entry.rank == order[i].tolist().index(token) + 1


def test_ranks_break_ties_by_id() -> None:
    row = torch.zeros(1, V)
    found = describe(row, [3], [2])[0]
    assert {token: entry.rank for token, entry in found.items()} == {3: 4, 0: 1, 1: 2}


def test_logprobs_may_cover_the_vocabulary() -> None:
    found = describe(logits(1), [0], [V])[0]
    assert sorted(found) == list(range(V))
    assert sum(math.exp(e.logprob) for e in found.values()) == pytest.approx(1)
