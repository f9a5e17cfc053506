"""Measuring on a real device: ceilings, cold caches, a short sweep, a tile that kills."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from nemotriton import device
from nemotriton.autotune import cache, store
from nemotriton.autotune.child import ChildRunner
from nemotriton.autotune.sweep import Outcome, Sweep, plan
from nemotriton.autotune.timing import CudaStopwatch, race
from nemotriton.autotune.trial import Point, TileRunner, cuda_runner
from nemotriton.kernels.op import SPECS, Case, Tile, launch
from nemotriton.model.config import ModelConfig


@pytest.fixture(scope="module")
def runner() -> Iterator[ChildRunner]:
    with contextlib.closing(ChildRunner(cuda_runner)) as made:
        yield made


@pytest.mark.alone
def test_ceilings_are_those_of_a_gpu(runner: ChildRunner) -> None:
    facts = runner.facts()
    c = facts.ceilings
    assert facts.gpu == device.info()
    assert 100 < c.copy_gbs < 1.1 * c.read_gbs < 30_000
    assert 20 < c.bf16_tflops < 5_000
    assert c.fp32_tflops < c.bf16_tflops


@pytest.mark.alone
def test_repeated_reads_find_nothing_in_the_cache(cuda: torch.device) -> None:
    """A buffer half as large as L2, read again and again, is read at no more than memory's rate."""
    size = max(device.info(cuda).l2 // 2, 8 << 20)
    x = torch.randn(size // 4, device=cuda)
    far = torch.randn(1 << 29, device=cuda)
    watch = CudaStopwatch(cuda)
    once, long = race([watch.capture([x.sum], False), watch.capture([far.sum], False)])
    assert x.nbytes / once.us < 1.05 * far.nbytes / long.us


@pytest.mark.alone
def test_a_graph_and_single_launches_agree(cuda: torch.device) -> None:
    x = torch.randn(1 << 28, device=cuda)
    watch = CudaStopwatch(cuda)
    graph, single = race([watch.capture([x.sum], True), watch.single([x.sum])])
    assert graph.us == pytest.approx(single.us, rel=0.05)


@pytest.mark.alone
def test_a_short_sweep_writes_what_the_runtime_finds(
    runner: ChildRunner, tmp_path: Path, cuda: torch.device
) -> None:
    points = plan(["rms_norm"], [ModelConfig.preset("nano-30b")], tokens=[1, 4096])
    events = list(Sweep(runner, tmp_path).run(points))
    found = [e for e in events if isinstance(e, Outcome)]
    assert [o.kind in ("win", "loss") for o in found] == [True, True], found
    assert all(o.failed == 0 for o in found), found
    spec, gpu = SPECS["rms_norm"], device.info(cuda).slug
    assert store.faults(store.read(cache.path_of(gpu, "rms_norm", tmp_path)), spec, gpu) == []
    table = cache.load("rms_norm", gpu, spec.source, tmp_path)
    for o in found:
        kept = table.lookup(o.point.key, o.point.tokens)
        assert kept == (dict(o.tile) if o.tile else None)


@triton.jit
def _far_store(x_ptr, offset):
    tl.store(x_ptr + offset.to(tl.int64) * 1_000_000_007, 1.0)


class Deadly(TileRunner):
    """Writes far outside every allocation before trying a tile of 16 warps."""

    def trial(self, point: Point, tile: Tile | None) -> Any:
        def store_far() -> None:
            launch(_far_store, (1,), torch.empty(1, device=self.where), 1_000_003)
            torch.cuda.synchronize()

        if tile is not None and tile["num_warps"] == 16:
            try:
                store_far()
            except RuntimeError as error:
                self._reason(error)
        return super().trial(point, tile)


def deadly_runner() -> Deadly:
    where = torch.device("cuda", 0)
    return Deadly(where, CudaStopwatch(where))


def test_an_illegal_access_is_one_failed_tile() -> None:
    point = Point("rms_norm", Case(D=64), 4, "bf16")
    good = Tile(BLOCK_D=64, num_warps=1, num_stages=1)
    with contextlib.closing(ChildRunner(deadly_runner)) as runner:
        assert runner.trial(point, good).failed is None
        assert "crashed" in str(runner.trial(point, good.but(num_warps=16)).failed)
        assert runner.trial(point, good).failed is None
