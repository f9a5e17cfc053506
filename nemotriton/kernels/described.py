"""Tensors as the Gluon kernels for Hopper read and write them: by TMA, in boxes whose layout in
shared memory wgmma can take."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Described

_ELEMENT = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
}


def described(
    v: torch.Tensor, shape: Sequence[int], strides: Sequence[int], box: tuple[int, ...]
) -> Described:
    """v as a tensor of this shape and these strides, in elements, that is moved in boxes."""
    return Described(v, list(shape), list(strides), list(box), _layout(box, v.dtype))


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), _ELEMENT[dtype])
