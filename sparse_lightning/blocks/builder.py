"""SparsityBuilder: create and look up blocks, scopes and couplings by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from torch import Tensor, nn

from sparse_lightning.blocks.scope import ScopeCoupling, ScopeSpec, SparseScope
from sparse_lightning.blocks.sparse_block import SparseBlock
from sparse_lightning.blocks.spec import BlockCoupling, BlockSpec
from sparse_lightning.blocks.view import View
from sparse_lightning.errors import CouplingError, did_you_mean

Kind = TypeVar("Kind")


class SparsityBuilder:
    """Builds blocks, scopes and couplings by name; methods chain.

    Args:
        module: the model whose parameters `add_block` looks up by name; needed only for that.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))
        >>> builder = (
        ...     SparsityBuilder(mlp)
        ...     .add_block("up", "0.weight", (1, -1))
        ...     .add_block("down", "2.weight", (-1, 1))
        ...     .couple_blocks("neurons", ["up", "down"], orders=[None, (1, 0)])
        ...     .add_scope("mlp", "neurons")
        ... )
        >>> builder.get_scope("mlp").numblk_per_scope()
        8
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self._blocks: dict[str, SparseBlock] = {}
        self._scopes: dict[str, SparseScope] = {}
        self._coupled: set[str] = set()

    def add_block(
        self,
        name: str,
        view: View | Tensor | str,
        shape: Sequence[int],
        edge: Literal["error", "partial"] = "error",
    ) -> SparsityBuilder:
        """Add a BlockSpec on a view, a parameter, or the parameter of the module with this name."""
        target = self._parameter(view) if isinstance(view, str) else view
        return self._add(self._blocks, name, BlockSpec(target, shape, name=name, edge=edge))

    def couple_blocks(
        self, name: str, blocks: Sequence[str], orders: Sequence[Sequence[int] | None] | None = None
    ) -> SparsityBuilder:
        """Add a BlockCoupling of the BlockSpecs with these names."""
        specs = [self.get_block(block) for block in blocks]
        for spec in specs:
            if not isinstance(spec, BlockSpec):
                raise CouplingError(f"{spec.name!r} is a coupling itself: couple its specs and the others in one call")
        return self._add(self._blocks, name, BlockCoupling(specs, orders, name=name))  # type: ignore[arg-type]

    def add_scope(self, name: str, block: str, shape: Sequence[int] = ()) -> SparsityBuilder:
        """Add a ScopeSpec on the block with this name."""
        return self._add(self._scopes, name, ScopeSpec(self.get_block(block), shape, name=name))

    def couple_scopes(
        self, name: str, scopes: Sequence[str], orders: Sequence[Sequence[int] | None] | None = None
    ) -> SparsityBuilder:
        """Add a ScopeCoupling of the scopes with these names; they are then no longer scopes of their own."""
        members = [self.get_scope(scope) for scope in scopes]
        for member in members:
            if not isinstance(member, ScopeSpec):
                raise CouplingError(
                    f"{member.name!r} is a coupling itself: couple its scopes and the others in one call"
                )
        self._add(self._scopes, name, ScopeCoupling(members, orders, name=name))  # type: ignore[arg-type]
        self._coupled.update(scopes)
        return self

    def get_block(self, name: str) -> SparseBlock:
        """Return the block or coupling of blocks with this name."""
        return _get(self._blocks, name, "block")

    def get_scope(self, name: str) -> SparseScope:
        """Return the scope or coupling of scopes with this name."""
        return _get(self._scopes, name, "scope")

    def get_all_scopes(self) -> list[SparseScope]:
        """Return the scopes that budgets apply to: all except those coupled into another."""
        return [scope for name, scope in self._scopes.items() if name not in self._coupled]

    def _parameter(self, name: str) -> Tensor:
        if self._module is None:
            raise CouplingError(f"the parameter {name!r} needs a module to be found in: use SparsityBuilder(module)")
        return _get(dict(self._module.named_parameters(remove_duplicate=False)), name, "parameter")

    def _add(self, known: dict[str, Kind], name: str, made: Kind) -> SparsityBuilder:
        if name in known:
            raise CouplingError(f"the name {name!r} is taken: pass a unique name for each block and each scope")
        known[name] = made
        return self


def _get(known: Mapping[str, Kind], name: str, what: str) -> Kind:
    if name not in known:
        raise CouplingError(f"there is no {what} {name!r}{did_you_mean(name, known)}")
    return known[name]
