"""What the kernels may use on this machine. Nothing optional is imported before someone asks."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the Triton kernels read and write; they compute in fp32."""


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    try:
        import_module("triton")
    except ImportError:
        return False
    return True


def takes_triton(weight: Tensor) -> bool:
    """Whether a Triton kernel is the one to run on this tensor: a GPU, a dtype it knows, and Triton installed."""
    return weight.is_cuda and weight.dtype in TRITON_DTYPES and has_triton()


def cpp_compiler() -> str | None:
    """The C++ compiler that `torch.compile` would find; None where there is none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)
