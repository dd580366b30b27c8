"""The devices that tests run on: the CPU always, and CUDA where there is a GPU.

What needs a GPU has the marker `gpu`, and is skipped with its reason where there is none: `make test-gpu` runs it.
"""

from __future__ import annotations

import pytest
import torch


class Needs:
    """Marks tests that need some CUDA devices. Applied to a test, or passed as the marks of a parameter."""

    def __init__(self, gpus: int) -> None:
        found = torch.cuda.device_count()
        reason = f"needs {gpus} CUDA device{'s' * (gpus > 1)}, there {'is' if found == 1 else 'are'} {found or 'none'}"
        self.marks = [pytest.mark.gpu, pytest.mark.skipif(found < gpus, reason=reason)]

    def __call__(self, test):
        for mark in self.marks:
            test = mark(test)
        return test


needs_gpu, needs_two_gpus = Needs(1), Needs(2)

CUDA = pytest.param("cuda", marks=needs_gpu.marks)
CUDA_ON_TWO = pytest.param("cuda", marks=needs_two_gpus.marks)

each_device = pytest.mark.parametrize("device", ["cpu", CUDA])


def accelerator(device: str) -> str:
    """Return the name of a device for Lightning."""
    return "gpu" if device == "cuda" else device
