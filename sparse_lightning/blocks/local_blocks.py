"""LocalBlocks: the blocks of a view that one process holds, complete or cut; reductions and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.blocks.reductions import Reduction
from sparse_lightning.errors import LayoutError
from sparse_lightning.kernels import block_apply, block_score
from sparse_lightning.kernels.block_fill.windows import Window, window
from sparse_lightning.kernels.block_score import reference
from sparse_lightning.kernels.chunks import chunks
from sparse_lightning.kernels.stage import Stage
from sparse_lightning.layout import Layout, grid_shape
from sparse_lightning.layout.permutation import inverse, permuted
from sparse_lightning.layout.regions import BlockRegion, Box, regions, whole

Fold = Callable[[Stage, Sequence[Tensor]], list[Tensor]]
"""Runs a stage on windows of one shape `(n0, l0, n1, l1, …)`; returns a grid `(n0, n1, …)` for each fold."""


@dataclass(frozen=True)
class LocalBlocks:
    """The regions of one grid on the tensor that is written to, and on others that are read along with it.

    Grids always have the shape of the whole grid: a reduction leaves its identity where this process holds nothing, so
    that partial grids can be combined. A whole parameter is the case of a box of its shape.
    """

    tensors: tuple[Tensor, ...]
    view: Layout
    grid_shape: tuple[int, ...]
    regions: tuple[BlockRegion, ...]

    @classmethod
    def whole(cls, tensor: Tensor, view: Layout, block: tuple[int, ...], others: Sequence[Tensor] = ()) -> LocalBlocks:
        """Return all blocks of a view of a tensor."""
        base = Layout.of(tensor)
        return cls.of_box(tensor, whole(base.shape), view, base, block, others)

    @classmethod
    def of_box(
        cls,
        local: Tensor,
        box: Box,
        view: Layout,
        base: Layout,
        block: tuple[int, ...],
        others: Sequence[Tensor] = (),
    ) -> LocalBlocks:
        """Return the blocks of a view of a parameter within a box of the parameter.

        Args:
            local: the tensor that holds the box, in the shape of the box.
            box: start and stop along each dimension of the parameter.
            view: the view on the whole parameter.
            base: the layout of the whole parameter.
            block: the block shape, one positive entry for each dimension of the view.
            others: tensors of the shape of the box, with any strides, that a stage also reads.
        """
        found = regions(view, base, block, box, Layout.of(local), tuple(Layout.of(other) for other in others))
        tensors = tuple(tensor.detach() for tensor in (local, *others))
        return cls(tensors, view, grid_shape(view.shape, block), found)

    def reduce(self, reduction: Reduction) -> Tensor:
        """Return the partial grid of a reduction, not yet finished."""
        [grid] = self.fold(reduction.stage, block_score.choose(self.tensors[0].device, elements=0))
        return grid

    def fold(self, stage: Stage, run: Fold) -> list[Tensor]:
        """Run a stage on the local elements; return a partial grid for each of its folds."""
        grids = [reference.start(kind, self.grid_shape, self.tensors[0]) for _, kind in stage.folds]
        self.fold_into(grids, stage, run)
        return grids

    def fold_into(self, grids: Sequence[Tensor], stage: Stage, run: Fold) -> None:
        """Run a stage and combine the results into existing grids, one for each of its folds."""
        for region in self.regions:
            combine_into(grids, region, run(stage, self.windows(region)), stage)

    def windows(self, region: BlockRegion) -> list[Tensor]:
        """Return the elements of a region in each of the tensors."""
        return [layout.on(tensor) for layout, tensor in zip(region.windows, self.tensors, strict=True)]

    def count_above(self, eps: float) -> Tensor:
        """Return the number of local elements with a magnitude above `eps`, or that are NaN, on their device."""
        total = torch.zeros((), dtype=torch.int64, device=self.tensors[0].device)
        for region in self.regions:
            window = region.windows[0].on(self.tensors[0])
            for piece in chunks(window.shape, window.device, each=2):
                magnitude = window[piece].to(reference.accumulation_dtype(window.dtype)).abs()
                total += (~(magnitude <= eps)).sum()
        return total

    def some_hold_weights(self, grid: Tensor, most: int) -> bool:
        """Whether one of some blocks is not zero: of those that a grid marks, about this many in each region."""
        for region in self.regions:
            is_whole = covers(region, self.grid_shape)
            here = grid.reshape(region.counts) if is_whole else _from_grid(region, grid[_slices(region)])
            marked, window = here.nonzero(), region.windows[0].on(self.tensors[0])
            # One after another: the first that is not zero tells, and gathering a few costs more than reading them.
            for block in marked[:: max(1, len(marked) // most)].tolist():
                if window[tuple(at for i in block for at in (i, slice(None)))].any():
                    return True
        return False

    def fill_(self, mask: Tensor) -> None:
        """Zero the blocks where the mask is True: exactly +0.0, whatever the value was."""
        if mask.dtype != torch.bool:
            raise LayoutError(f"a mask must be boolean, True where a block is pruned, not {mask.dtype}")
        for elements, here in self._windows(mask):
            block_apply.fill_(elements, here)

    def fill_windows(self, tensor: int, mask: Layout) -> list[Window]:
        """Return where the blocks lie and where their mask values are, for `kernels.block_fill`.

        Args:
            tensor: the index of the tensor that is filled.
            mask: the positions of the grid in a flat mask.
        """
        check_writable(self.view)
        origin = int(self.tensors[0].storage_offset())
        found = []
        for region in self.regions:
            here = mask
            for d, (low, high) in enumerate(region.grid):
                here = here.slice(d, low, high)
            found.append(window(tensor, region.windows[0], here.flip(region.flipped), region.order, origin))
        return found

    def chosen(self, grid: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield the mask of elements and the windows of all tensors, for each region with a True block in a grid."""
        for region in self.regions:
            here = _from_grid(region, grid.detach().to(self.tensors[0].device)[_slices(region)])
            if here.any():
                windows = self.windows(region)
                yield block_apply.reference.spread(here).expand(windows[0].shape), windows

    def scale_(self, multiplier: Tensor) -> None:
        """Multiply each block by its grid value."""
        for elements, here in self._windows(multiplier):
            block_apply.scale_(elements, here)

    def _windows(self, grid: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the window of each region, with its values of a grid in the same order."""
        check_writable(self.view)
        if tuple(grid.shape) != self.grid_shape:
            raise LayoutError(f"values of shape {tuple(grid.shape)} do not fit a grid of shape {self.grid_shape}")
        grid = grid.detach().to(self.tensors[0].device)
        for region in self.regions:
            yield region.windows[0].on(self.tensors[0]), _from_grid(region, grid[_slices(region)])


def combine_into(grids: Sequence[Tensor], region: BlockRegion, values: Sequence[Tensor], stage: Stage) -> None:
    """Combine what a stage returned for the windows of a region into grids, one for each of its folds.

    Args:
        grids: of all blocks; further dimensions may come first.
        region: where the values belong.
        values: in the order of the windows, after the same further dimensions.
        stage: with the kind of each fold.
    """
    for grid, value, (_, kind) in zip(grids, values, stage.folds, strict=True):
        before = [slice(None)] * (grid.ndim - len(region.grid))
        reference.combine_(kind, grid[(*before, *_slices(region))], _to_grid(region, value))


def in_order_of(region: BlockRegion, grids: Tensor) -> Tensor:
    """Return what grids `(n, *grid of blocks)` hold of a region, in the order of its windows: `(n, n0, n1, …)`."""
    return _from_grid(region, grids[(slice(None), *_slices(region))])


def covers(region: BlockRegion, grid_shape: Sequence[int]) -> bool:
    """Whether a region has all blocks of a grid, in the order of the grid."""
    is_whole = all(bounds == (0, size) for bounds, size in zip(region.grid, grid_shape, strict=True))
    return is_whole and not region.flipped and region.order == tuple(range(len(region.order)))


def check_writable(view: Layout) -> None:
    """Raise an error if two coordinates of a view share an element."""
    if not view.is_injective():
        raise LayoutError(f"the view {view} contains some element twice: it can be read, but not written")


def _slices(region: BlockRegion) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in region.grid)


def _from_grid(region: BlockRegion, values: Tensor) -> Tensor:
    """Permute values from the order of the grid to the order of the windows of a region, after further dimensions."""
    before = values.ndim - len(region.grid)
    if region.flipped:
        values = values.flip([d + before for d in region.flipped])
    values = values.permute([*range(before), *(d + before for d in region.order)])
    return values.reshape([*values.shape[:before], *region.counts])


def _to_grid(region: BlockRegion, values: Tensor) -> Tensor:
    """Permute values from the order of the windows of a region to the order of the grid, after further dimensions."""
    sizes = [hi - lo for lo, hi in region.grid]
    before = values.ndim - len(region.counts)
    order = (*range(before), *(d + before for d in inverse(region.order)))
    values = values.reshape([*values.shape[:before], *permuted(sizes, region.order)]).permute(order)
    return values.flip([d + before for d in region.flipped]) if region.flipped else values
