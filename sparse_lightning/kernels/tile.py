"""Tiles: how a strided window of any number of dimensions is divided among the programs of a Triton kernel.

The two innermost axes are divided into tiles of rows × columns, one for each program; every index of the other axes
is a program of its own. Pure integers: the kernels do the same arithmetic on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

ELEMENTS = 2048
"""Elements of a tile: 16 for each of 128 threads, several 128-bit accesses in flight and few registers."""

COLUMNS = 256
"""Columns of a tile with several rows: wide enough for whole 128-byte lines, tall enough to cover few blocks."""

OUTER = 3
"""The number of axes of a kernel in addition to the rows and the columns."""


def tile_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of a tile, powers of two.

    Example:
        >>> tile_shape(4096, 4096), tile_shape(1, 1 << 24), tile_shape(4096, 9)
        ((8, 256), (1, 2048), (128, 16))
    """
    wide = min(power_of_two(columns), ELEMENTS if rows == 1 else COLUMNS)
    return min(power_of_two(rows), ELEMENTS // wide), wide


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def launches(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the leading axes beyond those of a kernel: one launch for each; `()` if there are none.

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
