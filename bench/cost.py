"""What a step must do, from shapes alone: bytes and operations by kind of layer, and the floor.

Weights count once a step, experts as many as its rows are expected to reach,
E (1 - (1 - k/E)^rows); SSM states are read and written, K/V read. A part of the work takes at least
the longer of its bytes at the copy rate and its operations at the rate of its matrices' format; the
floor is the sum over parts. With `activations`, what goes in and out of every op counts as well, as
in a model whose ops are not fused; without, only what no fusion saves.

Operations of the scan are those of chunks with whole squares: C B^T, its product with x, the state
and its product with C, 6.5 million a token at Super's shape; of causal attention the half that is
not masked.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nemotriton.engine.loading import Weights
from nemotriton.engine.replay import ring_entry_bytes
from nemotriton.kernels import REPLAY_INTERVAL
from nemotriton.model.config import LayerKind, ModelConfig, MoeConfig
from nemotriton.model.expected import Expected, Role

KINDS = ("M", "E", "*", "-", "head", "MTP", "rest")


@dataclass(frozen=True, slots=True)
class Load:
    """What a step is asked: sequences, tokens behind each, and their new rows.

    drafts: rows behind the last token of each. tokens: of a prompt's piece a sequence, 0 where the
    step decodes. kv_item, state_item, item: bytes of an element of K/V, of SSM states, of
    activations; state_scale: bytes beside a row of a state. rollback: how states forget drafts.
    """

    batch: int
    context: int
    drafts: int = 0
    tokens: int = 0
    kv_item: int = 2
    state_item: int = 4
    item: int = 2
    state_scale: int = 0
    rollback: str = "lanes"

    @property
    def each(self) -> int:
        """New rows of a sequence."""
        return self.tokens or self.drafts + 1

    @property
    def rows(self) -> int:
        return self.batch * self.each


@dataclass(frozen=True, slots=True)
class Part:
    """Work that counts by itself: a matrix, or what one op does between two.

    line: of the card. kind: of `KINDS`. rate: "bf16" or "fp8", of its products.
    """

    line: str
    kind: str
    name: str
    nbytes: float
    flops: float = 0.0
    rate: str = "bf16"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU can do at most: GB/s of a copy, TFLOP/s of products in bf16 and in fp8."""

    copy_gbs: float
    bf16_tflops: float
    fp8_tflops: float

    def us(self, part: Part) -> float:
        """The least microseconds of a part."""
        tflops = self.fp8_tflops if part.rate == "fp8" else self.bf16_tflops
        return max(part.nbytes / self.copy_gbs / 1e3, part.flops / tflops / 1e6)

    def bound(self, part: Part) -> str:
        """What sets it: "copy", or the rate of the products."""
        return "copy" if self.us(part) <= part.nbytes / self.copy_gbs / 1e3 else part.rate


def floor_us(found: Iterable[Part], rates: Rates) -> float:
    return sum(rates.us(part) for part in found)


def by_line(found: Iterable[Part]) -> dict[str, float]:
    """The card: bytes by line."""
    lines: dict[str, float] = {}
    for part in found:
        lines[part.line] = lines.get(part.line, 0.0) + part.nbytes
    return lines


def by_kind(found: Sequence[Part], rates: Rates) -> dict[str, dict[str, float]]:
    """Of each kind of layer, all its layers together: bytes, flops and microseconds at least."""
    kinds: dict[str, dict[str, float]] = {}
    for part in found:
        sums = kinds.setdefault(part.kind, {"bytes": 0.0, "flops": 0.0, "floor_us": 0.0})
        sums["bytes"] += part.nbytes
        sums["flops"] += part.flops
        sums["floor_us"] += rates.us(part)
    return {kind: kinds[kind] for kind in KINDS if kind in kinds}


def reached(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that so many tokens are expected to reach, each drawing top_k at random."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


# ------------------------------------------------------------------------------------------- parts
def parts(
    weights: Weights, load: Load, seen: float | None = None, activations: bool = False
) -> list[Part]:
    """All of a step; `seen` replaces the expected number of distinct experts a layer."""
    config = weights.config
    found = [*_weights(weights, load, seen, activations), *_caches(config, load, activations)]
    return [*found, *_between(config, load)] if activations else found


def kind_of(config: ModelConfig, name: str) -> tuple[str, str]:
    """The kind of layer that a weight belongs to, and its line of the card."""
    if name.startswith("lm_head."):
        return "head", "head"
    if name.startswith("mtp."):
        return "MTP", "MTP weights"
    if name.startswith("layers."):
        kind = config.kinds[int(name.split(".")[1])].value
        return kind, "E router, shared" if kind == "E" else f"{kind} weights"
    return "rest", "norms"


def _weights(weights: Weights, load: Load, seen: float | None, activations: bool) -> Iterator[Part]:
    """Every weight, with the product it is part of where it is a matrix's own."""
    config = weights.config
    logits = load.rows if not load.tokens else load.batch
    for name, entry in weights.expected.items():
        kind, line = kind_of(config, name)
        if name == "embeddings.weight":
            yield Part("embedding", "rest", name, load.rows * config.width * load.item)
            if not config.tied:
                continue
            kind = line = "head"
        times = {"MTP": load.drafts, "head": 1 + load.drafts}.get(kind, 1)
        nbytes = times * float(entry.nbytes(load.item))
        if kind == "head" and entry.role is Role.MATRIX:  # drafts are picked by its e4m3 copy
            nbytes -= load.drafts * entry.numel * (load.item - 1)
        rows = logits if kind == "head" else load.rows
        flops = inout = 0.0
        moe = moe_of(config, name) if entry.experts else None
        if moe is not None:
            line = "E experts"
            used = seen if seen is not None and kind == "E" else experts(moe, load, kind)
            nbytes *= used / entry.experts
        if name.endswith("weight") and len(entry.shape) >= 2 and "conv1d" not in name:
            flops, inout = product(entry, rows, moe, load.item)
        rate = "fp8" if entry.role is Role.FP8 else "bf16"
        yield Part(line, kind, name, nbytes + times * inout * activations, times * flops, rate)


def experts(moe: MoeConfig, load: Load, kind: str) -> float:
    """Distinct experts of a layer in a pass; of the draft block's passes, each behind one row of a
    sequence and the last behind all, the mean."""
    if kind != "MTP":
        return reached(moe.experts, moe.top_k, load.rows)
    passes = [load.batch] * (load.drafts - 1) + [load.rows]
    return sum(reached(moe.experts, moe.top_k, rows) for rows in passes) / len(passes)


def moe_of(config: ModelConfig, name: str) -> MoeConfig:
    moe = config.mtp_moe if name.startswith("mtp.") else config.moe
    assert moe is not None
    return moe


def product(entry: Expected, rows: int, moe: MoeConfig | None, item: int) -> tuple[float, float]:
    """Operations of `rows` rows with a matrix, and bytes of what goes in and out."""
    n, k = entry.shape[-2], entry.shape[-1] * entry.columns
    if moe is None:
        return 2.0 * rows * n * k, float(rows * (n + k) * item)
    hidden, model = moe.top_k * moe.width, (n if k == moe.width else k)
    return 2.0 * rows * moe.top_k * n * k, float(rows * (hidden + model) * item)


def _caches(config: ModelConfig, load: Load, activations: bool) -> Iterator[Part]:
    """States, windows and K/V that a step reads and writes, and of a prompt's piece the scan and
    the attention themselves."""
    rows = load.rows * load.item * activations
    if config.mamba is not None and config.mamba_layers:
        m = config.mamba
        nbytes = load.batch * state_bytes(config, load)
        nbytes += rows * (2 * (m.inner + m.groups * m.state) + m.heads)
        flops = scan_flops(config, load.rows) if load.tokens else 0.0
        yield from [Part("M states", "M", "states", nbytes, flops)] * len(config.mamba_layers)
    a = config.attention
    if a is not None and config.attention_layers:
        kv = 2 * a.kv_rows * load.kv_item * (load.batch * load.context + load.rows)
        flops = 4.0 * a.q_rows * load.rows * (load.context + load.each / 2)
        part = Part("* K/V", "*", "attention", kv + 2.0 * rows * (a.q_rows + a.kv_rows), flops)
        yield from [part] * len(config.attention_layers)


def state_bytes(config: ModelConfig, load: Load) -> float:
    """Bytes of a sequence's state and window in one layer that a step reads and writes."""
    m = config.mamba
    assert m is not None
    state = m.inner * (m.state * load.state_item + load.state_scale)
    window = (m.conv_width - 1) * m.conv_dim * load.item
    if load.tokens:
        return 2.0 * (state + window)
    windows = window * (load.drafts + 4 if load.drafts else 2)
    if load.rollback != "replay":  # a state a row
        return float(state * (1 + load.each) + windows)
    entries = REPLAY_INTERVAL / 2 + 2 * load.each  # a state is written when its ring is full
    return state * (1 + 1 / REPLAY_INTERVAL) + windows + entries * ring_entry_bytes(m, load.item)


def scan_flops(config: ModelConfig, rows: int) -> float:
    """Operations of one layer's scan over so many rows."""
    m = config.mamba
    assert m is not None
    square = m.groups * m.state + m.inner  # C B^T, and its product with x
    return 2.0 * rows * (m.chunk * square + 2 * m.inner * m.state)


def _between(config: ModelConfig, load: Load) -> Iterator[Part]:
    """What the other ops without a matrix read and write: norms, convolutions, the router."""
    rows, item = load.rows, load.item
    stream = 4 if config.residual_fp32 else item
    for index, kind in enumerate(config.kinds):
        columns = {"norm": config.width * (2 * item + 2 * stream)}
        moe = config.moes[index]
        if kind is LayerKind.MAMBA and config.mamba is not None:
            columns["conv"] = 2 * config.mamba.conv_dim * item
            columns["gated norm"] = 3 * config.mamba.inner * item
        elif moe is not None:
            columns["router"] = 4 * (moe.experts + 3 * moe.top_k)
        for name, size in columns.items():
            yield Part(f"{kind.value} activations", kind.value, name, float(rows * size))
