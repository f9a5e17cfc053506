"""Where a model comes from: files, a hub id, or random weights of a preset; and onto the device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nemotriton import device as devices
from nemotriton.engine.caches import Caches, MambaStates, PagedKV
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.graphs import Capture, CudaGraphs
from nemotriton.engine.plan import CachePlan, Wishes, cache_layers, make_plan
from nemotriton.engine.precision import (
    Dtype,
    context_notes,
    find_kv_dtype,
    find_state_format,
    kv_notes,
    packing_notes,
    state_notes,
    weight_notes,
)
from nemotriton.engine.replay import ReplayStates, find_rollback, places_for
from nemotriton.engine.team import Team
from nemotriton.errors import CheckpointError, ConfigError, UnsupportedError, require
from nemotriton.kernels import StateFormat
from nemotriton.model import checkpoint, synth
from nemotriton.model.config import LayerKind, ModelConfig
from nemotriton.model.expected import Expected, expected
from nemotriton.model.formats import UNQUANTISED, ActQuant, QuantScheme
from nemotriton.model.load_plan import LoadPlan
from nemotriton.model.nemotron_h import NemotronH
from nemotriton.model.packing import padding_bytes, widened_bytes
from nemotriton.model.parallel import ONE, Shard, local_expected
from nemotriton.model.release_schemes import release_scheme
from nemotriton.model.sources import fingerprint

EMBEDDED = Path(__file__).parents[1] / "tiny"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_SHOWN = 5
_OTHERS = (
    "the weights of another LLM stay as they are: give its dtype and device, one GPU, and drafts "
    "only where it had some."
)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights before they are anywhere: what they are, and how to place them.

    place(model, progress): writes them into the model's own tensors. directory: where tokenizer
    files may be, None for a preset. scheme: the formats of `expected`; act_quant: where
    activations are quantised too. mark: tells other weights of the same shapes apart. model: that
    has them already.
    """

    config: ModelConfig
    directory: Path | None
    expected: dict[str, Expected]
    place: Callable[[NemotronH, Progress | None], None]
    notes: tuple[str, ...] = ()
    scheme: QuantScheme = UNQUANTISED
    act_quant: ActQuant = False
    mark: str = ""
    model: NemotronH | None = None

    def __post_init__(self) -> None:
        known = self.act_quant in (False, True, "fp8")
        require(known, f'act_quant={self.act_quant!r}: use False, True or "fp8"', ConfigError)


def stored_weights(
    model: str | Path,
    revision: str | None,
    offline: bool,
    act_quant: ActQuant = False,
    drafting: bool = False,
) -> Weights:
    """Weights of a checkpoint directory, Hugging Face id or "preset:tiny", the model inside the
    package; only headers are read here.

    drafting: with the MTP block. CheckpointError or ConfigError as their readers raise them, or
    where there is no whole block.
    """
    name = str(model).removeprefix("preset:")
    if name != str(model):
        ModelConfig.preset(name)  # an unknown name is the likelier mistake
        if name != EMBEDDED.name:
            raise CheckpointError(
                f"{model} names a configuration and has no weights: LLM.synthetic({name!r}) draws "
                "random ones."
            )
        model = EMBEDDED
    directory = checkpoint.find_checkpoint(model, revision, offline)
    config = ModelConfig.from_json(directory)
    source = checkpoint.open_source(directory)
    plan = checkpoint.make_plan(source, config, mtp=drafting, act_quant=act_quant)
    if drafting:
        _check_block(plan, str(model))

    def place(model: NemotronH, progress: Progress | None) -> None:
        tensors = model.named_tensors()
        plan.check_model(tensors)
        own = plan.sliced(model.shard.parts(config, plan.expected))
        checkpoint.load(source, own, tensors.__getitem__, progress)

    wanted = dict(plan.expected)
    mark = fingerprint(source)
    return Weights(config, directory, wanted, place, plan.notes, plan.scheme, act_quant, mark)


def random_weights(
    model: str | Path,
    seed: int,
    layers: int | None = None,
    width_scale: float | None = None,
    quant: str = "bf16",
    act_quant: ActQuant = False,
    drafting: bool = False,
) -> Weights:
    """Seeded random weights of a preset, or of a directory's config.json, whole or cut down.

    quant: the mix of formats, see `release_scheme`. drafting: with the MTP block; ConfigError where
    the configuration has none.
    """
    path = Path(model).expanduser()
    directory = path if path.is_dir() else None
    name = str(model).removeprefix("preset:")
    config = ModelConfig.from_json(path) if directory else ModelConfig.preset(name)
    config = config.cut(layers, width_scale)
    require(
        not drafting or config.mtp is not None,
        f"{config.name} has no MTP block (num_nextn_predict_layers), which drafts come from: use "
        "drafts=0, or a model that has one.",
        ConfigError,
    )
    scheme = release_scheme(config, quant)

    def place(model: NemotronH, progress: Progress | None) -> None:
        tensors = model.named_tensors()
        total, done = sum(t.nbytes for t in tensors.values()), 0
        kept = model.shard.parts(config, wanted)
        parts = {key: (wanted[key].shape, part) for key, part in kept.items()}
        for key, tensor in tensors.items():
            synth.fill(config, {key: tensor}, seed, parts=parts)
            done += tensor.nbytes
            if progress is not None:
                progress(done, total, key)

    wanted = expected(config, scheme, mtp_blocks=int(drafting))
    return Weights(config, directory, wanted, place, (), scheme, act_quant, f"seed {seed}")


def embedded_weights(act_quant: ActQuant = False, drafting: bool = False) -> Weights:
    """The model inside the package, small and trained."""
    return stored_weights(EMBEDDED, None, True, act_quant, drafting)


def _check_block(plan: LoadPlan, name: str) -> None:
    """Raise CheckpointError unless the files hold one whole MTP block."""
    if plan.mtp == "complete" and plan.mtp_blocks == 1:
        return
    lacking = plan.mtp_missing
    shown = ", ".join(lacking[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
    problems = {
        "none": "config.json declares none (num_nextn_predict_layers)",
        "absent": "config.json declares one, but the files hold no mtp.* tensor",
        "partial": f"{len(lacking)} of its tensors are absent: {shown}",
        "complete": f"there are {plan.mtp_blocks}, and drafting by several is not supported",
    }
    raise CheckpointError(
        f"drafts come from an MTP block, and of {name} {problems[plan.mtp]}: use drafts=0, or a "
        "checkpoint with the whole block."
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of which machine; None leaves it to the plan. memory: share of what is free."""

    device: str | torch.device | None
    dtype: Dtype
    state_dtype: Dtype
    max_context: int | None
    max_requests: int | None
    prefill_piece: int | None
    shape: DraftShape | None  # of the drafts of a step; None = no drafts
    memory: float
    kv_dtype: str | None = None
    rollback: str | None = None
    invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("max_context", "max_requests", "prefill_piece"):
            value = getattr(self, name)
            is_size = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not is_size:
                raise ConfigError(f"{name}={value!r}: use a number >= 1, or None.")
        if not (isinstance(self.memory, int | float) and 0 < self.memory <= 1):
            raise ConfigError(f"memory={self.memory!r}: use a share of the free memory in (0, 1].")


Recipe = Callable[[], Weights]


@dataclass(frozen=True, slots=True)
class Work:
    """All that an LLM was asked for; another process can be given it. weights: makes them."""

    weights: Recipe
    limits: Limits
    seed: int
    impl: str | Mapping[str, str] | None
    adapt_drafts: bool
    graphs: bool | None
    tp: int = 1
    ep: int = 1

    def facts(self, weights: Weights) -> dict[str, str]:
        """What has to be equal on all ranks, by the name that a person would look for."""
        config = json.dumps(weights.config.to_json(), sort_keys=True)
        formats = sorted((name, str(entry)) for name, entry in weights.expected.items())
        asked = (replace(self.limits, device=None), self.seed, self.impl, self.graphs, self.tp)
        return {
            "the program": _program(),
            "the version of torch": torch.__version__,
            "config.json": _letters(config),
            "the formats of the weights": _letters(repr((formats, weights.act_quant))),
            "the mark of the weights": weights.mark,
            "the options": _letters(repr((*asked, self.adapt_drafts))),
        }


def _letters(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _program() -> str:
    """Of the package's own files."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return _letters("".join(file.read_text(encoding="utf-8") for file in files))


@dataclass(frozen=True, slots=True)
class Placed:
    """A model on its device with its caches, ready to run; notes: what runs in which format."""

    model: NemotronH
    caches: Caches
    plan: CachePlan
    prefill_piece: int
    grain: int  # prompts are cut at multiples of it
    device: torch.device
    dtype: torch.dtype
    notes: tuple[str, ...]


def place(
    weights: Weights,
    limits: Limits,
    progress: Progress | None = None,
    capture: Capture | None = None,
    team: Team | None = None,
) -> Placed:
    """Plan, then build, fill and allocate; CapacityError before anything is loaded.

    capture: what will record decode steps, which need a page of their own. team: the processes
    that share the model, of which each makes its part.
    """
    whole, shard = weights.config, team.shard if team is not None else ONE
    config = shard.local(whole)
    last = replace(shard, rank=shard.ranks - 1)  # who holds most; all plan as it does
    own = local_expected(weights.expected, last.parts(whole, weights.expected))
    device = find_device(limits.device)
    dtype = find_dtype("dtype", limits.dtype, config.dtype)
    states = find_state_format(limits.state_dtype, config)
    scheme, act_quant = weights.scheme, weights.act_quant
    kv_dtype = find_kv_dtype(limits.kv_dtype, scheme, config, dtype, device)
    piece = limits.prefill_piece or (8192 if device.type == "cuda" else 512)
    piece, grain = find_grain(piece, config, states, limits.invariant, shard.ranks)
    items = (dtype.itemsize, states.dtype.itemsize, kv_dtype.itemsize)
    drafts = len(limits.shape or ())
    spare = int(capture is not None)
    options = len(limits.shape.options) if limits.shape is not None else 1
    graphs = options if isinstance(capture, CudaGraphs) else 0
    asked = (limits.rollback, limits.shape, device, limits.invariant, limits.max_requests, states)
    rollback = find_rollback(*asked)
    places = places_for(limits.shape) if rollback == "replay" else 0
    more = (spare, graphs, states.row_bytes(0), places, widened_bytes(own, dtype))
    wishes = Wishes(limits.max_context, limits.max_requests, piece, drafts, *items, *more)
    plan = make_plan(
        last.local(whole),
        wishes,
        weights=_bytes_to_come(weights, own, dtype, device),
        available=_available(limits, device, team),
        where=f"{'each ' * (shard.ranks > 1)}{devices.info(device).name} "
        f"(memory={limits.memory:g})",
    )
    model = _model(weights, config, dtype, device, drafts > 0, shard, progress)
    caches = make_caches(
        *(config, plan, dtype, states, device, limits.shape, kv_dtype, spare, rollback)
    )
    notes = (
        *weight_notes(weights.expected, scheme, act_quant, dtype, device),
        *packing_notes(model),
        *kv_notes(limits.kv_dtype, scheme, weights.expected, kv_dtype),
        *state_notes(limits.state_dtype, whole, states),
        *_rank_notes(shard, plan),
        *context_notes(limits.max_context, whole),
    )
    return Placed(model, caches, plan, piece, grain, device, dtype, notes)


def _bytes_to_come(
    weights: Weights, own: Mapping[str, Expected], dtype: torch.dtype, device: torch.device
) -> int:
    """What weights will take of the memory that is free now."""
    if weights.model is not None:
        return 0
    size = sum(entry.nbytes(dtype.itemsize) for entry in own.values())
    return size + padding_bytes(own, weights.act_quant, dtype, device)


def _model(
    weights: Weights,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    drafting: bool,
    shard: Shard,
    progress: Progress | None,
) -> NemotronH:
    """The model with its weights in place; ConfigError where those of another LLM do not suit."""
    model = weights.model
    if model is not None:
        same = (model.dtype, model.device, model.shard) == (dtype, device, shard)
        require(same and (not drafting or model.mtp is not None), _OTHERS, ConfigError)
        return model
    model = NemotronH(config, dtype, device, weights.scheme, weights.act_quant, drafting, shard)
    weights.place(model, progress)
    model.prepare()
    return model


def find_grain(
    piece: int, config: ModelConfig, states: StateFormat, invariant: bool, ranks: int = 1
) -> tuple[int, int]:
    """Prompt tokens a step, and the tokens of which the pieces of a prompt are multiples.

    The invariant mode cuts prompts on their own grid of SSD chunks. A state in fewer than 32 bits
    is rounded where a piece ends: there all pieces but the last are of the one size.
    UnsupportedError for the mode on several ranks."""
    require(
        ranks == 1 or not invariant,
        "invariant=True is for one GPU: sums over several depend on how many rows they are of.",
    )
    if not invariant or config.mamba is None:
        return piece, 1
    chunk = config.mamba.chunk
    piece = max(piece - piece % chunk, chunk)
    return piece, chunk if states.dtype == torch.float32 else piece


def _available(limits: Limits, device: torch.device, team: Team | None) -> int:
    """Bytes to plan with: what the rank with least has, for all plan alike."""
    own = int(limits.memory * devices.free_memory(device))
    if team is None:
        return own
    return team.least(own if device.type == "cuda" else own // team.shard.ranks)


def _rank_notes(shard: Shard, plan: CachePlan) -> list[str]:
    if shard.ranks == 1:
        return []
    return [
        f"{shard.ranks} ranks, tp={shard.tp} ep={shard.ep}; each holds {plan.weights / 2**20:,.1f} "
        "MiB of weights, and the memory of one is shown"
    ]


def make_caches(
    config: ModelConfig,
    plan: CachePlan,
    dtype: torch.dtype,
    states: StateFormat,
    device: torch.device,
    shape: DraftShape | None,
    kv_dtype: torch.dtype | None = None,
    spare: int = 0,
    rollback: str = "lanes",
) -> Caches:
    """Allocate what the plan says, and `spare` pages behind it; kv_dtype None is `dtype`."""
    kv: PagedKV | None = None
    mamba: MambaStates | None = None
    drafts = len(shape or ())
    if plan.pages and config.attention is not None:
        layers = cache_layers(config, LayerKind.ATTENTION, drafts)
        a = config.attention
        pages = plan.pages + spare
        kv = PagedKV(layers, pages, a.kv_heads, a.head_dim, kv_dtype or dtype, device)
    if plan.slots and config.mamba is not None:
        layers = cache_layers(config, LayerKind.MAMBA, drafts)
        pool = (config.mamba, layers, plan.slots, dtype, device, states)
        if rollback == "replay":
            mamba = ReplayStates(*pool, shape)
        else:
            mamba = MambaStates(*pool, lanes=drafts + 1)
    return Caches(kv, mamba)


def find_device(wanted: str | torch.device | None) -> torch.device:
    """The device asked for, or a GPU if there is one; UnsupportedError if it is not there."""
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UnsupportedError(f"device={wanted!r} is unknown: use cuda, cuda:1 or cpu.") from None
    require(device.type in ("cuda", "cpu"), f"device={wanted!r}: use cuda, cuda:1 or cpu.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        require(
            index < count,
            f"device={str(wanted)!r}, but there are {count} CUDA devices: use device='cpu'"
            + (f" or cuda:0 .. cuda:{count - 1}." if count else "."),
        )
        device = torch.device("cuda", index)
    return device


def find_dtype(name: str, wanted: Dtype, default: str) -> torch.dtype:
    """A dtype by torch's name; None or "auto" is the checkpoint's. ConfigError otherwise."""
    if wanted is None or wanted == "auto":
        wanted = default
    dtype = DTYPES.get(wanted) if isinstance(wanted, str) else wanted
    if dtype not in DTYPES.values():
        raise ConfigError(f"{name}={wanted!r}: use one of {', '.join(DTYPES)}.")
    assert isinstance(dtype, torch.dtype)
    return dtype
