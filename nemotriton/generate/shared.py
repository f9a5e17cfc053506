"""The options that every door has: which weights, and how much of the machine."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from nemotriton.generate import options as o

_HINTS: dict[str, tuple[Any, object]] = {
    "synthetic": (o.Synthetic, None),
    "layers": (o.Layers, None),
    "width_scale": (o.WidthScale, None),
    "quant": (o.Quant, None),
    "dtype": (o.Dtype, None),
    "revision": (o.Revision, None),
    "offline": (o.Offline, False),
    "device": (o.Device, None),
    "tp": (o.Tp, 1),
    "ep": (o.Ep, 1),
    "memory": (o.Memory, 0.9),
    "max_context": (o.MaxContext, None),
    "max_requests": (o.MaxRequests, None),
    "prefill_piece": (o.PrefillPiece, None),
    "state_dtype": (o.StateDtype, None),
    "kv_dtype": (o.KvDtype, None),
    "act_quant": (o.ActQuant, False),
    "act_quant_fp8": (o.ActQuantFp8, False),
    "impl": (o.Impl, None),
    "drafts": (o.Drafts, 0),
    "tree": (o.Tree, None),
    "adapt_drafts": (o.AdaptDrafts, True),
    "graphs": (o.Graphs, None),
    "rollback": (o.Rollback, None),
    "invariant": (o.Invariant, False),
}


class with_model:
    """A command that also takes the options of weights and machine; it finds them in its context.

    They come behind its own ones in `--help`, which sorts by group anyway.
    """

    def __init__(self, command: Callable[..., None]) -> None:
        functools.update_wrapper(self, command)
        own = inspect.signature(command)
        self._command, self._own = command, tuple(own.parameters)
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=hint
            )
            for name, (hint, default) in _HINTS.items()
        ]
        self.__signature__ = own.replace(parameters=[*own.parameters.values(), *shared])
        hints = {name: hint for name, (hint, _) in _HINTS.items()}
        self.__annotations__ = command.__annotations__ | hints

    def __call__(self, **given: Any) -> None:
        self._command(**{name: given[name] for name in self._own})
