"""Which scale goes where: layers with quantised activations, and fp8 caches, against plain sums."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemotriton.engine.caches import Caches, PagedKV
from nemotriton.engine.llm import LLM
from nemotriton.engine.precision import find_kv_dtype
from nemotriton.errors import ConfigError, UnsupportedError
from nemotriton.kernels import route_experts
from nemotriton.model import mixers
from nemotriton.model.formats import Algorithm, QuantScheme
from nemotriton.model.layers import Experts, Linear, Matrix, Scope
from nemotriton.model.nvfp4 import dequantize_fp8, dequantize_nvfp4, quantize_fp8, quantize_nvfp4
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.synth import write_checkpoint
from tests import harness
from tests.checkpoint.files import drop, rewritten
from tests.flavours import CONFIG, decoded

CPU = torch.device("cpu")
IDS = torch.randint(3, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
LIMITS = {"device": "cpu", "dtype": "float32", "max_context": 128, "max_requests": 2}


# ----------------------------------------------------------------------------------------- layers
def scope(algorithm: Algorithm, act_quant: bool = True) -> Scope:
    return Scope(torch.float32, CPU, QuantScheme(default=algorithm), act_quant, "layers.0.mixer")


def draw(module: Matrix, seed: int) -> None:
    """Every number of a matrix random, every scale another."""
    g = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters(recurse=False):
        if p.dtype == torch.uint8:
            p.random_(0, 256, generator=g)
        elif p.dtype == torch.float8_e4m3fn:
            p.view(torch.uint8).random_(0x30, 0x50, generator=g)
        elif "scale" in name:
            p.uniform_(0.01, 0.05, generator=g)
        else:
            p.normal_(generator=g)


def rounded(x: torch.Tensor, module: Matrix, expert: int | None = None) -> torch.Tensor:
    """x as it is after quantising it with the module's input scale."""
    scale = module.input_scale if expert is None else module.input_scale[expert]
    if module.weight.dtype == torch.uint8:
        return dequantize_nvfp4(quantize_nvfp4(x, scale.detach()))
    return dequantize_fp8(quantize_fp8(x, scale.detach()))


@pytest.mark.parametrize("algorithm", [Algorithm.NVFP4, Algorithm.FP8])
def test_a_linear_layer_with_quantised_activations(algorithm: Algorithm) -> None:
    layer = Linear(24, 48, scope(algorithm), bias=True)
    draw(layer, 0)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    residual = torch.randn(5, 24, generator=torch.Generator().manual_seed(2))
    w = decoded(layer)
    want = rounded(x, layer) @ w.T + layer.bias
    assert torch.allclose(layer(x), want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(layer(x, epilogue="relu2"), want.relu().square(), rtol=1e-5, atol=1e-5)
    found = layer(x, epilogue="residual", residual=residual)
    assert torch.allclose(found, want + residual, rtol=1e-5, atol=1e-5)
    assert (want - x @ w.T - layer.bias).abs().max() > 1e-3, "rounding must show"


@pytest.mark.parametrize("algorithm", [Algorithm.NVFP4, Algorithm.FP8])
@pytest.mark.parametrize("act_quant", [False, True])
def test_every_expert_has_its_own_scales(algorithm: Algorithm, act_quant: bool) -> None:
    experts = Experts(5, 32, 48, scope(algorithm, act_quant))
    draw(experts.up_proj, 0)
    draw(experts.down_proj, 1)
    g = torch.Generator().manual_seed(2)
    x, logits = torch.randn(7, 48, generator=g), torch.randn(7, 5, generator=g)
    routing = route_experts(logits, None, 3, 1, 1, True, 2.5)
    up, down = decoded(experts.up_proj), decoded(experts.down_proj)
    want = torch.zeros(7, 48)
    for t in range(7):
        for e, weight in zip(routing.ids[t].tolist(), routing.weights[t].tolist(), strict=True):
            row = x[t : t + 1]
            h = ((rounded(row, experts.up_proj, e) if act_quant else row) @ up[e].T).relu().square()
            h = rounded(h, experts.down_proj, e) if act_quant else h
            want[t] += weight * (h @ down[e].T)[0]
    found = experts(x, routing)
    assert float((found - want).norm() / want.norm()) < 1e-5


def test_experts_of_two_formats_are_refused_by_name() -> None:
    listed = {"layers.0.mixer.experts.up_proj": Algorithm.NVFP4}
    inside = Scope(torch.float32, CPU, QuantScheme(listed=listed), False, "layers.0.mixer.experts")
    message = r"layers\.0\.mixer\.experts: up_proj is stored as nvfp4 and down_proj as bf16"
    with pytest.raises(UnsupportedError, match=message):
        Experts(4, 16, 16, inside)


def test_a_weight_only_label_of_one_matrix_holds_for_both() -> None:
    def run(act_quant: bool, label: Algorithm) -> torch.Tensor:
        listed = {"up_proj": Algorithm.NVFP4, "down_proj": label}
        inside = Scope(torch.float32, CPU, QuantScheme(listed=listed), act_quant)
        experts = Experts(4, 16, 16, inside)
        draw(experts.up_proj, 0)
        draw(experts.down_proj, 1)
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
        return experts(x, route_experts(torch.eye(3, 4), None, 2, 1, 1, True, 1.0))

    plain = run(False, Algorithm.NVFP4)
    assert torch.equal(run(True, Algorithm.W4A16_NVFP4), plain)
    assert not torch.equal(run(True, Algorithm.NVFP4), plain)


# ---------------------------------------------------------------------------------- fp8 K/V caches
@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "model"
    write_checkpoint(CONFIG, path, scheme=release_scheme(CONFIG, "super-mixed"))
    return path


def with_scales(base: Path, path: Path, k: float, v: float) -> Path:
    name = "backbone.layers.1.mixer.{0}_proj.{0}_scale"
    scales = {name.format("k"): torch.tensor(k), name.format("v"): torch.tensor(v)}
    return rewritten(base, path, lambda tensors: tensors | scales)


def fp8_caches(llm: LLM) -> Caches:
    model = llm.runner.model
    caches = harness.poisoned_caches(model)
    a = CONFIG.attention
    assert a is not None
    kv = PagedKV(1, 16, a.kv_heads, a.head_dim, torch.float8_e4m3fn, "cpu")
    for cache in (kv.k, kv.v):
        cache.fill_(float("nan"))
    return Caches(kv, caches.mamba)


@pytest.mark.parametrize("k, v", [(0.02, 30.0), (30.0, 0.02), (0.002, 0.003)])
def test_fp8_caches_hold_values_over_the_files_scales(
    k: float, v: float, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if keys and values had been rounded by hand before they were kept in fp32; the last pair
    of scales is so small that most of them saturate."""
    path = with_scales(base, tmp_path / "m", k, v)
    with LLM(path, kv_dtype="fp8", **LIMITS) as llm:
        assert llm.runner.caches.kv is not None
        assert llm.runner.caches.kv.k.dtype == torch.float8_e4m3fn
        model = llm.runner.model
        found, caches = harness.run(model, IDS, [50, -1, 17, -2], caches=fp8_caches(llm))
        write = mixers.write_kv

        def by_hand(new_k: torch.Tensor, new_v: torch.Tensor, *rest: Any) -> None:
            kept = [
                (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s
                for x, s in ((new_k, k), (new_v, v))
            ]
            write(*kept, *rest)

        exact, _ = harness.run(model, IDS)
        monkeypatch.setattr(mixers, "write_kv", by_hand)
        want, _ = harness.run(model, IDS)
    assert float((found - want).norm() / want.norm()) < 1e-5
    assert float((want - exact).norm() / exact.norm()) > 1e-3, "the scales must show"
    kept = caches.kv.k.float()
    saturated = (kept.abs() == 448).sum() / kept.isfinite().sum()
    assert (saturated > 0.5) == (k < 0.01)


def test_which_keys_and_values_are_chosen_and_said(base: Path, tmp_path: Path) -> None:
    def said(path: Path, kv_dtype: str | None, drafts: int = 0) -> tuple[torch.dtype, str, int]:
        with LLM(path, kv_dtype=kv_dtype, drafts=drafts, **LIMITS | {"dtype": None}) as llm:
            assert llm.runner.caches.kv is not None
            note = next((n for n in llm.notes if n.startswith("keys and values")), "")
            return llm.runner.caches.kv.k.dtype, note, llm.plan.kv

    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    scales = [f"backbone.layers.1.mixer.{p}_proj.{p}_scale" for p in "kv"]
    without = rewritten(base, tmp_path / "m", drop(*scales))
    dtype, note, small = said(base, None)
    assert (dtype, note) == (fp8, "keys and values are stored as fp8, with the checkpoint's scales")
    dtype, note, large = said(base, "bf16")
    assert (dtype, large) == (bf16, 2 * small)
    assert note.endswith("bfloat16: the checkpoint's k and v scales are not used")
    dtype, note, _ = said(without, "fp8")
    assert dtype == fp8
    assert "1 of 1 attention layers have no k and v scales, 1.0 is used: layers.1.mixer" in note
    dtype, note, _ = said(base, None, drafts=2)
    assert dtype == fp8
    assert "1 of 2 attention layers have no k and v scales, 1.0 is used: mtp.layers.0" in note
    dtype, note, _ = said(without, "auto")
    assert dtype == bf16
    assert "made for fp8, but has no k and v scales" in note


def test_wrong_words_and_old_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = release_scheme(CONFIG, "super-mixed")
    old = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="kv_dtype='int8': use one of auto, bf16, fp8"):
        find_kv_dtype("int8", scheme, CONFIG, torch.bfloat16, CPU)
    monkeypatch.setattr(
        "nemotriton.engine.precision.devices.info",
        lambda _: type("Info", (), {"capability": (8, 0), "name": "A100"}),
    )
    assert find_kv_dtype("auto", scheme, CONFIG, torch.bfloat16, old) == torch.bfloat16
    with pytest.raises(UnsupportedError, match=r"capability 8\.9, A100 is 8\.0: use 'bf16'"):
        find_kv_dtype("fp8", scheme, CONFIG, torch.bfloat16, old)


def test_fp8_pages_go_to_the_host_and_come_back() -> None:
    kv = PagedKV(2, 5, 2, 16, torch.float8_e4m3fn, "cpu", page_size=16)
    for cache in (kv.k, kv.v):
        cache.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(0))
    before = [c.view(torch.uint8).clone() for c in (kv.k, kv.v)]
    saved = kv.save([3, 1])
    assert saved[0].dtype == torch.float8_e4m3fn
    kv.restore([0, 4], saved)
    for cache, old in zip((kv.k, kv.v), before, strict=True):
        now = cache.view(torch.uint8)
        assert torch.equal(now[:, [0, 4, 1, 2, 3]], old[:, [3, 1, 1, 2, 3]])
