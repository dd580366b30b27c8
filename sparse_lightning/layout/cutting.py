"""A layout on what is left of its base, after coordinates of the base were removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_lightning.layout.coordinates import Digit, coordinates_in, stride_of
from sparse_lightning.layout.layout import Layout

Indices = NDArray[np.int64]


class CutLayout(NamedTuple):
    """What is left of a layout.

    Attributes:
        layout: on the smaller base.
        kept: for each dimension of the layout before, the indices that are left, increasing.
    """

    layout: Layout
    kept: tuple[Indices, ...]


def cut_layout(layout: Layout, base: Layout, kept: Sequence[Indices | None], smaller: Layout) -> CutLayout | None:
    """Return the elements of a layout that are left when only some coordinates of its base are kept.

    Args:
        layout: on the base.
        base: before coordinates were removed.
        kept: for each dimension of the base the coordinates that are left, increasing; None for all of them.
        smaller: the base after that, with any strides.

    Returns:
        None if no strides express them, or if the kept elements are not those of some indices of each dimension.

    Example:
        >>> rows = Layout((4, 2, 3), (6, 3, 1))  # units of two rows each in a matrix of 8 rows
        >>> left = cut_layout(rows, Layout((8, 3)), [np.array([2, 3, 6, 7]), None], Layout((4, 3)))
        >>> left.layout, left.kept[0]
        (Layout((2, 2, 3), stride=(6, 3, 1), offset=0), array([1, 3]))
    """
    if layout == base:
        pairs = zip(kept, base.shape, strict=True)
        return CutLayout(smaller, tuple(np.arange(size) if own is None else own for own, size in pairs))
    found = coordinates_in(layout, base)
    if found is None:
        return None
    start, digits = list(found.start), [list(run) for run in found.digits]
    left: dict[tuple[int, int], Indices] = {}
    for d, indices in enumerate(kept):
        if indices is None:
            continue
        places = [(i, j) for i, run in enumerate(digits) for j, g in enumerate(run) if g.size > 1 and g.dim == d]
        cut = _cut_dimension([digits[i][j] for i, j in places], start[d], indices, base.shape[d])
        if cut is None:
            return None
        start[d] = cut.start
        for (i, j), digit, own in zip(places, cut.digits, cut.kept, strict=True):
            digits[i][j], left[i, j] = digit, own
    made = _made_of(tuple(map(tuple, digits)), tuple(start), smaller)
    if made is None:
        return None
    return CutLayout(made, tuple(_kept_of(i, run, left) for i, run in enumerate(found.digits)))


@lru_cache(maxsize=4096)
def _made_of(digits: tuple[tuple[Digit, ...], ...], start: tuple[int, ...], base: Layout) -> Layout | None:
    """Return the layout of these digits on a base; None if no strides express it."""
    strides = [stride_of(run, base) for run in digits]
    if any(stride is None for stride in strides):
        return None
    shape = [math.prod(digit.size for digit in run) for run in digits]
    return Layout(shape, [stride or 0 for stride in strides], base(start))


def _kept_of(i: int, run: Sequence[Digit], left: Mapping[tuple[int, int], Indices]) -> Indices:
    """Return the indices of a dimension, a product of digits, of which some values are left."""
    if len(run) == 1 and (i, 0) in left:
        return left[i, 0]
    kept = [left[i, j] if (i, j) in left else np.arange(digit.size) for j, digit in enumerate(run)]
    return product_of(kept, [digit.size for digit in run])


class _CutDimension(NamedTuple):
    start: int
    digits: list[Digit]
    kept: list[Indices]


def _cut_dimension(digits: Sequence[Digit], start: int, indices: Indices, size: int) -> _CutDimension | None:
    """Return the digits of a layout in one dimension of its base, of which some coordinates are left."""
    if start == 0 and len(indices) and len(digits) == 1 and digits[0] == Digit(size, digits[0].dim, 1):
        return _CutDimension(0, [digits[0]._replace(size=len(indices))], [indices])  # it is the whole dimension
    place = np.full(size, -1)
    place[indices] = np.arange(len(indices))
    reached = np.asarray(start)
    for digit in digits:
        reached = reached[..., None] + digit.step * np.arange(digit.size)
    there = place[reached]
    axes = range(there.ndim)
    kept = [np.flatnonzero((there >= 0).any(tuple(a for a in axes if a != axis))) for axis in axes]
    there = there[np.ix_(*kept)] if kept else there
    if not there.size or (there < 0).any():
        return None
    first = int(there.flat[0])
    lines = [np.moveaxis(there, axis, 0).reshape(there.shape[axis], -1)[:, 0] for axis in axes]
    steps = [int(line[1] - line[0]) if len(line) > 1 else 0 for line in lines]
    expected = np.asarray(first)
    for step, n in zip(steps, there.shape, strict=True):
        expected = expected[..., None] + step * np.arange(n)
    if (expected != there).any():
        return None
    made = [Digit(n, digit.dim, step) for n, digit, step in zip(there.shape, digits, steps, strict=True)]
    return _CutDimension(first, made, kept)


def product_of(kept: Sequence[Indices], sizes: Sequence[int]) -> Indices:
    """Return the row-major numbers of the combinations of indices.

    Args:
        kept: indices of each dimension.
        sizes: of the dimensions.

    Example:
        >>> product_of([np.array([0, 2]), np.array([1])], (3, 4))
        array([1, 9])
    """
    some = [(own, size) for own, size in zip(kept, sizes, strict=True) if size != 1 or not len(own)]
    numbers = some[0][0] if some else np.zeros(1, np.int64)
    for own, size in some[1:]:
        numbers = (numbers[:, None] * size + own).reshape(-1)
    return numbers
