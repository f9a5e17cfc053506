"""LoadPlan: every tensor of a checkpoint gets exactly one destination, or stops the load by name.

Only headers are read here. The formats of matrices are decided by the tensors that are present and
compared with what the quantisation files declare; differences are notes, not guesses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from nemotriton.errors import CheckpointError
from nemotriton.model.config import ModelConfig
from nemotriton.model.expected import Expected, Role, expected, matrices
from nemotriton.model.formats import (
    UNQUANTISED,
    ActQuant,
    Algorithm,
    Format,
    QuantScheme,
    read_scheme,
)
from nemotriton.model.renames import Renamed, rename
from nemotriton.model.shards import FLOATS, TensorInfo
from nemotriton.model.sources import Source

_STORED: dict[Role, tuple[str, ...]] = {
    Role.FP8: ("F8_E4M3",),
    Role.CODES: ("U8",),
    Role.BLOCK_SCALE: ("F8_E4M3",),
}
_FORMAT_OF = {"U8": Format.NVFP4, "F8_E4M3": Format.FP8, **dict.fromkeys(FLOATS, Format.BF16)}
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor of a file and where it goes: a whole destination, or row `expert` of a stacked
    one. inverted: the file stores the reciprocal."""

    info: TensorInfo
    name: str
    expert: int | None
    inverted: bool


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank keeps of a destination: `ranges` (start, end) of dimension `dim`, in order, in
    stored elements."""

    dim: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a load will do.

    expected: destinations the model must have. placements: in the order of the files. scheme: the
    formats as stored. mtp: "none" (not in the configuration), "skipped" (not asked for), "absent"
    (not in the file), "partial" (`mtp_missing` says what lacks; nothing of it is loaded) or
    "complete"; mtp_blocks: physical blocks that will be loaded. absent_scales: input scales of
    experts that the file lacks, allowed where activations are not quantised. equal: pairs of
    tensors that must hold the same values. ignored: (tensor, reason). parts: by destination, where
    a rank keeps only part of it.
    """

    expected: Mapping[str, Expected]
    placements: tuple[Placement, ...]
    scheme: QuantScheme
    act_quant: ActQuant
    mtp: str
    mtp_blocks: int
    mtp_missing: tuple[str, ...]
    absent_scales: Mapping[str, tuple[int, ...]]
    equal: tuple[tuple[TensorInfo, TensorInfo], ...]
    ignored: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that will be read into destinations."""
        return sum(placement.info.nbytes for placement in self.placements)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a destination on this rank."""
        shape = list(self.expected[name].shape)
        for part in self.parts.get(name, ()):
            shape[part.dim] = sum(end - start for start, end in part.ranges)
        return tuple(shape)

    def sliced(self, parts: Mapping[str, tuple[Part, ...]]) -> LoadPlan:
        """Return the plan of a rank that keeps only `parts` of the destinations named."""
        return replace(self, parts=parts)

    def check_model(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless `names`, the model's weights, are the destinations."""
        names = set(names)
        unfilled = sorted(names - set(self.expected))
        homeless = sorted(set(self.expected) - names)
        if unfilled or homeless:
            raise CheckpointError(
                f"the model and the plan differ: {len(unfilled)} weights would stay unset "
                f"({_first(unfilled)}), {len(homeless)} destinations do not exist "
                f"({_first(homeless)}). Build the model from plan.scheme and plan.mtp_blocks."
            )


@dataclass(frozen=True, slots=True)
class Survey:
    """What a plan was made from, right or wrong, for a report: `expected`, `placements`, `scheme`,
    `ignored` and `notes` as in LoadPlan, and what stands in the way of a load by its sort.

    unmapped: tensors without destination. missing: destinations, or experts of them, that nothing
    fills, MTP included. wrong: tensors given twice, or of a wrong type or shape, with the reason.
    """

    expected: Mapping[str, Expected]
    placements: tuple[Placement, ...]
    scheme: QuantScheme
    ignored: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    unmapped: tuple[str, ...]
    missing: tuple[str, ...]
    wrong: tuple[str, ...]


def survey(source: Source, config: ModelConfig, mtp: bool = True) -> Survey:
    """Match every tensor of `source` with a model of `config`, without refusing what is wrong.

    CheckpointError only where the formats themselves cannot be told."""
    return _Planner(source, config, mtp, False).survey()


def make_plan(
    source: Source, config: ModelConfig, mtp: bool = True, act_quant: ActQuant = False
) -> LoadPlan:
    """Give every tensor of `source` its destination in a model of `config`.

    mtp: whether MTP blocks are wanted. act_quant: whether activations will be quantised wherever
    the checkpoint was made for that, which makes input scales necessary ("fp8": wherever an FP8
    matrix has one). Raises CheckpointError if
    any tensor has no destination, is missing, given twice, or has the wrong shape or type; it
    counts them and names the first five of each sort.
    """
    return _Planner(source, config, mtp, act_quant).plan()


class _Planner:
    """The state of one `make_plan`."""

    def __init__(self, source: Source, config: ModelConfig, mtp: bool, act_quant: ActQuant) -> None:
        self.config, self.want_mtp, self.act_quant = config, mtp, act_quant
        self.tensors = [(info, rename(info.name)) for info in source.tensors]
        self.by_name = {renamed.name: info for info, renamed in self.tensors}
        self.wrapped = any("language_model." in renamed.prefix for _, renamed in self.tensors)
        self.blocks = self._physical_blocks()
        self.matrices = matrices(config, self.blocks)
        self.notes = list(source.notes)
        self.ignored: list[tuple[str, str]] = []
        self.declared = read_scheme(source.directory, self.matrices)
        self.scheme = self._resolve()
        self.wanted = expected(config, self.scheme, self.blocks)

    def plan(self) -> LoadPlan:
        placements, problems = self._place()
        missing, absent = self._missing(placements)
        mtp_missing = [name for name in missing if name.startswith("mtp.")]
        trunk_missing = [name for name in missing if not name.startswith("mtp.")]
        problems.missing(trunk_missing)
        problems.refuse(self.config)
        state, blocks = self._mtp_state(placements, mtp_missing)
        if state != "complete":
            dropped = [p.info.name for p in placements if p.name.startswith("mtp.")]
            self.ignored += [(name, "its MTP block is incomplete") for name in dropped]
            placements = [p for p in placements if not p.name.startswith("mtp.")]
            self.wanted = {n: e for n, e in self.wanted.items() if not n.startswith("mtp.")}
        self._note_precision(placements)
        absent = {name: experts for name, experts in absent.items() if name in self.wanted}
        if absent:
            of = [f"{name} ({len(experts)})" for name, experts in absent.items()]
            self.notes.append(f"experts lack input scales, which are not used: {_first(of)}")
        return LoadPlan(
            expected=self.wanted,
            placements=tuple(placements),
            scheme=self.scheme,
            act_quant=self.act_quant,
            mtp=state,
            mtp_blocks=blocks,
            mtp_missing=tuple(mtp_missing) if state == "partial" else (),
            absent_scales=absent,
            equal=self._equal_pairs(),
            ignored=tuple(self.ignored),
            notes=(*self.notes, *self.scheme.notes),
        )

    def survey(self) -> Survey:
        placements, problems = self._place()
        missing, _ = self._missing(placements)
        self._note_precision(placements)
        twice = [f"{name} is given twice" for name in problems.twice]
        return Survey(
            expected=self.wanted,
            placements=tuple(placements),
            scheme=self.scheme,
            ignored=tuple(self.ignored),
            notes=(*self.notes, *self.scheme.notes),
            unmapped=tuple(problems.unmapped),
            missing=tuple(missing),
            wrong=(*twice, *problems.typed, *problems.shaped),
        )

    # ---- formats --------------------------------------------------------------------------------
    def _physical_blocks(self) -> int:
        """MTP blocks in the file; as many as declared where there are none, none if not wanted."""
        if self.config.mtp is None or not self.want_mtp:
            return 0
        found = (_MTP_LAYER.match(renamed.name) for _, renamed in self.tensors)
        flat = [int(match[1]) for match in found if match]
        return max(flat) // len(self.config.mtp.pattern) + 1 if flat else self.config.mtp.blocks

    def _resolve(self) -> QuantScheme:
        """The scheme that the tensors show, in the declared terms where these agree."""
        known = set(self.matrices)
        stored: dict[str, dict[Format, str]] = {}
        inputs, kv = set(), set()
        for info, renamed in self.tensors:
            matrix, _, part = renamed.name.rpartition(".")
            if part == "weight" and matrix in known and info.dtype in _FORMAT_OF:
                stored.setdefault(matrix, {}).setdefault(_FORMAT_OF[info.dtype], info.name)
            elif part == "input_scale":
                inputs.add(matrix)
            elif part in ("k_scale", "v_scale"):
                kv.add(matrix.rpartition(".")[0])
        _refuse_mixtures(stored)
        listed, differ = {}, []
        for matrix in self.matrices:
            algorithm = self.declared.algorithm(matrix)
            storage = next(iter(stored.get(matrix, {algorithm.storage: ""})))
            if storage is not algorithm.storage:
                differ.append(f"{matrix} ({storage}, declared {algorithm.storage})")
                algorithm = _undeclared(storage, matrix in inputs)
            listed[matrix] = algorithm
            quantises = algorithm in (Algorithm.FP8, Algorithm.NVFP4)
            if self.act_quant is True and quantises:
                inputs.add(matrix)
        self._note_formats(differ)
        return QuantScheme(
            listed=listed,
            kv=self.declared.kv,
            kv_scaled=frozenset(kv),
            input_scaled=frozenset(inputs),
            notes=self.declared.notes,
        )

    def _note_formats(self, differ: list[str]) -> None:
        if differ and self.declared == UNQUANTISED:
            self.notes.append(
                f"no quantisation config; the formats of {len(differ)} matrices were taken from "
                f"their tensors: {_first(differ)}"
            )
        elif differ:
            self.notes.append(
                f"{len(differ)} matrices are stored otherwise than declared, and are read as they "
                f"are stored: {_first(differ)}"
            )

    def _note_precision(self, placements: list[Placement]) -> None:
        narrow = [
            p.info.name
            for p in placements
            if p.name.endswith("e_score_correction_bias") and p.info.dtype in ("BF16", "F16")
        ]
        if narrow:
            self.notes.append(
                f"{len(narrow)} router correction biases are stored in 16 bits; experts that "
                f"differ by less than a step now tie: {_first(narrow)}"
            )

    # ---- destinations ---------------------------------------------------------------------------
    def _place(self) -> tuple[list[Placement], _Problems]:
        placements: list[Placement] = []
        problems = _Problems()
        taken: dict[str, set[int | None]] = {}
        for info, renamed in self.tensors:
            entry, expert = self.wanted.get(renamed.name), renamed.expert
            if entry is None or (expert is not None and expert >= entry.experts):
                reason = self._ignorable(info, renamed)
                if reason:
                    self.ignored.append((info.name, reason))
                else:
                    problems.unmapped.append(info.name)
                continue
            before = taken.setdefault(renamed.name, set())
            if expert in before or (before and (expert is None or None in before)):
                problems.twice.append(info.name)
            before.add(expert)
            allowed = _STORED.get(entry.role, FLOATS)
            shape = entry.shape if expert is None else entry.shape[1:]
            if info.dtype not in allowed:
                problems.typed.append(f"{info.name} is {info.dtype}, not {' or '.join(allowed)}")
            elif not _fits(info.shape, shape, renamed.name, entry.role):
                problems.shaped.append(f"{info.name} is {list(info.shape)}, not {list(shape)}")
            placements.append(Placement(info, renamed.name, expert, renamed.inverted))
        return placements, problems

    def _ignorable(self, info: TensorInfo, renamed: Renamed) -> str:
        """Why a tensor without destination may be left out, or "" if it may not."""
        if renamed.name == "lm_head.weight" and self.config.tied:
            return "the head is tied to the embeddings, which it must equal"
        if renamed.name.startswith("mtp.") and not self.want_mtp:
            return "MTP was not asked for"
        matrix, _, part = renamed.name.rpartition(".")
        if part == "input_scale" and matrix in self.scheme.listed:
            return "the input scale of a matrix that is not quantised"
        if self.wrapped and "language_model." not in renamed.prefix:
            return "outside the language model of a multimodal checkpoint"
        return ""

    def _missing(self, placements: list[Placement]) -> tuple[list[str], dict[str, tuple[int, ...]]]:
        """Destinations, or experts of them, that no tensor fills: (needed, merely absent)."""
        filled: dict[str, set[int | None]] = {}
        for placement in placements:
            filled.setdefault(placement.name, set()).add(placement.expert)
        missing: list[str] = []
        absent: dict[str, tuple[int, ...]] = {}
        for name, entry in self.wanted.items():
            have = filled.get(name, set())
            if None in have or (entry.experts and len(have) == entry.experts):
                continue
            lacking = tuple(sorted(set(range(entry.experts)) - have)) if have else ()
            matrix = entry.matrix or ""
            used = self.scheme.quantises(matrix, self.act_quant)
            if lacking and name.endswith(".input_scale") and not used:
                absent[name] = lacking
            else:
                missing += [f"{name} of expert {e}" for e in lacking] or [name]
        return missing, absent

    def _mtp_state(self, placements: list[Placement], missing: list[str]) -> tuple[str, int]:
        if self.config.mtp is None:
            return "none", 0
        if not self.want_mtp:
            return "skipped", 0
        if not any(placement.name.startswith("mtp.") for placement in placements):
            return "absent", 0
        return ("partial", 0) if missing else ("complete", self.blocks)

    def _equal_pairs(self) -> tuple[tuple[TensorInfo, TensorInfo], ...]:
        head, embeddings = (self.by_name.get(f"{n}.weight") for n in ("lm_head", "embeddings"))
        if not self.config.tied or head is None or embeddings is None:
            return ()
        if head.shape != embeddings.shape:
            raise CheckpointError(
                f"tie_word_embeddings is true, but {head.name} is {list(head.shape)} and the "
                f"embeddings are {list(embeddings.shape)}. Set it to false in config.json."
            )
        return ((head, embeddings),)


@dataclass
class _Problems:
    """Names of tensors by what is wrong with them."""

    unmapped: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    shaped: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def missing(self, names: list[str]) -> None:
        self.lacking += names

    def refuse(self, config: ModelConfig) -> None:
        """Raise one CheckpointError that tells all of it."""
        sorts = (
            (self.unmapped, "has no destination", "have no destination"),
            (self.lacking, "is missing", "are missing"),
            (self.twice, "is given twice", "are given twice"),
            (self.typed, "has the wrong type", "have the wrong type"),
            (self.shaped, "has the wrong shape", "have the wrong shape"),
        )
        told = [
            f"{len(names)} tensor{'s' if len(names) > 1 else ''} "
            f"{many if len(names) > 1 else one}: {_first(names)}."
            for names, one, many in sorts
            if names
        ]
        if told:
            raise CheckpointError(f"{' '.join(told)} {self._remedy(config)} Nothing was loaded.")

    def _remedy(self, config: ModelConfig) -> str:
        if config.mtp is None and any("mtp." in name for name in self.unmapped):
            return (
                "config.json declares no MTP block: set num_nextn_predict_layers and "
                "mtp_hybrid_override_pattern as the release has them."
            )
        if self.lacking == ["lm_head.weight"]:
            return (
                "If the head is the embedding matrix, set tie_word_embeddings to true in "
                "config.json; else download the file again."
            )
        if self.twice:
            return "Keep one file of each tensor in the directory."
        return "Check that config.json and the weights belong together, or download both again."


def _undeclared(storage: Format, has_input_scale: bool) -> Algorithm:
    match storage:
        case Format.BF16:
            return Algorithm.NONE
        case Format.FP8:
            return Algorithm.FP8
        case Format.NVFP4:
            return Algorithm.NVFP4 if has_input_scale else Algorithm.W4A16_NVFP4


def _refuse_mixtures(stored: Mapping[str, Mapping[Format, str]]) -> None:
    mixed = [
        f"{matrix} ({', '.join(f'{storage} in {name}' for storage, name in formats.items())})"
        for matrix, formats in stored.items()
        if len(formats) > 1
    ]
    if mixed:
        raise CheckpointError(
            f"the experts of {len(mixed)} matrices are stored in several formats: {_first(mixed)}. "
            "The experts of a layer must share one; quantise all of them or none."
        )


def _fits(stored: tuple[int, ...], wanted: tuple[int, ...], name: str, role: Role) -> bool:
    if stored == wanted:
        return True
    if role is Role.SCALE:  # [] or [1] for one value, which may stand for all experts
        squeezed = tuple(size for size in stored if size != 1)
        return squeezed in ((), tuple(size for size in wanted if size != 1))
    if name.endswith(".conv1d.weight"):
        return stored == (wanted[0], 1, *wanted[1:])
    return False


def _first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
