"""BlockGeometry: which elements of a parameter form each block, as plain data that a file can store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.layout import Layout, grid_shape

PADDING = -1
"""The index of elements that a smaller block at the edge does not have."""


@dataclass(frozen=True)
class BlockGeometry:
    """The blocks of one view, without the parameter; exported files store these fields.

    Args:
        param: the shape of the parameter.
        stride: the strides of the parameter when it was exported.
        view: the shape of the view.
        view_stride: the strides of the view.
        offset: the first element of the view, relative to the first element of the parameter.
        block: the shape of a block.
    """

    param: tuple[int, ...]
    stride: tuple[int, ...]
    view: tuple[int, ...]
    view_stride: tuple[int, ...]
    offset: int
    block: tuple[int, ...]

    @staticmethod
    def of(spec: BlockSpec) -> BlockGeometry:
        """Return the geometry of the blocks of a spec."""
        base, view = Layout.of(spec.param), spec.view.layout
        offset = view.offset - base.offset
        return BlockGeometry(base.shape, base.stride, view.shape, view.stride, offset, spec.shape).fitted()

    def fitted(self) -> BlockGeometry:
        """Return the same blocks by a shape within the view: of a block that is larger, only that part has elements.

        Example:
            >>> BlockGeometry((3, 8), (8, 1), (3, 8), (8, 1), 0, (4, 4)).fitted().block
            (3, 4)
        """
        return replace(self, block=tuple(min(b, max(1, n)) for b, n in zip(self.block, self.view, strict=True)))

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of blocks along each dimension."""
        return grid_shape(self.view, self.block)

    def indices(self) -> Tensor:
        """Return the row-major indices of the elements of each block, `(blocks, elements per block)`.

        Example:
            >>> BlockGeometry((2, 4), (4, 1), (2, 4), (4, 1), 0, (2, 2)).indices().tolist()
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        numbers = torch.arange(math.prod(self.param)).view(self.param)
        placed = torch.empty_strided(self.param, self.stride, dtype=torch.int64).copy_(numbers)
        seen = View(placed, self.view, self.view_stride, self.offset).read()
        whole = _padded(seen, [n * b for n, b in zip(self.grid, self.block, strict=True)])
        blocks = View.block_view_of(whole, self.block, merge=True)
        return blocks.reshape(math.prod(self.grid), math.prod(self.block))


def _padded(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(numbers.shape) == tuple(shape):
        return numbers.contiguous()
    padded = numbers.new_full(tuple(shape), PADDING)
    padded[tuple(slice(n) for n in numbers.shape)] = numbers
    return padded
