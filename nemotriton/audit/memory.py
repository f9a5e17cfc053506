"""What fits on a GPU that is not here: the plan an engine would make there (`engine.plan`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nemotriton.audit.gpus import Gpu
from nemotriton.audit.headers import open_headers
from nemotriton.audit.report import table
from nemotriton.commandline import as_typed
from nemotriton.console import bytes_text
from nemotriton.engine.caches import PAGE_SIZE
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.engine.loading import find_dtype
from nemotriton.engine.plan import CachePlan, Wishes, largest, make_plan, pages_for
from nemotriton.engine.precision import find_kv_dtype, find_state_format
from nemotriton.engine.replay import find_rollback, places_for
from nemotriton.errors import CapacityError, ConfigError
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import Expected, expected
from nemotriton.model.formats import QuantScheme
from nemotriton.model.load_plan import make_plan as plan_load
from nemotriton.model.packing import forced_packing, padding_bytes, widened_bytes
from nemotriton.model.parallel import Shard, local_expected
from nemotriton.model.presets import PRESETS
from nemotriton.model.release_schemes import release_scheme

_MOST = 4096  # requests that are tried
_CONTEXTS = (4096, 32768, 131072)
_HOPPER = 9


@dataclass(frozen=True, slots=True)
class Stored:
    """A model as it would be held: its tensors in the formats of `scheme`.

    config, expected: of what one of `ranks` GPUs holds; parameters: of the whole model."""

    config: ModelConfig
    expected: dict[str, Expected]
    scheme: QuantScheme
    formats: str
    parameters: int
    ranks: int = 1

    def cut(self, tp: int, ep: int) -> Stored:
        """What the fullest of tp * ep GPUs holds, see `model.parallel`; ConfigError where the model
        cannot be cut so."""
        ranks = Shard(0, tp, ep).ranks
        last = Shard(ranks - 1, tp, ep)
        own = local_expected(self.expected, last.parts(self.config, self.expected))
        return replace(self, config=last.local(self.config), expected=own, ranks=ranks)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What it shall serve; None leaves it to the plan."""

    context: int | None
    requests: int | None
    drafts: int = 0
    share: float = 0.9  # of the GPU's memory
    dtype: str | None = None
    state_dtype: str | None = None
    kv_dtype: str | None = None
    piece: int = 8192  # tokens of a prompt a step, as the engine takes on a GPU


def stored(model: str, quant: str, drafts: bool, revision: str | None, offline: bool) -> Stored:
    """A preset in the formats `quant`, or a checkpoint in its own (headers only).

    A directory that has a config.json and no weights is taken as a preset is."""
    name = model.removeprefix("preset:")
    bare = Path(model).is_dir() and not any(Path(model).glob("*.safetensors"))
    if model.startswith("preset:") or name in PRESETS or bare:
        config = ModelConfig.from_json(Path(model)) if bare else ModelConfig.preset(name)
        if drafts and config.mtp is None:
            raise ConfigError(
                f"{config.name} has no MTP block, which drafts come from: --drafts 0."
            )
        scheme = release_scheme(config, quant)
        size = config.parameter_count()
        return Stored(config, expected(config, scheme, int(drafts)), scheme, quant, size)
    source = open_headers(model, revision, offline)
    config = ModelConfig.from_json(source.directory)
    plan = plan_load(source, config, mtp=drafts)
    size = config.parameter_count()
    return Stored(config, dict(plan.expected), plan.scheme, "as stored", size)


@dataclass(frozen=True)
class _Place:
    """A model beside a GPU: plans for any wishes."""

    model: Stored
    gpu: Gpu
    wanted: Wanted

    def plan(self, context: int | None, requests: int | None) -> CachePlan:
        """CapacityError where that does not fit."""
        config, wanted = self.model.config, self.wanted
        dtype = find_dtype("dtype", wanted.dtype, config.dtype)
        states = find_state_format(wanted.state_dtype, config)
        nowhere = torch.device("cpu")  # it takes e4m3, as every GPU since 8.9
        kv = find_kv_dtype(wanted.kv_dtype, self.model.scheme, config, dtype, nowhere)
        shape = DraftShape.wanted(wanted.drafts, None)
        gpu = torch.device("cuda")
        rollback = find_rollback(None, shape, gpu, requests=requests, states=states)
        wishes = Wishes(
            context,
            requests,
            wanted.piece,
            wanted.drafts,
            dtype.itemsize,
            states.dtype.itemsize,
            kv.itemsize,
            spare_pages=1,
            graphs=len(shape.options) if shape is not None else 1,
            state_scale=states.row_bytes(0),
            ring_places=places_for(shape) if rollback == "replay" else 0,
            widened=widened_bytes(self.model.expected, dtype),
        )
        return make_plan(
            config,
            wishes,
            weights=self.weights(dtype),
            available=int(wanted.share * self.gpu.memory),
            where=f"{self.gpu.name} (memory={wanted.share:g})",
        )

    def weights(self, dtype: torch.dtype) -> int:
        """As `engine.loading.place` counts them."""
        tensors = self.model.expected
        size = sum(entry.nbytes(dtype.itemsize) for entry in tensors.values())
        with forced_packing(self.gpu.capability[0] == _HOPPER):
            return size + padding_bytes(tensors, False, dtype, torch.device("cpu"))

    def whole(self, context: int, requests: int) -> bool:
        """Whether so many requests fit with their whole contexts in the cache at once."""
        try:
            plan = self.plan(context, requests)
        except CapacityError:
            return False
        return not plan.pages or plan.pages >= requests * pages_for(context)


def what_fits(model: Stored, gpu: Gpu, wanted: Wanted) -> dict[str, Any]:
    """The plan for what is wanted, or why there is none, and the most that fits beside it."""
    config, place = model.config, _Place(model, gpu, wanted)
    context = wanted.context
    found: dict[str, Any] = {
        "model": config.name,
        "formats": model.formats,
        "gpu": gpu.name,
        "available": int(wanted.share * gpu.memory),
        "ranks": model.ranks,
        "parameters": model.parameters,
        "fits": True,
        "problem": None,
    }
    try:
        plan = place.plan(context, wanted.requests)
        found |= _of_plan(plan)
    except CapacityError as problem:
        found |= {"fits": False, "problem": str(problem)}
    asked = (*_CONTEXTS, context or 0, config.max_context)
    contexts = sorted({n for n in asked if 0 < n <= max(config.max_context, context or 0)})
    found["most_requests"] = {
        n: largest(lambda r, n=n: place.whole(n, r), 1, _MOST) or 0  # type: ignore[misc]
        for n in contexts
    }
    return found


def _of_plan(plan: CachePlan) -> dict[str, Any]:
    tokens = plan.pages * PAGE_SIZE
    whole = not plan.pages or plan.pages >= plan.max_requests * pages_for(plan.max_context)
    return {
        "context": plan.max_context,
        "requests": plan.max_requests,
        "parts": plan.parts(),
        "kv_tokens": tokens if plan.pages else None,
        "all_at_once": whole,
    }


def as_lines(found: dict[str, Any]) -> Iterable[str]:
    """The result as text."""
    several = f"{found['ranks']} x " * (found["ranks"] > 1)
    yield f"{found['model']} ({found['formats']}) on {several}{found['gpu']}"
    yield f"{bytes_text(found['available'])} to divide" + ", of each" * bool(several)
    if found["fits"]:
        parts = ((name, bytes_text(size)) for name, size in found["parts"].items())
        yield from table(("part", "bytes"), parts)
        room = f"fits: {found['requests']} requests of up to {found['context']:,} tokens"
        if not found["all_at_once"]:
            room += f"; {found['kv_tokens']:,} tokens in the cache at a time, the others wait"
        yield room
    else:
        yield f"does not fit: {as_typed(found['problem'])}"
    rows = ((f"{n:,}", most or "none") for n, most in found["most_requests"].items())
    yield from table(("context", "requests at once"), rows, left=0)
