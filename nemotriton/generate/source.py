"""Which model, and how much of the machine: what can be checked before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nemotriton.commandline import UsageError
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.errors import nearest
from nemotriton.model.formats import ActQuant
from nemotriton.model.layer_config import STATE_DTYPES
from nemotriton.model.presets import PRESETS
from nemotriton.model.release_schemes import QUANTS

_DTYPES = ("bfloat16", "float16", "float32")
_KV_DTYPES = ("auto", "bf16", "fp8")
_ROLLBACKS = ("auto", "lanes", "replay")


@dataclass(frozen=True)
class Source:
    """A directory, a Hugging Face id or `preset:NAME`; random weights where `synthetic` is a seed.

    No `model` is the embedded one, as is `preset:tiny`. `quant`: the formats of random weights.
    """

    model: str | None
    synthetic: int | None
    layers: int | None
    width_scale: float | None
    dtype: str | None
    revision: str | None
    offline: bool
    quant: str | None = None

    def __post_init__(self) -> None:
        if len((self.model or "").split()) > 1 and not Path(self.model or "").exists():
            raise UsageError(f"there is no model {self.model!r}: a prompt goes behind -p.")
        if self.preset is not None:
            _known_preset(self.preset)
            if self.synthetic is None and not self.embedded:
                raise UsageError(f"{self.model} has no weights: add --synthetic for random ones.")
        for flag, value in (("--layers", self.layers), ("--width-scale", self.width_scale)):
            if value is None:
                continue
            if self.synthetic is None:
                raise UsageError(f"{flag} would cut real weights up: add --synthetic.")
            if value <= 0:
                raise UsageError(f"{flag} {value} is not above 0.")
        if self.width_scale is not None and self.width_scale > 1:
            raise UsageError(f"--width-scale {self.width_scale} is above 1.")
        if self.quant is not None and self.synthetic is None:
            raise UsageError("--quant is for random weights: add --synthetic.")
        _one_of("--quant", self.quant, (*QUANTS, "release"))
        on_disk = self.model is None or self.preset is not None or Path(self.model).is_dir()
        if self.revision is not None and on_disk:
            raise UsageError("--revision is for a Hugging Face id; this model is on the disk.")
        _one_of("--dtype", self.dtype, _DTYPES)

    @property
    def embedded(self) -> bool:
        """Whether it is the model inside the package."""
        return is_embedded(self.model)

    @property
    def preset(self) -> str | None:
        """NAME of `preset:NAME`."""
        if self.model is not None and self.model.startswith("preset:"):
            return self.model.removeprefix("preset:")
        return None


@dataclass(frozen=True)
class Machine:
    """Limits of the run; None leaves it to the engine. `impl`: op name or * -> ref or triton.

    drafts, tree, adapt_drafts, graphs, rollback, tp, ep, invariant: see `LLM`. act_quant,
    act_quant_fp8: everywhere, or at FP8 matrices alone.
    """

    device: str | None
    memory: float
    max_context: int | None
    max_requests: int | None
    prefill_piece: int | None
    state_dtype: str | None
    impl: dict[str, str]
    kv_dtype: str | None = None
    act_quant: bool = False
    act_quant_fp8: bool = False
    drafts: int = 0
    tree: str | None = None
    adapt_drafts: bool = True
    graphs: bool | None = None
    rollback: str | None = None
    tp: int = 1
    ep: int = 1
    invariant: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.memory <= 1:
            raise UsageError(f"--memory {self.memory:g} is no share: give a number in (0, 1].")
        for name in ("max_context", "max_requests", "prefill_piece", "tp", "ep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} is not above 0.")
        _one_of("--state-dtype", self.state_dtype, ("auto", *STATE_DTYPES))
        _one_of("--kv-dtype", self.kv_dtype, _KV_DTYPES)
        _one_of("--rollback", self.rollback, _ROLLBACKS)
        if self.act_quant and self.act_quant_fp8:
            raise UsageError("--act-quant does what --act-quant-fp8 does, and more: give one.")
        DraftShape.wanted(self.drafts, self.tree)

    @property
    def quantised_activations(self) -> ActQuant:
        """act_quant of `LLM`."""
        return "fp8" if self.act_quant_fp8 else self.act_quant


def is_embedded(model: str | None) -> bool:
    """Whether a command line's model is the one inside the package."""
    return model in (None, "preset:tiny")


def source_of(given: Mapping[str, Any]) -> Source:
    """The model that the command line's options, by name, ask for."""
    return Source(**{f.name: given[f.name] for f in fields(Source)})


def machine_of(given: Mapping[str, Any]) -> Machine:
    """The limits that they ask for."""
    named = {f.name: given[f.name] for f in fields(Machine)}
    return Machine(**named | {"impl": implementations(given["impl"])})


def implementations(choices: list[str] | None) -> dict[str, str]:
    """`ref`, `triton`, `OP=ref`, `OP=triton` (later ones win) as kernels.op.use takes them; the
    scan of prefill has a third implementation, `ssd_prefill=chunked`."""
    found: dict[str, str] = {}
    for choice in choices or ():
        op, equals, name = choice.rpartition("=")
        known = name in ("ref", "triton") and bool(op or not equals)
        if not known and choice != "ssd_prefill=chunked":
            raise UsageError(
                f"--impl {choice}: give ref, triton, OP=ref, OP=triton or ssd_prefill=chunked."
            )
        found[op or "*"] = name
    return found


def _known_preset(name: str) -> None:
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        hint = f" Did you mean preset:{near}?" if near else ""
        raise UsageError(f"no preset {name!r}.{hint} There are {', '.join(PRESETS)}.")


def _one_of(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UsageError(f"{flag} {value}: give one of {', '.join(choices)}.")
