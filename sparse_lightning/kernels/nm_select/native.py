"""nm_select for CPUs, in C++: one pass over the weights by all threads.

Without `other`, the kernel ranks the bits of the weights themselves. With it, the scores of a chunk are computed by
torch and passed along.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from sparse_lightning.kernels.chunks import chunks
from sparse_lightning.kernels.native import library
from sparse_lightning.kernels.nm_select.reference import scores

SOURCE = Path(__file__).with_suffix(".cpp")

LARGE = 1 << 12
"""Elements of a weight from which on the kernel is worth building, which takes about two seconds per machine."""

LARGEST_GROUP = 64
"""In larger groups, comparing all pairs takes longer than sorting."""

INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""The integers that hold the bits of the floats."""

PIECES = 4
"""A chunk has this fraction of the usual number of elements: its scores are small beside the weights."""


def takes(weight: Tensor, m: int) -> bool:
    """Whether the kernel is worth running on this weight, and can be built on this machine."""
    fits = weight.device.type == "cpu" and weight.dtype in INTEGERS and m <= LARGEST_GROUP
    return fits and weight.numel() >= LARGE and library(SOURCE) is not None


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None) -> Tensor:
    """Keep n of every m neighbours; `other` has the shape of the weight."""
    mask = torch.empty(weight.shape, dtype=torch.bool)
    if other is None:
        _select(weight, weight, mask, n, m)
    else:
        groups = (*weight.shape[:-1], weight.shape[-1] // m)
        for *outer, last in chunks(groups, weight.device, each=m * PIECES):
            low, high, _ = last.indices(groups[-1])
            piece = (*outer, slice(low * m, high * m))
            _select(weight[piece], scores(weight[piece], other[piece]), mask[piece], n, m)
    # The kernel writes without the knowledge of autograd.
    if not weight.is_inference():
        torch.autograd.graph.increment_version(weight)
    return mask


def _select(weight: Tensor, scored: Tensor, mask: Tensor, n: int, m: int) -> None:
    """Call the kernel: mask and zero a weight by the magnitudes of `scored`, which has its shape."""
    built = library(SOURCE)
    assert built is not None, "`takes` has checked"
    infinity = torch.tensor(math.inf, dtype=scored.dtype).view(INTEGERS[scored.dtype]).item()
    built.nm_select(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_int64(weight.element_size()),
        ctypes.c_void_p(scored.data_ptr()),
        ctypes.c_int64(scored.element_size()),
        ctypes.c_void_p(mask.data_ptr()),
        ctypes.c_int64(weight.ndim),
        _integers(weight.shape),
        _integers((*weight.stride(), *scored.stride(), *mask.stride())),
        ctypes.c_int64(n),
        ctypes.c_int64(m),
        ctypes.c_int64(int(infinity)),
        ctypes.c_int(torch.get_num_threads()),
    )


def _integers(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
