"""What a checkpoint holds against what its configuration asks for, from headers alone.

Names, shapes and formats are those of the load (`model.load_plan`), so what this finds complete
loads, and what it lists stops a load.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from nemotriton.audit.report import table
from nemotriton.console import bytes_text
from nemotriton.model.config import ModelConfig
from nemotriton.model.formats import Algorithm
from nemotriton.model.load_plan import Survey, survey
from nemotriton.model.sources import Source

_LAYER = re.compile(r"(mtp\.)?layers\.(\d+)\.(.*)")
_SHOWN = 20


@dataclass
class Row:
    """One kind of tensor: how many the model needs and the files hold, each expert counted."""

    kind: str
    tensor: str
    expected: int = 0
    found: int = 0
    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    schemes: list[str] = field(default_factory=list)
    bytes: int = 0


@dataclass(frozen=True)
class Inventory:
    """All kinds of tensor, and what has no place, lacks, or is not as it must be."""

    rows: list[Row]
    unmapped: list[str]
    missing: list[str]
    wrong: list[str]
    ignored: list[tuple[str, str]]
    notes: list[str]

    @property
    def complete(self) -> bool:
        """Whether it would load."""
        return not (self.unmapped or self.missing or self.wrong)


def take_inventory(source: Source, config: ModelConfig, mtp: bool = True) -> Inventory:
    """Count and compare; mtp: whether MTP blocks that config.json declares are wanted."""
    found = survey(source, config, mtp)
    return Inventory(
        rows=_rows(found, config),
        unmapped=list(found.unmapped),
        missing=list(found.missing),
        wrong=list(found.wrong),
        ignored=list(found.ignored),
        notes=list(found.notes),
    )


def _rows(found: Survey, config: ModelConfig) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    for name, entry in found.expected.items():
        kind, tensor = _kind(name, config)
        row = rows.setdefault((kind, tensor), Row(kind, tensor))
        row.expected += max(1, entry.experts)
        shape = list(entry.shape[1:] if entry.experts else entry.shape)
        _add(row.shapes, shape)
        if entry.matrix is not None:
            algorithm = found.scheme.algorithm(entry.matrix)
            _add(row.schemes, "bf16" if algorithm is Algorithm.NONE else str(algorithm))
    for placement in found.placements:
        kind, tensor = _kind(placement.name, config)
        row, entry = rows[kind, tensor], found.expected[placement.name]
        row.found += 1 if placement.expert is not None else max(1, entry.experts)
        _add(row.dtypes, placement.info.dtype)
        row.bytes += placement.info.nbytes
    return list(rows.values())


def _kind(name: str, config: ModelConfig) -> tuple[str, str]:
    """The kind of module a destination belongs to, and its name there."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return "model", name
    mtp, index, rest = match[1], int(match[2]), match[3]
    if not mtp:
        return config.kinds[index].word, rest
    assert config.mtp is not None
    pattern = config.mtp.pattern
    return f"mtp {pattern[index % len(pattern)].word}", rest


def _add(values: list[Any], value: Any) -> None:
    if value not in values:
        values.append(value)


def as_object(inventory: Inventory, source: Source, config: ModelConfig) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "model": config.name,
        "directory": str(source.directory),
        "complete": inventory.complete,
        "tensors": len(source.tensors),
        "bytes": sum(info.nbytes for info in source.tensors),
    } | asdict(inventory)


def as_lines(inventory: Inventory, found: dict[str, Any]) -> Iterable[str]:
    """The result as text."""
    head = ("kind", "tensor", "expected", "found", "shape", "dtype", "scheme", "bytes")
    yield f"{found['model']}: {found['tensors']:,} tensors, {bytes_text(found['bytes'])}"
    yield from table(head, map(_cells, inventory.rows), left=2)
    for title, names in (
        ("unmapped", inventory.unmapped),
        ("missing", inventory.missing),
        ("wrong", inventory.wrong),
    ):
        yield f"{title}: {len(names) or 'none'}"
        yield from (f"  {name}" for name in names[:_SHOWN])
        if len(names) > _SHOWN:
            yield f"  ... and {len(names) - _SHOWN} more (--json lists all)"
    if inventory.ignored:
        reasons = sorted({reason for _, reason in inventory.ignored})
        yield f"left out on purpose: {len(inventory.ignored)} ({'; '.join(reasons)})"
    yield from (f"note: {note}" for note in inventory.notes)


def _size(count: int) -> str:
    return f"{count} B" if count < 1024 else bytes_text(count)


def _cells(row: Row) -> tuple[Any, ...]:
    shapes = " or ".join("x".join(map(str, shape)) or "1" for shape in row.shapes[:2])
    more = " ..." if len(row.shapes) > 2 else ""
    wrong = "" if row.found == row.expected else " !!"
    return (
        row.kind,
        row.tensor,
        row.expected,
        f"{row.found}{wrong}",
        shapes + more,
        " ".join(row.dtypes) or "-",
        " ".join(row.schemes) or "-",
        _size(row.bytes),
    )
