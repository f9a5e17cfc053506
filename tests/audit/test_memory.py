"""What fits: the numbers are the engine's own, and the edge of what fits is where it says."""

import re

import pytest
import torch

from nemotriton.audit import memory
from nemotriton.audit.gpus import NAMES, find_gpu
from nemotriton.engine.llm import LLM
from nemotriton.errors import ConfigError
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import expected
from nemotriton.model.release_schemes import release_scheme
from tests.audit.command import invoke, invoke_json


def test_the_parts_are_what_the_engine_allocates() -> None:
    """Weights, states and K/V of the plan are the bytes of the tensors of a model made of it."""
    code, found = invoke_json(
        *("memory", "tiny", "--gpu", "16", "--context", "2048", "--requests", "3")
    )
    assert code == 0
    with LLM.synthetic("tiny", max_context=2048, max_requests=3, device="cpu") as llm:
        weights = sum(t.nbytes for t in llm.runner.model.named_tensors().values())
        kv, mamba = llm.runner.caches.kv, llm.runner.caches.mamba
        assert found["parts"]["weights"] == weights
        assert found["parts"]["states"] == mamba.ssm.nbytes + mamba.conv.nbytes
        # and a page that recorded steps need
        page = kv.k[:, :1].nbytes + kv.v[:, :1].nbytes
        assert found["parts"]["KV"] == kv.k.nbytes + kv.v.nbytes + page
    assert sum(found["parts"].values()) == found["available"]
    assert found["available"] == int(0.9 * 16 * 2**30)


@pytest.mark.parametrize("quant", ["bf16", "fp8", "nvfp4"])
def test_weights_follow_the_formats(quant: str) -> None:
    config = ModelConfig.preset("nano-30b")
    _, found = invoke_json("memory", "preset:nano-30b", "--gpu", "b200", "--quant", quant)
    wanted = expected(config, release_scheme(config, quant), 0)
    assert found["parts"]["weights"] == sum(e.nbytes(2) for e in wanted.values())


def test_the_most_requests_fit_and_one_more_does_not_have_all_its_tokens_in_the_cache() -> None:
    base = ("memory", "nano-30b", "--gpu", "h100", "--context", "131072")
    _, found = invoke_json(*base)
    most = found["most_requests"]["131072"]
    assert most > 1
    _, exact = invoke_json(*base, "--requests", str(most))
    assert exact["fits"]
    assert exact["all_at_once"]
    _, more = invoke_json(*base, "--requests", str(most + 1))
    assert not more.get("all_at_once", False)


def test_what_does_not_fit_says_what_would() -> None:
    code, out, _ = invoke("memory", "ultra-550b", "--gpu", "h200", "--quant", "bf16")
    assert code == 1
    assert "does not fit: needs" in out
    assert "a device with more memory" in out
    code, found = invoke_json("memory", "super-120b", "--gpu", "h100", "--drafts", "3")
    assert code in (0, 1)
    assert set(found["most_requests"]) == {"4096", "32768", "131072", "262144"}


def test_drafts_cost_rings_and_the_block() -> None:
    _, without = invoke_json("memory", "super-120b", "--requests", "4", "--context", "4096")
    _, drafting = invoke_json(
        *("memory", "super-120b", "--requests", "4", "--context", "4096", "--drafts", "3")
    )
    assert drafting["parts"]["weights"] > without["parts"]["weights"]
    assert drafting["parts"]["rings"] > 0


@pytest.mark.parametrize("name", [*NAMES, "NVIDIA H200", "80GiB", "24.5"])
def test_gpus(name: str) -> None:
    assert find_gpu(name).memory >= 20 * 2**30


def test_the_table(tmp_path: object) -> None:
    code, out, _ = invoke("memory", "super-120b", "--gpu", "h200", "--requests", "8")
    assert code == 0
    assert "NVIDIA H200" in out
    assert "requests at once" in out
    assert torch.get_default_dtype() is torch.float32


def test_what_one_of_several_gpus_holds() -> None:
    """Super in BF16 does not fit one H200, and fits two."""
    wanted, gpu = memory.Wanted(8192, 8), find_gpu("h200")
    whole = memory.stored("super-120b", "bf16", False, None, True)
    assert not memory.what_fits(whole, gpu, wanted)["fits"]
    for tp, ep in ((2, 1), (1, 2)):
        found = memory.what_fits(whole.cut(tp, ep), gpu, wanted)
        assert found["fits"]
        assert found["parameters"] == whole.parameters
        assert 0.5 < found["parts"]["weights"] / (2 * whole.parameters) < 0.51
        assert next(iter(memory.as_lines(found))) == "super-120b (bf16) on 2 x NVIDIA H200"
    with pytest.raises(ConfigError, match="n_groups"):
        whole.cut(16, 1)


def test_the_remedy_that_is_named_can_be_given() -> None:
    """A smaller piece of prompts is one, and this command takes it."""
    code, out, _ = invoke("memory", "super-120b", "--gpu", "h100")
    piece = re.search(r"--prefill-piece (\d+)", out)
    assert code == 1
    assert piece
    assert invoke("memory", "super-120b", "--gpu", "h100", "--prefill-piece", piece[1])[0] == 0
