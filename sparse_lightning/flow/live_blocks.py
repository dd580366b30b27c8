"""LiveBlocks: the blocks of all attached scopes that are left in a model from which units were removed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparse_lightning.blocks.live_scope import LiveScope
from sparse_lightning.flow.paged import PageTable
from sparse_lightning.flow.ragged_blocks import RaggedBlocks


class LiveBlocks:
    """What is read of the blocks of a model; what is computed from it has an entry for each block of the whole model.

    Args:
        whole: all blocks.
        left: what is left of scopes, by name; scopes that are missing are whole.
        table: the pages of each block in the fields of state.
        device: of ragged values.

    Attributes:
        ragged: the blocks that are left; all of them if none is removed.
    """

    def __init__(
        self, whole: RaggedBlocks, left: Mapping[str, LiveScope], table: PageTable, device: torch.device
    ) -> None:
        self._count, self._places = whole.count, None
        self.ragged = whole
        if left:
            scopes = {name: left[name].scope if name in left else scope for name, scope in whole.scopes.items()}
            self.ragged = RaggedBlocks(scopes, table, device)
            self._places = self._in(whole, left)

    def _in(self, whole: RaggedBlocks, left: Mapping[str, LiveScope]) -> Tensor:
        """Return where each entry of the blocks that are left is among those of all blocks."""
        entries = whole.split(torch.arange(whole.count))
        kept = {
            owner: own
            for name, live in left.items()
            for owner, own in zip(live.scope.named_blocks(name), live.kept, strict=True)
        }
        numbers = {
            owner: grid.reshape(-1)[kept[owner]] if owner in kept else grid
            for name, scope in whole.scopes.items()
            for owner, grid in zip(scope.named_blocks(name), scope.scatter(entries[name]).values(), strict=True)
        }
        return self.ragged.join([numbers[owner] for owner in self.ragged.blocks])

    def widened(self, values: Tensor) -> Tensor:
        """Return `(S,)` values for all blocks: those of the blocks that are left, and zero for the others."""
        if self._places is None:
            return values
        return values.new_zeros(self._count).index_copy_(0, self._places, values)
