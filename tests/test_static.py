"""Reads the jit functions without running them: indices are 64-bit, products name their precision.

Long prompts and many slots pass 2^31 elements; an index that is multiplied by a stride in 32 bits
then wraps and reads another row without any fault. So every program id is widened where it is read,
every load from an index tensor (a parameter named `*_idx`) too, and index tensors carry that name.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = sorted((Path(__file__).resolve().parents[1] / "nemotriton" / "kernels").glob("*.py"))
# what the wrappers call their index tensors; a kernel that reads one names it `*_idx`
INDEX_TENSORS = {
    "chunks", "cu", "ids", "kv_rows", "lengths", "offsets", "order", "pages", "parents", "slots",
    "starts",
}  # fmt: skip


def jit_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
            if names & {"triton.jit", "jit"}:
                yield node


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    for child in ast.walk(node):
        if isinstance(child, ast.Call) and ast.unparse(child.func) == name:
            yield child


def widened(function: ast.FunctionDef) -> set[int]:
    """ids of the calls that stand directly under `.to(tl.int64)`."""
    return {
        id(node.func.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and [ast.unparse(a) for a in node.args] == ["tl.int64"]
    }


def mentions(node: ast.AST, names: set[str]) -> bool:
    """True if `node` computes with one of `names` other than by loading from it."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
        return False
    if isinstance(node, ast.Name):
        return node.id in names
    return any(mentions(child, names) for child in ast.iter_child_nodes(node))


def derived(function: ast.FunctionDef, names: set[str]) -> set[str]:
    """`names` and every local name computed from one of them."""
    grown = True
    while grown:
        size = len(names)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and mentions(node.value, names):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        grown = len(names) > size
    return names


def problems(source: str) -> list[str]:
    found = []
    for function in jit_functions(ast.parse(source)):
        parameters = [a.arg for a in function.args.args]
        pointers = derived(function, {a for a in parameters if a.endswith("_idx")})
        misnamed = {f"{stem}_ptr" for stem in INDEX_TENSORS} & set(parameters)
        safe = widened(function)
        where = f"{function.name}, line"
        for call in calls(function, "tl.program_id"):
            if id(call) not in safe:
                found.append(f"{where} {call.lineno}: a program id without .to(tl.int64)")
        for call in calls(function, "tl.load"):
            if mentions(call.args[0], pointers) and id(call) not in safe:
                found.append(f"{where} {call.lineno}: an index loaded without .to(tl.int64)")
            for name in sorted(misnamed):
                if mentions(call.args[0], derived(function, {name})):
                    wanted = name.replace("_ptr", "_idx")
                    found.append(f"{where} {call.lineno}: {name} is read, so call it {wanted}")
        for call in calls(function, "tl.dot"):
            if "input_precision" not in {k.arg for k in call.keywords}:
                found.append(f"{where} {call.lineno}: a dot without input_precision")
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.stem)
def test_kernels_index_in_64_bits(path: Path) -> None:
    assert not problems(path.read_text())


def test_there_are_kernels_to_read() -> None:
    found = [f for p in KERNELS for f in jit_functions(ast.parse(p.read_text()))]
    assert len(found) >= 10


@pytest.mark.parametrize(
    "line,complaint",
    [
        ("s = tl.program_id(0)", "program id"),
        ("s = tl.program_id(0) * stride.to(tl.int64)", "program id"),
        ("s = (tl.program_id(0) + 1).to(tl.int64)", "program id"),
        ("s = tl.load(slots_idx)", "index loaded"),
        ("s = tl.load(slots_idx + tl.arange(0, 4), mask=m, other=-1)", "index loaded"),
        ("at = slots_idx + 4\n    s = tl.load(at)", "index loaded"),
        ("at = slots_idx\n    there = at + 1\n    s = tl.load(there).to(tl.int32)", "index loaded"),
        ("s = tl.load(x_ptr + tl.load(slots_idx) * stride)", "index loaded"),
        ("s = tl.dot(a, b)", "input_precision"),
    ],
)
def test_what_is_wrong_is_found(line: str, complaint: str) -> None:
    source = f"@triton.jit\ndef _bad(x_ptr, slots_idx, stride):\n    {line}\n"
    (problem,) = problems(source)
    assert complaint in problem
    assert "_bad" in problem


def test_index_tensors_that_are_read_carry_the_name() -> None:
    head = "@triton.jit(do_not_specialize=['T'])\ndef _f(x_ptr, slots_ptr, T):\n    "
    assert problems(head + "tl.store(slots_ptr + 1, 0)") == []
    (problem,) = problems(head + "at = slots_ptr + 1\n    s = tl.load(at)")
    assert problem == "_f, line 4: slots_ptr is read, so call it slots_idx"


def test_what_is_right_passes() -> None:
    source = """
@triton.jit
def _good(x_ptr, slots_idx, stride):
    s = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_idx + s).to(tl.int64)
    x = tl.load(x_ptr + slot * stride)
    acc = tl.dot(x, x, input_precision="ieee")

def wrapper(slots_ptr):
    return tl.program_id(0)
"""
    assert problems(source) == []


def impatient(source: str) -> list[str]:
    """Kernels with PDL in which some program might not wait, or wait after it has stored or let
    the next kernel come."""
    found = []
    for function in jit_functions(ast.parse(source)):
        if "PDL" not in {a.arg for a in function.args.args}:
            continue
        waits = [
            i
            for i, node in enumerate(function.body)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "PDL" and not node.orelse
            for call in node.body
            if ast.unparse(call) == "tl.extra.cuda.gdc_wait()"
        ]
        if len(waits) != 1 or len(list(calls(function, "tl.extra.cuda.gdc_wait"))) != 1:
            found.append(f"{function.name}: wait once, under `if PDL:` at the top level")
            continue
        early = ast.Module(body=function.body[: waits[0]], type_ignores=[])
        let_go = "tl.extra.cuda.gdc_launch_dependents"
        names = (
            "tl.store",
            let_go,
            *(f"tl.atomic_{what}" for what in ("add", "cas", "max", "xchg")),
        )
        found += [f"{function.name}: {n} before the wait" for n in names for _ in calls(early, n)]
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.stem)
def test_dependent_kernels_wait_in_every_program(path: Path) -> None:
    assert not impatient(path.read_text())


@pytest.mark.parametrize(
    "body,complaint",
    [
        ("if pid > 0:\n        if PDL:\n            tl.extra.cuda.gdc_wait()", "wait once"),
        ("if PDL:\n        if pid:\n            tl.extra.cuda.gdc_wait()", "wait once"),
        ("if PDL and SORT:\n        tl.extra.cuda.gdc_wait()", "wait once"),
        ("tl.store(y_ptr, 0)", "wait once"),
        ("tl.store(y_ptr, 0)\n    if PDL:\n        tl.extra.cuda.gdc_wait()", "before the wait"),
        (
            "tl.extra.cuda.gdc_launch_dependents()\n    if PDL:\n        tl.extra.cuda.gdc_wait()",
            "before the wait",
        ),
        ("if PDL:\n        tl.extra.cuda.gdc_wait()\n    tl.store(y_ptr, 0)", ""),
        ("if PDL:\n        prefetch(w_ptr)\n        tl.extra.cuda.gdc_wait()", ""),
    ],
)
def test_impatience_is_found(body: str, complaint: str) -> None:
    problem = impatient(f"@triton.jit\ndef _f(y_ptr, w_ptr, PDL: tl.constexpr):\n    {body}\n")
    assert bool(problem) == bool(complaint)
    assert all(complaint in text for text in problem)
