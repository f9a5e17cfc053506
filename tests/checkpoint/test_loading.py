"""Loading: progress, ranks, completeness and host memory."""

import itertools
import json
import resource
from pathlib import Path

import pytest
import torch

from nemotriton.errors import CheckpointError
from nemotriton.model.checkpoint import Part, destination_dtype, expected, load
from nemotriton.model.config import ModelConfig
from tests.checkpoint.files import (
    BASE,
    MOE,
    UP,
    Tensors,
    filled,
    loaded,
    planned,
    rewritten,
    same,
    stack,
)


def test_progress_counts_every_byte(quantised: Path) -> None:
    source, plan = planned(quantised)
    destinations = {
        n: torch.zeros(e.shape, dtype=destination_dtype(e.role, torch.bfloat16))
        for n, e in plan.expected.items()
    }
    seen: list[tuple[int, int, str]] = []
    load(source, plan, destinations.__getitem__, lambda *args: seen.append(args))
    assert [name for _, _, name in seen] == [info.name for info in source.tensors]
    assert {total for _, total, _ in seen} == {plan.nbytes}
    assert seen[-1][0] == plan.nbytes
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))


def test_model_and_plan_must_agree(plain: Path) -> None:
    plan = planned(plain)[1]
    plan.check_model(plan.expected)
    names = (set(plan.expected) - {"norm_f.weight"}) | {"layers.0.mixer.extra"}
    message = (
        r"1 weights would stay unset \(layers.0.mixer.extra\), 1 destinations .*\(norm_f.weight"
    )
    with pytest.raises(CheckpointError, match=message):
        plan.check_model(names)


def test_a_rank_gets_its_parts(plain: Path, quantised: Path) -> None:
    parts = {
        "layers.0.mixer.in_proj.weight": (Part(0, ((3, 7), (40, 41))),),
        f"{UP}.weight": (Part(0, ((0, 1), (2, 4))), Part(1, ((4, 8),))),
        "layers.3.mixer.experts.down_proj.weight": (Part(2, ((0, 2), (6, 8))),),
        "lm_head.weight": (Part(0, ((8, 16),)), Part(1, ((1, 2),))),
    }
    for path in (plain, quantised):
        whole = loaded(path)
        source, plan = planned(path)
        local = filled(source, plan.sliced(parts))
        down = whole["layers.3.mixer.experts.down_proj.weight"]
        into = whole["layers.0.mixer.in_proj.weight"].view(torch.uint8)
        wanted = {
            "layers.0.mixer.in_proj.weight": torch.cat([into[3:7], into[40:41]]).view(
                whole["layers.0.mixer.in_proj.weight"].dtype
            ),
            f"{UP}.weight": whole[f"{UP}.weight"][[0, 2, 3], 4:8],
            "layers.3.mixer.experts.down_proj.weight": torch.cat(
                [down[..., :2], down[..., 6:8]], -1
            ),
            "lm_head.weight": whole["lm_head.weight"][8:16, 1:2],
        }
        same(local, whole | wanted)


def test_one_scale_for_all_experts_is_spread(quantised: Path, tmp_path: Path) -> None:
    def change(t: Tensors) -> Tensors:
        t = stack(".weight")(t)
        return t | {f"{MOE}.experts.up_proj.weight_scale_2": torch.tensor([0.25])}

    tensors = loaded(rewritten(quantised, tmp_path / "m", change))
    assert tensors[f"{UP}.weight_scale_2"].tolist() == [0.25] * 4


def resident() -> int:
    """Bytes of this process that are in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def sparse_checkpoint(config: ModelConfig, path: Path, files: int) -> None:
    """A checkpoint of zeros that takes no time to write, as holes in `files` files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config.to_json()))
    entries = list(expected(config).items())
    for index in range(files):
        header, end = {}, 0
        for name, entry in entries[index::files]:
            begin, end = end, end + entry.nbytes(2)
            stored = {"dtype": "BF16", "shape": entry.shape, "data_offsets": [begin, end]}
            header[name if name.startswith("lm_head") else f"backbone.{name}"] = stored
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligned, as writers of the format do
        with (path / f"model-{index + 1:05d}-of-{files:05d}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + end)


@pytest.mark.parametrize("files", [1, 4])
def test_host_memory_stays_far_below_the_checkpoint(tmp_path: Path, files: int) -> None:
    """240 MB in tensors of at most 17 pass through a process that never holds half of them."""
    dense = {"hybrid_override_pattern": "-" * 6, "num_hidden_layers": 6}
    sizes = {"vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 4096}
    config = ModelConfig.from_json(BASE | dense | sizes | {"num_nextn_predict_layers": 0})
    sparse_checkpoint(config, tmp_path / "m", files)
    source, plan = planned(tmp_path / "m")
    scratch = torch.ones(4096, 2048, dtype=torch.bfloat16)  # one buffer for every destination
    before, most = resident(), 0

    def destination(name: str) -> torch.Tensor:
        entry = plan.expected[name]
        return scratch.view(-1)[: entry.numel].view(entry.shape)

    def progress(done: int, total: int, name: str) -> None:
        nonlocal most
        most = max(most, resident() - before)

    load(source, plan, destination, progress)
    assert 10e6 < most < plan.nbytes / 2
