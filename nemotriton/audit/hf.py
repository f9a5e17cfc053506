"""The same tokens through transformers' own Nemotron-H, as passes of a `Walk`.

Its modules are hooked, not changed, but for one thing: its chunked scan clamps the time step at
`time_step_min`, which the released models do not mean; the limit becomes (0, inf).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemotriton.audit.walk import Entry, Passed, dense
from nemotriton.errors import UnsupportedError


@torch.no_grad()
def trace(directory: Path, ids: Sequence[int], dtype: torch.dtype, device: str) -> list[Passed]:
    """One pass a layer, then the head's; the model is loaded, run once and dropped.

    UnsupportedError where this transformers cannot load the checkpoint."""
    with _silent():
        model = _load(directory, dtype, device)
        tape = _Tape(model)
        try:
            out = model(torch.tensor([list(ids)], device=device), use_cache=False)
        finally:
            tape.close()
    return tape.passes(out.logits[0].float())


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' progress bars and its notes on packages that would make it faster."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load(directory: Path, dtype: torch.dtype, device: str) -> Any:
    from transformers import NemotronHForCausalLM

    try:
        model = NemotronHForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(device)
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as problem:
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise UnsupportedError(
            f"transformers cannot load {directory} ({reason}): use --against ref."
        ) from problem
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return model


class _Tape:
    """What passes the hooked boundaries."""

    def __init__(self, model: Any) -> None:
        self.layers: list[dict[str, Any]] = []
        self.experts: list[int] = []
        self.final: list[Tensor] = []
        self._hooks = [
            model.model.norm_f.register_forward_hook(lambda _m, _i, out: self._last(out))
        ]
        for layer in model.model.layers:
            found: dict[str, Any] = {}
            self.layers.append(found)
            self._hooks.append(
                layer.register_forward_pre_hook(self._first(found), with_kwargs=True)
            )
            for name, module in (("norm", layer.norm), ("mixer", layer.mixer)):
                self._hooks.append(module.register_forward_hook(self._keep(found, name)))
            gate = getattr(layer.mixer, "gate", None)
            self.experts.append(0 if gate is None else gate.weight.shape[0])
            if gate is not None:
                self._hooks.append(gate.register_forward_hook(self._routing(found)))
                experts = layer.mixer.experts
                self._hooks.append(experts.register_forward_hook(self._keep(found, "routed")))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _last(self, out: Tensor) -> None:
        self.final.append(_rows(out))

    @staticmethod
    def _first(found: dict[str, Any]) -> Any:
        def keep(module: Any, given: Any, named: Any) -> None:
            found["residual"] = _rows(given[0] if given else named["hidden_states"])

        return keep

    @staticmethod
    def _keep(found: dict[str, Any], name: str) -> Any:
        def keep(module: Any, given: Any, out: Any) -> None:
            found[name] = _rows(out[0] if isinstance(out, tuple) else out)

        return keep

    @staticmethod
    def _routing(found: dict[str, Any]) -> Any:
        def keep(module: Any, given: Any, out: Any) -> None:
            _, found["weights"], found["ids"] = out

        return keep

    def passes(self, logits: Tensor) -> list[Passed]:
        """The tape in the terms of a walk."""
        found: list[Passed] = []
        entry: Entry | None = None
        for layer, experts in zip(self.layers, self.experts, strict=True):
            entry = entry or Entry(None, layer["residual"])
            sets = None
            at = {"residual": layer["residual"], "norm": layer["norm"]}
            if "ids" in layer:
                sets = layer["ids"].long().sort(-1).values
                at["router"] = dense(layer["ids"], layer["weights"], experts)
                at["routed"] = layer["routed"]
            found.append(Passed(entry, at | {"mixer": layer["mixer"]}, sets))
            entry = found[-1].leaves
        assert entry is not None
        assert entry.delta is not None
        end = {"residual": entry.residual + entry.delta, "norm": self.final[0], "logits": logits}
        return [*found, Passed(entry, end)]


def _rows(x: Tensor) -> Tensor:
    """[1, T, D] or [T, D] as a copy [T, D]."""
    return (x[0] if x.dim() == 3 else x).clone()
