"""Blocks: the smallest sets of weights that are kept or pruned together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sparse_lightning.distributed import complete, local_like, local_part
from sparse_lightning.errors import CouplingError, LayoutError
from sparse_lightning.kernels.block_score.stage import Stage
from sparse_lightning.layout import Layout, check_division, grid_shape, resolve_block_shape
from sparse_lightning.part import BlockPart, Fold
from sparse_lightning.patch import Box
from sparse_lightning.sparse_block import SparseBlock, Values, inverse, joined
from sparse_lightning.view import View


class BlockSpec(SparseBlock):
    """Tiles one view into a grid of blocks.

    Args:
        view: a View, or a Parameter as the identity view of itself.
        shape: the block; −1 spans its dimension, missing trailing entries are 1.
        name: what errors and tables call it.
        edge: "error" refuses a shape that the blocks do not divide; "partial" lets the last block of a
            dimension be smaller.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 6))
        >>> tiles = BlockSpec(weight, (2, 3), name="fc.weight")
        >>> tiles.grid_shape, tiles.numel_per_block()
        ((2, 2), 6)
        >>> tiles.apply_mask(torch.tensor([[True, False], [False, False]]))
        >>> weight[0].tolist()
        [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        view: View | Tensor,
        shape: Sequence[int],
        name: str | None = None,
        edge: Literal["error", "partial"] = "error",
    ) -> None:
        self.view = View.from_existing(view)
        self.name = name
        self.edge = edge
        try:
            if edge not in ("error", "partial"):
                raise LayoutError(f'edge is "error" or "partial", not {edge!r}')
            self.shape = resolve_block_shape(self.view.shape, shape)
            if edge == "error":
                check_division(self.view.shape, self.shape)
        except LayoutError as error:
            raise LayoutError(
                f"block {tuple(shape)} on {name or 'a parameter'} of shape {tuple(self.param.shape)}, seen as "
                f'{self.view.shape}: {error}. Change the block shape, or allow smaller blocks with edge="partial"'
            ) from None
        self.grid_shape = grid_shape(self.view.shape, self.shape)

    @property
    def param(self) -> Tensor:
        """The parameter that the view looks at."""
        return self.view.param

    @property
    def data(self) -> Tensor:
        """The weights of the view, live; see `View.data`."""
        return self.view.data

    def set_data(self, t: Tensor) -> None:
        """Write all weights of the view."""
        self.view.data = t

    def blocks(self) -> list[BlockSpec]:
        """This spec."""
        return [self]

    def order_of(self, spec: BlockSpec) -> tuple[int, ...]:
        """The grid as it is."""
        return tuple(range(self.grid_ndim))

    def has_edge(self, dim: int) -> bool:
        """Whether the last block of a dimension is smaller."""
        return self.view.shape[dim] % self.shape[dim] != 0

    def sizes(self) -> Tensor:
        """How many weights each block has: a grid of integers."""
        sizes = torch.ones((), dtype=torch.int64)
        for n, b in zip(self.view.shape, self.shape, strict=True):
            extent = (n - torch.arange(0, n, b)).clamp(max=b)
            sizes = sizes.unsqueeze(-1) * extent
        return sizes

    def numel_in(self, rectangle: Sequence[slice], order: Sequence[int]) -> int:
        """How many weights lie under a rectangle of the permuted grid."""
        bounds = [
            rectangle[d].indices(n * b)[:2] for d, n, b in zip(inverse(order), self.grid_shape, self.shape, strict=True)
        ]
        edges = zip(bounds, self.shape, self.view.shape, strict=True)
        return math.prod(max(0, min(hi * b, n) - lo * b) for (lo, hi), b, n in edges)

    def view_of(self, values: Tensor | None) -> View:
        """The view of the weights, or of a tensor of the parameter's shape or of the view's."""
        if values is None:
            return self.view
        if values.shape == self.param.shape:
            return self.view.like(values)
        if tuple(values.shape) == self.view.shape:
            return View.from_existing(values)
        raise LayoutError(
            f"values of shape {tuple(values.shape)} for {self}: they have neither the shape of the parameter, "
            f"{tuple(self.param.shape)}, nor that of the view, {self.view.shape}"
        )

    def window_of(self, rectangle: Sequence[slice], values: Tensor | None) -> tuple[View, tuple[int, ...]]:
        """The part of the view under a rectangle of the grid, and the one size that blocks have in it."""
        view, lengths = self.view_of(values), []
        layout = view.layout
        for d, (where, b) in enumerate(zip(rectangle, self.shape, strict=True)):
            low, high = where.start * b, min(where.stop * b, layout.shape[d])
            layout = layout.slice(d, low, high)
            lengths.append((high - low) // (where.stop - where.start))
        return View(view.param, layout.shape, layout.stride, layout.offset), tuple(lengths)

    def part(self, values: Tensor | None = None, others: Sequence[Tensor] = ()) -> BlockPart:
        """The blocks that this process holds, of the weights or of other values.

        Args:
            values: a tensor of the parameter's shape or of the view's; None for the weights.
            others: tensors of the parameter's shape that are read along with them.
        """
        if values is not None and values.shape != self.param.shape:
            return self.view_of(values).whole_part(self.shape)
        local, box = local_part(self.param if values is None else values)
        beside = [local_like(other, self.param) for other in others]
        return BlockPart.of_box(local, box, self.view.layout, Layout.of(self.param), self.shape, beside)

    def fold(
        self, stage: Stage, run: Fold, values: Tensor | None = None, others: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """A stage on the elements of all blocks, wherever they are held: for each of its folds a grid."""
        grids = self.part(values, others).fold(stage, run)
        return complete([(grid, kind, self.param) for grid, (_, kind) in zip(grids, stage.folds, strict=True)])

    def part_of_box(self, local: Tensor, box: Box) -> BlockPart:
        """The blocks as far as they lie in a box of the parameter that `local` holds: a shard."""
        return BlockPart.of_box(local, box, self.view.layout, Layout.of(self.param), self.shape)

    def block_view(self, values: Values = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """The blocks as a live tensor; see `View.block_view_of` for the three forms and for when they copy.

        A view with negative strides is copied, as `View.data` says. Smaller blocks at the edge have no such
        tensor; `reduce` and the other operations take them.
        """
        return View.block_view_of(self.view_of(self._values_of(self, values)).data, self.shape, reorder, merge)

    def expand_block_tensor(self, grid: Tensor) -> Tensor:
        """A grid over the elements of its blocks, `(B0, B1, …, b0, b1, …)` as `block_view` has it; no copy."""
        thin = self.grid_of(self, grid)[(..., *(None,) * self.grid_ndim)]
        return thin.expand(*self.grid_shape, *self.shape)

    def broadcast_block_to_element(self, grid: Tensor, fake: bool = False) -> Tensor:
        """A grid spread over the weights, in the view's shape; `fake` only inserts dimensions of size 1."""
        self.grid_of(self, grid)
        return View.broadcast_block_to_element(grid, self.shape, fake=True) if fake else self.expand_to_elements(grid)

    def expand_to_elements(self, grid: Tensor) -> Tensor:
        """A grid spread over the weights: a new tensor in the view's shape."""
        wide = View.broadcast_block_to_element(grid, self.shape)
        return wide[tuple(slice(n) for n in self.view.shape)]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BlockSpec)
            and self.view == other.view
            and (self.shape, self.edge) == (other.shape, other.edge)
        )

    def __hash__(self) -> int:
        return hash((self.view, self.shape))

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"BlockSpec({name}view={self.view.shape}, block={self.shape}, grid={self.grid_shape})"


class BlockCoupling(SparseBlock):
    """Lays the grids of several BlockSpecs on one another: one decision prunes the block in all.

    Args:
        specs: the BlockSpecs, each once.
        orders: for each spec how its grid is permuted so that all grids agree; None leaves them as they are.
        name: what errors and tables call it.

    Example:
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
    ) -> None:
        self.specs = list(specs)
        self.name = name
        label = f"coupling {name!r}" if name else "a coupling"
        if not self.specs:
            raise CouplingError(f"{label} of no specs: give at least one")
        self.orders = check_orders(label, [spec.grid_shape for spec in self.specs], orders)
        if len(set(self.specs)) != len(self.specs):
            twice = next(spec for spec in self.specs if self.specs.count(spec) > 1)
            raise CouplingError(f"{twice} stands in {label} twice: name each spec once")
        self._order_of = dict(zip(self.specs, self.orders, strict=True))
        self.grid_shape = permuted(self.specs[0].grid_shape, self.orders[0])

    @property
    def data(self) -> dict[BlockSpec, Tensor]:
        """The weights of each spec's view, live."""
        return {spec: spec.data for spec in self.specs}

    def blocks(self) -> list[BlockSpec]:
        """The specs that are coupled."""
        return list(self.specs)

    def order_of(self, spec: BlockSpec) -> tuple[int, ...]:
        """How the grid of a spec is permuted to become this grid."""
        return self._order_of[spec]

    def _values_of(self, spec: BlockSpec, values: Values) -> Tensor | None:
        if isinstance(values, Tensor):
            raise CouplingError(f"one tensor of values for {self}: give a mapping from each of its specs to a tensor")
        return super()._values_of(spec, values)

    def block_view(self, values: Values = None, reorder: bool = True, merge: bool = False) -> Tensor:
        """The blocks of all specs laid end to end, `(*grid_shape, numel_per_block)`.

        The specs lie in different storages, so this always copies, and there is only this one form.
        """
        parts = [
            spec.block_view(self._values_of(spec, values), merge=True).permute(*self.order_of(spec), self.grid_ndim)
            for spec in self.specs
        ]
        return joined(parts)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"BlockCoupling({name}{self.specs}, grid={self.grid_shape})"


def permuted(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """A shape with its dimensions in another order."""
    return tuple(shape[d] for d in order)


def check_orders(
    label: str, grids: Sequence[tuple[int, ...]], orders: Sequence[Sequence[int] | None] | None
) -> list[tuple[int, ...]]:
    """One permutation for each grid, such that all permuted grids agree."""
    given = [None] * len(grids) if orders is None else list(orders)
    if len(given) != len(grids):
        raise CouplingError(f"{label} has {len(grids)} members and {len(given)} orders: give one for each")
    found = []
    for grid, order in zip(grids, given, strict=True):
        found.append(tuple(range(len(grid))) if order is None else tuple(order))
        if sorted(found[-1]) != list(range(len(grid))):
            raise CouplingError(f"order {found[-1]} in {label} does not permute the {len(grid)} dimensions of {grid}")
        first, this = permuted(grids[0], found[0]), permuted(grid, found[-1])
        if first != this:
            raise CouplingError(
                f"the grids of {label} do not agree: {first} and {this} (the grids {grids[0]} and {grid} in the "
                f"orders {found[0]} and {found[-1]}). Change a block shape or an order"
            )
    return found
