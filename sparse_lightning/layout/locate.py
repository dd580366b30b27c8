"""From an offset back to a coordinate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparse_lightning.layout.algebra import LayoutAlgebra

if TYPE_CHECKING:
    from torch import Tensor


def unravel(base: LayoutAlgebra, offset: int | Tensor) -> tuple[list[Any], Any]:
    """Return the coordinate of an offset, and the remainder that no dimension accounts for.

    Divides by the strides, largest first. The coordinate is exact where the dimensions of the base are nested and the
    offset is one of its elements; `locate` checks both.

    Args:
        base: a layout without negative strides.
        offset: an integer, or a tensor of integers.

    Returns:
        One entry for each dimension, each like `offset`, and the remainder.
    """
    rest: Any = offset - base.offset
    place = [rest * 0] * base.ndim
    for d in descending(base):
        if base.stride[d]:
            place[d], rest = rest // base.stride[d], rest % base.stride[d]
    return place, rest


def locate(base: LayoutAlgebra, offset: int) -> tuple[int, ...] | None:
    """Return the coordinate of an offset in a base with nested dimensions; None if there is none, or no nesting.

    Example:
        >>> from sparse_lightning.layout import Layout
        >>> locate(Layout((4, 6)), 13), locate(Layout((4, 5), (6, 1)), 11)
        ((2, 1), None)
    """
    if not base.numel or not _is_nested(base):
        return None
    place, rest = unravel(base, offset)
    inside = all(0 <= x < n for x, n in zip(place, base.shape, strict=True))
    return tuple(place) if inside and not rest else None


def descending(base: LayoutAlgebra) -> list[int]:
    """Return the dimensions of size above 1, largest stride first."""
    return sorted((d for d, n in enumerate(base.shape) if n > 1), key=lambda d: -base.stride[d])


def _is_nested(base: LayoutAlgebra) -> bool:
    """Whether each stride is larger than the extent of all smaller ones together."""
    extent = 0
    for d in reversed(descending(base)):
        if base.stride[d] <= extent:
            return False
        extent += (base.shape[d] - 1) * base.stride[d]
    return True
