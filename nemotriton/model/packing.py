"""Which matrices are held in the form of one architecture instead of the checkpoint's, and where.

Hopper has no tensor core for 4-bit numbers: NVFP4 weights are decoded in registers there, which is
fastest from words in the order of its fragments (`kernels.hopper_pack`). So on compute capability
9.x, with 16-bit activations that are not quantised, NVFP4 matrices are repacked once they are
loaded, one by one, and only the packed words stay. Blackwell (10.x) multiplies NVFP4 by NVFP4:
there, where activations are quantised, the codes stay and their scales go to tiles
(`kernels.scale_tiles`). Everything else runs on the checkpoint's own layout.

A large 16-bit head gets an e4m3 copy on Hopper where the MTP block drafts: drafts are picked by it
in half the time, and which they are changes no token, only how many are accepted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import torch

from nemotriton import device as devices
from nemotriton.kernels.hopper_pack import packed_bytes
from nemotriton.kernels.scale_tiles import tile_bytes
from nemotriton.model.expected import Expected, Role
from nemotriton.model.formats import ActQuant

_HOPPER, _BLACKWELL = 9, 10  # major compute capabilities
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_PADDING = 1.15  # packed bytes over the checkpoint's: narrow slices stay as they are
_LARGE_HEAD = 1 << 26  # weights; a smaller head is read in a few microseconds
_FORCED: ContextVar[bool | None] = ContextVar("packing forced", default=None)


@contextlib.contextmanager
def forced_packing(on: bool) -> Iterator[None]:
    """Models made inside the block put NVFP4 matrices into an architecture's form (words, or tiles
    of scales where activations are quantised), or do not, wherever they run and whatever their
    widths: for tests on other devices, and for comparing the forms."""
    token = _FORCED.set(on)
    try:
        yield
    finally:
        _FORCED.reset(token)


def packs_for_hopper(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether NVFP4 matrices [rows, cols], or the other way round, with activations of `dtype` are
    to be repacked on `device`."""
    if dtype not in _DTYPES:
        return False
    forced = _FORCED.get()
    if forced is not None:
        return forced
    hopper = device.type == "cuda" and devices.info(device).capability[0] == _HOPPER
    return hopper and packed_bytes(rows, cols) <= _MOST_PADDING * (rows * cols * 9 // 16)


def tiles_for_blackwell(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the scales of NVFP4 matrices whose products quantise activations of `dtype` are to be
    put into tiles on `device`."""
    if dtype not in _DTYPES:
        return False
    forced = _FORCED.get()
    if forced is not None:
        return forced
    return device.type == "cuda" and devices.info(device).capability[0] == _BLACKWELL


def copies_head(weights: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a drafting model's head of so many weights in `dtype` is to have an e4m3 copy."""
    if dtype not in _DTYPES:
        return False
    forced = _FORCED.get()
    if forced is not None:
        return forced
    hopper = device.type == "cuda" and devices.info(device).capability[0] == _HOPPER
    return hopper and weights >= _LARGE_HEAD


def _head_bytes(expected: Mapping[str, Expected], dtype: torch.dtype, device: torch.device) -> int:
    head = expected.get("lm_head.weight")
    drafting = any(name.startswith("mtp.") for name in expected)
    if head is None or head.role is not Role.MATRIX or not drafting:
        return 0
    return head.numel if copies_head(head.numel, dtype, device) else 0


def padding_bytes(
    expected: Mapping[str, Expected], act_quant: ActQuant, dtype: torch.dtype, device: torch.device
) -> int:
    """What packed matrices, their scales in tiles and a head's copy take beyond a checkpoint's
    tensors."""
    extra = _head_bytes(expected, dtype, device)
    for entry in expected.values():
        if entry.role is not Role.CODES:
            continue
        rows, cols = entry.shape[-2], 2 * entry.shape[-1]
        each = 0
        if act_quant is True and tiles_for_blackwell(dtype, device):
            each = tile_bytes(rows, cols) - rows * cols // 16
        elif act_quant is not True and packs_for_hopper(rows, cols, dtype, device):
            each = packed_bytes(rows, cols) - rows * cols * 9 // 16
        extra += max(1, entry.experts) * each
    return extra


def widened_bytes(expected: Mapping[str, Expected], dtype: torch.dtype) -> int:
    """The most that a prompt's products need for a quantised matrix decoded into `dtype`."""
    if dtype not in _DTYPES:
        return 0
    sizes = [
        entry.numel * entry.columns * dtype.itemsize
        for entry in expected.values()
        if entry.role in (Role.FP8, Role.CODES) and not entry.experts
    ]
    return max(sizes, default=0)
