"""First tuned files for a GPU that nobody has measured on."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemotriton.autotune import cache, offline, review, seed, store
from nemotriton.autotune.__main__ import app
from nemotriton.errors import NemotritonError
from nemotriton.kernels.op import SPECS, targeting
from nemotriton.model.config import ModelConfig

SUPER = "super-120b"


def rows(kernel: str, **changes: object) -> list[str]:
    """What `compile --out` writes of a kernel's default tiles, and one of another architecture."""
    found = []
    for job in offline.jobs([kernel], [ModelConfig.preset(SUPER)], [100]):
        row = {
            "op": job.op, "case": dict(job.case), "dtype": job.dtype, "tile": dict(job.tile),
            "registers": 40, "shared": 512, "tensor_memory": 0, "faults": [], "arch": "sm_100",
            "tensor_ops": {"tcgen05.mma.cta_group::1.kind::f16": 2},
        } | changes  # fmt: skip
        found += [json.dumps(row), json.dumps(row | {"registers": 64, "tensor_ops": {}})]
    return [*found, json.dumps(row | {"arch": "sm_90", "registers": 200})]


def run(folder: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["seed", "--model", SUPER, "--folder", str(folder), *more])
    assert result.exit_code == 0, result.output
    return result.output


def test_what_compiles_becomes_files(tmp_path: Path) -> None:
    learn = tmp_path / "rows.jsonl"
    learn.write_text("\n".join(rows("rms_norm")))
    run(tmp_path / "cache", "--kernel", "rms_norm", "--learn", str(learn))
    for gpu, about in seed.GPUS.items():
        file = cache.path_of(gpu, "rms_norm", tmp_path / "cache")
        assert review.faults(file) == []
        data = store.read(file)
        assert data["gpu"]["name"] == about.name
        buckets = [b for e in data["entries"] for b in e["tokens"]]
        assert all(b["status"] == "compiled" and b["registers"] == 64 for b in buckets)
        assert all(b["ops"] == ["tcgen05.mma kind::f16"] for b in buckets)
        tiles = [b["tile"] for b in buckets]
        assert all(a != b for a, b in itertools.pairwise(tiles)), "one bucket for the same tile"
        table = cache.load("rms_norm", gpu, SPECS["rms_norm"].source, tmp_path / "cache")
        case = SPECS["rms_norm"].cases(ModelConfig.preset(SUPER))[0]
        with targeting(100):
            want = dict(SPECS["rms_norm"].default(case, 64))
        assert table.lookup({"dtype": "bf16", **case}, 64) == want
    again = run(tmp_path / "cache", "--kernel", "rms_norm")  # from what was learnt
    assert "not known" not in again


@pytest.mark.parametrize("changes", [{"faults": ["the default tile spills 8 bytes"]}, {"tile": {}}])
def test_what_does_not_compile_is_left_out(changes: dict, tmp_path: Path) -> None:
    learn = tmp_path / "rows.jsonl"
    learn.write_text("\n".join(rows("rms_norm", **changes)))
    said = run(tmp_path, "--kernel", "rms_norm", "--learn", str(learn), "--gpu", "nvidia_b200")
    assert "0 files written" in said
    assert "default tiles not known to compile" in said


def test_measured_buckets_stay_and_published_tiles_are_marked(tmp_path: Path) -> None:
    kernel, gpu = "ssd_prefill_chunked", "nvidia_b200"
    spec, case = SPECS[kernel], SPECS[kernel].cases(ModelConfig.preset(SUPER))[0]
    point = seed.PUBLISHED[kernel]
    tile = next(t for t in spec.tiles(case) if all(t[k] == v for k, v in point.items()))
    learn = tmp_path / "rows.jsonl"
    learn.write_text("\n".join(rows(kernel, tile=dict(tile))))
    run(tmp_path, "--kernel", kernel, "--learn", str(learn), "--gpu", gpu)
    data = store.read(cache.path_of(gpu, kernel, tmp_path))
    [bucket] = data["entries"][0]["tokens"]
    assert (bucket["status"], bucket["tile"]) == ("published", dict(tile))
    mine = bucket | {"upto": 512, "status": "measured", "us": 5.0, "default_us": 9.0}
    mine |= {"tried": 3, "failed": 0}
    data["entries"][0]["tokens"] = [mine, bucket]
    cache.save(data, kernel, gpu, tmp_path)
    run(tmp_path, "--kernel", kernel, "--gpu", gpu)
    found = store.read(cache.path_of(gpu, kernel, tmp_path))["entries"][0]["tokens"]
    kinds = [(b["upto"], b["status"], bool(b["tile"])) for b in found]
    assert kinds[0] == (128, "default", False), "fewer tokens than measured have the default"
    assert [status for _, status, _ in kinds[1:]] == ["measured", "published"]
    assert review.faults(cache.path_of(gpu, kernel, tmp_path)) == []


def test_unknown_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NemotritonError, match="nvidia_b200"):
        seed.seed_command(gpu="nvidia_h100", kernel=None, model=SUPER, learn=None, folder=tmp_path)


def test_the_check_knows_the_axes_of_every_case() -> None:
    for name, op in SPECS.items():
        known = [set(case) for case in op.small]
        for preset in (SUPER, "nano-30b", "h-8b"):
            for case in op.cases(ModelConfig.preset(preset)):
                assert set(case) in known, name
