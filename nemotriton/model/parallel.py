"""How a model is cut over several GPUs: which part a rank holds, and how parts are added up.

tp * ep ranks. Routed experts lie in `ep` groups, whole ones, and each group is cut in `tp` by the
experts' inner width; everything else is cut in tp * ep:

    embedding, head   rows of the vocabulary; rows looked up are added up, logits are joined
    M                 groups and their heads: z, x, B, C and dt of the in-projection each on their
                      own, conv channels with them; then columns of the out-projection
    *                 query heads, KV heads with them; a KV head is on several ranks where there are
                      more ranks than KV heads; then columns of o_proj
    -                 rows of up_proj, columns of down_proj
    E                 shared expert as an MLP; router and both latent projections are on every rank

A mixer so gives a part of its output, and one sum over the ranks a mixer makes it whole. The latent
up-projection is linear, so it is applied to each rank's part, which saves a second sum at the price
of reading a small matrix on every rank. Groups of 16 that share an NVFP4 scale are never cut, and
layouts of one architecture are made after the cut, from whole parts. Widths are cut in groups, so
the last rank may hold a little more.

The matrices of one kernel are so those of a smaller model (`Shard.local`), and one rank is the
plain case: all of it is the identity then. Sources: Megatron-LM (arXiv 1909.08053) for rows after
columns, and the public engines' treatment of this family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from nemotriton.errors import ConfigError, require
from nemotriton.kernels import OwnRouting, Routing, add_rms_norm
from nemotriton.model.config import ModelConfig, MoeConfig
from nemotriton.model.expected import Expected, Role
from nemotriton.model.formats import NVFP4_GROUP
from nemotriton.model.load_plan import Part
from nemotriton.model.sums import SmallSums

_ROWS = ("up_proj", "q_proj", "k_proj", "v_proj", "in_proj", "conv1d", "lm_head", "embeddings")
_COLUMNS = ("down_proj", "o_proj", "out_proj")
_HEADS = ("A_log", "D", "dt_bias")
_MOST = 64  # GPUs that are tried for a remedy

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of tp * ep; ranks of one group of experts are neighbours.

    sums: what adds small parts up; without, torch.distributed does.
    """

    rank: int = 0
    tp: int = 1
    ep: int = 1
    sums: SmallSums | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("tp", "ep"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(is_count, f"{name}={value!r}: use a number >= 1.", ConfigError)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tp * self.ep

    # ---- sizes --------------------------------------------------------------------------------

    def local(self, config: ModelConfig) -> ModelConfig:
        """The smaller model that this rank runs; vocabulary and number of experts stay those of
        the whole. ConfigError for sizes that cannot be cut, with what can."""
        try:
            return self._local(config) if self.ranks > 1 else config
        except _Uncut as problem:
            raise ConfigError(f"{problem}: use {self._others(config)}.") from None

    def _others(self, config: ModelConfig) -> str:
        """Numbers of GPUs that the model can be cut for, as near to this as there are."""
        for name, sizes in (("tp", lambda n: (n, self.ep)), ("ep", lambda n: (self.tp, n))):
            able = [str(n) for n in range(1, _MOST + 1) if _can(config, *sizes(n))]
            if able:
                return f"{name}={able[0]}" if len(able) == 1 else f"one of {name}={', '.join(able)}"
        return "tp=1 and ep=1"

    def _local(self, config: ModelConfig) -> ModelConfig:
        n, m, a = self.ranks, config.mamba, config.attention
        _even(config.vocab, n, "vocab_size")
        if m is not None:
            groups = _even(m.groups, n, "n_groups")
            m = replace(m, heads=m.heads // n, groups=groups)
        if a is not None:
            heads = _even(a.heads, n, "num_attention_heads")
            if n % a.kv_heads and a.kv_heads % n:
                raise _Uncut("num_key_value_heads", a.kv_heads, f"{n} GPUs")
            a = replace(a, heads=heads, kv_heads=max(1, a.kv_heads // n))
        return replace(
            config,
            mamba=m,
            attention=a,
            mlp_widths=tuple(_size(self.own_width(width)) for width in config.mlp_widths),
            moes=tuple(moe and self._local_moe(moe) for moe in config.moes),
            mtp_moe=config.mtp_moe and self._local_moe(config.mtp_moe),
            mtp_mlp_width=_size(self.own_width(config.mtp_mlp_width)),
        )

    def _local_moe(self, moe: MoeConfig) -> MoeConfig:
        _even(moe.experts, self.ep, "n_routed_experts", f"ep={self.ep}")
        return replace(
            moe,
            width=_size(self.own_inner(moe.width)),
            shared_width=_size(self.own_width(moe.shared_width)),
        )

    def own(self, count: int) -> Range:
        """This rank's of `count` things of which every rank has as many."""
        each = count // self.ranks
        return self.rank * each, (self.rank + 1) * each

    def own_width(self, width: int) -> Range:
        """This rank's of the inner columns of an MLP."""
        return _share(width, self.ranks, self.rank)

    def own_inner(self, width: int) -> Range:
        """This rank's of the inner columns of its routed experts."""
        return _share(width, self.tp, self.rank % self.tp)

    def own_experts(self, experts: int) -> Range:
        """This rank's routed experts."""
        each = experts // self.ep
        first = self.rank // self.tp * each
        return first, first + each

    # ---- weights ------------------------------------------------------------------------------

    def parts(
        self, config: ModelConfig, wanted: Mapping[str, Expected]
    ) -> dict[str, tuple[Part, ...]]:
        """What of each destination of the whole model this rank keeps; those it keeps whole are
        not named. ConfigError where a group of NVFP4 would be cut."""
        if self.ranks == 1:
            return {}
        self.local(config)  # refuses what cannot be cut
        found = {name: self._parts(config, name, entry) for name, entry in wanted.items()}
        return {name: parts for name, parts in found.items() if parts}

    def _parts(self, config: ModelConfig, name: str, entry: Expected) -> tuple[Part, ...]:
        module, _, last = name.rpartition(".")
        tail = module.rpartition(".")[2]
        if last in _HEADS:
            return (Part(0, (self.own(entry.shape[0]),)),)
        if name.endswith(".mixer.norm.weight"):  # the gated norm of a Mamba mixer
            return (Part(0, (self.own(entry.shape[0]),)),)
        if tail not in (*_ROWS, *_COLUMNS):
            return ()
        lead: tuple[Part, ...] = ()
        if entry.experts and self.ep > 1:
            lead = (Part(0, (self.own_experts(entry.experts),)),)
        if entry.role is Role.SCALE:
            return lead
        if tail in _ROWS:
            dim = 1 if entry.experts else 0
            ranges = self._rows(config, tail, entry, entry.shape[dim])
            return (*lead, *((Part(dim, ranges),) if ranges else ()))
        if last == "bias":  # added to the sum once, see `keeps_bias`
            return ()
        return (*lead, *self._columns(tail, name, entry))

    def _rows(
        self, config: ModelConfig, tail: str, entry: Expected, rows: int
    ) -> tuple[Range, ...]:
        """This rank's rows of a matrix, bias or convolution with `rows` of them."""
        m, a = config.mamba, config.attention
        if entry.experts:
            return (self.own_inner(rows),) if self.tp > 1 else ()
        if tail == "up_proj":
            return (self.own_width(rows),)
        if tail in ("k_proj", "v_proj"):
            assert a is not None
            each = max(1, a.kv_heads // self.ranks) * a.head_dim
            first = self.rank * a.kv_heads // self.ranks * a.head_dim
            return ((first, first + each),)
        if tail not in ("in_proj", "conv1d"):
            return (self.own(rows),)
        assert m is not None
        shared = m.groups * m.state
        sizes = [m.inner, shared, shared]  # x, B, C
        if tail == "in_proj":
            sizes = [m.inner, *sizes, m.heads]
        ranges, start = [], 0
        for size in sizes:
            first, end = self.own(size)
            ranges.append((start + first, start + end))
            start += size
        return tuple(ranges)

    def _columns(self, tail: str, name: str, entry: Expected) -> tuple[Part, ...]:
        columns = entry.shape[-1] * entry.columns
        if entry.experts and self.tp == 1:
            return ()
        first, end = self.own(columns)
        if tail == "down_proj":
            first, end = self.own_inner(columns) if entry.experts else self.own_width(columns)
        if entry.columns > 1:
            require(
                first % NVFP4_GROUP == 0 and end % NVFP4_GROUP == 0,
                f"{name} would be cut at column {first if first % NVFP4_GROUP else end}, inside a "
                f"group of {NVFP4_GROUP} that shares a scale: use fewer ranks.",
                ConfigError,
            )
        return (Part(len(entry.shape) - 1, ((first // entry.columns, end // entry.columns),)),)

    def keeps_bias(self, name: str) -> bool:
        """False for a bias that another rank adds to the sum."""
        module, _, last = name.rpartition(".")
        return not (self.rank and last == "bias" and module.endswith(_COLUMNS))

    # ---- sums over the ranks ------------------------------------------------------------------

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, of one shape; the part itself may come to hold it."""
        if self.ranks == 1:
            return part
        if self.sums is not None and self.sums.takes(part):
            return self.sums.add(part)
        dist.all_reduce(part)
        return part

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of residual + the sum of all ranks' parts, that residual); see `add_rms_norm`."""
        if self.sums is not None and self.sums.takes_rows(part):
            return self.sums.add_norm(part, residual, weight, eps)
        return add_rms_norm(self.add(part), residual, weight, eps)

    def add_once(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts on the first rank, and zeros on the others."""
        return part if self.ranks == 1 else self.add(part) * (self.rank == 0)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' columns [R, n] side by side, [R, n * ranks]."""
        if self.ranks == 1:
            return part
        rows, columns = part.shape
        out = part.new_empty((self.ranks * rows, columns))
        # one operation under the name that this torch has for it
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(out, part.contiguous())
        return out.view(self.ranks, rows, columns).transpose(0, 1).reshape(rows, -1)

    def embed(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Rows of the whole embedding [V, D], of which `weight` holds this rank's."""
        if self.ranks == 1:
            return nn.functional.embedding(ids, weight)
        at = ids - self.rank * weight.shape[0]
        held = (at >= 0) & (at < weight.shape[0])
        rows = nn.functional.embedding(torch.where(held, at, 0), weight)
        return self.add(rows.mul_(held[..., None]))

    def own_routing(self, routing: Routing, experts: int) -> Routing:
        """What of a routing over all experts concerns this rank's."""
        if self.ep == 1:
            return routing
        return OwnRouting.of(routing, *self.own_experts(experts))


ONE = Shard()


def local_expected(
    wanted: Mapping[str, Expected], parts: Mapping[str, tuple[Part, ...]]
) -> dict[str, Expected]:
    """The destinations of a rank, in the shapes that it keeps."""
    found = dict(wanted)
    for name, kept in parts.items():
        entry = wanted[name]
        shape, experts = list(entry.shape), entry.experts
        for part in kept:
            shape[part.dim] = sum(end - start for start, end in part.ranges)
        if experts:
            experts = shape[0]
        found[name] = replace(entry, shape=tuple(shape), experts=experts)
    return found


def _share(width: int, parts: int, index: int) -> Range:
    """Part `index` of a width, in whole groups of NVFP4; the last part is the largest."""
    unit = NVFP4_GROUP if width % NVFP4_GROUP == 0 else 1
    units = width // unit
    if width and units < parts:
        raise _Uncut("a width", width, f"{parts} GPUs")
    return index * units // parts * unit, (index + 1) * units // parts * unit


def _size(part: Range) -> int:
    return part[1] - part[0]


def _even(count: int, parts: int, name: str, what: str = "") -> int:
    if count % parts:
        raise _Uncut(name, count, what or f"{parts} GPUs")
    return count // parts


def _can(config: ModelConfig, tp: int, ep: int) -> bool:
    try:
        Shard(0, tp, ep)._local(config)
    except _Uncut:
        return False
    return True


class _Uncut(ConfigError):
    """A size that is no multiple of what it has to be cut in."""

    def __init__(self, name: str, count: int, what: str) -> None:
        super().__init__(f"{name} is {count}, which cannot be cut for {what}")
