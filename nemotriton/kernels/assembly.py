"""One switch between quantised numbers decoded by inline assembly and by Triton's own operations.

Both give the same bits; the assembly takes fewer instructions a weight. NEMOTRITON_ASM=0 in the
environment asks for Triton's operations everywhere, to tell a fault of the assembly from one of the
rest: experts of a prompt are then multiplied without a step ahead (`moe_packed_async` has no other
form), so that no kernel decodes by assembly. It is read at every launch; what a graph captured
stays as it was captured. Assembly that decodes nothing (rounding, prefetches) is not meant.
"""

import os

import torch

from nemotriton.kernels.op import target


def wants_assembly(tile: bool = True) -> bool:
    """Whether a tile that says so may decode by inline assembly: not with NEMOTRITON_ASM=0."""
    return tile and os.environ.get("NEMOTRITON_ASM") != "0"


def decodes_by_assembly(where: torch.Tensor, tile: bool = True) -> bool:
    """Whether a kernel on `where`'s device does so, if its tile says so.

    False below compute capability 9.0, in the interpreter, and with NEMOTRITON_ASM=0."""
    return wants_assembly(tile) and target(where.device) >= 90
