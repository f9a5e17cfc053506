"""Products by roles compiled for Hopper: what their loops are made of."""

import collections

import pytest
import torch

from nemotriton.autotune import sass
from nemotriton.autotune.offline import SHARED_LIMIT
from nemotriton.autotune.parity import generator
from nemotriton.kernels.attention import ATTEND_PREFILL
from nemotriton.kernels.gemm import MATMUL
from nemotriton.kernels.gemm_quant import FP8_MATMUL
from nemotriton.kernels.op import Case, KernelSpec, compile_only

CODES = FP8_MATMUL, Case(N=5376, K=4096, Q=1)
NUMBERS = MATMUL, Case(N=5376, K=4096, ieee=0)
KEYS = ATTEND_PREFILL, Case(H=32, Hkv=2, Dh=128, page=64, fp8=0)


def compiled(spec: KernelSpec, case: Case, arch: int) -> dict[str, object]:
    cpu = torch.device("cpu")
    args = spec.make(case, 2048, torch.device("meta"), torch.bfloat16, generator(0, cpu))
    with compile_only(arch) as done:
        spec.op.triton(**args)
    return {c.name: c.kernel for c in done}


@pytest.mark.parametrize(
    "spec,case,products,added,left",
    [(*CODES, 8, 128, ["0x0", "0x0"]), (*NUMBERS, 4, 0, ["0x1"])],
    ids=["e4m3", "bf16"],
)
def test_a_step(spec: KernelSpec, case: Case, products: int, added: int, left: list[str]) -> None:
    """Products and sums only; a role waits for a product where it adds it, or for the one before
    (ptxas may make every product wait). Two roles have such a loop."""
    kernel = compiled(spec, case, 90)["_roles"]
    found = sass.resources(kernel)
    assert (found.spills, found.hazards, found.unwritten) == (0, 0, 0)
    assert found.shared <= SHARED_LIMIT[90]
    loops = [b for b in sass.loops(sass.disassembly(kernel)) if any("GMMA" in i for i in b)]
    assert len(loops) == 2
    for body in loops:
        names = collections.Counter(i.split()[i.startswith("@")].split(".")[0] for i in body)
        assert names["QGMMA"] + names["HGMMA"] == products
        assert names["FADD"] == added
        assert not names.keys() & {"STS", "LDS", "STL", "LDL", "LDG"}
        assert [i.split()[-1] for i in body if "WARPGROUP.DEPBAR" in i] == left
        assert len(body) - added <= 70


@pytest.mark.parametrize("spec,case", [CODES, NUMBERS], ids=["e4m3", "bf16"])
def test_other_architectures_have_the_square_form(spec: KernelSpec, case: Case) -> None:
    names = compiled(spec, case, 100).keys()
    assert "_square" in names
    assert "_roles" not in names


def test_a_step_of_attention() -> None:
    """Its exponentials lie between the wait for its scores and that for the sum before it. Three
    roles have a loop without a mask, and one with."""
    kernel = compiled(*KEYS, 90)["_attend_roles"]
    found = sass.resources(kernel)
    assert (found.spills, found.hazards, found.unwritten) == (0, 0, 0)
    assert found.shared <= SHARED_LIMIT[90]
    loops = [b for b in sass.loops(sass.disassembly(kernel)) if any("GMMA" in i for i in b)]
    assert len(loops) == 6
    for body in loops:
        names = [i.split()[i.startswith("@")].split(".")[0] for i in body]
        waits = [i for i, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
        assert [body[i].split()[-1] for i in waits] == ["0x1", "0x0"]
        assert names.count("HGMMA") == 12
        assert names[waits[0] : waits[1]].count("MUFU") >= 32
        assert not {"STS", "LDS", "STL", "LDL", "LDG"} & set(names)


def test_attention_elsewhere_is_the_plain_form() -> None:
    assert set(compiled(*KEYS, 100)) == {"_attend_prefill"}
