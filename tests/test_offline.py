"""The offline compiler: what it reads off a kernel, and the faults it must name."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from nemotriton.autotune import offline, sass
from nemotriton.autotune.unwritten import unwritten
from nemotriton.commandline import UsageError
from nemotriton.kernels.op import SPECS, Tile, compile_only, launch
from nemotriton.model.config import ModelConfig

SAFE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDS.128 R8, [R40] ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
"""


def test_a_wait_before_the_next_write_is_safe() -> None:
    (body,) = sass.loops(SAFE)
    assert len(body) == 5
    assert sass.hazards(body) == 0


def test_a_write_under_a_reading_wgmma_is_found() -> None:
    racy = SAFE.replace("gsb0, 0x0", "gsb0, 0x1")
    (body,) = sass.loops(racy)
    assert sass.hazards(body) == 1


def test_a_wait_that_leaves_one_group_covers_the_one_before_it() -> None:
    two = SAFE.replace(
        "        /*0040*/",
        "        /*0038*/    HGMMA.64x64x16.F32.BF16 R56, R16, gdesc[UR8], R56, gsb0 ;\n"
        "        /*0039*/    WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n"
        "        /*0040*/",
    )
    (body,) = sass.loops(two.replace("gsb0, 0x0", "gsb0, 0x1"))
    # R8's group is retired by "at most one left" after the second group; R16 is never written here
    assert sass.hazards(body) == 0


def test_operands_in_shared_memory_are_no_hazard() -> None:
    shared = SAFE.replace("R24, R8, gdesc[UR8]", "R24, gdesc[UR8]").replace("0x0 ;", "0x1 ;")
    (body,) = sass.loops(shared)
    assert sass.hazards(body) == 0


SKIPPED = """
        /*0000*/                   UMOV UR5, 0x40 ;
.L_x_1:
        /*0010*/              @!P1 BRA `(.L_x_3) ;
        /*0020*/                   UIADD3 UR40, UP1, UR5, 0x2, URZ ;
.L_x_2:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR38], R24, gsb0 ;
        /*0040*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0050*/                   UIADD3.64 UR20, UR40, 0x2, URZ ;
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR18], R24, gsb0 ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""


def test_what_a_branch_may_leave_unwritten_is_named() -> None:
    """Cut down from attention with two slots for q: UR40 is left to a loop that may be skipped.
    An operand in registers leaves its half of a descriptor's registers unread."""
    always = SKIPPED.replace("UMOV UR5, 0x40", "UMOV.64 UR40, 0x40 ;\n UMOV.64 UR4, 0x40")
    start = [
        "UIADD3.64 UR20, UR40, 0x2, URZ",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR18], R24, gsb0",
    ]
    first = "HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR38], R24, gsb0"  # half of it: UR41
    assert unwritten(SKIPPED) == [first, *start]
    assert unwritten(always) == [start[1]]
    assert unwritten(always.replace("gdesc[UR18]", "R8, gdesc[UR18]")) == []
    assert unwritten(SKIPPED.replace("UMOV UR5, 0x40", "CALL.REL.NOINC `($div)")) == []


@triton.jit
def _register_operand_dot(a_ptr, b_ptr, c_ptr, steps, WAIT: tl.constexpr):
    """A product whose A operand is computed in registers, pipelined over K."""
    m, n, k = tl.arange(0, 128), tl.arange(0, 128), tl.arange(0, 64)
    acc = tl.zeros((128, 128), tl.float32)
    for i in tl.range(0, steps, num_stages=3):
        a = tl.load(a_ptr + (m[:, None] * steps + i) * 64 + k[None, :]).to(tl.bfloat16)
        a = (a * 2).to(tl.bfloat16)
        b = tl.load(b_ptr + (i * 64 + k)[:, None] * 128 + n[None, :])
        acc = tl.dot(a, b, acc)
        if WAIT:
            acc = tl.where(i < steps, acc, 0.0)
    tl.store(c_ptr + m[:, None] * 128 + n[None, :], acc)


def _compile(wait: bool) -> sass.Resources:
    _register_operand_dot.device_caches.clear()
    a = torch.empty(128, 512, device="meta", dtype=torch.int8)
    b = torch.empty(512, 128, device="meta", dtype=torch.bfloat16)
    c = torch.empty(128, 128, device="meta")
    with compile_only(90) as done:
        launch(_register_operand_dot, (1,), a, b, c, 8, WAIT=wait, num_warps=8)
    return sass.resources(done[0].kernel)


def test_reads_a_real_hopper_kernel_and_the_guard_has_no_hazard() -> None:
    found = _compile(wait=True)
    assert any(name.startswith("wgmma") for name in found.tensor_ops)
    assert 0 < found.registers <= 255
    assert (found.hazards, found.unwritten) == (0, 0)


def test_jobs_cover_every_op_and_bad_names_are_refused() -> None:
    todo = offline.jobs([], [ModelConfig.preset("super-120b")], [90, 100])
    assert {j.op for j in todo} == set(SPECS)
    assert {j.arch for j in todo} == {90, 100}
    assert {j.arch for j in todo if j.op == "run_experts_packed"} == {90}
    with pytest.raises(UsageError, match="no kernel rms"):
        offline.jobs(["rms"], [], [90])
    with pytest.raises(UsageError, match="no architecture sm_70: did you mean sm_90"):
        offline.parse_arch("sm_70")
    assert offline.parse_arch("sm_100a") == 100


def test_a_spilling_default_and_too_much_shared_memory_are_faults() -> None:
    job = offline.jobs(["rms_norm"], [ModelConfig.preset("tiny")], [90])[0]
    good = sass.Resources(64, 0, 0, 1024, 0, {}, 0)
    assert offline.faults(job, good) == ()
    bad = sass.Resources(255, 64, 12, 300_000, 600, {}, 2, 5)
    text = " ".join(offline.faults(job, bad))
    for word in ("spills 12", "300000 bytes of shared", "600 columns", "2 wgmma", "5 instr"):
        assert word in text


@pytest.mark.parametrize("op", ["scaled_matmul", "run_experts_scaled"])
def test_another_instruction_than_the_native_one_is_a_fault(op: str) -> None:
    """Codes that are widened to 8 bits and multiplied as those give the right numbers, slowly."""
    native = SPECS[op].native
    assert native
    job = offline.jobs([op], [ModelConfig.preset("super-120b")], [100])[0]
    names = {k: f"tcgen05.mma.cta_group::1.kind::{k}.block_scale" for k in ("mxf4nvf4", "mxf8f6f4")}
    for kernel in native:
        for found, fault in (
            ({names["mxf4nvf4"]: 8}, False),
            ({names["mxf4nvf4"]: 8, "cp.async.bulk.tensor.2d": 4}, False),
            ({names["mxf8f6f4"]: 8}, True),
            ({"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 8}, True),
            ({}, True),
        ):
            wrong = offline.faults(job, sass.Resources(64, 0, 0, 1024, 0, found, 0), kernel)
            assert bool(wrong) is fault, found
            assert not fault or wrong[0].startswith("no kind::mxf4nvf4")


def test_a_tile_that_cannot_compile_is_a_row_not_a_crash() -> None:
    job = offline.jobs(["rms_norm"], [ModelConfig.preset("tiny")], [90])[0]
    broken = offline.Job(
        job.op, job.case, job.tokens, job.dtype, Tile(BLOCK_D=96, num_warps=4), True, 90
    )
    (row,) = offline.compile_job(broken)
    assert row.found is None
    assert row.faults


def test_the_command_compiles_and_reports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nemotriton.autotune", "compile"]
    command += ["--kernel", "rms_norm", "--model", "tiny", "--arch", "sm_90,sm_120", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("_rms_norm") == 2
    refused = subprocess.run([*command[:-2], "--tiles", "some"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "give default or all" in refused.stderr
