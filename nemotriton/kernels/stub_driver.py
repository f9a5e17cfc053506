"""A driver for Triton on machines without a GPU: it only says what to compile for."""

from typing import Any

import torch

from nemotriton.errors import UnsupportedError


def stub_driver(arch: int) -> Any:
    """A Triton driver that only answers which target to compile for."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class TargetOnly(DriverBase):
        def __init__(self) -> None:
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda index=None: 0
            self.set_current_device = lambda index: None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

        def get_benchmarker(self) -> Any:
            raise UnsupportedError("nothing is timed under compile_only")

        def get_device_interface(self) -> Any:
            raise UnsupportedError("there is no device under compile_only")

        def get_empty_cache_for_benchmark(self) -> Any:
            raise UnsupportedError("there is no device under compile_only")

        def clear_cache(self, cache: Any) -> None:
            raise UnsupportedError("there is no device under compile_only")

    return TargetOnly()
