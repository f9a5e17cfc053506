"""A fault planted in one op is named, whichever op it is; without a fault nothing is."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from nemotriton.audit import hf
from nemotriton.audit.between import HF_ROUNDINGS
from nemotriton.audit.compare import distance, nudged, row_error
from nemotriton.audit.divergence import Audit, Culprit
from nemotriton.audit.walk import TWINS, Walk
from nemotriton.engine.llm import LLM
from nemotriton.kernels.op import OPS
from nemotriton.model.mamba import MambaMixer
from nemotriton.model.packing import forced_packing
from tests import hf_oracle
from tests.audit.command import invoke, invoke_json

Fault = Callable[..., Any]
TESTED = {"*": "triton"}
IDS = [(37 * i + i * i) % 256 for i in range(30)]
DECODED = 6


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Small matrices: threads only cost."""
    torch.set_num_threads(1)


def ref(name: str) -> Any:
    return OPS[name].ref


def norm_of_one_group(x: Any, z: Any, weight: Any, eps: float, groups: int) -> Any:
    return ref("gated_rms_norm")(x, z, weight, eps, 1)


def norm_without_residual(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    _, total = ref("add_rms_norm")(x, residual, weight, eps)
    return ref("rms_norm")(x, weight, eps).to(x.dtype), total


def larger_eps(x: Any, weight: Any, eps: float) -> Any:
    return ref("rms_norm")(x, weight, 0.01)


def shifted_window(name: str) -> Fault:
    def fault(x: Any, weight: Any, *rest: Any, **named: Any) -> Any:
        return ref(name)(x, weight.roll(1, 1), *rest, **named)

    return fault


def without_skip(name: str) -> Fault:
    def fault(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, *rest: Any, **named: Any) -> Any:
        return ref(name)(x, dt, A, B, C, torch.zeros_like(D), *rest, **named)

    return fault


def narrow_bias(logits: Any, bias: Any, *rest: Any, **named: Any) -> Any:
    return ref("route_experts")(logits, bias.bfloat16().float(), *rest, **named)


def shifted_taps(xBC: Any, dt: Any, z: Any, weight: Any, *rest: Any, **named: Any) -> Any:
    return ref("mamba_step")(xBC, dt, z, weight.roll(1, 1), *rest, **named)


def keys_for_values(k: Any, v: Any, *rest: Any) -> Any:
    return ref("write_kv")(v, k, *rest)


def twice_the_scale(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
    *where, scale, k_scale, v_scale = rest
    return ref("attend_prefill")(q, k, v, *where, 2 * scale, k_scale, v_scale, **named)


def without_the_last_key(
    q: Any, k: Any, v: Any, pages: Any, cu: Any, lengths: Any, *rest: Any, **named: Any
) -> Any:
    return ref("attend_decode")(q, k, v, pages, cu, lengths - 1, *rest, **named)


def even_weights(name: str, at: int) -> Fault:
    def fault(*given: Any) -> Any:
        routing = given[at]
        even = routing._replace(weights=torch.full_like(routing.weights, routing.weights.mean()))
        return ref(name)(*given[:at], even, *given[at + 1 :])

    return fault


def a_column_less(x: Any, weight: Any, *rest: Any, **named: Any) -> Any:
    return ref("matmul")(x[:, :-1], weight[:, :-1], *rest, **named)


def without_scale(x: Any, weight: Any, scale: Any, *rest: Any) -> Any:
    return ref("fp8_matmul")(x, weight, torch.ones_like(scale), *rest)


def transposed_scale(x: Any, weight: Any, scale: Any, *rest: Any) -> Any:
    raw = scale.view(torch.uint8)
    turned = raw.t().reshape(raw.shape).view(scale.dtype)
    return ref("nvfp4_matmul")(x, weight, turned, *rest)


def a_group_off(x: Any, words: Any, *rest: Any) -> Any:
    return ref("packed_matmul")(x.roll(16, 1), words, *rest)


def crossed_gate(x: Any, gate: Any, *rest: Any) -> Any:
    return ref("enter_moe")(x, gate.roll(1, 0), *rest)


def halved_hidden(x: Any, *weights: Any) -> Any:
    entered = ref("enter_moe")(x, *weights)
    assert entered.hidden is not None
    return entered._replace(hidden=entered.hidden * 0.5)


def larger_latent(x: Any, *weights: Any) -> Any:
    entered = ref("enter_moe")(x, *weights)
    return entered._replace(narrow=entered.narrow * 1.5)


def other_bias(logits: Any, bias: Any, *rest: Any) -> Any:
    return ref("share_expert")(logits, bias.roll(1), *rest)


def a_row_off(*given: Any) -> Any:
    *before, down, scale, arrivals = given
    return ref("share_expert")(*before, down.roll(1, 0), scale, arrivals)


def shifted_scales(x: Any, codes: Any, tiles: Any, *rest: Any) -> Any:
    return ref("scaled_matmul")(x, codes, tiles.view(torch.uint8).roll(1).view(tiles.dtype), *rest)


def without_globals(x: Any, codes: Any, tiles: Any, scale: Any, *rest: Any) -> Any:
    return ref("run_experts_scaled")(x, codes, tiles, torch.ones_like(scale), *rest)


# op -> (fault, formats of the model's weights)
FAULTS: dict[str, tuple[Fault, str]] = {
    "rms_norm": (larger_eps, "bf16"),
    "add_rms_norm": (norm_without_residual, "bf16"),
    "gated_rms_norm": (norm_of_one_group, "bf16"),
    "causal_conv1d": (shifted_window("causal_conv1d"), "bf16"),
    "causal_conv1d_update": (shifted_window("causal_conv1d_update"), "bf16"),
    "ssd_prefill": (without_skip("ssd_prefill"), "bf16"),
    "ssm_update": (without_skip("ssm_update"), "bf16"),
    "ssm_replay": (without_skip("ssm_replay"), "bf16"),
    "mamba_step": (shifted_taps, "bf16"),
    "write_kv": (keys_for_values, "bf16"),
    "attend_prefill": (twice_the_scale, "bf16"),
    "attend_decode": (without_the_last_key, "bf16"),
    "route_experts": (narrow_bias, "bf16"),
    "run_experts": (even_weights("run_experts", 3), "bf16"),
    "matmul": (a_column_less, "bf16"),
    "fp8_matmul": (without_scale, "fp8"),
    "run_experts_fp8": (even_weights("run_experts_fp8", 5), "fp8"),
    "nvfp4_matmul": (transposed_scale, "nvfp4"),
    "run_experts_nvfp4": (even_weights("run_experts_nvfp4", 7), "nvfp4"),
    "packed_matmul": (a_group_off, "packed"),
    "run_experts_packed": (even_weights("run_experts_packed", 6), "packed"),
    "enter_moe": (crossed_gate, "super-mixed"),
    "share_expert": (a_row_off, "super-mixed"),
    "scaled_matmul": (shifted_scales, "tiles"),
    "run_experts_scaled": (without_globals, "tiles"),
}
# Not between two hidden states: what picks tokens. Not in these walks: a second way of ssd_prefill.
ELSEWHERE = {"sample_tokens", "verify_drafts", "logit_thresholds", "ssd_prefill_chunked"}
# Launched by other ops for many tokens on a GPU: a fault there is theirs.
WITHIN = {"parts_matmul", "widen_fp8", "widen_packed", "widen_keys"}
# Weights in the form of one architecture, in bf16: of Hopper, of Hopper, of Blackwell.
FORMS = {"packed": "nvfp4", "super-mixed": "super-mixed", "tiles": "nvfp4"}
# One launch does their work where it may.
STEPS = {"causal_conv1d_update", "ssm_update"}


@pytest.fixture(scope="module")
def walks() -> Callable[..., Walk]:
    """Walks through the tiny model by (formats, dtype, rollback), made once each."""
    made: dict[tuple[str, ...], Walk] = {}

    def get(quant: str, dtype: str = "float32", rollback: str = "lanes") -> Walk:
        key = (quant, dtype, rollback)
        if key not in made:
            packed = quant in FORMS
            with forced_packing(True) if packed else nullcontext():
                llm = LLM.synthetic(
                    "tiny",
                    layers=5,  # M*-EM
                    quant=FORMS.get(quant, quant),
                    act_quant=quant == "tiles",
                    dtype="bfloat16" if packed else dtype,
                    rollback=rollback,
                    max_context=64,
                    max_requests=1,
                    device="cpu",
                )
            for name, weight in llm.runner.model.named_tensors().items():
                if name.endswith("correction_bias"):
                    weight.add_(8.0)  # changes no choice, but a bf16 step here is 1/16
            made[key] = Walk.of(llm, IDS, DECODED)
        return made[key]

    return get


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Fault], None]:
    """Stands the twins in for the kernels; call it to plant a fault."""
    for op in OPS.values():
        monkeypatch.setattr(op, "triton", op.ref)

    def plant(name: str, fault: Fault) -> None:
        monkeypatch.setattr(OPS[name], "triton", fault)
        if name in STEPS:
            monkeypatch.setattr(MambaMixer, "_one_launch", lambda *_: False)

    return plant


def audited(walk: Walk) -> tuple[list[Any], Culprit | None]:
    audit = Audit(walk, TESTED, list(walk.chain(TWINS)))
    layers = audit.run()
    return layers, audit.culprit(layers)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, walks: Any, kernels: Any) -> None:
    fault, quant = FAULTS[name]
    walk = walks(quant, "float32", "replay" if name == "ssm_replay" else "lanes")
    kernels(name, fault)
    layers, culprit = audited(walk)
    assert culprit is not None
    assert culprit.ops == [name]
    # the first layer that the op is called in is the first beyond its bound
    assert not any(layer.beyond for layer in layers[: culprit.layer])


@pytest.mark.parametrize("fault", [halved_hidden, larger_latent])
def test_a_fault_in_any_product_that_goes_with_others(
    fault: Fault, walks: Any, kernels: Any
) -> None:
    """The op's twin takes its place, and the other joined op is not blamed."""
    kernels("enter_moe", fault)
    _, culprit = audited(walks("super-mixed"))
    assert culprit is not None
    assert culprit.kind == "moe"
    assert culprit.ops == ["enter_moe"]
    assert "share_expert" in culprit.tried


def test_the_router_of_a_joined_launch_is_seen(walks: Any, kernels: Any) -> None:
    kernels("share_expert", other_bias)
    _, culprit = audited(walks("super-mixed"))
    assert culprit is not None
    assert culprit.boundary == "router"
    assert culprit.ops == ["share_expert"]


@pytest.mark.parametrize(
    "name", ["gated_rms_norm", "causal_conv1d_update", "attend_decode", "route_experts", "matmul"]
)
def test_a_fault_among_16_bit_numbers_is_named(name: str, walks: Any, kernels: Any) -> None:
    kernels(name, FAULTS[name][0])
    _, culprit = audited(walks("bf16", "bfloat16"))
    assert culprit is not None
    assert culprit.ops == [name]


def test_every_op_of_a_layer_has_its_fault() -> None:
    """All but those that no layer calls by themselves: quantisers, and parts of other ops."""
    quantisers = {n for n in OPS if n.startswith(("quantize_", "relu2_")) or "_norm_" in n}
    assert set(OPS) - quantisers - ELSEWHERE - WITHIN == set(FAULTS)


@pytest.mark.parametrize(
    "quant,dtype", [("bf16", "float32"), ("bf16", "bfloat16"), *((form, "") for form in FORMS)]
)
def test_without_a_fault_nothing_is_named(quant: str, dtype: str, walks: Any, kernels: Any) -> None:
    layers, culprit = audited(walks(quant, dtype, "lanes"))
    assert culprit is None
    assert len(layers) == 6
    assert all(layer.worst.error == 0 for layer in layers)
    assert [layer.sets for layer in layers if layer.kind == "moe"] == [0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_no_fault(dtype: str, walks: Any, kernels: Any) -> None:
    """Every op's result a rounding off, and matrices summed in another order."""
    walk = walks("bf16", dtype)

    def rounded(name: str) -> Fault:
        def op(*given: Any, **named: Any) -> Any:
            out = ref(name)(*given, **named)
            if isinstance(out, torch.Tensor):
                floating = out.is_floating_point()
                return nudged(out, torch.finfo(out.dtype).eps if floating else 2.0**-52, 3)
            return out

        return op

    def another_order(x: Any, weight: Any, *rest: Any, **named: Any) -> Any:
        return ref("matmul")(x.flip(1), weight.flip(1), *rest, **named)

    for name, op in OPS.items():
        if name not in ELSEWHERE | WITHIN | {"write_kv", "route_experts", "matmul"}:
            kernels(name, rounded(op.name))
    kernels("matmul", another_order)
    layers, culprit = audited(walk)
    assert culprit is None
    assert max(layer.worst.excess for layer in layers) > 0.02  # and the bounds are not idle


def test_errors_before_a_layer_do_not_count_in_it(walks: Any, kernels: Any) -> None:
    """A fault in the first Mamba layer spreads to all; only layers with that op are beyond."""
    kernels("ssd_prefill", without_skip("ssd_prefill"))
    layers, culprit = audited(walks("bf16"))
    assert culprit is not None
    assert culprit.boundary == "mixer"
    assert all(layer.apart.rms > 0 for layer in layers)
    assert [layer.kind == "mamba" for layer in layers] == [layer.beyond for layer in layers]


def test_sets_of_experts_are_counted(walks: Any, kernels: Any) -> None:
    kernels("route_experts", narrow_bias)
    walk = walks("bf16")
    layers, culprit = audited(walk)
    assert culprit is not None
    assert culprit.boundary == "router"
    first = layers[culprit.layer]
    want = walk.layer(culprit.layer, first_entry(walk, culprit.layer), TWINS)
    mixer = walk.model.blocks[culprit.layer].mixer
    logits = want.at["norm"].float() @ mixer.gate.weight.float().t()
    m, bias = mixer.moe, mixer.gate.e_score_correction_bias
    sets = [
        ref("route_experts")(
            logits, b, m.top_k, m.router_groups, m.top_groups, m.normalize, m.scale
        ).ids
        for b in (bias, bias.bfloat16().float())
    ]
    assert first.own_sets == int((sets[0] != sets[1]).any(-1).sum()) > 1


def first_entry(walk: Walk, index: int) -> Any:
    return list(walk.chain(TWINS))[index].entry


# ---- against transformers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_oracle.save(hf_oracle.build("latent"), tmp_path_factory.mktemp("hf") / "latent")


def against_hf(checkpoint: Path) -> Culprit | None:
    ids = [i % 128 for i in IDS]
    want = hf.trace(checkpoint, ids, torch.float32, "cpu")
    with LLM(checkpoint, dtype="float32", device="cpu", max_context=64, max_requests=1) as llm:
        audit = Audit(Walk.of(llm, ids, DECODED), TESTED, want, HF_ROUNDINGS)
        return audit.culprit(audit.run())


def test_transformers_agrees(checkpoint: Path, kernels: Any) -> None:
    assert against_hf(checkpoint) is None


@pytest.mark.parametrize("name", ["gated_rms_norm", "route_experts", "attend_decode"])
def test_a_fault_is_named_against_transformers(name: str, checkpoint: Path, kernels: Any) -> None:
    fault = FAULTS[name][0]
    if name == "route_experts":
        fault = lambda logits, bias, *rest, **named: ref(name)(logits, -bias, *rest, **named)  # noqa: E731
    kernels(name, fault)
    culprit = against_hf(checkpoint)
    assert culprit is not None
    assert culprit.ops == [name]


def test_what_twins_share_is_no_op(
    checkpoint: Path, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in kernel and twin alike: the layer is named, and that it is none of the ops."""
    honest = OPS["gated_rms_norm"].ref

    def wrong(x: Any, z: Any, weight: Any, eps: float, groups: int) -> Any:
        return honest(x, z, weight, eps, 1)

    for way in ("ref", "triton"):
        monkeypatch.setattr(OPS["gated_rms_norm"], way, wrong)
    culprit = against_hf(checkpoint)
    assert culprit is not None
    assert culprit.kind == "mamba"
    assert culprit.ops == []


def test_the_command_compares_with_transformers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("divergence", str(checkpoint), "--against", "hf", "--dtype", "float32")
    args = (*args, "--device", "cpu", "--tokens", "20", "-p", "SIX CAPITALS")
    code, found = invoke_json(*args)
    assert code == 0
    assert found["culprit"] is None
    assert found["tokens"] == 13
    assert [layer["kind"] for layer in found["layers"]][:3] == ["mamba", "attention", "mlp"]
    honest = OPS["causal_conv1d"].ref
    monkeypatch.setattr(
        OPS["causal_conv1d"], "ref", lambda x, weight, *rest: honest(x, weight.roll(1, 1), *rest)
    )
    code, out, err = invoke(*args)
    assert code == 1
    assert "transformers" not in err.replace(str(checkpoint), "")
    assert "Loading weights" not in err
    assert "layer 0 (mamba) is the first beyond its bound, at: mixer" in out
    assert "op: none; the twins are as far off" in out


# ---- the numbers


def test_distances() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    b = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    found = distance(b, a)
    assert found.rms == pytest.approx(0.8)
    assert found.largest == 4.0
    assert found.cosine == pytest.approx(0.6)
    assert row_error(b, a) == pytest.approx(0.8)
    assert row_error(b, a, torch.tensor([False, True])) == 0.0
    assert row_error(torch.full_like(a, torch.nan), a) == torch.inf
    assert float((nudged(a, 2**-7, 0) - a).abs().max()) <= 4 * 2**-7
