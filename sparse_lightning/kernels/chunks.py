"""Chunks of a shape, small enough that intermediate results stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

CPU_ELEMENTS = 1 << 20
"""Elements of a chunk on a CPU: 4 MB of fp32, large enough for several threads and small enough for a cache."""

DEVICE_ELEMENTS = 1 << 24
"""Elements of a chunk on other devices: large enough that kernel launches cost nothing."""


def chunks(shape: Sequence[int], device: torch.device, each: int = 1) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cover a shape, each of a bounded number of elements, leading dimensions divided first.

    Args:
        shape: the shape to cover.
        device: the device of the elements.
        each: the number of elements per entry of the shape.

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
