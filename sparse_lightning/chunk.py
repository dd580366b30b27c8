"""Chunks: pieces of a shape small enough that what is computed on them stays in the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

CPU_ELEMENTS = 1 << 20
"""Elements of a chunk on a CPU: 4 MB of fp32, worth splitting over threads and not more than a cache holds."""

DEVICE_ELEMENTS = 1 << 24
"""Elements of a chunk elsewhere: large enough that launching kernels costs nothing."""


def chunks(shape: Sequence[int], device: torch.device, each: int = 1) -> Iterator[tuple[slice, ...]]:
    """Slices that together cover a shape, each of a bounded number of elements, leading dimensions cut first.

    Args:
        shape: what to cover.
        device: where the elements live.
        each: how many elements stand behind one entry of the shape.

    Example:
        >>> len(list(chunks((2048, 1024), torch.device("cpu"))))
        2
    """
    limit = CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS
    return _cut(tuple(shape), max(1, limit // max(1, each)))


def _cut(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    numel = math.prod(shape)
    if numel <= limit:
        if numel:
            yield (slice(None),) * len(shape)
        return
    pieces = min(shape[0], -(-numel // limit))
    step = -(-shape[0] // pieces)
    for start in range(0, shape[0], step):
        rows = min(step, shape[0] - start)
        for rest in _cut(shape[1:], max(1, limit // rows)):
            yield (slice(start, start + rows), *rest)
