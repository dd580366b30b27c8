"""BlockCoupling: one decision for the blocks of several BlockSpecs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparse_lightning.blocks.sparse_block import BlockSpec, SparseBlock, Values, joined
from sparse_lightning.blocks.view import View
from sparse_lightning.errors import CouplingError
from sparse_lightning.layout.permutation import permuted

__all__ = ["BlockCoupling", "BlockSpec", "check_orders"]


class BlockCoupling(SparseBlock):
    """Aligns the grids of several BlockSpecs: one decision prunes the block in all of them.

    Args:
        specs: the BlockSpecs, each once.
        orders: for each spec the permutation of its grid that makes all grids agree; None for no permutation. None
            or an empty list permutes no grid.
        name: the name in errors and tables.
        readers: the specs whose weights read what the others compute: a unit contributes nothing while these are zero.
            None for the specs on the last parameter; an empty list where no spec reads the others.

    Example:
        >>> import torch
        >>> up, down = torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False)
        >>> rows, columns = BlockSpec(up.weight, (1, -1)), BlockSpec(down.weight, (-1, 1))
        >>> neurons = BlockCoupling([rows, columns], orders=[(0, 1), (1, 0)])
        >>> neurons.grid_shape, neurons.numel_per_block()
        ((8, 1), 8)
    """

    shape = (-1, -1)

    def __init__(
        self,
        specs: Sequence[BlockSpec],
        orders: Sequence[Sequence[int] | None] | None = None,
        name: str | None = None,
        readers: Sequence[BlockSpec] | None = None,
    ) -> None:
        self.specs = list(specs)
        self.name = name
        label = f"coupling {name!r}" if name else "a coupling"
        if not self.specs:
            raise CouplingError(f"{label} has no specs: pass at least one")
        self.orders = check_orders(label, [spec.grid_shape for spec in self.specs], orders)
        if len(set(self.specs)) != len(self.specs):
            twice = next(spec for spec in self.specs if self.specs.count(spec) > 1)
            raise CouplingError(f"{twice} occurs in {label} twice: pass each spec once")
        self._order_of = dict(zip(self.specs, self.orders, strict=True))
        self.grid_shape = permuted(self.specs[0].grid_shape, self.orders[0])
        last = self.specs[-1].param
        self._readers = [s for s in self.specs if s.param is last] if readers is None else list(readers)

    def readers(self) -> list[BlockSpec]:
        """Return the specs that read what the others compute; none if all are on one side."""
        return self._readers if len(self._readers) < len(self.specs) else []

    @property
    def data(self) -> dict[BlockSpec, Tensor]:
        """The weights of the view of each spec, live."""
        for spec in self.specs:
            spec.view.warn_of_copy(stacklevel=3)
        return {spec: spec.view.read() for spec in self.specs}

    def blocks(self) -> list[BlockSpec]:
        """Return the coupled specs."""
        return list(self.specs)

    def order_of(self, spec: BlockSpec) -> tuple[int, ...]:
        """Return the permutation from the grid of a spec to this grid."""
        return self._order_of[spec]

    def _values_of(self, spec: BlockSpec, values: Values) -> Tensor | None:
        if isinstance(values, Tensor):
            raise CouplingError(
                f"one tensor of values is not enough for {self}: pass a mapping from each of its specs to a tensor"
            )
        return super()._values_of(spec, values)

    def block_view(self, values: Values = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """Return the flattened blocks of all specs concatenated, `(*grid_shape, numel_per_block)`.

        The specs have different storages, so this always copies, and this is the only form.
        """
        parts = []
        for spec in self.specs:
            view = spec.view_of(self._values_of(spec, values))
            blocks = View.block_view_of(view.read(), spec.shape, merge=True)
            parts.append(blocks.permute(*self.order_of(spec), self.grid_ndim))
        return joined(parts)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"BlockCoupling({name}{self.specs}, grid={self.grid_shape})"


def check_orders(
    label: str, grids: Sequence[tuple[int, ...]], orders: Sequence[Sequence[int] | None] | None
) -> list[tuple[int, ...]]:
    """Return one permutation for each grid; raise an error unless all permuted grids agree."""
    given = [None] * len(grids) if orders is None or len(orders) == 0 else list(orders)
    if len(given) != len(grids):
        raise CouplingError(f"{label} has {len(grids)} members, but {len(given)} orders: pass one for each")
    found = []
    for grid, order in zip(grids, given, strict=True):
        found.append(tuple(range(len(grid))) if order is None else tuple(order))
        if sorted(found[-1]) != list(range(len(grid))):
            raise CouplingError(f"order {found[-1]} in {label} does not permute the {len(grid)} dimensions of {grid}")
        first, this = permuted(grids[0], found[0]), permuted(grid, found[-1])
        if first != this:
            raise CouplingError(
                f"the grids of {label} do not agree: {first} and {this} (grids {grids[0]} and {grid}, permuted by "
                f"{found[0]} and {found[-1]}). Change a block shape or an order"
            )
    return found
