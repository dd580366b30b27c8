"""EndToEnd: the blocks of all attached scopes in the order of a ragged value, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from sparse_lightning.flow.paged import PageTable
from sparse_lightning.flow.segments import Segments
from sparse_lightning.scope import SparseScope
from sparse_lightning.sparse_block import SparseBlock


class EndToEnd:
    """A snapshot of what is attached; all else is derived when it is first asked for, and kept.

    Args:
        scopes: what is attached, by name.
        table: where each block has its state.
        device: where ragged values live.
    """

    def __init__(self, scopes: Mapping[str, SparseScope], table: PageTable, device: torch.device) -> None:
        self._scopes, self._table, self._device = list(scopes.values()), table, device
        self.blocks = {owner: block for name, scope in scopes.items() for owner, block in owners(name, scope)}

    @cached_property
    def elements(self) -> int:
        """How many weights all blocks have."""
        return sum(scope.numel() for scope in self._scopes)

    @cached_property
    def count(self) -> int:
        """How many blocks there are: S."""
        return sum(block.numblk() for block in self.blocks.values())

    @cached_property
    def sizes(self) -> Tensor:
        """The elements of each block: `(S,)`."""
        return self.join([block.block_sizes() for block in self.blocks.values()])

    @cached_property
    def places(self) -> Tensor:
        """Where the entry of each block stands in a field of state: `(S,)`."""
        return self.join([self._table.places(owner) for owner in self.blocks])

    @cached_property
    def groups(self) -> dict[str, Segments]:
        """The entries of each parameter and of each scope."""
        by_parameter = [torch.full((block.numblk(),), i) for i, block in enumerate(self.blocks.values())]
        by_scope, scopes = [], 0
        for scope in self._scopes:
            numbers = torch.arange(scopes, scopes + scope.numscp()).view(*scope.grid_shape, 1)
            by_scope += list(scope.scatter(numbers.expand(*scope.grid_shape, scope.numblk_per_scope())).values())
            scopes += scope.numscp()
        return {
            "parameter": Segments(self.join(by_parameter), len(by_parameter)),
            "scope": Segments(self.join(by_scope), scopes),
        }

    def join(self, grids: Sequence[Tensor]) -> Tensor:
        """The grids of all blocks as one ragged value: `(S,)`."""
        joined = torch.cat([grid.reshape(-1) for grid in grids]) if grids else torch.empty(0, dtype=torch.int64)
        return joined.to(self._device)

    def split(self, values: Tensor) -> dict[SparseBlock, Tensor]:
        """A ragged value `(S,)` as the grid of each block."""
        blocks = self.blocks.values()
        parts = torch.split(values, [block.numblk() for block in blocks])
        return {block: part.view(block.grid_shape) for block, part in zip(blocks, parts, strict=True)}


def owners(name: str, scope: SparseScope) -> list[tuple[str, SparseBlock]]:
    """The blocks of a scope under names of their own."""
    blocks = scope.blocks()
    return [(name if len(blocks) == 1 else f"{name}/{i}", block) for i, block in enumerate(blocks)]
