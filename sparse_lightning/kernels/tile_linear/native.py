"""tile_linear for CPUs, in C++: any number of rows, sums in registers, tiles streamed once by all threads.

The library registers an operator of torch when it is loaded, `sparse_lightning_cpu::tile_linear`: a call from Python
costs no more than one of `F.linear`. It returns None where another path must be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sparse_lightning.compat.torch import builtin_of
from sparse_lightning.kernels.native import library, torch_options

SOURCE = Path(__file__).with_suffix(".cpp")

OPTIONS = ("-O2", "-ltorch_cpu")
"""Of the compiler: loops are unrolled in the source, and -O3 would only take twice as long."""

CAPABILITIES = ("AVX2", "AVX512")
"""The vector instructions of CPUs that the kernel is written for, as torch names them."""


@cache
def is_available() -> bool:
    """Whether the kernel is built, or can be built now, on this machine; its operator is registered then."""
    if torch.backends.cpu.get_cpu_capability() not in CAPABILITIES:
        return False
    if library(SOURCE, (*torch_options(), *OPTIONS)) is None:
        return False
    torch.library.register_fake("sparse_lightning_cpu::tile_linear", fake)
    return True


@cache
def operator() -> Callable[..., Tensor | None]:
    """Return the operator; where there is none, a function that returns None."""
    if not is_available():
        return lambda *arguments: None
    return builtin_of(torch.ops.sparse_lightning_cpu.tile_linear.default)


def fake(
    inputs: Tensor, tiles: Tensor, pointers: Tensor, columns: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """Return outputs without values, for tracing."""
    return inputs.new_empty((*inputs.shape[:-1], out_features))
