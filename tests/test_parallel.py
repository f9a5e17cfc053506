"""Several ranks give what one gives: gloo, two and four processes, each group started once.

fp32 sums in another order differ in their last bits, so logits agree to 1e-5 of the largest; tokens
are equal, since no two logits of these models tie within that.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from nemotriton import LLM, ModelConfig, SamplingParams
from nemotriton.engine.team import Team
from nemotriton.errors import CapacityError, ConfigError, RankError
from nemotriton.model.checkpoint import load, make_plan, open_source
from nemotriton.model.expected import expected
from nemotriton.model.formats import Algorithm, QuantScheme
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.parallel import Shard, local_expected
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.shards import ShardReader, TensorInfo
from nemotriton.model.synth import write_checkpoint
from tests import rank_checks
from tests.rank_checks import team_of

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
WARM = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=16, ignore_eos=True)
MIXED = [
    GREEDY,
    WARM,
    SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3, min_tokens=4),
    SamplingParams(temperature=0.7, top_k=20, seed=1, max_tokens=12, n=2, ignore_eos=True),
]
NO_MTP = {"num_nextn_predict_layers": 0, "mtp_hybrid_override_pattern": None}
PRESETS = ["super-120b", "nano-30b", "ultra-550b", "lightning-30b", "nano-4b", "9b-v2", "h-8b"]


def opened(tp: int = 1, ep: int = 1, drafts: int = 0) -> LLM:
    return LLM.synthetic(
        "tiny",
        dtype="float32",
        device="cpu",
        max_context=256,
        max_requests=4,
        prefill_piece=48,
        drafts=drafts,
        adapt_drafts=False,
        tp=tp,
        ep=ep,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of layer and format on disk: two KV heads, four Mamba groups, eight experts."""
    path = tmp_path_factory.mktemp("ranks") / "model"
    config = rank_checks.config_of("M*-EME")
    scheme = release_scheme(config, "super-mixed")
    write_checkpoint(config, path, dtype=torch.float32, scheme=scheme, shard_bytes=1 << 18)
    return path


def loaded(path: Path, tp: int = 1, ep: int = 1) -> LLM:
    """Steps are padded to shapes and started ahead, as they are recorded on GPUs."""
    return LLM(path, device="cpu", max_context=256, max_requests=4, graphs=True, tp=tp, ep=ep)


def prompt(n: int) -> list[int]:
    g = torch.Generator().manual_seed(n)
    return torch.randint(3, 60, (n,), generator=g).tolist()


PROMPTS = [prompt(n) for n in (5, 70, 1, 33)]


def answers(llm: LLM) -> list[object]:
    found: list[object] = []
    for output in llm.generate(PROMPTS, MIXED):
        found += [(c.token_ids, c.text, c.finish_reason) for c in output.outputs]
    return found


# ------------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize("shard", [(2, 1), (1, 2), (2, 2), (4, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_ranks_hold_every_weight_once(preset: str, shard: tuple[int, int]) -> None:
    """Sharded tensors are cut into all their elements; the modules' shapes are the parts'."""
    config = ModelConfig.preset(preset)
    scheme = release_scheme(config, "nvfp4")
    wanted = expected(config, scheme)
    ranks = shard[0] * shard[1]
    kept = [Shard(rank, *shard).parts(config, wanted) for rank in range(ranks)]
    for name, entry in wanted.items():
        held = [local_expected({name: entry}, {name: k[name]} if name in k else {}) for k in kept]
        total = sum(h[name].numel for h in held)
        tail = name.split(".")[-2]
        times = ranks if name not in kept[0] else 1
        if tail in ("k_proj", "v_proj") and config.attention is not None and name in kept[0]:
            times = max(1, ranks // config.attention.kv_heads)
        if name in kept[0] and entry.experts and entry.role == "scale":
            times = shard[0]
        assert total == times * entry.numel, name
        for part in kept[-1].get(name, ()):
            assert all(end <= entry.shape[part.dim] for _, end in part.ranges)
    assert ModelConfig.from_json(Shard(1, *shard).local(config).to_json())


@pytest.mark.parametrize("shard", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_a_rank_is_a_smaller_model(shard: tuple[int, int]) -> None:
    config = rank_checks.config_of("M*-EME", use_bias=True, attention_bias=True)
    for rank in (0, shard[0] * shard[1] - 1):
        own = Shard(rank, *shard)
        model = rank_checks.made(config, "nvfp4", False, own)
        wanted = expected(config, release_scheme(config, "nvfp4"), mtp_blocks=1)
        held = local_expected(wanted, own.parts(config, wanted))
        assert {n: tuple(t.shape) for n, t in model.named_tensors().items()} == {
            n: e.shape for n, e in held.items()
        }


def test_sizes_that_cannot_be_cut_are_refused() -> None:
    nano = ModelConfig.preset("nano-30b")
    with pytest.raises(
        ConfigError,
        match=r"n_groups is 8, which cannot be cut for 16 GPUs: use one of tp=1, 2, 4, 8\.",
    ):
        Shard(0, 16).local(nano)
    wanted = expected(nano, release_scheme(nano, "nvfp4"))
    assert [Shard(rank, 8).own_inner(1856) for rank in (0, 7)] == [(0, 224), (1616, 1856)]
    narrow = replace(nano, mamba=replace(nano.mamba, heads=8, head_dim=72))
    wanted = expected(narrow, QuantScheme(default=Algorithm.NVFP4))
    with pytest.raises(ConfigError, match=r"at column 72, inside a group of 16"):
        Shard(0, 8).parts(narrow, wanted)
    with pytest.raises(ConfigError, match="tp=0"):
        Shard(0, 0)
    thirds = {"vocab_size": 66, "num_attention_heads": 6, "num_key_value_heads": 3}
    with pytest.raises(ConfigError, match=r"n_routed_experts is 8.* ep=3: use ep=1"):
        Shard(0, 1, 3).local(rank_checks.config_of("E", **thirds))


# ------------------------------------------------------------------------------------------ tokens
def same_tokens(one: LLM, two: LLM) -> None:
    """Also without drafts."""
    a, b = one.logits(PROMPTS[1]), two.logits(PROMPTS[1])
    assert float((a - b).abs().max()) <= 1e-5 * float(a.abs().max())
    expected_answers = answers(one)
    assert answers(two) == expected_answers
    assert two.stats()["drafts"]["verified"] > 0
    two.engine.depth, two.engine.scheduler.drafts = None, 0
    assert answers(two) == expected_answers


def same_logprobs_and_streams(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    a, b = (llm.generate([PROMPTS[1]], params)[0] for llm in (one, two))
    assert b.outputs[0].token_ids == a.outputs[0].token_ids
    assert b.outputs[0].cumulative_logprob == pytest.approx(a.outputs[0].cumulative_logprob)
    texts = ["".join(d.text for d in llm.stream(PROMPTS[0], WARM)) for llm in (one, two)]
    assert texts[0] == texts[1]
    stream = two.stream(PROMPTS[3], GREEDY)
    next(stream)
    stream.close()  # cancelled on both ranks: what follows is undisturbed
    assert not two.engine.busy
    assert answers(two) == answers(one)


def preempts_on_all_ranks(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    prompts = [prompt(120), prompt(121)]  # two pages each, soon three
    wanted = [o.outputs[0].token_ids for o in one.generate(prompts, params)]
    before, pages = two.engine.scheduler.preemptions, two.plan.pages
    two.everywhere(rank_checks.set_pages, 5)
    assert [o.outputs[0].token_ids for o in two.generate(prompts, params)] == wanted
    assert two.engine.scheduler.preemptions > before
    two.everywhere(rank_checks.set_pages, pages)


def gone(llm: LLM, pids: list[int]) -> None:
    """No process of the group is left."""
    llm.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def another_file_ends_the_run(two: LLM) -> None:
    pids = [child.pid for child in team_of(two).children.values()]
    with pytest.raises(RankError, match="rank 1: the mark of the weights is b, but a on rank 0"):
        two.everywhere(rank_checks.disagree)
    with pytest.raises(RankError, match="rank 1: the mark"):
        two.generate(PROMPTS, GREEDY)
    gone(two, pids)


def test_two_ranks_against_one() -> None:
    """One group of processes for all of it: starting one takes seconds."""
    with opened(drafts=2) as one, opened(tp=2, drafts=2) as two:
        same_tokens(one, two)
        same_logprobs_and_streams(one, two)
        preempts_on_all_ranks(one, two)
        another_file_ends_the_run(two)


def same_as_of_the_whole_checkpoint(checkpoint: Path, four: LLM) -> None:
    with loaded(checkpoint) as llm:
        assert four.plan.weights < 0.5 * llm.plan.weights
        assert answers(four) == answers(llm)
        a, b = llm.logits(PROMPTS[1]), four.logits(PROMPTS[1])
    assert float((a - b).abs().max()) <= 1e-5 * float(a.abs().max())


CASES: list[tuple[str, str, bool, dict[str, object]]] = [
    ("M", "bf16", False, {"use_bias": True, "use_conv_bias": False}),
    ("*", "bf16", False, {"attention_bias": True, "num_key_value_heads": 4}),
    ("*-", "bf16", False, {"mlp_bias": True, "tie_word_embeddings": True} | NO_MTP),
    ("E", "bf16", False, {"n_group": 2, "topk_group": 1}),
    ("EM", "bf16", False, {"moe_latent_size": None}),
    ("M*-E", "nvfp4", False, {}),
    ("ME", "fp8", True, {}),
    ("M-E", "nvfp4", True, {}),
]


def same_logits(case: tuple[str, str, bool, dict[str, object]], four: LLM) -> None:
    """(pattern, formats, whether activations are quantised, changes of the configuration)."""
    apart, largest = four.everywhere(rank_checks.distance, *case)
    # one activation that rounds to its other neighbour is not noise of fp32
    assert apart <= (2e-2 if case[2] else 1e-5) * largest, case


def a_killed_rank_ends_the_run(four: LLM) -> None:
    children = team_of(four).children
    pids = [child.pid for child in children.values()]
    timer = threading.Timer(0.3, lambda: os.kill(children[2].pid, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    long = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
    with pytest.raises(RankError, match=r"rank 2 was ended by signal 9 \(killed\)"):
        four.generate(20 * PROMPTS, long)
    gone(four, pids)
    assert time.monotonic() - start < 10


def test_four_ranks_against_one(checkpoint: Path) -> None:
    with loaded(checkpoint, tp=2, ep=2) as four:
        same_as_of_the_whole_checkpoint(checkpoint, four)
        for case in CASES:
            same_logits(case, four)
        a_killed_rank_ends_the_run(four)


def children_of(pid: int) -> list[int]:
    """Processes that this one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
    return found


def test_a_server_ends_with_its_ranks() -> None:
    """It answers as one rank does; killed while idle, a rank takes it along, with one message."""
    options = ["--tp", "2", "--device", "cpu", "--dtype", "float32", "--max-context", "64"]
    command = [sys.executable, "-m", "nemotriton.serve", *options, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines = iter(server.stderr.readline, "")
    url = next(line for line in lines if line.startswith("serving")).split(" at ")[1].strip()
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    body["model"] = httpx.get(f"{url}/models").json()["data"][0]["id"]
    answers = [httpx.post(f"{url}/completions", json=body, timeout=60).json() for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    (rank,) = children_of(server.pid)
    os.kill(rank, signal.SIGKILL)
    start = time.monotonic()
    assert server.wait(10) == 1
    assert time.monotonic() - start < 10
    said = "".join(lines)
    assert said.count("rank 1 was ended by signal 9 (killed)") == 1, said
    assert "Traceback" not in said


def test_ctrl_c_leaves_no_process() -> None:
    command = [sys.executable, "-m", "nemotriton.generate", "--tp", "2", "--device", "cpu", "-p"]
    command += ["one", "-n", "1900", "--ignore-eos", "--temperature", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as run:
        assert run.stdout is not None
        run.stdout.read(1)  # it answers
        (rank,) = children_of(run.pid)
        os.killpg(run.pid, signal.SIGINT)
        start = time.monotonic()
        _, said = run.communicate(timeout=20)
    assert run.returncode == 130
    assert time.monotonic() - start < 10
    assert said.decode().count("interrupted") == 1
    assert b"Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)


class FakeWatch:
    """Keeps what is reported; `known` is what others have said before."""

    def __init__(self, known: str | None = None) -> None:
        self.fault, self.said = None, known

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def wait(self, seconds: float) -> str | None:
        return self.said

    def report(self, message: str) -> str:
        self.said = self.said or message
        return self.said


HANGS = """
import os, sys, time
import torch.distributed as dist
from nemotriton.engine.watch import Watch

rank = int(sys.argv[1])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = Watch(store, rank, 2, {}, os.getppid(), lambda: time.sleep(60))
watch.enter()
store.set("fault", "rank 7 has failed")
time.sleep(60)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_in_a_collective_ends(rank: int) -> None:
    """Also where what should bring it back hangs as well; rank 0 says why."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(rank)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert done.stderr.count("error: rank 7 has failed") == (1 if rank == 0 else 0)


@pytest.mark.parametrize(
    ("rank", "problem", "known", "raised", "told"),
    [
        (1, torch.OutOfMemoryError("CUDA out of memory"), None, RankError, "rank 1: OutOfMemory"),
        (0, CapacityError("needs 3 GiB"), None, CapacityError, "rank 0: needs 3 GiB"),
        (1, CapacityError("needs 3 GiB"), None, RankError, "rank 1: needs 3 GiB"),
        (0, CapacityError("needs 3 GiB"), "rank 2: needs 3 GiB", CapacityError, "rank 2: needs"),
        (0, RuntimeError("Connection closed by peer"), "rank 2 has gone", RankError, "rank 2 has"),
        (0, KeyboardInterrupt(), None, KeyboardInterrupt, "rank 0: KeyboardInterrupt"),
    ],
    ids=str,
)
def test_what_fails_on_one_rank_is_told_to_all(
    rank: int,
    problem: BaseException,
    known: str | None,
    raised: type[BaseException],
    told: str,
) -> None:
    watch = FakeWatch(known)
    team = Team(Shard(rank, 4), torch.device("cpu"), None, watch, {})  # type: ignore[arg-type]
    with pytest.raises(raised), team.guard():
        raise problem
    assert watch.said is not None
    assert watch.said.startswith(told)


def test_a_rank_reads_its_own_experts_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_json(checkpoint)
    source = open_source(checkpoint)
    plan, shard, read = make_plan(source, config), Shard(1, 1, 2), []
    local = replace(plan.sliced(shard.parts(config, plan.expected)))
    own = ShardReader.read

    def watched(reader: ShardReader, info: TensorInfo) -> torch.Tensor:
        read.append(info.name)
        assert not reader._ahead
        return own(reader, info)

    monkeypatch.setattr(ShardReader, "read", watched)
    model = NemotronH(
        shard.local(config), torch.float32, torch.device("cpu"), plan.scheme, False, True, shard
    )
    load(source, local, model.named_tensors().__getitem__)
    experts = {name.split(".experts.")[1].split(".")[0] for name in read if ".experts." in name}
    assert experts == {"4", "5", "6", "7"}


def test_torchrun_answers_once() -> None:
    options = ["--device", "cpu", "--dtype", "float32", "-p", "one two", "-n", "6", "-q"]
    options += ["--temperature", "0", "--max-context", "64", "--tp", "2"]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks = subprocess.run(
        [*run, "-m", "nemotriton.generate", *options], capture_output=True, timeout=120
    )
    assert ranks.returncode == 0, ranks.stderr.decode()
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM(device="cpu", dtype="float32", max_context=64, max_requests=1) as llm:
        text = llm.generate("one two", params)[0].outputs[0].text
    assert ranks.stdout.decode(errors="replace").rstrip("\n") == text.rstrip("\n")


def test_torchrun_must_have_started_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="tp=2 and ep=1 make 2 ranks, but torchrun has started 1"):
        opened(tp=2)
