"""Coordinates of blocks and scopes: which scope a block belongs to, and which blocks a scope consists of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.errors import CouplingError, LayoutError
from sparse_lightning.layout.algebra import row_major
from sparse_lightning.layout.permutation import inverse

Index = Tensor | Sequence[int] | int
"""A place in a grid: its coordinate, or its number in row-major order; or many as an integer tensor of coordinates,
`(…, dimensions of the grid)`."""


class ScopeIndex(ABC):
    """A grid of scopes by coordinates: from blocks to scopes and back."""

    grid_shape: tuple[int, ...]

    @abstractmethod
    def members(self) -> Sequence[Any]:
        """Return the ScopeSpecs of this scope."""

    @abstractmethod
    def order_of(self, member: Any) -> tuple[int, ...]:
        """Return the permutation from the scope grid of a member to this one."""

    @overload
    def block_to_scope(self, index: Tensor, block: SparseBlock | None = None) -> Tensor: ...

    @overload
    def block_to_scope(self, index: int, block: SparseBlock | None = None) -> int: ...

    @overload
    def block_to_scope(self, index: Sequence[int], block: SparseBlock | None = None) -> tuple[int, ...]: ...

    def block_to_scope(self, index: Index, block: SparseBlock | None = None) -> Tensor | tuple[int, ...] | int:
        """Return the index of the scope that a block belongs to, in the form of the index of the block.

        Args:
            index: a coordinate in the grid of the block, its number in row-major order, or an integer tensor of
                coordinates, `(…, grid_ndim)`.
            block: which of the coupled blocks; None if there is only one.

        Example:
            >>> from sparse_lightning import BlockSpec, ScopeSpec
            >>> ScopeSpec(BlockSpec(torch.ones(2, 8), (1, 1)), (1, 4)).block_to_scope((1, 6))
            (1, 1)
        """
        member = self._member_of(block)
        found = scope_of(coordinates(index, member.block.grid_shape), member.shape, self.order_of(member))
        if isinstance(index, Tensor):
            return found
        return number_of(found, self.grid_shape) if isinstance(index, int) else tuple(found.tolist())

    @overload
    def scope_to_block(self, index: Tensor, block: SparseBlock | None = None) -> Tensor: ...

    @overload
    def scope_to_block(self, index: int, block: SparseBlock | None = None) -> list[int]: ...

    @overload
    def scope_to_block(self, index: Sequence[int], block: SparseBlock | None = None) -> list[tuple[int, ...]]: ...

    def scope_to_block(
        self, index: Index, block: SparseBlock | None = None
    ) -> Tensor | list[tuple[int, ...]] | list[int]:
        """Return the indices of the blocks of a scope, in the order of `gather` and in the form of the index.

        Args:
            index: a coordinate in the grid of scopes, its number in row-major order, or an integer tensor of
                coordinates, `(…, grid_ndim)`, for a result of shape `(…, blocks, grid_ndim)`.
            block: which of the coupled blocks; None if there is only one.

        Example:
            >>> from sparse_lightning import BlockSpec, ScopeSpec
            >>> ScopeSpec(BlockSpec(torch.ones(2, 8), (1, 1)), (1, 4)).scope_to_block((1, 1))
            [(1, 4), (1, 5), (1, 6), (1, 7)]
        """
        member = self._member_of(block)
        found = blocks_of(coordinates(index, self.grid_shape), member.shape, self.order_of(member))
        if isinstance(index, Tensor):
            return found
        if isinstance(index, int):
            return [number_of(place, member.block.grid_shape) for place in found]
        return [tuple(place) for place in found.tolist()]

    def _member_of(self, block: SparseBlock | None) -> Any:
        members = self.members()
        if block is None and len(members) > 1:
            raise CouplingError(f"{self} has several blocks: pass the block that the index belongs to")
        found = [member for member in members if block is None or member.block == block]
        if not found:
            raise CouplingError(f"{block} is not a block of {self}: pass one of its blocks()")
        return found[0]


def coordinates(index: Index, grid_shape: tuple[int, ...]) -> Tensor:
    """Return coordinates as a tensor; raise an error if one lies outside of the grid."""
    if isinstance(index, int):
        if not 0 <= index < math.prod(grid_shape):
            raise LayoutError(f"index {index} lies outside of the grid {grid_shape}")
        return torch.tensor([index // n % size for n, size in zip(row_major(grid_shape), grid_shape, strict=True)])
    found = index if isinstance(index, Tensor) else torch.tensor(tuple(index), dtype=torch.int64)
    sizes = torch.tensor(grid_shape, dtype=torch.int64, device=found.device)
    if (
        found.is_floating_point()
        or found.shape[-1:] != (len(grid_shape),)
        or not ((found >= 0) & (found < sizes)).all()
    ):
        raise LayoutError(f"index {index} lies outside of the grid {grid_shape}: pass a coordinate for each dimension")
    return found


def number_of(place: Tensor, grid_shape: tuple[int, ...]) -> int:
    """Return the number of a coordinate in row-major order."""
    return sum([x * n for x, n in zip(place.tolist(), row_major(grid_shape), strict=True)])


def scope_of(block: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return the scopes of blocks, in the order of the coupled grid: `(…, ndim)` → `(…, ndim)`."""
    return (block // torch.tensor(shape, device=block.device))[..., list(order)]


def blocks_of(scope: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return the blocks of scopes of the coupled grid, in the order of their index: `(…, blocks per scope, ndim)`."""
    own = scope[..., list(inverse(order))].unsqueeze(-2)
    inside = torch.ones(shape, device=scope.device).nonzero()
    return own * torch.tensor(shape, device=scope.device) + inside
