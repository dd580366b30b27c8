"""BlockPart: the blocks of a view that one process holds, whole or cut, to reduce and to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_lightning.errors import LayoutError
from sparse_lightning.kernels import block_apply, block_score
from sparse_lightning.kernels.block_score import reference
from sparse_lightning.kernels.block_score.stage import Stage
from sparse_lightning.layout import Layout, grid_shape
from sparse_lightning.patch import Box, Patch, patches, whole
from sparse_lightning.reduction import Reduction

Fold = Callable[[Stage, Sequence[Tensor]], list[Tensor]]
"""What runs a stage on windows of one shape `(n0, l0, n1, l1, …)`: for each fold a grid `(n0, n1, …)`."""


@dataclass(frozen=True)
class BlockPart:
    """The patches of one grid on the tensor that is written to, and on others that are read along with it.

    The whole parameter is the part whose box has its shape. Grids always have the shape of the whole: a
    reduction leaves its identity where the part holds nothing, so that parts combine.
    """

    tensors: tuple[Tensor, ...]
    view: Layout
    grid_shape: tuple[int, ...]
    patches: tuple[Patch, ...]

    @classmethod
    def whole(cls, tensor: Tensor, view: Layout, block: tuple[int, ...], others: Sequence[Tensor] = ()) -> BlockPart:
        """All blocks of a view of a tensor."""
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
    ) -> BlockPart:
        """The blocks of a view of a parameter, as far as they lie in a box of it.

        Args:
            local: the tensor that holds the box, of the box's shape.
            box: start and stop along each dimension of the parameter.
            view: the view on the whole parameter.
            base: the layout of the whole parameter.
            block: the block shape, one positive entry for each dimension of the view.
            others: tensors of the box's shape, of any strides, that a stage reads beside the local one.
        """
        found = patches(view, base, block, box, Layout.of(local), tuple(Layout.of(other) for other in others))
        tensors = tuple(tensor.detach() for tensor in (local, *others))
        return cls(tensors, view, grid_shape(view.shape, block), found)

    def reduce(self, reduction: Reduction) -> Tensor:
        """The grid of this part's share of each block, prepared, folded and combined, not yet finished."""
        [grid] = self.fold(reduction.stage, block_score.choose(self.tensors[0].device, elements=0))
        return grid

    def fold(self, stage: Stage, run: Fold) -> list[Tensor]:
        """A stage on the elements of this part: for each of its folds a grid of this part's share of each block."""
        grids = [reference.start(kind, self.grid_shape, self.tensors[0]) for _, kind in stage.folds]
        self.fold_into(grids, stage, run)
        return grids

    def fold_into(self, grids: Sequence[Tensor], stage: Stage, run: Fold) -> None:
        """`fold`, combined with what grids hold already: one for each fold of the stage."""
        for patch in self.patches:
            windows = [layout.on(tensor) for layout, tensor in zip(patch.windows, self.tensors, strict=True)]
            for grid, value, (_, kind) in zip(grids, run(stage, windows), stage.folds, strict=True):
                reference.combine_(kind, grid[_slices(patch)], _to_grid(patch, value))

    def fill_(self, mask: Tensor) -> None:
        """Zero where the mask is True; exactly +0.0, whatever was there."""
        if mask.dtype != torch.bool:
            raise LayoutError(f"a mask is boolean, True where a block is pruned; this one is {mask.dtype}")
        for window, here in self._windows(mask):
            block_apply.fill_(window, here)

    def fillers(self, mask: Tensor) -> list[Callable[[], None]]:
        """What `fill_` does, as functions to be called again and again while tensor and mask stay as they are."""
        return [block_apply.filler(window, here) for window, here in self._windows(mask)]

    def chosen(self, grid: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """The windows of all tensors where a boolean grid has a block, and which of their elements it means."""
        for patch in self.patches:
            here = _from_grid(patch, grid.detach().to(self.tensors[0].device)[_slices(patch)])
            if here.any():
                windows = [layout.on(tensor) for layout, tensor in zip(patch.windows, self.tensors, strict=True)]
                yield block_apply.reference.spread(here).expand(windows[0].shape), windows

    def scale_(self, multiplier: Tensor) -> None:
        """Each block times its grid value."""
        for window, here in self._windows(multiplier):
            block_apply.scale_(window, here)

    def _windows(self, grid: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each patch to write to, with its values of a grid in the same order."""
        check_writable(self.view)
        if tuple(grid.shape) != self.grid_shape:
            raise LayoutError(f"values of shape {tuple(grid.shape)} for a grid of blocks of shape {self.grid_shape}")
        grid = grid.detach().to(self.tensors[0].device)
        for patch in self.patches:
            yield patch.windows[0].on(self.tensors[0]), _from_grid(patch, grid[_slices(patch)])


def check_writable(view: Layout) -> None:
    """Raise where writing would reach an element twice."""
    if not view.is_injective():
        raise LayoutError(f"the view {view} reaches some element twice: it can be read, but not written")


def _slices(patch: Patch) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in patch.grid)


def _from_grid(patch: Patch, values: Tensor) -> Tensor:
    """Values in the order of the grid → in the order of the patch's windows."""
    if patch.flipped:
        values = values.flip(patch.flipped)
    return values.permute(patch.order).reshape(patch.counts)


def _to_grid(patch: Patch, values: Tensor) -> Tensor:
    """Values in the order of the patch's window → in the order of the grid."""
    sizes = [hi - lo for lo, hi in patch.grid]
    back = [patch.order.index(d) for d in range(len(sizes))]
    values = values.reshape([sizes[d] for d in patch.order]).permute(back)
    return values.flip(patch.flipped) if patch.flipped else values
