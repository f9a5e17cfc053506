"""Experts' products that decode ahead, by emulation: copies arrive when they are waited for and no
sooner, what they will overwrite is poison until then, and a product under way reads its operands
when it is waited for."""

import builtins
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemotriton.kernels import hopper_pack, moe_experts_packed, moe_packed_async
from nemotriton.kernels.moe_packed_tiles import M64W, M128W, STEP_AHEAD, packed_tile
from nemotriton.kernels.moe_route import Routing, sort_pairs_ref
from tests.conftest import Poison
from tests.interpreter.gluon_emulation import Machine, Memory, language, operand
from tests.interpreter.test_moe_experts_packed import arguments, check

POISON = {torch.int32: 0x7FFF7FFF, torch.bfloat16: float("nan")}


class Product:
    """An accumulator; a product under way takes its operands when `finish` is called."""

    def __init__(self, before: Any, a: torch.Tensor, b: Memory) -> None:
        self.before, self.a, self.b = before, a, b
        self.value: torch.Tensor | None = None

    def finish(self) -> None:
        start = self.before.value if isinstance(self.before, Product) else self.before
        assert start is not None
        self.value = start + self.a.float() @ self.b.tensor.float()


class Queue:
    """Asynchronous copies and products of a program, each in the order in which it was begun."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.groups: list[list[Any]] = []
        self.products: list[Product] = []
        self.widths: list[int] = []  # of the second operands, since it was last emptied

    def copy(self, to: Memory, source: Any, mask: Any = None) -> None:
        to.tensor.fill_(POISON[to.tensor.dtype])
        self.open.append((to.tensor, source, mask))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_copies(self, left: int) -> None:
        while len(self.groups) > left:
            for tensor, source, mask in self.groups.pop(0):
                offset, there = source.at(mask)  # elsewhere the poison stays
                tensor[there] = source.base[offset][there]

    def multiply(self, a: torch.Tensor, b: Memory, acc: Any, is_async: bool) -> Product:
        self.products.append(Product(acc, a, b))
        self.widths.append(b.shape[1])
        return self.products[-1]

    def wait_products(self, left: int, deps: tuple[Any, ...]) -> tuple[Any, ...]:
        while len(self.products) > left:
            self.products.pop(0).finish()
        return tuple(d.value if isinstance(d, Product) and d.value is not None else d for d in deps)


def decode(_code: str, _constraints: str, args: list[torch.Tensor], **_: Any) -> list[torch.Tensor]:
    """The eight values of every word, by `hopper_pack`'s own account of the fields."""
    words, low, high = args
    fields = torch.tensor(hopper_pack._FIELDS, dtype=torch.int32)
    fourth = ((words << 2) & hopper_pack._SIGNS_HIGH) | ((words >> 6) & hopper_pack._LOW_BIT)
    pairs = (words & fields, (words << 6) & fields, hopper_pack._rotate(words, 12) & fields, fourth)
    halves = []
    for pair, scale in zip(pairs, (low, high, low, high), strict=True):
        for shift in (0, 16):
            value, by = (
                ((v >> shift) & 0xFFFF).to(torch.int16).view(torch.bfloat16) for v in (pair, scale)
            )
            halves.append(value * by)
    return halves


def emulate(
    kernel: Any, grid: int, args: list[Any], options: dict[str, Any]
) -> list[tuple[int, ...]]:
    """Run the programs; how many rows of x each multiplies in its first step, by part."""
    source = Path(moe_packed_async.__file__).read_text()
    outside = r"@gluon\.jit(\(.*?\))?$|^from .*? import (\((?s:.*?)\)|.*?)$"
    source = re.sub(outside, lambda m: "\n" * m[0].count("\n"), source, flags=re.M)
    machine, queue = Machine(0), Queue()
    gl = language(machine)
    gl.int32 = torch.int32
    gl.SwizzledSharedLayout = gl.DistributedLinearLayout = gl.BlockedLayout
    gl.convert_layout = lambda v, layout, assert_trivial=False: v
    gl.broadcast = lambda a, b: torch.broadcast_tensors(a, b)
    gl.join = lambda a, b: torch.stack((a, b), -1)
    gl.where = lambda c, a, b: torch.where(torch.as_tensor(c), a, b)
    here = machine.here

    def assembly(code: str, constraints: str, args: list[Any], **options: Any) -> Any:
        if code == moe_packed_async.PROGRAM.value:
            return torch.tensor(here.program[0])
        return decode(code, constraints, args)

    gl.inline_asm_elementwise = assembly
    gl.allocate_shared_memory = lambda dtype, shape, layout: Memory(
        torch.full([int(n) for n in shape], POISON[dtype], dtype=dtype)
    )
    names = {
        "gl": gl,
        "torch": torch,
        "range": builtins.range,
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=queue.copy,
            commit_group=queue.commit,
            wait_group=queue.wait_copies,
        ),
        "warpgroup_mma": queue.multiply,
        "warpgroup_mma_wait": queue.wait_products,
        "relu2": lambda v: torch.relu(v).square(),
        **{k: getattr(hopper_pack, k) for k in ("DECODE", "DECODE_CONSTRAINTS", "TILE")},
        **{k: getattr(hopper_pack, k) for k in ("WEIGHT_UNIT", "WORDS")},
    }
    exec(compile(source, moe_packed_async.__file__, "exec"), names)
    widths = []
    for program in range(grid):
        machine.here.program = (program, grid)
        names[kernel.__name__](*map(operand, args), **options)
        assert not queue.products, "a product was still under way at the program's end"
        assert not any(queue.groups), "a copy was still under way at the program's end"
        found, queue.widths = queue.widths, []
        widths.append(tuple(dict.fromkeys(found)))
        parts = len(widths[-1])
        assert parts == 0 or found == [*widths[-1]] * (len(found) // parts)
    return widths


Widths = dict[str, list[tuple[int, ...]]]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Widths:
    """As if on Hopper: the kernels that were emulated, and what `emulate` said of each."""
    emulated: Widths = {}

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        options = {k: v for k, v in meta.items() if k not in ("num_warps", "maxnreg")}
        emulated[kernel.__name__] = emulate(kernel, grid[0], list(args), options)

    monkeypatch.setattr(moe_packed_async, "launch", run)
    monkeypatch.setattr(moe_experts_packed, "target", lambda where: 90)
    return emulated


@pytest.mark.parametrize("form", range(len(STEP_AHEAD)))
def test_against_the_twin(form: int, hopper: Widths, poison: Poison) -> None:
    """Full, partial and empty blocks of pairs; one tile of columns, which is less than what is on
    its way at once, and three."""
    args = arguments(70, 2, 384, 128, 1, ordered=form > 0)
    check(args, packed_tile(*STEP_AHEAD[form], narrow=True, ahead=True))
    assert list(hopper) == ["_async_up", "_async_down"]


def counted(counts: list[int], top: int = 1) -> Routing:
    """So many pairs of every expert, in no order, `top` a token."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    rng = torch.Generator().manual_seed(len(ids))
    ids = ids[torch.randperm(len(ids), generator=rng)].int().view(-1, top)
    empty = torch.empty(0, dtype=torch.int32)
    weights = torch.rand(ids.shape, generator=rng)
    return sort_pairs_ref(Routing(ids, weights, empty, empty), len(counts))


@pytest.mark.parametrize(
    "size,counts",
    [(M64W, [1, 16, 17, 0, 32, 33, 48, 49, 63, 64, 65]), (M128W, [33, 0, 96, 129])],
    ids=["64", "128"],
)
def test_a_block_multiplies_the_quarters_that_it_has(
    size: tuple[int, int, int, int, int], counts: list[int], hopper: Widths, poison: Poison
) -> None:
    q = size[0] // 4
    parts = {1: (q,), 2: (2 * q,), 3: (2 * q, q), 4: (4 * q,)}
    args = arguments(sum(counts), len(counts), 128, 128, 1) | {"routing": counted(counts)}
    check(args, packed_tile(size, size, narrow=True, ahead=True))
    blocks = [min(n - i, 4 * q) for n in counts for i in range(0, n, 4 * q)]
    want = [parts[-(-n // q)] for n in blocks]
    for found in hopper.values():
        assert found == [*want, *[()] * (len(found) - len(want))]


def test_other_widths_take_the_plain_form(hopper: Widths, poison: Poison) -> None:
    check(arguments(9, 2, 320, 192, 1), packed_tile(*STEP_AHEAD[0], narrow=True, ahead=True))
    assert not hopper
