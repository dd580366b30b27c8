"""ScopeStack: scopes of several parameters whose blocks lie alike, as one grid of scopes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sparse_lightning.blocks.scope import ScopeSpec, SparseScope
from sparse_lightning.blocks.shards import is_sharded
from sparse_lightning.blocks.sparse_block import BlockSpec, SparseBlock, joined
from sparse_lightning.blocks.view import View, from_blocks
from sparse_lightning.layout import Layout
from sparse_lightning.layout.permutation import inverse

SMALL = 1 << 16
"""The most blocks of a scope that is stacked: in larger ones, the time of an operation is that of its blocks."""

TOGETHER = 1 << 20
"""The most blocks of a stack, which bounds the memory of one operation."""


class ScopeStack(SparseScope):
    """Scopes side by side: the first dimension of its grid counts the parameters. Each scope has its own budget.

    Args:
        scopes: scopes that lie alike, see `stacks`.

    Example:
        >>> from sparse_lightning import BlockSpec, ScopeSpec
        >>> layers = [ScopeSpec(BlockSpec(torch.ones(4, 8), (2, 2)), (1, -1)) for _ in range(3)]
        >>> [stack] = stacks(layers)
        >>> stack.grid_shape, stack.numblk_per_scope()
        ((3, 2, 1), 4)
    """

    def __init__(self, scopes: Sequence[SparseScope]) -> None:
        self.scopes, self.name = list(scopes), None
        self.grid_shape = (len(scopes), *scopes[0].grid_shape)

    def members(self) -> list[ScopeSpec]:
        """Return the ScopeSpecs of all scopes."""
        return [member for scope in self.scopes for member in scope.members()]

    def order_of(self, member: ScopeSpec) -> tuple[int, ...]:
        """Return the permutation from the scope grid of a member to that of its scope."""
        return next(scope for scope in self.scopes if member in scope.members()).order_of(member)

    def numblk_per_scope(self) -> int:
        """Return the number of blocks in each scope."""
        return self.scopes[0].numblk_per_scope()

    def numel_per_scope(self) -> int:
        """Return the number of weights in the first scope of each parameter."""
        return self.scopes[0].numel_per_scope()

    def gather(self, grids: Mapping[SparseBlock, Tensor]) -> Tensor:
        """Return grids of blocks gathered by scope, `(*grid_shape, blocks per scope)`."""
        columns = zip(*(scope.blocks() for scope in self.scopes), strict=True)
        return self.gather_stacked([torch.stack([grids[block] for block in column]) for column in columns])

    def gather_stacked(self, grids: Sequence[Tensor]) -> Tensor:
        """Return one `(parameters, *grid of blocks)` for each member of a scope, gathered by scope."""
        first, parts = self.scopes[0], []
        for member, grid in zip(first.members(), grids, strict=True):
            own = View.block_view_of(grid, (1, *member.shape), merge=True)
            parts.append(own.permute(0, *(d + 1 for d in first.order_of(member)), own.ndim - 1))
        return joined(parts)

    def scatter(self, values: Tensor) -> dict[SparseBlock, Tensor]:
        """Return values gathered by scope as grids of blocks."""
        columns = zip(*(scope.blocks() for scope in self.scopes), strict=True)
        pairs = zip(columns, self.scatter_stacked(values), strict=True)
        return {block: grid for column, grids in pairs for block, grid in zip(column, grids, strict=True)}

    def scatter_stacked(self, values: Tensor) -> list[Tensor]:
        """Return values gathered by scope as `(parameters, *grid of blocks)`, one for each member of a scope."""
        first = self.scopes[0]
        sizes = [math.prod(member.shape) for member in first.members()]
        grids = []
        for member, part in zip(first.members(), torch.split(values, sizes, -1), strict=True):
            own = part.permute(0, *(d + 1 for d in inverse(first.order_of(member))), part.ndim - 1)
            grids.append(from_blocks(own, (1, *member.shape)))
        return grids

    def __repr__(self) -> str:
        return f"ScopeStack({len(self.scopes)} × {self.scopes[0]})"


def stacks(scopes: Iterable[SparseScope], together: int | None = None, each: int | None = None) -> list[ScopeStack]:
    """Return all scopes in stacks, those that lie alike together; those of many blocks are stacks of one.

    Args:
        scopes: the scopes.
        together: the most blocks of a stack; None for `TOGETHER`.
        each: the most blocks of a scope that is stacked; None for `SMALL`.
    """
    room, small = TOGETHER if together is None else together, SMALL if each is None else each
    groups: dict[Hashable, list[list[SparseScope]]] = {}
    for i, scope in enumerate(scopes):
        blocks = scope.numblk()
        key, most = (_likeness(scope), max(1, room // max(1, blocks))) if blocks <= small else (i, 1)
        found = groups.setdefault(key, [[]])
        if len(found[-1]) == most:
            found.append([])
        found[-1].append(scope)
    return [ScopeStack(group) for found in groups.values() for group in found]


def _likeness(scope: SparseScope) -> Hashable:
    """Return what two scopes share if their blocks lie alike and their values are gathered alike."""
    parts = [(m.shape, scope.order_of(m), m.block.grid_shape) for m in scope.members()]
    specs = [(m.block.order_of(spec), _geometry(spec)) for m in scope.members() for spec in m.block.blocks()]
    return scope.grid_shape, *parts, *specs


def _geometry(spec: BlockSpec) -> Hashable:
    base, view = Layout.of(spec.param), spec.view.layout
    offset = view.offset - base.offset
    placed = getattr(spec.param, "placements", None), id(getattr(spec.param, "device_mesh", None))
    return (
        (base.shape, base.stride, view.shape, view.stride, offset, spec.shape),
        (spec.param.dtype, spec.param.device, placed if is_sharded(spec.param) else None),
    )
