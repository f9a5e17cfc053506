"""These tests run kernels in Triton's CPU interpreter: start pytest with TRITON_INTERPRET=1."""

import os

import pytest

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRET else ["test_*.py"]

if INTERPRET:
    from tests.interpreter import bounds, repair, ssd_assembly

    repair.install()
    bounds.install()
    ssd_assembly.register()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small arrays: threads only cost."""
    import torch

    torch.set_num_threads(1)
