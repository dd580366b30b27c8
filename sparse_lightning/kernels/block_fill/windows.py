"""Windows: where the blocks of many tensors lie, and where their values of one flat mask are. Integers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from sparse_lightning.layout.coalesce import coalesce
from sparse_lightning.layout.layout import Layout


class Pair(NamedTuple):
    """Blocks along one dimension, the elements of each, and their strides in elements and in mask values."""

    blocks: int
    elements: int
    block_stride: int
    element_stride: int
    mask_stride: int


class Window(NamedTuple):
    """Blocks of one size in one tensor.

    Attributes:
        tensor: the index of the tensor.
        offset: of the first element, from the first element of the tensor.
        mask: the position of the first block in the flat mask.
        pairs: the dimensions, largest strides first.
        phase: windows of one phase share no element, so that threads may write to them at the same time.
    """

    tensor: int
    offset: int
    mask: int
    pairs: tuple[Pair, ...]
    phase: int = 0


def window(tensor: int, elements: Layout, mask: Layout, order: Sequence[int], origin: int = 0) -> Window:
    """Return a window whose blocks and mask values are both strided.

    Args:
        tensor: the index of the tensor.
        elements: `(n0, l0, n1, l1, …)`.
        mask: the values of the blocks in the flat mask, one dimension for each dimension of the grid.
        order: the dimensions of the mask in the order of the elements. The elements may have merged contiguous
            dimensions; where the mask can't be merged alike, the elements are divided again.
        origin: where the first element of the tensor is in its storage.
    """
    pairs = _pairs(elements.shape, elements.stride, mask.shape, mask.stride, tuple(order))
    return Window(tensor, elements.offset - origin, mask.offset, pairs)


@lru_cache(maxsize=4096)
def _pairs(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    mask_shape: tuple[int, ...],
    mask_strides: tuple[int, ...],
    order: tuple[int, ...],
) -> tuple[Pair, ...]:
    """Return the dimensions of a window whose elements and mask values have these shapes and strides."""
    left = [(mask_shape[d], mask_strides[d]) for d in order if mask_shape[d] > 1]
    pairs: list[Pair] = []
    for n, length, block, element in zip(shape[0::2], shape[1::2], strides[0::2], strides[1::2], strict=True):
        runs = _take(left, n)
        for i, (size, stride) in enumerate(runs):
            inner = _product(count for count, _ in runs[i + 1 :])
            last = i == len(runs) - 1
            pairs.append(Pair(size, length if last else 1, block * inner, element if last else 0, stride))
    kept = tuple(pair for pair in pairs if pair.blocks > 1 or pair.elements > 1)
    return kept or (Pair(1, 1, 0, 0, 0),)


def _take(left: list[tuple[int, int]], blocks: int) -> list[tuple[int, int]]:
    """Remove the leading dimensions that make this many blocks; return them with contiguous ones merged."""
    taken: list[tuple[int, int]] = []
    while _product(n for n, _ in taken) < blocks:
        taken.append(left.pop(0))
    if not taken:
        return [(1, 0)]
    return [(run.size, run.strides[0]) for run in coalesce([n for n, _ in taken], [s for _, s in taken])]


def _product(counts: Iterator[int]) -> int:
    total = 1
    for n in counts:
        total *= n
    return total
