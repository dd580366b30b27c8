"""Attached: a scope at work. Its blocks by name, their masks, and what the method remembers of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from sparse_lightning.block import BlockSpec
from sparse_lightning.distributed import held
from sparse_lightning.patterns import Attachment
from sparse_lightning.sparse_block import SparseBlock


class Attached:
    """The masks of one attachment, and how they are kept to.

    Args:
        attachment: what a pattern has named.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.name, self.pattern = attachment.name, attachment.pattern
        self.scope, self.final = attachment.scope, attachment.final
        blocks = self.scope.blocks()
        names = [self.name] if len(blocks) == 1 else [f"{self.name}/{i}" for i in range(len(blocks))]
        self.blocks: dict[str, SparseBlock] = dict(zip(names, blocks, strict=True))
        self.memory: Tensor | None = None
        self.device = self.parameters()[0].device
        self.masks = {
            name: torch.zeros(block.grid_shape, dtype=torch.bool, device=self.device)
            for name, block in self.blocks.items()
        }
        self._pruned: set[str] = set()
        self._fillers: dict[BlockSpec, tuple[tuple[object, ...], list[Callable[[], None]]]] = {}

    def parameters(self) -> list[Tensor]:
        """The parameters that the blocks belong to, each once."""
        return self.scope.parameters()

    def gathered_mask(self) -> Tensor:
        """The masks of all blocks, gathered by scope."""
        return self.scope.gather({block: self.masks[name] for name, block in self.blocks.items()})

    def set_mask(self, gathered: Tensor) -> dict[str, Tensor]:
        """Take up a new mask, gathered by scope; gives the old ones by name of their block."""
        before = dict(self.masks)
        grids = self.scope.scatter(gathered)
        self.set_masks({name: grids[block] for name, block in self.blocks.items()})
        return before

    def set_masks(self, masks: dict[str, Tensor]) -> None:
        """Take up new masks by name of their block."""
        self.masks = {name: masks[name].to(self.device) for name in self.blocks}
        # Known on the host from here on, so that a step waits for no device to find that nothing is pruned.
        self._pruned = {name for name, mask in self.masks.items() if mask.any()}
        self._fillers = {}

    def not_zero(self, masks: Mapping[str, Tensor]) -> list[str]:
        """The names of those masks that prune a block which is not zero."""
        fitting = {n: b for n, b in self.blocks.items() if n in masks and masks[n].shape == b.grid_shape}
        return [n for n, b in fitting.items() if (masks[n].to(self.device) & (b.norms() != 0)).any()]

    def hold(self) -> None:
        """Zero the pruned blocks of the weights. It is called after every step, so what to write where is kept."""
        for name in self._pruned:
            for spec in self.blocks[name].blocks():
                place = _place(held(spec.param))
                known = self._fillers.get(spec)
                if known is None or known[0] != place:
                    grid = self.blocks[name].grid_of(spec, self.masks[name])
                    known = self._fillers[spec] = place, spec.part().fillers(grid)
                for fill in known[1]:
                    fill()

    def hold_in(self, tensor_of: Callable[[BlockSpec], Tensor | None]) -> None:
        """Zero the pruned blocks of what stands for each spec: its gradient, or the weights of a copy."""
        for name in self._pruned:
            block = self.blocks[name]
            for spec in block.blocks():
                tensor = tensor_of(spec)
                fillers = [] if tensor is None else spec.part(tensor).fillers(block.grid_of(spec, self.masks[name]))
                for fill in fillers:
                    fill()

    def where(self, grids: dict[str, Tensor]) -> Iterator[tuple[BlockSpec, Tensor]]:
        """Boolean grids by name of their block, as grids of the specs where any entry is True."""
        for name, grid in grids.items():
            if grid.any():
                for spec in self.blocks[name].blocks():
                    yield spec, self.blocks[name].grid_of(spec, grid)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Where the elements of a tensor are: another place means another tensor to write to."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
