"""Places: where the elements of each block lie in a parameter, as data that a file can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.block import BlockSpec
from sparse_lightning.layout import Layout, grid_shape
from sparse_lightning.view import View

NOWHERE = -1
"""The place of what a block at the edge lacks."""


@dataclass(frozen=True)
class Places:
    """The blocks of one view, without the parameter.

    Args:
        param: the shape of the parameter.
        stride: the strides of the parameter, which those of the view refer to.
        view: the shape of the view.
        view_stride: the strides of the view.
        offset: where the view begins, counted from the start of the parameter.
        block: the shape of a block.
    """

    param: tuple[int, ...]
    stride: tuple[int, ...]
    view: tuple[int, ...]
    view_stride: tuple[int, ...]
    offset: int
    block: tuple[int, ...]

    @staticmethod
    def of(spec: BlockSpec) -> Places:
        """The places of the blocks of a spec."""
        base, view = Layout.of(spec.param), spec.view.layout
        return Places(base.shape, base.stride, view.shape, view.stride, view.offset - base.offset, spec.shape)

    @property
    def grid(self) -> tuple[int, ...]:
        """How many blocks stand along each dimension."""
        return grid_shape(self.view, self.block)

    def indices(self) -> Tensor:
        """The elements of each block, `(blocks, elements of a block)`, counted row by row through the parameter.

        Example:
            >>> Places((2, 4), (4, 1), (2, 4), (4, 1), 0, (2, 2)).indices().tolist()
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        numbers = torch.arange(math.prod(self.param)).view(self.param)
        placed = torch.empty_strided(self.param, self.stride, dtype=torch.int64).copy_(numbers)
        seen = View(placed, self.view, self.view_stride, self.offset).data
        whole = _padded(seen, [n * b for n, b in zip(self.grid, self.block, strict=True)])
        blocks = View.block_view_of(whole, self.block, merge=True)
        return blocks.reshape(math.prod(self.grid), math.prod(self.block))


def _padded(numbers: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(numbers.shape) == tuple(shape):
        return numbers.contiguous()
    padded = numbers.new_full(tuple(shape), NOWHERE)
    padded[tuple(slice(n) for n in numbers.shape)] = numbers
    return padded
