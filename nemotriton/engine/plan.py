"""CachePlan: bytes to pages and slots, before anything is loaded.

    memory = weights + work + graphs + slots * (state + lanes or rings) + pages * page

Weights are exact, states and pages too; `work` is an upper estimate of what a step allocates, and
`graphs` of what recorded steps keep: one decode step's work, and each recording itself. Where a
wish does not fit, CapacityError computes what would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nemotriton.engine.caches import PAGE_SIZE, SCORE_BYTES
from nemotriton.engine.graphs import key_limits, ladder
from nemotriton.engine.replay import ring_entry_bytes
from nemotriton.errors import CapacityError
from nemotriton.kernels.attention import WIDE_KEYS
from nemotriton.kernels.attention_decode import most_splits
from nemotriton.kernels.gemm_quant_tiles import WIDEN_TOKENS
from nemotriton.kernels.op import next_pow2
from nemotriton.model.config import LayerKind, ModelConfig

DEFAULT_REQUESTS = 64
_COMPANY = 8  # requests that a context nobody asked for makes room for
_COPIES = 4  # of a step's logits, while they are penalised, sorted and summed
_SHORTEST = 1024  # context that is never undercut unasked
_KV_SPLITS = 32  # partial results of attention over a split context
_RECORDED = 32 * 2**10  # bytes of a layer in a CUDA graph: some ten launches and their arguments
_MARGIN = 1.25  # fragments, and what the estimate of `work` overlooks


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for; None leaves it to the plan. Sizes of elements in bytes."""

    max_context: int | None
    max_requests: int | None
    prefill_piece: int
    drafts: int
    item: int  # of activations and conv windows
    state_item: int  # of SSM states
    kv_item: int | None = None  # of K/V; None: as activations
    spare_pages: int = 0  # pages that no request gets
    graphs: int = 0  # numbers of drafts that decode steps are recorded with; 0 = no CUDA graphs
    state_scale: int = 0  # of the scale of a row of SSM states
    ring_places: int = 0  # of states that roll back by replay; 0 = by lanes
    widened: int = 0  # of the largest quantised matrix once it is decoded for a prompt


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What memory goes where, in bytes; `pages` and `slots` are 0 where the model has no such."""

    max_context: int
    max_requests: int
    pages: int
    slots: int
    weights: int
    states: int
    lanes: int
    kv: int
    work: int
    available: int
    graphs: int = 0
    rings: int = 0

    @property
    def total(self) -> int:
        """All that is planned for."""
        states = self.states + self.lanes + self.rings
        return self.weights + states + self.kv + self.work + self.graphs

    def parts(self) -> dict[str, int]:
        """Bytes by purpose, for people; what is not used is `free`."""
        named = {
            "weights": self.weights,
            "states": self.states,
            "lanes": self.lanes,
            "rings": self.rings,
            "KV": self.kv,
            "work": self.work,
            "graphs": self.graphs,
            "free": self.available - self.total,
        }
        return {name: size for name, size in named.items() if size or name == "weights"}


def make_plan(
    config: ModelConfig, wishes: Wishes, *, weights: int, available: int, where: str
) -> CachePlan:
    """Divide `available` bytes of the device called `where`.

    One request of max_context tokens always fits. Without a wish, max_context is the model's, or
    what fits beside 8 requests; max_requests is 64, or as many as leave half of the rest to K/V.
    Raises CapacityError with the bytes of each part and the wishes that would fit.
    """
    return _Planner(config, wishes, weights, available, where).plan()


@dataclass(frozen=True)
class _Planner:
    config: ModelConfig
    wishes: Wishes
    weights: int
    available: int
    where: str

    def plan(self) -> CachePlan:
        requests = self.wishes.max_requests or 1
        context = self.wishes.max_context or self.unasked(requests)
        if not self.fits(context, requests):
            raise CapacityError(self.refusal(context, requests))
        if self.wishes.max_requests is None:
            most = largest(lambda n: self.leaves_half(context, n), 1, DEFAULT_REQUESTS) or 1
            requests = max(most, self.most_requests(context, _COMPANY) or 1)
        return self.divided(context, requests)

    def unasked(self, requests: int) -> int:
        """The model's context, or what of it fits beside some requests, if that is of use."""
        full = self.config.max_context
        company = self.wishes.max_requests or _COMPANY
        found = self.longest(full, company) or self.longest(full, requests) or 0
        return max(found, min(full, _SHORTEST))

    def divided(self, context: int, requests: int) -> CachePlan:
        """The plan for a context and a number of requests that fit."""
        pages = 0
        if self.page_bytes:
            rest = self.available - self.fixed(context, requests)
            pages = min(rest // self.page_bytes, requests * pages_for(context))
        return self.bytes_of(context, requests, pages)

    def bytes_of(self, context: int, requests: int, pages: int) -> CachePlan:
        drafts = self.wishes.drafts
        windows = (drafts + 1) * self.window_bytes if drafts else 0
        states = 0 if self.wishes.ring_places else drafts * self.ssm_bytes
        return CachePlan(
            max_context=context,
            max_requests=requests,
            pages=pages,
            slots=requests if self.ssm_bytes else 0,
            weights=self.weights,
            states=requests * (self.ssm_bytes + self.window_bytes),
            lanes=requests * (states + windows),
            kv=(pages + self.wishes.spare_pages) * self.page_bytes,
            work=self.work(context, requests),
            available=self.available,
            graphs=self.graphs(context, requests),
            rings=requests * self.ring_bytes,
        )

    # ---- sizes --------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """K and V of one page, all attention layers."""
        layers = cache_layers(self.config, LayerKind.ATTENTION, self.wishes.drafts)
        attention = self.config.attention
        if not layers or attention is None:
            return 0
        item = self.wishes.kv_item or self.wishes.item
        return 2 * layers * PAGE_SIZE * attention.kv_rows * item

    @property
    def ssm_bytes(self) -> int:
        """SSM state of one request, all Mamba layers."""
        m, w = self.config.mamba, self.wishes
        if m is None:
            return 0
        return self.mamba_layers * m.inner * (m.state * w.state_item + w.state_scale)

    @property
    def ring_bytes(self) -> int:
        """Rings of one request, all Mamba layers."""
        m, w = self.config.mamba, self.wishes
        if m is None or not w.ring_places:
            return 0
        return self.mamba_layers * w.ring_places * ring_entry_bytes(m, w.item)

    @property
    def window_bytes(self) -> int:
        """Conv window of one request, all Mamba layers."""
        m = self.config.mamba
        if m is None:
            return 0
        return self.mamba_layers * (m.conv_width - 1) * m.conv_dim * self.wishes.item

    @property
    def mamba_layers(self) -> int:
        return cache_layers(self.config, LayerKind.MAMBA, self.wishes.drafts)

    def work(self, context: int, requests: int) -> int:
        """An upper estimate of what one step allocates: its widest layer, and its logits."""
        c = self.config
        rows = requests * (self.wishes.drafts + 1)
        tokens = rows + self.wishes.prefill_piece
        splits = c.attention.q_rows * _KV_SPLITS * 4 * rows if c.attention else 0
        scored = min(SCORE_BYTES, self.wishes.prefill_piece * c.vocab * 4)
        logits = _COPIES * (rows * c.vocab * 4 + scored)
        rows_at_work = int(_MARGIN * (tokens * self.row_bytes + splits + logits))
        return rows_at_work + max(self.widened_matrix, self.widened_keys(context, requests))

    @property
    def widened_matrix(self) -> int:
        """A decoded weight, where a step may have tokens enough for that."""
        w = self.wishes
        return w.widened if w.prefill_piece >= WIDEN_TOKENS else 0

    def widened_keys(self, context: int, requests: int) -> int:
        """A layer's keys and values out of an fp8 cache, see `attend_prefill`."""
        attention, w = self.config.attention, self.wishes
        if attention is None or w.kv_item != 1 or w.item != 2:
            return 0
        keys = max(context, min(WIDE_KEYS, requests * context))
        return 2 * next_pow2(pages_for(keys)) * PAGE_SIZE * attention.kv_rows * w.item

    @property
    def row_bytes(self) -> int:
        """Bytes of one row at the widest moment of a step."""
        c, item = self.config, self.wishes.item
        stream = c.width * (2 * item + 8)  # normed x, mixer output, residual before and after
        if self.wishes.drafts:
            stream += 5 * c.width * item  # the block's two inputs, and both normed and joined
        return stream + max(mixer_bytes(c, kind, item) for kind in dict.fromkeys(c.kinds))

    def graphs(self, context: int, requests: int) -> int:
        """An upper estimate of what CUDA graphs of the decode steps keep."""
        if not self.wishes.graphs:
            return 0
        c, drafts = self.config, self.wishes.drafts
        rows = requests * (drafts + 1)
        shapes = self.wishes.graphs * len(ladder(requests)) * len(key_limits(context + drafts))
        scratch = 0
        if c.attention is not None:  # partial sums, and two numbers each
            width = c.attention.q_rows + 2 * c.attention.heads
            scratch = rows * most_splits(context + drafts) * width * 4
        step = rows * (self.row_bytes + 2 * c.vocab * 4) + scratch
        return int(_MARGIN * step) + shapes * len(c.kinds) * _RECORDED

    def fixed(self, context: int, requests: int) -> int:
        """Everything but the pages of requests."""
        return self.bytes_of(context, requests, 0).total

    def need(self, context: int, requests: int) -> int:
        """The least that works: one whole context of pages, a state for each request."""
        return self.fixed(context, requests) + pages_for(context) * self.page_bytes

    def fits(self, context: int, requests: int) -> bool:
        return self.need(context, requests) <= self.available

    def longest(self, context: int, requests: int) -> int | None:
        """The longest context up to `context` that fits beside so many requests."""
        return largest(lambda n: self.fits(n, requests), 1, context)

    def most_requests(self, context: int, requests: int) -> int | None:
        """The most requests up to `requests` that fit with this context."""
        return largest(lambda n: self.fits(context, n), 1, requests)

    def leaves_half(self, context: int, requests: int) -> bool:
        """States take at most half of what weights, work and one context leave."""
        plan = self.bytes_of(context, requests, 0)
        states = plan.states + plan.lanes
        rest = self.available - (plan.total - states) - pages_for(context) * self.page_bytes
        return 2 * states <= rest

    # ---- refusal ------------------------------------------------------------------------------

    def refusal(self, context: int, requests: int) -> str:
        """Needs and has, part by part, and each single change that would do."""
        plan = self.bytes_of(context, requests, pages_for(context) if self.page_bytes else 0)
        unit, size = ("GiB", 2**30) if plan.total >= 2**30 else ("MiB", 2**20)
        named = [f"{k} {v / size:.1f}" for k, v in plan.parts().items() if k != "free"]
        text = (
            f"needs {plan.total / size:.1f} {unit} ({', '.join(named)}); {self.where} has "
            f"{self.available / size:.1f} {unit} for it. "
        )
        if self.ssm_bytes:
            each = (plan.states + plan.lanes + plan.rings) / requests / 2**20
            text += f"The states of a request take {each:.1f} MiB. "
        changes = self.changes(context, requests)
        if changes:
            return text + f"Would fit: {', or '.join(changes)}."
        least = self.smaller(1, drafts=0).need(1, 1)
        return text + (
            "No smaller max_context, max_requests or prefill_piece is enough: weights and the "
            f"least beside them take {least / size:.1f} {unit}. Use a quantised checkpoint, or a "
            "device with more memory."
        )

    def changes(self, context: int, requests: int) -> list[str]:
        """Single wishes that would fit, the others kept; then all three at their least."""
        w = self.wishes
        found = {
            "max_context": self.longest(context, requests),
            "max_requests": self.most_requests(context, requests),
            "prefill_piece": largest(
                lambda n: self.smaller(n).fits(context, requests), 1, w.prefill_piece
            ),
        }
        changes = [f"{name}={value}" for name, value in found.items() if value]
        if w.drafts and self.smaller(w.prefill_piece, drafts=0).fits(context, requests):
            changes.append("drafts=0")
        if not changes:
            for piece in (min(w.prefill_piece, 256), 1):
                most = self.smaller(piece, drafts=0).longest(context, 1)
                if most:
                    end = f"max_requests=1, prefill_piece={piece}" + ", drafts=0" * bool(w.drafts)
                    return [f"max_context={most} with {end}"]
        return changes

    def smaller(self, piece: int, drafts: int | None = None) -> _Planner:
        """The same with other prefill pieces and perhaps other drafts."""
        drafts = self.wishes.drafts if drafts is None else drafts
        return replace(self, wishes=replace(self.wishes, prefill_piece=piece, drafts=drafts))


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)


def cache_layers(config: ModelConfig, kind: LayerKind, drafts: int) -> int:
    """Layers of `kind` with a cache: the trunk's, and behind them the MTP block's when drafting."""
    draft_layers = config.mtp.pattern if drafts and config.mtp is not None else ()
    return (*config.kinds, *draft_layers).count(kind)


def mixer_bytes(config: ModelConfig, kind: LayerKind, item: int) -> int:
    """Bytes a token that the widest moment of a mixer holds, the largest layer of its kind."""
    match kind:
        case LayerKind.MAMBA:
            m = config.mamba
            assert m is not None
            chunk_states = 2 * m.inner * m.state * 4 // m.chunk
            return (m.in_rows + 2 * m.conv_dim + 3 * m.inner) * item + chunk_states
        case LayerKind.ATTENTION:
            a = config.attention
            assert a is not None
            return (3 * a.q_rows + 2 * a.kv_rows) * item
        case LayerKind.MLP:
            return 2 * max(config.mlp_widths) * item
        case LayerKind.MOE:
            return max(
                moe.top_k * (moe.width * item + (moe.latent or config.width) * 4)
                + 3 * (moe.latent or config.width) * item
                + 2 * moe.shared_width * item
                + moe.experts * 12
                for moe in config.moes
                if moe is not None
            )


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest n in low .. high that fits, where smaller ones fit if a larger one does."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
