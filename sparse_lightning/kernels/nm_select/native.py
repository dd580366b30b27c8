"""nm_select for CPUs, in C++: one pass over the weights of several tensors that lie alike, by all threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sparse_lightning.kernels.block_score.reference import accumulation_dtype
from sparse_lightning.kernels.native import library
from sparse_lightning.layout.coalesce import coalesce

SOURCE = Path(__file__).with_suffix(".cpp")

LARGE = 1 << 12
"""Weights from which on the kernel is worth building, which takes about two seconds per machine."""

SMALL = 1 << 15
"""Weights up to which one thread is faster than waking others."""

LARGEST_GROUP = 64
"""In larger groups, comparing all pairs takes longer than sorting."""

TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
"""The numbers by which the kernel knows the types of elements."""


def takes(
    weights: Sequence[Tensor],
    m: int,
    others: Sequence[Tensor] | None = None,
    pruned: Sequence[Tensor] | None = None,
) -> bool:
    """Whether the kernel is worth running on these tensors, can do so in one call, and can be built on this machine."""
    fits = _are_alike(weights) and weights[0].dtype in TYPES and m <= LARGEST_GROUP
    fits = fits and (others is None or _are_alike(others)) and (pruned is None or _are_alike(pruned))
    return fits and len(weights) * weights[0].numel() >= LARGE and library(SOURCE) is not None


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are on the CPU and have one shape, dtype and strides."""
    first = tensors[0]
    alike = (t.shape == first.shape and t.stride() == first.stride() and t.dtype == first.dtype for t in tensors[1:])
    return all(t.device.type == "cpu" for t in tensors) and all(alike)


def nm_select(weight: Tensor, n: int, m: int, other: Tensor | None = None, pruned: Tensor | None = None) -> Tensor:
    """Keep n of every m neighbours; `other` and `pruned` have the shape of the weight."""
    others, before = (None if tensor is None else [tensor] for tensor in (other, pruned))
    return nm_select_many([weight], [n], m, others, before)[0]


def nm_select_many(
    weights: Sequence[Tensor],
    kept: Sequence[int],
    m: int,
    others: Sequence[Tensor] | None = None,
    pruned: Sequence[Tensor] | None = None,
) -> Tensor:
    """Keep some of every m neighbours of tensors that lie alike; return their masks, `(tensors, *shape)`."""
    first = weights[0]
    masks = torch.empty((len(weights), *first.shape), dtype=torch.bool)
    if not masks.numel():
        return masks
    factors = weights if others is None else [_readable(other, first.dtype) for other in others]
    before = masks if pruned is None else pruned
    # Groups do not cross the merged dimensions: m divides the last one.
    runs = coalesce(first.shape, first.stride(), masks.stride()[1:], factors[0].stride(), before[0].stride())
    built = library(SOURCE)
    assert built is not None, "`takes` has checked"
    built.nm_select(
        ctypes.c_int64(len(weights)),
        _integers([weight.data_ptr() for weight in weights]),
        ctypes.c_int(TYPES[first.dtype]),
        None if others is None else _integers([factor.data_ptr() for factor in factors]),
        ctypes.c_int(TYPES[factors[0].dtype]),
        None if pruned is None else _integers([mask.data_ptr() for mask in pruned]),
        ctypes.c_void_p(masks.data_ptr()),
        ctypes.c_int64(len(runs)),
        _integers([run.size for run in runs]),
        _integers([run.strides[i] for i in range(4) for run in runs]),
        _integers(kept),
        ctypes.c_int64(m),
        ctypes.c_int(torch.get_num_threads() if masks.numel() > SMALL else 1),
    )
    # The kernel writes without the knowledge of autograd.
    for weight in weights:
        if not weight.is_inference():
            torch.autograd.graph.increment_version(weight)
    return masks


def _readable(other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a factor in a type that the kernel reads."""
    return other if other.dtype in TYPES else other.to(accumulation_dtype(dtype))


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
