"""RaggedBlocks: the blocks of all attached scopes, concatenated in the order in which budgets compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from sparse_lightning.blocks.scope import SparseScope
from sparse_lightning.blocks.scope_stack import stacks
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.flow.paged import EntryIndex, PageTable
from sparse_lightning.flow.segments import Segments


class RaggedBlocks:
    """A snapshot of the attached scopes. Other attributes are computed on first use, and cached.

    A ragged value has one entry for each of S blocks. The entries of a scope are contiguous, in the form that
    `SparseScope.gather` returns, so that scores reach budgets and methods without another copy.

    Args:
        scopes: the attached scopes, by name.
        table: the pages of each block in the fields of state.
        device: of ragged values.
    """

    def __init__(self, scopes: Mapping[str, SparseScope], table: PageTable, device: torch.device) -> None:
        self._table, self._device = table, device
        self.stacks = stacks(scopes.values())
        names = {id(scope): name for name, scope in scopes.items()}
        # Scopes of a stack are contiguous, in the order in which the stack counts them.
        self.scopes = {names[id(scope)]: scope for stack in self.stacks for scope in stack.scopes}
        self.blocks = {o: b for name, scope in self.scopes.items() for o, b in scope.named_blocks(name).items()}

    @cached_property
    def owners(self) -> dict[int, str]:
        """The name of the block that each spec belongs to, by the id of the spec."""
        return {id(spec): owner for owner, block in self.blocks.items() for spec in block.blocks()}

    @cached_property
    def elements(self) -> int:
        """The number of weights in all blocks."""
        return sum(scope.numel() for scope in self.scopes.values())

    @cached_property
    def count(self) -> int:
        """The number of blocks, S."""
        return sum(block.numblk() for block in self.blocks.values())

    @cached_property
    def sizes(self) -> Tensor:
        """The number of weights in each block: `(S,)`."""
        return self.join([block.block_sizes() for block in self.blocks.values()])

    @cached_property
    def places(self) -> EntryIndex:
        """Where the entry of each block is in a field of state."""
        return EntryIndex.of(self.join([self._table.indices(owner) for owner in self.blocks]))

    @cached_property
    def groups(self) -> dict[str, Segments]:
        """The groups of entries by parameter and by scope."""
        blocks, scopes = self.blocks.values(), self.scopes.values()
        by_parameter = self.join([torch.full((block.numblk(),), i) for i, block in enumerate(blocks)])
        grid_index = self.join([torch.arange(block.numblk()) for block in blocks])
        sizes = [scope.numblk_per_scope() for scope in scopes for _ in range(scope.numscp())]
        by_scope = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
        return {
            "parameter": Segments(by_parameter, len(blocks), grid_index.argsort(stable=True)),
            "scope": Segments(by_scope.to(self._device), len(sizes)),
        }

    def join(self, grids: Sequence[Tensor]) -> Tensor:
        """Concatenate one grid per entry of `blocks`: `(S,)`.

        Args:
            grids: in the order of `blocks`, each in the shape of the grid or flat.
        """
        if not grids:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        pairs = zip(grids, self.blocks.values(), strict=True)
        shaped = {block: grid.reshape(block.grid_shape) for grid, block in pairs}
        return torch.cat([stack.gather(shaped).reshape(-1) for stack in self.stacks]).to(self._device)

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Return views of `(S,)` values by the name of the scope, each `(*scope.grid_shape, blocks per scope)`."""
        shapes = [(*scope.grid_shape, scope.numblk_per_scope()) for scope in self.scopes.values()]
        parts = torch.split(values, [scope.numblk() for scope in self.scopes.values()])
        return {name: part.view(shape) for name, part, shape in zip(self.scopes, parts, shapes, strict=True)}

    def scatter(self, gathered: Mapping[str, Tensor]) -> dict[SparseBlock, Tensor]:
        """Convert the values that `split` returned into the grid of each block."""
        scattered = [scope.scatter(gathered[name]) for name, scope in self.scopes.items()]
        return {block: grid for grids in scattered for block, grid in grids.items()}


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors `(n,)` one after another; where they are neighbours in one buffer already, a view of it.

    Example:
        >>> buffer = torch.arange(5)
        >>> concatenated([buffer[:2], buffer[2:]]).data_ptr() == buffer.data_ptr()
        True
        >>> concatenated([buffer[2:], buffer[:2]])
        tensor([2, 3, 4, 0, 1])
    """
    storage, end = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == storage and part.storage_offset() == end and part.is_contiguous()
        if not is_next:
            return torch.cat(list(parts))
        end += len(part)
    return parts[0].as_strided((sum(map(len, parts)),), (1,))
