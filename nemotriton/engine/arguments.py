"""What callers of an LLM may spell in several ways or leave open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError, require
from nemotriton.kernels.op import INTERPRET, use
from nemotriton.text.chat import ChatPrompt
from nemotriton.text.generation_config import GenerationConfig

Impl = str | Mapping[str, str] | None


def many(prompts: Any) -> Sequence[Any]:
    """A list of prompts, whether one or many were given."""
    if isinstance(prompts, str | ChatPrompt):
        return [prompts]
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes)
    kind = type(prompts).__name__
    require(is_list, f"prompts of type {kind}: give a text, token ids or a list.", RequestError)
    one = bool(prompts) and all(isinstance(p, int) for p in prompts)
    return [prompts] if one else prompts


def default_params(checkpoint: GenerationConfig) -> SamplingParams:
    """What generation_config.json says, and our defaults for the rest."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    stated = {n: v for n in names if (v := getattr(checkpoint, n)) is not None}
    return SamplingParams(**stated)


def implementations(impl: Impl, device: torch.device) -> Mapping[str, str]:
    """ "ref", "triton" or a mapping, as `use` takes it; UnsupportedError for what cannot be."""
    forced = {"*": impl} if isinstance(impl, str) else dict(impl or {})
    with use(forced):
        can_launch = device.type == "cuda" or INTERPRET
    require(
        can_launch or "triton" not in forced.values(),
        f"impl={impl!r} needs a GPU (or TRITON_INTERPRET=1), but the device is {device}: use "
        "impl='ref'.",
    )
    return forced
