"""A model walked through layer by layer, so that any layer can be run again from any input.

The tokens are fixed, so all steps of a layer (the prompt in one prefill, then tokens one by one
through the decode path) may run before those of the next layer. What enters a layer is a pair: what
the layer before adds (`delta`) and the residual stream it is added to, as the fused norm takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemotriton.engine.batch import Batch, build_batch
from nemotriton.engine.caches import Caches
from nemotriton.engine.llm import LLM
from nemotriton.engine.request import Piece, Request
from nemotriton.engine.sampling import SamplingParams
from nemotriton.errors import RequestError, require
from nemotriton.kernels.op import use
from nemotriton.model.mixers import MoeMixer
from nemotriton.model.nemotron_h import NemotronH

Impl = Mapping[str, str]
TWINS: Impl = {"*": "ref"}


class Entry(NamedTuple):
    """What a layer starts from, [T, D] each; no delta at the first layer."""

    delta: Tensor | None
    residual: Tensor


@dataclass(frozen=True)
class Passed:
    """One layer's pass: tensors [T, ...] at its boundaries by name, in order, and what leaves it.

    residual: the stream with the delta added. norm: what the mixer reads. router [T, E]: the
    weight of every expert, 0 where not chosen. routed: the experts' sum, in their own width.
    mixer: what the layer adds. logits: of the head. sets [T, K]: the experts chosen, ascending.
    """

    entry: Entry
    at: dict[str, Tensor]
    sets: Tensor | None = None

    @property
    def leaves(self) -> Entry:
        """The next layer's entry."""
        return Entry(self.at["mixer"], self.at["residual"])


@dataclass
class Walk:
    """A model, its caches, and the steps of one sequence of tokens."""

    model: NemotronH
    caches: Caches
    ids: Tensor
    steps: list[tuple[slice, Batch]]

    @classmethod
    def of(cls, llm: LLM, ids: Sequence[int], decoded: int) -> Walk:
        """The first tokens as a prompt, the last `decoded` one by one; in the caches of `llm`."""
        runner = llm.runner
        require(
            len(ids) <= llm.plan.max_context,
            f"{len(ids):,} tokens; the caches hold {llm.plan.max_context:,}: give a shorter text.",
            RequestError,
        )
        request = Request("audit", 0, list(ids), SamplingParams(), seed=0, limit=1)
        request.slot = 0
        if runner.caches.kv is not None:
            request.pages = list(range(-(-len(ids) // runner.page_size)))
        prompt = max(1, len(ids) - decoded)
        pieces = [Piece(request, 0, prompt)]
        pieces += [Piece(request, at, 1) for at in range(prompt, len(ids))]
        steps = []
        for i, piece in enumerate(pieces):
            batch = build_batch(
                *(([], [piece]) if i == 0 else ([piece], [])),
                [],
                page_size=runner.page_size,
                chunk=runner.chunk,
                device=llm.device,
            )
            steps.append((slice(piece.start, piece.end), batch))
        model = runner.model
        assert isinstance(model, NemotronH)
        return cls(model, runner.caches, torch.tensor(list(ids), device=llm.device), steps)

    @property
    def head(self) -> int:
        """The index by which the final norm and the head go as a layer."""
        return len(self.model.blocks)

    def start(self) -> Entry:
        """The embeddings."""
        stream = self.model.embeddings(self.ids)
        return Entry(None, stream.float() if self.model.config.residual_fp32 else stream)

    @torch.no_grad()
    def layer(self, index: int, entry: Entry, impl: Impl) -> Passed:
        """Run one layer, or the head, on all steps, with ops forced to `impl`."""
        norm = self.model.norm_f if index == self.head else self.model.blocks[index].norm
        found: dict[str, list[Tensor]] = {}
        routings: list[Any] = []
        with use(impl), self._experts(index, found, routings):
            if self.caches.mamba is not None:
                self.caches.mamba.start([0], [0])
            for rows, batch in self.steps:
                residual = entry.residual[rows]
                if entry.delta is None:
                    x = norm(residual.to(self.model.dtype))
                else:
                    x, residual = norm.add(entry.delta[rows].clone(), residual.clone())
                _put(found, "residual", residual)
                _put(found, "norm", x)
                if index == self.head:
                    _put(found, "logits", self.model.logits(x))
                    continue
                mixer = self.model.blocks[index].mixer
                _put(found, "mixer", mixer(x, self._again(batch), self.caches))
                if self.caches.mamba is not None and batch.decode is not None:
                    self.caches.mamba.advance(batch.decode.slots)
        at = {name: torch.cat(parts) for name, parts in found.items()}
        if not routings:
            return Passed(entry, at)
        ids = torch.cat([r.ids for r in routings])
        router = dense(ids, torch.cat([r.weights for r in routings]), self._moe(index).moe.experts)
        order = ("residual", "norm", "router", "routed", "mixer")
        at["router"] = router
        return Passed(entry, {name: at[name] for name in order}, ids.long().sort(-1).values)

    @torch.no_grad()
    def route(self, index: int, x: Tensor, impl: Impl) -> tuple[Tensor, Tensor]:
        """(sets [T, K], weights [T, E]) that a MoE layer's router gives for x [T, D], in whichever
        op the layer has it done."""
        mixer = self._moe(index)
        parts: list[Any] = []
        with use(impl), self._experts(index, {}, parts):
            for rows, batch in self.steps:
                mixer(x[rows], batch, self.caches)
        ids = torch.cat([p.ids for p in parts])
        weights = torch.cat([p.weights for p in parts])
        return ids.long().sort(-1).values, dense(ids, weights, mixer.moe.experts)

    def is_moe(self, index: int) -> bool:
        """Whether a layer has experts."""
        return index < self.head and isinstance(self.model.blocks[index].mixer, MoeMixer)

    def chain(self, impl: Impl) -> Iterator[Passed]:
        """All layers and the head, each from what the one before left."""
        entry = self.start()
        for index in range(self.head + 1):
            passed = self.layer(index, entry, impl)
            yield passed
            if index < self.head:
                entry = passed.leaves

    def _moe(self, index: int) -> MoeMixer:
        mixer = self.model.blocks[index].mixer
        assert isinstance(mixer, MoeMixer)
        return mixer

    def _again(self, batch: Batch) -> Batch:
        """A batch whose states are looked up anew."""
        if batch.decode is not None:
            return replace(
                batch, decode=replace(batch.decode, cells=None, cursors=None, seeds=None)
            )
        assert batch.prefill is not None
        return replace(batch, prefill=replace(batch.prefill, cells=None, seeds=None))

    @contextmanager
    def _experts(
        self, index: int, found: dict[str, list[Tensor]], routings: list[Any]
    ) -> Iterator[None]:
        """Keep what the experts of a MoE layer are given and give."""
        if not self.is_moe(index):
            yield
            return

        def keep(module: Any, given: Any, out: Tensor) -> None:
            routings.append(given[1])
            _put(found, "routed", out)

        hook = self._moe(index).experts.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()


def dense(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Weights [T, K] of experts `ids` as [T, E], 0 elsewhere."""
    out = weights.new_zeros((ids.shape[0], experts), dtype=torch.float32)
    return out.scatter_(1, ids.long(), weights.float())


def _put(found: dict[str, list[Tensor]], name: str, tensor: Tensor) -> None:
    found.setdefault(name, []).append(tensor)
