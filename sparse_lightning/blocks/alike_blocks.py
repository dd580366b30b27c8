"""AlikeBlocks: the blocks of several parameters that lie alike, read in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_lightning.blocks.local_blocks import Fold, LocalBlocks, combine_into, covers, in_order_of
from sparse_lightning.blocks.shards import held, local_like
from sparse_lightning.blocks.spec import BlockSpec
from sparse_lightning.kernels import block_score
from sparse_lightning.kernels.block_score import native
from sparse_lightning.kernels.stage import Stage

SMALL = 1 << 16
"""The most weights of a parameter that is copied: the time of a larger one is that of its weights."""

TOGETHER = 1 << 20
"""The most weights of a copy of several parameters: it stays in a cache."""


class CopyRoom:
    """The memory of copies, used again for the next ones: new memory costs more than a copy."""

    def __init__(self) -> None:
        self._rooms: dict[int, Tensor] = {}

    def stacked(self, tensors: Sequence[Tensor], place: int) -> Tensor:
        """Copy tensors of one shape and dtype, stacked, over the earlier copy at this place."""
        first, size = tensors[0], sum(tensor.numel() for tensor in tensors)
        room = self._rooms.get(place)
        if room is None or room.numel() < size or (room.dtype, room.device) != (first.dtype, first.device):
            room = self._rooms[place] = torch.empty(size, dtype=first.dtype, device=first.device)
        return torch.stack(list(tensors), out=room[:size].view(len(tensors), *first.shape))


class AlikeBlocks:
    """What this process holds of specs that lie alike, and of tensors that are read along with them.

    A lowering that can reads the tensors where they are; for others, small ones are copied into a stack.

    Args:
        specs: of parameters that lie alike.
        others: for each further input, one tensor of the shape of the parameter for each spec.
        zeros: `(specs, *grid of blocks)`, True for blocks of which all folds are zero, whatever the tensors hold; None
            if none is known.
    """

    def __init__(
        self, specs: Sequence[BlockSpec], others: Sequence[Sequence[Tensor]], zeros: Tensor | None = None
    ) -> None:
        self._specs, self._others, self._zeros = list(specs), others, zeros

    def fold_into(self, grids: Sequence[Tensor], stage: Stage, run: Fold, room: CopyRoom) -> None:
        """Run a stage and combine the results into new grids `(specs, *grid of blocks)`, one for each of its folds.

        Args:
            grids: contiguous, each with the value of an empty fold.
            stage: what to compute.
            run: the lowering.
            room: for copies.
        """
        self._fold(grids, stage, run, room)
        if self._zeros is not None:
            for grid in grids:
                grid.masked_fill_(self._zeros, 0)

    def _fold(self, grids: Sequence[Tensor], stage: Stage, run: Fold, room: CopyRoom) -> None:
        if self._fold_in_place(grids, stage, run):
            return
        size = self._specs[0].param.numel()
        step = max(1, TOGETHER // max(1, size)) if size <= SMALL else 1
        for begin in range(0, len(self._specs), step):
            here = slice(begin, begin + step)
            if len(self._specs[here]) == 1:
                self._part(begin).fold_into([grid[begin] for grid in grids], stage, run)
            else:
                self._copy(here, room).fold_into([grid[here] for grid in grids], stage, run)

    def _fold_in_place(self, grids: Sequence[Tensor], stage: Stage, run: Fold) -> bool:
        """Run a stage on the tensors where they are; return whether the lowering can."""
        fold_many = block_score.fold_many(run)
        if fold_many is None:
            return False
        first, tensors = self._part(0), self._locals(slice(None))
        folded = []
        for region in first.regions:
            here = None if self._zeros is None else in_order_of(region, self._zeros)
            windows = first.windows(region)
            is_whole = len(first.regions) == 1 and covers(region, first.grid_shape)
            is_direct = is_whole and grids[0].dtype == native.grid_dtype(windows)
            values = fold_many(stage, windows, tensors, here, grids if is_direct else None)
            if values is None:
                return False
            folded += [] if is_direct else [(region, values)]
        for region, values in folded:
            combine_into(grids, region, values, stage)
        return True

    def _part(self, i: int) -> LocalBlocks:
        """Return the blocks of one of the specs."""
        return self._specs[i].part(None, [tensors[i] for tensors in self._others])

    def _copy(self, here: slice, room: CopyRoom) -> LocalBlocks:
        """Return the blocks of some of the specs: a copy, stacked along a new first dimension."""
        weights, *beside = [room.stacked(tensors, i) for i, tensors in enumerate(self._locals(here))]
        return self._specs[0].stacked_part(weights, beside)

    def _locals(self, here: slice) -> list[list[Tensor]]:
        """Return the local tensors of some of the specs, for each input."""
        params = [spec.param for spec in self._specs[here]]
        beside = [[local_like(t, p) for t, p in zip(ts[here], params, strict=True)] for ts in self._others]
        return [[held(param) for param in params], *beside]
