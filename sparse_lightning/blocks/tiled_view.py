"""TiledView: one view of a parameter, tiled into a grid of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sparse_lightning.blocks.local_blocks import Fold, LocalBlocks
from sparse_lightning.blocks.shards import complete, local_like, local_part
from sparse_lightning.blocks.view import View, copy_
from sparse_lightning.errors import LayoutError
from sparse_lightning.kernels.stage import Stage
from sparse_lightning.layout import Layout, check_division, grid_shape, resolve_block_shape
from sparse_lightning.layout.permutation import inverse
from sparse_lightning.layout.regions import Box

PRUNABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of weights that can be divided into blocks: norms, scores and products are defined and exact for them."""


class TiledView:
    """A view and the blocks that tile it: sizes, windows, and the blocks that this process holds.

    Args:
        view: a View, or a Parameter as the identity view of itself.
        shape: the block shape; −1 spans its dimension, missing trailing entries are 1.
        name: the name in errors and tables.
        edge: "error" raises an error if the blocks do not divide the view; "partial" allows the last block of a
            dimension to be smaller.
    """

    def __init__(
        self,
        view: View | Tensor,
        shape: Sequence[int],
        name: str | None = None,
        edge: Literal["error", "partial"] = "error",
    ) -> None:
        self.view = View.from_existing(view)
        self.name = name
        self.edge = edge
        self._check_dtype()
        try:
            if edge not in ("error", "partial"):
                raise LayoutError(f'edge must be "error" or "partial", not {edge!r}')
            self.shape = resolve_block_shape(self.view.shape, shape)
        except LayoutError as error:
            raise self._misfit(shape, f"{error}. Change the block shape") from None
        try:
            if edge == "error":
                check_division(self.view.shape, self.shape)
        except LayoutError as error:
            hint = 'Change the block shape, or allow smaller blocks with edge="partial"'
            raise self._misfit(shape, f"{error}. {hint}") from None
        self.grid_shape = grid_shape(self.view.shape, self.shape)

    def _misfit(self, shape: Sequence[int], why: str) -> LayoutError:
        own = tuple(self.param.shape)
        viewed = "" if self.view.shape == own else f", viewed as {self.view.shape}"
        return LayoutError(
            f"block {tuple(shape)} does not fit {self.name or 'a parameter'} of shape {own}{viewed}: {why}"
        )

    def _check_dtype(self) -> None:
        if self.param.dtype not in PRUNABLE:
            raise LayoutError(
                f"{repr(self.name) if self.name else 'a parameter'} of shape {tuple(self.param.shape)} has the dtype "
                f"{self.param.dtype}: blocks need floating-point weights, of "
                f"{', '.join(str(dtype) for dtype in PRUNABLE)}. Exclude this parameter, or convert it"
            )

    @property
    def param(self) -> Tensor:
        """The parameter of the view."""
        return self.view.param

    @property
    def data(self) -> Tensor:
        """The weights of the view, live; see `View.data`."""
        self.view.warn_of_copy(stacklevel=3)
        return self.view.read()

    def set_data(self, t: Tensor | float) -> None:
        """Write all weights of the view; values broadcast as in `Tensor.copy_`, and a number fills."""
        copy_(self.view, t)

    def has_edge(self, dim: int) -> bool:
        """Whether the last block of a dimension is smaller."""
        return self.view.shape[dim] % self.shape[dim] != 0

    def sizes(self) -> Tensor:
        """Return the number of weights of each block: a grid of integers."""
        sizes = torch.ones((), dtype=torch.int64)
        for n, b in zip(self.view.shape, self.shape, strict=True):
            extent = (n - torch.arange(0, n, b)).clamp(max=b)
            sizes = sizes.unsqueeze(-1) * extent
        return sizes

    def numel_in(self, rectangle: Sequence[slice], order: Sequence[int]) -> int:
        """Return the number of weights in a rectangle of the grid permuted by `order`."""
        bounds = [
            rectangle[d].indices(n * b)[:2] for d, n, b in zip(inverse(order), self.grid_shape, self.shape, strict=True)
        ]
        edges = zip(bounds, self.shape, self.view.shape, strict=True)
        return math.prod(max(0, min(hi * b, n) - lo * b) for (lo, hi), b, n in edges)

    def view_of(self, values: Tensor | None) -> View:
        """Return the view of the weights, or of a tensor of the shape of the parameter or of the view."""
        if values is None:
            return self.view
        _check_real(values)
        if values.shape == self.param.shape:
            return self.view.like(values)
        if tuple(values.shape) == self.view.shape:
            return View.from_existing(values)
        raise LayoutError(
            f"values of shape {tuple(values.shape)} do not fit {self}: pass a tensor of the shape of the parameter, "
            f"{tuple(self.param.shape)}, or of the view, {self.view.shape}"
        )

    def window_of(self, rectangle: Sequence[slice], values: Tensor | None) -> tuple[View, tuple[int, ...]]:
        """Return the view of a rectangle of the grid, and the size of the blocks in it, which must all be equal."""
        view, lengths = self.view_of(values), []
        layout = view.layout
        for d, (where, b) in enumerate(zip(rectangle, self.shape, strict=True)):
            low, high = where.start * b, min(where.stop * b, layout.shape[d])
            layout = layout.slice(d, low, high)
            lengths.append((high - low) // (where.stop - where.start))
        return View(view.param, layout.shape, layout.stride, layout.offset), tuple(lengths)

    def part(self, values: Tensor | None = None, others: Sequence[Tensor] = ()) -> LocalBlocks:
        """Return the blocks that this process holds, of the weights or of other values.

        Args:
            values: a tensor of the shape of the parameter or of the view; None for the weights.
            others: tensors of the shape of the parameter that are read along with them.
        """
        if values is not None and values.shape != self.param.shape:
            return self.view_of(values).whole_part(self.shape)
        if values is None:
            self._check_dtype()  # it may have changed
        else:
            _check_real(values)
        local, box = local_part(self.param if values is None else values)
        beside = [local_like(other, self.param) for other in others]
        return LocalBlocks.of_box(local, box, self.view.layout, Layout.of(self.param), self.shape, beside)

    def stacked_part(self, local: Tensor, others: Sequence[Tensor] = ()) -> LocalBlocks:
        """Return the blocks that this process holds of several parameters that lie as this one does.

        Args:
            local: the local parts of the parameters, stacked along a new first dimension.
            others: tensors that are read along with them, stacked in the same way.
        """
        base, (_, box) = Layout.of(self.param), local_part(self.param)
        n, apart = len(local), base.span[1] + 1

        def beside(layout: Layout) -> Layout:
            return Layout((n, *layout.shape), (apart, *layout.stride), layout.offset)

        return LocalBlocks.of_box(
            local, ((0, n), *box), beside(self.view.layout), beside(base), (1, *self.shape), others
        )

    def part_of_box(self, local: Tensor, box: Box) -> LocalBlocks:
        """Return the blocks within a box of the parameter, a shard, that `local` holds."""
        return LocalBlocks.of_box(local, box, self.view.layout, Layout.of(self.param), self.shape)

    def fold(
        self, stage: Stage, run: Fold, values: Tensor | None = None, others: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Run a stage on the elements of all blocks, over all shards: a grid for each of its folds."""
        grids = self.part(values, others).fold(stage, run)
        return complete([(grid, kind, self.param) for grid, (_, kind) in zip(grids, stage.folds, strict=True)])

    def expand_to_elements(self, grid: Tensor) -> Tensor:
        """Return a grid broadcast to the weights: a new tensor in the shape of the view."""
        wide = View.broadcast_block_to_element(grid, self.shape)
        return wide[tuple(slice(n) for n in self.view.shape)]


def _check_real(values: Tensor) -> None:
    if values.is_complex():
        raise LayoutError(f"values of dtype {values.dtype}: blocks are scored by real numbers. Pass magnitudes")
