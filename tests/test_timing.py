"""Timing arithmetic with clocks that are not there: order, steady state, spread, rotation."""

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotriton.autotune import ceilings, timing
from nemotriton.autotune.timing import Rotation, race, rotation, settle, summary
from nemotriton.autotune.trial import Point, input_sets
from nemotriton.kernels.op import Case, Cost
from tests.fake_runner import FACTS, TILES, FakeStopwatch, toy


class Clock:
    """Replays that take `us` each, times a factor that drifts with every replay."""

    def __init__(self, drift: float = 1.0) -> None:
        self.factor, self.drift = 1.0, drift
        self.order: list[str] = []

    def replay(self, name: str, us: float) -> Callable[[], float]:
        def run() -> float:
            self.order.append(name)
            self.factor *= self.drift
            return us * self.factor

        return run


def test_candidates_take_turns_in_a_shifting_order() -> None:
    clock = Clock()
    race([clock.replay(n, 1.0) for n in "abc"], samples=3, warm_up=0)
    assert "".join(clock.order) == "abcbcacab"


def test_a_drifting_clock_does_not_change_the_winner() -> None:
    clock = Clock(drift=1.003)  # every replay 0.3 % slower than the one before: 1.3 x in the end
    slow, fast = race(
        [clock.replay("slow", 10.0), clock.replay("fast", 9.8)], samples=40, warm_up=0
    )
    assert fast.us < slow.us
    assert slow.us / fast.us == pytest.approx(10 / 9.8, rel=0.004)


def test_settling_ends_when_two_windows_agree_and_has_a_limit() -> None:
    steady, moving = Clock(), Clock(drift=1.02)
    assert settle([steady.replay("a", 1.0)], most=60) == 8
    assert settle([moving.replay("a", 1.0)], most=60) == 60
    assert settle([moving.replay("a", 1.0)], most=0) == 0
    warming = iter([9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 2.0] + [2.0] * 52)
    assert settle([lambda: next(warming)], most=60) == 16


def test_summary_is_the_median_and_its_neighbours() -> None:
    t = summary([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (t.us, t.p20, t.p80, t.samples) == (3.0, 1.8, 4.2, 5)
    assert summary([7.0]) == timing.Timing(7.0, 7.0, 7.0, 1)
    assert summary([1.0, 2.0]).us == 1.5


MB = 1 << 20


@pytest.mark.parametrize(
    "touched,held,room,want",
    [
        (30 * MB, 30 * MB, 1 << 40, Rotation(4, True)),  # 4 x 30 is past twice 50 MB of L2
        (500 * MB, 500 * MB, 1 << 40, Rotation(3, True)),  # three draws, though one would be cold
        (8192, 8192, 1 << 40, Rotation(128, False)),  # never past it: each set once a replay
        (0, 0, 1 << 40, Rotation(128, False)),
        (250 * MB, 6000 * MB, 13000 * MB, Rotation(2, True)),  # few experts of many: memory rules
        (30 * MB, 30 * MB, 50 * MB, Rotation(1, False)),
    ],
)
def test_rotations_pass_twice_the_cache(touched: int, held: int, room: int, want: Rotation) -> None:
    assert rotation(touched, held, 50 * MB, room) == want


def test_input_sets_are_drawn_anew() -> None:
    with toy(list(TILES)):
        sets, repeat = input_sets(Point("twice", Case(D=8), 16, "bf16"), torch.device("cpu"))
    assert len(sets) == timing.SETS_MOST
    assert not repeat
    assert not torch.equal(sets[0]["x"], sets[1]["x"])
    assert sets[0]["x"].data_ptr() != sets[1]["x"].data_ptr()


def test_ceilings_come_from_what_was_moved_and_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_read(kernel: Any, grid: Any, *args: Any, **meta: Any) -> None:
        assert grid == (1,)

    monkeypatch.setattr(ceilings, "launch", run_read)
    found = ceilings.measure(FakeStopwatch(us=2.0), torch.device("cpu"), size=4096, side=8)
    assert found.copy_gbs == 2 * 4096 / 2e-6 / 1e9
    assert found.read_gbs == 4096 / 2e-6 / 1e9
    assert found.bf16_tflops == pytest.approx(2 * 8**3 / 2e-6 / 1e12)


def test_the_binding_ceiling_is_the_later_of_the_two() -> None:
    c = FACTS.ceilings  # 4,000 GB/s; 700 and 50 TFLOP/s
    assert c.bound(Cost(flops=0, bytes=4_000_000), "bf16") == (1.0, "copy")
    assert c.bound(Cost(flops=1_400_000_000, bytes=4_000_000), "bf16") == (2.0, "bf16 matmul")
    assert c.bound(Cost(flops=100_000_000, bytes=4_000_000), "fp32") == (2.0, "fp32 matmul")


class FakeCuda:
    """Records what a CudaStopwatch asks of torch.cuda; graphs replay the calls they captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pools: list[Any] = []
        book = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                book.log.append("record")

            def synchronize(self) -> None:
                book.log.append("synchronize")

            def elapsed_time(self, end: "Event") -> float:
                return 0.06  # milliseconds

        class Graph:
            def pool(self) -> int:
                return id(self)

            def replay(self) -> None:
                book.log.append("replay")

        def graph(made: Graph, pool: Any = None) -> Any:
            book.pools.append(pool)
            return contextlib.nullcontext()

        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes = {"Event": Event, "CUDAGraph": Graph, "graph": graph}
        fakes |= {"Stream": lambda where: stream, "current_stream": lambda where: stream}
        fakes |= {"stream": lambda s: contextlib.nullcontext()}
        fakes |= {"device": lambda where: contextlib.nullcontext()}
        fakes |= {"synchronize": lambda where: None}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(timing, "FLUSH_BYTES", 4096)
        small = dataclasses.replace(FACTS.gpu, l2=1024)
        monkeypatch.setattr(timing.device, "info", lambda where: small)


def test_the_stopwatch_flushes_then_times_what_was_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    watch = timing.CudaStopwatch(torch.device("cpu"))
    assert watch.buffer.nbytes == 2 * 1024
    assert watch.passes == 2
    made = [0, 0]

    def call(i: int) -> Callable[[], None]:
        def run() -> None:
            made[i] += 1

        return run

    calls = [call(0), call(1)]
    first = watch.capture(calls, True)
    # a call seems to take 60 us: 500 us hold five rounds of two, beside one warm-up
    assert made == [1 + 3 + 5, 1 + 5]
    cuda.log.clear()
    assert first() == pytest.approx(6.0), "60 us over ten calls"
    assert cuda.log == ["record", "replay", "record", "synchronize"]
    second = watch.capture(calls, False)
    assert made == [9 + 1 + 3 + 1, 6 + 1 + 1]
    assert second() == pytest.approx(30.0)
    assert cuda.pools[0] is None
    assert cuda.pools[1] is not None, "the second candidate shares the first one's pool"
    del first, second
    watch.capture(calls, False)
    assert cuda.pools[2] is None, "with all graphs gone, so is their pool"
    single = watch.single(calls)
    made[:] = [0, 0]
    assert [single() for _ in range(3)] == pytest.approx([60.0] * 3)
    assert made == [2, 1], "single launches take the input sets in turn"
