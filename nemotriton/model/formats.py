"""Which matrix of a checkpoint is stored in which format, as its quantisation files declare it.

    bf16    the matrix itself, in any float type
    fp8     `weight` e4m3 [N, K]; `weight_scale` fp32, one a matrix; w = weight * weight_scale
    nvfp4   `weight` u8 [N, K/2], even column in the low nibble; `weight_scale` e4m3 [N, K/16];
            `weight_scale_2` fp32, one a matrix; w = e2m1 * weight_scale * weight_scale_2
    both    `input_scale` fp32, one a matrix: the static scale of quantised activations

Two files may speak: `hf_quant_config.json` (modelopt's own) and the key `quantization_config` of
`config.json` (modelopt or compressed-tensors). Matrices are named canonically and without
`.weight`: "layers.1.mixer.experts.up_proj" stands for that matrix of every expert of the layer.

What is declared here is checked against the tensors by `checkpoint.make_plan`, which decides.
Sources: modelopt's export (quant_utils), vLLM's readers of both spellings.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nemotriton.errors import ConfigError

NVFP4_GROUP = 16  # columns that share one block scale
# Whether activations are quantised: nowhere, wherever the checkpoint was made for it, or at FP8
# matrices alone
ActQuant = bool | Literal["fp8"]


class Format(enum.StrEnum):
    """How a matrix is stored."""

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class Algorithm(enum.StrEnum):
    """How a matrix is meant to be computed: its storage, and whether activations are quantised."""

    NONE = "none"
    FP8 = "FP8"
    NVFP4 = "NVFP4"
    W4A16_NVFP4 = "W4A16_NVFP4"

    @property
    def storage(self) -> Format:
        """The format the matrix is stored in."""
        return _STORAGE[self]


_STORAGE = {
    Algorithm.NONE: Format.BF16,
    Algorithm.FP8: Format.FP8,
    Algorithm.NVFP4: Format.NVFP4,
    Algorithm.W4A16_NVFP4: Format.NVFP4,
}

_ALGORITHMS = {algorithm.value.upper(): algorithm for algorithm in Algorithm}

# How files may spell the path of the trunk's modules; the canonical name has no prefix.
TRUNK_PREFIXES = (
    "language_model.backbone.",
    "language_model.model.",
    "model.language_model.",
    "backbone.",
    "model.",
    "language_model.",
)
_EXPERT = re.compile(r"\.experts\.(?:\d+|\*)\.")


def canonical_module(name: str) -> str:
    """Return a module's name without its prefix and without an expert's index."""
    for prefix in TRUNK_PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    return _EXPERT.sub(".experts.", name)


def _spellings(matrix: str) -> list[str]:
    """All names a pattern in a file may have meant by a canonical matrix."""
    one_by_one = matrix.replace(".experts.", ".experts.0.")
    names = [matrix] if one_by_one == matrix else [matrix, one_by_one]
    return [prefix + name for prefix in ("", *TRUNK_PREFIXES) for name in names]


@dataclass(frozen=True, slots=True)
class Patterns:
    """Module names of an exclusion or target list: exact, with wildcards, or "re:" and a regex.

    A name also stands for everything inside that module.
    """

    texts: tuple[str, ...]
    regex: re.Pattern[str] | None

    @classmethod
    def of(cls, texts: Iterable[str]) -> Patterns:
        """Compile `texts`; a wrong regex is a ConfigError."""
        texts = tuple(texts)
        alternatives = "|".join(f"(?:{_regex(text)})" for text in texts)
        return cls(texts, re.compile(alternatives) if texts else None)

    def match(self, matrix: str) -> bool:
        """Whether a pattern names the canonical `matrix` in any of its spellings."""
        regex = self.regex
        return regex is not None and any(regex.match(name) for name in _spellings(matrix))


def _regex(text: str) -> str:
    if text.startswith("re:"):
        try:
            re.compile(f"|{text[3:]}")  # as it will stand: inside an alternation
        except re.error as error:
            raise ConfigError(
                f"{text!r} is not a regular expression ({error}); correct the quantisation config."
            ) from error
        return text[3:]
    name = _EXPERT.sub(".experts.", text)
    body = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in name)
    return rf"{body}(?:\..*)?\Z"


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Answers, for a canonical matrix name, how that matrix is stored and computed.

    listed: algorithm of matrices, or of all matrices in a module, by canonical name.
    targets: the same by pattern, in order. default: of every matrix nothing else names.
    excluded: patterns of matrices that stay as they are.
    kv: "bf16" or "fp8", what the key/value cache was calibrated for.
    kv_scaled: attention mixers whose file has k and v scales; input_scaled: matrices whose file has
    an input scale (None: all that quantise activations). Both are known once tensors were seen.
    notes: what a reader should be told, e.g. contradictions between the files.
    """

    default: Algorithm = Algorithm.NONE
    listed: Mapping[str, Algorithm] = field(default_factory=dict)
    targets: tuple[tuple[Patterns, Algorithm], ...] = ()
    excluded: Patterns = Patterns((), None)
    kv: str = "bf16"
    kv_scaled: frozenset[str] = frozenset()
    input_scaled: frozenset[str] | None = None
    notes: tuple[str, ...] = ()

    def algorithm(self, matrix: str) -> Algorithm:
        """The algorithm of `matrix`: its own entry, exclusions, its module's entry, patterns."""
        if matrix in self.listed:
            return self.listed[matrix]
        if self.excluded.match(matrix):
            return Algorithm.NONE
        module = matrix
        while "." in module:
            module = module.rpartition(".")[0]
            if module in self.listed:
                return self.listed[module]
        for patterns, algorithm in self.targets:
            if patterns.match(matrix):
                return algorithm
        return self.default

    def of(self, matrix: str) -> Format:
        """The storage format of `matrix`."""
        return self.algorithm(matrix).storage

    def weight_only(self, matrix: str) -> bool:
        """Whether activations stay in the model's dtype at `matrix`."""
        return self.algorithm(matrix) in (Algorithm.NONE, Algorithm.W4A16_NVFP4)

    def has_input_scale(self, matrix: str) -> bool:
        """Whether an input scale belongs to `matrix`."""
        if self.input_scaled is not None:
            return matrix in self.input_scaled
        return not self.weight_only(matrix)

    def quantises(self, matrix: str, act_quant: ActQuant) -> bool:
        """Whether activations are quantised at `matrix`, of what is asked for; "fp8" leaves a
        matrix as it is whose input scale nobody has given."""
        if act_quant == "fp8":
            return self.algorithm(matrix) is Algorithm.FP8 and self.has_input_scale(matrix)
        return act_quant and not self.weight_only(matrix)

    def counts(self, matrices: Iterable[str]) -> dict[Format, int]:
        """How many of `matrices` each format has; formats without any are left out."""
        counts: dict[Format, int] = {}
        for matrix in matrices:
            counts[self.of(matrix)] = counts.get(self.of(matrix), 0) + 1
        return counts


UNQUANTISED = QuantScheme()


# -------------------------------------------------------------------------------- reading the files
def read_scheme(directory: Path, matrices: Iterable[str]) -> QuantScheme:
    """Read what a checkpoint directory declares about the canonical `matrices` of its model.

    Neither file there, or nothing said: everything is bf16. Where both speak and disagree,
    `config.json` is followed, as other engines do, and `notes` names the matrices. Raises
    ConfigError for an algorithm that is not supported, naming it and the matrix it is said of.
    """
    section = _load(directory / "config.json")
    for wrapper in ("text_config", "llm_config", "language_config"):
        if "quantization_config" not in section and isinstance(section.get(wrapper), dict):
            section = section[wrapper]
    declared = section.get("quantization_config") or {}
    exported = _load(directory / "hf_quant_config.json")
    first = parse_config(declared) if declared else None
    second = parse_hf_quant(exported) if exported else None
    if first is None or second is None:
        return first or second or UNQUANTISED
    if "kv_cache_scheme" not in declared:
        first = replace(first, kv=second.kv)
    return _reconcile(first, second, matrices)


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); download it again.") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} holds a {type(data).__name__}, not an object; download it again."
        )
    return data


def parse_hf_quant(data: dict[str, Any]) -> QuantScheme:
    """Read the contents of an `hf_quant_config.json`."""
    section = data.get("quantization")
    if not isinstance(section, dict):
        raise ConfigError("hf_quant_config.json has no object 'quantization'; download it again.")
    scheme = _parse_modelopt(section, "hf_quant_config.json")
    return replace(scheme, kv=_kv(section.get("kv_cache_quant_algo"), "hf_quant_config.json"))


def parse_config(section: dict[str, Any]) -> QuantScheme:
    """Read the value of `quantization_config` in a `config.json`."""
    where = "config.json quantization_config"
    if not isinstance(section, dict):
        raise ConfigError(f"{where} is {section!r}; it must be an object.")
    method = section.get("quant_method", "modelopt")
    if method == "modelopt":
        scheme = _parse_modelopt(section, where)
    elif method == "compressed-tensors":
        scheme = _parse_groups(section, where)
    else:
        raise ConfigError(
            f"{where}: quant_method {method!r} is not supported; use a checkpoint made by modelopt "
            "or compressed-tensors, or the BF16 release."
        )
    return replace(scheme, kv=_kv_from_groups(section.get("kv_cache_scheme"), where))


def _algorithm(value: object, where: str, subject: str) -> Algorithm:
    if value is None:
        return Algorithm.NONE
    algorithm = _ALGORITHMS.get(str(value).upper())
    if algorithm is None:
        raise ConfigError(
            f"{where}: quant_algo {value!r} of {subject} is not supported. Supported: FP8, NVFP4, "
            "W4A16_NVFP4, MIXED_PRECISION of these; use another release of the model."
        )
    return algorithm


def _check_group(
    section: Mapping[str, Any], algorithm: Algorithm, where: str, subject: str
) -> None:
    group = section.get("group_size")
    if algorithm.storage is Format.NVFP4 and group not in (None, NVFP4_GROUP):
        raise ConfigError(
            f"{where}: group_size {group!r} of {subject}; NVFP4 has groups of {NVFP4_GROUP}."
        )


def _parse_modelopt(section: dict[str, Any], where: str) -> QuantScheme:
    """Read modelopt's fields, which are almost the same in both files."""
    excluded = (*(section.get("exclude_modules") or ()), *(section.get("ignore") or ()))
    algo, table = section.get("quant_algo"), section.get("quantized_layers")
    mixed = str(algo).upper() == "MIXED_PRECISION"
    if mixed and not isinstance(table, dict):
        raise ConfigError(
            f"{where}: quant_algo MIXED_PRECISION without quantized_layers; take that table "
            "from the release's other file."
        )
    listed, targets = _read_table(table or {}, where)
    scheme = QuantScheme(listed=listed, targets=targets, excluded=Patterns.of(excluded))
    if mixed:
        return scheme
    if algo is None and section.get("config_groups"):
        groups = _parse_groups(section, where)
        return replace(groups, listed=listed, excluded=scheme.excluded)
    default = _algorithm(algo, where, "the whole model")
    _check_group(section, default, where, "the whole model")
    if default is Algorithm.NVFP4 and _all_inputs_plain(section.get("config_groups")):
        default = Algorithm.W4A16_NVFP4
    return replace(scheme, default=default)


def _read_table(
    table: dict[str, Any], where: str
) -> tuple[dict[str, Algorithm], tuple[tuple[Patterns, Algorithm], ...]]:
    """Read `quantized_layers`: entries by canonical module, and those with wildcards."""
    listed: dict[str, Algorithm] = {}
    targets = []
    for name, entry in table.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: quantized_layers[{name!r}] is {entry!r}, not an object.")
        algorithm = _algorithm(entry.get("quant_algo"), where, name)
        _check_group(entry, algorithm, where, name)
        module = canonical_module(name)
        if "*" in module:
            targets.append((Patterns.of([name]), algorithm))
        elif listed.setdefault(module, algorithm) is not algorithm:
            raise ConfigError(
                f"{where}: {name} is {algorithm}, but another expert of {module} is "
                f"{listed[module]}; the experts of a layer must share one format."
            )
    return listed, tuple(targets)


def _all_inputs_plain(groups: object) -> bool:
    """Whether groups are given and none of them quantises activations."""
    if not isinstance(groups, dict) or not groups:
        return False
    return all(not group.get("input_activations") for group in groups.values())


def _parse_groups(section: dict[str, Any], where: str) -> QuantScheme:
    """Read `config_groups`, compressed-tensors' way: numbers of bits and lists of targets."""
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ConfigError(f"{where}: config_groups is {groups!r}; it must hold objects.")
    default, targets = Algorithm.NONE, []
    for key, group in groups.items():
        algorithm = _group_algorithm(group, f"{where}, config_groups.{key}")
        named = group.get("targets") or ()
        if "Linear" in named:
            default = algorithm
        targets.append((Patterns.of(t for t in named if t != "Linear"), algorithm))
    ignored = Patterns.of(section.get("ignore") or ())
    return QuantScheme(default=default, targets=tuple(targets), excluded=ignored)


def _group_algorithm(group: Mapping[str, Any], where: str) -> Algorithm:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    keys = ("type", "num_bits", "group_size", "strategy")
    kind, bits, size, strategy = map(weights.get, keys)
    if kind == "float" and bits == 4 and size == NVFP4_GROUP:
        return Algorithm.NVFP4 if inputs else Algorithm.W4A16_NVFP4
    if kind == "float" and bits == 8 and strategy in (None, "tensor"):
        return Algorithm.FP8
    shown = dict(zip(keys, (kind, bits, size, strategy), strict=True))
    raise ConfigError(
        f"{where}: weights {shown} are not supported. Supported: 4-bit float in groups of 16 "
        "(NVFP4), 8-bit float with one scale a tensor (FP8)."
    )


def _kv(value: object, where: str) -> str:
    if value is None or str(value).upper() in ("NONE", "AUTO"):
        return "bf16"
    if str(value).upper() == "FP8":
        return "fp8"
    raise ConfigError(
        f"{where}: kv_cache_quant_algo {value!r} is not supported; FP8 or null are. The key only "
        "says how the cache was calibrated: set it to null to keep keys and values in bf16."
    )


def _kv_from_groups(scheme: object, where: str) -> str:
    if not scheme:
        return "bf16"
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else scheme
    return _kv("FP8" if bits == 8 else scheme, f"{where}, kv_cache_scheme")


def _reconcile(config: QuantScheme, exported: QuantScheme, matrices: Iterable[str]) -> QuantScheme:
    """Follow `config`, and note every matrix of which `exported` says something else."""
    differ = [m for m in matrices if config.algorithm(m) is not exported.algorithm(m)]
    notes = []
    if differ:
        shown = ", ".join(
            f"{m} ({config.algorithm(m)} against {exported.algorithm(m)})" for m in differ[:5]
        )
        notes.append(
            f"config.json and hf_quant_config.json disagree about {len(differ)} matrices; "
            f"config.json is followed: {shown}"
        )
    if config.kv != exported.kv:
        notes.append(
            f"config.json says {config.kv} keys and values, hf_quant_config.json {exported.kv}; "
            "config.json is followed"
        )
    return replace(config, notes=tuple(notes))
