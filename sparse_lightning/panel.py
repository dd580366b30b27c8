"""Panels: parameters as images in which every element has the number of its block.

Elements stand where they lie in their parameter, not in the view, so that a strided view shows its strides. An
image begins as ones, and every BlockSpec multiplies it by a grid of numbers as it would multiply weights: what a
block operation reaches is what gets a number, whatever the strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from sparse_lightning.block import BlockSpec
from sparse_lightning.chart import locate
from sparse_lightning.errors import LayoutError
from sparse_lightning.layout import Layout
from sparse_lightning.patch import Box
from sparse_lightning.scope import SparseScope
from sparse_lightning.sparse_block import SparseBlock
from sparse_lightning.table import times, view_text

Image: TypeAlias = NDArray[Any]

LIMIT = 256
"""How many elements of a parameter an image has along a side; of a larger parameter it has only the first."""

NOWHERE = -1
"""The number of elements that belong to no block."""


@dataclass(frozen=True)
class Panel:
    """One parameter in two dimensions.

    Attributes:
        numbers: `(rows, columns)`, the number of the block that each element belongs to, or −1. Blocks count
            from the first scope to the last, so that `number // blocks per scope` is the number of the scope.
        box: the part of the parameter that is drawn.
        shape: the shape of the parameter.
        lines: what the caption says.
    """

    numbers: Image
    box: Box
    shape: tuple[int, ...]
    lines: tuple[str, ...]

    @property
    def origin(self) -> tuple[int, int]:
        """The row and the column at which the drawn part begins."""
        starts = [lo for lo, _ in self.box]
        split = 1 if len(self.shape) > 1 else 0
        row = starts[0] if split else 0
        return row, sum(x * math.prod(self.shape[d + 1 :]) for d, x in enumerate(starts) if d >= split)

    @property
    def is_cropped(self) -> bool:
        """Whether a part of the parameter is not drawn."""
        return self.numbers.size < math.prod(self.shape)


def panels_of(scope_or_block: SparseScope | SparseBlock) -> list[Panel]:
    """One panel for each parameter, in the order in which the blocks name them.

    Example:
        >>> panels_of(BlockSpec(torch.empty(2, 4), (1, 2)))[0].numbers.tolist()
        [[0, 0, 1, 1], [2, 2, 3, 3]]
    """
    found: dict[int, list[tuple[BlockSpec, Tensor, str]]] = {}
    for block, numbers, scope in _numbered(scope_or_block):
        for spec in block.blocks():
            order = block.order_of(spec)
            own = numbers.permute([order.index(d) for d in range(len(order))])
            found.setdefault(id(spec.param), []).append((spec, own, scope))
    return [_panel(members) for members in found.values()]


def _numbered(target: SparseScope | SparseBlock) -> list[tuple[SparseBlock, Tensor, str]]:
    """Each block with the grid of its numbers, and its scope in words."""
    if isinstance(target, SparseBlock):
        return [(target, torch.arange(target.numblk()).view(target.grid_shape), "")]
    numbers = torch.arange(target.numblk()).view(*target.grid_shape, target.numblk_per_scope())
    grids = target.scatter(numbers)
    return [(member.block, grids[member.block], f", scope {times(member.shape)}") for member in target.members()]


def _panel(members: list[tuple[BlockSpec, Tensor, str]]) -> Panel:
    first = members[0][0]
    shape = tuple(first.param.shape)
    box = _crop(shape, _start(first))
    numbers = torch.full([hi - lo for lo, hi in box], NOWHERE)
    for spec, grid, _ in members:
        own = number_elements(spec, grid, box)
        numbers = torch.where(own == NOWHERE, numbers, own)
    flat = numbers.flatten(1) if len(shape) > 1 else numbers.reshape(1, numbers.numel())
    lines = tuple(_spec_text(spec) + scope for spec, _, scope in members)
    return Panel(flat.numpy(), box, shape, lines)


def number_elements(spec: BlockSpec, numbers: Tensor, box: Box) -> Tensor:
    """Spread a grid of numbers over the elements of a box of the parameter; −1 where there is no block.

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
    # An element that no block multiplies stays 1, which is NOWHERE + 2.
    multiplier = numbers - NOWHERE + 1
    try:
        local = torch.ones([hi - lo for lo, hi in box], dtype=torch.int64)
        spec.part_of_box(local, box).scale_(multiplier)
        return local + NOWHERE - 1
    except LayoutError:
        # A view across the dimensions, such as a diagonal, can't be cut to a box: take the whole parameter.
        base = Layout.of(spec.param)
        local = torch.ones(base.storage_size, dtype=torch.int64).as_strided(base.shape, base.stride)
        spec.apply_multiplier(multiplier, local)
        return local[tuple(slice(lo, hi) for lo, hi in box)] + NOWHERE - 1


def _start(spec: BlockSpec) -> tuple[int, ...]:
    """The coordinate of the parameter at which a view begins in memory."""
    base = Layout.of(spec.param)
    return locate(base, spec.view.layout.span[0]) or (0,) * base.ndim


def _crop(shape: Sequence[int], start: Sequence[int]) -> Box:
    """The part of a parameter to draw: at most LIMIT rows and LIMIT columns, from `start` on."""
    sizes: list[int] = []
    room = LIMIT
    for d in reversed(range(len(shape))):
        if d == 0 and len(shape) > 1:
            room = LIMIT
        sizes.insert(0, min(shape[d], max(room, 1)))
        room //= max(sizes[0], 1)
    lows = [min(x, n - size) for x, n, size in zip(start, shape, sizes, strict=True)]
    return tuple((lo, lo + size) for lo, size in zip(lows, sizes, strict=True))


def _spec_text(spec: BlockSpec) -> str:
    view = view_text(spec.view)
    seen = "" if view == "whole" else f"view {view}, "
    return f"{spec.name or 'blocks'}: {seen}block {times(spec.shape)}, grid {times(spec.grid_shape)}"
