"""Scopes of the same form on other views: blocks, couplings and scopes are built again from other BlockSpecs."""

from __future__ import annotations

from collections.abc import Callable

from sparse_lightning.blocks.scope import ScopeCoupling, ScopeSpec, SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockCoupling, BlockSpec
from sparse_lightning.errors import CouplingError

Respec = Callable[[BlockSpec], BlockSpec]


def rebuilt(scope: SparseScope, respec: Respec) -> SparseScope:
    """Return a scope of the same form, with each of its BlockSpecs replaced.

    A scope that spans the grid of its blocks spans the new one; any other has as many blocks as before.

    Args:
        scope: a ScopeSpec or ScopeCoupling.
        respec: returns the BlockSpec in the place of another.

    Raises:
        CouplingError: if a class of scopes or blocks is not one of this package, or the new grids do not agree.

    Example:
        >>> import torch
        >>> scope = ScopeSpec(BlockSpec(torch.ones(4, 6), (1, -1)))
        >>> rebuilt(scope, lambda spec: BlockSpec(torch.ones(3, 6), spec.shape)).numblk_per_scope()
        3
    """
    if type(scope) is ScopeSpec:
        return _member(scope, respec)
    if type(scope) is ScopeCoupling:
        return ScopeCoupling([_member(member, respec) for member in scope.members()], scope.orders, scope.name)
    raise CouplingError(f"a {type(scope).__name__} is not a ScopeSpec or ScopeCoupling, and cannot be built again")


def _member(member: ScopeSpec, respec: Respec) -> ScopeSpec:
    shape = () if member.numscp() == 1 else member.shape
    return ScopeSpec(_block(member.block, respec), shape, member.name)


def _block(block: SparseBlock, respec: Respec) -> SparseBlock:
    if isinstance(block, BlockSpec):
        return respec(block)
    if type(block) is not BlockCoupling:
        raise CouplingError(f"a {type(block).__name__} is not a BlockSpec or BlockCoupling, and cannot be built again")
    made = {spec: respec(spec) for spec in block.specs}
    readers = [made[spec] for spec in block.readers()]
    return BlockCoupling(list(made.values()), block.orders, block.name, readers)
