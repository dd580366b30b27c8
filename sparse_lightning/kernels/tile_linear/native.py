"""tile_linear for CPUs, in C++: any number of rows, sums in registers, tiles streamed once by all threads.

The library registers an operator of torch when it is loaded, `sparse_lightning_cpu::tile_linear`: a call from Python
costs what one of `F.linear` costs. It is written against the stable interface of torch, which older versions lack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sparse_lightning.kernels.native import library, torch_options

SOURCE = Path(__file__).with_suffix(".cpp")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

LANES = 16
"""The outputs of a tile are a multiple of this number: those of the widest register."""

CAPABILITIES = ("AVX2", "AVX512")
"""The vector instructions of CPUs that the kernel is written for, as torch names them."""

OLDEST = (2, 10)
"""The first version of torch with the stable interface that the kernel needs."""


def takes(inputs: Tensor, tiles: Tensor) -> bool:
    """Whether the kernel runs on these tensors; it is built where that has not happened yet."""
    return inputs.is_cpu and tiles.shape[2] % LANES == 0 and inputs.dtype in DTYPES and is_available()


@cache
def is_available() -> bool:
    """Whether the kernel is built, or can be built now, on this machine; its operator is registered then."""
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if version < OLDEST or torch.backends.cpu.get_cpu_capability() not in CAPABILITIES:
        return False
    if library(SOURCE, (*torch_options(), "-ltorch_cpu")) is None:
        return False
    torch.library.register_fake("sparse_lightning_cpu::tile_linear", fake)
    return True


def tile_linear(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Return the outputs; see `reference.tile_linear`. `takes` was checked."""
    contiguous = inputs if inputs.is_contiguous() else inputs.contiguous()
    outputs: Tensor = _operator()(contiguous, tiles, pointers, columns, bias, out_features)
    return outputs


@cache
def _operator() -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = torch.ops.sparse_lightning_cpu.tile_linear.default
    return found


def fake(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Return outputs without values, for tracing."""
    return inputs.new_empty((*inputs.shape[:-1], out_features))
