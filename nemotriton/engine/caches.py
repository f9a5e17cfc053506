"""What lives between steps: K/V pages for attention layers, state slots for Mamba layers.

Memory is not cleared: a page is written before it is read, and a slot's first use is marked
`fresh`. The layers of an MTP block, where drafting is on, follow the trunk's in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nemotriton.kernels.ssm_state import STATE_FORMATS, StateFormat, StateNoise

if TYPE_CHECKING:
    from nemotriton.engine.batch import Span
    from nemotriton.model.config import MambaConfig

PAGE_SIZE = 64  # tokens
SCORE_BYTES = 64 * 2**20  # logits of prompt tokens are computed in blocks of at most this


class PagedKV:
    """Keys and values of the attention layers: `k`, `v` [layers, pages, page_size, Hkv, Dh].

    dtype: the activations', or e4m3, whose numbers are the keys and values over a layer's scale.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = PAGE_SIZE,
    ) -> None:
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.page_size = page_size
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of the `index`-th attention layer."""
        return self.k[index], self.v[index]

    def save(self, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Host copies of some pages, all layers: two [layers, len(pages), page_size, Hkv, Dh]."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.k.device)
        k, v = (_movable(c).index_select(1, index).cpu() for c in (self.k, self.v))
        return k.view(self.k.dtype), v.view(self.v.dtype)

    def restore(self, pages: Sequence[int], saved: tuple[Tensor, Tensor]) -> None:
        """Write what `save` returned into other (or the same) pages."""
        index = torch.tensor(pages, dtype=torch.int64, device=self.k.device)
        for cache, host in zip((self.k, self.v), saved, strict=True):
            _movable(cache).index_copy_(1, index, _movable(host).to(cache.device))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the cells `source` to the cells `target` in all layers, int64 [n] as in `kv_rows`.

        All are read before any is written."""
        for cache in (self.k, self.v):
            cells = _movable(cache).flatten(1, 2)
            cells.index_copy_(1, target, cells.index_select(1, source))


def _plain(cache: Tensor) -> Tensor:
    """fp8 as bytes: PyTorch copies those by index everywhere."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


class SavedState(NamedTuple):
    """Host copies of a slot of MambaStates, all layers: ssm [layers, H, P, N], its scales
    [layers, H, P] (None where the format has none) and conv [layers, W-1, C]."""

    ssm: Tensor
    scales: Tensor | None
    conv: Tensor


class MambaStates:
    """Recurrent states of the Mamba layers, a slot a sequence.

    `ssm` [layers, slots * lanes, H, P, N] in `format`, beside it `scales` fp32 [layers, slots *
    lanes, H, P] where the format has one a row, and `seeds` int64 [slots], of the requests whose
    states these are, where it rounds stochastically; else they are None.

    `conv` [layers, slots, W-1, conv_dim] in the model's dtype: the last inputs of the convolution,
    before it and before the activation, oldest first. A slot has `lanes` SSM states, 1 without
    drafting, else the most rows of a verify pass: lane t becomes the state after row t of the pass.
    `cursor` int32 [slots] is the lane that holds the committed state, so that `commit` moves none
    of these large states. The windows are small: `conv_lanes` [layers, slots, lanes, W-1, conv_dim]
    (None without drafting) are copied. `arrivals` int32 [slots, G] is zeros, see `mamba_step`.

    This is one of two ways to roll back; the other is `replay.ReplayStates`, which has `rings`.
    """

    rings: tuple[Tensor, Tensor, Tensor] | None = None

    def __init__(
        self,
        config: MambaConfig,
        layers: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        format: StateFormat = STATE_FORMATS["float32"],
        lanes: int = 1,
    ) -> None:
        ssm = (config.heads, config.head_dim, config.state)
        conv = (config.conv_width - 1, config.conv_dim)
        self.lanes = lanes
        self.cursor = torch.zeros(slots, dtype=torch.int32, device=device)
        cells = (layers, slots * lanes)
        self.format = format
        self.ssm = torch.empty((*cells, *ssm), dtype=format.dtype, device=device)
        self.scales = self.seeds = None
        if format.scaled:
            self.scales = torch.empty((*cells, *ssm[:-1]), dtype=torch.float32, device=device)
        if format.stochastic:
            self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.conv = torch.empty((layers, slots, *conv), dtype=dtype, device=device)
        self.arrivals = torch.zeros((slots, config.groups), dtype=torch.int32, device=device)
        self.conv_lanes: Tensor | None = None
        if lanes > 1:
            shape = (layers, slots, lanes, *conv)
            self.conv_lanes = torch.empty(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(conv, ssm) of the `index`-th Mamba layer: rows are slots, and `cells` of slots."""
        return self.conv[index], self.ssm[index]

    def layer_lanes(self, index: int) -> tuple[Tensor, Tensor]:
        """(conv, ssm) of the `index`-th Mamba layer, each [slots, lanes, ...]."""
        assert self.conv_lanes is not None, "there are no lanes"
        return self.conv_lanes[index], self.ssm[index].unflatten(0, (-1, self.lanes))

    def layer_scales(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """The scales of `layer`'s and of `layer_lanes`' states; None where there are none."""
        if self.scales is None:
            return None, None
        return self.scales[index], self.scales[index].unflatten(0, (-1, self.lanes))

    def cells(self, span: Span) -> Tensor:
        """Rows of `ssm` that hold the committed states of a span's slots, int32 [S], pads -1.

        Looked up once a step, so not after a commit."""
        if span.cells is None:
            self._look_up(span)
            assert span.cells is not None
        return span.cells

    def noise(self, span: Span, index: int) -> StateNoise | None:
        """What the rounding of the `index`-th Mamba layer's states draws from in a span."""
        if self.seeds is None:
            return None
        if span.cells is None:
            self._look_up(span)
        assert span.seeds is not None
        return StateNoise(span.seeds, span.lengths, index)

    def _look_up(self, span: Span) -> None:
        span.cells = span.slots
        if self.lanes == 1 and self.seeds is None:
            return
        slots = span.slots.clamp_min(0).long()
        if self.seeds is not None:
            span.seeds = self.seeds[slots]
        if self.lanes > 1:
            cell = span.slots * self.lanes + self.cursor[slots]
            span.cells = torch.where(span.slots < 0, -1, cell)

    def seed(self, slots: Sequence[int], seeds: Sequence[int]) -> None:
        """Say whose states slots hold from now on, by the requests' seeds."""
        if self.seeds is not None and slots:
            index = torch.tensor(slots).to(self.seeds.device, non_blocking=True)
            self.seeds[index] = torch.tensor(seeds).to(self.seeds.device, non_blocking=True)

    def start(self, slots: Sequence[int], seeds: Sequence[int]) -> None:
        """Say that slots are taken over by new requests, with these seeds."""
        self.seed(slots, seeds)

    def advance(self, slots: Tensor) -> None:
        """Book the token that each of these slots, int32 [S], got in a step without drafts."""

    def commit(
        self, slots: Tensor, lane: Tensor, path: Tensor | None = None, cu: Tensor | None = None
    ) -> None:
        """Make lane `lane[s]` the state of slot `slots[s]`, both int32 [S].

        Slots must be distinct; a pad (-1) repeats what the first does, which changes nothing. No
        other lane is read. path int32 [T] and cu [S + 1]: of a draft tree, see `Verdict`."""
        assert self.conv_lanes is not None, "there are no lanes"
        pad = slots < 0
        index = torch.where(pad, slots[:1].clamp_min(0), slots).long()
        lane = torch.where(pad, lane[:1], lane)
        if self.lanes > 1:
            self.cursor.index_copy_(0, index, lane)
        self.conv.index_copy_(1, index, self.conv_lanes[:, index, lane.long()])

    def save(self, slot: int) -> SavedState:
        """Host copies of what a slot holds."""
        cell = self._cell(slot)
        ssm, conv = self.ssm[:, cell].to("cpu", copy=True), self.conv[:, slot].to("cpu", copy=True)
        scales = None if self.scales is None else self.scales[:, cell].to("cpu", copy=True)
        return SavedState(ssm, scales, conv)

    def restore(self, slot: int, saved: SavedState) -> None:
        """Write what `save` returned into another (or the same) slot."""
        cell = self._cell(slot)
        self.ssm[:, cell] = saved.ssm.to(self.ssm.device)
        if self.scales is not None and saved.scales is not None:
            self.scales[:, cell] = saved.scales.to(self.scales.device)
        self.conv[:, slot] = saved.conv.to(self.conv.device)

    def _cell(self, slot: int) -> int:
        return slot * self.lanes + int(self.cursor[slot])


@dataclass(frozen=True, slots=True)
class Caches:
    """All that a model carries from step to step; None where it has no such layers."""

    kv: PagedKV | None
    mamba: MambaStates | None


def _movable(x: Tensor) -> Tensor:
    """x, or its bytes where it is e4m3, which torch cannot copy by index."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
