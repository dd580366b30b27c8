"""Block maps: parameters as images in which every element has the number of its block.

Elements are at their position in the parameter, not in the view, so a strided view shows its strides. An image starts
as ones, and every BlockSpec multiplies it by a grid of numbers as it would multiply weights: an element gets a number
if and only if block operations write to it, whatever the strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.blocks.table import times, view_text
from sparse_lightning.errors import LayoutError
from sparse_lightning.layout import Layout
from sparse_lightning.layout.locate import locate
from sparse_lightning.layout.regions import Box

Image: TypeAlias = NDArray[Any]

MAX_SIDE = 256
"""The elements that an image has along a side at most; larger parameters are cropped."""

NO_BLOCK = -1
"""The number of elements outside all blocks."""


@dataclass(frozen=True)
class BlockMap:
    """One parameter in two dimensions.

    Attributes:
        numbers: `(rows, columns)`, the number of the block of each element, or −1. Blocks are numbered scope by
            scope: `number // blocks per scope` is the number of the scope.
        box: the region of the parameter that is drawn.
        shape: the shape of the parameter.
        lines: the lines of the caption.
    """

    numbers: Image
    box: Box
    shape: tuple[int, ...]
    lines: tuple[str, ...]

    @property
    def origin(self) -> tuple[int, int]:
        """The first row and column of the region that is drawn."""
        starts = [lo for lo, _ in self.box]
        split = 1 if len(self.shape) > 1 else 0
        row = starts[0] if split else 0
        return row, sum(x * math.prod(self.shape[d + 1 :]) for d, x in enumerate(starts) if d >= split)

    @property
    def is_cropped(self) -> bool:
        """Whether only a region of the parameter is drawn."""
        return self.numbers.size < math.prod(self.shape)


def block_maps_of(scope_or_block: SparseScope | SparseBlock, max_side: int = MAX_SIDE) -> list[BlockMap]:
    """Return one map for each parameter, in the order of the blocks.

    Args:
        scope_or_block: the blocks.
        max_side: the largest number of rows and of columns; larger parameters are cropped.

    Example:
        >>> block_maps_of(BlockSpec(torch.empty(2, 4), (1, 2)))[0].numbers.tolist()
        [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    found: dict[int, list[tuple[BlockSpec, Tensor, str]]] = {}
    for block, numbers, scope in _numbered(scope_or_block):
        for spec in block.blocks():
            found.setdefault(id(spec.param), []).append((spec, block.grid_of(spec, numbers), scope))
    return [_block_map(members, max_side) for members in found.values()]


def _numbered(target: SparseScope | SparseBlock) -> list[tuple[SparseBlock, Tensor, str]]:
    """Return each block with the grid of its numbers and a description of its scope."""
    if isinstance(target, SparseBlock):
        return [(target, torch.arange(target.numblk()).view(target.grid_shape), "")]
    numbers = torch.arange(target.numblk()).view(*target.grid_shape, target.numblk_per_scope())
    grids = target.scatter(numbers)
    return [(member.block, grids[member.block], f", scope {times(member.shape)}") for member in target.members()]


def _block_map(members: list[tuple[BlockSpec, Tensor, str]], max_side: int) -> BlockMap:
    first = members[0][0]
    shape = tuple(first.param.shape)
    box = _crop(shape, _start(first), max_side)
    numbers = torch.full([hi - lo for lo, hi in box], NO_BLOCK)
    for spec, grid, _ in members:
        own = number_elements(spec, grid, box)
        numbers = torch.where(own == NO_BLOCK, numbers, own)
    flat = numbers.flatten(1) if len(shape) > 1 else numbers.reshape(1, numbers.numel())
    lines = tuple(_spec_text(spec) + scope for spec, _, scope in members)
    return BlockMap(flat.numpy(), box, shape, lines)


def number_elements(spec: BlockSpec, numbers: Tensor, box: Box) -> Tensor:
    """Return the number of the block of each element in a box of the parameter; −1 outside all blocks.

    Args:
        spec: the blocks.
        numbers: integers ≥ 0, of the shape of the spec's grid.
        box: start and stop along each dimension of the parameter.

    Example:
        >>> from sparse_lightning import View
        >>> evens = BlockSpec(View(torch.empty(6), (3,), (2,)), (1,))
        >>> number_elements(evens, torch.tensor([7, 8, 9]), ((1, 6),)).tolist()
        [-1, 8, -1, 9, -1]
    """
    # An element that no block multiplies stays 1, which is NO_BLOCK + 2.
    multiplier = numbers - NO_BLOCK + 1
    try:
        local = torch.ones([hi - lo for lo, hi in box], dtype=torch.int64)
        spec.part_of_box(local, box).scale_(multiplier)
        return local + NO_BLOCK - 1
    except LayoutError:
        # A view across dimensions, such as a diagonal, cannot be cropped to a box: use the whole parameter.
        base = Layout.of(spec.param)
        local = torch.ones(base.storage_size, dtype=torch.int64).as_strided(base.shape, base.stride)
        spec.apply_multiplier(multiplier, values=local)
        return local[tuple(slice(lo, hi) for lo, hi in box)] + NO_BLOCK - 1


def _start(spec: BlockSpec) -> tuple[int, ...]:
    """Return the coordinate in the parameter of the first element of a view in memory."""
    base = Layout.of(spec.param)
    return locate(base, spec.view.layout.span[0]) or (0,) * base.ndim


def _crop(shape: Sequence[int], start: Sequence[int], max_side: int) -> Box:
    """Return the region to draw: at most `max_side` rows and columns, from `start` on."""
    sizes: list[int] = []
    room = max_side
    for d in reversed(range(len(shape))):
        if d == 0 and len(shape) > 1:
            room = max_side
        sizes.insert(0, min(shape[d], max(room, 1)))
        room //= max(sizes[0], 1)
    lows = [min(x, n - size) for x, n, size in zip(start, shape, sizes, strict=True)]
    return tuple((lo, lo + size) for lo, size in zip(lows, sizes, strict=True))


def _spec_text(spec: BlockSpec) -> str:
    view = view_text(spec.view)
    seen = "" if view == "whole" else f"view {view}, "
    return f"{spec.name or 'blocks'}: {seen}block {times(spec.shape)}, grid {times(spec.grid_shape)}"
