"""The tensors a model must be given, computed from its configuration and scheme alone.

Names are canonical: the release's own without a prefix, experts stacked as [E, rows, cols], the
convolution as [channels, width]. MTP layers are numbered flat, block * len(pattern) + position.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from nemotriton.errors import ConfigError
from nemotriton.model.config import LayerKind, ModelConfig, MoeConfig
from nemotriton.model.formats import NVFP4_GROUP, UNQUANTISED, Format, QuantScheme


class Role(enum.StrEnum):
    """What a tensor is, which decides its dtype in memory and the dtypes a file may store."""

    MATRIX = "matrix"  # in the model's dtype
    VECTOR = "vector"  # in the model's dtype: norms, convolutions, biases
    FP32 = "fp32"  # always fp32: routing and the recurrence depend on it
    FP8 = "fp8"  # e4m3 values
    CODES = "codes"  # uint8, two e2m1 codes each
    BLOCK_SCALE = "block_scale"  # e4m3
    SCALE = "scale"  # fp32: one value, or one an expert


_ITEM_BYTES = {Role.FP32: 4, Role.FP8: 1, Role.CODES: 1, Role.BLOCK_SCALE: 1, Role.SCALE: 4}


@dataclass(frozen=True, slots=True)
class Expected:
    """One destination. matrix: the matrix it is part of, canonically, or None. experts: length of
    the leading dimension where it stacks experts, else 0. columns: matrix columns that one element
    of the last dimension stands for (2 for codes, 16 for block scales)."""

    shape: tuple[int, ...]
    role: Role
    matrix: str | None = None
    experts: int = 0
    columns: int = 1

    @property
    def numel(self) -> int:
        """Number of stored elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def nbytes(self, itemsize: int) -> int:
        """Bytes in memory, where the model's dtype takes `itemsize` bytes."""
        return self.numel * _ITEM_BYTES.get(self.role, itemsize)


@dataclass
class _Collector:
    scheme: QuantScheme
    found: dict[str, Expected] = field(default_factory=dict)

    def vector(self, name: str, *shape: int) -> None:
        self.found[name] = Expected(shape, Role.VECTOR)

    def fp32(self, name: str, *shape: int) -> None:
        self.found[name] = Expected(shape, Role.FP32)

    def matrix(self, name: str, rows: int, cols: int, bias: bool = False, experts: int = 0) -> None:
        self.found |= matrix_parts(name, rows, cols, self.scheme, experts)
        if bias:
            self.vector(f"{name}.bias", rows)


def matrix_parts(
    name: str, rows: int, cols: int, scheme: QuantScheme, experts: int = 0
) -> dict[str, Expected]:
    """The tensors that hold the matrix `name` [rows, cols], of every expert, in its format.

    ConfigError where the columns cannot be in that format.
    """
    lead = (experts,) if experts else ()
    storage = scheme.of(name)
    found = {}

    def part(tail: str, shape: tuple[int, ...], role: Role, columns: int = 1) -> None:
        found[f"{name}.{tail}"] = Expected(shape, role, name, experts, columns)

    match storage:
        case Format.BF16:
            part("weight", (*lead, rows, cols), Role.MATRIX)
        case Format.FP8:
            part("weight", (*lead, rows, cols), Role.FP8)
            part("weight_scale", lead, Role.SCALE)
        case Format.NVFP4:
            if cols % NVFP4_GROUP:
                raise ConfigError(
                    f"{name} has {cols} columns, not a multiple of NVFP4's groups of "
                    f"{NVFP4_GROUP}; keep this matrix in bf16."
                )
            part("weight", (*lead, rows, cols // 2), Role.CODES, 2)
            scales = (*lead, rows, cols // NVFP4_GROUP)
            part("weight_scale", scales, Role.BLOCK_SCALE, NVFP4_GROUP)
            part("weight_scale_2", lead, Role.SCALE)
    if storage is not Format.BF16 and scheme.has_input_scale(name):
        part("input_scale", lead, Role.SCALE)
    return found


def expected(
    config: ModelConfig,
    scheme: QuantScheme = UNQUANTISED,
    mtp_blocks: int | None = None,
) -> dict[str, Expected]:
    """Return every destination of a model by canonical name.

    mtp_blocks: physical MTP blocks, 0 for none; None: as many as the configuration declares.
    """
    out = _Collector(scheme)
    out.vector("embeddings.weight", config.vocab, config.width)
    layers = zip(config.kinds, config.moes, config.mlp_widths, strict=True)
    for index, (kind, moe, mlp_width) in enumerate(layers):
        _layer(out, config, f"layers.{index}", kind, moe, mlp_width)
    out.vector("norm_f.weight", config.width)
    if not config.tied:
        out.matrix("lm_head", config.vocab, config.width)
    if config.mtp is not None:
        blocks = config.mtp.blocks if mtp_blocks is None else mtp_blocks
        for flat in range(blocks * len(config.mtp.pattern)):
            _mtp_layer(out, config, flat)
    return out.found


def matrices(config: ModelConfig, mtp_blocks: int | None = None) -> list[str]:
    """Return the canonical names of all matrices that a scheme may quantise, MTP included."""
    wanted = expected(config, UNQUANTISED, mtp_blocks)
    return [e.matrix for name, e in wanted.items() if e.matrix and name.endswith(".weight")]


def _layer(
    out: _Collector,
    config: ModelConfig,
    name: str,
    kind: LayerKind,
    moe: MoeConfig | None,
    mlp_width: int,
) -> None:
    out.vector(f"{name}.norm.weight", config.width)
    mixer = f"{name}.mixer"
    match kind:
        case LayerKind.MAMBA:
            _mamba(out, config, mixer)
        case LayerKind.ATTENTION:
            _attention(out, config, mixer)
        case LayerKind.MLP:
            out.matrix(f"{mixer}.up_proj", mlp_width, config.width, config.mlp_bias)
            out.matrix(f"{mixer}.down_proj", config.width, mlp_width, config.mlp_bias)
        case LayerKind.MOE:
            assert moe is not None
            _moe(out, config.width, moe, mixer)


def _mamba(out: _Collector, config: ModelConfig, mixer: str) -> None:
    m = config.mamba
    assert m is not None
    out.matrix(f"{mixer}.in_proj", m.in_rows, config.width, m.proj_bias)
    out.vector(f"{mixer}.conv1d.weight", m.conv_dim, m.conv_width)
    if m.conv_bias:
        out.vector(f"{mixer}.conv1d.bias", m.conv_dim)
    for vector in ("A_log", "D", "dt_bias"):
        out.fp32(f"{mixer}.{vector}", m.heads)
    out.vector(f"{mixer}.norm.weight", m.inner)
    out.matrix(f"{mixer}.out_proj", config.width, m.inner, m.proj_bias)


def _attention(out: _Collector, config: ModelConfig, mixer: str) -> None:
    a = config.attention
    assert a is not None
    out.matrix(f"{mixer}.q_proj", a.q_rows, config.width, a.bias)
    out.matrix(f"{mixer}.k_proj", a.kv_rows, config.width, a.bias)
    out.matrix(f"{mixer}.v_proj", a.kv_rows, config.width, a.bias)
    out.matrix(f"{mixer}.o_proj", config.width, a.q_rows, a.bias)
    if mixer in out.scheme.kv_scaled:
        out.found[f"{mixer}.k_proj.k_scale"] = Expected((), Role.SCALE)
        out.found[f"{mixer}.v_proj.v_scale"] = Expected((), Role.SCALE)


def _moe(out: _Collector, width: int, moe: MoeConfig, mixer: str) -> None:
    latent = moe.latent or width
    out.fp32(f"{mixer}.gate.weight", moe.experts, width)
    out.fp32(f"{mixer}.gate.e_score_correction_bias", moe.experts)
    out.matrix(f"{mixer}.experts.up_proj", moe.width, latent, experts=moe.experts)
    out.matrix(f"{mixer}.experts.down_proj", latent, moe.width, experts=moe.experts)
    if moe.shared_width:
        out.matrix(f"{mixer}.shared_experts.up_proj", moe.shared_width, width)
        out.matrix(f"{mixer}.shared_experts.down_proj", width, moe.shared_width)
    if moe.latent:
        out.matrix(f"{mixer}.fc1_latent_proj", moe.latent, width)
        out.matrix(f"{mixer}.fc2_latent_proj", width, moe.latent)


def _mtp_layer(out: _Collector, config: ModelConfig, flat: int) -> None:
    assert config.mtp is not None
    pattern = config.mtp.pattern
    name, position = f"mtp.layers.{flat}", flat % len(pattern)
    if position == 0:
        out.vector(f"{name}.enorm.weight", config.width)
        out.vector(f"{name}.hnorm.weight", config.width)
        out.matrix(f"{name}.eh_proj", config.width, 2 * config.width)
    _layer(out, config, name, pattern[position], config.mtp_moe, config.mtp_mlp_width)
    if position == len(pattern) - 1:
        out.vector(f"{name}.final_layernorm.weight", config.width)


def release_size(wanted: dict[str, Expected], gate_fp32: bool = False) -> tuple[int, int]:
    """Return (bytes, tensors) of `wanted` as the public releases store it.

    Experts are one by one, correction biases fp32, everything else that is not quantised bf16; the
    router gates are fp32 in the Nano release (`gate_fp32`).
    """
    total, count = 0, 0
    for name, entry in wanted.items():
        wide = name.endswith("e_score_correction_bias")
        wide |= gate_fp32 and name.endswith("gate.weight")
        narrow = entry.role is Role.FP32 and not wide
        total += 2 * entry.numel if narrow else entry.nbytes(2)
        count += max(1, entry.experts)
    return total, count
