"""Permutations of dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the permutation that undoes `order`.

    Example:
        >>> inverse((2, 0, 1))
        (1, 2, 0)
    """
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def permuted(values: Sequence[T], order: Sequence[int]) -> tuple[T, ...]:
    """Return the values, one for each dimension, in another order of dimensions.

    Example:
        >>> permuted(("a", "b", "c"), (2, 0, 1))
        ('c', 'a', 'b')
    """
    return tuple(values[d] for d in order)
