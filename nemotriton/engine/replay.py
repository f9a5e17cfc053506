"""States that roll back by replay: a stored state, and a ring of the inputs since.

The other way to what `MambaStates` does with lanes: a verify pass writes its rows' inputs to the
ring, acceptance moves a cursor, and a rejected row is overwritten by the next pass. So a draft
costs a ring entry a layer, not a state, and a step seldom writes a state at all. Which state a
token is computed from depends on its sequence alone, see `kernels.ssm_replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nemotriton.engine.caches import MambaStates, SavedState
from nemotriton.engine.draft_shape import DraftShape
from nemotriton.errors import ConfigError, require
from nemotriton.kernels import REPLAY_INTERVAL, STATE_FORMATS, StateFormat, ring_places

if TYPE_CHECKING:
    from nemotriton.engine.batch import Span
    from nemotriton.model.config import MambaConfig

ROLLBACKS = ("auto", "lanes", "replay")


MANY = 16  # requests; of fewer the plain update has the shorter launches
_PAYS = ("float32", "bfloat16", "int8")  # states whose replay without drafts was measured faster


def find_rollback(
    wanted: str | None,
    shape: DraftShape | None,
    device: torch.device,
    invariant: bool = False,
    requests: int | None = None,
    states: StateFormat = STATE_FORMATS["float32"],
) -> str:
    """ "lanes" or "replay"; ConfigError for anything else, or where a ring cannot hold the drafts.

    None or "auto": replay for drafts on a GPU, where a verify pass with lanes writes a state a row
    and each row has one in memory, and without drafts where so many `requests` were asked for that
    the states are most of a step: each is read, but seldom written. Else lanes: the plain update
    has the shortest launch, the twins replay token by token, and in the invariant mode drafts must
    not change what decoding without them computes.
    """
    wanted = "auto" if wanted is None else wanted
    if wanted not in ROLLBACKS:
        raise ConfigError(f"rollback={wanted!r}: use one of {', '.join(ROLLBACKS)}.")
    deepest = 0 if shape is None else shape.depth(len(shape))
    fits = deepest < REPLAY_INTERVAL
    if wanted == "auto":
        many = requests is not None and requests >= MANY and states.name in _PAYS
        pays = (many if shape is None else fits) and device.type == "cuda" and not invariant
        return "replay" if pays else "lanes"
    require(
        fits or wanted == "lanes",
        f"rollback='replay' takes up to {REPLAY_INTERVAL - 1} drafts in a row, not {deepest}: use "
        "'lanes', or fewer.",
        ConfigError,
    )
    return wanted


def ring_entry_bytes(config: MambaConfig, item: int) -> int:
    """Bytes of one entry of one layer's ring: x, B and a step size a head."""
    return (config.inner + config.groups * config.state) * item + 4 * config.heads


def places_for(shape: DraftShape | None) -> int:
    """Places of a ring for these drafts."""
    if shape is None:
        return ring_places(REPLAY_INTERVAL, 1)
    return ring_places(REPLAY_INTERVAL, len(shape) + 1, shape.depth(len(shape)) + 1)


class Cursors(NamedTuple):
    """Where sequences stand in their rings: counts int32 [S], order int32 [S, R]."""

    counts: Tensor
    order: Tensor


class SavedRings(NamedTuple):
    """Host copies of a slot of ReplayStates: what MambaStates saves, the rings, the cursor."""

    state: SavedState
    rings: tuple[Tensor, ...]
    cursor: Cursors


class ReplayStates(MambaStates):
    """`ssm` [layers, slots, H, P, N] as it was stored last, and the inputs since in rings.

    rings: x [layers, slots, H, R, P], step sizes fp32 [layers, slots, H, R], B [layers, slots, G,
    R, N]. `counts` int32 [slots + 1] committed entries, `order` int32 [slots + 1, R] the places of
    each ring, committed ones first. The last row of both is for pads. A prompt leaves its state
    stored, so `start` is all that a new request needs. Convolution windows are kept as with lanes.
    """

    def __init__(
        self,
        config: MambaConfig,
        layers: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        format: StateFormat = STATE_FORMATS["float32"],
        shape: DraftShape | None = None,
    ) -> None:
        super().__init__(config, layers, slots, dtype, device, format)
        m, R, cells = config, places_for(shape), (layers, slots)
        self.rings: tuple[Tensor, Tensor, Tensor] = (
            torch.empty((*cells, m.heads, R, m.head_dim), dtype=dtype, device=device),
            torch.empty((*cells, m.heads, R), dtype=torch.float32, device=device),
            torch.empty((*cells, m.groups, R, m.state), dtype=dtype, device=device),
        )
        self.counts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.order = torch.arange(R, dtype=torch.int32, device=device).repeat(slots + 1, 1)
        if shape is not None:
            windows = (*cells, len(shape) + 1, *self.conv.shape[2:])
            self.conv_lanes = torch.empty(windows, dtype=dtype, device=device)

    def cursors(self, span: Span) -> Cursors:
        """Where a span's sequences stand. Looked up once a step, so not after a commit."""
        if span.cells is None:
            self._look_up(span)
        assert span.cursors is not None
        return span.cursors

    def _look_up(self, span: Span) -> None:
        super()._look_up(span)
        rows = self._rows(span.slots)
        span.cursors = Cursors(self.counts[rows], self.order[rows])

    def start(self, slots: Sequence[int], seeds: Sequence[int]) -> None:
        super().start(slots, seeds)
        if slots:
            self.counts[torch.tensor(slots).to(self.counts.device, non_blocking=True)] = 0

    def advance(self, slots: Tensor) -> None:
        self._move(slots, torch.ones_like(slots), None)

    def commit(
        self, slots: Tensor, lane: Tensor, path: Tensor | None = None, cu: Tensor | None = None
    ) -> None:
        super().commit(slots, lane)
        if path is None:
            self._move(slots, lane + 1, None)
            return
        assert cu is not None
        rows = torch.arange(self._most_rows, device=path.device, dtype=torch.int32)
        at = cu[:-1, None] + rows
        walked = path[at.clamp_max(path.shape[0] - 1).long()]
        walked = torch.where(at < cu[1:, None], walked, -1)
        self._move(slots, (walked >= 0).sum(1, dtype=torch.int32), walked)

    def save(self, slot: int) -> SavedRings:  # type: ignore[override]
        rings = tuple(ring[:, slot].to("cpu", copy=True) for ring in self.rings)
        cursor = Cursors(self.counts[slot].cpu().clone(), self.order[slot].cpu().clone())
        return SavedRings(super().save(slot), rings, cursor)

    def restore(self, slot: int, saved: SavedRings) -> None:  # type: ignore[override]
        super().restore(slot, saved.state)
        for ring, host in zip(self.rings, saved.rings, strict=True):
            ring[:, slot] = host.to(ring.device)
        self.counts[slot] = saved.cursor.counts.to(self.counts.device)
        self.order[slot] = saved.cursor.order.to(self.order.device)

    # ---- the cursor ---------------------------------------------------------------------------

    @property
    def _most_rows(self) -> int:
        return 1 if self.conv_lanes is None else self.conv_lanes.shape[2]

    def _rows(self, slots: Tensor) -> Tensor:
        return torch.where(slots < 0, self.counts.shape[0] - 1, slots).long()

    def _move(self, slots: Tensor, gained: Tensor, walked: Tensor | None) -> None:
        """Drop full windows, which this step has stored, and take in `gained` new entries [S].

        walked [S, K]: of a tree the rows taken in, then -1; None: the first ones. int32 all."""
        index, gained = self._rows(slots), torch.where(slots < 0, 0, gained)
        counts, order = self.counts[index], self.order[index]
        dropped = torch.where((counts >= REPLAY_INTERVAL) & (gained > 0), REPLAY_INTERVAL, 0)
        R = order.shape[1]
        place = (torch.arange(R, device=order.device) - dropped[:, None]) % R
        if walked is not None:
            rows = torch.arange(walked.shape[1], device=order.device)
            taken = torch.zeros((len(slots), len(rows) + 1), dtype=torch.int64, device=order.device)
            spot = torch.where(walked < 0, len(rows), walked).long()
            taken.scatter_(1, spot, 1 + rows.expand_as(spot))  # 1 + depth; 0 where rejected
            taken = taken[:, :-1]
            behind = gained[:, None] + (taken == 0).cumsum(1) - 1  # rejected ones, in order
            behind = torch.where(taken > 0, taken - 1, behind) + (counts - dropped)[:, None]
            place.scatter_(1, counts[:, None] + rows, behind)
        self.order.index_copy_(0, index, torch.empty_like(order).scatter_(1, place, order))
        self.counts.index_copy_(0, index, (counts - dropped + gained).int())
