"""Tiles: how the programs of a Triton kernel share a strided window of any number of dimensions.

The two fastest axes are cut into tiles of rows × columns, one for each program; an index of every other axis
belongs to one program. Pure integers: the kernels do the same arithmetic on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ELEMENTS = 2048
"""Elements of a tile: 16 for each of 128 threads, several 128-bit accesses in flight and few registers."""

COLUMNS = 256
"""Columns of a tile that has rows: wide enough for whole 128-byte lines, tall enough to meet few blocks."""

OUTER = 3
"""How many axes a kernel takes beside the rows and the columns."""


class Axis(NamedTuple):
    """One dimension of a window: how many entries, and how far apart they are in each tensor."""

    size: int
    strides: tuple[int, ...]


def tile_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two.

    Example:
        >>> tile_shape(4096, 4096), tile_shape(1, 1 << 24), tile_shape(4096, 9)
        ((8, 256), (1, 2048), (128, 16))
    """
    wide = min(power_of_two(columns), ELEMENTS if rows == 1 else COLUMNS)
    return min(power_of_two(rows), ELEMENTS // wide), wide


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def merged(axes: Sequence[Axis]) -> list[Axis]:
    """Axes with every neighbour joined that counts on in all tensors; slower axes first, as they came.

    Example:
        >>> merged([Axis(8, (16, 0)), Axis(4, (4, 0)), Axis(4, (1, 1))])
        [Axis(size=32, strides=(4, 0)), Axis(size=4, strides=(1, 1))]
    """
    found: list[Axis] = []
    for axis in [*(a for a in axes[:-1] if a.size > 1), axes[-1]]:
        if found and all(s == axis.size * t for s, t in zip(found[-1].strides, axis.strides, strict=True)):
            found[-1] = Axis(found[-1].size * axis.size, axis.strides)
        else:
            found.append(axis)
    return found


def launches(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The indices of the leading axes that a kernel can't take: one launch for each; one `()` where it takes all.

    Example:
        >>> list(launches((2, 3, 4, 5, 6))), list(launches((2, 3, 4, 5, 6, 7)))
        ([()], [(0,), (1,)])
    """
    extra = sizes[: max(0, len(sizes) - OUTER - 2)]
    if not extra:
        yield ()
        return
    for first in range(extra[0]):
        for rest in launches(sizes[1:]):
            yield (first, *rest)
