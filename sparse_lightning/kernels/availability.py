"""What the kernels can use on this machine. Optional packages are imported only when needed."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the Triton kernels read and write; they compute in fp32."""


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        import_module("triton")
    except ImportError:
        return False
    return True


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on tensors of the CPU: for tests without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def takes_triton(weight: Tensor) -> bool:
    """Whether a Triton kernel runs on this tensor: on a GPU, with a supported dtype and Triton installed."""
    return weight.is_cuda and weight.dtype in TRITON_DTYPES and has_triton()


def cpp_compiler() -> str | None:
    """Return the C++ compiler that `torch.compile` would use, or None."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)
