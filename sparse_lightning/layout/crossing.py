"""Layouts that share elements: in how many passes they are written, and whether their first dimensions cross."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sparse_lightning.layout.layout import Layout


def phases(layouts: Sequence[Layout]) -> list[int]:
    """Return a number for each layout such that those with the same number share no element.

    Example:
        >>> rows, columns = Layout((2, 3), (3, 1)), Layout((3, 2), (1, 3))
        >>> phases([rows, columns, Layout((2,), (1,), 6)])
        [0, 1, 0]
    """
    return list(_phases(tuple(layouts)))


@lru_cache(maxsize=4096)
def _phases(layouts: tuple[Layout, ...]) -> list[int]:
    found: list[int] = []
    for i, layout in enumerate(layouts):
        taken = {found[j] for j in range(i) if meet(layout, layouts[j])}
        found.append(next(n for n in range(i + 1) if n not in taken))
    return found


def meet(one: Layout, other: Layout) -> bool:
    """Whether two layouts share an element. Comparing their bounds first avoids most exact tests."""
    (low, high), (other_low, other_high) = one.span, other.span
    return low <= other_high and other_low <= high and one.overlaps(other)


def units_cross(one: Layout, other: Layout) -> bool:
    """Whether units, along the first dimension of two layouts that meet, cross as rows and columns do.

    Units that do not cross are the same units twice: each unit of one lies in a single unit of the other.

    Example:
        >>> rows, columns, pairs = Layout((4, 6), (6, 1)), Layout((6, 4), (1, 6)), Layout((2, 12), (12, 1))
        >>> units_cross(rows, columns), units_cross(rows, rows), units_cross(rows, pairs)
        (True, False, False)
    """
    return _meets_several(one, other) and _meets_several(other, one)


def _meets_several(one: Layout, other: Layout) -> bool:
    """Whether the first unit of `one` that meets `other` meets more than one of its units, if it has more than one."""
    if other.shape[0] == 1:
        return True
    unit = _unit(one, _first_meeting(one, other))
    first = _first_meeting(other, unit)
    return first + 1 < other.shape[0] and meet(unit, other.slice(0, first + 1, other.shape[0]))


def _first_meeting(one: Layout, other: Layout) -> int:
    """Return the first unit of a layout that meets another, by bisection."""
    low, high = 0, one.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if meet(one.slice(0, 0, middle + 1), other):
            high = middle
        else:
            low = middle + 1
    return low


def _unit(layout: Layout, index: int) -> Layout:
    return layout.slice(0, index, index + 1)
