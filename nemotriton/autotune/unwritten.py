"""Uniform registers of Hopper's machine code that are read where nothing may have written them.

ptxas 12.8 takes equal values that are computed ahead of two loops, one behind the other, for one,
and leaves out the second computation, although a branch may skip the first loop with what is ahead
of it. The register then holds what the last pass of a loop around both left there: right until that
differs, as the place of an operand in shared memory does when it alternates. ptxas 12.9 and 13.1
compute both.
"""

import re
from collections.abc import Iterator

EVERY = (1 << 64) - 1
LABEL = re.compile(r"\.L_x_\d+")
PREDICATE = re.compile(r"@!?(U?P\w+)\s+")


def listing(disassembly: str) -> tuple[list[str], dict[str, int]]:
    """The instructions in `nvdisasm -c`'s text, one a line, and where its labels point."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for raw in disassembly.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", raw)
        if label:
            labels[label[1]] = len(lines)
            continue
        code = re.sub(r"/\*.*?\*/", "", raw).strip().rstrip(";").strip()
        if re.match(r"(@!?U?P\w+\s+)?[A-Z][A-Z0-9_.]+\b", code):
            lines.append(code)
    return lines, labels


def unwritten(disassembly: str) -> list[str]:
    """Instructions that read a uniform register which on some way to them none has written.

    A write counts under any predicate and for whatever value, so not every such fault is seen; a
    call writes all."""
    lines, labels = listing(disassembly)
    sources: list[list[int]] = [[] for _ in lines]
    for i, line in enumerate(lines):
        for to in _next(i, line, labels):
            if to < len(lines):
                sources[to].append(i)
    effects = [_effect(line) for line in lines]
    before, after = [EVERY] * len(lines), [EVERY] * len(lines)
    changed = True
    while changed:
        changed = False
        for i, (written, _) in enumerate(effects):
            known = EVERY if i else 0
            for source in sources[i]:
                known &= after[source]
            before[i] = known
            if after[i] != known | written:
                after[i], changed = known | written, True
    return [
        line for line, known, (_, read) in zip(lines, before, effects, strict=True) if read & ~known
    ]


def _next(i: int, line: str, labels: dict[str, int]) -> Iterator[int]:
    """The instructions that may follow instruction i."""
    bare = PREDICATE.sub("", line)
    if bare.startswith(("BRA", "BRX", "JMX")):
        yield from (labels[label] for label in LABEL.findall(bare) if label in labels)
    plain = re.fullmatch(r"(BRA(\.U)?\s+`?\(.*\)|BR?X\b.*|JMX\b.*|EXIT|RET\b.*|KILL)", bare)
    if bare != line or not plain:
        yield i + 1


def _effect(line: str) -> tuple[int, int]:
    """Uniform registers written, and read, a bit each."""
    if "UR" not in line and "CALL" not in line:
        return 0, 0
    name, _, operands = PREDICATE.sub("", line).partition(" ")
    if name.startswith("CALL"):
        return EVERY, 0
    rest = re.sub(r"^\s*(!?U?P(\d|T),\s*)*", "", operands)
    target = re.match(r"UR(\d+)\b", rest)
    written = 0
    uniform = name.startswith(("U", "R2UR", "S2UR", "CS2UR", "REDUX", "VOTEU"))
    if target and uniform and "SETP" not in name:
        written = ((1 << _width(name)) - 1) << int(target[1])
        rest = rest[target.end() :]
    read = 0
    for n in re.findall(r"\bUR(\d+)", rest):
        read |= 1 << int(n)
    for held, n in re.findall(r"(,\s*R\d+,\s*)?gdesc\[UR(\d+)\]", rest):
        # of A, unless that lies in registers, and of B behind it
        read = read & ~(3 << int(n)) | (12 if held else 15) << int(n)
    return written, read


def _width(name: str) -> int:
    return 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name or "CS2UR" in name else 1
