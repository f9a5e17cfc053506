"""Reading compiled kernels: resources from the cubin, and two faults in Hopper's code.

Uniform registers that are read unwritten: see `unwritten`.

The hazard (triton-lang/triton#9433): an asynchronous wgmma whose A operand sits in registers may
still be reading them when the next loop iteration writes them, because ptxas before 13.3 places the
wait too late. Such a kernel can pass an error check and differ from run to run. It is visible in
the disassembly: a write to the operand's registers before a wait that covers the instruction.
"""

import collections
import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from nemotriton.autotune.unwritten import listing, unwritten

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MMA = re.compile(
    r"tcgen05\.mma[\w.:]*|wgmma\.mma_async[\w.]*|mma\.sync[\w.:]*|cp\.async\.bulk\.tensor\.\dd"
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes: registers a thread, bytes of spills and shared memory,
    tensor-memory columns, tensor-core instructions by name, wgmma hazards found, and instructions
    that read what nothing wrote."""

    registers: int
    stack: int
    spills: int
    shared: int
    tensor_memory: int
    tensor_ops: dict[str, int]
    hazards: int
    unwritten: int = 0


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


def disassembly(kernel: Any) -> str:
    """`nvdisasm -c`'s text of a compiled kernel."""
    return _disassemble(kernel.asm["cubin"])


def _disassemble(code: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(code)
        return _tool(str(BIN / "nvdisasm"), "-c", str(cubin))


def resources(kernel: Any) -> Resources:
    """Read a kernel that Triton compiled, with the tools in Triton's own wheel.

    Models of other sizes often end in the same machine code: it is read once a process."""
    meta = kernel.metadata
    columns = int(getattr(meta, "tmem_size", 0) or 0)
    asm = kernel.asm
    return _read(asm["cubin"], asm["ptx"], meta.target.arch, int(meta.shared), columns)


@functools.cache
def _read(code: bytes, ptx: str, arch: int, shared: int, tensor_memory: int) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(code)
        usage = _tool(str(BIN / "cuobjdump"), "-res-usage", str(cubin))
    stack = _first(r"STACK:(\d+)", usage)
    watched = arch == 90 and "wgmma.mma_async" in ptx
    text = _disassemble(code) if watched else ""
    return Resources(
        registers=_first(r"REG:(\d+)", usage),
        stack=stack,
        spills=_spills(ptx, arch) if stack else 0,  # what spills, spills to the stack
        shared=shared,
        tensor_memory=tensor_memory,
        tensor_ops=dict(collections.Counter(MMA.findall(ptx))),
        hazards=sum(map(hazards, loops(text))),
        unwritten=len(unwritten(text)),
    )


def _spills(ptx: str, arch: int) -> int:
    """Bytes stored and loaded because registers ran out, as the assembler reports them."""
    import triton.backends.nvidia.compiler as nvidia

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        name = nvidia.sm_arch_from_capability(arch)
        assembler = nvidia.get_ptxas(arch).path
        report = _tool(assembler, "-v", f"--gpu-name={name}", str(source), "-o", f"{folder}/again")
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))


def _first(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"{pattern!r} is not in the tool's output: {text[:200]!r}")
    return int(found[1])


# ----------------------------------------------------------------------------- the wgmma hazard
def loops(disassembly: str) -> list[list[str]]:
    """Bodies of the innermost loops of `nvdisasm -c`'s text, one instruction a line."""
    lines, labels = listing(disassembly)
    spans = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA(?:\.\w+)*\b.*?(\.L_x_\d+)", line)
        if jump and labels.get(jump[1], i + 1) <= i:
            spans.append((labels[jump[1]], i))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [lines[a : b + 1] for a, b in inner]


@dataclass(frozen=True, slots=True)
class _Event:
    """One instruction of a loop as the hazard sees it."""

    kind: str  # "mma", "wait" or "write"
    registers: frozenset[int] = frozenset()  # A operand of an mma, or registers written
    commits: bool = False  # an mma that closes its group
    pending: int = 0  # groups a wait may leave in flight


def _event(line: str) -> _Event | None:
    line = re.sub(r"^@!?U?P\w+\s+", "", line)
    name = line.split()[0]
    if name.startswith("HGMMA"):
        operand = re.match(r"HGMMA\S*\s+R\d+,\s*R(\d+)", line)
        held = range(int(operand[1]), int(operand[1]) + 4) if operand else ()
        return _Event("mma", frozenset(held), commits="gsb0" in line)
    if name.startswith("WARPGROUP.DEPBAR"):
        left = re.search(r"gsb0,\s*(0x[0-9a-f]+|\d+)", line)
        return _Event("wait", pending=int(left[1], 0) if left else 0)
    if name.startswith(("ST", "RED", "BAR", "LDGSTS", "BRA", "DEPBAR", "R2UR", "WARP", "SYNCS")):
        return None
    target = re.match(r"\S+\s+(?:P\d,\s*)?R(\d+)\b", line)
    if target is None or "SETP" in name:
        return None
    width = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    matrices = re.search(r"LDSM\S*\.M\S*?\.(\d)", name)
    width = int(matrices[1]) if matrices else width
    return _Event("write", frozenset(range(int(target[1]), int(target[1]) + width)))


def hazards(body: list[str]) -> int:
    """wgmmas of a loop body whose register operand may be overwritten while it is being read."""
    events = [e for e in map(_event, body) if e is not None]
    return sum(
        1 for i, e in enumerate(events) if e.kind == "mma" and e.registers and _unsafe(events, i)
    )


def _unsafe(events: list[_Event], start: int) -> bool:
    """Walk once round the loop: is A written before a wait that retires this mma's group?"""
    mma = events[start]
    closed, later = mma.commits, 0
    for step in range(1, len(events) + 1):
        e = events[(start + step) % len(events)]
        if e.kind == "mma" and e.commits:
            closed, later = True, later + (1 if closed else 0)
        elif e.kind == "wait" and closed and later >= e.pending:
            return False
        elif e.kind == "write" and e.registers & mma.registers:
            return True
    return False
