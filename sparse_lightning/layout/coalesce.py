"""Coalescing: contiguous dimensions merged into one, for a single tensor or for several of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """Contiguous dimensions as one: its size, its stride in each tensor, and the dimensions it consists of."""

    size: int
    strides: tuple[int, ...]
    dims: tuple[int, ...]


def coalesce(
    shape: Sequence[int], *strides: Sequence[int], may_merge: Callable[[tuple[int, ...], int], bool] | None = None
) -> list[Run]:
    """Merge adjacent dimensions that are contiguous in all tensors.

    Two of them are contiguous where the outer stride is the inner size times the inner stride. Dimensions of size 1
    are dropped; if all have size 1, the last one is kept.

    Args:
        shape: the sizes, outermost first; none is zero.
        strides: for each tensor one stride per dimension.
        may_merge: whether the dimensions of a run, given first, may be merged with the next dimension.

    Example:
        >>> [(run.size, run.strides) for run in coalesce((8, 4, 1, 4), (16, 4, 4, 1), (0, 0, 0, 1))]
        [(32, (4, 0)), (4, (1, 1))]
    """
    sizes = list(enumerate(shape))
    runs: list[Run] = []
    for d, n in [(d, n) for d, n in sizes if n != 1] or sizes[-1:]:
        inner = tuple(stride[d] for stride in strides)
        contiguous = bool(runs) and all(a == n * b for a, b in zip(runs[-1].strides, inner, strict=True))
        if contiguous and (may_merge is None or may_merge(runs[-1].dims, d)):
            runs[-1] = Run(runs[-1].size * n, inner, (*runs[-1].dims, d))
        else:
            runs.append(Run(n, inner, (d,)))
    return runs
