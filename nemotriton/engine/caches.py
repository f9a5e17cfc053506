"""What lives between steps: K/V pages for attention layers, state slots for Mamba layers.

Memory is not cleared: a page is written before it is read, and a slot's first use is marked
`fresh`. The layers of an MTP block, where drafting is on, follow the trunk's in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


class MambaStates:
    """Recurrent states of the Mamba layers, a slot a sequence.

    `ssm` [layers, slots, H, P, N] in the state dtype; `conv` [layers, slots, W-1, conv_dim] in the
    model's dtype: the last inputs of the convolution, before it and before the activation, oldest
    first. With `lanes` > 0, `ssm_lanes` and `conv_lanes` have an axis of that many draft steps
    after `slots`: lane t holds the state after row t of a verify pass, until `commit`.
    """

    def __init__(
        self,
        config: MambaConfig,
        layers: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        state_dtype: torch.dtype = torch.float32,
        lanes: int = 0,
    ) -> None:
        ssm = (config.heads, config.head_dim, config.state)
        conv = (config.conv_width - 1, config.conv_dim)
        self.ssm = torch.empty((layers, slots, *ssm), dtype=state_dtype, device=device)
        self.conv = torch.empty((layers, slots, *conv), dtype=dtype, device=device)
        self.ssm_lanes: Tensor | None = None
        self.conv_lanes: Tensor | None = None
        if lanes:
            shape = (layers, slots, lanes)
            self.ssm_lanes = torch.empty((*shape, *ssm), dtype=state_dtype, device=device)
            self.conv_lanes = torch.empty((*shape, *conv), dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(conv, ssm) of the `index`-th Mamba layer."""
        return self.conv[index], self.ssm[index]

    def lanes(self, index: int) -> tuple[Tensor | None, Tensor | None]:
        """(conv, ssm) lanes of the `index`-th Mamba layer, None without drafting."""
        if self.conv_lanes is None or self.ssm_lanes is None:
            return None, None
        return self.conv_lanes[index], self.ssm_lanes[index]

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """Make lane `accepted[s]` (= accepted drafts, 0..K) the state of slot `slots[s]`, int [S].

        Slots must be valid and distinct. Only the lanes that are read need have been written.
        """
        assert self.ssm_lanes is not None, "there are no lanes"
        assert self.conv_lanes is not None, "there are no lanes"
        slots, accepted = slots.long(), accepted.long()
        for state, lanes in ((self.ssm, self.ssm_lanes), (self.conv, self.conv_lanes)):
            for layer in range(state.shape[0]):  # layer by layer bounds the gathered copy
                state[layer].index_copy_(0, slots, lanes[layer][slots, accepted])

    def save(self, slot: int) -> tuple[Tensor, Tensor]:
        """Host copies of a slot, all layers: (ssm [layers, H, P, N], conv [layers, W-1, C])."""
        return self.ssm[:, slot].to("cpu", copy=True), self.conv[:, slot].to("cpu", copy=True)

    def restore(self, slot: int, saved: tuple[Tensor, Tensor]) -> None:
        """Write what `save` returned into another (or the same) slot."""
        self.ssm[:, slot] = saved[0].to(self.ssm.device)
        self.conv[:, slot] = saved[1].to(self.conv.device)


@dataclass(frozen=True, slots=True)
class Caches:
    """All that a model carries from step to step; None where it has no such layers."""

    kv: PagedKV | None
    mamba: MambaStates | None


def _movable(x: Tensor) -> Tensor:
    """x, or its bytes where it is e4m3, which torch cannot copy by index."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
